"""Find the probable cause when a layout differs from one device.

The first step that differs is examined. The questions come in the order of the computation, because every
later difference may follow from an earlier one:

1. Do weights differ before that step begins? Then the update of the previous step is wrong, although its
gradients agree.

2. Did the step read other sequences? Their checksums tell.

3. Does the output of a module differ? Then the fault is in that module, on those ranks. Differences of
gradients follow from it.

4. Do all outputs agree, but not the gradient of one output? Then the backward of what comes after that module
is wrong. In cases 3 and 4, the factor between the tensor and the reference may tell more. If it is the size
of an axis, a sum over that axis was taken twice. If it is one over that size, or over the number of
micro-batches, an average was taken where a sum was meant. Where two axes have the same size, both are named.

5. Do all of those agree, but not the gradients of weights? Then the sums over axes are wrong, and the numbers
tell which. A slice that is a multiple of the reference was scaled; if the factor is the size of an axis, or
one over it, that axis is the cause. Copies that add up to the reference over an axis were not summed over it.
Copies that differ along an axis were not all summed over it. A rest of the previous step's gradient means
that gradients were not set to zero.

6. Do gradients agree, but not their norm, or not the weights after the update? Then the norm, clipping or the
optimizer is wrong.

7. Do all of those agree, but not the loads of experts in that step, or not the loss on held-out rows? Then
that sum is wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from shardwise.config.axes import SEQUENCE_AXES, TOKEN_AXES
from shardwise.files import Json
from shardwise.plurals import listed
from shardwise.proof.rank_reports import (
    HELD_OUT,
    LOAD,
    ModuleDifference,
    RankReport,
    RankTrace,
    SliceComparison,
)
from shardwise.proof.verdict import EXACT, QuantityError, Verdict, finite

SUMMED_AXES = (*reversed(TOKEN_AXES), "expert")
"""Axes over which activations or their gradients may be summed."""
ROUGHLY = 0.4
"""Largest deviation from 1/n at which one of n summands is still recognised. The summands of a gradient have
similar magnitudes, but they are not equal."""
MISSING, TWICE, AVERAGED = (
    "missing reduction over",
    "reduced twice, or not divided, over",
    "averaged where it should be summed, over",
)
UNEXPLAINED = "differs in a way that no sum over an axis explains"
UPDATE = "gradients agree, but not the weights after the update"
SHARED = "not the layout, which computes what one device computes, but what all share with it:"
SHARED_PARTS = {
    "loss": "the forward pass or the loss",
    "gradient": "the backward pass, or the losses of routers",
    "gradient norm": "the gradient norm",
    LOAD: "the loads of experts",
    "expert imbalance": "the loads of experts",
}
"""The part of the shared code that is probably wrong if a quantity is the first that differs, in the order of
the computation."""
MICRO_BATCHES = "micro-batches"
"""Key of the number of micro-batches among the sizes of axes. A loss that is divided by that number was
averaged where it should be summed, just as over an axis."""


@dataclass(frozen=True)
class FirstDifference:
    """The first module that differs, and the ranks on which it is the first."""

    module: str
    ranks: tuple[int, ...]
    relative_error: float
    micro_batch: int
    called: bool = True
    """False if one device calls the module and these ranks do not."""


@dataclass(frozen=True)
class Cause:
    """A probable fault, with the parameters and the ranks that show it."""

    what: str
    axis: str | None
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    ratio: float | None
    """Factor by which the reference would have to be multiplied, where one factor is known."""


@dataclass(frozen=True)
class Diagnosis:
    """Where the layout first differs from one device, and why."""

    forward: FirstDifference | None
    backward: FirstDifference | None
    causes: tuple[Cause, ...]
    step: int = 1
    """The first step that differs."""
    traced: bool = True
    """Whether modules were compared. They are not where the step already begins with other weights."""

    def to_json(self) -> Json:
        """Return the diagnosis as `--json` prints it."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Return the diagnosis as sentences."""
        lines = [] if self.step == 1 else [f"step {self.step} is the first that differs"]
        modules = self._module_sentences() if self.traced else ()
        return [*lines, *modules, *(_sentence(cause) for cause in self.causes)]

    def _module_sentences(self) -> Iterator[str]:
        """Yield where outputs of modules, or their gradients, first differ."""
        if self.forward and not self.forward.called:
            yield f"forward: {self.forward.module} is not called on {_list_ranks(self.forward.ranks)}"
        elif self.forward:
            yield f"forward: the first output that differs is that of {_where(self.forward)}"
        if self.backward and not self.forward:
            where = _where(self.backward)
            yield f"backward: outputs agree; the first gradient that differs is that of the output of {where}"
        if not (self.forward or self.backward):
            yield "the outputs of all modules agree, and so do their gradients"


