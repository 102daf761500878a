"""Turn the reports of all ranks into a verdict, in plain numbers and without torch.

**Error of a quantity** (the gradient of a parameter at a step, a weight after the last step): the norm of the
difference over the norm of the reference. The ranks hold slices of a parameter, so squares are summed over
the slices that cover it; where several ranks hold the same slice, the worst copy counts. It is also checked
that the slices cover the parameter: an element that no rank holds is a failure.

**Scale.** Some gradients are zero in exact arithmetic: the bias of the keys adds the same number to all
scores of a softmax. Such a reference is rounding noise, and an error relative to it would be noise too. So
the norm of the reference is taken as at least FLOOR times that of an average parameter of the same size. This
still shows an error as large as the gradient itself down to 1e-13 of the average, which is the level of
rounding. A weight is measured against at least the distance that one step may move it (a bias begins at
zero). Where its gradient is such noise, Adam divides noise by noise, and the average weight is the scale.

**Limit.** The limit is 1e-9 in float64. In a shorter dtype no layout can be that close, and no constant is
right for every model. There the reference is one device in float64, and the limit follows from the dtype:
ALLOWANCE times the error of one device in that dtype, or of one rounding if that is larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.config import Layout
from shardwise.files import Json
from shardwise.proof.proof_job import ALLOWANCE, ROUNDING, Dtype
from shardwise.proof.rank_reports import Box, CompressedReport, Key, RankReport, Reference

LIMIT = 1e-9
FLOOR = 1e-4
EXACT = 1e-6
"""Largest relative rest at which a slice still counts as a multiple of the reference."""
NOISE = 1e-9
"""A gradient whose elements are smaller than this fraction of the average counts as zero except for
rounding."""


@dataclass(frozen=True)
class QuantityError:
    """The error of one quantity, at the step that matters most."""

    parameter: str
    quantity: str
    relative_error: float
    limit: float
    step: int
    ranks: tuple[int, ...]
    """Ranks that hold a slice with an error above the limit; if there are none, those with the largest
    error."""
    rounding_cost: float | None = None
    """In a dtype shorter than float64, the error of one device in that dtype."""

    @property
    def passes(self) -> bool:
        """Whether the error is at most the limit. NaN never passes."""
        return self.relative_error <= self.limit

    def to_json(self, dtype: Dtype) -> Json:
        """Return the error as `--json` prints it."""
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
    """Return the number as JSON can hold it, which has no infinity and no NaN."""
    return number if math.isfinite(number) else 1e308


@dataclass(frozen=True)
class Verdict:
    """All errors, the worst first, and other faults."""

    errors: tuple[QuantityError, ...]
    faults: tuple[str, ...]
    """Sentences about parameters without a gradient, and about elements that no rank holds."""

    @property
    def passes(self) -> bool:
        """Whether the layout computes what one device computes."""
        return not self.faults and all(error.passes for error in self.errors)

    @property
    def first_step(self) -> int:
        """The first step in which any quantity fails; 1 if none does."""
        return min((error.step for error in self.failing()), default=1)

    def failing(self, quantity: str | None = None) -> list[QuantityError]:
        """Return the errors above their limit, of all quantities or of one, the worst first."""
        return [error for error in self.errors if quantity in (None, error.quantity) and not error.passes]


@dataclass(frozen=True)
class CompressedVerdict:
    """The verdict on the first step with compressed gradients or weights."""

    what: str
    lost: float | None
    """Largest relative difference between one device's gradient and what all devices received and keep; None
    if the codec keeps nothing."""
    relative_error: float
    """Relative error of the gradient that the ranks received."""
    faults: tuple[str, ...]
    weights_checked: bool = False
    """Whether the weights that devices computed with were compared."""

    def sentence(self) -> str:
        """Return a sentence about what holds, and about the error of the gradient. Where something does not
        hold, `faults` tells what."""
        claims = [] if self.faults else [*self._claims(), "and "]
        return (
            f"with {self.what} the numbers are not those of one device. Of the first step: {''.join(claims)}"
            f"the gradient is {self.relative_error:.2g} off"
        )

    def _claims(self) -> Iterator[str]:
        if self.lost is None:
            yield "what is left out is not made up for, "
        else:
            sums = "what is sent and what is kept for later add up to the gradient of one device"
            yield f"{sums} (to {self.lost:.1g}), "
        yield "copies got the same bits, "
        if self.weights_checked:
            yield "all devices computed with the same weights in forward and backward, "


def what_is_compressed(layout: Layout) -> str:
    """Return in words what the layout compresses."""
    sums, weights = layout.compression, layout.weight_compression
    return f"gradients in {sums}" if sums is not None else f"weights in {weights}"


def judge_compressed(what: str, reports: Sequence[CompressedReport]) -> CompressedVerdict:
    """Return the verdict on the first step with compressed gradients or weights."""
    losses = [report.lost for report in reports if report.lost is not None]
    lost = max((_or_infinite(loss) for loss in losses), default=None)
    off, size = sum(report.off for report in reports), sum(report.size for report in reports)
    faults = []
    if lost is not None and lost > LIMIT:
        faults.append(
            f"compression loses a part of the gradient: what is sent and what is kept differ from it by "
            f"{lost:.2g}"
        )
    faults += [*_different_gradients(reports), *_different_weights(reports)]
    relative_error = math.sqrt(off / size) if size else 0.0
    return CompressedVerdict(
        what, lost, relative_error, tuple(faults), any(report.weights for report in reports)
    )


def _different_gradients(reports: Sequence[CompressedReport]) -> Iterator[str]:
    """Yield a sentence for each parameter of which copies received different gradients."""
    received = {
        report.rank: {name: [checksum] for name, checksum in report.checksums.items()} for report in reports
    }
    for name, versions in _versions(received).items():
        if len(versions) > 1:
            yield f"{name}: ranks {_listed(versions.values())} were given different gradients"


def _different_weights(reports: Sequence[CompressedReport]) -> Iterator[str]:
    """Yield a sentence for each parameter of which devices used several versions."""
    for name, versions in _versions({report.rank: report.weights for report in reports}).items():
        if len(versions) == 1:
            continue
        ranks = [report.rank for report in reports if len(report.weights.get(name, ())) > 1]
        within = " within one step, as in forward and in backward" if ranks else ""
        yield f"{name}: ranks {_listed(ranks or versions.values())} computed with different weights{within}"


def _versions(checksums: Mapping[int, Mapping[str, Iterable[int]]]) -> dict[str, dict[int, int]]:
    """Return, by name, every checksum that occurs, with the first rank that has it."""
    versions: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, of_rank in checksums.items():
        for name, of_name in of_rank.items():
            for checksum in of_name:
                versions[name].setdefault(checksum, rank)
    return versions


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def judge(
    reports: Sequence[RankReport], reference: Reference, cost: RankReport | None, dtype: Dtype
) -> Verdict:
    """Return the verdict on a layout. `cost` is the report of one device in the same dtype, where that is not
    float64."""
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
    return _or_infinite(error.relative_error / error.limit)


def _worst_step(errors: Iterable[QuantityError]) -> list[QuantityError]:
    """Return one error for each parameter and quantity: the first step that fails, because later ones inherit
    from it, or else the worst step."""
    by_name: dict[tuple[str, str], list[QuantityError]] = defaultdict(list)
    for error in errors:
        by_name[error.parameter, error.quantity].append(error)
    return [_first_failing_or_worst(of_name) for of_name in by_name.values()]


def _first_failing_or_worst(errors: Sequence[QuantityError]) -> QuantityError:
    failing = [error for error in errors if not error.passes]
    return min(failing, key=lambda error: error.step) if failing else max(errors, key=_severity)


class ErrorScale:
    """Computes the scale by which the norm of an error is divided."""

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
        """Return the scale for a whole parameter."""
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
        keys = [(name, "gradient", step) for step in steps]
        gradients = {key[2]: squares[key] for key in keys if key in squares}  # a frozen weight has none
        return any(
            math.sqrt(square) < NOISE * self._average["gradient", step] * root
            for step, square in gradients.items()
        )


def _errors(reports: Sequence[RankReport], scale: ErrorScale) -> dict[Key, QuantityError]:
    tiles: dict[Key, dict[Box, float]] = defaultdict(dict)
    for report in reports:
        for part in report.slices:
            boxes = tiles[part.key]
            boxes[part.box] = max(boxes.get(part.box, 0.0), _or_infinite(part.difference))
    return {
        key: QuantityError(*key[:2], math.sqrt(sum(boxes.values())) / scale(key), LIMIT, key[2], ())
        for key, boxes in tiles.items()
    }


def _or_infinite(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _ranks(error: QuantityError, reports: Sequence[RankReport], scale: ErrorScale) -> tuple[int, ...]:
    """Return the ranks whose copy alone is above the limit, or else those with the largest error."""
    key = (error.parameter, error.quantity, error.step)
    errors: dict[int, float] = {}
    for report in reports:
        for part in report.slices:
            if part.key == key:
                relative = math.sqrt(_or_infinite(part.difference)) / scale(key)
                errors[report.rank] = max(relative, errors.get(report.rank, 0.0))
    above = tuple(rank for rank, relative in errors.items() if relative > error.limit)
    return above or tuple(rank for rank, relative in errors.items() if relative == max(errors.values()))


def _faults(reports: Sequence[RankReport], reference: Reference) -> Iterator[str]:
    """Yield the faults that no error of a number shows."""
    for name in reference.shapes:
        if ranks := [report.rank for report in reports if name in report.missing]:
            yield f"{name} has no gradient on ranks {_listed(ranks)}"
        if ranks := [report.rank for report in reports if not report.frozen.get(name, True)]:
            yield f"{name} is frozen, and its bits are not those of one device on ranks {_listed(ranks)}"
    yield from _uncovered(reports, {**reference.shapes, **reference.buffers})


def _uncovered(reports: Sequence[RankReport], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the parameters and buffers that the slices of all ranks do not cover exactly once."""
    boxes: dict[str, set[Box]] = defaultdict(set)
    for report in reports:
        for part in report.slices:
            if part.key[1] in ("weight", "buffer"):
                boxes[part.key[0]].add(part.box)
    for name, shape in shapes.items():
        if name not in boxes:
            yield f"{name} is not held by any rank"
            continue
        uncovered = math.prod(shape) - sum(map(_volume, boxes[name]))
        if uncovered > 0:
            yield f"{name}: {uncovered} of its elements are not held by any rank"
        if uncovered < 0:
            yield f"{name}: {-uncovered} elements too many are held in slices that overlap"


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
