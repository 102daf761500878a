"""The check of a step in float8: whether every tensor fits its scale.

Scales come from earlier steps, so a tensor may outgrow its scale. This is detected on the device before the
update: then the weights do not change, and the step is repeated with larger scales. For the first step of a
run no scales are known, so it is first made only to measure the tensors.

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
        """Note whether the step only measures tensors; then its gradients are not compressed."""
        self._comm.discard_gradients = self._scales is not None and not self._scales.known

    def check(self) -> ScaleCheck:
        """Measure the tensors of the step just computed, and remember their magnitudes for later scales."""
        if self._scales is None:
            return ScaleCheck(None)
        seen = self._scales.observe()
        self._scales.record(seen)
        return ScaleCheck(seen)


def not_finite(scaled: Sequence[float]) -> list[int]:
    """Return the indices of the scaled tensors that were not finite. A cast to 8 bits hides this."""
    return [index for index, largest in enumerate(scaled[::3]) if not math.isfinite(largest)]


def by_layer(scales: Scales, scaled: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return the worst values of the tensors of each block and of the head: the share of numbers lost below
    the range, and the largest number relative to the end of the range."""
    layers: dict[str, tuple[float, float]] = {}
    for name, lost, relative in zip(scales.names, scaled[1::3], scaled[2::3], strict=True):
        layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        worst = layers.get(layer, (0.0, 0.0))
        layers[layer] = max(worst[0], lost), max(worst[1], relative)
    return layers
