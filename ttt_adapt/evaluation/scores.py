"""Sums of scores: what corpus-level bits per byte are the ratio of."""

import math
from collections.abc import Iterable

from ttt_adapt.types import Score


def add_scores(scores: Iterable[Score]) -> Score:
    """Σ nats (exactly rounded, so in any order), Σ bytes and Σ tokens."""
    scores = list(scores)
    return Score(
        nats=math.fsum(score.nats for score in scores),
        num_bytes=sum(score.num_bytes for score in scores),
        num_tokens=sum(score.num_tokens for score in scores),
    )
