"""Attention of a pretrained model replaced by test-time training, measured before and after."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.config import CorpusSettings, to_toml
from ttt_adapt.conversion_settings import ConvertSettings
from ttt_adapt.corpus import read_documents
from ttt_adapt.errors import CorpusError, SettingsError
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import LanguageModel, beginning_token, load_language_model, resolve_model
from ttt_adapt.models.loading import explain_failure
from ttt_adapt.storage import atomic_write, write_json


@dataclass(frozen=True, slots=True)
class Measured:
    """How well a model predicts the text: of exactly the same tokens at every stage.

    Attributes:
        perplexity: exp(nats / tokens).
        bits_per_byte: nats / (ln 2 · UTF-8 bytes).
    """

    perplexity: float
    bits_per_byte: float
    nats: float
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer converted alone, all others being the original's.

    Attributes:
        converted: at once.
        transferred: after attention transfer, where there was one.
        error: relative squared error of the layer's output on the text's beginning, at once;
            ``None`` without attention transfer.
        error_transferred: after it.
    """

    layer: int
    converted: Measured
    transferred: Measured | None = None
    error: float | None = None
    error_transferred: float | None = None


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What ``ttt-adapt convert`` did and measured; ``None`` where a stage was not run.

    Attributes:
        layers: indices of the converted layers.
        num_new_parameters: of these, what the original does not have.
        num_state_bytes: of one sequence's fast weights, whatever its length.
        num_cache_bytes_per_token: what the replaced attention keeps for each token; 0 if it stays.
        before, converted, transferred, distilled: the whole model: the original, at once, after
            attention transfer, after LoRA.
        num_train_tokens: learned from, in both stages.
        folder: where the model lies.
    """

    model: str
    to: str
    mode: str
    layers: tuple[int, ...]
    num_parameters: int
    num_new_parameters: int
    num_state_bytes: int
    num_cache_bytes_per_token: int
    before: Measured
    converted: Measured
    transferred: Measured | None
    distilled: Measured | None
    per_layer: tuple[LayerReport, ...]
    num_train_tokens: int
    elapsed_s: float
    folder: Path | None


def convert(
    settings: ConvertSettings,
    out: Path | None = None,
    *,
    report: Callable[[str], None] = print,
) -> ConversionReport:
    """Convert, measure, distil where the mode says so, measure again, and save.

    Args:
        settings: ``text`` is needed; ``train`` too where there is something to learn.
        out: the converted model's folder, with ``conversion.toml`` and ``conversion.json`` beside
            it; checkpoints of distillation lie there too. ``None``: nothing is saved.
        report: receives a line of progress at a time.

    Raises:
        SettingsError: no text, or a mode and texts that do not fit.
        ModelError, CorpusError: a model or text that cannot be used as asked.
        AdaptationError: a loss became NaN or infinite.
    """
    from ttt_adapt.models.conversion import convert_model, trained_parameters
    from ttt_adapt.models.conversion.saving import require_room, save_converted

    started = time.monotonic()
    _require_texts(settings)
    if out is not None:
        require_room(out)
    assert settings.text is not None
    texts = _texts(settings.text, settings.max_bytes)
    lm = load_language_model(settings.model)

    def measure(what: str) -> Measured:
        found = _measure(lm, model, texts, settings)
        report(f"{what}: perplexity {found.perplexity:.2f}, {found.bits_per_byte:.4f} bits/byte")
        return found

    model: Any = lm.model
    before = measure("before")
    model = convert_model(lm.model, settings.conversion)
    layers = _indices(model)
    converted = measure(f"{len(layers)} layers converted")
    stages = _Stages(settings, lm, model, out, report)
    alone = _each_alone(settings, lm, model, texts, "converted alone", report)
    errors = stages.errors(texts)
    transferred = distilled = None
    alone_after: dict[int, Measured] = {}
    if stages.transfer():
        transferred = measure("after attention transfer")
        alone_after = _each_alone(settings, lm, model, texts, "alone after transfer", report)
    errors_after = stages.errors(texts) if transferred else {}
    num_new = sum(p.numel() for p in trained_parameters(model).values())
    if stages.lora():
        distilled = measure("after LoRA")
    result = ConversionReport(
        model=settings.model.name,
        to=settings.conversion.to,
        mode=settings.conversion.mode,
        layers=layers,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_new_parameters=num_new,
        **_memory(model),
        before=before,
        converted=converted,
        transferred=transferred,
        distilled=distilled,
        per_layer=tuple(
            LayerReport(
                layer,
                found,
                alone_after.get(layer),
                errors.get(layer) if transferred else None,
                errors_after.get(layer),
            )
            for layer, found in alone.items()
        ),
        num_train_tokens=stages.num_tokens,
        elapsed_s=time.monotonic() - started,
        folder=out,
    )
    if out is not None:
        save_converted(model, lm.tokenizer, out)
        with atomic_write(out / "conversion.toml", "w") as stream:
            stream.write(to_toml(settings) + "\n")
        write_json(out / "conversion.json", _plain(result))
    return result


def plan_conversion(settings: ConvertSettings) -> dict[str, Any]:
    """What :func:`convert` would do, from the model's configuration alone.

    Raises:
        SettingsError, ModelError: as :func:`convert`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ttt_adapt.models.conversion import convert_model, trained_parameters

    _require_texts(settings)
    name = resolve_model(settings.model.name)
    try:
        config = AutoConfig.from_pretrained(
            name,
            trust_remote_code=settings.model.trust_remote_code,
            local_files_only=Path(name).is_dir(),
        )
    except Exception as error:  # whatever the libraries raise becomes one line
        raise explain_failure(error, settings.model) from error
    make: Any = AutoModelForCausalLM.from_config  # it has no types
    with torch.device("meta"):
        original = make(config)
    num_before = sum(p.numel() for p in original.parameters())
    model = convert_model(original, settings.conversion)
    steps, learning = settings.distillation, _learns(settings)
    num_steps = (
        steps.transfer_steps if learning and settings.conversion.mode == "distilled" else 0,
        steps.lora_steps if learning else 0,
    )
    return {
        "layers": list(_indices(model)),
        "num_parameters_before": num_before,
        "num_new_parameters": sum(p.numel() for p in trained_parameters(model).values()),
        **_memory(model),
        "transfer_steps": num_steps[0],
        "lora_steps": num_steps[1],
        "num_train_tokens": sum(num_steps) * steps.batch_size * steps.max_length,
    }


