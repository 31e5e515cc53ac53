"""Learning-rate schedules, as factors of the peak."""


def warmup_decay(step: int, steps: int, *, warmup: float, final: float) -> float:
    """Linear from 0 to 1 over the first `warmup` of training, then linear to `final` at the end."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return final + (1 - final) * (steps - step) / max(1, steps - rise)
