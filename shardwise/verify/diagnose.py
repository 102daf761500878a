"""From where and by how much things differ to what is probably wrong.

The first step that differs is looked at. The order of the questions is the order of the computation, since
every later difference may follow from an earlier one:

1. Do weights differ before that step begins? Then the update of the step before is wrong, whose gradients
agree.
2. Did the step read the same sequences? Their checksums tell.
3. Does a module's output differ? Then that module, on those ranks, is where to look; gradients follow from
it.
4. Do outputs agree, but the gradient of one does not? Then the backward of what comes after that module. In
   both cases a factor between what is there and the reference that is the size of an axis points to a sum
   over that axis: one too many, or none; a factor of one over the number of micro-batches points to a
   division by it. Numbers that are equal are not told apart.
5. Do all of those agree, but gradients of weights do not? Then the fault lies in what is done to them: the
   sums over axes. The numbers tell which: a slice that is the reference times a number was scaled by it, and
   a number that is the size of an axis, or one over it, points to that axis; copies that, added up over an
   axis, give the reference were not summed over it; copies that differ along an axis were not all summed over
   it; what is left of the step before was not set to zero.
6. Do gradients agree, but their norm, or the weights after the update? Then norm, clipping or optimizer.
7. Do all of those agree, but the loads of experts in that step, or the loss on held-out rows? Then that
sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.verify.rank_reports import (
    HELD_OUT,
    LOAD,
    ModuleDifference,
    RankReport,
    RankTrace,
    SliceComparison,
)
from shardwise.verify.verdict import EXACT, QuantityError, Verdict

ROUGHLY = 0.4
"""Summands over devices are alike in size, not equal: one of n is 1/n of the sum to within this."""
MISSING, TWICE, AVERAGED = (
    "missing reduction over",
    "reduced twice, or not divided, over",
    "averaged where it should be summed, over",
)
UNEXPLAINED = "differs in a way that no sum over an axis explains"
UPDATE = "gradients agree, but not the weights after the update"
SHARED = "not the layout, which computes what one device computes, but what all share with it:"
MICRO_BATCHES = "micro-batches"
"""A loss that is divided by their number is averaged where it should be summed, as over an axis."""


@dataclass(frozen=True)
class FirstDifference:
    """The first module that differs, and the ranks on which it is that one."""

    module: str
    ranks: tuple[int, ...]
    relative_error: float
    micro_batch: int
    called: bool = True
    """False: one device calls it, and these ranks do not."""


@dataclass(frozen=True)
class Cause:
    """A fault, and what shows it."""

    what: str
    axis: str | None
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    ratio: float | None
    """What the reference would have to be multiplied by."""


@dataclass(frozen=True)
class Diagnosis:
    """Where the layout departs from one device, and why."""

    forward: FirstDifference | None
    backward: FirstDifference | None
    causes: tuple[Cause, ...]
    step: int = 1
    """The first that differs."""
    traced: bool = True
    """Whether modules were compared: there is nothing to trace where the step begins with other weights."""

    def to_json(self) -> dict[str, Any]:
        """As --json shows it."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """For people."""
        lines = [] if self.step == 1 else [f"step {self.step} is the first that differs"]
        if not self.traced:
            return [*lines, *(_sentence(cause) for cause in self.causes)]
        if self.forward and not self.forward.called:
            lines.append(f"forward: {self.forward.module} is not called on {_list_ranks(self.forward.ranks)}")
        elif self.forward:
            lines.append(f"forward: the first output that differs is that of {_where(self.forward)}")
        if self.backward and not self.forward:
            lines.append(
                f"backward: outputs agree; the first gradient that differs is that of the output of "
                f"{_where(self.backward)}"
            )
        if not (self.forward or self.backward):
            lines.append("the outputs of all modules agree, and so do their gradients")
        return [*lines, *(_sentence(cause) for cause in self.causes)]


def _where(first: FirstDifference) -> str:
    details = f"relative error {first.relative_error:.2g}, micro-batch {first.micro_batch}"
    return f"{first.module} on {_list_ranks(first.ranks)} ({details})"


def _sentence(cause: Cause) -> str:
    names = ", ".join(cause.parameters[:3]) + (
        f" and {len(cause.parameters) - 3} more" if len(cause.parameters) > 3 else ""
    )
    ratio = "" if cause.ratio is None else f"; {cause.ratio:.6g} times the reference"
    return f"{cause.what}{': ' if names else ''}{names} ({_list_ranks(cause.ranks)}{ratio})"


def _list_ranks(ranks: Sequence[int]) -> str:
    """rank 3, ranks 0, 1, 2."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def diagnose(
    verdict: Verdict,
    reports: Sequence[RankReport],
    traces: Sequence[RankTrace],
    sizes: Mapping[str, int] | None = None,
    data: Sequence[str] = (),
) -> Diagnosis:
    """What the numbers say; `sizes` are those of the layout's axes, and the number of micro-batches, `data`
    the reference's checksums of sequences. The traces are of the first step that differs."""
    step, sizes = verdict.first_step, sizes or {}
    if changed := {name: None for trace in traces for name in trace.before}:
        ranks = tuple(trace.rank for trace in traces if trace.before)
        cause = Cause(f"{UPDATE} of step {step - 1}", None, tuple(changed), ranks, None)
        return Diagnosis(None, None, (cause,), step, traced=False)
    forward = _first({trace.rank: trace.forward for trace in traces if trace.forward})
    backward = _first({trace.rank: trace.backward for trace in traces if trace.backward}, last=True)
    causes: Iterable[Cause]
    if other := [report.rank for report in reports if data and report.data[step - 1] != data[step - 1]]:
        ranks = forward.ranks if forward else tuple(other)
        causes = [Cause(f"other rows of data than one device reads in step {step}", None, (), ranks, None)]
    elif forward or backward:
        differences = [trace.forward if forward else trace.backward for trace in traces]
        causes = _activation_causes(
            forward, backward, [difference for difference in differences if difference], sizes
        )
    elif failing := [error for error in verdict.failing("gradient") if error.step == step]:
        causes = _joined(_as_one_fault(list(_gradient_causes(failing, reports, traces, sizes)), reports))
    else:
        causes = _late_causes(verdict, step, reports)
    return Diagnosis(forward, backward, tuple(causes), step)


