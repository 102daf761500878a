"""Lion (Chen et al. 2023): every weight moves by the learning rate, in the direction of a sign.

    w = w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)        m = beta2 m + (1 - beta2) g

The momentum that is kept decays more slowly than the one whose sign is taken. Steps are larger than AdamW's
on average, so the authors use a learning rate 3 to 10 times smaller, and a decay as many times larger.

Cost: 4 bytes of state a parameter in float32, half of AdamW's. torch has no kernel for it, so an update is a
dozen operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from shardwise.optimizers.adamw import check_betas
from shardwise.optimizers.base import Optimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lion(Optimizer):
    """Lion: one momentum for each weight, and steps of one size."""

    title: ClassVar[str] = "Lion"
    lock_free: ClassVar[bool] = True

    name: Literal["lion"] = Field("lion", description="Lion (Chen et al. 2023)")
    betas: tuple[float, float] = Field(
        (0.9, 0.99), description="decay rates of the momentum whose sign is taken, and of the one kept"
    )

    _check_betas = field_validator("betas")(check_betas)

    @property
    def slots(self) -> tuple[str, ...]:
        """The momentum, under the name of the authors' code."""
        return ("exp_avg",)

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        slots: Sequence[Tensor],
        *,
        lr: float,
        decay: float,
        step: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the formula above."""
        (beta1, beta2), (momentum,) = self.betas, slots
        direction = (beta1 * momentum + (1 - beta1) * gradient).sign()
        return weight * (1 - lr * decay) - lr * direction, (beta2 * momentum + (1 - beta2) * gradient,)

    @property
    def numbers_moved(self) -> float:
        """Numbers that the operators of an update move, counted operator by operator."""
        return 50.0

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return the paper's algorithm, weight by weight."""
        return _textbook()(groups, {"lr": 0.0, "betas": self.betas})


def _textbook() -> Callable[..., torch.optim.Optimizer]:
    """Return the class of the reference; torch is not there when this file is imported."""
    import torch

    class TextbookLion(torch.optim.Optimizer):
        """Algorithm 2 of Chen et al. (2023)."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Update every weight in place."""
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                for theta in group["params"]:
                    m = self.state[theta].get("m", torch.zeros_like(theta))
                    c = m.lerp(theta.grad, 1 - beta1)
                    theta -= group["lr"] * (torch.sign(c) + group["weight_decay"] * theta)
                    self.state[theta]["m"] = m.lerp(theta.grad, 1 - beta2)

    return TextbookLion
