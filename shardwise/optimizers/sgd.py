"""SGD with momentum (Polyak 1964), as torch.optim.SGD does it.

    g = g + decay w        b = momentum b + g        w = w - lr b

With `nesterov` (Sutskever et al. 2013) the weight moves by g + momentum b instead, as if the next step's
momentum were already known. Decay is added to the gradient, as is usual for SGD: it becomes part of the
momentum, but not of the norm that gradients are clipped by.

There is one slot, and none with momentum 0. torch's fused kernel makes an update in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from shardwise.optimizers.base import LayoutSettings, Optimizer, TrainSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardwise.optimizers.base import Slots, Updated


class SGD(Optimizer):
    """SGD with momentum: one running sum of gradients for each weight."""

    title: ClassVar[str] = "SGD"
    lock_free: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    name: Literal["sgd"] = Field("sgd", description="SGD with momentum, as torch.optim.SGD")
    weight_decay: float = Field(
        0.0, ge=0, description="decay that is added to the gradient, on matrices only"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the running sum that stays; 0: no sum")
    nesterov: bool = Field(False, description="Nesterov's momentum")

    @property
    def slots(self) -> tuple[str, ...]:
        """The running sum of gradients, under torch's name; nothing without momentum."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the update of a weight by the formula in the module's docstring."""
        gradient = gradient + decay * weight
        if not slots:
            return weight - lr * gradient, ()
        total = self.momentum * slots[0] + gradient
        change = gradient + self.momentum * total if self.nesterov else total
        return weight - lr * change, (total,)

    def update_fused(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        steps: list[Tensor],
        *,
        lr: float,
        decay: float,
        divide_by: Tensor,
        skip: Tensor,
    ) -> None:
        """Update with torch's kernel, which also divides and skips, but does not count steps."""
        import torch
        from torch.optim.sgd import sgd

        totals: list[Any] = list(slots[0]) if slots else [None] * len(weights)
        sgd(
            weights, gradients, totals, fused=True, grad_scale=divide_by, found_inf=skip,
            weight_decay=decay, momentum=self.momentum, lr=lr, dampening=0.0, nesterov=self.nesterov,
            maximize=False,
        )  # fmt: skip
        torch._foreach_add_(steps, 1 - skip)

    def describe(self, rounds: bool) -> str:
        """Return the line about the optimizer, with its momentum."""
        kind = "Nesterov's momentum" if self.nesterov else "momentum"
        how = "on bfloat16 states, rounded stochastically" if rounds else "fused kernel"
        return f"SGD, {kind} {self.momentum:g}, {how}" if self.momentum else f"SGD without momentum, {how}"

    def problems(self, train: TrainSettings, layout: LayoutSettings, zero: int) -> Iterator[str]:
        """Yield a problem if Nesterov's momentum is asked for with momentum 0."""
        if self.nesterov and not self.momentum:
            yield (
                "optimizer.nesterov = true: has no effect with optimizer.momentum = 0; leave one of them out"
            )

    @property
    def momentum_per_step(self) -> float | None:
        """The factor of the running sum in each step."""
        return self.momentum

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return torch's SGD, which updates one tensor at a time."""
        import torch

        return torch.optim.SGD(
            groups, lr=0.0, momentum=self.momentum, nesterov=self.nesterov, foreach=False, fused=False
        )
