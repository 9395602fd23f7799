"""What `vision bench` accepts and would measure, without loading torch."""

from collections.abc import Sequence
from typing import Any

from ttt_adapt.errors import SettingsError

SIZES = {"tiny": 192, "small": 384, "base": 768}
"""Names and widths; every size has 12 blocks."""
DTYPES = ("float32", "bfloat16")
PATCH, DEPTH = 16, 12


def bench_plan(
    size: str, resolutions: Sequence[int], batch_size: int, dtype: str, *, training: bool
) -> dict[str, Any]:
    """Measurements that would be made, and the memory of the largest T × T matrix among them.

    Raises:
        SettingsError: an unknown size or dtype, or resolutions that are no multiples of the patch.
    """
    if size not in SIZES:
        raise SettingsError(f"size: expected one of {', '.join(SIZES)}, found {size!r}")
    if dtype not in DTYPES:
        raise SettingsError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    wrong = [side for side in resolutions if side < PATCH or side % PATCH]
    if wrong or not resolutions:
        found = wrong[0] if wrong else "none"
        raise SettingsError(f"resolutions: expected multiples of {PATCH}, found {found}")
    tokens = max((side // PATCH) ** 2 for side in resolutions)
    heads = SIZES[size] // 64
    # The scores and their softmax; for training every block keeps its own.
    matrices = 2 if not training else 2 * DEPTH
    num_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    return {
        "num_measurements": 3 * len(resolutions),
        "mode": "training" if training else "inference",
        "most_tokens": tokens,
        "attention_bytes": matrices * batch_size * heads * tokens * tokens * num_bytes,
    }
