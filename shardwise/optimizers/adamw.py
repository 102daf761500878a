"""AdamW (Loshchilov & Hutter, 2019): a step of about the learning rate for each weight, whatever the size of
its gradients.

Two moments are kept for each weight, running means of the gradient and of its square:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

Dividing by 1 - beta^t corrects the bias of moments that begin as zeros. Decay is decoupled: it is not part of
the gradient, so it is not divided by the second moment.

torch's fused kernel makes an update in one pass over memory; for bfloat16 states there is a Triton kernel on
GPUs (optimizers/adamw_kernel.py).

**Shared weights.** If several processes update the same tensors without a lock, a process may read a first
moment that includes another's gradient, and a second moment that does not. If the second moment is near zero,
their quotient can be arbitrarily large, and one such step ruins the run. But for any gradients

    |m| / sqrt(v) <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))

(Cauchy-Schwarz over the two weighted sums). So the first moment is clamped to this bound, which never changes
moments that belong together.
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

    from shardwise.optimizers.base import Slots, Updated


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Return the two decay rates; raise if one is not in [0, 1)."""
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
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the update of a weight by the formula in the module's docstring."""
        first, second = self._moments(gradient, slots)
        return self._moved(weight, first, second, lr, decay, step), (first, second)

    def update_shared(
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the same, with the first moment clamped to the bound in the module's docstring."""
        first, second = self._moments(gradient, slots)
        positive = second.clamp(min=0)
        bound = positive.sqrt().mul_(largest_quotient(*self.betas))
        moved = self._moved(weight, first.clamp(-bound, bound), positive, lr, decay, step)
        return moved, (first, second)

    def _moments(self, gradient: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
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
        """Update with torch's kernel, which also divides, skips and counts steps."""
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

    def warning(self, codec: str, feedback: bool) -> str | None:
        """Return a warning about signs with error feedback, which did worse than 1-bit Adam."""
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
        """Return torch's AdamW, which updates one tensor at a time."""
        import torch

        return torch.optim.AdamW(groups, betas=self.betas, eps=self.epsilon, foreach=False, fused=False)


def largest_quotient(beta1: float, beta2: float) -> float:
    """Return the bound on |m| / sqrt(v) in the module's docstring."""
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
    """Run the Triton kernel. It is imported here because only torch for GPUs comes with Triton."""
    from shardwise.optimizers.adamw_kernel import update

    update(weight, gradient, first, second, numbers, place, *betas, epsilon, decay)
