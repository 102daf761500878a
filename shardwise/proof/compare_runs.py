"""Compare two runs of the same job: the loss of every step, the data of every step, and the final weights.

On one layout all sums are taken in the same order, so losses, gradient norms, weights and optimizer state
must be equal to the bit. A run that continued with fewer workers for a while added the same numbers in
another order. From then on it differs by rounding errors, which training carries on. There losses must agree
to `TOLERANCE`, and each weight to `WEIGHT_FACTOR` times as much: AdamW divides a gradient by its own
magnitude, so where a gradient is near zero, its rounding error is as large as the gradient.

Data has no rounding. Each step has a checksum of the sequences it read (data/batches.py), whichever rank read
them. A checksum that occurs more often than in the undisturbed run means that data was repeated; one that
occurs less often means that data was skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint import checkpoints
from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.config import Precision
from shardwise.observe import read_metrics
from shardwise.observe.records import Record
from shardwise.plurals import listed

if TYPE_CHECKING:
    from shardwise.checkpoint.tensor_files import Contents

TOLERANCE: dict[Precision, float] = {"float64": 1e-9, "float16": 5e-3, "bfloat16": 5e-2, "float8": 5e-2}
"""Largest relative difference of a loss that is allowed after the layout changed. A float32 job is not in
this table, because drill.py runs it in float64 when the layout changes."""
WEIGHT_FACTOR = 10.0

Records = Sequence[Record]


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing two runs: which steps and which tensors differ."""

    steps: int
    tolerance: float | None
    """Largest relative difference of a loss that is allowed; None means that all bits must be equal."""
    missing: list[int]
    doubled: list[int]
    losses: list[int]
    """Steps whose loss differs; where all bits must be equal, also steps whose gradient norm differs."""
    worst_loss: float
    data_repeated: list[int]
    data_skipped: list[int]
    data_differs: list[int]
    """Steps that read other data than they should, where that data was neither repeated nor skipped."""
    weights: dict[str, float]
    """Names of the tensors that differ, each with the norm of the difference over the norm of the undisturbed
    tensor."""
    worst_weight: float
    tensors: int

    @property
    def loss_equal(self) -> bool:
        """Whether every step was recorded exactly once, with the same loss."""
        return not (self.missing or self.doubled or self.losses)

    @property
    def weights_equal(self) -> bool:
        """Whether all compared tensors of the last checkpoint are the same."""
        return not self.weights

    @property
    def equal(self) -> bool:
        """Whether losses, data and weights of the two runs are the same."""
        return (
            self.loss_equal
            and self.weights_equal
            and not (self.data_repeated or self.data_skipped or self.data_differs)
        )

    def sentences(self) -> list[str]:
        """Return one sentence for each kind of difference."""
        differences = {
            "steps that are missing in the records": self.missing,
            "steps that are twice in the records": self.doubled,
            "steps whose loss differs": self.losses,
            "steps that read data of another step again": self.data_repeated,
            "steps whose data was never read": self.data_skipped,
            "steps that read something else": self.data_differs,
        }
        lines = [f"{what}: {listed(which)}" for what, which in differences.items() if which]
        names = [f"{name} (relative {gap:.2g})" for name, gap in self.weights.items()]
        return [*lines, *([f"tensors that differ at the end: {listed(names)}"] if names else [])]


def compare_runs(undisturbed: Path, drilled: Path, steps: int, tolerance: float | None) -> RunComparison:
    """Compare two run folders of the same job. All bits must be equal, unless a relative tolerance for losses
    is given."""
    first, second = (
        list(read_metrics(folder, needs=("loss", "gradient_norm", "data")))
        for folder in (undisturbed, drilled)
    )
    weights, worst_weight, tensors = _weights(undisturbed, drilled, tolerance)
    numbers = Counter(record["step"] for record in second)
    losses, worst_loss = _losses(first, second, tolerance)
    repeated, skipped, differs = compare_data(first, second)
    return RunComparison(
        steps=steps,
        tolerance=tolerance,
        missing=[step for step in range(1, steps + 1) if not numbers[step]],
        doubled=sorted(step for step, times in numbers.items() if times > 1 or step > steps),
        losses=losses,
        worst_loss=worst_loss,
        data_repeated=repeated,
        data_skipped=skipped,
        data_differs=differs,
        weights=weights,
        worst_weight=worst_weight,
        tensors=tensors,
    )


