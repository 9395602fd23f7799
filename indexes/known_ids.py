"""A set of strings in 16 bytes each: which ids occurred before."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_KEY_BYTES = 16


class KnownIds:
    """Remembers ids by their 128-bit BLAKE2b, in sorted runs of falling size.

    A Python set of strings costs over 100 bytes an id, which a corpus of 10^8 passages does not
    leave room for. Adding n ids to N costs O(n log N) comparisons and amortised O(n log N) moves.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.bytes_]] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def contains(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Which of ``ids`` were added before."""
        return self._in_runs(_keys(ids))

    def add(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Remember ``ids``; which of them had occurred, in earlier calls or earlier in this one."""
        if not ids:
            return np.zeros(0, dtype=np.bool_)
        keys = _keys(ids)
        distinct, first = np.unique(keys, return_index=True)
        seen_before = self._in_runs(distinct)
        repeated = np.ones(len(keys), dtype=np.bool_)
        repeated[first] = seen_before
        fresh = distinct[~seen_before]
        if len(fresh):
            self._runs.append(fresh)
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")
            self._runs.append(merged)
        return repeated

    def _in_runs(self, keys: NDArray[np.bytes_]) -> NDArray[np.bool_]:
        found = np.zeros(len(keys), dtype=np.bool_)
        for run in self._runs:
            position = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            found |= run[position] == keys
        return found


def _keys(ids: Sequence[str]) -> NDArray[np.bytes_]:
    digests = [
        hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
        for value in ids
    ]
    return np.array(digests, dtype=f"S{_KEY_BYTES}")
