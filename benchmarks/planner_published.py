"""Published figures of a measured run: FLOP/s and memory by the source's own convention, and the step time
that follows from them.

Sources describe their conventions in words, and words may be negated: "recompute excluded" does not count
recomputation. A negation holds for a whole clause, up to the next comma.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import planner_cells as cells
from planner_cells import NotModelled, Row, measured

from shardwise.config import Model
from shardwise.config.parameters import count
from shardwise.cost.clusters import CLUSTERS
from shardwise.cost.space import Workload
from shardwise.plans.flops import flops_per_token, matmul_weights
from shardwise.units import GIB


def convention_of(text: str, stack: str) -> str | None:
    """A short name for how a source counts FLOPs; nothing where it says something that is not understood."""
    lower = text.lower()
    if cells.says(lower, r"all param"):
        return "all_parameters"
    if cells.denies(lower, r"\bemb"):
        return "no_embedding"
    if cells.counts_recompute(lower):
        return "with_recompute"
    if cells.says(lower, r"causal"):
        return "causal"
    if cells.denies(lower, r"causal") or re.search(
        r"(full|whole) att|att\w* (full|whole)|num_floating_point", lower
    ):
        return "full"
    usual = {"llm-foundry": "all_parameters", "torchtitan": "no_embedding", "nanotron": "all_parameters",
             "megatron-core": "causal"}  # fmt: skip
    return None if lower else usual.get(stack)


def published_flops(model: Model, length: int, convention: str) -> float:
    """FLOPs of a token as a source counts them. Ours, by which runs are compared, is in
    shardwise/plans/flops.py."""
    attention = 12.0 * model.layers * model.heads * model.head_dim * length
    if convention == "causal":  # Megatron leaves the router out
        return flops_per_token(model, length) - 6.0 * model.layers * model.experts * model.hidden
    if convention == "all_parameters":
        return 6.0 * count(model) + attention
    if convention == "no_embedding":
        return 6.0 * (count(model) - model.vocabulary * model.hidden) + attention
    head = 6.0 * model.vocabulary * model.hidden
    layers = 6.0 * matmul_weights(model) - head + attention
    return head + layers * (4 / 3 if convention == "with_recompute" else 1)


_FIGURES = {
    "tokens": ("tok_s_gpu", 1.0),
    "flops": ("tflops_gpu", 1e12),
    "mfu": ("mfu_pct", 0.01),
    "parameters": ("params_b", 1e9),
}


def figures_of(row: Row) -> tuple[dict[str, float], dict[str, str]]:
    """Figures as printed, as numbers and as text."""
    printed = {name: cells.digits(row, key) for name, (key, _) in _FIGURES.items() if measured(row, key)}
    return {name: float(text) * _FIGURES[name][1] for name, text in printed.items()}, printed


def seconds_of(
    row: Row, work: Workload, devices: int, published: Mapping[str, float], convention: str | None
) -> float | None:
    """Return the seconds of a step, as printed or computed from printed figures."""
    given = measured(row, "step_time_s")
    if given:
        return given
    if "tokens" in published:
        return work.tokens / devices / published["tokens"]
    if "flops" in published and convention:
        return (
            work.tokens
            / devices
            * published_flops(work.model, work.sequence_length, convention)
            / published["flops"]
        )
    return None


def with_rate_of_mfu(
    published: Mapping[str, float], convention: str | None, device: str, precision: str
) -> dict[str, float]:
    """MFU is of the data sheet's peak, unless products are in 8 or 4 bits: then some mean that of 16."""
    peak = CLUSTERS[device].device.peak.get(precision) if device in CLUSTERS else None
    if (
        peak is None
        or convention is None
        or precision not in ("bfloat16", "float16")
        or published["mfu"] < 0.01
    ):
        raise NotModelled("only MFU given, and not of what")
    return {**published, "flops": published["mfu"] * peak}


MEMORY_KINDS = {
    "theory": r"theor|model states",
    "device": r"nvidia-smi|\bnvml\b|on each gpu|whole device",
    "allocated": r"alloc",
    "reserved": r"reserv|cached",
}
"""What was measured: states and activations on paper; all that a device holds, its runtime included; torch's
tensors; or what torch's allocator holds for them. Where words name two, the first is what the figure is:
`max_allocated (reserved=70.9)`."""


def memory_of(row: Row) -> tuple[float | None, str]:
    """Bytes of the fullest device, and what they are."""
    value, words = measured(row, "mem_gib"), row.get("mem_kind", "").lower()
    if not value:
        return None, ""
    unit = 1e9 if re.search(r"\bgb\b", words) and "gib" not in words else GIB
    if row.get("status") == "memory_theory":
        return value * unit, "theory"
    found = {
        kind: match.start() for kind, pattern in MEMORY_KINDS.items() if (match := re.search(pattern, words))
    }
    return value * unit, min(found, key=lambda kind: found[kind], default="allocated")