class _Stages:
    """Distillation as far as the mode and the texts go."""

    def __init__(
        self,
        settings: ConvertSettings,
        lm: LanguageModel,
        model: Any,
        out: Path | None,
        report: Callable[[str], None],
    ) -> None:
        from ttt_adapt.training.distillation import pack_tokens

        self.settings, self.lm, self.model, self.num_tokens = settings, lm, model, 0
        self.options: dict[str, Any] = {
            "seed": settings.seed,
            "folder": None if out is None else out / "checkpoints",
            "report": report,
        }
        self.learns = _learns(settings)
        if self.learns:
            assert settings.train is not None
            texts = (document.text for document in read_documents(settings.train))
            beginning = beginning_token(lm.tokenizer)
            self.tokens = pack_tokens(lm.tokenizer, texts, beginning, settings.max_train_tokens)

    def transfer(self) -> bool:
        from ttt_adapt.training.distillation import transfer_attention

        wanted = self.learns and self.settings.conversion.mode == "distilled"
        if not (wanted and self.settings.distillation.transfer_steps and _indices(self.model)):
            return False
        done = transfer_attention(
            self.model, self.tokens, self.settings.distillation, **self.options
        )
        self.num_tokens += done.num_tokens
        return True

    def lora(self) -> bool:
        from ttt_adapt.training.distillation import recover_with_lora

        if not (self.learns and self.settings.distillation.lora_steps):
            return False
        done = recover_with_lora(
            self.model, self.tokens, self.settings.distillation, **self.options
        )
        self.num_tokens += done.num_tokens
        return True

    @torch.no_grad()
    def errors(self, texts: list[str]) -> dict[int, float]:
        """Of each layer's output on the beginning of the text to measure on."""
        from ttt_adapt.training.distillation import transfer_errors

        if not (self.learns and self.settings.conversion.mode == "distilled"):
            return {}
        ids = self.lm.tokenizer(texts[0], add_special_tokens=False, verbose=False)["input_ids"]
        ids = [beginning_token(self.lm.tokenizer), *ids][: self.settings.distillation.max_length]
        found = transfer_errors(self.model, torch.tensor([ids], device=self.model.device))
        return {layer: float(error) for layer, error in found.items()}


