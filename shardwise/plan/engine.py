"""Which engine holds the data axes, and what it moves when.

Devices that hold the same weights keep them equal in one of three ways:

| engine       | where                                             | what runs there (parallel/data.py)     |
| ------------ | ------------------------------------------------- | -------------------------------------- |
| `single`     | no other device holds the same weights            | a plain model                          |
| `replicated` | zero = 0, without tensor, pipeline or expert axes | torch's DistributedDataParallel        |
| `sharded`    | everywhere else                                   | FSDP2; if zero = 0, a shard is a whole |
|              |                                                   | weight                                 |

and FSDP2 moves, under each ZeRO stage (Rajbhandari et al., 2020):

| zero | weights are gathered             | gradients are reduced |
| ---- | -------------------------------- | --------------------- |
| 0    | never: a shard is all of it      | in the last backward  |
| 1    | once a step, and kept            | in the last backward  |
| 2    | once a step, and kept            | in each backward      |
| 3    | in each forward and backward     | in each backward      |

Schedules that split backward in two halves run the second outside of the hooks that FSDP2 gathers and reduces
from: there weights stay gathered, and gradients whole, until the step ends, whatever the stage.

All of it is written with comparisons, `&` and `|`, so that one function answers for a Layout (a bool each)
and for the cost model's Space of candidates (an array each). parallel/ does what it says, plan/ and cost/
count by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.config.schedules import Pipeline, splits_backward
from shardwise.plan.grid import Degrees, expert_shards

MAX_DEFERRED_SUMS = 4
"""Units whose gradients CPU workers sum at once, behind the backward pass."""
Flag = Any
"""A bool of a Layout; an array of them of a Space."""


class Choices(Degrees, Pipeline, Protocol):
    """Degrees, and the choices that decide who keeps what: a Layout or a Space."""

    @property
    def zero(self) -> Any: ...
    @property
    def offload(self) -> Any: ...


@dataclass(frozen=True)
class Engine:
    """How the data axes are held; exactly one of `single`, `replicated` and `sharded` is true."""

    zero: Any
    """The ZeRO stage that has an effect: 0 where nobody shares the weights and nothing is offloaded."""
    single: Flag
    replicated: Flag
    sharded: Flag
    splits_backward: Flag

    @property
    def name(self) -> str:
        """The word for it, for a Layout."""
        return "single" if self.single else "replicated" if self.replicated else "sharded"

    @property
    def keeps_gathered(self) -> Flag:
        """Weights are gathered once a step and kept until it ends; elsewhere they are let go after each
        use."""
        return self.sharded & ((self.zero == 1) | (self.zero == 2) | self.splits_backward)

    @property
    def reduces_each(self) -> Flag:
        """Gradients are reduced in the backward of each micro-batch; elsewhere in the last one, or behind
        it."""
        return self.sharded & (self.zero >= 2) & (self.splits_backward == 0)

    def copies(self, axis: str) -> str:
        """Of a Layout: the devices among which FSDP2 sums a unit that is sharded over this axis: all who hold
        the same, or the replicas where the others have scattered the sum already."""
        return "replica" if self.zero else f"replica x {axis}"

    def keeps_whole_gradients(self, accumulation: Any) -> Flag:
        """FSDP2 holds unreduced gradients between micro-batches, in the dtype of sums, beside the parameters'
        own."""
        waits = ((self.zero < 2) & (accumulation > 1)) | self.splits_backward
        return self.sharded & waits


def engine_of(layout: Choices, experts: int) -> Engine:
    """The engine of a layout, or of each candidate of a Space, for a model with so many experts (0: none)."""
    has_experts = experts > 0
    stage = 0 if layout.zero is None else layout.zero
    zero = stage * (shares_weights(layout, experts) | (layout.offload == 1))
    copies = (layout.replica * layout.data * layout.context > 1) | (has_experts & (expert_shards(layout) > 1))
    single = (zero == 0) & (copies == 0)
    replicated = (zero == 0) & (copies == 1) & (layout.tensor * layout.pipeline == 1) & (not has_experts)
    return Engine(zero, single, replicated, (single | replicated) == 0, splits_backward(layout))


def shares_weights(degrees: Degrees, experts: int) -> Flag:
    """Whether another device of the same replica holds the same weights: else there is nothing to shard."""
    return (degrees.data * degrees.context > 1) | ((experts > 0) & (expert_shards(degrees) > 1))
