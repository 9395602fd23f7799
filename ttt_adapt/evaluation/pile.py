"""The Pile's 22 subsets and their weights in ``pile_all``.

    pile_all = Σ over subsets of weight / 100 · (bits per byte of the subset)

A mean of the subsets' own ratios, weighted by their share of the Pile, so that it does not depend
on how many documents of each were scored.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ttt_adapt.errors import UserError

PILE_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "ArXiv": 8.96,
        "BookCorpus2": 0.75,
        "Books3": 12.07,
        "DM Mathematics": 1.24,
        "Enron Emails": 0.14,
        "EuroParl": 0.73,
        "FreeLaw": 6.12,
        "Github": 7.59,
        "Gutenberg (PG-19)": 2.17,
        "HackerNews": 0.62,
        "NIH ExPorter": 0.30,
        "OpenSubtitles": 1.55,
        "OpenWebText2": 10.01,
        "PhilPapers": 0.38,
        "Pile-CC": 18.11,
        "PubMed Abstracts": 3.07,
        "PubMed Central": 14.40,
        "StackExchange": 5.13,
        "USPTO Backgrounds": 3.65,
        "Ubuntu IRC": 0.88,
        "Wikipedia (en)": 1.53,
        "YoutubeSubtitles": 0.60,
    }
)
"""Percent of the Pile's bytes, after upsampling, by ``meta.pile_set_name``; they sum to 100.

Source: The Pile (arXiv 2101.00027), table 1, column "Weight"; equal to ``PILE_WEIGHTS`` in the
evaluation code of TTT-NN (arXiv 2305.18466).
"""


@dataclass(frozen=True, slots=True)
class PileAverage:
    """``pile_all`` over the subsets present, their weights scaled to sum to 1.

    Attributes:
        bits_per_byte: Σ weight · bits per byte / Σ weight, over the subsets present.
        weights_covered: percent of the whole weight that they hold; 100 when all are there. Only
            then is the number comparable with published ones.
        num_subsets: how many are present.
        missing: those that are not, by ``pile_set_name``.
    """

    bits_per_byte: float
    weights_covered: float
    num_subsets: int
    missing: tuple[str, ...]


def pile_subset(name: str) -> str | None:
    """The ``pile_set_name`` that a subset's name stands for, or ``None``.

    Case and punctuation do not matter; the task names of lm-evaluation-harness
    (``pile_arxiv``, ``pile_dm-mathematics``, ``pile_enron``) are understood too.
    """
    key = _key(name)
    return _NAMES.get(key) or _NAMES.get(key.removeprefix("pile"))


def are_pile_subsets(names: Iterable[str]) -> bool:
    """Whether there are names and each is a subset of the Pile."""
    found = [pile_subset(name) for name in names]
    return bool(found) and None not in found


def pile_weights(names: Iterable[str]) -> dict[str, float]:
    """Weights of the named subsets, scaled to sum to 1.

    Raises:
        UserError: no names, a name that is no subset of the Pile, or two for the same one.
    """
    weights: dict[str, float] = {}
    seen: dict[str, str] = {}
    for name in names:
        subset = pile_subset(name)
        if subset is None:
            raise UserError(f"{name!r} is not a subset of the Pile; they are {list(PILE_WEIGHTS)}")
        if subset in seen:
            raise UserError(f"{seen[subset]!r} and {name!r} are the same subset of the Pile")
        seen[subset] = name
        weights[name] = PILE_WEIGHTS[subset]
    if not weights:
        raise UserError("expected at least one subset of the Pile, found none")
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def pile_average(bits_per_byte: Mapping[str, float]) -> PileAverage:
    """``pile_all`` from each subset's corpus-level bits per byte.

    Raises:
        UserError: as :func:`pile_weights`.
    """
    weights = pile_weights(bits_per_byte)
    present = {pile_subset(name) for name in bits_per_byte}
    return PileAverage(
        bits_per_byte=math.fsum(weights[name] * bits_per_byte[name] for name in weights),
        weights_covered=math.fsum(w for name, w in PILE_WEIGHTS.items() if name in present),
        num_subsets=len(weights),
        missing=tuple(name for name in PILE_WEIGHTS if name not in present),
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_SHORT_NAMES = {
    "enron": "Enron Emails",
    "gutenberg": "Gutenberg (PG-19)",
    "uspto": "USPTO Backgrounds",
    "wikipedia": "Wikipedia (en)",
}
_NAMES = {**{_key(name): name for name in PILE_WEIGHTS}, **_SHORT_NAMES}
