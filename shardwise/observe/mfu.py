"""Model FLOP utilisation (PaLM, 2022): how much of what the devices could compute the model needed.

MFU is the FLOPs the model needs per token, times tokens per second, over the peak of all devices
(cost/device_peaks.py). It counts the model's own arithmetic only, never recomputation, so it compares layouts
fairly; the convention for FLOPs per token is the planner's and is named beside every MFU shown.
"""

from __future__ import annotations


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float | None) -> float | None:
    """Share of the devices' peak that the model's own arithmetic used; None where the peak is not known."""
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
