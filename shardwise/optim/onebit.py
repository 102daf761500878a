"""1-bit Adam (Tang et al. 2021): AdamW that lives with compressed sums.

AdamW divides by the root of its second moment, a mean of squared gradients. Of gradients that arrive in
bursts, most of them held back and added later, the squares are too large, and steps become too short. So
1-bit Adam learns the second moment in a warm-up without compression and keeps it from then on; what is left
is linear, and nothing that comes late is lost. And it compresses the first moment, which changes slowly,
rather than the gradient: device i sends

    (1 - beta1) gradient_i + beta1 momentum / devices

and the sum is the next momentum. Any codec will do; signs gave it its name. Weights that are not compressed
go on as with AdamW.

A warm-up has to be long enough for the second moment to settle: some 1 / (1 - beta2) steps, and a tenth of
the run is usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import LocalAdamW
from shardwise.comm import Compressor, Momentum
from shardwise.optim.norm import local


class OneBitAdam(LocalAdamW):
    """AdamW until compression begins; then momenta are what devices sum, and the second moment stays."""

    def __init__(self, groups: list[dict[str, Any]], **more: Any) -> None:
        super().__init__(groups, **more)
        self._compressors: list[Compressor] = []
        self._compressed: set[nn.Parameter] = set()

    def follow(self, compressor: Compressor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Before the first step: let what it compresses be momenta."""
        self._compressors.append(compressor)
        self._compressed |= {parameters[name] for name in compressor.names}
        beta = self.param_groups[0]["betas"][0]
        compressor.momentum = Momentum(beta, lambda name: local(self.state[parameters[name]]["exp_avg"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with gradients divided by `grad_scale`, or with momenta in their place; none where
        `found_inf` is 1."""
        assert closure is None, "gradients are there already"
        sums = {}
        if any(compressor.begun for compressor in self._compressors):
            sums = {parameter: parameter.grad for parameter in self._compressed if parameter.grad is not None}
            for group in self.param_groups:
                for parameter, pieces in self.pieces(group):
                    if parameter in sums:
                        self._go_on(group, *pieces)
        for parameter in sums:
            parameter.grad = None
        super().step()
        for parameter, total in sums.items():
            parameter.grad = total

    def _go_on(
        self,
        group: dict[str, Any],
        weight: Tensor,
        total: Tensor,
        first: Tensor,
        second: Tensor,
        steps: Tensor,
    ) -> None:
        """With a new momentum, and the second moment as it was after so many steps."""
        skip, divide_by = (
            getattr(self, "found_inf", torch.zeros_like(steps)),
            getattr(self, "grad_scale", torch.ones_like(steps)),
        )
        first.copy_(torch.where(skip > 0, first, total / divide_by))
        settled = 1 - group["betas"][1] ** steps.double()
        change = first / ((second / settled.to(second)).sqrt_().add_(group["eps"]))
        lr = group["lr"] * (1 - skip).to(weight)
        weight.mul_(1 - lr * group["weight_decay"]).sub_(change.mul_(lr))
