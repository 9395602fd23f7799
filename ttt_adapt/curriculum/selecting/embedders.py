"""Tasks to vectors: the policy's own hidden states, a sentence encoder, or feature hashing.

Shape legend: n texts, B texts of a batch, T tokens, H hidden width, D width of a vector.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.config import EmbeddingSettings, ModelSettings
from ttt_adapt.curriculum.selecting.settings import CurriculumSelectionSettings
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import ModelError, SettingsError
from ttt_adapt.storage import stable_hash
from ttt_adapt.types import Embedder

CODE_VERSION = "policy-1"
"""Changes whenever the same model and settings would give other vectors."""
BLOCK_TEXTS = 2048
"""Texts tokenised and sorted by length together."""


class TaskEmbedder(Protocol):
    """Tasks to vectors of any length; selection makes them unit vectors.

    Attributes:
        fingerprint: SHA-256 of everything but the texts that vectors depend on.
        dimension: D.
        description: one line for people.
        centred: whether the corpus' mean vector is to be subtracted from all.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def description(self) -> str: ...
    @property
    def centred(self) -> bool: ...

    def texts(self, tasks: Sequence[Task]) -> list[str]:
        """What is embedded of each task."""
        ...

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """``[n, D]`` in input order; ``progress`` gets the number of texts just finished."""
        ...


def load_task_embedder(settings: CurriculumSelectionSettings | None = None) -> TaskEmbedder:
    """The embedder that settings describe.

    Raises:
        ModelError: the model cannot be found or loaded.
        SettingsError: the model cannot honour a setting.
    """
    settings = settings or CurriculumSelectionSettings()
    if settings.embedder in ("sentence", "hashing"):
        return EncoderOfTasks(_load_encoder(settings), text=settings.text)
    from ttt_adapt.models.loading import load_language_model

    name = settings.model or ModelSettings().name
    language_model = load_language_model(
        ModelSettings(
            name=name,
            dtype=settings.dtype,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
        )
    )
    return PolicyEmbedder(language_model, settings)


def _load_encoder(settings: CurriculumSelectionSettings) -> Embedder:
    from ttt_adapt.embedding import load_embedder

    values: dict[str, Any] = {
        "kind": "hashing" if settings.embedder == "hashing" else "sentence-transformers",
        "dtype": settings.dtype,
        "device": settings.device,
        "max_tokens": settings.max_tokens,
        "batch_size": settings.batch_size,
        "trust_remote_code": settings.trust_remote_code,
    }
    if settings.model is not None:
        values["model"] = settings.model
    return load_embedder(EmbeddingSettings(**values))


class EncoderOfTasks:
    """Any :class:`ttt_adapt.types.Embedder` of texts as a :class:`TaskEmbedder`."""

    def __init__(self, encoder: Embedder, *, text: str = "auto", centred: bool = False) -> None:
        """
        Args:
            encoder: gives unit vectors.
            text: ``prompt`` or ``problem`` (also ``auto``), as in the settings.
            centred: see :class:`TaskEmbedder`.
        """
        self._encoder = encoder
        self._text = "problem" if text == "auto" else text
        self.centred = centred

    @property
    def fingerprint(self) -> str:
        return self._encoder.fingerprint

    @property
    def dimension(self) -> int:
        return self._encoder.dimension

    @property
    def description(self) -> str:
        return f"{self._encoder.description}, of each task's {self._text}"

    def texts(self, tasks: Sequence[Task]) -> list[str]:
        return texts_of(tasks, self._text)

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        return self._encoder.embed(texts, progress=progress)


