"""Train a small Llama-architecture language model from scratch on a mixture of corpora.

The output folder is a model directory that ``transformers`` loads (``config.json``,
``model.safetensors`` in half precision, tokenizer) with ``README.md`` (the model card),
``pretrain.toml`` (resolved settings), ``loss.csv`` and ``loss.json`` beside it; what is needed to
resume lies in its ``tokens/`` and ``checkpoints/``. Started again, the same command continues, and
on a CPU its result equals, bit for bit, that of an uninterrupted run with as many threads.
"""

import csv
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from ttt_adapt.config import PretrainSettings, to_toml
from ttt_adapt.errors import AdaptationError, CorpusError
from ttt_adapt.runtime import keep_freed_memory
from ttt_adapt.storage import atomic_write, stable_hash
from ttt_adapt.training.card import write_model
from ttt_adapt.training.checkpoint import load_checkpoint, save_checkpoint
from ttt_adapt.training.mixture import Mixture, packed_blocks, prepare_mixture, sampled_texts
from ttt_adapt.training.schedule import learning_rate_factor
from ttt_adapt.training.tokenizer import save_tokenizer, train_tokenizer

TOKENIZER_BYTES = 40_000_000

# What may change between a checkpoint and its continuation: how long and how often, not what.
EXTENSIBLE = (
    "name",
    "data_description",
    "num_tokens",
    "decay_fraction",
    "warmup_fraction",
    "validate_every",
    "validation_batches",
    "checkpoint_every",
)


@dataclass(frozen=True)
class PretrainResult:
    """What a finished (or, with ``stop_after``, interrupted) pretraining run reports.

    Attributes:
        folder: the model directory.
        num_steps: outer steps done in total.
        num_tokens: tokens trained on in total.
        validation_loss_nats: mean loss per token at the last validation; NaN without one.
        finished: whether the token budget is spent and the model written.
        elapsed_s: seconds of training in total, over all sessions.
    """

    folder: Path
    num_steps: int
    num_tokens: int
    validation_loss_nats: float
    finished: bool
    elapsed_s: float


def pretrain(
    settings: PretrainSettings,
    folder: Path,
    *,
    data_root: Path = Path(),
    stop_after: int | None = None,
    report: Callable[[str], None] = print,
) -> PretrainResult:
    """Train, or continue training, the model described by ``settings`` into ``folder``.

    Args:
        settings: architecture, mixture and schedule.
        folder: output directory; made if missing, continued if it holds checkpoints.
        data_root: where relative source paths start.
        stop_after: save and return after this many outer steps (to spread a run over sessions).
        report: receives one line of progress at a time.

    Raises:
        CorpusError: a source cannot be read or is empty.
        FingerprintMismatchError: ``folder`` holds a run with other settings.
        AdaptationError: the loss became NaN or infinite.
    """
    keep_freed_memory()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _obtain_tokenizer(settings, folder, data_root, report)
    mixture = prepare_mixture(settings, folder / "tokens", tokenizer, root=data_root, report=report)
    run = _Run(settings, folder, tokenizer, mixture, report)
    try:
        run.train(stop_after)
    except KeyboardInterrupt:
        run.save()
        report(f"interrupted: saved after step {run.step}; the same command continues")
        raise
    finished = run.step >= run.num_steps
    if finished:
        run.write_losses()
        write_model(run.model, tokenizer, settings, mixture, run.losses, run.elapsed_s, folder)
    return PretrainResult(
        folder=folder,
        num_steps=run.step,
        num_tokens=run.step * run.tokens_per_step,
        validation_loss_nats=run.validation_loss,
        finished=finished,
        elapsed_s=run.elapsed_s,
    )


