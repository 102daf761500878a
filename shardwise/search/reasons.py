"""The sentences of an answer: why a layout wins, where the next best is slower, and why nothing fits.

The reason for a choice is the cost of leaving it out. Without tensor parallelism, which layout would be the
best, and would it fit? The same question is answered for the pipeline, for sharding and for recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np

from shardwise.config import MODEL_AXES, RANK_AXES, Config, Layout
from shardwise.config.layout_rules import TENSOR, JobTables, broken_rules
from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES
from shardwise.cost.space import BUT_ATTENTION, RECOMPUTE
from shardwise.plans.grid import describe_degrees
from shardwise.search.candidates import candidates
from shardwise.search.search import SearchResult, simpler
from shardwise.units import GIB

TRIED = 64
"""How many other numbers of devices are tried if no layout is possible on the requested one."""


def describe_layout(row: Mapping[str, int]) -> str:
    """Return a layout in a few words."""
    more = [f"zero {row['zero']}"] if row["zero"] else []
    if row["pipeline"] > 1:
        name = SCHEDULES[row["schedule"]]
        stages = f" x{row['stages_per_rank']}" if SCHEDULE_FACTS[name].is_interleaved else ""
        more.append(name + stages)
    if row["recompute"]:
        mode = RECOMPUTE[row["recompute"]]
        but_attention = row["recompute"] == BUT_ATTENTION
        more.append(
            f"recomputation of {mode.replace('-', ' ')}" if but_attention else f"{mode} recomputation"
        )
    if row["offload"]:
        more.append("offloaded")
    return ", ".join([describe_degrees(row), *more])


def loses_on(result: SearchResult, best: int, other: int) -> str:
    """Return what the other candidate takes longer for, in a sentence."""
    winner, rival = result.prediction(best), result.prediction(other)
    more = {name: float(rival.seconds[name][0] - winner.seconds[name][0]) for name in winner.seconds}
    worst = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    slower = float(rival.total[0] / winner.total[0] - 1)
    parts = " and ".join(f"{describe_term(name)} (+{format_seconds(more[name])})" for name in worst)
    if slower < 0.0005:
        return "nothing that the model can tell: it is as quick"
    return f"{slower:+.1%} a step: {parts}" if parts else f"{slower:+.1%} a step"


def best_layout(result: SearchResult) -> str:
    """Return the winner's layout in a few words."""
    return describe_layout(result.space.row(int(result.order[0])))


_TERMS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise kernels",
    "launch": "starting kernels",
    "recompute": "recomputation",
    "optimizer": "the optimizer",
    "bubble": "the pipeline's bubble",
    "imbalance": "uneven stages",
    "tensor": "tensor collectives",
    "context": "context exchange",
    "expert": "sending tokens to experts",
    "data": "gathers and gradient sums",
    "replica": "joining replicas",
    "pipeline_sends": "messages between stages",
    "links": "links that are busy for longer",
    "offload": "moving states to the host",
}


def describe_term(term: str) -> str:
    """Return a term of a step in words."""
    return _TERMS.get(term, term)


def format_seconds(value: float) -> str:
    """Return seconds in a unit that is easy to read."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} us"


def reason(result: SearchResult, best: int) -> str:
    """Return why the winner wins, in one line."""
    row, prediction = result.space.row(best), result.prediction(best)
    peak, total = float(prediction.peak[0]) / GIB, float(prediction.total[0])
    memory = f"{peak:.3g} of {result.limit / GIB:.3g} GiB"
    text = f"{describe_layout(row)}: {format_seconds(total)} a step and {memory}"
    if len(result.order) == 1:
        return f"{text}, the only layout that {'fits' if len(result.space) > 1 else 'exists'}"
    return f"{text}, the quickest of {len(result.order):,} candidates that fit"


def binding(config: Config, result: SearchResult, best: int) -> list[str]:
    """Return what limits the winner: why each axis is there, what memory forces, which degrees are
    refused."""
    row = result.space.row(best)
    sentences = [_needed(result, best, axis) for axis in (*MODEL_AXES, "replica") if row[axis] > 1]
    if row["zero"]:
        sentences.append(_needed(result, best, "zero"))
    if row["recompute"]:
        sentences.append(_needed(result, best, "recompute"))
    if row["offload"]:
        sentences.append(f"{_needed(result, best, 'offload')}; {_of_the_host(result, best)}")
    return [*sentences, *_refusals(config, row), *_simpler(result, best), _largest(result, best)]


def _of_the_host(result: SearchResult, index: int) -> str:
    """Return in words how much of a node's own memory offloaded states take."""
    taken, allowed = (f"{size / GIB:,.0f}" for size in (result.host[index], result.host_limit))
    return f"states take {taken} of the {allowed} GiB that a plan may use of a node's own memory"


def _simpler(result: SearchResult, best: int) -> list[str]:
    """Return a sentence about a simpler layout, if one is nearly as quick."""
    other = simpler(result)
    if other is None:
        return []
    slower = float(result.prediction(other).total[0] / result.prediction(best).total[0] - 1)
    layout = describe_layout(result.space.row(other))
    return [f"simpler: {layout}, {slower:.1%} slower, which is less than the model is accurate"]


