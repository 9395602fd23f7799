"""Loading a causal language model: safetensors only, no code of strangers, errors of one line."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ttt_adapt.config import ModelSettings
from ttt_adapt.errors import ModelError
from ttt_adapt.models.checkpoints import (
    bundled_models,
    checkpoint_fingerprint,
    checkpoint_folder,
    require_safetensors,
    resolve_model,
)
from ttt_adapt.models.language_model import (
    LanguageModel,
    beginning_token,
    position_limit,
    require_vocabulary,
    tokenizer_hash,
)
from ttt_adapt.runtime import quiet_transformers, resolve_device

# Every exception type that transformers, huggingface_hub and safetensors are known to raise when a
# model cannot be loaded (SafetensorError and httpx' errors derive from Exception directly).
_LOAD_FAILURES = (Exception,)


def load_language_model(settings: ModelSettings) -> LanguageModel:
    """Load a bundled model, a local directory or a hub id.

    Weights come from safetensors only. ``settings.trust_remote_code`` is handed on as it is, so
    code in a model's repository runs only if asked for and the user is never prompted. A local
    directory is loaded without network. ``settings.dtype`` is the dtype in memory, whatever the
    checkpoint's.

    Raises:
        ModelError: no such model, no safetensors, gated or offline, weights missing from the
            checkpoint, not a causal language model, or a tokenizer that does not fit.
    """
    name = resolve_model(settings.name)
    local = Path(name).is_dir()
    if local:
        require_safetensors(Path(name))
    elif _is_path(name):
        raise ModelError(f"{name}: no such directory; {_remedy()}")
    try:
        with quiet_transformers():
            tokenizer, model, missing = _from_pretrained(name, settings, local)
        folder = checkpoint_folder(name, settings.revision)
    except _LOAD_FAILURES as error:
        raise explain_failure(error, settings) from error
    if missing:
        raise ModelError(
            f"{settings.name}: the checkpoint lacks {len(missing)} weights of a causal language "
            f"model ({', '.join(sorted(missing)[:3])}); expected one saved with its head"
        )
    beginning_token(tokenizer)
    require_vocabulary(model, tokenizer, settings.name)
    model.eval()
    _require_causal(model, settings.name)
    fingerprint = checkpoint_fingerprint(
        folder, tokenizer=tokenizer_hash(tokenizer), dtype=settings.dtype
    )
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        name=settings.name,
        fingerprint=fingerprint,
        max_length=position_limit(model.config),
    )


def explain_failure(error: Exception, settings: ModelSettings) -> ModelError:
    """The one line a user needs when a library failed to load a model."""
    kinds = {type(cause).__name__ for cause in _causes(error)}
    text = " ".join(str(error).split())
    name = settings.name
    if "GatedRepoError" in kinds or "gated repo" in text:
        return ModelError(
            f"{name}: access to this model is gated; accept its terms on its hub page and run "
            "`hf auth login`"
        )
    if "trust_remote_code" in text:
        return ModelError(
            f"{name}: needs code from its own repository; read that code, then set "
            "trust_remote_code = true"
        )
    if "RevisionNotFoundError" in kinds:
        return ModelError(f"{name}: no such revision {settings.revision}; leave revision unset")
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        return ModelError(f"{name}: no such model on the hub (or it is private); {_remedy()}")
    if kinds & _OFFLINE_KINDS or "offline" in text.lower() or "couldn't connect" in text.lower():
        return ModelError(
            f"{name}: not in the local cache and the hub cannot be reached; {_remedy()}"
        )
    if "Unrecognized configuration class" in text:
        return ModelError(
            f"{name}: not a causal language model; expected an architecture that "
            "AutoModelForCausalLM knows"
        )
    if "safetensors" in text and ("not appear to have" in text or "no file named" in text):
        return ModelError(
            f"{name}: expected weights in safetensors, found none; convert them with "
            "model.save_pretrained(...)"
        )
    return ModelError(f"{name}: cannot be loaded: {type(error).__name__}: {text[:300]}")


_OFFLINE_KINDS = {
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
    "ReadTimeout",
}


def _from_pretrained(name: str, settings: ModelSettings, local: bool) -> tuple[Any, Any, set[str]]:
    import transformers

    # Registers our own architectures.
    from ttt_adapt.models import conversion, ttt  # noqa: F401

    shared: dict[str, Any] = {
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": local,
    }
    if local:
        del shared["revision"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **shared)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        name,
        use_safetensors=True,
        dtype=getattr(torch, settings.dtype),
        output_loading_info=True,
        **shared,
    )
    model, info = loaded
    return tokenizer, model.to(resolve_device(settings.device)), set(info["missing_keys"])


def _require_causal(model: Any, name: str) -> None:
    """Two inputs that differ in their last token must get the same prediction before it."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: not a causal language model but an encoder and a decoder")
    rows = int(model.get_input_embeddings().weight.shape[0])
    first_id, *others = [i for i in range(min(rows, 8)) if i != model.config.pad_token_id][:3]
    tokens = torch.tensor([[first_id, other] for other in others], device=model.device)
    with torch.no_grad():
        first, second = model(input_ids=tokens, use_cache=False).logits[:, 0].float()
    # Above what rounding does to two rows of one batch, below what a visible token changes.
    rounding = 1e-5 if model.dtype == torch.float32 else 2e-2
    tolerance = rounding * float(first.abs().max())
    difference = float((first - second).abs().max())
    if not math.isnan(difference) and difference > tolerance:
        raise ModelError(
            f"{name}: not a causal language model: a later token changes an earlier prediction"
        )


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _remedy() -> str:
    known = ", ".join(bundled_models()) or "none"
    return f"give a local directory, a hub id, or a bundled model ({known})"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