def diagnose_shared(verdict: Verdict, reports: Sequence[RankReport], data: Sequence[str]) -> Diagnosis:
    """Every rank agrees with one device, and not with plain torch: which part of the code they share is
    probably wrong. Modules cannot be compared, since plain torch has none; the order in which quantities come
    to differ tells the part."""
    step = verdict.first_step
    failing: dict[str, list[str]] = defaultdict(list)
    for error in verdict.failing():
        if error.step == step:
            failing[error.quantity].append(error.parameter)
    what, names = "the update (learning rate, clipping, AdamW, decay)", failing["weight"] + failing["buffer"]
    if reports[0].data[step - 1] != data[step - 1]:
        what, names = "the rows of data that a step reads", []
    elif step > 1 and (failing["loss"] or failing["gradient"]):
        what, names = f"{what} of step {step - 1}; --steps {step - 1} shows of which weights", []
    elif failing["loss"]:
        what, names = "the forward pass or the loss", failing["gradient"]
    elif failing["gradient"]:
        what, names = "the backward pass, or the losses of routers", failing["gradient"]
    elif failing["gradient norm"]:
        what, names = "the gradient norm", []
    elif failing[LOAD] or failing["expert imbalance"]:
        what, names = "the loads of experts", []
    elif not names and failing[HELD_OUT]:
        what = "the evaluation"
    ranks = tuple(report.rank for report in reports)
    return Diagnosis(
        None, None, (Cause(f"{SHARED} {what}", None, tuple(names), ranks, None),), step, traced=False
    )


def _first(by_rank: dict[int, ModuleDifference], last: bool = False) -> FirstDifference | None:
    if not by_rank:
        return None
    position = (max if last else min)(difference.position for difference in by_rank.values())
    at_position = {
        rank: difference for rank, difference in by_rank.items() if difference.position == position
    }
    worst = max(at_position.values(), key=lambda difference: difference.error)
    error = worst.error if math.isfinite(worst.error) else 1e308
    first = min(difference.micro_batch for difference in at_position.values())
    return FirstDifference(worst.module, tuple(at_position), error, first, worst.called)


def _activation_causes(
    forward: FirstDifference | None,
    backward: FirstDifference | None,
    differences: Sequence[ModuleDifference],
    sizes: Mapping[str, int],
) -> Iterator[Cause]:
    """What is wrong with the sums on the way of an activation, or of its gradient; nothing where the numbers
    do not tell."""
    first = forward or backward
    assert first is not None, "something differs"
    ratio, exact = _multiple([difference for difference in differences if difference.module == first.module])
    if ratio is None:
        return
    axes = {
        axis: sizes[axis]
        for axis in ("tensor", "context", "data", "replica", "expert")
        if sizes.get(axis, 1) > 1
    }
    what, over = f"scaled by {ratio:.6g}", ""
    if exact:
        twice = [axis for axis, size in axes.items() if math.isclose(ratio, size, rel_tol=EXACT)]
        averaged = _divided_by(ratio, axes, sizes)
        if over := " or ".join(twice or averaged):
            what = f"{TWICE if twice else AVERAGED} {over}"
    # Outputs of other tokens are alike by chance. Devices that share a sequence add up gradients of one
    # token.
    elif not forward:
        over = " or ".join(
            axis for axis in axes if axis in ("tensor", "context") and abs(ratio * axes[axis] - 1) < ROUGHLY
        )
        what = f"{MISSING} {over}"
    if exact or over:
        yield Cause(what, over or None, (), first.ranks, ratio)


