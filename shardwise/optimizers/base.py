"""The interface of an optimizer: its settings, and everything that the rest of the program asks of it.

An optimizer is a frozen value, made from the `[optimizer]` table of a job. Its fields are the settings that
a user may write. Its methods say how a weight is updated, which tensors are kept for that, what an update
costs, and in which jobs it cannot be used. The rest of the program asks this object, so a new optimizer is
one file: `name`, `title`, `slots` and `update` are required, everything else has a default.

Each tensor that is kept for a weight (a *slot*) costs 4 bytes per parameter in float32, and 2 in bfloat16.

An update must treat each number of a weight independently. Then the engine (shardwise/optim) can pass it any
piece of a weight: a shard, some rows of a table, a block that is rounded to bfloat16.

This package is imported to read a job, so torch is imported inside methods only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field, field_validator, model_validator

from shardwise.optimizers.groups import GroupSettings, check_groups, settings_of
from shardwise.section import Section

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Slots = Sequence[Tensor]
    """One tensor for each name in `Optimizer.slots`."""
    Updated = tuple[Tensor, tuple[Tensor, ...]]
    """The new weight and the new slots."""

ROUNDED_BYTES = 500.0
"""Bytes per parameter that an update moves when torch's operators round states stochastically to bfloat16.
They were counted operator by operator, with two slots; most of them are for the hash."""
NORM_NUMBERS = 3
"""Numbers per parameter that the gradient norm and the division of gradients move before the update."""


class TrainSettings(Protocol):
    """The settings of `[train]` that an optimizer may ask for."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps in the run."""

    @property
    def state_dtype(self) -> str:
        """Dtype of weights and optimizer state, or "auto"."""


class LayoutSettings(Protocol):
    """The settings of `[layout]` that an optimizer may ask for."""

    @property
    def compression(self) -> str | None:
        """Codec of gradient sums, or None."""

    @property
    def compression_axes(self) -> str:
        """Axes whose sums are compressed."""

    @property
    def compression_warmup(self) -> int:
        """Number of steps before compression begins."""


@dataclass(frozen=True)
class SummedMomentum:
    """A momentum that devices sum instead of gradients while sums are compressed."""

    slot: str
    """Name of the slot that holds it."""
    decay: float
    """Its decay rate: the factor that it is multiplied by in each step."""


@dataclass(frozen=True)
class RoundingKernel:
    """A GPU kernel that updates bfloat16 states with stochastic rounding, in one pass over memory."""

    numbers: Callable[[Tensor], list[Tensor]]
    """Takes the step counts of all parameters (n), and returns the kernel's further scalars, each (n)."""
    update: Callable[..., None]
    """Takes (weight, gradient, slots…, numbers, place, decay); see optim/rounding.py."""