def _losses(first: Records, second: Records, tolerance: float | None) -> tuple[list[int], float]:
    """Return the steps that differ, and the largest relative difference of a loss."""
    truth = {record["step"]: record for record in first}
    differing, worst = set(), 0.0
    for record in second:
        expected = truth.get(record["step"])
        if expected is None:
            continue
        gap = _relative(expected["loss"], record["loss"])
        worst = max(worst, gap)
        keys = ("loss", "gradient_norm") if tolerance is None else ()
        same_bits = all(float.hex(float(record[key])) == float.hex(float(expected[key])) for key in keys)
        if not same_bits or gap > (tolerance or 0.0):
            differing.add(record["step"])
    return sorted(differing), worst


def _relative(expected: float, actual: float) -> float:
    if float.hex(float(expected)) == float.hex(float(actual)):
        return 0.0
    gap = abs(actual - expected) / max(abs(expected), 1e-300)
    return gap if gap == gap else float("inf")


def compare_data(first: Records, second: Records) -> tuple[list[int], list[int], list[int]]:
    """Return the steps of the second run that repeat data, the steps of the first run whose data the second
    run never read, and the steps of the second run that read other data."""
    truth, data = _data_by_step(first), _data_by_step(second)
    expected, actual = Counter(truth.values()), Counter(record["data"] for record in second)
    wrong = [record["step"] for record in second if truth.get(record["step"]) != record["data"]]
    again = {step for step in wrong if actual[data[step]] > expected[data[step]] > 0}
    repeated = sorted(again | _recorded_twice(second))
    skipped = sorted(
        step for step, value in truth.items() if actual[value] < expected[value] and data.get(step) != value
    )
    return repeated, skipped, sorted(set(wrong) - set(repeated))


def _data_by_step(records: Records) -> dict[int, str]:
    """Return the checksum of the sequences of each step."""
    return {record["step"]: record["data"] for record in records}


def _recorded_twice(records: Records) -> set[int]:
    """Return the steps that are in the records more than once."""
    return {step for step, times in Counter(record["step"] for record in records).items() if times > 1}


def _weights(
    undisturbed: Path, drilled: Path, tolerance: float | None
) -> tuple[dict[str, float], float, int]:
    """Return the tensors that differ, the largest relative difference of a weight, and the number of tensors
    that were compared."""
    from shardwise.checkpoint.tensor_files import Contents

    folders = [checkpoints(folder / "checkpoints")[-1:] for folder in (undisturbed, drilled)]
    if not all(folders):
        return {"the last checkpoint (missing)": float("inf")}, float("inf"), 0
    expected, actual = (Contents.open(folder[0]) for folder in folders)
    return _compare_tensors(expected, actual, tolerance)


def _compare_tensors(
    expected: Contents, actual: Contents, tolerance: float | None
) -> tuple[dict[str, float], float, int]:
    """Return what `_weights` returns, for these two checkpoints."""
    keys = _compared_keys(expected, actual, bits=tolerance is None)
    if expected.manifest.step != actual.manifest.step:
        return {f"the last checkpoint (step {actual.manifest.step})": float("inf")}, float("inf"), len(keys)
    gaps = {key: _gap(expected, actual, key) for key in keys}
    worst = max(gap for key, gap in gaps.items() if key.is_model)
    allowed = 0.0 if tolerance is None else tolerance * WEIGHT_FACTOR
    return {str(key): gap for key, gap in gaps.items() if gap > allowed}, worst, len(keys)


def _compared_keys(expected: Contents, actual: Contents, bits: bool) -> list[StateKey]:
    """Return the weights and buffers of both checkpoints, and where all bits must be equal, also the state of
    the optimizer. Those of single groups of workers are left out."""
    kinds = (StateKind.MODEL, StateKind.OPTIMIZER) if bits else (StateKind.MODEL,)
    everything = sorted({*expected.tensors, *actual.tensors}, key=str)
    return [key for key in everything if key.kind in kinds and key.group is None]


def _gap(expected_in: Contents, actual_in: Contents, key: StateKey) -> float:
    """Return the norm of the difference over the norm of the expected tensor.

    The result is 0 only if all bits are equal, and infinite if the tensor is missing in one of the
    checkpoints.
    """
    import torch

    if key not in expected_in.tensors or key not in actual_in.tensors:
        return float("inf")
    left, right = expected_in.tensors[key], actual_in.tensors[key]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return float("inf")
    expected, actual = expected_in.read(key).reshape(-1), actual_in.read(key).reshape(-1)
    if torch.equal(expected.view(torch.uint8), actual.view(torch.uint8)):
        return 0.0
    gap = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))
    if gap != gap:
        return float("inf")
    return gap or 5e-324  # the smallest number above 0: the bits differ
