"""Loss by position: does a model predict better the more it has read?

Kaplan et al. 2020 (arXiv 2001.08361), figure 20; figure 5 of Sun et al. 2024 (arXiv 2407.04620).

Shape legend: S segments of long documents, L positions.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ttt_adapt.errors import SettingsError

_ROWS_OF_LOGITS = 2048


@dataclass(frozen=True, slots=True)
class PositionBin:
    """Positions ``first`` to ``last`` (excluded), counted from 0 at a segment's first target.

    Attributes:
        loss_nats: mean over segments of the segment's mean in these positions.
        stderr_nats: standard error of that mean, by segments; NaN for a single one.
    """

    first: int
    last: int
    loss_nats: float
    stderr_nats: float


def segments_of(
    documents: Sequence[Sequence[int]], length: int, num_segments: int
) -> NDArray[np.int64]:
    """``[S, length + 1]``: whole consecutive stretches of documents, at most ``num_segments``.

    A document gives as many as it holds, one after the other; of all of them those are taken that
    lie evenly over the documents' order.

    Args:
        documents: token ids of each, its beginning token included.

    Raises:
        SettingsError: no document is long enough.
    """
    found = [
        np.asarray(document[start : start + length + 1], dtype=np.int64)
        for document in documents
        for start in range(0, len(document) - length, length)
    ]
    if not found or num_segments < 1:
        longest = max(map(len, documents), default=0)
        raise SettingsError(
            f"expected a document of more than {length} tokens, found at most {longest}; "
            "lower the length"
        )
    chosen = np.linspace(0, len(found) - 1, min(num_segments, len(found))).round().astype(int)
    return np.stack([found[index] for index in chosen])


@torch.no_grad()
def losses_by_position(
    model: Any,
    segments: NDArray[np.int64],
    *,
    window: int | None = None,
    stride: int | None = None,
    precision: str = "float32",
) -> NDArray[np.float64]:
    """Nats of each target, ``[S, L]`` for segments ``[S, L + 1]``.

    Args:
        model: a causal language model in eval mode.
        window: tokens that the model reads at a time; ``None``: all, in one pass. Later windows
            read again what lies up to ``window − stride`` tokens before the ones they score.
        stride: tokens that a later window scores; ``None``: ``window``, i.e. disjoint windows.
        precision: ``float32`` or ``bfloat16`` (autocast).

    Raises:
        SettingsError: a stride that is not within the window.
    """
    length = segments.shape[1] - 1
    window = length if window is None else min(window, length)
    stride = window if stride is None else min(stride, window)
    if window < 1 or stride < 1:
        raise SettingsError(f"expected window and stride of at least 1, found {window}, {stride}")
    device = next(model.parameters()).device
    losses = np.empty((len(segments), length))
    for row, tokens in enumerate(torch.from_numpy(segments).to(device)):
        done = 0
        while done < length:
            stop = min(length, done + (stride if done else window))
            begin = max(0, stop - window)
            found = _nats(model, tokens[begin:stop], tokens[begin + 1 : stop + 1], precision)
            losses[row, done:stop] = found[done - begin :].double().cpu().numpy()
            done = stop
    return losses


def position_bins(losses: NDArray[np.float64], bounds: Sequence[int]) -> list[PositionBin]:
    """Means of ``[S, L]`` between neighbouring bounds; those beyond L are left out."""
    bins = []
    for first, last in itertools.pairwise(bounds):
        part = losses[:, first:last]
        if part.shape[1] < last - first:
            break
        means = part.mean(1)
        spread = means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        bins.append(PositionBin(first, last, float(means.mean()), float(spread)))
    return bins


def _nats(model: Any, inputs: torch.Tensor, targets: torch.Tensor, precision: str) -> torch.Tensor:
    """``[T]``; logits are made of some rows at a time, for all would be the largest thing in memory."""
    body, head = model.base_model, model.get_output_embeddings()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        hidden = body(input_ids=inputs[None], use_cache=False).last_hidden_state[0]
        return torch.cat(
            [
                functional.cross_entropy(head(part).float(), wanted, reduction="none")
                for part, wanted in zip(
                    torch.split(hidden, _ROWS_OF_LOGITS),
                    torch.split(targets, _ROWS_OF_LOGITS),
                    strict=True,
                )
            ]
        )
