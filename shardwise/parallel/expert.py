"""Expert parallelism: each device of a group holds some of the experts, and tokens are sent to them (GShard,
Lepikhin et al. 2020).

With E experts on e devices, device i holds experts [i · E/e, (i + 1) · E/e). Rows that a device has sorted by
expert are therefore already sorted by device. One all-to-all with uneven parts sends each row to its expert,
and another sends it back:

    rows by expert → all-to-all → rows by source, then expert → by expert → experts
    → undo → all-to-all → rows as they were

In each of the two directions of a layer a device sends its tokens × experts_per_token rows, of which (e -
1)/e go to other devices when the load is even, and the same again in backward: four all-to-alls of rows per
layer and micro-batch, and a small one of counts. No row is padded and none dropped, so a device may get all
rows of all devices, or none. It takes part in every collective, forward and backward, in any case.

The number of rows must be known before they arrive. So the counts are sent first, and the host reads them
in each layer of each micro-batch. There the host waits for the GPU, whose queue runs empty.

Where a sequence is split over several devices, the balancing loss needs sums over all of it. The gradient of
that sum is the identity: every device computes the same loss from the sum, and passes the gradient on to its
own summand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import all_to_all, eager, total
from shardwise.config.axes import SEQUENCE_AXES
from shardwise.models import MixtureOfExperts, Sharding
from shardwise.models.replace import put_in_place
from shardwise.models.sorting import Sorting, inverse_permutation, permute
from shardwise.parallel.modules import ParallelModule, Share, parallel_module

AXIS = "expert"
ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes (rows sorted by expert, number of rows of each expert) and returns the experts' outputs."""


def expert_modules(model: nn.Module, table: Sharding) -> list[nn.Module]:
    """Return the modules that the sharding table calls experts."""
    roles = ((table.role(path), module) for path, module in model.named_modules())
    return [module for role, module in roles if role is not None and role.kind == "experts"]


def split_over_experts(model: nn.Module, table: Sharding, comm: Comm) -> nn.Module:
    """Return the model, on the meta device, with this device's experts: every row is sent to the device that
    has its expert."""
    split: dict[nn.Module, nn.Module] = {}
    for module in expert_modules(model, table):
        if comm.mesh.size(AXIS) > 1:
            for name, weight in list(module.named_parameters(recurse=False)):
                mesh = comm.mesh.sub(AXIS)
                sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))
            split[module] = parallel_module(module, Exchanged, Share.of(comm, AXIS))
    model = put_in_place(model, split)
    split_sequences(model, comm)
    return model


class Exchanged(ParallelModule):
    """Experts of which this device has some: rows are sent to the device that has their expert, and back."""

    @eager
    def forward(self, rows: Tensor, counts: Tensor, sorting: Sorting | None = None) -> Tensor:
        """Return the experts' outputs, sorted by expert, of rows (n, hidden), of which counts[i] are for
        expert i; `sorting` is given where the rows are not sorted yet."""
        rows = rows if sorting is None else permute(rows, *sorting)
        return exchange(super().forward, rows, counts, self.parallel_share.comm)

    def describe_share(self) -> str:
        """Return the range of this device's experts."""
        experts = next(weight.shape[0] for weight in self._parameters.values() if weight is not None)
        part = self.parallel_share.range_of(experts)
        return f"experts {part.start}:{part.stop} of {experts}, rows sent to their experts and back"


def split_sequences(model: nn.Module, comm: Comm) -> None:
    """Make every mixture in the model sum its balancing loss over the axes whose devices share a sequence."""
    shared_axes = [axis for axis in SEQUENCE_AXES if comm.mesh.size(axis) > 1]
    if not shared_axes:
        return

    @eager
    def sum_over_axes(x: Tensor) -> Tensor:
        for axis in shared_axes:
            x = total(x, comm, axis)
        return x

    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.sum_sequence = sum_over_axes


@eager
def exchange(experts: ExpertFunction, rows: Tensor, counts: Tensor, comm: Comm) -> Tensor:
    """Return the experts' outputs of rows sorted by global expert, of which counts[i] are for expert i.

    `experts` runs this device's experts, numbered from 0, on the rows of all devices.
    """
    leaving = counts.view(comm.mesh.size(AXIS), -1)  # (device, its experts)
    arriving = comm.all_to_all(leaving, AXIS)  # (source, this device's experts)
    sent, received = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()  # the host waits here
    order = _by_expert(arriving, sum(received))
    back = inverse_permutation(order)
    arrived = permute(all_to_all(rows, comm, AXIS, sent, received), order, back)
    outputs = permute(experts(arrived, arriving.sum(0)), back, order)
    return all_to_all(outputs, comm, AXIS, received, sent)


def _by_expert(counts: Tensor, total: int) -> Tensor:
    """Return the permutation from (source, expert) order to (expert, source) order, from the counts of each
    pair."""
    sources, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(sources)
    return expert.repeat_interleave(counts.flatten(), output_size=total).argsort(stable=True)
