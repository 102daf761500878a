"""Predicted collectives against the formulas of papers and the schedules' own lists of actions, and their
properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import Model
from shardwise.config.parameters import count, parameter_shapes
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.block_flows import devices_per_token
from shardwise.cost.flow import Flow
from shardwise.cost.software import Software
from shardwise.cost.space import AT_ONCE, RECOMPUTE, Space, Workload, space_of
from shardwise.cost.traffic import flows, totals
from shardwise.plans import make_schedule, stage_blocks
from shardwise.plans.grid import devices

EVEN = Model(layers=8, hidden=64, heads=16, kv_heads=4, head_dim=4, ffn=128, vocabulary=256)
EXPERTS = Model(
    layers=8,
    hidden=64,
    heads=16,
    kv_heads=4,
    head_dim=4,
    ffn=128,
    vocabulary=256,
    experts=8,
    experts_per_token=2,
)
LENGTH = 64
powers = st.sampled_from((1, 2, 4))


@st.composite
def candidates(draw: st.DrawFn) -> dict[str, int]:
    row = {axis: draw(powers) for axis in ("pipeline", "replica", "data", "context", "tensor", "micro_batch")}
    row["schedule"] = draw(st.integers(0, len(SCHEDULES) - 1))
    row["stages_per_rank"] = draw(st.sampled_from((1, 2)))
    row["accumulation"] = draw(st.integers(1, 9))
    row["zero"], row["recompute"], row["ring"] = (
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1)),
    )
    return row


def work(model: Model = EVEN) -> Workload:
    return Workload(model, LENGTH, 64)


def sent(row: dict[str, int], model: Model = EVEN, device: str = "cpu") -> dict[str, dict[str, int]]:
    space = space_of([row])
    return totals(flows(work(model), space, device=device), space, 0)


def test_blocks_that_are_compiled_on_a_cpu_send_what_they_do_on_a_gpu() -> None:
    space = space_of([{"tensor": 2, "accumulation": 2}])
    on_gpu, on_cpu, compiled, not_on_gpu = (
        totals(flows(replace(work(), compile=setting), space, device=device), space, 0)
        for setting, device in (("auto", "cuda"), ("auto", "cpu"), (True, "cpu"), (False, "cuda"))
    )
    assert compiled == on_gpu != on_cpu == not_on_gpu


def number(row: dict[str, int], kind: str, axis: str, when: str, model: Model = EVEN) -> tuple[float, float]:
    """Count and bytes of the flows of this kind, axis and time."""
    found = [
        flow
        for flow in flows(work(model), space_of([row]), device="cpu")
        if (flow.kind, flow.axis) == (kind, axis)
    ]
    chosen = [flow for flow in found if flow.when == when]
    return sum(float(flow.count[0]) for flow in chosen), sum(float(flow.bytes[0]) for flow in chosen)


@settings(max_examples=30)
@given(st.lists(candidates(), min_size=1, max_size=12), st.sampled_from((EVEN, EXPERTS)))
def test_a_candidate_among_others_sends_what_it_sends_alone(rows: list[dict[str, int]], model: Model) -> None:
    space = space_of(rows)
    together = flows(work(model), space, device="cpu")
    for place, row in enumerate(rows):
        assert totals(together, space, place) == sent(row, model)


@settings(max_examples=60)
@given(st.lists(candidates(), min_size=1, max_size=12), st.sampled_from((EVEN, EXPERTS)))
def test_every_message_has_bytes_and_somebody_to_go_to(rows: list[dict[str, int]], model: Model) -> None:
    space = space_of(rows)
    for flow in flows(work(model), space):
        assert flow.when in ("forward", "backward", "ends", "once", "step", "pipeline")
        assert np.array_equal(flow.count > 0, flow.bytes > 0)
        assert (devices(flow.axis, space)[flow.count > 0] > 1).all()
        assert np.array_equal(flow.count, np.floor(flow.count))
        assert np.array_equal(flow.bytes, np.floor(flow.bytes))


@given(candidates())
def test_one_device_sends_nothing(row: dict[str, int]) -> None:
    assert sent({**row, **dict.fromkeys(("pipeline", "replica", "data", "context", "tensor"), 1)}) == {}


def test_more_candidates_than_are_computed_at_once_keep_their_places() -> None:
    small, large = {"data": 2, "zero": 3}, {"tensor": 2}
    space = space_of([*[small] * AT_ONCE, large])
    found = flows(work(), space, device="cpu")
    assert totals(found, space, 0) == sent(small)
    assert totals(found, space, AT_ONCE) == sent(large)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_zero_moves_what_its_table_says(micro_batches: int) -> None:
    """parallel/data.py: c P once, or c (2 P - R) in each micro-batch; r P; in bfloat16, of a model that
    divides evenly."""
    total, root = count(EVEN), 256 * 64 + 64
    row = {"data": 4, "accumulation": micro_batches}
    assert sent({**row, "zero": 0})["all_reduce/data"]["bytes"] == 4 * total + 8 * (4 + 2 * 4)
    for zero in (1, 2):
        assert sent({**row, "zero": zero})["all_gather/data"]["bytes"] == 2 * total
    assert sent({**row, "zero": 3})["all_gather/data"]["bytes"] == micro_batches * 2 * (2 * total - root)
    assert sent({**row, "zero": 1})["reduce_scatter/data"]["bytes"] == 4 * total
    assert sent({**row, "zero": 3})["reduce_scatter/data"]["bytes"] == micro_batches * 4 * total
    hybrid = sent({**row, "zero": 3, "replica": 2})["all_reduce/replica"]["bytes"]
    assert hybrid == 4 * total // 4 + 8 * (4 + 2 * 8)


def test_a_tensor_layer_moves_four_times_its_activations_each_way() -> None:
    """Korthikanti et al. 2022: two all-gathers and two reduce-scatters forward, the same backward, each of b
    s h."""
    row, hidden = {"tensor": 4, "micro_batch": 2}, 2 * 2 * LENGTH * 64
    deeper = EVEN.model_copy(update={"layers": 9})
    for kind, when, times in (
        ("all_gather", "forward", 2),
        ("reduce_scatter", "forward", 2),
        ("reduce_scatter", "backward", 2),
    ):
        more, less = number(row, kind, "tensor", when, deeper), number(row, kind, "tensor", when)
        assert (more[0] - less[0], more[1] - less[1]) == (times, times * hidden)
    again = (
        number(row, "all_gather", "tensor", "backward", deeper)[0]
        - number(row, "all_gather", "tensor", "backward")[0]
    )
    assert again == 2 + 2  # and once more each, for the weights' gradients


def test_compiled_blocks_do_not_gather_again() -> None:
    calls = [sent({"tensor": 2}, device=device)["all_gather/tensor"]["count"] for device in ("cpu", "cuda")]
    assert calls[0] - calls[1] == 2 * EVEN.layers


def test_context_moves_what_its_table_says() -> None:
    """parallel/context.py: 2 E g (context - 1) around a ring, E (2 + 2 g) by all-to-all; E values of queries
    on a device."""
    queries, shared = 3 * LENGTH // 4 * EVEN.heads * EVEN.head_dim, EVEN.kv_heads / EVEN.heads
    row = {"context": 4, "micro_batch": 3}
    ring = number({**row, "ring": 1}, "send", "context", "forward")[1]
    assert ring == EVEN.layers * 2 * 2 * queries * shared * 3
    back = number({**row, "ring": 1}, "send", "context", "backward")[1]
    assert back == ring + 2 * ring  # the same again, and gradients in float32
    assert number(row, "all_to_all", "context", "forward")[1] == EVEN.layers * 2 * queries * (2 + 2 * shared)


def test_experts_take_each_token_once_on_each_device() -> None:
    """On the average over all pairs of experts: 2 of 8 are on one device of 4 in 4 of 28 pairs. A choice is
    three numbers in float32."""
    row = {"data": 4, "expert": 4, "micro_batch": 2, "zero": 1}
    pairs = list(combinations(range(8), 2))
    devices = sum(len({expert // 2 for expert in pair}) for pair in pairs) / len(pairs)
    assert devices == (24 * 2 + 4) / 28
    rows, choices, numbers = round(2 * LENGTH * devices) * 64 * 2, 2 * LENGTH * 2 * 3 * 4, 2 * 8 * 4
    assert number(row, "all_to_all", "expert", "forward", EXPERTS) == (
        4 * 8,
        8 * (2 * rows + choices + numbers),
    )
    assert number(row, "all_to_all", "expert", "backward", EXPERTS) == (3 * 8, 8 * (2 * rows + choices))


@pytest.mark.parametrize(("experts", "chosen"), [(4, 4), (6, 1), (8, 3), (12, 5)])
def test_a_token_visits_as_many_devices_as_over_all_choices_on_average(experts: int, chosen: int) -> None:
    model = EXPERTS.model_copy(update={"experts": experts, "experts_per_token": chosen})
    degrees = [size for size in range(1, experts + 1) if experts % size == 0]
    choices = list(combinations(range(experts), chosen))
    expected = [
        sum(len({expert // (experts // size) for expert in choice}) for choice in choices) / len(choices)
        for size in degrees
    ]
    repeated = np.array([*degrees, *degrees])
    assert devices_per_token(model, repeated) == pytest.approx(np.array([*expected, *expected]), rel=1e-12)


def test_other_programs_send_a_token_to_each_expert() -> None:
    space = space_of([{"data": 4, "expert": 4, "micro_batch": 2, "zero": 1}])
    sent = totals(flows(work(EXPERTS), space, Software("another"), device="cpu"), space, 0)
    rows, numbers = 2 * LENGTH * 2 * 64 * 2, 8 * 8
    assert sent["all_to_all/expert"] == {"count": 5 * 8, "bytes": 8 * (4 * rows + numbers)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "per_rank"), [(2, 1, 2), (2, 4, 2), (4, 3, 2), (2, 9, 4), (4, 12, 2)]
)
def test_a_pipeline_sends_what_its_list_of_actions_says(
    name: str, ranks: int, micro_batches: int, per_rank: int
) -> None:
    per_rank = {"interleaved": per_rank, "zbv": 2, "dualpipev": 2}.get(name, 1)
    schedule = make_schedule(name, ranks, micro_batches, per_rank)
    border, sends = schedule.rank_of_stage, 0
    for action in schedule.actions[0]:
        there = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind in "FBI" and 0 <= there < schedule.stages and border[there] != 0:
            sends += 1
    row = {
        "pipeline": ranks,
        "accumulation": micro_batches,
        "schedule": SCHEDULES.index(name),
        "stages_per_rank": per_rank,
    }
    assert number(row, "send", "pipeline", "pipeline") == (sends, sends * LENGTH * 64 * 2)


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
def test_halves_of_a_backward_each_gather_again(name: str, micro_batches: int) -> None:
    schedule = make_schedule(name, 4, micro_batches)
    blocks = stage_blocks(EVEN, LENGTH, schedule.stages)
    halves = sum(action.kind == "I" and action.stage == schedule.stages - 1 for action in schedule.actions[0])
    row = {
        "pipeline": 4,
        "tensor": 2,
        "accumulation": micro_batches,
        "schedule": SCHEDULES.index(name),
        "stages_per_rank": 2,
    }
    always = micro_batches * (blocks[0] + blocks[-1]) * (2 + 2)
    assert number(row, "all_gather", "tensor", "backward")[0] == always + 2 * blocks[-1] * halves


def gathered_for_nobody(ranks: int, micro_batches: int, per_rank: int, layers: int) -> int:
    """By playing rank 0's list: a stage's last backward asks for the block before the forward it belongs to,
    if there was one."""
    model = EVEN.model_copy(update={"layers": layers})
    schedule = make_schedule("interleaved", ranks, micro_batches, per_rank)
    blocks, found = stage_blocks(model, LENGTH, schedule.stages), 0
    for stage in schedule.stages_of(0):
        waiting: list[int] = []
        forwards, first = 0, 0
        for action in schedule.actions[0]:
            if action.stage == stage and action.kind == "F":
                waiting.append(forwards)
                forwards += 1
            elif action.stage == stage:
                first = waiting.pop()
        found += first > 0 and blocks[stage] > 1
    return found


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 30), st.integers(1, 4), st.integers(24, 40))
def test_gathers_in_vain_are_those_of_the_schedule(
    ranks: int, micro_batches: int, per_rank: int, layers: int
) -> None:
    model = EVEN.model_copy(update={"layers": layers})
    row = {
        "pipeline": ranks,
        "data": 2,
        "zero": 3,
        "accumulation": micro_batches,
        "stages_per_rank": per_rank,
    }
    looped = {**row, "schedule": SCHEDULES.index("interleaved")}
    used, in_vain = (
        number(looped, "all_gather", "data x context", when, model)[0] for when in ("backward", "once")
    )
    assert used == micro_batches * sum(stage_blocks(model, LENGTH, ranks * per_rank)[::ranks])
    assert in_vain == gathered_for_nobody(ranks, micro_batches, per_rank, layers)


def test_recomputing_sends_again_what_the_recomputed_part_sends() -> None:
    none, selective, attention, full = (
        sent({"tensor": 2, "recompute": place}) for place in range(len(RECOMPUTE))
    )
    assert selective == attention == full
    assert full["all_gather/tensor"] == none["all_gather/tensor"]
    assert full["reduce_scatter/tensor"]["count"] - none["reduce_scatter/tensor"]["count"] == EVEN.layers
    ring, *kept, again = (
        sent({"context": 2, "ring": 1, "recompute": place})["send/context"] for place in range(len(RECOMPUTE))
    )
    assert kept == [ring, ring]
    assert again["count"] == ring["count"] + 2 * EVEN.layers


def test_whole_weights_are_summed_over_tensor_devices_once() -> None:
    """Norms, and key and value heads where there are fewer of them than devices."""
    shapes = parameter_shapes(EVEN)
    norms = sum(prod(shape) for name, shape in shapes.items() if "norm" in name)
    keys = sum(prod(shape) for name, shape in shapes.items() if ".key." in name or ".value." in name)

    def whole(tensor: int) -> float:
        numbers = 8 * (4 + 2 * tensor) + 4
        return number({"tensor": tensor}, "all_reduce", "tensor", "step")[1] - numbers

    assert whole(4) == 4 * norms
    assert whole(8) == 4 * (norms + keys)


def test_a_space_without_candidates_sends_nothing() -> None:
    assert flows(work(), space_of([])) == []


def test_types_of_the_arrays() -> None:
    space: Space = space_of([{"data": 2}])
    found: list[Flow] = flows(work(), space)
    assert all(flow.count.dtype == flow.bytes.dtype == np.float64 for flow in found)
