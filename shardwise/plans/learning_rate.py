"""Learning-rate schedules: pure functions of the step, so that resuming needs no state.

Every schedule warms up linearly from `peak / warmup`. `constant` then stays at the peak; the others end at
`final x peak` on the last step. `wsd` (warm-up, stable, decay; Hu et al., 2024) stays at the peak first and
then falls linearly, so that a run can be prolonged from any point of its stable part.
"""

from __future__ import annotations

import math

from shardwise.config import Train


def learning_rate(train: Train, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1."""
    if step <= train.warmup:
        return train.learning_rate * step / train.warmup
    _, start, _ = turns(train)
    progress = min(1.0, max(0.0, (step - start) / max(1, train.steps - start)))
    return train.learning_rate * _share_of_peak(train.schedule, progress, train.final_learning_rate)


def turns(train: Train) -> tuple[int, int, int]:
    """Return the last steps of warm-up, of the stable part and of the decay."""
    start = train.warmup
    if train.schedule == "wsd":
        start = max(start, train.steps - (train.decay or math.ceil(train.steps / 5)))
    return train.warmup, start, train.steps


def _share_of_peak(schedule: str, progress: float, final: float) -> float:
    """Return the share of the peak, which falls from 1 at progress 0 to `final` at progress 1."""
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - final) * progress
