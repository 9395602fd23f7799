"""Loss by position: windows and bins against one token at a time."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.errors import SettingsError
from ttt_adapt.evaluation.positions import losses_by_position, position_bins, segments_of
from ttt_adapt.testing import tiny_model


def slow(model: Any, tokens: np.ndarray[Any, Any], window: int, stride: int) -> list[float]:
    found = []
    for target in range(1, len(tokens)):
        # The window that scores it ends where its stride does.
        stop = window
        while stop < target:
            stop += stride
        stop = min(stop, len(tokens) - 1)
        begin = max(0, stop - window)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(tokens[None, begin:target])).logits[0, -1]
        found.append(-float(torch.log_softmax(logits.double(), -1)[tokens[target]]))
    return found


@pytest.mark.parametrize("architecture", ["llama", "ttt_linear"])
@pytest.mark.parametrize(("window", "stride"), [(None, None), (8, 8), (8, 3), (8, 1), (64, 2)])
def test_every_token_is_scored_once_in_its_window(
    architecture: str, window: int | None, stride: int | None
) -> None:
    model = tiny_model(architecture=architecture)
    segments = np.random.default_rng(0).integers(2, 258, (2, 22))
    found = losses_by_position(model, segments, window=window, stride=stride)
    length = 21 if window is None else min(window, 21)
    expected = [slow(model, row, length, stride or length) for row in segments]
    np.testing.assert_allclose(found, expected, atol=2e-5)


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 20), st.integers(1, 9))
def test_segments_are_stretches_of_documents(
    lengths: list[int], length: int, num_segments: int
) -> None:
    documents = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    possible = sum(max(0, (n - 1) // length) for n in lengths)
    if not possible:
        with pytest.raises(SettingsError, match=f"more than {length} tokens"):
            segments_of(documents, length, num_segments)
        return
    found = segments_of(documents, length, num_segments)
    assert found.shape == (min(possible, num_segments), length + 1)
    assert len({int(row[0]) for row in found}) == len(found)
    assert (np.diff(found, axis=1) == 1).all() and (found[:, 0] // 100 == found[:, -1] // 100).all()


def test_bins_are_means_over_segments() -> None:
    losses = np.array([[1.0, 3.0, 5.0, 5.0, 9.0], [3.0, 3.0, 5.0, 7.0, 9.0]])
    bins = position_bins(losses, [0, 1, 2, 4, 8])
    assert [(b.first, b.last, b.loss_nats) for b in bins] == [(0, 1, 2.0), (1, 2, 3.0), (2, 4, 5.5)]
    assert [b.stderr_nats for b in bins] == pytest.approx([1.0, 0.0, 0.5])
    assert math.isnan(position_bins(losses[:1], [0, 1])[0].stderr_nats)


def test_windows_that_do_not_move() -> None:
    with pytest.raises(SettingsError, match="at least 1, found 4, 0"):
        losses_by_position(tiny_model(), np.zeros((1, 9), dtype=np.int64), window=4, stride=0)
