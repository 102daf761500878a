"""The interface of an optimizer: its settings, and everything that the rest of the program asks of it.

An optimizer is a frozen value, made from the `[optimizer]` table of a job. Its fields are the settings that
a user may write. Its methods say how a weight is updated, which tensors are kept for that, what an update
costs, and in which jobs it cannot be used. So memory, plan, checkpoint, proof and header ask this object,
and a new optimizer is one file: `name`, `title`, `slots` and `update` are required, everything else has a
default.

An update must treat each number of a weight by itself. That is what lets the engine (shardwise/optim) hand it
any piece of a weight: a shard, some rows of a table, a block that is rounded to bfloat16.

This package is imported to read a job, so torch is imported inside methods only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field, model_validator

from shardwise.section import Section

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROUNDED_BYTES = 500.0
"""Bytes that an update moves for each parameter where torch's operators round the states to bfloat16 by
chance. They were counted operator by operator, with two slots; most of them are for the hash."""
NORM_NUMBERS = 3
"""Numbers that the gradient norm and the division of gradients move for each parameter, before the update."""


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
    """A momentum that devices sum in place of gradients, once gradients would be compressed."""

    slot: str
    """The state that holds it."""
    decay: float
    """The share of it that stays from one step to the next."""


@dataclass(frozen=True)
class RoundingKernel:
    """A GPU kernel that updates bfloat16 states and rounds them by chance, in one pass over memory."""

    numbers: Callable[[Tensor], list[Tensor]]
    """From the step counts of all parameters, the numbers that the kernel takes for each of them."""
    update: Callable[..., None]
    """Takes (weight, gradient, slots…, numbers, place, decay); see optim/rounding.py."""


class Optimizer(Section, ABC):
    """How weights are updated: the `[optimizer]` table of a job."""

    title: ClassVar[str]
    """The name in sentences, for example `AdamW`."""
    lock_free: ClassVar[bool] = False
    """Whether processes may update the same weights at the same time without a lock (`update_shared`)."""
    fused: ClassVar[bool] = False
    """Whether one kernel of torch's updates many tensors at once (`update_fused`)."""

    name: str = Field(description="which optimizer updates the weights")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled decay, on matrices only (no norms, biases, embeddings)"
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: object) -> object:
        """TOML has lists where these settings are tuples."""
        if not isinstance(values, dict):
            return values
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}

    # -- the update ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The names of the tensors that are kept for each parameter, each shaped like the parameter.

        They begin as zeros, and are saved in checkpoints under these names. The number of steps done is kept
        for every parameter anyway.
        """

    @abstractmethod
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
        """Return the new weight and the new slots, without changing what is given.

        Weight, gradient and slots are plain tensors of one shape and one dtype, float32 or float64. `decay`
        is `weight_decay`, or 0 for a parameter that is not decayed. `step` counts from 1, as a float64 scalar
        on the device.
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
        """Do the same to many tensors in place, by one kernel, where `fused` is true.

        Gradients are divided by `divide_by`; nothing changes where `skip` is 1, else `steps` are counted on.
        """
        raise NotImplementedError

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
        """Return the same as `update`, where other processes write the slots meanwhile (`lock_free`).

        Of two slots, one may be from before another's update and one from after it.
        """
        return self.update(weight, gradient, slots, lr=lr, decay=decay, step=step)

    def rounding_kernel(self, device_type: str) -> RoundingKernel | None:
        """Return the kernel for bfloat16 states on this kind of device; None: torch's operators do it."""
        return None

    # -- compressed sums -------------------------------------------------------------------------------------

    @property
    def summed_momentum(self) -> SummedMomentum | None:
        """The momentum that devices sum in place of gradients once compression has begun; None: they sum
        gradients."""
        return None

    def update_from_momentum(
        self,
        weight: Tensor,
        momentum: Tensor,
        slots: Sequence[Tensor],
        *,
        lr: float,
        decay: float,
        step: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new weight and slots from a momentum that devices have summed; such steps are not
        counted."""
        raise NotImplementedError

    def needs_whole_states(self, layout: LayoutSettings) -> bool:
        """Return whether its states cannot be sharded with this layout's compression: then zero is 0."""
        return False

    def without_compression(self) -> Optimizer:
        """Return the optimizer that this one is where nothing is compressed."""
        return self

    # -- what it costs ---------------------------------------------------------------------------------------

    @property
    def numbers_moved(self) -> float:
        """Numbers that an update reads and writes for each parameter, the norm before it included.

        One kernel reads the weight, the gradient and the slots, and writes all but the gradient.
        """
        return 3 + 2 * len(self.slots) + NORM_NUMBERS

    def update_bytes(self, width: int, rounds: bool, compiled: bool) -> float:
        """Return the bytes that an update moves for each parameter, of `width` bytes a number.

        `rounds`: states are rounded to bfloat16 by chance. `compiled`: the device has kernels for that.
        """
        has_kernel = compiled and self.rounding_kernel("cuda") is not None
        return ROUNDED_BYTES if rounds and not has_kernel else width * self.numbers_moved

    # -- what it says, and what it refuses -------------------------------------------------------------------

    def describe(self, rounds: bool) -> str:
        """Return its line in the header of a run. `rounds`: states are bfloat16, rounded by chance."""
        if rounds:
            return f"{self.title} on bfloat16 weights and states, rounded by chance"
        return f"{self.title}, fused kernel" if self.fused else self.title

    def problems(self, train: TrainSettings, layout: LayoutSettings, zero: int) -> Iterator[str]:
        """Yield what keeps this job from using the optimizer, and what to write instead.

        `zero` is the stage of sharding that the layout asks for, at least.
        """
        yield from ()

    def warning(self, codec: str, feedback: bool) -> str | None:
        """Return why gradients compressed by this codec, with error feedback or without, train worse than
        they could; None: nothing is known against them."""
        return None

    @property
    def momentum_per_step(self) -> float | None:
        """The share of an update that the next one repeats, by momentum; None: it cannot be told.

        A parameter server extrapolates weights by it (`server.prediction`).
        """
        return None

    # -- the proof -------------------------------------------------------------------------------------------

    def reference(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return an independent implementation, which `shardwise verify --against plain` steps with.

        Groups have `params` and `weight_decay`. It must share no code with `update`. None: there is none.
        """
        return None
