"""Correct the cluster file by what a run measured, so that the next prediction starts from it.

A cluster file may hold a factor for each term of a step's seconds. A run that took r times as long as
predicted multiplies the factor by r. The clock of a run distinguishes fewer terms than the planner, so terms
that were measured together share one ratio:

- computing (matmul, attention, elementwise, launch, recompute) has one ratio;
- communication has one, unless there is next to none: a ratio of two small times is noise;
- the optimizer has its own.

A pipeline measures its idle time (bubble, imbalance) together with its messages. Idle time is the computing
of other ranks and takes the ratio of computing; what is then left of the wait belongs to communication. Where
idle time is the larger part, what is left would be the difference of two large numbers. Then communication
keeps its factors, and idle time takes the difference.

A factor outside 1/4 to 4 means that the file describes another machine, or that something else ran on this
one. The factor stops at that limit, and the report says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from shardwise.cost.cluster import Cluster
from shardwise.cost.cluster_file import write_cluster, write_corrections
from shardwise.observe.compare_prediction import Row
from shardwise.plans.step_terms import COMMUNICATION, IDLE

LIMIT = 4.0
LEAST_SHARE = 0.01
"""Communication below this fraction of a step changes no factor."""
LEAST_STEPS = 5
"""Least number of measured steps."""


@dataclass(frozen=True)
class Change:
    """New factors of terms that share a ratio."""

    terms: tuple[str, ...]
    ratio: float
    """Measured seconds over predicted seconds, before limits."""
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def held(self) -> bool:
        """Whether a factor was stopped at its limit."""
        return any(
            abs(new - old * self.ratio) > 1e-9 * new for old, new in zip(self.before, self.after, strict=True)
        )


def calibrate(
    cluster: Cluster, predicted: Mapping[str, float], rows: Sequence[Row]
) -> tuple[Cluster, tuple[Change, ...]]:
    """Return the cluster with new factors, and what changed.

    `predicted` are the seconds of a step by term as this cluster predicts them now, with its present factors.
    So the same run, used twice, changes nothing more. `rows` are those of the report: each row of seconds has
    the `terms` it consists of and what was `measured` of them, null where nothing was.
    """
    known = [row for row in rows if row.get("terms") and row["measured"] is not None]
    step = next(row["measured"] for row in rows if row["what"] == "step time")
    measured = {tuple(row["terms"]): float(row["measured"]) for row in known}
    ratios = _ratios(measured, predicted, step)
    changes = [_change(cluster, terms, ratio) for terms, ratio in ratios if ratio is not None]
    factors: dict[str, float] = {}
    for change in changes:
        factors.update(zip(change.terms, change.after, strict=True))
    return replace(cluster, corrections={**cluster.corrections, **factors}), tuple(changes)


def _ratios(
    measured: Mapping[tuple[str, ...], float], predicted: Mapping[str, float], step: float
) -> list[tuple[tuple[str, ...], float | None]]:
    """Return measured over predicted for each set of terms; None where nothing can be learned."""
    ratios: list[tuple[tuple[str, ...], float | None]] = []
    computing: float | None = None
    for terms, seconds in measured.items():
        links, idle, rest = _by_kind(terms)
        # Computing. On devices that cannot measure the waiting apart, that is assumed to be as predicted.
        if rest:
            ratio = _ratio(seconds - _total(predicted, links), _total(predicted, (*rest, *idle)))
            computing = ratio if "matmul" in rest else computing
            ratios.append(((*rest, *idle), ratio))
        elif max(seconds, _total(predicted, terms)) >= LEAST_SHARE * step:
            ratios += _waits(links, idle, seconds, predicted, 1.0 if computing is None else computing)
    return ratios


def _by_kind(terms: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the terms of communication, of idle time and of everything else."""
    links, idle = (tuple(name for name in terms if name in group) for group in (COMMUNICATION, IDLE))
    return links, idle, tuple(name for name in terms if name not in (*links, *idle))


def _waits(
    links: tuple[str, ...],
    idle: tuple[str, ...],
    seconds: float,
    predicted: Mapping[str, float],
    computing: float,
) -> list[tuple[tuple[str, ...], float | None]]:
    communication, waiting = _total(predicted, links), _total(predicted, idle)
    if waiting > communication:
        return [(idle, _ratio(seconds - communication, waiting))]
    ratio = _ratio(seconds - computing * waiting, communication)
    return [(links, ratio), (idle, computing)] if idle else [(links, ratio)]


def _ratio(measured: float, predicted: float) -> float | None:
    return max(measured, 0.0) / predicted if predicted > 0 else None


def _total(predicted: Mapping[str, float], names: Sequence[str]) -> float:
    return fsum(predicted.get(name, 0.0) for name in names)


def _change(cluster: Cluster, terms: tuple[str, ...], ratio: float) -> Change:
    before = tuple(float(cluster.corrections.get(name, 1.0)) for name in terms)
    after = tuple(min(max(factor * ratio, 1 / LIMIT), LIMIT) for factor in before)
    return Change(terms, ratio, before, after)


def corrected_text(text: str, cluster: Cluster) -> str:
    """Return a cluster file with this cluster's factors in it.

    Everything else, comments too, stays as it was. Where that is impossible, the file is written anew.
    """
    unchanged: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = line.split("#")[0].strip() == "[corrections]"
        if not inside:
            unchanged.append(line)
    corrected = "\n".join(unchanged).rstrip() + "\n\n" + write_corrections(cluster)
    try:
        tomllib.loads(corrected)
    except tomllib.TOMLDecodeError:  # the factors were written in another form than a table
        return write_cluster(cluster)
    return corrected
