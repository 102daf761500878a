"""AdamW (Loshchilov & Hutter, 2019): a step of about the learning rate for each weight, whatever the size of
its gradients.

Two moments are kept for each weight, running means of the gradient and of its square:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

Dividing by 1 - beta^t makes up for moments that begin as zeros. Decay is decoupled: it is not part of the
gradient, so the second moment does not divide it away.

torch's fused kernel does it in one pass over memory; bfloat16 states have a Triton kernel on GPUs
(optimizers/adamw_kernel.py). Cost: 8 bytes of state a parameter in float32.

**Shared weights.** Where several processes update the same tensors without a lock, a first moment may be read
that has another's gradient in it, with a second moment that has not. Where the second is near zero, their
quotient would be a step of any size: one such row, and the run is lost. No history of gradients makes the
quotient larger than

    |m| / sqrt(v) <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))

(Cauchy-Schwarz over the two weighted sums), so the first moment is cut to that. Moments that belong together
are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from shardwise.optimizers.base import Optimizer, RoundingKernel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Return two decay rates, if they are such that running means exist."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError("both must be at least 0 and below 1")
    return betas


class Adam(Optimizer):
    """The settings and the formula that AdamW and 1-bit Adam have in common."""

    fused: ClassVar[bool] = True

    betas: tuple[float, float] = Field((0.9, 0.95), description="decay rates of the two moments")
    epsilon: float = Field(1e-8, gt=0, description="added to the root of the second moment")

    _check_betas = field_validator("betas")(check_betas)

    @property
    def slots(self) -> tuple[str, ...]:
        """The first and the second moment, under torch's names."""
        return ("exp_avg", "exp_avg_sq")

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
        """Return the update of a weight by the formula in the module's docstring."""
        first, second = self._moments(gradient, slots)
        return self._moved(weight, first, second, lr, decay, step), (first, second)

    def update_shared(
        self,
        weight: Tensor,
        gradient: Tensor,
        slots: Sequence[Tensor],
        *,
        lr: float,
        decay: float,
        step: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the same, with the first moment cut to what some history of gradients could have made."""
        first, second = self._moments(gradient, slots)
        sound = second.clamp(min=0)
        most = sound.sqrt().mul_(largest_quotient(*self.betas))
        moved = self._moved(weight, first.clamp(-most, most), sound, lr, decay, step)
        return moved, (first, second)

    def _moments(self, gradient: Tensor, slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        (beta1, beta2), (first, second) = self.betas, slots
        return beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient * gradient

    def _moved(
        self, weight: Tensor, first: Tensor, second: Tensor, lr: float, decay: float, step: Tensor
    ) -> Tensor:
        beta1, beta2 = self.betas
        size = (second / (1 - beta2**step)).sqrt() + self.epsilon
        return weight * (1 - lr * decay) - lr * (first / (1 - beta1**step) / size)

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
        """Update by torch's kernel, which divides, skips and counts by itself."""
        from torch.optim.adamw import adamw

        first, second = slots
        adamw(
            weights, gradients, first, second, [], steps, fused=True, grad_scale=divide_by, found_inf=skip,
            amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=lr, weight_decay=decay,
            eps=self.epsilon, maximize=False,
        )  # fmt: skip

    def rounding_kernel(self, device_type: str) -> RoundingKernel | None:
        """Return the Triton kernel, on a GPU."""
        if device_type != "cuda":
            return None
        return RoundingKernel(self._unbiased, partial(_rounded_on_gpu, self.betas, self.epsilon))

    def _unbiased(self, steps: Tensor) -> list[Tensor]:
        return [1 - beta**steps for beta in self.betas]


class AdamW(Adam):
    """AdamW: two moments for each weight, decoupled decay."""

    title: ClassVar[str] = "AdamW"
    lock_free: ClassVar[bool] = True

    name: Literal["adamw"] = Field("adamw", description="AdamW (Loshchilov & Hutter, 2019)")

    def describe(self, rounds: bool) -> str:
        """Return the kernel, or how states are rounded."""
        return "AdamW on bfloat16 weights and moments, rounded by chance" if rounds else "AdamW, fused kernel"

    def warning(self, codec: str, feedback: bool) -> str | None:
        """Return that signs with error feedback did worse than 1-bit Adam."""
        if codec != "sign" or not feedback:
            return None
        return (
            "with AdamW and error feedback, one run did worse than without feedback; use optimizer.name = "
            "'1bit-adam' (docs/compression.md)"
        )

    @property
    def momentum_per_step(self) -> float | None:
        """The decay rate of the first moment."""
        return self.betas[0]

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return torch's AdamW, one tensor at a time."""
        import torch

        return torch.optim.AdamW(groups, betas=self.betas, eps=self.epsilon, foreach=False, fused=False)


def largest_quotient(beta1: float, beta2: float) -> float:
    """Return the largest quotient of a first moment and the root of the second, whatever the gradients
    were."""
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 else math.inf


def _rounded_on_gpu(
    betas: tuple[float, float],
    epsilon: float,
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Tensor,
    place: Tensor,
    decay: float,
) -> None:
    """Run the Triton kernel, which is imported on a GPU alone: Triton comes with torch for GPUs."""
    from shardwise.optimizers.adamw_kernel import update

    update(weight, gradient, first, second, numbers, place, *betas, epsilon, decay)
