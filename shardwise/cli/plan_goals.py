"""Other questions to the planner: scaling curves, a compute budget, the fewest devices, the longest sequence
or largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.cost.cluster import Cluster

Answer = tuple[dict[str, Any], list[Any]]
"""The answer as data, and what to print of it: text and tables."""
LARGEST = ("sequence", "batch")
"""What can be asked to be as large as fits."""


def scale(config: Config, cluster: Cluster, counts: str) -> Answer:
    """Strong and weak scaling over these device counts."""
    from shardwise.search.scaling import strong, weak

    numbers = [int(part) for part in counts.split(",") if part.strip()]
    curves = {"strong": strong(config, cluster, numbers), "weak": weak(config, cluster, numbers)}
    shown: list[Any] = [_curve(f"{name} scaling", points) for name, points in curves.items()]
    return {name: [_point(point) for point in points] for name, points in curves.items()}, shown


def _point(point: Any) -> dict[str, Any]:
    """Plain data; the term that breaks the curve by its name and in words."""
    from shardwise.cli.plain_data import plain_data
    from shardwise.search.reasons import describe_term

    return {**plain_data(point), "breaks_in_words": describe_term(point.breaks) if point.breaks else None}


def problems_of_counts(text: str) -> Iterator[str]:
    """Of device counts as they were typed."""
    from shardwise.config.schema import MOST_DEVICES

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= MOST_DEVICES for part in parts):
        yield f"--scale {text}: give device counts with commas between them, for example 8,16,32"


def _curve(title: str, points: Any) -> Any:
    from shardwise.cli.plan_show import table
    from shardwise.search.reasons import describe_term, format_seconds

    rows = [
        [f"{point.devices:,}", format_seconds(point.step_seconds), f"{point.tokens_per_second:,.0f}",
        f"{point.efficiency:.1%}",
         point.layout, describe_term(point.breaks) if point.breaks else ""]
        if point.works
        else [f"{point.devices:,}", "", "", "", point.reason or "", ""]
        for point in points
    ]  # fmt: skip
    return table(title, ["devices", "step", "tokens/s", "efficiency", "layout", "what breaks it"], rows)


def budget(config: Config, cluster: Cluster, flops: float | None, days: float | None) -> Answer:
    """The compute-optimal model for a budget."""
    from shardwise.observe.format import format_count, format_figure, format_span
    from shardwise.search.whole_run import budget as spend

    answer = spend(config, cluster, flops, days)
    shape = answer["model"]
    size = f"{format_count(answer['parameters'])} parameters on {format_count(answer['tokens'])} tokens"
    lines = [
        f"{answer['flops']:.3g} FLOPs are best spent on {size}; predicted loss {answer['loss']:.3f} nats "
        f"a token",
        f"a shape near it: layers {shape['layers']}, hidden {shape['hidden']}, heads {shape['heads']}, ffn "
        f"{shape['ffn']}",
        f"on {cluster.devices:,} x {cluster.device.name} with {answer['layout']}: "
        f"{format_span(answer['seconds'])}, "
        f"{format_figure(answer['device_hours'])} device hours{_costs(answer)}",
        f"this job's own model would see {format_count(answer['this_model']['tokens'])} tokens "
        f"({answer['this_model']['tokens_per_parameter']:.3g} a parameter): predicted loss "
        f"{answer['this_model']['loss']:.3f}",
        "law: Hoffmann et al. 2022 with 20 tokens a parameter; its own fit and the replication of 2024 are "
        "in --json",
    ]
    return answer, lines


def _costs(answer: dict[str, Any]) -> str:
    from shardwise.observe.format import format_energy, format_figure

    energy = "" if answer["kwh"] is None else f", {format_energy(answer['kwh'])}"
    return energy + ("" if answer["money"] is None else f", {format_figure(answer['money'])} in money")


def fewest(config: Config, cluster: Cluster, days: float | None) -> Answer:
    """The fewest devices that train the job in so many days; without days, on which it fits at all."""
    from shardwise.cli.plain_data import plain_data
    from shardwise.cli.plan_show import table
    from shardwise.search.fewest import fewest_devices, smallest_that_fits

    if days is None:
        smallest = smallest_that_fits(config, cluster)
        return plain_data(smallest), [smallest.sentence]
    answer = fewest_devices(config, cluster, days)
    rows = [
        [f"{t.devices:,}", f"{t.days:,.3g}" if t.days is not None else "", t.reason or ""]
        for t in answer.tried
    ]
    return plain_data(answer), [answer.sentence, table("tried", ["devices", "days", "why"], rows)]


def maximise(config: Config, cluster: Cluster, what: str) -> Answer:
    """The longest sequence, or the largest batch without accumulation, that fits."""
    from shardwise.cli.plain_data import plain_data
    from shardwise.search.largest import largest_batch, longest_sequence

    if what == "sequence":
        longest = longest_sequence(config, cluster, cluster.devices)
        return plain_data(longest), [longest.sentence]
    largest = largest_batch(config, cluster, cluster.devices)
    return plain_data(largest), [largest.sentence]
