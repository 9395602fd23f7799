"""Vectors from a transformer's hidden states, batch after batch.

Shape legend: N texts, B texts of a batch, T tokens, D vector width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ttt_adapt.embedding.inputs import check_texts, unit_rows
from ttt_adapt.embedding.pooling import Head
from ttt_adapt.embedding.tokenization import TextTokenizer, length_sorted_batches

BLOCK_TEXTS = 4096
"""Texts tokenised and sorted together: bounds memory, whatever the number of texts."""

BUDGET_TOKENS_PER_TEXT = 512
"""A batch holds at most ``batch_size`` times this many tokens: long texts come fewer at a time."""


class TransformerEmbedder:
    """A transformer with a pooling head; an :class:`ttt_adapt.types.Embedder`.

    Computes in float32, or with matrix products in bfloat16 (autocast: sums, norms and pooling
    stay float32). A text's vector depends on the others of its batch by rounding only; the same
    call gives the same bytes. Texts longer than the limit are represented by their beginning.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        head: Head,
        *,
        name: str,
        fingerprint: str,
        dtype: torch.dtype,
        device: str,
        batch_size: int,
        prompt: str = "",
    ) -> None:
        """
        Args:
            model: of transformers, in float32 and eval mode, on ``device``.
            tokenizer: gives the ids of each text.
            head: pools hidden states; on ``device``.
            name: for people.
            fingerprint: see :mod:`ttt_adapt.embedding.fingerprint`.
            dtype: of matrix products: float32 or bfloat16.
            device: a torch device.
            batch_size: texts a batch.
            prompt: put before every text.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._head = head
        self._name = name
        self._fingerprint = fingerprint
        self._dtype = dtype
        self._device = torch.device(device)
        self._batch_size = batch_size
        self._prompt = prompt
        with torch.inference_mode():
            probe = torch.zeros(1, 1, model.config.hidden_size, device=self._device)
            self._dimension = int(head(probe, torch.ones(1, device=self._device)).shape[1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 over weights, tokenizer, pooling, token limit and dtype."""
        return self._fingerprint

    @property
    def dimension(self) -> int:
        """D."""
        return self._dimension

    @property
    def description(self) -> str:
        """One line for people, e.g. ``all-MiniLM-L6-v2, bfloat16``."""
        return f"{self._name}, {str(self._dtype).removeprefix('torch.')}"

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        """Unit vectors float32 ``[N, D]`` in input order.

        Args:
            texts: any length; empty ones have a vector too.
            progress: gets the number of texts just finished, after each batch.

        Raises:
            CorpusError: see :func:`ttt_adapt.embedding.inputs.check_texts`.
            ModelError: a vector is not finite.
        """
        check_texts(texts)
        vectors_ND = np.empty((len(texts), self._dimension), dtype=np.float32)
        for start in range(0, len(texts), BLOCK_TEXTS):
            block = texts[start : start + BLOCK_TEXTS]
            token_ids = self._tokenizer([self._prompt + text for text in block])
            for batch in length_sorted_batches(
                [len(ids) for ids in token_ids],
                batch_size=self._batch_size,
                token_budget=self._batch_size * BUDGET_TOKENS_PER_TEXT,
            ):
                positions = [start + position for position in batch]
                vectors_BD = self._vectors([token_ids[position] for position in batch])
                vectors_ND[positions] = unit_rows(vectors_BD, positions)
                if progress is not None:
                    progress(len(batch))
        return vectors_ND

    @torch.inference_mode()
    def _vectors(self, token_ids: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        lengths = [len(ids) for ids in token_ids]
        # Padding's id does not matter, only that the model knows it: its states are masked out.
        ids_BT = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
        for row, ids in enumerate(token_ids):
            ids_BT[row, : len(ids)] = ids
        lengths_B = torch.tensor(lengths)
        mask_BT = (torch.arange(max(lengths)) < lengths_B[:, None]).long().to(self._device)
        bfloat16 = self._dtype == torch.bfloat16
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=bfloat16):
            hidden_BTH = self._model(
                input_ids=torch.from_numpy(ids_BT).to(self._device), attention_mask=mask_BT
            ).last_hidden_state
        vectors_BD = self._head(hidden_BTH, lengths_B.to(self._device))
        doubles_BD: NDArray[np.float64] = vectors_BD.double().cpu().numpy()
        return doubles_BD