def _divided_by(ratio: float, axes: Mapping[str, int], sizes: Mapping[str, int]) -> list[str]:
    """What the reference was divided by, if it is the size of an axis or the number of micro-batches: all
    that it may be."""
    numbers = {MICRO_BATCHES: sizes.get(MICRO_BATCHES, 1), **axes}
    return [
        name for name, size in numbers.items() if size > 1 and math.isclose(ratio, 1 / size, rel_tol=EXACT)
    ]


def _multiple(compared: Sequence[SliceComparison | ModuleDifference]) -> tuple[float | None, bool]:
    """The factor between the reference and what is there (least squares), and whether it explains all of the
    difference."""
    reference, product = sum(part.reference for part in compared), sum(part.product for part in compared)
    if not reference > 0 or not math.isfinite(product):
        return None, False
    ratio = product / reference
    rest = (
        sum(part.own for part in compared) - ratio * product
    )  # what is left when ratio times the reference is taken away
    return ratio, abs(rest) <= EXACT**2 * max(reference, product * ratio)


def _as_one_fault(causes: Sequence[Cause], reports: Sequence[RankReport]) -> Iterator[Cause]:
    """A slice may be too unlike the other summands to tell by itself (a router's weight). If on the same
    ranks one sum is missing for other parameters, and nothing else is, and this parameter passes that sum
    too, it is the same fault."""
    missing = {
        cause.axis: cause.what
        for cause in causes
        if cause.axis is not None and cause.what.startswith(MISSING)
    }
    ranks = {cause.ranks for cause in causes if cause.axis in missing}
    for cause in causes:
        sums = {
            axis
            for report in reports
            for name in cause.parameters
            for axis in report.reductions.get(name, {})
        }
        if (
            cause.what == UNEXPLAINED
            and len(missing) == 1
            and cause.ranks in ranks
            and missing.keys() <= sums
        ):
            ((axis, what),) = missing.items()
            cause = replace(cause, what=what, axis=axis)
        yield cause


def _joined(causes: Iterable[Cause]) -> Iterator[Cause]:
    """One cause for all parameters that share it."""
    groups: dict[tuple[str, tuple[int, ...]], list[Cause]] = defaultdict(list)
    for cause in causes:
        groups[cause.what, cause.ranks].append(cause)
    for (what, ranks), group in groups.items():
        names = tuple(name for cause in group for name in cause.parameters)
        yield Cause(what, group[0].axis, names, ranks, group[0].ratio if len(group) == 1 else None)


def _gradient_causes(
    failing: Sequence[QuantityError],
    reports: Sequence[RankReport],
    traces: Sequence[RankTrace],
    sizes: Mapping[str, int],
) -> Iterator[Cause]:
    left_over = {trace.rank: trace.left_over for trace in traces}
    if all(error.parameter in left_over.get(rank, ()) for error in failing for rank in error.ranks):
        step = failing[0].step
        what = f"gradients of step {step - 1} are still in those of step {step}: not set to zero between them"
        for error in failing:
            yield Cause(what, None, (error.parameter,), error.ranks, None)
        return
    for error in failing:
        summed = [axis for trace in traces for axis in trace.summed.get(error.parameter, [])]
        yield _cause(error, _GradientCopies(error, reports), summed, sizes)


class _GradientCopies:
    """One parameter's gradient on all ranks that hold some of it."""

    def __init__(self, error: QuantityError, reports: Sequence[RankReport]) -> None:
        key = (error.parameter, error.quantity, error.step)
        parts = [(report.rank, part) for report in reports for part in report.slices if part.key == key]
        # Both copies of a tied weight may be on one rank: the worse comes last, and stays.
        self.slices: dict[int, SliceComparison] = dict(sorted(parts, key=lambda pair: pair[1].difference))
        self.coordinates = {report.rank: report.coordinates for report in reports}
        self.reductions: dict[str, int] = {}
        for report in reports:
            self.reductions.update(report.reductions.get(error.parameter, {}))
        self.bad = [rank for rank in error.ranks if rank in self.slices]

    def ratio(self) -> tuple[float | None, bool]:
        """The factor between the reference and what the bad ranks have, and whether it explains all of the
        difference."""
        return _multiple([self.slices[rank] for rank in self.bad])

    def unequal_axes(self) -> set[str]:
        """Axes along which two ranks hold the same slice with other values."""
        pairs = [
            (a, b)
            for a in self.slices
            for b in self.slices
            if a < b and self._differ(self.slices[a], self.slices[b])
        ]
        fewest = min((len(self._between(a, b)) for a, b in pairs), default=0)
        return {axis for a, b in pairs for axis in self._between(a, b) if len(self._between(a, b)) == fewest}

    def _differ(self, a: SliceComparison, b: SliceComparison) -> bool:
        return a.box == b.box and abs(a.product - b.product) > 1e-9 * max(a.reference, abs(a.product), 1e-300)

    def _between(self, a: int, b: int) -> list[str]:
        first, second = self.coordinates[a], self.coordinates[b]
        return [axis for axis in first if first[axis] != second[axis] and axis != "expert"]


