"""Lion (Chen et al. 2023): every weight moves by the learning rate, in the direction of a sign.

    w = w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)        m = beta2 m + (1 - beta2) g

The stored momentum decays more slowly than the one whose sign is taken. Steps are larger than AdamW's on
average, so the authors use a learning rate 3 to 10 times smaller, and a weight decay 3 to 10 times larger.

There is one slot, so states take half the memory of AdamW's. torch has no kernel for it: an update is eight
operators, which together move three times as many bytes as AdamW's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from shardwise.optimizers.adamw import check_betas
from shardwise.optimizers.base import NORM_NUMBERS, Optimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardwise.optimizers.base import Slots, Updated


class Lion(Optimizer):
    """Lion: one momentum for each weight, and steps of one size."""

    title: ClassVar[str] = "Lion"
    lock_free: ClassVar[bool] = True

    name: Literal["lion"] = Field("lion", description="Lion (Chen et al. 2023)")
    betas: tuple[float, float] = Field(
        (0.9, 0.99),
        description="decay rates of the momentum whose sign is the step, and of the saved momentum",
    )

    _check_betas = field_validator("betas")(check_betas)

    @property
    def slots(self) -> tuple[str, ...]:
        """The momentum, under the name that the authors' code uses."""
        return ("exp_avg",)

    def update(
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the update of a weight by the formula in the module's docstring."""
        (beta1, beta2), (momentum,) = self.betas, slots
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        moved = (weight * (1 - lr * decay)).sub_(direction, alpha=lr)
        return moved, (momentum.lerp(gradient, 1 - beta2),)

    @property
    def numbers_moved(self) -> float:
        """Numbers per parameter that an update moves: those of its operators, which were counted one by one,
        and those of the gradient norm."""
        return 21 + NORM_NUMBERS

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return the paper's algorithm, which updates one weight at a time."""
        return _textbook()(groups, {"lr": 0.0, "betas": self.betas})


def _textbook() -> Callable[..., torch.optim.Optimizer]:
    """Return the class of the reference. It is made here because this file is imported without torch."""
    import torch

    class TextbookLion(torch.optim.Optimizer):
        """Algorithm 2 of Chen et al. (2023)."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Update every weight in place."""
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                for theta in group["params"]:
                    g, m = theta.grad, self.state[theta].get("m", torch.zeros_like(theta))
                    c = beta1 * m + (1 - beta1) * g
                    theta -= group["lr"] * (torch.sign(c) + group["weight_decay"] * theta)
                    self.state[theta]["m"] = beta2 * m + (1 - beta2) * g

    return TextbookLion
