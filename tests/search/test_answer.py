"""The answer's sentences are true: on machines made so that what must win, and why, is known beforehand."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.config import Config, from_tables, problems_of_layout
from shardwise.config.parameters import count
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.cost.space import RECOMPUTE, space_of
from shardwise.errors import ConfigError
from shardwise.search.answer import answer, best_of_each, runner_up
from shardwise.search.forecast import plan_job
from shardwise.search.reasons import binding, describe_layout, loses_on, nothing_fits, reason
from shardwise.search.search import NEAR, SearchResult, _simplest_first, complexity, search
from shardwise.search.whole_run import to_hide
from shardwise.units import GIB

MODEL = {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 8192,
"vocabulary": 32000,
         "max_positions": 4096}  # fmt: skip
"""1.3 billion parameters: 21 GB of states in all."""


def job(batch: int = 64, length: int = 2048, model: dict[str, Any] | None = None, **layout: Any) -> Config:
    return from_tables(
        {
            "model": model or MODEL,
            "data": {"source": "x", "sequence_length": length},
            "train": {"global_batch": batch, "precision": "bfloat16"},
            "layout": layout,
        }
    )


def cluster(devices: int, memory_gib: float = 80.0, between: float = 1.0, inside: float = 1.0) -> Cluster:
    """H100s with other memory and links of other speeds, relative to theirs."""
    base = named(f"h100x{devices}")
    return replace(
        base,
        device=replace(base.device, memory=memory_gib * GIB, overhead=0.0),
        between=replace(base.between, bandwidth=between * base.between.bandwidth),
        inside=replace(base.inside, bandwidth=inside * base.inside.bandwidth),
    )


def solve(config: Config, machine: Cluster) -> tuple[SearchResult, int, dict[str, int]]:
    result = search(config, machine, machine.devices)
    best = int(result.order[0])
    return result, best, result.space.row(best)


def said(config: Config, result: SearchResult, best: int, about: str) -> str:
    (sentence,) = [sentence for sentence in binding(config, result, best) if sentence.startswith(about)]
    return sentence


# -- what must win -------------------------------------------------------------------------------------------


def test_with_memory_and_links_to_spare_only_the_data_axis_is_used() -> None:
    result, best, row = solve(job(), cluster(8, memory_gib=500))
    assert (row["data"], row["recompute"], row["offload"]) == (8, 0, 0)
    assert row["zero"] <= 1, "each device updates its part of the weights, or all of them"
    assert "data 8" in reason(result, best)


def test_workers_that_share_a_machine_fit_into_its_memory_together() -> None:
    machine = replace(cluster(4, memory_gib=64), shared=True)
    result = search(job(data=4), machine, 4)
    together = 4 * result.peak / GIB
    assert len(result.order), "sharded, 1.3 billion parameters take 21 GB in all"
    assert together[result.order].max() <= 64
    assert ((together > 64) & (together < 4 * 64)).any(), (
        "some layout would fit, had each worker the machine for itself"
    )


def test_a_tiny_device_forces_weights_to_be_sharded_and_the_answer_says_by_how_much() -> None:
    config = job(data=8)  # no other axis may help
    result, best, row = solve(config, cluster(8, memory_gib=6.5))
    assert row["zero"] == 3
    sentence = said(config, result, best, "sharding (zero)")
    assert sentence.startswith("sharding (zero) is needed: without it the smallest layout takes")
    short, allowed = (float(number) for number in re.findall(r"([\d.]+) GiB", sentence))
    whole = result.peak[result.space.zero == 0].min() / GIB
    assert short == pytest.approx(whole, abs=0.06)
    assert short > 12 * count(config.model) / GIB > allowed, "weights and moments alone are more"
    assert allowed == pytest.approx(result.limit / GIB, abs=0.06)


def test_a_slow_network_keeps_tensor_devices_inside_a_node() -> None:
    config = job(batch=16, length=4096)
    machine = cluster(32, memory_gib=8, between=0.02)
    result, best, row = solve(config, machine)
    assert row["tensor"] <= machine.devices_per_node
    quickest = result.order[result.space.tensor[result.order] > machine.devices_per_node]
    assert not len(quickest) or result.total[quickest].min() > 1.5 * result.total[best]


def test_fast_links_everywhere_make_tensor_no_worse_than_without_and_slow_ones_rule_it_out() -> None:
    config = job(batch=8)
    slow, _, with_slow = solve(config, cluster(8, inside=0.001))
    assert with_slow["tensor"] == 1
    fast, _, _ = solve(config, cluster(8, inside=1000))
    tensor = [
        result.total[result.order[result.space.tensor[result.order] == 8]].min() for result in (slow, fast)
    ]
    assert tensor[1] < tensor[0] / 3


def test_where_activations_do_not_fit_they_are_recomputed_and_the_answer_says_so() -> None:
    config = job(batch=8, length=2048, data=8, zero=3, offload=False)
    result, best, row = solve(config, cluster(8, memory_gib=6))
    assert RECOMPUTE[row["recompute"]] != "none"
    assert said(config, result, best, "recomputation").startswith(
        "recomputation is needed: without it the smallest layout takes"
    )


def test_a_batch_of_one_sequence_uses_the_axes_that_split_a_sequence() -> None:
    config = job(batch=1, length=2048)
    result, best, row = solve(config, cluster(8))
    assert row["data"] == row["replica"] == 1
    assert row["context"] * row["tensor"] * row["pipeline"] == 8
    assert binding(config, result, best)


# -- near ties -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine",
    [cluster(8), cluster(16, between=0.3), cluster(8, memory_gib=8)],
    ids=["near", "apart", "small"],
)
def test_the_quickest_wins_and_a_simpler_one_that_is_nearly_as_quick_is_told_of(machine: Cluster) -> None:
    config = job()
    result, best, row = solve(config, machine)
    assert result.total[best] == result.total[result.order].min()
    text = reason(result, best)
    assert "the quickest of" in text
    assert f"{len(result.order):,}" in text
    near = [place for place in result.order if result.total[place] <= (1 + NEAR) * result.total[best]]
    least = min(complexity(result.space.row(int(place))) for place in near)
    sentences = [sentence for sentence in binding(config, result, best) if sentence.startswith("simpler: ")]
    assert len(sentences) == int(least < complexity(row))
    for sentence in sentences:
        other = next(int(place) for place in near if complexity(result.space.row(int(place))) == least)
        assert describe_layout(result.space.row(other)) in sentence


def test_of_equally_quick_layouts_the_simplest_wins() -> None:
    space = space_of([{"tensor": 2, "zero": 1}, {"zero": 1}, {"data": 2}, {}])
    total = np.array([1.0, 1.0, 1.0 + 1e-12, 2.0])
    assert _simplest_first(space, total, np.arange(4))[0] == 2


def test_parts_that_move_are_counted_one_by_one() -> None:
    plain = {
        "pipeline": 1,
        "replica": 1,
        "context": 1,
        "tensor": 1,
        "expert": 1,
        "zero": 0,
        "schedule": 1,
        "recompute": 0,
        "offload": 0,
    }
    for name, value in {
        "pipeline": 2,
        "replica": 2,
        "context": 2,
        "tensor": 2,
        "expert": 2,
        "zero": 1,
        "recompute": 1,
        "offload": 1,
    }.items():
        assert complexity({**plain, name: value}) > complexity(plain)
    stages = [complexity({**plain, "zero": zero}) for zero in range(4)]
    assert stages == sorted(set(stages))


# -- the sentences -------------------------------------------------------------------------------------------


def test_a_layout_says_what_is_recomputed_not_what_is_kept() -> None:
    """The mode that keeps attention recomputes all else."""
    row = space_of([{}]).row(0)
    said = [
        describe_layout({**row, "recompute": place}).partition(", ")[2] for place in range(len(RECOMPUTE))
    ]
    assert said == ["", "selective recomputation", "recomputation of all but attention", "full recomputation"]


@pytest.mark.parametrize(
    "machine",
    [cluster(8), cluster(16, memory_gib=7), cluster(32, between=0.05)],
    ids=["one", "small", "slow"],
)
def test_the_runner_up_is_the_best_of_another_kind_and_what_it_loses_on_adds_up(machine: Cluster) -> None:
    result, best, _ = solve(job(), machine)
    second = runner_up(result)
    assert second is not None

    def kind(place: int) -> tuple[bool, ...]:
        one = result.space.row(place)
        return (
            *(one[axis] > 1 for axis in ("pipeline", "replica", "context", "tensor", "expert")),
            one["zero"] == 3,
        )

    assert kind(second) != kind(best)
    others = [place for place in result.order.tolist() if kind(place) != kind(best)]
    assert result.total[second] == min(result.total[place] for place in others)
    text = loses_on(result, best, second)
    slower = float(result.prediction(second).total[0] / result.prediction(best).total[0] - 1)
    assert slower >= 0
    assert text.startswith(f"{slower:+.1%} a step" if slower >= 0.0005 else "nothing that the model can tell")


def test_what_an_axis_saves_is_what_the_best_without_it_takes_longer() -> None:
    config = job(batch=16, length=4096)
    result, best, row = solve(config, cluster(32, memory_gib=8, between=0.02))
    for axis in ("pipeline", "context", "tensor"):
        if row[axis] == 1:
            continue
        sentence = said(config, result, best, axis)
        without = result.order[getattr(result.space, axis)[result.order] == 1]
        if not len(without):
            assert "is needed" in sentence
        elif "saves time" in sentence:
            slower = result.total[without].min() / result.total[best] - 1
            assert f"{slower:.1%} slower" in sentence


def test_pinned_fields_are_said_to_be_asked_for() -> None:
    config = job(tensor=2, zero=1)
    result, best, _ = solve(config, cluster(8))
    assert said(config, result, best, "tensor is") == "tensor is 2 as asked"
    assert said(config, result, best, "sharding") == "sharding (zero) is 1 as asked"


def test_the_next_tensor_degree_is_said_to_be_refused_only_if_it_is() -> None:
    for heads, keys in ((16, 8), (12, 12), (6, 2), (3, 3)):
        config = job(model={**MODEL, "heads": heads, "kv_heads": keys}, tensor=1, data=8)
        result, best, _ = solve(config, cluster(8))
        spoken = any(
            sentence.startswith("tensor = 2 is refused") for sentence in binding(config, result, best)
        )
        layout = config.layout.model_copy(update={"tensor": 2, "data": 4})
        broken = problems_of_layout(config.model, config.data, config.train, layout)
        assert spoken == any("layout.tensor = 2" in problem for problem in broken)


def test_the_last_sentence_names_the_largest_terms() -> None:
    config = job()
    result, best, _ = solve(config, cluster(16, between=0.01))
    found = result.prediction(best)
    worst = max(
        (name for name in found.seconds if name not in ("matmul", "attention")),
        key=lambda name: found.seconds[name][0],
    )
    fullest = max(found.memory, key=lambda name: found.memory[name][0])
    share = found.seconds[worst][0] / found.total[0]
    last = binding(config, result, best)[-1]
    assert f"({share:.1%} of the step)" in last
    assert fullest in last
    assert f"{found.peak[0] / result.limit:.0%} of what a plan may use" in last


def test_each_layout_is_listed_once_in_its_best_form() -> None:
    result, best, _ = solve(job(), cluster(8))
    places = best_of_each(result)
    assert places[0] == best
    layouts = [result.space.layout(int(place)) for place in places]
    assert len({str(layout) for layout in layouts}) == len(layouts)
    everything = {str(result.space.layout(int(place))) for place in result.order}
    assert everything == {str(layout) for layout in layouts}
    assert (np.diff(result.total[places[1:]]) >= 0).all()


# -- nothing fits --------------------------------------------------------------------------------------------


def test_nothing_fits_says_by_how_much_and_the_devices_it_advises_fit() -> None:
    config, machine = job(offload=False), cluster(8, memory_gib=1.5)
    result = search(config, machine, 8)
    assert not len(result.order)
    (problem,) = nothing_fits(config, result)
    takes, more, allowed = (float(number) for number in re.findall(r"([\d.]+) GiB", problem))
    assert takes == pytest.approx(result.peak.min() / GIB, abs=0.06)
    assert takes - allowed == pytest.approx(more, abs=0.11)
    devices = int(re.findall(r"about ([\d,]+) devices", problem)[0].replace(",", ""))
    assert len(search(config, machine.with_devices(devices), devices).order)
    with pytest.raises(ConfigError, match="nothing fits"):
        answer(config, result)


def test_where_offloading_is_open_it_is_tried_before_giving_up() -> None:
    result, best, row = solve(job(), cluster(8, memory_gib=1.5))
    assert row["offload"] == 1
    assert "offloaded" in reason(result, best)


def test_no_layout_at_all_says_which_rules_refused_them() -> None:
    config = job(batch=3, length=2047, model={**MODEL, "layers": 5})
    result = search(config, cluster(8), 7)
    (problem,) = nothing_fits(config, result)
    assert "a global batch of 3 does not divide over replica x data" in problem
    assert (
        "there are some on 6 devices" in problem
        or "there are some on 5 or" in problem
        or "there are some on 6 or" in problem
    )


# -- what the links must do ----------------------------------------------------------------------------------


EXPERTS = {**MODEL, "layers": 4, "experts_per_token": 2, "expert_ffn": 4096}


@pytest.mark.parametrize(("devices", "link", "sharing"), [(8, "inside", 1), (16, "between", 4)])
def test_bandwidth_to_hide_gathers_counts_those_of_experts(devices: int, link: str, sharing: int) -> None:
    """Each device has every other expert, one for each that it shares them with: of these 4 are in a node of
    8."""
    machine = cluster(devices)
    model = {**EXPERTS, "experts": devices}
    result = search(job(batch=16, model=model, data=devices, expert=2, zero=3), machine, devices)
    best = int(result.order[0])
    found = to_hide(result, best)
    assert found is not None
    sharers, micro_batches = devices // 2, int(result.space.accumulation[best])
    experts = 4 * sharers * 3 * 4096 * 2048  # layers, experts, their matrices
    sent = (
        micro_batches * (2 * 2 + 4) * experts * (sharers - 1) / sharers / sharing
    )  # gathered twice in 2 bytes, summed in 4
    assert found["link"] == link
    assert sent < found["bytes_on_the_wire"] < 1.5 * sent, "the experts' and the little that is not"


@pytest.mark.parametrize("setting", [{"weight_compression": "int8"}, {"backward_shards": 8}])
def test_the_gathers_that_a_job_asks_for_stay_in_what_is_planned(setting: dict[str, Any]) -> None:
    config, machine = job(zero=3, **setting), cluster(16)
    planned, _ = plan_job(config, machine, machine.devices)
    pasted = answer(config, search(config, machine, machine.devices))["best"]["config"]
    ((name, value),) = setting.items()
    assert getattr(planned.layout, name) == value
    assert tomllib.loads(pasted)["layout"][name] == value
