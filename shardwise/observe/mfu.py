"""Model FLOP utilisation (PaLM, 2022): the fraction of the devices' peak that the model's arithmetic used.

MFU is the FLOPs that the model needs per token, times tokens per second, divided by the peak of all devices
(cost/device_peaks.py). It counts only the model's own arithmetic, never recomputation, so it compares layouts
fairly. The convention for FLOPs per token is the planner's, and it is named beside every MFU shown.
"""

from __future__ import annotations


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float | None) -> float | None:
    """Return the fraction of the devices' peak that the model's own arithmetic used; None if the peak is
    unknown.
    """
    return None if peak is None else tokens_per_second * flops_per_token / (devices * peak)
