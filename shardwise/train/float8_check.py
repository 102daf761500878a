"""The check of a step in float8: did every tensor fit its scale?

Scales come from the steps before, so a tensor may outgrow its scale. That is noticed on the device before the
weights are touched. Then the update leaves the weights alone, and the step is made again with scales that
fit. In the first step of a run no scales are known, so it is made once only to measure the tensors.

Other precisions have no scales, so nothing is checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.parallel.float8_scales import Observation, Scales
from shardwise.train.build import Training


@dataclass(frozen=True)
class ScaleCheck:
    """What was measured of the scaled tensors of a step; the numbers are on the device."""

    seen: Observation | None

    def outgrown(self, loss: Tensor) -> Tensor:
        """Return whether the step has to be made again: a tensor outgrew its scale, and all is finite."""
        if self.seen is None:
            return torch.zeros_like(loss, dtype=torch.bool)
        return torch.isfinite(loss) & self.seen.finite & self.seen.outgrown

    def fits(self, finite: Tensor) -> Tensor:
        """Return whether gradients are finite and every tensor was finite and fitted its scale."""
        return finite if self.seen is None else finite & (~self.seen.outgrown & self.seen.finite)

    def numbers(self, device: torch.device) -> Tensor:
        """Return what is recorded: three numbers for each scaled tensor."""
        return torch.empty(0, device=device) if self.seen is None else self.seen.numbers.flatten()


class Float8Check:
    """Checks the scaled tensors of each step."""

    def __init__(self, training: Training) -> None:
        self._scales, self._comm = training.parallel.scales, training.comm

    def begin_step(self) -> None:
        """Take the scales of the next step from the steps before."""
        if self._scales is not None:
            self._scales.begin()

    def begin_gradients(self) -> None:
        """Note whether gradients only serve to measure tensors; then compression leaves them alone."""
        self._comm.discard_gradients = self._scales is not None and not self._scales.known

    def check(self) -> ScaleCheck:
        """Measure the tensors of the step just computed, and remember their magnitudes for later scales."""
        if self._scales is None:
            return ScaleCheck(None)
        seen = self._scales.observe()
        self._scales.record(seen)
        return ScaleCheck(seen)


def not_finite(scaled: Sequence[float]) -> list[int]:
    """Return which scaled tensors were not finite, which a cast to 8 bits would hide."""
    return [index for index, largest in enumerate(scaled[::3]) if not math.isfinite(largest)]


def by_layer(scales: Scales, scaled: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return of each block and the head the worst of its tensors: the share of numbers lost below the range,
    and the largest number relative to the range's end."""
    layers: dict[str, tuple[float, float]] = {}
    for name, lost, relative in zip(scales.names, scaled[1::3], scaled[2::3], strict=True):
        layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        most = layers.get(layer, (0.0, 0.0))
        layers[layer] = max(most[0], lost), max(most[1], relative)
    return layers
