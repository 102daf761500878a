"""Other questions to the planner: scaling curves, a compute budget, the fewest devices, the longest sequence or largest batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.cost.cluster import Cluster

Answer = tuple[dict[str, Any], list[Any]]
"""The answer as data, and what to print of it: text and tables."""


def scale(config: Config, cluster: Cluster, counts: str) -> Answer:
    """Strong and weak scaling over these device counts."""
    from shardwise.cli.plain import plain
    from shardwise.search.scaling import amdahl, strong, weak

    numbers = _counts(counts)
    curves = {"strong": strong(config, cluster, numbers), "weak": weak(config, cluster, numbers)}
    bound = amdahl(curves["strong"])
    shown: list[Any] = [_curve(f"{name} scaling", points) for name, points in curves.items()]
    if bound:
        share = f"{bound.serial_share:.1%} of a step on {bound.devices} devices does not get shorter with more devices"
        shown.append(f"Amdahl's bound: {share}, so no number of them is more than {bound.most_speedup:.3g} times as fast")
    data = {name: [_point(point) for point in points] for name, points in curves.items()}
    return {**data, "amdahl": plain(bound)}, shown


def _point(point: Any) -> dict[str, Any]:
    """Plain data; the term that breaks the curve by its name and in words."""
    from shardwise.cli.plain import plain
    from shardwise.search.reasons import describe_term

    return {**plain(point), "breaks_in_words": describe_term(point.breaks) if point.breaks else None}


def _counts(text: str) -> list[int]:
    from shardwise.errors import UserError

    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise UserError(f"--scale {text}: give device counts with commas between them, for example 8,16,32") from None


def _curve(title: str, points: Any) -> Any:
    from shardwise.cli.plan_show import table
    from shardwise.search.reasons import describe_term, format_seconds

    rows = [
        [f"{point.devices:,}", format_seconds(point.step_seconds), f"{point.tokens_per_second:,.0f}", f"{point.efficiency:.1%}",
         point.layout, describe_term(point.breaks) if point.breaks else ""]
        if point.works
        else [f"{point.devices:,}", "", "", "", point.reason or "", ""]
        for point in points
    ]  # fmt: skip
    return table(title, ["devices", "step", "tokens/s", "efficiency", "layout", "what breaks it"], rows)


def budget(config: Config, cluster: Cluster, flops: float | None, days: float | None) -> Answer:
    """The compute-optimal model for a budget."""
    from shardwise.search.whole_run import budget as spend

    answer = spend(config, cluster, flops, days)
    shape = answer["model"]
    size = f"{answer['parameters'] / 1e9:,.4g} B parameters on {answer['tokens'] / 1e9:,.4g} B tokens"
    lines = [
        f"{answer['flops']:.3g} FLOPs are best spent on {size}; predicted loss {answer['loss']:.3f} nats a token",
        f"a shape near it: layers {shape['layers']}, hidden {shape['hidden']}, heads {shape['heads']}, ffn {shape['ffn']}",
        f"on {cluster.devices:,} x {cluster.device.name} with {answer['layout']}: {answer['days']:.3g} days, "
        f"{answer['device_hours']:,.0f} device hours{_costs(answer)}",
        f"this job's own model would see {answer['this_model']['tokens'] / 1e9:,.4g} B tokens "
        f"({answer['this_model']['tokens_per_parameter']:.3g} a parameter): predicted loss {answer['this_model']['loss']:.3f}",
        "law: Hoffmann et al. 2022 with 20 tokens a parameter; its own fit and the replication of 2024 are in --json",
    ]
    return answer, lines


def _costs(answer: dict[str, Any]) -> str:
    energy = "" if answer["kwh"] is None else f", {answer['kwh'] / 1000:,.3g} MWh"
    return energy + ("" if answer["money"] is None else f", {answer['money']:,.0f} in money")


def fewest(config: Config, cluster: Cluster, days: float | None) -> Answer:
    """The fewest devices that train the job in so many days; without days, on which it fits at all."""
    from shardwise.cli.plain import plain
    from shardwise.cli.plan_show import table
    from shardwise.search.fewest import fewest_devices, smallest_that_fits

    if days is None:
        smallest = smallest_that_fits(config, cluster)
        return plain(smallest), [smallest.sentence]
    answer = fewest_devices(config, cluster, days)
    rows = [[f"{t.devices:,}", f"{t.days:,.3g}" if t.days is not None else "", t.reason or ""] for t in answer.tried]
    return plain(answer), [answer.sentence, table("tried", ["devices", "days", "why"], rows)]


def maximise(config: Config, cluster: Cluster, what: str) -> Answer:
    """The longest sequence, or the largest batch without accumulation, that fits."""
    from shardwise.cli.plain import plain
    from shardwise.errors import UserError
    from shardwise.search.largest import largest_batch, longest_sequence

    if what == "sequence":
        longest = longest_sequence(config, cluster, cluster.devices)
        return plain(longest), [longest.sentence]
    if what == "batch":
        largest = largest_batch(config, cluster, cluster.devices)
        return plain(largest), [largest.sentence]
    raise UserError(f"--maximise {what}: give sequence or batch")