class Optimizer(Section, ABC):
    """How weights are updated: the `[optimizer]` table of a job."""

    title: ClassVar[str]
    """Name of the optimizer in sentences, for example `AdamW`."""
    lock_free: ClassVar[bool] = False
    """Whether processes may update the same weights at the same time without a lock (`update_shared`)."""
    fused: ClassVar[bool] = False
    """Whether a fused kernel updates many tensors at once (`update_fused`)."""
    reads_step: ClassVar[bool] = False
    """Whether `update` reads the value of `step`, which is then given in host memory."""

    name: str = Field(description="which optimizer updates the weights")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled decay, on matrices only (no norms, biases, embeddings)"
    )
    groups: dict[str, GroupSettings] = Field(
        {},
        description="weights with settings of their own, by a pattern of their names with `*` for any text: "
        "`lr_factor`, a factor on the learning rate, and `weight_decay`; of several patterns that match, the "
        "last decides (docs/optimizers.md)",
        examples=[{"*.bias": {"weight_decay": 0.0}, "encoder.*": {"lr_factor": 0.1}}],
    )

    _check_groups = field_validator("groups", mode="before")(check_groups)

    def __hash__(self) -> int:
        """Return a hash, although the table of groups has none."""
        return hash((type(self), self.name))

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: object) -> object:
        """Return the values with tuples for lists, because TOML has no tuples."""
        if not isinstance(values, dict):
            return values
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}

    # -- the update ------------------------------------------------------------------------------------------

    def group_of(self, name: str, decays: bool) -> tuple[float, float]:
        """Return the weight decay of a weight, and the factor on its learning rate. `decays`: it is a matrix
        and no embedding."""
        group = settings_of(self.groups, name)
        decay = group.get("weight_decay", self.weight_decay if decays else 0.0)
        return decay, group.get("lr_factor", 1.0)

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The names of the tensors that are kept for each parameter, each shaped like the parameter.

        They begin as zeros, and are saved in checkpoints under these names. The number of steps is always
        kept, and is no slot.
        """

    def slot_dtype(self, slot: str) -> str | None:
        """Return the dtype of a slot; None: that of the weight."""
        return None

    @property
    def from_zeros(self) -> bool:
        """Whether all slots begin as zeros, as rows of a table do that no batch has looked up yet."""
        return True

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of single numbers that are kept for each parameter besides the number of steps.

        They begin as zeros, are saved in checkpoints under these names, and follow the slots in the
        arguments and results of an update. They may depend on the step and the learning rate only, so that
        all pieces of a parameter have the same.
        """
        return ()

    @abstractmethod
    def update(
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the new weight and the new slots; do not change the arguments.

        Weight, gradient and slots are plain tensors of one shape and one dtype, float32 or float64. `decay`
        is the weight decay of this parameter, and 0 if it does not decay. `step` is a float64 scalar on the
        device, and 1 in the first step.
        """

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
        """Update many tensors in place with one kernel. It is called only if `fused` is true.

        Gradients are divided by `divide_by`, and each of `steps` is increased by 1. If `skip` is 1, nothing
        changes.
        """
        raise NotImplementedError

    def update_shared(
        self, weight: Tensor, gradient: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the same as `update`, while other processes may write the slots (`lock_free`).

        One slot may be from before another process's update, and another slot from after it.
        """
        return self.update(weight, gradient, slots, lr=lr, decay=decay, step=step)

    def rounding_kernel(self, device_type: str) -> RoundingKernel | None:
        """Return the kernel for bfloat16 states on this type of device; None: torch's operators are used."""
        return None

    # -- compressed sums -------------------------------------------------------------------------------------

    @property
    def summed_momentum(self) -> SummedMomentum | None:
        """The momentum that devices sum instead of gradients once compression has begun; None: they always
        sum gradients."""
        return None

    def update_from_momentum(
        self, weight: Tensor, momentum: Tensor, slots: Slots, *, lr: float, decay: float, step: Tensor
    ) -> Updated:
        """Return the new weight and slots, given the momentum that devices have summed. `step` stays at the
        last step with summed gradients."""
        raise NotImplementedError

    def needs_whole_states(self, layout: LayoutSettings) -> bool:
        """Return whether states cannot be sharded with this layout's compression; then `layout.zero` is 0."""
        return False

    def without_compression(self) -> Optimizer:
        """Return the optimizer that makes the same updates in a job without compression."""
        return self

    # -- what it costs ---------------------------------------------------------------------------------------

    def state_bytes(self, width: float) -> float:
        """Return the bytes per parameter that all slots take, where a number of a weight takes `width`."""
        return len(self.slots) * width

    @property
    def numbers_moved(self) -> float:
        """Numbers per parameter that an update reads and writes, including those of the gradient norm.

        By default they are those of one kernel that reads the weight, the gradient and the slots, and writes
        the weight and the slots.
        """
        return 3 + 2 * len(self.slots) + NORM_NUMBERS

    def update_bytes(self, width: int, rounds: bool, device_type: str) -> float:
        """Return the bytes per parameter that an update moves, with `width` bytes per number.

        `rounds`: states are rounded stochastically to bfloat16. `device_type` is that of the memory with the
        states, "cuda" or "cpu".
        """
        has_kernel = self.rounding_kernel(device_type) is not None
        return ROUNDED_BYTES if rounds and not has_kernel else width * self.numbers_moved

    # -- what it says, and what it refuses -------------------------------------------------------------------

    def describe(self, rounds: bool) -> str:
        """Return the line about the optimizer in the header of a run. `rounds`: states are bfloat16."""
        if rounds:
            return f"{self.title} on bfloat16 weights and states, rounded stochastically"
        return f"{self.title}, fused kernel" if self.fused else self.title

    def problems(self, train: TrainSettings, layout: LayoutSettings, zero: int) -> Iterator[str]:
        """Yield a message for each reason why this job cannot use the optimizer, with what to write instead.

        `zero` is the lowest stage of ZeRO that the layout may get.
        """
        yield from ()

    def warning(self, codec: str, feedback: bool) -> str | None:
        """Return a warning if training with gradients compressed by this codec is known to be worse than with
        another optimizer, else None. `feedback` says whether error feedback is used."""
        return None

    @property
    def momentum_per_step(self) -> float | None:
        """The share of an update that momentum repeats in the next one; None: not known.

        A parameter server uses it to extrapolate weights (`server.prediction`).
        """
        return None

    # -- the proof -------------------------------------------------------------------------------------------

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return an independent implementation for `shardwise verify --against plain`; None: there is none.

        Each of `groups` has `params` and `weight_decay`; its `lr` is set before each step. The implementation
        must share no code with `update`.
        """
        return None