def _where(first: FirstDifference) -> str:
    details = f"relative error {first.relative_error:.2g}, micro-batch {first.micro_batch}"
    return f"{first.module} on {_list_ranks(first.ranks)} ({details})"


def _sentence(cause: Cause) -> str:
    names = listed(cause.parameters)
    ratio = "" if cause.ratio is None else f"; {cause.ratio:.6g} times the reference"
    return f"{cause.what}{': ' if names else ''}{names} ({_list_ranks(cause.ranks)}{ratio})"


def _list_ranks(ranks: Sequence[int]) -> str:
    """Return these ranks in words, such as "rank 3" or "ranks 0, 1, 2"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def diagnose(
    verdict: Verdict,
    reports: Sequence[RankReport],
    traces: Sequence[RankTrace],
    sizes: Mapping[str, int] | None = None,
    data: Sequence[str] = (),
) -> Diagnosis:
    """Return the probable cause of the differences.

    The traces are those of the first step that differs. `sizes` has the sizes of the layout's axes and the
    number of micro-batches, and `data` the reference's checksums of sequences.
    """
    step, sizes = verdict.first_step, sizes or {}
    if (update := _update_cause(traces, step)) is not None:
        return Diagnosis(None, None, (update,), step, traced=False)
    forward = _first({trace.rank: trace.forward for trace in traces})
    backward = _first({trace.rank: trace.backward for trace in traces}, last=True)
    causes: Iterable[Cause]
    if other_data := _ranks_with_other_data(reports, data, step):
        ranks = forward.ranks if forward else other_data
        causes = [Cause(f"other rows of data than one device reads in step {step}", None, (), ranks, None)]
    elif forward or backward:
        causes = _activation_causes(forward, backward, traces, sizes)
    elif failing := _failing_in(step, verdict, "gradient"):
        causes = _joined(_as_one_fault(list(_gradient_causes(failing, reports, traces, sizes)), reports))
    else:
        causes = _late_causes(verdict, step, reports)
    return Diagnosis(forward, backward, tuple(causes), step)


def _failing_in(step: int, verdict: Verdict, quantity: str) -> list[QuantityError]:
    """Return the errors of a quantity that are above their limit in a step, the worst first."""
    return [error for error in verdict.failing(quantity) if error.step == step]


def _update_cause(traces: Sequence[RankTrace], step: int) -> Cause | None:
    """Return the update of the previous step as the cause if any weight differs before a step, else None."""
    changed = dict.fromkeys(name for trace in traces for name in trace.before)
    if not changed:
        return None
    ranks = tuple(trace.rank for trace in traces if trace.before)
    return Cause(f"{UPDATE} of step {step - 1}", None, tuple(changed), ranks, None)


def _ranks_with_other_data(reports: Sequence[RankReport], data: Sequence[str], step: int) -> tuple[int, ...]:
    """Return the ranks that read other sequences in a step than the reference; none without checksums."""
    if not data:
        return ()
    return tuple(report.rank for report in reports if report.data[step - 1] != data[step - 1])


def diagnose_shared(verdict: Verdict, reports: Sequence[RankReport], data: Sequence[str]) -> Diagnosis:
    """Return which part of the shared code is probably wrong.

    Every rank agrees with one device, but not with plain torch. Modules cannot be compared, because plain
    torch has none. The order in which quantities begin to differ tells the part.
    """
    step = verdict.first_step
    failing: dict[str, list[str]] = defaultdict(list)
    for error in verdict.failing():
        if error.step == step:
            failing[error.quantity].append(error.parameter)
    if reports[0].data[step - 1] != data[step - 1]:
        part, names = "the rows of data that a step reads", list[str]()
    else:
        part, names = _shared_part(failing, step)
    ranks = tuple(report.rank for report in reports)
    cause = Cause(f"{SHARED} {part}", None, tuple(names), ranks, None)
    return Diagnosis(None, None, (cause,), step, traced=False)


def _shared_part(failing: Mapping[str, list[str]], step: int) -> tuple[str, list[str]]:
    """Return the part of the shared code that is probably wrong, and the parameters that show it.

    `failing` has, by quantity, the parameters that differ in this step, the first that differs.
    """
    update = "the update (learning rate, clipping, AdamW, decay)"
    if step > 1 and (failing["loss"] or failing["gradient"]):
        return f"{update} of step {step - 1}; --steps {step - 1} shows of which weights", []
    for quantity, part in SHARED_PARTS.items():
        if failing[quantity]:
            return part, failing["gradient"]
    names = failing["weight"] + failing["buffer"]
    return "the evaluation" if failing[HELD_OUT] and not names else update, names


def _first(traced: Mapping[int, ModuleDifference | None], last: bool = False) -> FirstDifference | None:
    by_rank = {rank: difference for rank, difference in traced.items() if difference}
    if not by_rank:
        return None
    position = (max if last else min)(difference.position for difference in by_rank.values())
    at_position = {
        rank: difference for rank, difference in by_rank.items() if difference.position == position
    }
    worst = max(at_position.values(), key=lambda difference: difference.error)
    first = min(difference.micro_batch for difference in at_position.values())
    return FirstDifference(worst.module, tuple(at_position), finite(worst.error), first, worst.called)


def _activation_causes(
    forward: FirstDifference | None,
    backward: FirstDifference | None,
    traces: Sequence[RankTrace],
    sizes: Mapping[str, int],
) -> Iterator[Cause]:
    """Yield which sum of an activation, or of its gradient, is wrong, where the numbers tell it."""
    first = forward or backward
    assert first is not None, "something differs"
    ratio, exact = _multiple(_in_module(first.module, traces, backward=forward is None))
    if ratio is None:
        return
    axes = {axis: sizes[axis] for axis in SUMMED_AXES if sizes.get(axis, 1) > 1}
    if exact:
        what, over = _exact_multiple(ratio, axes, sizes)
        yield Cause(what, over, (), first.ranks, ratio)
    # Outputs of different tokens may be similar by chance, so an inexact factor tells something of gradients
    # only: devices that share a sequence add up the gradients of the same token.
    elif not forward and (over := _summand_axes(ratio, axes)):
        yield Cause(f"{MISSING} {over}", over, (), first.ranks, ratio)


def _in_module(module: str, traces: Iterable[RankTrace], backward: bool) -> list[ModuleDifference]:
    """Return the differences that are in the output of this module, or in the gradient of its output."""
    differences = (trace.backward if backward else trace.forward for trace in traces)
    return [difference for difference in differences if difference and difference.module == module]


def _exact_multiple(
    ratio: float, axes: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[str, str | None]:
    """Return what made an activation an exact multiple of the reference, and over which axis if one fits."""
    twice = [axis for axis, size in axes.items() if math.isclose(ratio, size, rel_tol=EXACT)]
    over = " or ".join(twice or _divided_by(ratio, axes, sizes))
    if not over:
        return f"scaled by {ratio:.6g}", None
    return f"{TWICE if twice else AVERAGED} {over}", over


def _summand_axes(ratio: float, axes: Mapping[str, int]) -> str:
    """Return the axes over which a gradient that is `ratio` times the reference may be a single summand."""
    sharing = [axis for axis in reversed(SEQUENCE_AXES) if axis in axes]
    return " or ".join(axis for axis in sharing if abs(ratio * axes[axis] - 1) < ROUGHLY)


def _divided_by(ratio: float, axes: Mapping[str, int], sizes: Mapping[str, int]) -> list[str]:
    """Return what the reference was divided by: the axes of that size, or the number of micro-batches, if
    any."""
    numbers = {MICRO_BATCHES: sizes.get(MICRO_BATCHES, 1), **axes}
    return [
        name for name, size in numbers.items() if size > 1 and math.isclose(ratio, 1 / size, rel_tol=EXACT)
    ]


def _multiple(compared: Sequence[SliceComparison | ModuleDifference]) -> tuple[float | None, bool]:
    """Return the factor between the reference and the actual values (least squares), and whether that factor
    explains the whole difference."""
    reference, product = sum(part.reference for part in compared), sum(part.product for part in compared)
    if not reference > 0 or not math.isfinite(product):
        return None, False
    ratio = product / reference
    # The sum of squares that is left after ratio times the reference is subtracted.
    rest = sum(part.actual for part in compared) - ratio * product
    return ratio, abs(rest) <= EXACT**2 * max(reference, product * ratio)


def _as_one_fault(causes: Sequence[Cause], reports: Sequence[RankReport]) -> Iterator[Cause]:
    """Yield the causes, with an unexplained one replaced where it belongs to a fault that is known.

    A slice may be too unlike the other summands to be recognised by itself, for example the weight of a
    router. If exactly one sum is missing for other parameters on the same ranks, and this parameter takes
    part in that sum too, then it has the same fault.
    """
    missing = _missing_sums(causes)
    ranks = {cause.ranks for cause in causes if cause.axis in missing}
    for cause in causes:
        unexplained = cause.what == UNEXPLAINED and cause.ranks in ranks
        if unexplained and len(missing) == 1 and missing.keys() <= _summed_axes(cause, reports):
            ((axis, what),) = missing.items()
            cause = replace(cause, what=what, axis=axis)
        yield cause


def _missing_sums(causes: Iterable[Cause]) -> dict[str, str]:
    """Return, by axis, the causes that are a missing sum over that axis, in words."""
    return {cause.axis: cause.what for cause in causes if cause.axis and cause.what.startswith(MISSING)}


def _summed_axes(cause: Cause, reports: Sequence[RankReport]) -> set[str]:
    """Return all axes over which the gradients of the cause's parameters are summed."""
    reductions = [report.reductions.get(name, {}) for report in reports for name in cause.parameters]
    return {axis for axes in reductions for axis in axes}


