"""What a finished pretraining run leaves: a model directory that explains itself."""

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ttt_adapt.config import PretrainSettings
from ttt_adapt.runtime import versions
from ttt_adapt.storage import atomic_write
from ttt_adapt.training.mixture import Mixture
from ttt_adapt.training.tokenizer import BEGINNING, PADDING

MODEL_FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "loss.csv",
    "model.safetensors",
    "pretrain.toml",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What to copy when the model is shipped; ``tokens/`` and ``checkpoints/`` stay behind."""


ARCHITECTURES = {
    "llama": "the Llama architecture",
    "transformer": "the Transformer++ architecture",
    "linear-attention": "linear attention",
    "ttt-linear": "TTT-Linear layers, whose hidden state is a linear model that learns as it reads",
    "ttt-mlp": "TTT-MLP layers, whose hidden state is a small network that learns as it reads",
}


def write_model(
    model: Any,
    tokenizer: Tokenizer,
    settings: PretrainSettings,
    mixture: Mixture,
    losses: list[dict[str, float]],
    elapsed_s: float,
    folder: Path,
) -> None:
    """Save weights in float16, the tokenizer and the model card into ``folder``."""
    import transformers

    half = type(model)(model.config)
    half.load_state_dict(model.state_dict())
    half = half.to(torch.float16)
    half.config.use_cache = True
    half.generation_config.use_cache = True
    console: Any = transformers.utils.logging  # its functions have no types
    console.disable_progress_bar()
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    make: Any = transformers.PreTrainedTokenizerFast  # its constructor has no types
    make(
        tokenizer_object=tokenizer,
        bos_token=BEGINNING,
        eos_token=BEGINNING,
        pad_token=PADDING,
        model_max_length=settings.max_length,
    ).save_pretrained(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with atomic_write(folder / "README.md", "w") as stream:
        stream.write(model_card(settings, mixture, losses, elapsed_s, num_parameters))


def model_card(
    settings: PretrainSettings,
    mixture: Mixture,
    losses: list[dict[str, float]],
    elapsed_s: float,
    num_parameters: int,
) -> str:
    """The card: what the model is, what it saw, how it was trained, what it is not for."""
    description = mixture.description
    used = settings.skip_tokens + len(losses) * settings.batch_size * settings.max_length
    share = used / max(1, len(mixture.train))
    before = f", {settings.skip_tokens / 1e6:.1f} of them before" if settings.skip_tokens else ""
    rows = "\n".join(
        f"| {entry['name']}{_related(entry)} | {entry['fraction']:.0%} | {entry['num_documents']:,} "
        f"| {entry['num_bytes'] / 1e6:.1f} | {entry['num_tokens'] / 1e6:.2f} |"
        for entry in description["train"]
    )
    loss = last_validation_loss(losses)
    early = f" ({settings.early_length} before the decay)" if settings.early_length else ""
    return f"""# {settings.name}

A small language model of {ARCHITECTURES[settings.architecture]}, trained
{_start(settings)} by `ttt-adapt pretrain` with the settings in `pretrain.toml`. It is made to be adapted at test time on a laptop, and for
tests; on its own it is a weak model. It can repeat mistakes, names and opinions of its sources.

| | |
|---|---|
| parameters | {num_parameters:,} (input and output embeddings tied), stored in float16 |
| architecture | {_architecture(settings)} |
| shape | {settings.num_layers} layers, width {settings.hidden_size}, {settings.num_heads} heads, \
feed-forward {settings.intermediate_size} |
| vocabulary | byte-level BPE, {settings.vocab_size:,}; `{BEGINNING}` begins and ends every text |
| context | {settings.max_length} tokens{early} |
| tokens seen | {used / 1e6:.1f} million, {share:.2f} passes over the mixture below{before} |
| optimizer | {settings.optimizer}, peak rate {settings.learning_rate:g}, \
batches of {settings.batch_size * settings.max_length:,} tokens, seed {settings.seed} |
| schedule | warm-up {settings.warmup_fraction:.0%}, {_decay(settings)} |
| training time | {elapsed_s / 60:.0f} minutes |
| validation loss | {loss:.3f} nats a token{_bits(loss, description)} |

## What it saw

Documents chosen by a hash of their text, in these shares.

| source | share | documents | MB | million tokens |
|---|---|---|---|---|
{rows}

{settings.data_description}

Trained with Python {versions()["python"]}, torch {versions()["torch"]}, \
transformers {versions()["transformers"]}.
"""


def last_validation_loss(losses: list[dict[str, float]]) -> float:
    """Nats a token at the last step that was validated; NaN where none was."""
    validated = (
        row["validation_loss_nats"] for row in reversed(losses) if "validation_loss_nats" in row
    )
    return next(validated, math.nan)


def _start(settings: PretrainSettings) -> str:
    if settings.initial_parts == "all":
        before = settings.initial_model
        return f"further, from the weights of `{Path(before).name}`," if before else "from scratch"
    return (
        f"from the embeddings, norms and feed-forward layers of `{settings.initial_model}` (layers "
        "that mix tokens began anew)"
    )


def _architecture(settings: PretrainSettings) -> str:
    if settings.architecture == "linear-attention":
        return f"{settings.architecture}, feature map {settings.feature_map}"
    if not settings.architecture.startswith("ttt-"):
        return settings.architecture
    rate = "" if settings.base_lr is None else f", inner rate {settings.base_lr:g}"
    if not settings.learnable_lr:
        rate += ", not learned"
    if not settings.inner_norm:
        rate += ", no inner norm"
    if not settings.learnable_w0:
        rate += ", W0 = 0"
    return (
        f"{settings.architecture}, {settings.backbone} backbone, mini-batches of "
        f"{settings.mini_batch_size} tokens{rate}"
    )


def _decay(settings: PretrainSettings) -> str:
    end = f" to {settings.final_learning_rate:g}" if settings.final_learning_rate else ""
    if settings.schedule == "cosine":
        return f"then half a cosine{end}"
    return f"constant, linear decay{end} over the last {settings.decay_fraction:.0%}"


def _related(entry: dict[str, Any]) -> str:
    if "num_related_passages" not in entry:
        return ""
    return f", {entry['num_related_passages']:,} passages, each after one it resembles"


def _bits(loss_nats: float, description: dict[str, Any]) -> str:
    num_tokens = sum(entry["num_tokens"] for entry in description["validation"])
    num_bytes = sum(entry["num_bytes"] for entry in description["validation"])
    if not num_bytes or math.isnan(loss_nats):
        return ""
    return f", about {loss_nats * num_tokens / num_bytes / math.log(2):.3f} bits a byte"
