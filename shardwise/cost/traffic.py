"""What crosses between devices in a step, collective by collective: the ledger of a run that has not happened
yet.

`observe/ledger.py` writes down what a run really sends; the formulas here say the same beforehand, for every
candidate of a `Space` at once, of rank 0: the first device of the first pipeline rank.
tests/parallel/test_predictions.py holds the two together, to the byte and the call. Bytes are of the full
tensor, as in the ledger; a ring puts a known factor of it on the wire.

With b sequences in a micro-batch, S = sequence / context tokens of each here, h the hidden width and a bytes
an activation:

| axis     | moves                                                                | from                    |
| -------- | -------------------------------------------------------------------- | ----------------------- |
| shards   | gathers of weights and scatters of gradients, unit by unit           | Rajbhandari et al. 2020 |
|          | (parallel/data.py)                                                   |                         |
| replica  | the scattered gradients, summed over replicas once a step            | Zhao et al. 2023        |
| tensor   | b S h a: a gather before and a sum after each pair of matrices, in   | Korthikanti et al. 2022 |
|          | each pass; gathers that backward repeats; three numbers per token    |                         |
|          | for the loss                                                         |                         |
| context  | keys and values around a ring, or heads by all-to-all                | Liu 2023; Jacobs 2023   |
| expert   | b S h a / tensor for each expert that a token visits, to it and back | Lepikhin et al. 2020    |
| pipeline | b S h a / tensor for each micro-batch and border between stages      | Huang et al. 2019       |

and once a step the numbers that all ranks share, a sum of squares for each way of sharding, and the gradients
of weights that are whole on every tensor device.

What cannot be known beforehand: how many rows come to the experts of a device depends on the routing, and two
of the four all-to-alls of a layer carry the rows that came. They are given for an even load. Everything else
is exact, for sequences without document boundaries (`data.reset_attention` adds small messages), stages cut
by cost, and recomputation of none, selected parts or all of a block. With "cuda", blocks are taken to be
compiled, which keeps gathered sequences where plain blocks gather again.

What rank 0 has is in `first_rank.py`, what moves for its weights in `weight_flows.py`, for its activations in
`block_flows.py`, and once a step in `step_flows.py`. `predict.py` prices these flows and derives no volume of
its own: the bytes in a prediction, in the flows and in the ledger are the same. What other programs do
differently (`Software`) is said here too.

The cost: some forty products of arrays, whatever the model's depth, a microsecond a candidate. What depends
on few distinct numbers (sizes of units, blocks of a cut) is worked out once for each of them and looked
up.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.cost.block_flows import context_flows, expert_flows, loss_flows, stage_flows, tensor_flows
from shardwise.cost.first_rank import FirstRank
from shardwise.cost.flow import Flow, When
from shardwise.cost.software import SHARDWISE, Software
from shardwise.cost.space import Space, Workload
from shardwise.cost.step_flows import step_flows
from shardwise.cost.weight_flows import gathered_ahead, weight_flows
from shardwise.plan.grid import label


def flows(work: Workload, space: Space, stack: Software = SHARDWISE, device: str = "cuda") -> list[Flow]:
    """Everything that rank 0 sends in a step, for every candidate: one flow for each kind, axis and time that
    occurs. On a "cuda" device blocks are compiled and the loss has larger chunks than on a "cpu"."""
    layouts, index = space.layouts
    rank = FirstRank.of(work, layouts, stack, device)
    of_layouts = _merged([*weight_flows(rank), *step_flows(rank)])  # as of one micro-batch
    rank = rank.of_candidates(space, index)
    of_candidates = (flow for family in _OF_CANDIDATES for flow in family(rank))
    return _merged([*(flow.of_candidates(index, space.accumulation) for flow in of_layouts), *of_candidates])


_OF_CANDIDATES = (tensor_flows, loss_flows, context_flows, expert_flows, stage_flows, gathered_ahead)
"""Those that depend on the micro-batch or on recomputation, and not on the layout alone."""


def _merged(sent: Iterable[Flow]) -> list[Flow]:
    """One flow for each kind, axis and time that any candidate has."""
    merged: dict[tuple[str, str, When], Flow] = {}
    for flow in sent:
        if flow.count.any():
            key = flow.kind, flow.axis, flow.when
            merged[key] = merged[key] + flow if key in merged else flow
    return list(merged.values())


def totals(sent: list[Flow], space: Space, index: int) -> dict[str, dict[str, int]]:
    """One candidate's flows as the ledger of a step writes them."""
    sums, layout = dict[str, list[int]](), space.layout(index)
    for flow in sent:
        if flow.count[index]:
            entry = sums.setdefault(f"{flow.kind}/{label(flow.axis, layout)}", [0, 0])
            entry[0] += int(flow.count[index])
            entry[1] += int(flow.bytes[index])
    return {key: {"count": count, "bytes": size} for key, (count, size) in sorted(sums.items())}
