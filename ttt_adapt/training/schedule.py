"""Learning-rate schedule of the outer loop: linear warm-up, constant, linear decay to zero.

The constant stretch makes a run extensible: a checkpoint before the decay continues under a larger
token budget as if that had been the budget from the start (Hu et al. 2024, MiniCPM, section 4).
"""


def learning_rate_factor(
    step: int, num_steps: int, *, warmup_fraction: float, decay_fraction: float
) -> float:
    """Multiplier of the peak rate at outer step ``step`` (0-based) of ``num_steps``."""
    num_warmup = max(1, round(num_steps * warmup_fraction))
    num_decay = max(1, round(num_steps * decay_fraction))
    rise = (step + 1) / num_warmup
    fall = (num_steps - step) / num_decay
    return max(0.0, min(1.0, rise, fall))