def _joined(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield one cause for all parameters that have the same fault on the same ranks."""
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
    """The gradient of one parameter on all ranks that hold a slice of it."""

    def __init__(self, error: QuantityError, reports: Sequence[RankReport]) -> None:
        key = (error.parameter, error.quantity, error.step)
        parts = [(report.rank, part) for report in reports for part in report.slices if part.key == key]
        # One rank may hold both copies of a tied weight. The copy with the larger error replaces the other.
        self.slices: dict[int, SliceComparison] = dict(sorted(parts, key=lambda pair: pair[1].difference))
        self.coordinates = {report.rank: report.coordinates for report in reports}
        self.reductions: dict[str, int] = {}
        for report in reports:
            self.reductions.update(report.reductions.get(error.parameter, {}))
        self.bad = [rank for rank in error.ranks if rank in self.slices]

    def ratio(self) -> tuple[float | None, bool]:
        """Return the factor between the reference and the values of the wrong ranks, and whether that factor
        explains the whole difference."""
        return _multiple([self.slices[rank] for rank in self.bad])

    def unequal_axes(self) -> set[str]:
        """Return the axes along which two ranks hold the same slice with different values."""
        pairs = [
            (a, b)
            for a in self.slices
            for b in self.slices
            if a < b and self._differ(self.slices[a], self.slices[b])
        ]
        return _fewest_axes([_axes_between(self.coordinates[a], self.coordinates[b]) for a, b in pairs])

    def _differ(self, a: SliceComparison, b: SliceComparison) -> bool:
        return a.box == b.box and abs(a.product - b.product) > 1e-9 * max(a.reference, abs(a.product), 1e-300)


def _axes_between(first: Mapping[str, int], second: Mapping[str, int]) -> list[str]:
    """Return the axes on which the coordinates of two ranks differ."""
    return [axis for axis in first if first[axis] != second[axis] and axis != "expert"]


def _fewest_axes(between: Sequence[list[str]]) -> set[str]:
    """Return all axes of the pairs of ranks that differ on the fewest axes."""
    fewest = min(map(len, between), default=0)
    return {axis for axes in between for axis in axes if len(axes) == fewest}


def _cause(
    error: QuantityError, copies: _GradientCopies, summed: Sequence[str], sizes: Mapping[str, int]
) -> Cause:
    """Return the probable cause of the wrong gradient of one parameter.

    The copies of its gradient add up to the reference over the axes `summed`.
    """
    ratio, exact = copies.ratio()
    axis: str | None
    if ratio is not None and exact:
        what, axis = _exact_fault(ratio, copies.reductions, summed, sizes)
    elif summed:
        what, axis = MISSING, summed[0]
    else:
        axis = _axis_of_summand(ratio, copies)
        what = MISSING if axis else UNEXPLAINED
    return Cause(f"{what} {axis}" if axis else what, axis, (error.parameter,), error.ranks, ratio)


def _exact_fault(
    ratio: float, reductions: Mapping[str, int], summed: Sequence[str], sizes: Mapping[str, int]
) -> tuple[str, str | None]:
    """Return what made a gradient an exact multiple of the reference, and over which axis if one fits."""
    # Averages are checked first, because they add up to the reference too.
    if averaged := _divided_by(ratio, reductions, sizes):
        return AVERAGED, " or ".join(averaged)
    if summed:
        return MISSING, summed[0]
    twice = [axis for axis, size in reductions.items() if math.isclose(ratio, size, rel_tol=EXACT)]
    return (TWICE, twice[0]) if twice else (f"scaled by {ratio:.6g}", None)


def _axis_of_summand(ratio: float | None, copies: _GradientCopies) -> str | None:
    """Return the axis over which a gradient seems to be a single summand: copies differ along it, or have
    about the size of one summand."""
    unequal = copies.unequal_axes()
    for axis in copies.reductions:
        if unequal & _members(axis):
            return axis
    if ratio is not None:
        for axis, size in copies.reductions.items():
            if abs(ratio * size - 1) < ROUGHLY:
                return axis
    return None


def _members(axis: str) -> set[str]:
    """Return the axes that take part in a sum.

    Devices that hold the same experts differ on any of the axes that the experts take their devices from.
    """
    parts = set(axis.split(" x "))
    return parts | {"data", "context", "tensor"} if "expert_data" in parts else parts


def _late_causes(verdict: Verdict, first: int, reports: Sequence[RankReport]) -> Iterator[Cause]:
    """Yield the causes where all gradients of the first failing step agree.

    Weights, buffers and the held-out loss are compared once, after the last step.
    """
    if numbers := _failing_in(first, verdict, "loss") or _failing_in(first, verdict, "gradient norm"):
        yield _number_cause(numbers[0], reports)
    elif loads := _failing_in(first, verdict, LOAD):
        yield from _joined(_sum_cause(error, reports) for error in loads)
    else:
        yield from _causes_at_the_end(verdict, reports)


def _number_cause(error: QuantityError, reports: Sequence[RankReport]) -> Cause:
    """Return the cause for a wrong loss or gradient norm where all gradients agree."""
    axes = _axes_of(error.ranks, reports)
    what = f"gradients agree, but not the {error.quantity}"
    return Cause(f"{what}: {MISSING} {axes}" if axes else what, axes, (), error.ranks, None)


def _causes_at_the_end(verdict: Verdict, reports: Sequence[RankReport]) -> Iterator[Cause]:
    """Yield the causes where only weights, buffers or the held-out loss differ."""
    if all(error.quantity == HELD_OUT for error in verdict.failing()):
        yield from (_sum_cause(error, reports) for error in verdict.failing())
    if weights := verdict.failing("weight"):
        names = tuple(error.parameter for error in weights)
        ranks = {rank for error in weights for rank in error.ranks}
        yield Cause(UPDATE, None, names, tuple(sorted(ranks)), None)
    for error in verdict.failing("buffer"):
        yield Cause("a buffer differs", None, (error.parameter,), error.ranks, None)


def _sum_cause(error: QuantityError, reports: Sequence[RankReport]) -> Cause:
    """Return the cause for a number that should be equal on every rank.

    Ranks with a different number miss a sum along the axis between them and the others.
    """
    axis = " or ".join(sorted(_GradientCopies(error, reports).unequal_axes())) or None
    what = f"the {error.quantity}: {MISSING} {axis}"
    if axis is None:
        what = f"all else agrees, but not the {error.quantity}"
    return Cause(what, axis, (error.parameter,) if error.parameter else (), error.ranks, None)


def _axes_of(bad: Sequence[int], reports: Sequence[RankReport]) -> str | None:
    """Return the axes along which correct and wrong ranks are neighbours."""
    coordinates = {report.rank: report.coordinates for report in reports}
    good = [rank for rank in coordinates if rank not in bad]
    between = [_axes_between(coordinates[a], coordinates[b]) for a in bad for b in good]
    return " or ".join(sorted(_fewest_axes(between))) or None