class PolicyEmbedder:
    """The last hidden states of a language model, after its final norm.

    Source: last token: Hübotter et al. 2025 (TTC-RL); the mean, with the corpus' mean subtracted:
    what all prompts share says nothing about which one helps with which.
    """

    def __init__(
        self, language_model: Any, settings: CurriculumSelectionSettings | None = None
    ) -> None:
        """
        Args:
            language_model: a :class:`ttt_adapt.models.language_model.LanguageModel`, also one made
                of modules in memory by ``wrap_language_model``.
            settings: ``embedder`` must be one of the policy's.

        Raises:
            SettingsError: another kind of embedder, or more tokens than the model has positions.
        """
        settings = settings or CurriculumSelectionSettings()
        if settings.embedder not in ("policy-mean", "policy-last"):
            raise SettingsError(
                f"embedder: expected 'policy-mean' or 'policy-last' for a language model, found "
                f"{settings.embedder!r}"
            )
        limit = int(language_model.max_length)
        if settings.max_tokens is not None and settings.max_tokens > limit:
            raise SettingsError(
                f"max_tokens {settings.max_tokens} exceeds the {limit} that {language_model.name} "
                f"reads; set at most {limit}"
            )
        tokenizer = language_model.tokenizer
        self._model = language_model
        self._max_tokens = settings.max_tokens or limit
        self._batch_size = settings.batch_size
        self._text = "prompt" if settings.text == "auto" else settings.text
        self._pooling = "mean" if settings.embedder == "policy-mean" else "last"
        template = getattr(tokenizer, "chat_template", None)
        self._template = template if settings.chat_template == "auto" else None
        self.centred = self._pooling == "mean"
        self._fingerprint = stable_hash(
            {
                "code": CODE_VERSION,
                "model": language_model.fingerprint,
                "pooling": self._pooling,
                "max_tokens": self._max_tokens,
                "template": self._template,
            }
        )

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def dimension(self) -> int:
        return int(self._model.model.get_input_embeddings().weight.shape[1])

    @property
    def description(self) -> str:
        how = "mean of hidden states, centred" if self.centred else "last token's hidden state"
        wrapped = ", chat template" if self._template else ""
        return f"{self._model.name}, {how}, of each task's {self._text}{wrapped}"

    def texts(self, tasks: Sequence[Task]) -> list[str]:
        plain = texts_of(tasks, self._text)
        if not self._template:
            return plain
        render = self._model.tokenizer.apply_chat_template
        return [str(render([{"role": "user", "content": text}], tokenize=False)) for text in plain]

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """``[n, H]``; a text's vector depends on the others of its batch by rounding only.

        Raises:
            CorpusError: not a sequence of texts with a UTF-8 form.
            ModelError: a vector is not finite.
        """
        from ttt_adapt.embedding.inputs import check_texts
        from ttt_adapt.embedding.tokenization import length_sorted_batches

        check_texts(texts)
        vectors_nD = np.empty((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(texts), BLOCK_TEXTS):
            token_ids = self._token_ids(list(texts[start : start + BLOCK_TEXTS]))
            for batch in length_sorted_batches(
                [len(ids) for ids in token_ids],
                batch_size=self._batch_size,
                token_budget=self._batch_size * 512,
            ):
                positions = [start + position for position in batch]
                vectors = self._vectors([token_ids[position] for position in batch])
                if not np.isfinite(vectors).all():
                    raise ModelError(
                        f"{self._model.name}: text {positions[0]} or one beside it has a vector "
                        "that is not finite; its weights are damaged or overflow in this dtype "
                        "(try dtype='float32')"
                    )
                vectors_nD[positions] = vectors
                if progress is not None:
                    progress(len(batch))
        return vectors_nD

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        from ttt_adapt.models.language_model import beginning_token

        tokenizer = self._model.tokenizer
        # A template writes the special tokens itself.
        encoded = tokenizer(texts, add_special_tokens=not self._template).input_ids
        return [
            list(ids)[-self._max_tokens :] if ids else [beginning_token(tokenizer)]
            for ids in encoded
        ]

    def _vectors(self, token_ids: Sequence[list[int]]) -> NDArray[np.float32]:
        import torch

        from ttt_adapt.embedding.pooling import POOLINGS

        model = self._model.model
        lengths_B = torch.tensor([len(ids) for ids in token_ids])
        ids_BT = torch.zeros((len(token_ids), int(lengths_B.max())), dtype=torch.long)
        for row, ids in enumerate(token_ids):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
        # Padding on the right of a causal model: no real token sees it, and positions are right.
        mask_BT = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).long()
        inner = without_head(model)
        with torch.inference_mode():
            hidden_BTH = inner(
                input_ids=ids_BT.to(model.device),
                attention_mask=mask_BT.to(model.device),
                use_cache=False,
            ).last_hidden_state.float()
            pooled_BD = POOLINGS[self._pooling](hidden_BTH, lengths_B.to(model.device).float())
        vectors: NDArray[np.float32] = pooled_BD.cpu().numpy()
        return vectors


def without_head(model: Any) -> Any:
    """The part of a language model that gives hidden states, adapters included."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    while hasattr(inner, "lm_head") or inner.get_output_embeddings() is not None:
        if inner.base_model is inner:
            break
        inner = inner.base_model
    return inner


def texts_of(tasks: Sequence[Task], text: str) -> list[str]:
    """The prompt or the problem of each task."""
    return [task.problem if text == "problem" else task.prompt for task in tasks]
