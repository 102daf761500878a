"""Expert parallelism: each device of a group holds some of the experts, and tokens are sent to them (GShard,
Lepikhin et al. 2020).

With E experts on e devices, device i holds experts [i · E/e, (i + 1) · E/e). A token may have several of its
experts on one device. Its row goes there once, and comes back once, as the weighted sum of what these experts
made of it. (DeepSeek-V3, 2024, sends a row once to each node.) With experts 0 to 3 on device 0 and 4 to 7 on
device 1, where token a has chosen 0, 1, 5, 7 and token b 0, 1, 2, 3:

    a, b ─┬─ rows a, b ─▶ device 0: copies a₀ b₀ a₁ b₁ b₂ b₃ ─▶ its experts ─▶ sums a, b ─┬─▶ a + a, b
          └─ row a ─────▶ device 1: copies a₅ a₇ ─────────────▶ its experts ─▶ sum a ─────┘

`Dispatched` does this, in four all-to-alls:

1. sizes: how many rows, and how many choices of experts, go from each device to each;
2. rows, by device and then by token: tokens · e (1 - C(E - E/e, k) / C(E, k)) of them, if any k experts are
   equally likely, and not tokens · k. For 8 of 64 experts on 4 devices these are 3.7 rows a token and not 8;
3. choices, in the order of rows: the weight and the expert of each, and whether it is the first one of its
   row. In backward the gradients of the weights come back;
4. sums, one for each row.

Backward repeats all but the first. Of the rows (e - 1)/e go to other devices if the load is even. No row is
padded and none dropped, so a device may get a row of every token, or none. It takes part in every collective,
forward and backward, in any case.

The number of rows must be known before they arrive. So the sizes are sent first, and the host reads them in
each layer of each micro-batch. There the host waits for the GPU, whose queue runs empty.

A user's module of experts gets rows that its own router has sorted by expert, and the router makes the sum.
So `Exchanged` sends each of these rows to its expert, and its output back:

    rows by expert → all-to-all → rows by source, then expert → by expert → experts
    → undo → all-to-all → rows as they were

Where a sequence is split over several devices, the balancing loss needs sums over all of it. The gradient of
that sum is the identity: every device computes the same loss from the sum, and passes the gradient on to its
own summand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import all_to_all, eager, total
from shardwise.config.axes import SEQUENCE_AXES
from shardwise.models import MixtureOfExperts, Sharding
from shardwise.models.experts import Experts
from shardwise.models.replace import put_in_place
from shardwise.models.sorting import (
    Sorting,
    copy_rows,
    count_values,
    inverse_permutation,
    permute,
    sort_unevenly,
    sum_rows,
    weighted_sum,
)
from shardwise.models.torch_dtypes import wide
from shardwise.parallel.modules import ParallelModule, Share, parallel_module

AXIS = "expert"
ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes (rows sorted by expert, number of rows of each expert) and returns the experts' outputs."""


def expert_modules(model: nn.Module, table: Sharding) -> list[nn.Module]:
    """Return the modules that the sharding table calls experts."""
    roles = ((table.role(path), module) for path, module in model.named_modules())
    return [module for role, module in roles if role is not None and role.kind == "experts"]


def split_over_experts(model: nn.Module, table: Sharding, comm: Comm) -> nn.Module:
    """Return the model, on the meta device, with this device's experts: rows are sent to the devices that
    have their experts."""
    split: dict[nn.Module, nn.Module] = {}
    for module in expert_modules(model, table):
        if comm.mesh.size(AXIS) > 1:
            for name, weight in list(module.named_parameters(recurse=False)):
                mesh = comm.mesh.sub(AXIS)
                sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))
            kind = Dispatched if isinstance(module, Experts) else Exchanged
            split[module] = parallel_module(module, kind, Share.of(comm, AXIS))
    model = put_in_place(model, split)
    split_sequences(model, comm)
    return model


class SharedExperts(ParallelModule):
    """Experts of which this device has some."""

    def describe_share(self) -> str:
        """Return the range of this device's experts."""
        experts = next(weight.shape[0] for weight in self._parameters.values() if weight is not None)
        part = self.parallel_share.range_of(experts)
        return f"experts {part.start}:{part.stop} of {experts}"