def _each_alone(
    settings: ConvertSettings,
    lm: LanguageModel,
    model: Any,
    texts: list[str],
    what: str,
    report: Callable[[str], None],
) -> dict[int, Measured]:
    """Each layer's conversion by itself; nothing where gates are closed, for nothing changes."""
    from ttt_adapt.models.conversion import layers_in_role

    closed = settings.conversion.mode == "gated" and settings.conversion.alpha == 0.0
    layers = _indices(model)
    found: dict[int, Measured] = {}
    if not settings.per_layer or closed:
        return found
    for layer in layers:
        with layers_in_role(model, "original", tuple(i for i in layers if i != layer)):
            found[layer] = _measure(lm, model, texts, settings)
        report(f"layer {layer} {what}: perplexity {found[layer].perplexity:.2f}")
    return found


def _measure(
    lm: LanguageModel, model: Any, texts: list[str], settings: ConvertSettings
) -> Measured:
    length = settings.max_length or lm.max_length
    score = bits_per_byte(model, lm.tokenizer, texts, max_length=length).total
    # Of a broken model the mean may be beyond what a float can hold the exponential of.
    mean = score.nats / max(1, score.num_tokens)
    return Measured(
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        bits_per_byte=score.bits_per_byte,
        nats=score.nats,
        num_tokens=score.num_tokens,
        num_bytes=score.num_bytes,
    )


def _texts(source: CorpusSettings, max_bytes: int) -> list[str]:
    def cut() -> Iterator[str]:
        left = max_bytes
        for document in read_documents(source):
            piece = document.text.encode()[:left].decode("utf-8", "ignore")
            left -= len(piece.encode())
            if piece:
                yield piece
            if left <= 0 or not piece:
                return

    found = list(cut())
    if not found:
        raise CorpusError(f"{source.path}: no text to measure on; raise max_bytes")
    return found


def _require_texts(settings: ConvertSettings) -> None:
    mode = settings.conversion.mode
    if settings.text is None:
        raise SettingsError(
            "text: expected what perplexity is measured on, found nothing; give --text FILE (text, "
            "JSON lines, a folder), of a kind the model should still predict after conversion"
        )
    if mode == "distilled" and settings.train is None:
        raise SettingsError(
            "train: mode 'distilled' learns from text, found none; give --train FILE, other text "
            "than --text"
        )
    if mode == "pure" and settings.train is not None:
        raise SettingsError(
            "train: mode 'pure' has nothing to learn, found text to learn from; choose mode "
            "'distilled', or leave --train out"
        )


def _learns(settings: ConvertSettings) -> bool:
    return settings.train is not None


def _indices(model: Any) -> tuple[int, ...]:
    from ttt_adapt.models.conversion import converted_layers

    return tuple(layer.layer_idx for layer in converted_layers(model))


def _memory(model: Any) -> dict[str, int]:
    """Bytes of one sequence's fast weights, and of the keys and values that are not kept any more."""
    from ttt_adapt.models.conversion import converted_layers

    state = cache = 0
    for layer in converted_layers(model):
        state += layer.inner.num_state_values * 4  # float32
        if not layer.gated:
            shape = layer.shape
            cache += 2 * shape.num_key_value_heads * shape.width * model.dtype.itemsize
    return {"num_state_bytes": state, "num_cache_bytes_per_token": cache}


def _plain(report: ConversionReport) -> dict[str, Any]:
    """The report as JSON values."""
    from dataclasses import asdict

    values = asdict(report)
    values["folder"] = None if report.folder is None else str(report.folder)
    return values
