"""What a run measured, folded into the cluster file, so that the next prediction starts from it.

A cluster file may hold a factor for each term of a step's seconds. A run that took r times what was predicted
multiplies the factor by r. A run's clock sees less than the planner tells apart, so terms that were measured
together share one ratio:

- computing (matmul, attention, elementwise, launch, recompute) one,
- communication one, unless there is next to none: a ratio of two small times is noise,
- the optimizer its own.

A pipeline measures its idle time (bubble, imbalance) with its messages. Idle time is other ranks' computing
and takes its ratio; what is then left of the wait is communication's. Where idle time is the larger part,
what is left would be the difference of two large numbers: communication then keeps its factors, and idle time
takes the difference.

A factor outside 1/4 to 4 says that the file describes another machine, or that something else ran on this
one. It is held at that limit, and said.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from shardwise.cost.cluster import Cluster
from shardwise.cost.cluster_file import write_cluster, write_corrections
from shardwise.plan.step_terms import COMMUNICATION, IDLE

LIMIT = 4.0
LEAST_SHARE = 0.01
"""Communication below this share of a step is not learned from."""
LEAST_STEPS = 5
"""Fewer measured steps than this are no measurement."""


@dataclass(frozen=True)
class Change:
    """New factors of terms that share a ratio."""

    terms: tuple[str, ...]
    ratio: float
    """Measured over predicted, before limits."""
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def held(self) -> bool:
        """Whether a factor was stopped at its limit."""
        return any(
            abs(new - old * self.ratio) > 1e-9 * new for old, new in zip(self.before, self.after, strict=True)
        )


def calibrate(
    cluster: Cluster, predicted: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> tuple[Cluster, tuple[Change, ...]]:
    """The cluster with new factors, and what changed.

    `predicted` are the seconds of a step by term as this cluster predicts them now, its present factors
    included: so the same run, folded in twice, changes nothing more. `rows` are the report's: each row of
    seconds has the `terms` it is made of and what was `measured` of them, null where it was not.
    """
    known = [row for row in rows if row.get("terms") and row["measured"] is not None]
    step = next(row["measured"] for row in rows if row["what"] == "step time")
    measured = {tuple(row["terms"]): float(row["measured"]) for row in known}
    changes = [
        _change(cluster, terms, ratio)
        for terms, ratio in _ratios(measured, predicted, step)
        if ratio is not None
    ]
    factors = {
        name: factor for change in changes for name, factor in zip(change.terms, change.after, strict=True)
    }
    return replace(cluster, corrections={**cluster.corrections, **factors}), tuple(changes)


def _ratios(
    measured: Mapping[tuple[str, ...], float], predicted: Mapping[str, float], step: float
) -> list[tuple[tuple[str, ...], float | None]]:
    """For each set of terms, measured over predicted; None where nothing can be learned."""
    ratios: list[tuple[tuple[str, ...], float | None]] = []
    computing: float | None = None
    for terms, seconds in measured.items():
        links, idle = (tuple(name for name in terms if name in group) for group in (COMMUNICATION, IDLE))
        rest = tuple(name for name in terms if name not in (*links, *idle))
        # computing, and on devices that cannot tell them apart what it waits for, which is taken to be as
        # predicted
        if rest:
            ratio = _ratio(seconds - _total(predicted, links), _total(predicted, (*rest, *idle)))
            computing = ratio if "matmul" in rest else computing
            ratios.append(((*rest, *idle), ratio))
        elif max(seconds, _total(predicted, terms)) >= LEAST_SHARE * step:
            ratios += _waits(links, idle, seconds, predicted, 1.0 if computing is None else computing)
    return ratios


def _waits(
    links: tuple[str, ...],
    idle: tuple[str, ...],
    seconds: float,
    predicted: Mapping[str, float],
    computing: float,
) -> list[tuple[tuple[str, ...], float | None]]:
    sent, stood = _total(predicted, links), _total(predicted, idle)
    if stood > sent:
        return [(idle, _ratio(seconds - sent, stood))]
    own = _ratio(seconds - computing * stood, sent)
    return [(links, own), (idle, computing)] if idle else [(links, own)]


def _ratio(measured: float, predicted: float) -> float | None:
    return max(measured, 0.0) / predicted if predicted > 0 else None


def _total(predicted: Mapping[str, float], names: Sequence[str]) -> float:
    return fsum(predicted.get(name, 0.0) for name in names)


def _change(cluster: Cluster, terms: tuple[str, ...], ratio: float) -> Change:
    before = tuple(float(cluster.corrections.get(name, 1.0)) for name in terms)
    after = tuple(min(max(factor * ratio, 1 / LIMIT), LIMIT) for factor in before)
    return Change(terms, ratio, before, after)


def corrected_text(text: str, cluster: Cluster) -> str:
    """A cluster file with this cluster's factors in it, all else, comments too, as it was; written anew where
    that cannot be."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = line.split("#")[0].strip() == "[corrections]"
        if not inside:
            kept.append(line)
    whole = "\n".join(kept).rstrip() + "\n\n" + write_corrections(cluster)
    try:
        tomllib.loads(whole)
    except (
        tomllib.TOMLDecodeError
    ):  # the factors were written in another form, beside which a table cannot stand
        return write_cluster(cluster)
    return whole
