"""Answer other questions with the planner: scaling curves, a compute budget, the fewest devices, the longest
sequence or the largest batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from shardwise.config import Config
    from shardwise.cost.cluster import Cluster
    from shardwise.files import Json
    from shardwise.search.scaling import ScalingPoint

    Answer = tuple[Json, Sequence[RenderableType]]
    """The answer as data, and the text and tables to print."""

LARGEST = ("sequence", "batch")
"""Quantities that the planner can maximise."""


def scale(config: Config, cluster: Cluster, counts: str) -> Answer:
    """Return strong and weak scaling curves over these device counts."""
    from shardwise.search.scaling import strong, weak

    numbers = [int(part) for part in counts.split(",") if part.strip()]
    curves = {"strong": strong(config, cluster, numbers), "weak": weak(config, cluster, numbers)}
    shown = [_curve(f"{name} scaling", points) for name, points in curves.items()]
    return {name: [_point(point) for point in points] for name, points in curves.items()}, shown


def _point(point: ScalingPoint) -> Json:
    """Return a point as plain data, with the term that limits scaling by its name and in words."""
    from shardwise.cli.plain_data import plain_data
    from shardwise.search.reasons import describe_term

    return {**plain_data(point), "breaks_in_words": describe_term(point.breaks) if point.breaks else None}


def problems_of_counts(text: str) -> Iterator[str]:
    """Yield what is wrong with the device counts that were typed."""
    from shardwise.config.layout import MAX_DEVICES

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= MAX_DEVICES for part in parts):
        yield f"--scale {text}: give device counts with commas between them, for example 8,16,32"


def _curve(title: str, points: Sequence[ScalingPoint]) -> Table:
    """Return a scaling curve as a table, with one row per device count."""
    from shardwise.library.plan_show import table

    columns = ["devices", "step", "tokens/s", "efficiency", "layout", "what breaks it"]
    return table(title, columns, [_row(point) for point in points])


def _row(point: ScalingPoint) -> list[str]:
    from shardwise.search.reasons import describe_term, format_seconds

    if point.step_seconds is None:
        return [f"{point.devices:,}", "", "", "", point.reason or "", ""]
    breaks = describe_term(point.breaks) if point.breaks else ""
    step, speed = format_seconds(point.step_seconds), f"{point.tokens_per_second:,.0f}"
    return [f"{point.devices:,}", step, speed, f"{point.efficiency:.1%}", point.layout or "", breaks]


def budget(config: Config, cluster: Cluster, flops: float | None, days: float | None) -> Answer:
    """Return the compute-optimal model for a budget of FLOPs or days."""
    from shardwise.observe.format import format_count, format_figure, format_span
    from shardwise.search.whole_run import budget as spend

    answer = spend(config, cluster, flops, days)
    shape = answer["model"]
    size = f"{format_count(answer['parameters'])} parameters on {format_count(answer['tokens'])} tokens"
    near = ", ".join(f"{name} {shape[name]}" for name in ("layers", "hidden", "heads", "ffn"))
    hours = f"{format_figure(answer['device_hours'])} device hours{_costs(answer['kwh'], answer['money'])}"
    this = answer["this_model"]
    seen = f"{format_count(this['tokens'])} tokens ({this['tokens_per_parameter']:.3g} a parameter)"
    law = "Hoffmann et al. 2022 with 20 tokens a parameter"
    lines = [
        f"{answer['flops']:.3g} FLOPs are best spent on {size}; "
        f"predicted loss {answer['loss']:.3f} nats a token",
        f"a shape near it: {near}",
        f"on {cluster.devices:,} x {cluster.device.name} with {answer['layout']}: "
        f"{format_span(answer['seconds'])}, {hours}",
        f"this job's own model would see {seen}: predicted loss {this['loss']:.3f}",
        f"law: {law}; its own fit and the replication of 2024 are in --json",
    ]
    return answer, lines


def _costs(kwh: float | None, money: float | None) -> str:
    from shardwise.observe.format import format_energy, format_figure

    energy = "" if kwh is None else f", {format_energy(kwh)}"
    return energy + ("" if money is None else f", {format_figure(money)} in money")


def fewest(config: Config, cluster: Cluster, days: float | None) -> Answer:
    """Return the fewest devices that train the job in this many days; without days, the fewest on which it
    fits."""
    from shardwise.cli.plain_data import plain_data
    from shardwise.library.plan_show import table
    from shardwise.search.fewest import fewest_devices, smallest_that_fits

    if days is None:
        smallest = smallest_that_fits(config, cluster)
        return plain_data(smallest), [smallest.sentence]
    answer = fewest_devices(config, cluster, days)
    rows = [
        [f"{trial.devices:,}", "" if trial.days is None else f"{trial.days:,.3g}", trial.reason or ""]
        for trial in answer.tried
    ]
    return plain_data(answer), [answer.sentence, table("tried", ["devices", "days", "why"], rows)]


def maximise(config: Config, cluster: Cluster, what: str) -> Answer:
    """Return the longest sequence, or the largest batch without accumulation, that fits."""
    from shardwise.cli.plain_data import plain_data
    from shardwise.search.largest import largest_batch, longest_sequence

    if what == "sequence":
        longest = longest_sequence(config, cluster, cluster.devices)
        return plain_data(longest), [longest.sentence]
    largest = largest_batch(config, cluster, cluster.devices)
    return plain_data(largest), [largest.sentence]