def plan_pretraining(settings: PretrainSettings, data_root: Path = Path()) -> dict[str, Any]:
    """What a run would do, without reading or training: sizes, steps and memory.

    Raises:
        CorpusError: a source's file is missing.
    """
    for source in (*settings.sources, *settings.validation):
        path = data_root / source.path
        if not source.path.startswith("hub:") and not path.exists():
            raise CorpusError(f"{path}: no such file; name the data's folder with --data-root")
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in build_model(settings, 0).parameters())
    tokens_per_step = settings.batch_size * settings.max_length
    logits = settings.micro_batch_size * settings.max_length * settings.vocab_size
    return {
        "num_parameters": num_parameters,
        "num_steps": max(1, settings.num_tokens // tokens_per_step),
        "num_tokens": settings.num_tokens,
        "tokens_per_step": tokens_per_step,
        "model_bytes": 2 * num_parameters,
        # Weights, gradients, two moments, and logits with their gradient, in float32.
        "memory_bytes": 16 * num_parameters + 8 * logits,
    }


def build_model(settings: PretrainSettings, seed: int) -> Any:
    """A Llama of the settings' shape with tied embeddings, initialised from ``seed``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        initializer_range=0.02,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def build_optimizers(settings: PretrainSettings, model: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside the blocks and AdamW for the rest, or AdamW for all."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    rate, decay = settings.learning_rate, settings.weight_decay
    adamw: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-8}
    if settings.optimizer == "adamw":
        groups = [
            {"params": hidden, "weight_decay": decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, **adamw)]
    return [
        torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.0, **adamw),
    ]


class _Run:
    """The state of one training run."""

    def __init__(
        self,
        settings: PretrainSettings,
        folder: Path,
        tokenizer: Tokenizer,
        mixture: Mixture,
        report: Callable[[str], None],
    ) -> None:
        self.settings, self.folder, self.mixture, self.report = settings, folder, mixture, report
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build_model(settings, settings.seed).to(self.device).train()
        self.optimizers = build_optimizers(settings, self.model)
        self.tokens_per_step = settings.batch_size * settings.max_length
        self.num_steps = max(1, settings.num_tokens // self.tokens_per_step)
        self.key = stable_hash(
            {
                "settings": settings.model_dump(exclude=set(EXTENSIBLE)),
                "tokens": mixture.description["files"],
            }
        )
        self.step, self.elapsed_s, self.validation_loss = 0, 0.0, math.nan
        self.losses: list[dict[str, float]] = []
        state = load_checkpoint(folder / "checkpoints", self.model, self.optimizers, key=self.key)
        if state:
            self.step, self.losses = state["step"], state["losses"]
            self.elapsed_s = state["elapsed_s"]
            report(f"continuing after step {self.step} of {self.num_steps}")
        _, self.block = packed_blocks(mixture.train, settings.max_length, settings.seed)
        (folder / "pretrain.toml").write_text(to_toml(settings) + "\n", encoding="utf-8")

    def train(self, stop_after: int | None) -> None:
        settings = self.settings
        last = self.num_steps if stop_after is None else min(self.num_steps, stop_after)
        started, started_s, started_step = time.monotonic(), self.elapsed_s, self.step
        while self.step < last:
            loss = self._outer_step()
            self.step += 1
            self.elapsed_s = started_s + time.monotonic() - started
            row = {"step": self.step, "train_loss_nats": loss, "elapsed_s": self.elapsed_s}
            self.losses.append(row)
            if self.step % settings.validate_every == 0 or self.step == self.num_steps:
                row["validation_loss_nats"] = self.validation_loss = self._validate()
                self.write_losses()
            if self.step % settings.checkpoint_every == 0 or self.step == last:
                self.save()
            if self.step % 10 == 0 or self.step == last:
                rate = (self.step - started_step) / (self.elapsed_s - started_s)
                self.report(
                    f"step {self.step}/{self.num_steps}  loss {loss:.3f}  "
                    f"validation {self.validation_loss:.3f}  "
                    f"{rate * self.tokens_per_step:,.0f} tokens/s  "
                    f"{(self.num_steps - self.step) / rate / 60:.0f} min left"
                )

    def save(self) -> None:
        save_checkpoint(
            self.folder / "checkpoints",
            self.step,
            self.model,
            self.optimizers,
            {"key": self.key, "losses": self.losses, "elapsed_s": self.elapsed_s},
        )
        self.write_losses()

    def _outer_step(self) -> float:
        settings = self.settings
        factor = learning_rate_factor(
            self.step,
            self.num_steps,
            warmup_fraction=settings.warmup_fraction,
            decay_fraction=settings.decay_fraction,
        )
        first = self.step * settings.batch_size
        blocks = [self.block(first + position) for position in range(settings.batch_size)]
        total = 0.0
        for micro in _batched(blocks, settings.micro_batch_size):
            loss = self._loss(torch.from_numpy(np.stack(micro)), self._length())
            share = len(micro) / len(blocks)
            torch.autograd.backward(loss * share)
            total += float(loss.detach()) * share
        if not math.isfinite(total):
            raise AdaptationError(
                f"the training loss became {total} at step {self.step}; lower learning_rate "
                "and start again from the last checkpoint"
            )
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), settings.max_grad_norm, error_if_nonfinite=True
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _length(self) -> int:
        """Tokens per sequence now: short ones until the rate falls."""
        decay_from = self.num_steps - max(1, round(self.num_steps * self.settings.decay_fraction))
        early = self.settings.early_length
        return early if early and self.step < decay_from else self.settings.max_length

    def _loss(self, blocks: torch.Tensor, length: int) -> torch.Tensor:
        """Mean cross-entropy in nats of int64 blocks ``[batch, max_length + 1]``, cut to length."""
        blocks = blocks.to(self.device)
        inputs, targets = blocks[:, :-1].reshape(-1, length), blocks[:, 1:].reshape(-1)
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16"
        ):
            logits = self.model(input_ids=inputs).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets)

    @torch.no_grad()
    def _validate(self) -> float:
        length = self.settings.max_length
        num_blocks = (len(self.mixture.validation) - 1) // length
        if num_blocks < 1:
            return math.nan
        num_wanted = self.settings.validation_batches * self.settings.micro_batch_size
        starts = np.linspace(0, num_blocks - 1, min(num_blocks, num_wanted)).astype(int) * length
        blocks = [self.mixture.validation[s : s + length + 1].astype(np.int64) for s in starts]
        self.model.eval()
        total = sum(
            float(self._loss(torch.from_numpy(np.stack(micro)), length)) * len(micro)
            for micro in _batched(blocks, self.settings.micro_batch_size)
        )
        self.model.train()
        return total / len(blocks)

    def write_losses(self) -> None:
        columns = ["step", "train_loss_nats", "validation_loss_nats", "elapsed_s"]
        with atomic_write(self.folder / "loss.csv", "w") as stream:
            writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
            writer.writeheader()
            for row in self.losses:
                writer.writerow({k: v if k == "step" else f"{v:.5g}" for k, v in row.items()})


def _obtain_tokenizer(
    settings: PretrainSettings, folder: Path, root: Path, report: Callable[[str], None]
) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    report("training the tokenizer")
    # Round-robin over the sources, so that the limit cuts none of them off.
    streams = [sampled_texts(source, settings.seed, root) for source in settings.sources]
    texts = (
        text for group in itertools.zip_longest(*streams) for text in group if text is not None
    )
    tokenizer = train_tokenizer(texts, vocab_size=settings.vocab_size, max_bytes=TOKENIZER_BYTES)
    save_tokenizer(tokenizer, path)
    return tokenizer


def _batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