class Dispatched(SharedExperts):
    """Experts of a mixture: a token's row is sent once to each device that has experts for it, and the
    weighted sum of their outputs comes back."""

    outputs: Callable[[Tensor, Tensor, Sorting], Tensor]

    @eager
    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return for each token the sum of its experts' outputs, times their weights, as `Experts` does."""
        share = self.parallel_share
        experts = len(share.range_of(counts.shape[0]))
        routes = make_routes(chosen, experts, share.comm)
        rows = routes.send_rows(tokens)
        arrived = routes.send_choices(weights, rows.shape[0])
        outputs = self.outputs(rows, count_values(arrived.experts, experts), arrived.sorting)
        return routes.return_rows(weighted_sum(outputs, arrived.weights, arrived.sorting))


class Choices(NamedTuple):
    """Choices of this device's experts by the rows of all devices, in the order of the rows."""

    experts: Tensor
    """The chosen experts, numbered from 0 on this device: (choices,)."""
    weights: Tensor
    """The factors for their outputs: (choices,)."""
    sorting: Sorting
    """How the rows are copied to the experts: one copy for each choice."""


@dataclass(frozen=True)
class Routes:
    """Where the tokens of this device go in a layer, and how many rows come from other devices."""

    comm: Comm
    copies: Sorting
    """The rows to send: one copy of a token for each device that has experts for it, sorted by device."""
    order: Tensor
    """The choices of all tokens in the order in which they are sent: by device, then by token."""
    experts: Tensor
    """The chosen experts in this order, numbered from 0 on each device."""
    is_first: Tensor
    """In this order, 1 for the first choice of each row that is sent, else 0."""
    sent: Sizes
    received: Sizes

    def send_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows that come to this device, by source, from the tokens of this one."""
        rows = copy_rows(tokens, self.copies)
        return all_to_all(rows, self.comm, AXIS, self.sent.rows, self.received.rows)

    def send_choices(self, weights: Tensor, rows: int) -> Choices:
        """Return the choices by the `rows` rows that came, from the weights (tokens, experts_per_token) of
        this device's choices."""
        weights = weights.flatten().to(wide(weights.dtype))
        weights = permute(weights, self.order, inverse_permutation(self.order))
        # The wide dtype has all whole numbers up to 2**24.
        numbers = (number.to(weights.dtype) for number in (self.experts, self.is_first))
        leaving = torch.stack((weights, *numbers), 1)  # (choices, 3)
        arrived = all_to_all(leaving, self.comm, AXIS, self.sent.choices, self.received.choices)
        weights, *columns = arrived.unbind(1)
        experts, is_first = (column.detach().long() for column in columns)
        row, order = is_first.cumsum(0) - 1, experts.argsort(stable=True)
        return Choices(experts, weights, sort_unevenly(row[order], inverse_permutation(order), rows))

    def return_rows(self, rows: Tensor) -> Tensor:
        """Return the sum for each token of this device, from the rows for all devices."""
        rows = all_to_all(rows, self.comm, AXIS, self.received.rows, self.sent.rows)
        return sum_rows(rows, self.copies)


class Sizes(NamedTuple):
    """Numbers that are exchanged with each device."""

    rows: list[int]
    choices: list[int]


def make_routes(chosen: Tensor, experts: int, comm: Comm) -> Routes:
    """Return the routes to the chosen experts (tokens, experts_per_token), of which each device has
    `experts`. The devices exchange how many rows they send, and the host waits for these numbers."""
    (tokens, per_token), devices = chosen.shape, comm.mesh.size(AXIS)
    order = (chosen.flatten() // experts).argsort(stable=True)
    numbers = chosen.flatten()[order]
    device, token = numbers // experts, order // per_token
    row = device * tokens + token
    is_first = torch.ones_like(row)
    is_first[1:] = row[1:] != row[:-1]
    rows_to = row.new_zeros(devices).scatter_add_(0, device, is_first)
    leaving = torch.stack((rows_to, count_values(device, devices)), 1)  # (devices, 2)
    arriving = comm.all_to_all(leaving, AXIS)
    sizes = torch.cat((leaving, arriving), 1).t().tolist()  # the host waits here
    sent, received = Sizes(*sizes[:2]), Sizes(*sizes[2:])
    # Choices of one row write the same token to one place.
    places = token.new_empty(sum(sent.rows)).scatter_(0, is_first.cumsum(0) - 1, token)
    copies = sort_unevenly(places, places.argsort(stable=True), tokens)
    return Routes(comm, copies, order, numbers % experts, is_first, sent, received)


class Exchanged(SharedExperts):
    """Experts of a user's module: rows that its router has sorted are sent to the device that has their
    expert, and the outputs back."""

    @eager
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs, sorted by expert, of rows (n, hidden), of which counts[i] are for
        expert i."""
        return exchange(super().forward, rows, counts, self.parallel_share.comm)


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
