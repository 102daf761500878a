"""The collectives of a step, with their bytes: a prediction of the ledger of a run.

`observe/ledger.py` counts what a run sends. The formulas here predict that count for rank 0, the first device
of the first pipeline rank, for every candidate of a `Space` at once. tests/parallel/test_predictions.py
compares the two: they must agree in every byte and every call. Bytes are those of the full tensor, as in the
ledger; a ring sends a known multiple of them.

With b sequences in a micro-batch, S = sequence / context tokens of each on a device, hidden width h and
activations of a bytes:

| axis     | moves                                                                | from                    |
| -------- | -------------------------------------------------------------------- | ----------------------- |
| shards   | gathers of weights and scatters of gradients, unit by unit           | Rajbhandari et al. 2020 |
|          | (parallel/data.py)                                                   |                         |
| replica  | the scattered gradients, summed over replicas once a step            | Zhao et al. 2023        |
| tensor   | b S h a: a gather before and a sum after each pair of matrices, in   | Korthikanti et al. 2022 |
|          | each pass; gathers that backward repeats; three numbers per token    |                         |
|          | for the loss                                                         |                         |
| context  | keys and values around a ring, or heads by all-to-all                | Liu 2023; Jacobs 2023   |
| expert   | b S h a / tensor for each device that a token visits, to it and back | Lepikhin et al. 2020    |
|          | (parallel/expert.py); three numbers for each choice of an expert     |                         |
| pipeline | b S h a / tensor for each micro-batch and border between stages      | Huang et al. 2019       |

Once a step there are also the numbers that all ranks share, a sum of squares for each way of sharding, and
the gradients of weights that every tensor device has whole.

One thing cannot be predicted: the routing decides how many devices a token visits, and how many rows and
choices come to a device. They are given for an even load. Everything else is exact, for sequences without
document boundaries (`data.reset_attention` adds small messages), stages cut by cost, and recomputation of
nothing, selected parts or whole blocks. On "cuda", blocks are assumed to be compiled; compiled blocks keep
gathered sequences that plain blocks gather again.

`first_rank.py` describes rank 0. `weight_flows.py` has the flows of its weights, `block_flows.py` those of
its activations, and `step_flows.py` those that run once a step. They also cover what other programs do
differently (`Software`). `predict.py` uses only these flows, so a prediction has the same bytes as the
ledger.

Some forty products of arrays are computed for any depth of the model, which takes about a microsecond per
candidate. What depends on few distinct numbers (sizes of units, blocks of a cut) is computed once for each of
them and looked up.
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
from shardwise.plans.grid import label


def flows(work: Workload, space: Space, stack: Software = SHARDWISE, device: str = "cuda") -> list[Flow]:
    """Return all that rank 0 sends in a step, for every candidate: one flow for each kind, axis and time.

    On a "cuda" device blocks are compiled, and the loss has larger chunks than on a "cpu".
    """
    layouts, index = space.layouts
    rank = FirstRank.of(work, layouts, stack, device)
    of_layouts = _merged([*weight_flows(rank), *step_flows(rank)])  # with one micro-batch
    rank = rank.of_candidates(space, index)
    of_candidates = (flow for family in _OF_CANDIDATES for flow in family(rank))
    return _merged([*(flow.of_candidates(index, space.accumulation) for flow in of_layouts), *of_candidates])


_OF_CANDIDATES = (tensor_flows, loss_flows, context_flows, expert_flows, stage_flows, gathered_ahead)
"""Flows that depend on the micro-batch or on recomputation, and not on the layout alone."""


def _merged(sent: Iterable[Flow]) -> list[Flow]:
    """Return one flow for each kind, axis and time that any candidate has."""
    merged: dict[tuple[str, str, When], Flow] = {}
    for flow in sent:
        if flow.count.any():
            key = flow.kind, flow.axis, flow.when
            merged[key] = merged[key] + flow if key in merged else flow
    return list(merged.values())


def totals(sent: list[Flow], space: Space, index: int) -> dict[str, dict[str, int]]:
    """Return one candidate's flows in the form of a step's ledger."""
    sums, layout = dict[str, list[int]](), space.layout(index)
    for flow in sent:
        if flow.count[index]:
            entry = sums.setdefault(f"{flow.kind}/{label(flow.axis, layout)}", [0, 0])
            entry[0] += int(flow.count[index])
            entry[1] += int(flow.bytes[index])
    return {key: {"count": count, "bytes": size} for key, (count, size) in sorted(sums.items())}
