"""Which layers to convert: a choice in words, read against the number of layers."""

import re

from ttt_adapt.errors import SettingsError

_COUNTED = re.compile(r"(every|first|last)-(\d+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def choose_layers(choice: str, num_layers: int) -> tuple[int, ...]:
    """Indices of the chosen layers, ascending.

    Args:
        choice: ``all``, ``none``, indices and ranges separated by commas (``0,3,5-7``), ``every-N``
            (N − 1, 2N − 1, …: the first layers are the hardest to replace), ``first-N``, ``last-N``.

    Raises:
        SettingsError: the choice is none of these, or names layers that the model does not have.
    """
    words = choice.strip().lower()
    every = range(num_layers)
    if words == "all":
        return tuple(every)
    if words == "none":
        return ()
    counted = _COUNTED.fullmatch(words)
    if counted:
        kind, number = counted[1], int(counted[2])
        if not 1 <= number <= num_layers:
            raise SettingsError(
                f"layers: expected {kind}-N with N from 1 to {num_layers}, the model's number of "
                f"layers, found {choice!r}"
            )
        if kind == "every":
            return tuple(every[number - 1 :: number])
        return tuple(every[:number] if kind == "first" else every[-number:])
    found: set[int] = set()
    for part in words.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise SettingsError(
                "layers: expected all, none, indices such as 0,3,5-7, every-N, first-N or last-N, "
                f"found {choice!r}"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high >= num_layers:
            raise SettingsError(
                f"layers: expected ascending indices from 0 to {num_layers - 1}, found "
                f"{part.strip()!r} in {choice!r}"
            )
        found |= set(range(low, high + 1))
    return tuple(sorted(found))
