"""How devices with the same weights keep them equal: the engine, and when it communicates.

There are three engines:

| engine       | where                                             | what runs there (parallel/data.py)     |
| ------------ | ------------------------------------------------- | -------------------------------------- |
| `single`     | no other device holds the same weights            | a plain model                          |
| `replicated` | zero = 0, without tensor, pipeline or expert axes | torch's DistributedDataParallel        |
| `sharded`    | everywhere else                                   | FSDP2; if zero = 0, a shard is a whole |
|              |                                                   | weight                                 |

FSDP2 communicates as follows under each ZeRO stage (Rajbhandari et al., 2020):

| zero | weights are gathered             | gradients are reduced |
| ---- | -------------------------------- | --------------------- |
| 0    | never: a shard is a whole weight | in the last backward  |
| 1    | once a step, and kept            | in the last backward  |
| 2    | once a step, and kept            | in each backward      |
| 3    | in each forward and backward     | in each backward      |

Schedules that split backward into two halves run the second half outside of the hooks in which FSDP2 gathers
and reduces. With them weights stay gathered, and gradients stay whole, until the step ends, in every ZeRO
stage.

All functions use comparisons, `&` and `|`, so that they work for a Layout (with bools) and for the cost
model's Space of candidates (with arrays). parallel/ runs what this file decides; plans/ and cost/ count it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from shardwise.config.schedules import Numbers, Pipeline, splits_backward
from shardwise.plans.grid import Degrees, expert_shards

MAX_DEFERRED_SUMS = 4
"""Number of units whose gradients CPU workers sum at the same time, during the backward pass."""


class Choices(Degrees, Pipeline, Protocol):
    """Degrees of a Layout or a Space, and the settings that decide where states are."""

    @property
    def zero(self) -> Numbers:
        """ZeRO stage; None: not chosen yet."""

    @property
    def offload(self) -> Numbers:
        """Whether states are in host memory between uses."""


@dataclass(frozen=True)
class Engine:
    """The engine of the data axes; exactly one of `single`, `replicated` and `sharded` is true."""

    zero: Numbers
    """Effective ZeRO stage: 0 if no other device has the same weights and nothing is offloaded."""
    single: Numbers
    replicated: Numbers
    sharded: Numbers
    splits_backward: Numbers

    @property
    def name(self) -> str:
        """Name of the engine of a Layout."""
        return "single" if self.single else "replicated" if self.replicated else "sharded"

    @property
    def keeps_gathered(self) -> Numbers:
        """Whether weights are gathered once and kept until the step ends, rather than freed after each
        use."""
        return self.sharded & ((self.zero == 1) | (self.zero == 2) | self.splits_backward)

    @property
    def reduces_each(self) -> Numbers:
        """Whether gradients are reduced in the backward of each micro-batch, rather than of the last one."""
        return self.sharded & (self.zero >= 2) & (self.splits_backward == 0)

    def without_copies(self) -> Engine:
        """Return the engine of this layout if all devices use one copy of the weights, in shared memory."""
        return replace(self, zero=0, single=True, replicated=False, sharded=False)

    def copies(self, axis: str) -> str:
        """Return the axis over which FSDP2 sums the gradients of a unit that is sharded over `axis`.

        Without ZeRO this axis has all devices with the same weights. With ZeRO it has the replicas, because
        the devices of `axis` have already reduce-scattered the sum.
        """
        return "replica" if self.zero else f"replica x {axis}"

    def keeps_whole_gradients(self, accumulation: Numbers) -> Numbers:
        """Return whether FSDP2 keeps unreduced gradients between micro-batches, in the dtype of sums."""
        return self.sharded & (((self.zero < 2) & (accumulation > 1)) | self.splits_backward)


def engine_of(layout: Choices, experts: int) -> Engine:
    """Return the engine of a layout, or of each candidate of a Space, for a model with `experts` experts."""
    has_experts = experts > 0
    stage = 0 if layout.zero is None else layout.zero
    zero = stage * (shares_weights(layout, experts) | (layout.offload == 1))
    copies = (layout.replica * layout.data * layout.context > 1) | (has_experts & (expert_shards(layout) > 1))
    single = (zero == 0) & (copies == 0)
    replicated = (zero == 0) & (copies == 1) & (layout.tensor * layout.pipeline == 1) & (not has_experts)
    return Engine(zero, single, replicated, (single | replicated) == 0, splits_backward(layout))


def shares_weights(degrees: Degrees, experts: int) -> Numbers:
    """Return whether several devices of a replica hold the same weights, so that ZeRO can shard them."""
    return (degrees.data * degrees.context > 1) | ((experts > 0) & (expert_shards(degrees) > 1))
