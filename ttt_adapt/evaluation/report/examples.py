"""Queries worth reading: where the best arm gained most, gained typically, lost most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ttt_adapt.evaluation.report.pairing import Arm, Pairing
from ttt_adapt.types import Source

NEAR_DUPLICATE = 0.8
"""Share of word 5-grams in common from which two passages count as nearly the same."""
_NGRAM = 5


@dataclass(frozen=True, slots=True)
class Learnt:
    """A passage and the earlier one it repeats.

    Attributes:
        repeats: position (from 0) of the first passage with the same or nearly the same text
            among those before; ``None`` for a new one.
        exact: whether the text is the same, white space aside.
    """

    source: Source
    repeats: int | None
    exact: bool


@dataclass(frozen=True, slots=True)
class ArmExample:
    """What one arm did with a query; passages in order of use.

    Attributes:
        reduction: share of the base model's bits saved after all steps; NaN when unknown.
    """

    arm: Arm
    bits_per_byte: float
    reduction: float
    passages: tuple[Learnt, ...]

    @property
    def num_repeats(self) -> int:
        return sum(passage.repeats is not None for passage in self.passages)


@dataclass(frozen=True, slots=True)
class Example:
    """A query and why it is shown."""

    heading: str
    query_id: str
    subset: str
    num_bytes: int
    base_bits_per_byte: float
    arms: tuple[ArmExample, ...]


def choose_examples(pairing: Pairing) -> list[Example]:
    """The queries of largest gain, median and largest loss of the best arm; ties by order."""
    ranked = pairing.ranked
    if not ranked:
        return []
    best = ranked[0]
    reductions, base = best.reductions_Q, best.base_Q
    assert reductions is not None and base is not None
    order = [
        int(position)
        for position in np.argsort(-reductions, kind="stable")
        if math.isfinite(reductions[position])
    ]
    if not order:
        return []
    worst = "Largest loss" if reductions[order[-1]] < 0 else "Smallest gain"
    first = "Largest gain" if reductions[order[0]] > 0 else "Smallest loss"
    wanted = [(first, order[0]), ("Median", order[len(order) // 2]), (worst, order[-1])]
    if len(order) < 3:
        wanted = [wanted[0], wanted[-1]][: len(order)]
    return [
        Example(
            heading=f"{heading} of {best.label}"
            if heading != "Median"
            else f"Median for {best.label}",
            query_id=pairing.query_ids[position],
            subset=pairing.subsets[position],
            num_bytes=int(pairing.texts.num_bytes_Q[position]),
            base_bits_per_byte=_bits(float(base[position]), pairing, position),
            arms=tuple(
                _arm_example(arm, pairing, position)
                for arm in pairing.arms
                if arm.points and not arm.is_base
            ),
        )
        for heading, position in wanted
    ]


def mark_repeats(sources: Sequence[Source]) -> list[Learnt]:
    """Find passages that repeat an earlier one, exactly or nearly."""
    exact: dict[str, int] = {}
    seen: list[tuple[int, frozenset[str]]] = []
    marked = []
    for position, source in enumerate(sources):
        text = " ".join(source.text.split())
        if text in exact:
            marked.append(Learnt(source, exact[text], exact=True))
            continue
        exact[text] = position
        grams = _ngrams(text)
        near = next((p for p, other in seen if _overlap(grams, other) >= NEAR_DUPLICATE), None)
        if near is None:
            seen.append((position, grams))
        marked.append(Learnt(source, near, exact=False))
    return marked


def _arm_example(arm: Arm, pairing: Pairing, position: int) -> ArmExample:
    reductions = arm.reductions_Q
    return ArmExample(
        arm=arm,
        bits_per_byte=_bits(float(arm.nats_QS[position, -1]), pairing, position),
        reduction=math.nan if reductions is None else float(reductions[position]),
        passages=tuple(mark_repeats(arm.run.sources(pairing.query_ids[position]))),
    )


def _bits(nats: float, pairing: Pairing, position: int) -> float:
    return nats / (math.log(2.0) * int(pairing.texts.num_bytes_Q[position]))


def _ngrams(text: str) -> frozenset[str]:
    # Scripts without spaces have no words to count; their characters serve.
    words = text.split(" ")
    units = words if len(words) >= _NGRAM else list(text)
    if len(units) < _NGRAM:
        return frozenset([text])
    return frozenset("\x1f".join(units[i : i + _NGRAM]) for i in range(len(units) - _NGRAM + 1))


def _overlap(first: frozenset[str], second: frozenset[str]) -> float:
    return len(first & second) / max(len(first), len(second))
