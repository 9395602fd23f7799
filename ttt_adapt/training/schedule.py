"""Learning-rate schedules of the outer loop.

``constant``: linear warm-up, constant, linear decay. The constant stretch makes a run extensible: a
checkpoint before the decay continues under a larger token budget as if that had been the budget
from the start (Hu et al. 2024, MiniCPM, section 4).

``cosine``: linear warm-up, then half a cosine (Sun et al. 2024, arXiv 2407.04620, appendix C).
"""

import math
from typing import Literal

Schedule = Literal["constant", "cosine"]


def learning_rate_factor(
    step: int,
    num_steps: int,
    *,
    warmup_fraction: float,
    decay_fraction: float,
    schedule: Schedule = "constant",
    final_factor: float = 0.0,
) -> float:
    """Multiplier of the peak rate at outer step ``step`` (0-based) of ``num_steps``.

    Args:
        warmup_fraction: of the steps, over which the rate rises.
        decay_fraction: of the steps, over which it falls after a constant stretch.
        schedule: ``cosine`` falls from the warm-up to the end instead.
        final_factor: where it falls to.
    """
    num_warmup = max(1, round(num_steps * warmup_fraction))
    rise = (step + 1) / num_warmup
    if schedule == "cosine":
        done = (step - num_warmup + 1) / max(1, num_steps - num_warmup)
        fall = 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, done)))
    else:
        fall = (num_steps - step) / max(1, round(num_steps * decay_fraction))
    return max(0.0, min(1.0, rise, final_factor + (1.0 - final_factor) * fall))
