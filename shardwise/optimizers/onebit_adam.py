"""1-bit Adam (Tang et al. 2021): AdamW for compressed sums.

AdamW divides by the root of its second moment, a mean of squared gradients. With error feedback most of a
gradient is held back and added later, in bursts. The squares of bursts are too large, so steps become too
short. 1-bit Adam learns the second moment in a warm-up without compression, and then keeps it constant. The
rest of the update is linear in the gradients, so a part that arrives late has its full effect. And it
compresses the first moment, which changes slowly, instead of the gradient: device i sends

    (1 - beta1) gradient_i + beta1 momentum / devices

and the sum is the next momentum. Any codec can be used; the paper's is one bit, the sign. Weights whose sums
are not compressed are updated as by AdamW.

The warm-up has to be long enough for the second moment to settle: about 1 / (1 - beta2) steps. A tenth of the
run is usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from shardwise.optimizers.adamw import Adam, AdamW
from shardwise.optimizers.base import LayoutSettings, Optimizer, SummedMomentum, TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.optimizers.base import Slots, Updated


class OneBitAdam(Adam):
    """1-bit Adam: AdamW until compression begins; then devices sum momenta, and the second moment stays."""

    title: ClassVar[str] = "1-bit Adam"

    name: Literal["1bit-adam"] = Field(
        "1bit-adam",
        description="1-bit Adam (Tang et al. 2021) for compressed sums: once `layout.compression` begins, "
        "momenta are compressed instead of gradients, the second moment stays as it is, and `train.clip` and "
        "the logged gradient norm are those of summed momenta",
    )

    @property
    def summed_momentum(self) -> SummedMomentum | None:
        """The first moment, which devices sum instead of gradients."""
        return SummedMomentum("exp_avg", self.betas[0])

    def update_from_momentum(
        self, weight: Tensor, momentum: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the update by the new momentum, with the second moment as it was after `step` steps."""
        second = slots[1]
        size = (second / (1 - self.betas[1] ** step)).sqrt() + self.epsilon
        return weight * (1 - lr * decay) - lr * (momentum / size), (momentum, second)

    def needs_whole_states(self, layout: LayoutSettings) -> bool:
        """Return True if sums over all axes are compressed: ZeRO shards the momentum over those devices."""
        return layout.compression_axes == "all"

    def without_compression(self) -> Optimizer:
        """Return AdamW with the same settings."""
        settings = {"betas": self.betas, "epsilon": self.epsilon, "weight_decay": self.weight_decay}
        return AdamW.model_validate(settings)

    def describe(self, rounds: bool) -> str:
        """Return what the optimizer does before compression begins, and after."""
        return (
            "1-bit Adam: AdamW at first, then momentum that devices exchange compressed, with a constant "
            "variance"
        )

    def problems(self, train: TrainSettings, layout: LayoutSettings, zero: int) -> Iterator[str]:
        """Yield a problem for each lack: of compression, of a warm-up, and of whole float32 momenta."""
        what = "optimizer.name = '1bit-adam'"
        if layout.compression is None:
            yield (
                f"{what}: has no effect without layout.compression; name a codec, 'sign' say, or leave it out"
            )
            return
        if layout.compression_warmup == 0:
            settles = max(1, min(train.steps // 10, round(1 / (1 - self.betas[1]))))
            yield (
                f"{what}: needs layout.compression_warmup, the steps in which the second moment settles "
                f"before it is kept; {settles} say"
            )
        if zero and self.needs_whole_states(layout):
            yield (
                f"{what}: needs whole momenta where they are compressed, and layout.zero = {zero} shards "
                "them; use layout.zero = 0 without weight_compression and backward_shards, or "
                "layout.compression_axes = 'replica'"
            )
        if train.state_dtype == "bfloat16":
            yield f"{what}: keeps float32 states; leave train.state_dtype out"
