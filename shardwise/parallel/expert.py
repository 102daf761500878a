"""Expert parallelism: each device of a group holds some of the experts, and tokens travel to them (GShard,
Lepikhin et al. 2020).

With E experts on e devices, device i holds experts [i · E/e, (i + 1) · E/e). Rows that a device has sorted by
expert are therefore already sorted by owner, and one all-to-all with uneven parts brings each to its expert;
another brings it back:

    rows by expert → all-to-all → rows by source, then expert → by expert → experts
    → undo → all-to-all → rows as they were

In each of the two directions of a layer a device sends its tokens × experts_per_token rows, of which (e -
1)/e leave it when the load is even, and the same again in backward: four all-to-alls a layer and micro-batch.
No row is padded and none dropped, so a device whose experts are all chosen by everybody computes on
everything, and one whose experts nobody chose on nothing; both take part in every collective, forward and
backward, as the others do.

How many rows will come must be known before they do. So the counts travel first, and the host reads them: the
one place in a step where a GPU's queue runs dry, once a layer.

Where a sequence lies on several devices, the balancing loss needs sums over all of it. The gradient of that
sum is the identity: every device starts the same loss from the sum, and each carries the gradient on through
its own summand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import all_to_all, eager, total
from shardwise.models import MixtureOfExperts, Sharding
from shardwise.models.replace import put_in_place
from shardwise.models.sorting import Sorting, inverse_permutation, permute
from shardwise.parallel.modules import ParallelModule, Share, parallel_module

AXIS = "expert"
Visit = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by expert, rows of each expert) to the rows after their expert."""


def expert_modules(model: nn.Module, table: Sharding) -> list[nn.Module]:
    """The modules that the sharding table calls experts."""
    roles = ((table.role(path), module) for path, module in model.named_modules())
    return [module for role, module in roles if role is not None and role.kind == "experts"]


def split_over_experts(model: nn.Module, table: Sharding, comm: Comm) -> nn.Module:
    """Return the model, on the meta device, with this device's experts in it: every row is sent to the owner
    of its expert."""
    split: dict[nn.Module, nn.Module] = {}
    for module in expert_modules(model, table):
        if comm.mesh.size(AXIS) > 1:
            for name, weight in list(module.named_parameters(recurse=False)):
                shared = distribute_tensor(
                    weight.detach(), comm.mesh.sub(AXIS), [Shard(0)], src_data_rank=None
                )
                module.register_parameter(name, nn.Parameter(shared, requires_grad=weight.requires_grad))
            split[module] = parallel_module(module, Exchanged, Share.of(comm, AXIS))
    model = put_in_place(model, split)
    split_sequences(model, comm)
    return model


class Exchanged(ParallelModule):
    """Experts of which this device has some: rows travel to the device that has their expert, and back."""

    @eager
    def forward(self, rows: Tensor, counts: Tensor, sorting: Sorting | None = None) -> Tensor:
        """Rows (n, hidden) sorted by expert, or to be sorted, of which expert i takes counts[i], to the
        sorted rows after their expert."""
        rows = rows if sorting is None else permute(rows, *sorting)
        return exchange(super().forward, rows, counts, self.parallel_share.comm)

    def describe_share(self) -> str:
        """This device's experts."""
        experts = next(weight.shape[0] for weight in self._parameters.values() if weight is not None)
        own = self.parallel_share.range_of(experts)
        return f"experts {own.start}:{own.stop} of {experts}, rows sent to their experts and back"


def split_sequences(model: nn.Module, comm: Comm, axes: Sequence[str] = ("context", "tensor")) -> None:
    """Tell every mixture in the model that its sequences lie in parts on the devices of these axes."""
    several = [axis for axis in axes if comm.mesh.size(axis) > 1]
    if not several:
        return

    @eager
    def over_axes(x: Tensor) -> Tensor:
        for axis in several:
            x = total(x, comm, axis)
        return x

    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.sum_sequence = over_axes


@eager
def exchange(experts: Visit, rows: Tensor, counts: Tensor, comm: Comm) -> Tensor:
    """Rows sorted by global expert, counts[i] of expert i, to the same rows after their expert, wherever it
    is.

    `experts` runs this device's experts, numbered from 0, on the rows of all devices.
    """
    ours = counts.view(comm.mesh.size(AXIS), -1)  # (owner, its experts)
    theirs = comm.all_to_all(ours, AXIS)  # (source, our experts)
    sent, received = torch.stack((ours.sum(1), theirs.sum(1))).tolist()  # the host waits here
    order = _by_expert(theirs, sum(received))
    back = inverse_permutation(order)
    arrived = permute(all_to_all(rows, comm, AXIS, sent, received), order, back)
    visited = permute(experts(arrived, theirs.sum(0)), back, order)
    return all_to_all(visited, comm, AXIS, received, sent)


def _by_expert(counts: Tensor, total: int) -> Tensor:
    """The order that takes rows from (source, expert) to (expert, source), given how many there are of
    each."""
    sources, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(sources)
    return expert.repeat_interleave(counts.flatten(), output_size=total).argsort(stable=True)