def _needed(result: SearchResult, best: int, field: str) -> str:
    """Return why a choice was made: what is lost without it, or by how much nothing fits."""
    values = getattr(result.space, field)
    least = 0 if field in ("zero", "recompute", "offload") else 1
    without = np.flatnonzero(values == least)
    name = {"zero": "sharding (zero)", "recompute": "recomputation"}.get(field, field)
    if field in result.fixed:
        value = "" if field == "offload" else f"{_value(field, int(values[best]))} "
        return f"{name} is {value}as asked"
    if not len(without):
        return f"{name} is used by every layout that the job's sizes allow"
    fitting = without[result.fits[without]]
    if not len(fitting):
        smallest_gib, limit_gib = float(result.peak[without].min()) / GIB, result.limit / GIB
        needs = f"the smallest layout takes {smallest_gib:,.1f} GiB of {limit_gib:,.1f} GiB"
        return f"{name} is needed: without it {needs}"
    slower = float(result.total[fitting].min() / result.total[best] - 1)
    if slower > 0:
        return f"{name} saves time: the best without it is {slower:.1%} slower"
    return f"{name} is a near tie with none"


def _value(field: str, value: int) -> str:
    return RECOMPUTE[value] if field == "recompute" else str(value)


def _refusals(config: Config, row: Mapping[str, int]) -> list[str]:
    """Return why the next tensor degree is refused, if the model's heads or its vocabulary refuse it."""
    next_degree = Layout(tensor=2 * row["tensor"])  # type: ignore[call-arg]
    job = JobTables(config.model, config.data, config.train, next_degree)
    broken = islice(broken_rules(TENSOR, job), 1)
    return [f"tensor = {next_degree.tensor} is refused: {rule.short(job)}" for rule in broken if rule.short]


def _largest(result: SearchResult, best: int) -> str:
    """Return what takes most time beside matrix products and attention, and how full memory is."""
    prediction = result.prediction(best)
    total, peak = float(prediction.total[0]), float(prediction.peak[0])
    others = {
        name: float(value[0])
        for name, value in prediction.seconds.items()
        if name not in ("matmul", "attention")
    }
    worst = max(others, key=lambda name: others[name])
    kinds = {name: float(value[0]) for name, value in prediction.memory.items()}
    fullest = max(kinds, key=lambda name: kinds[name])
    most_time = f"{describe_term(worst)} ({others[worst] / total:.1%} of the step)"
    most_memory = f"{fullest} ({kinds[fullest] / peak:.0%})"
    return (
        f"beside products and attention most time goes to {most_time}; "
        f"memory is {peak / result.limit:.0%} of what a plan may use, most of it {most_memory}"
    )


def _impossible(result: SearchResult) -> str:
    """Return why there is no layout: what was refused and how often, or degrees that do not divide the
    devices."""
    if result.refused:
        return "; ".join(f"{why} ({number:,})" for why, number in result.refused.items())
    given = {axis: result.fixed[axis] for axis in RANK_AXES if axis in result.fixed}
    asked = " x ".join(f"layout.{axis} = {degree}" for axis, degree in given.items())
    return f"{asked or 'what was asked'} cannot be part of {result.devices:,} devices"


def _other_devices(config: Config, result: SearchResult) -> str:
    """Return the nearest numbers of devices, fewer and more, on which there are layouts."""
    asked = result.devices
    counts = [count for count in range(1, 2 * asked + 8) if count != asked]
    near = sorted(counts, key=lambda count: abs(count - asked))[:TRIED]
    works = [count for count in near if len(candidates(config, count, result.fixed).space)]
    fewer = [count for count in works if count < asked]
    more = [count for count in works if count > asked]
    if nearest := " or ".join(f"{count:,}" for count in (*fewer[:1], *more[:1])):
        return f"there are some on {nearest} devices (cluster.devices)"
    batch = "the batch (train.global_batch, train.micro_batch)"
    return f"change {batch}, data.sequence_length, or what [layout] asks for"


def nothing_fits(config: Config, result: SearchResult) -> list[str]:
    """Return by how much nothing fits, and what would fit."""
    if not len(result.space):
        return [f"no layout is possible: {_impossible(result)}; {_other_devices(config, result)}"]
    if (result.peak <= result.limit).any():  # only the memory of the hosts is too small
        least = int(np.argmin(np.where(result.peak <= result.limit, result.host, np.inf)))
        layout = describe_layout(result.space.row(least))
        needs = f"{layout} fits on the devices, but its {_of_the_host(result, least)}"
        advice = "use more nodes, or a cluster.file with the host_memory_gib that they have"
        return [f"nothing fits: {needs}; {advice}"]
    least = int(np.argmin(result.peak))
    peak, allowed = float(result.peak[least]), result.limit
    excess = f"{(peak - allowed) / GIB:,.1f} GiB more than the {allowed / GIB:,.1f} GiB a plan may use"
    layout = describe_layout(result.space.row(least))
    smallest = (
        f"the smallest of {len(result.space):,} layouts ({layout}) takes {peak / GIB:,.1f} GiB, {excess}"
    )
    return [f"nothing fits: {smallest}; {_memory_advice(result, least)}"]


def _memory_advice(result: SearchResult, least: int) -> str:
    """Return what to change, by what takes most of the memory of the smallest layout."""
    memory = result.prediction(least).memory
    kinds = {name: float(value[0]) for name, value in memory.items()}
    fullest = max(kinds, key=lambda name: kinds[name])
    states = sum(kinds[name] for name in ("weights", "gradients", "optimizer"))
    room = result.limit - (float(result.peak[least]) - states)
    if fullest in ("weights", "gradients", "optimizer") and room > 0:
        more = result.devices * 2 ** int(np.ceil(np.log2(max(states / room, 1.01))))
        changes = f"about {more:,} devices, train.state_dtype=bfloat16, or layout.offload=true"
        return f"most of it is model states: use {changes}"
    if fullest in ("activations", "logits"):
        changes = "a shorter data.sequence_length, train.recompute=full, or more devices"
        return f"most of it is activations: use {changes}"
    return "use more devices, a larger device, or a smaller model"
