"""From the reports of all ranks to a verdict, in plain numbers and without torch.

**Error of a quantity** (the gradient of a parameter at a step, a weight after the last): the norm of the
difference over the norm of the reference. A parameter lies in slices on the ranks, so squares are summed over
the slices that tile it; where several ranks hold the same slice, the worst copy counts. That the slices tile
the parameter is checked too: an element that nobody holds is a failure.

**Scale.** Some gradients are zero in exact arithmetic: a bias of the keys adds the same to all of a softmax's
scores. Such a reference is rounding noise, and a norm relative to it would be too. So the reference's norm is
taken as at least FLOOR times that of an average parameter of the same size, which still shows an error as
large as the gradient itself down to 1e-13 of the average: the level of the rounding. A weight is measured
against at least what one step may move it by (a bias begins at zero); where the gradient is such noise, Adam
divides noise by noise, and the average weight is the scale.

**Limit.** 1e-9 in float64. In a shorter dtype the same layout cannot be that close, and no constant is right
for every model; there the reference is one device in float64, and the limit is what the dtype itself costs:
ALLOWANCE times the error of one device in that dtype, or of one rounding if that is more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.config import Layout
from shardwise.verify.proof_job import ALLOWANCE, ROUNDING, Dtype
from shardwise.verify.rank_reports import Box, CompressedReport, Key, RankReport, Reference

LIMIT = 1e-9
FLOOR = 1e-4
EXACT = 1e-6
"""A slice is a multiple of the reference if what a factor does not explain is smaller than this."""
NOISE = 1e-9
"""A gradient smaller than this share of the average one, element by element, is taken to be zero but for
rounding."""


@dataclass(frozen=True)
class QuantityError:
    """How far one quantity is off, where it is worst."""

    parameter: str
    quantity: str
    relative_error: float
    limit: float
    step: int
    ranks: tuple[int, ...]
    """Ranks that hold a slice with an error above the limit; if there is none, those with the largest."""
    rounding_cost: float | None = None
    """In a dtype shorter than float64: the error of one device."""

    @property
    def passes(self) -> bool:
        """Not above the limit; not a number never passes."""
        return self.relative_error <= self.limit

    def to_json(self, dtype: Dtype) -> dict[str, Any]:
        """As --json shows it."""
        cost = {} if self.rounding_cost is None else {"rounding_cost": self.rounding_cost}
        return {
            "parameter": self.parameter,
            "quantity": self.quantity,
            "relative_error": finite(self.relative_error),
            "rounding_units": finite(self.relative_error / ROUNDING[dtype]),
            "limit": self.limit,
            "step": self.step,
            "ranks": list(self.ranks),
            "pass": self.passes,
            **cost,
        }


def finite(number: float) -> float:
    """The number as JSON can hold it, which has no infinity and no NaN."""
    return number if math.isfinite(number) else 1e308


@dataclass(frozen=True)
class Verdict:
    """All errors, worst first, and what else is wrong."""

    errors: tuple[QuantityError, ...]
    faults: tuple[str, ...]
    """Parameters without a gradient, elements that nobody holds."""

    @property
    def passes(self) -> bool:
        """Whether the layout computes what one device computes."""
        return not self.faults and all(error.passes for error in self.errors)

    @property
    def first_step(self) -> int:
        """The first step in which anything is off; 1 where nothing is."""
        return min((error.step for error in self.failing()), default=1)

    def failing(self, quantity: str | None = None) -> list[QuantityError]:
        """What is off, or off in this quantity, worst first."""
        return [error for error in self.errors if quantity in (None, error.quantity) and not error.passes]


@dataclass(frozen=True)
class CompressedVerdict:
    """On the first step with compressed gradients or weights."""

    what: str
    lost: float | None
    """The most that what all were given and keep differs from one device's gradient; None: nothing is
    kept."""
    relative_error: float
    """Of the gradient that the ranks were given."""
    faults: tuple[str, ...]
    weights_checked: bool = False
    """Whether the weights that devices computed with were compared."""

    def sentence(self) -> str:
        """What holds, and how far the gradient is off. Where something does not hold, `faults` says what."""
        claims = [] if self.faults else [*self._claims(), "and "]
        return (
            f"with {self.what} the numbers are not those of one device. Of the first step: {''.join(claims)}"
            f"the gradient is {self.relative_error:.2g} off"
        )

    def _claims(self) -> Iterator[str]:
        if self.lost is None:
            yield "what is left out is not made up for, "
        else:
            yield (
                f"what is sent and what is kept for later add up to the gradient of one device (to "
                f"{self.lost:.1g}), "
            )
        yield "copies got the same bits, "
        if self.weights_checked:
            yield "all devices computed with the same weights in forward and backward, "


def what_is_compressed(layout: Layout) -> str:
    """In words."""
    sums, weights = layout.compression, layout.weight_compression
    return f"gradients in {sums}" if sums is not None else f"weights in {weights}"


def judge_compressed(what: str, reports: Sequence[CompressedReport]) -> CompressedVerdict:
    """The verdict on the first step with compressed gradients or weights."""
    losses = [report.lost for report in reports if report.lost is not None]
    lost = max((_or_infinite(loss) for loss in losses), default=None)
    off, size = sum(report.off for report in reports), sum(report.size for report in reports)
    faults = []
    if lost is not None and lost > LIMIT:
        faults.append(
            f"compression loses a part of the gradient: what is sent and what is kept differ from it by "
            f"{lost:.2g}"
        )
    given = {
        report.rank: {name: [checksum] for name, checksum in report.checksums.items()} for report in reports
    }
    for name, versions in _versions(given).items():
        if len(versions) > 1:
            faults.append(f"{name}: ranks {_listed(versions.values())} were given different gradients")
    faults += _different_weights(reports)
    relative_error = math.sqrt(off / size) if size else 0.0
    return CompressedVerdict(
        what, lost, relative_error, tuple(faults), any(report.weights for report in reports)
    )


def _different_weights(reports: Sequence[CompressedReport]) -> Iterator[str]:
    """Parameters of which devices computed with several versions."""
    for name, versions in _versions({report.rank: report.weights for report in reports}).items():
        if len(versions) == 1:
            continue
        ranks = [report.rank for report in reports if len(report.weights.get(name, ())) > 1]
        within = " within one step, as in forward and in backward" if ranks else ""
        yield f"{name}: ranks {_listed(ranks or versions.values())} computed with different weights{within}"


def _versions(checksums: Mapping[int, Mapping[str, Iterable[int]]]) -> dict[str, dict[int, int]]:
    """By name, every checksum that occurs, with the first rank that has it."""
    versions: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, of_rank in checksums.items():
        for name, found in of_rank.items():
            for checksum in found:
                versions[name].setdefault(checksum, rank)
    return versions


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def judge(
    reports: Sequence[RankReport], reference: Reference, cost: RankReport | None, dtype: Dtype
) -> Verdict:
    """The verdict on a layout; `cost` is one device in the same dtype, where that is not float64."""
    scale = ErrorScale(reference)
    costs = (
        {} if cost is None else {key: error.relative_error for key, error in _errors([cost], scale).items()}
    )
    errors = _errors(reports, scale)
    limited = [_with_limit(error, costs.get(key), dtype) for key, error in errors.items()]
    worst = sorted(_worst_step(limited), key=_severity, reverse=True)
    marked = [replace(error, ranks=_ranks(error, reports, scale)) for error in worst]
    return Verdict(tuple(marked), tuple(_faults(reports, reference)))


def _with_limit(error: QuantityError, cost: float | None, dtype: Dtype) -> QuantityError:
    limit = LIMIT if cost is None else ALLOWANCE * max(cost, ROUNDING[dtype])
    return replace(error, limit=limit, rounding_cost=cost)


def _severity(error: QuantityError) -> float:
    severity = error.relative_error / error.limit
    return math.inf if math.isnan(severity) else severity


def _worst_step(errors: Iterable[QuantityError]) -> list[QuantityError]:
    """One for each parameter and quantity. The first step that fails: later ones inherit from it; else the
    worst."""
    by_name: dict[tuple[str, str], list[QuantityError]] = defaultdict(list)
    for error in errors:
        by_name[error.parameter, error.quantity].append(error)
    failing = {name: [error for error in own if not error.passes] for name, own in by_name.items()}
    return [
        min(failing[name], key=lambda error: error.step) if failing[name] else max(own, key=_severity)
        for name, own in by_name.items()
    ]


class ErrorScale:
    """What the norm of an error is divided by."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._sizes = {**reference.shapes, **reference.buffers}
        sums: dict[tuple[str, int], float] = defaultdict(float)
        elements: dict[tuple[str, int], int] = defaultdict(int)  # frozen weights have no gradients to average
        for (name, quantity, step), square in reference.squares.items():
            sums[quantity, step] += square
            elements[quantity, step] += math.prod(reference.shapes.get(name, ()))
        self._average = {key: math.sqrt(square / max(1, elements[key])) for key, square in sums.items()}

    def __call__(self, key: Key) -> float:
        """For a whole parameter."""
        name, quantity, step = key
        norm, root = math.sqrt(self._reference.squares[key]), math.sqrt(math.prod(self._sizes.get(name, ())))
        average = self._average[quantity, step]
        if quantity == "gradient":
            return max(norm, FLOOR * average * root)
        if quantity != "weight":
            return norm or 1.0
        moved = average if self._is_noise(name) else self._reference.learning_rate
        return max(norm, moved * root)

    def _is_noise(self, name: str) -> bool:
        root, squares = math.sqrt(math.prod(self._sizes[name])), self._reference.squares
        steps = range(1, len(self._reference.losses) + 1)
        gradients = {
            step: squares[name, "gradient", step] for step in steps if (name, "gradient", step) in squares
        }  # frozen: none
        return any(
            math.sqrt(square) < NOISE * self._average["gradient", step] * root
            for step, square in gradients.items()
        )


