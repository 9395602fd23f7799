"""The mixture: samples that don't depend on order, packing that loses and repeats nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.config import SourceSettings
from ttt_adapt.errors import CorpusError
from ttt_adapt.training.mixture import is_sampled, packed_blocks, under
from ttt_adapt.training.schedule import learning_rate_factor


def test_sample_has_the_asked_share_and_depends_on_the_seed() -> None:
    texts = [f"text {number}" for number in range(4000)]
    share = np.mean([is_sampled(text, 0.3, 0) for text in texts])
    assert abs(share - 0.3) < 0.03
    assert [is_sampled(t, 0.3, 0) for t in texts] != [is_sampled(t, 0.3, 1) for t in texts]
    assert all(is_sampled(text, 1.0, 0) for text in texts)
    assert not any(is_sampled(text, 0.0, 0) for text in texts)


def test_smaller_sample_is_part_of_a_larger_one() -> None:
    texts = [f"text {number}" for number in range(500)]
    small = {text for text in texts if is_sampled(text, 0.2, 5)}
    assert small < {text for text in texts if is_sampled(text, 0.6, 5)}


@settings(deadline=None)
@given(st.integers(5, 400), st.integers(1, 20), st.integers(0, 3))
def test_blocks_cover_each_target_once_an_epoch(num: int, length: int, seed: int) -> None:
    tokens = np.arange(num, dtype=np.uint16)
    if num - 1 < length:
        with pytest.raises(CorpusError):
            packed_blocks(tokens, length, seed)
        return
    num_blocks, block = packed_blocks(tokens, length, seed)
    for epoch in range(2):
        blocks = [block(epoch * num_blocks + position) for position in range(num_blocks)]
        targets = np.sort(np.concatenate([item[1:] for item in blocks]))
        assert np.array_equal(targets, np.arange(1, num_blocks * length + 1))
        assert all(np.array_equal(item[1:], item[:-1] + 1) for item in blocks)


def test_schedule_rises_holds_and_falls() -> None:
    factors = [
        learning_rate_factor(step, 100, warmup_fraction=0.1, decay_fraction=0.3)
        for step in range(100)
    ]
    assert factors[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert set(factors[9:70]) == {1.0}
    assert factors[70:] == pytest.approx([(100 - step) / 30 for step in range(70, 100)])


def test_hub_data_sets_are_not_looked_for_under_the_data_s_folder(tmp_path: Path) -> None:
    for source in (
        SourceSettings(path="hub:owner/name"),
        SourceSettings(path="owner/name", format="hub"),
    ):
        assert under(source, tmp_path) == source
    assert under(SourceSettings(path="a.jsonl"), tmp_path).path == str(tmp_path / "a.jsonl")