def _cause(
    error: QuantityError, copies: _GradientCopies, summed: Sequence[str], sizes: Mapping[str, int]
) -> Cause:
    ratio, exact = copies.ratio()

    def cause(what: str, axis: str | None = None) -> Cause:
        return Cause(f"{what} {axis}" if axis else what, axis, (error.parameter,), error.ranks, ratio)

    if ratio is not None and exact and (averaged := _divided_by(ratio, copies.reductions, sizes)):
        return cause(
            AVERAGED, " or ".join(averaged)
        )  # before the next: averages, too, add up to the reference
    if summed:
        return cause(MISSING, summed[0])
    if ratio is not None and exact:
        for axis, size in copies.reductions.items():
            if math.isclose(ratio, size, rel_tol=EXACT):
                return cause(TWICE, axis)
        return cause(f"scaled by {ratio:.6g}")
    unequal = copies.unequal_axes()
    for axis in copies.reductions:
        if unequal & _members(axis):
            return cause(MISSING, axis)
    if ratio is not None:
        for axis, size in copies.reductions.items():
            if abs(ratio * size - 1) < ROUGHLY:
                return cause(MISSING, axis)
    return cause(UNEXPLAINED)


def _members(axis: str) -> set[str]:
    """The axes of a sum; devices with the same experts differ in any of those that the experts borrow
    from."""
    parts = set(axis.split(" x "))
    return parts | {"data", "context", "tensor"} if "expert_data" in parts else parts


def _late_causes(verdict: Verdict, first: int, reports: Sequence[RankReport]) -> Iterator[Cause]:
    """All gradients of the first step that fails agree. What is compared once counts at the last."""
    for error in [*verdict.failing("loss"), *verdict.failing("gradient norm")]:
        if error.step == first:
            axes = _axes_of(error.ranks, reports)
            what = f"gradients agree, but not the {error.quantity}"
            yield Cause(
                f"{what}: missing reduction over {axes}" if axes else what, axes, (), error.ranks, None
            )
            return
    if loads := [error for error in verdict.failing(LOAD) if error.step == first]:
        yield from _joined(_sum_cause(error, reports) for error in loads)
        return
    if all(error.quantity == HELD_OUT for error in verdict.failing()):
        yield from (_sum_cause(error, reports) for error in verdict.failing())
    if weights := verdict.failing("weight"):
        names, ranks = (
            tuple(error.parameter for error in weights),
            {rank for error in weights for rank in error.ranks},
        )
        yield Cause(UPDATE, None, names, tuple(sorted(ranks)), None)
    for error in verdict.failing("buffer"):
        yield Cause("a buffer differs", None, (error.parameter,), error.ranks, None)


def _sum_cause(error: QuantityError, reports: Sequence[RankReport]) -> Cause:
    """Of a number that every rank should have alike: ranks that have another miss a sum along the axis
    between them."""
    axis = " or ".join(sorted(_GradientCopies(error, reports).unequal_axes())) or None
    what = (
        f"all else agrees, but not the {error.quantity}"
        if axis is None
        else f"the {error.quantity}: {MISSING} {axis}"
    )
    return Cause(what, axis, (error.parameter,) if error.parameter else (), error.ranks, None)


def _axes_of(bad: Sequence[int], reports: Sequence[RankReport]) -> str | None:
    """The axes along which good ranks and bad ones are neighbours."""
    coordinates = {report.rank: report.coordinates for report in reports}
    good = [rank for rank in coordinates if rank not in bad]
    between = [
        [axis for axis in coordinates[a] if axis != "expert" and coordinates[a][axis] != coordinates[b][axis]]
        for a in bad
        for b in good
    ]
    fewest = min(map(len, between), default=0)
    return " or ".join(sorted({axis for axes in between for axis in axes if len(axes) == fewest})) or None