def _errors(reports: Sequence[RankReport], scale: ErrorScale) -> dict[Key, QuantityError]:
    tiles: dict[Key, dict[Box, float]] = defaultdict(dict)
    for report in reports:
        for part in report.slices:
            own = tiles[part.key]
            own[part.box] = max(own.get(part.box, 0.0), _or_infinite(part.difference))
    return {
        key: QuantityError(*key[:2], math.sqrt(sum(own.values())) / scale(key), LIMIT, key[2], ())
        for key, own in tiles.items()
    }


def _or_infinite(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _ranks(error: QuantityError, reports: Sequence[RankReport], scale: ErrorScale) -> tuple[int, ...]:
    """Whose copy is off: above the limit by itself, or else the worst."""
    key = (error.parameter, error.quantity, error.step)
    offs: dict[int, float] = {}
    for report in reports:
        for part in report.slices:
            if part.key == key:
                off = math.sqrt(_or_infinite(part.difference)) / scale(key)
                offs[report.rank] = max(off, offs.get(report.rank, 0.0))
    above = tuple(rank for rank, off in offs.items() if off > error.limit)
    return above or tuple(rank for rank, off in offs.items() if off == max(offs.values()))


def _faults(reports: Sequence[RankReport], reference: Reference) -> Iterator[str]:
    """What is wrong without any number being off."""
    for name in reference.shapes:
        if ranks := [report.rank for report in reports if name in report.missing]:
            yield f"{name} has no gradient on ranks {', '.join(map(str, ranks))}"
        if ranks := [report.rank for report in reports if not report.frozen.get(name, True)]:
            yield (
                f"{name} is frozen, and its bits are not those of one device on ranks "
                f"{', '.join(map(str, ranks))}"
            )
    boxes: dict[str, set[Box]] = defaultdict(set)
    for report in reports:
        for part in report.slices:
            if part.key[1] in ("weight", "buffer"):
                boxes[part.key[0]].add(part.box)
    for name, shape in {**reference.shapes, **reference.buffers}.items():
        if name not in boxes:
            yield f"{name} is not held by any rank"
        elif uncovered := math.prod(shape) - sum(map(_volume, boxes[name])):
            what = (
                f"{uncovered} of its elements are" if uncovered > 0 else f"{-uncovered} elements too many are"
            )
            yield (
                f"{name}: {what} {'not held by any rank' if uncovered > 0 else 'held in slices that overlap'}"
            )


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
