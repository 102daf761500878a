"""Costs beyond one step: the whole run, the bandwidth that would hide communication, how often to save, and
what a compute budget buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from shardwise.config import Config, Model
from shardwise.config.dtype_names import BYTES
from shardwise.config.parameters import count
from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, group_of
from shardwise.cost.flow import Flow
from shardwise.cost.price import is_of_weights
from shardwise.cost.traffic import flows
from shardwise.errors import ConfigError, UserError
from shardwise.files import Json
from shardwise.observe.format import format_count
from shardwise.plans.flops import flops_per_token
from shardwise.plans.step_terms import COMPUTING
from shardwise.plurals import counted
from shardwise.search.budget import chinchilla, compute_of, cost, of_a_size, shape_for
from shardwise.search.interval import DEVICE_HOURS, plan_checkpoints
from shardwise.search.reasons import describe_layout, nothing_fits
from shardwise.search.requirements import least_bandwidth, ring_hops, wire_bytes
from shardwise.search.search import SearchResult, search
from shardwise.search.slow_links import alternatives, proposed

STORAGE = 20e9
"""Bytes/s of the storage that all nodes write to together, where nothing better is known: a parallel file
system of medium size."""
_DAY = 86400.0


def beyond(
    config: Config, result: SearchResult, storage: float = STORAGE, device_hours: float = DEVICE_HOURS
) -> Json:
    """Return the part of an answer that is not about the step: the whole run, links, checkpoints, ways to
    send less, and which codec would be worth it."""
    best = int(result.order[0])
    seconds, choices = float(result.prediction(best).total[0]), alternatives(result)
    return {
        "step_seconds": seconds,
        "whole_run": whole_run(config, result, best),
        "to_hide": to_hide(result, best),
        "checkpoints": checkpoints(config, result, best, storage, device_hours),
        "slow_links": [asdict(choice) for choice in choices],
        "compression": proposed(choices, seconds),
    }


def whole_run(config: Config, result: SearchResult, best: int) -> Json:
    """Return the days, device hours, energy and money of all steps."""
    device = result.cluster.device
    rate = 1.0 / (float(result.prediction(best).total[0]) * result.devices)
    bill = cost(float(config.train.steps), rate, result.devices, device.watts, result.cluster.price)
    return {
        "steps": config.train.steps,
        "tokens": config.train.steps * result.work.tokens,
        **asdict(bill),
        "days": bill.seconds / _DAY,
    }


def to_hide(result: SearchResult, best: int) -> Json | None:
    """Return the bandwidth that a device needs to hide gathers and gradient sums behind computing, at the
    link's own latency.

    It is that of the network if any of them cross nodes, because the devices of a node share that traffic;
    otherwise that of the links inside a node.
    """
    winner = result.space.take([best])
    prediction = result.prediction(best)
    computing = sum(float(prediction.seconds[name][0]) for name in COMPUTING)
    moved = [flow for flow in flows(result.work, winner) if is_of_weights(flow) and flow.bytes[0]]
    groups = [group_of(flow.axis, winner, result.cluster) for flow in moved]
    between = any(group.nodes[0] > 1 for group in groups)
    wire, hops = _on_the_wire(moved, groups, between)
    if not wire:
        return None
    link = result.cluster.between if between else result.cluster.inside
    needed = least_bandwidth(wire, computing, hops, link.latency)
    return {
        "link": "between" if between else "inside",
        "bytes_on_the_wire": wire,
        "computing_seconds": computing,
        "needed_gb_s": needed / 1e9 if np.isfinite(needed) else None,
        "has_gb_s": link.bandwidth / 1e9,
        "most_latency_us": max(0.0, (computing - wire / link.bandwidth) / max(hops, 1.0)) * 1e6,
        "has_latency_us": link.latency * 1e6,
    }


def _on_the_wire(moved: Sequence[Flow], groups: Sequence[Group], between: bool) -> tuple[float, float]:
    """Return the bytes and the hops of a device on the links between nodes, or on those inside a node."""
    wire = hops = 0.0
    for flow, group in zip(moved, groups, strict=True):
        if between == (group.nodes[0] > 1):
            members, sharing = int(group.size[0]), float(group.inside[0]) if between else 1.0
            wire += wire_bytes(flow.kind, float(flow.bytes[0]), members) / sharing
            hops += float(flow.count[0]) * ring_hops(flow.kind, members) / sharing
    return wire, hops


def checkpoints(config: Config, result: SearchResult, best: int, storage: float, device_hours: float) -> Json:
    """Return how often to save, what it costs, and the useful fraction of time."""
    cluster = result.cluster
    width = float(BYTES[result.work.state_dtype])
    width += config.optimizer.state_bytes(width)
    saves = plan_checkpoints(
        count(config.model),
        result.devices,
        storage,
        float(result.prediction(best).total[0]),
        device_hours,
        config.checkpoint.background,
        bytes_per_parameter=width,
        host_bandwidth=cluster.device.host_bandwidth,
        keep=config.checkpoint.keep,
    )
    return {**asdict(saves), "storage_gb_s": storage / 1e9}


# -- compute-optimal training --------------------------------------------------------------------------------


def budget(config: Config, cluster: Cluster, flops: float | None, days: float | None) -> dict[str, Any]:
    """Return the compute-optimal model for this many FLOPs, or for this many days of the cluster; and what
    the job's own model would do with them.

    The speed of training is planned, not assumed.
    """
    if (flops is None) == (days is None):
        raise UserError("give --compute-budget or --days, not both")
    for option, value in (("--compute-budget", flops), ("--days", days)):
        if value is not None and not (np.isfinite(value) and value > 0):
            example = "1e22" if option == "--compute-budget" else "30"
            raise UserError(f"{option} {value:g}: give a number above 0, for example {example}")
    if flops is None:
        assert days is not None
        flops = _flops_of_days(config, cluster, days)
    optimum = chinchilla(flops)
    model, rate, layout = _rate(config, cluster, optimum.parameters)
    bill = cost(flops, rate, cluster.devices, cluster.device.watts, cluster.price)
    return {
        "flops": flops,
        "parameters": optimum.parameters,
        "tokens": optimum.tokens,
        "loss": optimum.loss,
        "fitted": asdict(optimum.fitted),
        "replicated": asdict(optimum.replicated),
        "model": model,
        "layout": layout,
        "flops_per_second_per_device": rate,
        **asdict(bill),
        "days": bill.seconds / _DAY,
        "this_model": asdict(of_a_size(float(count(config.model)), flops)),
    }


def _flops_of_days(config: Config, cluster: Cluster, days: float) -> float:
    peak = cluster.device.peak.get(config.train.precision) or max(cluster.device.peak.values())
    flops = compute_of(days, cluster.devices, 0.4 * peak)
    for _ in range(4):  # the speed depends on the model's size, and the size on the speed
        rate = _rate(config, cluster, chinchilla(flops).parameters)[1]
        flops = compute_of(days, cluster.devices, rate)
    return flops


def _rate(config: Config, cluster: Cluster, parameters: float) -> tuple[Json, float, str]:
    """Return a shape of about this many parameters, the FLOP/s that a device reaches with it under its best
    layout, and that layout."""
    shape = shape_for(parameters, config.model.vocabulary)
    positions = max(config.data.sequence_length, config.model.max_positions)
    model = Model.model_validate({**shape, "max_positions": positions})
    other = config.model_copy(update={"model": model})
    result = search(other, cluster, cluster.devices)
    if not len(result.order):
        raise ConfigError(
            f"a model of {format_count(parameters)} parameters on {counted(cluster.devices, 'device')}",
            nothing_fits(other, result),
        )
    best = int(result.order[0])
    flops = flops_per_token(model, config.data.sequence_length) * result.work.tokens
    rate = flops / float(result.prediction(best).total[0]) / cluster.devices
    return shape, rate, describe_layout(result.space.row(best))
