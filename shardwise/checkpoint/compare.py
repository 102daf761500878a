"""Compare two checkpoints tensor by tensor, to the bit, whatever layouts wrote them.

Whole tensors are compared (checkpoint/tensor_files.py), so checkpoints of the same state from two layouts are
equal although none of their files are. One tensor of each is in memory at a time. Equal means the same bits:
a NaN equals the same NaN, 0.0 is not -0.0.

The state of random generators belongs to ranks, so it is compared only between equal numbers of ranks. A
checkpoint that holds only weights (an import) is compared by its weights, and the files of a Hugging Face
folder only with such files. The result names what was left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.checkpoint.tensor_files import Contents
from shardwise.plurals import counted

COMPARED_KEYS = ("step", "model", "train", "data", "layout", "loss_scale", "world", "torch")
CHUNK = 1 << 22
"""Number of elements that are compared at once, so that their copies in float64 stay small."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    tensor: str
    max_abs: float | None
    """Largest absolute difference of two elements; None where dtype or shape differ."""
    numbers: int
    """Number of elements whose bits differ."""
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The differences between a first and a second checkpoint."""

    facts: dict[str, tuple[object, object]]
    """Entries of the manifests that differ."""
    only_first: list[str]
    only_second: list[str]
    left_out: dict[str, str]
    """Kinds of tensors that were not compared, and why."""
    compared: int
    differences: list[TensorDifference]

    @property
    def equal(self) -> bool:
        """Whether all tensors that were compared have the same bits. The manifests may differ."""
        return not (self.only_first or self.only_second or self.differences)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object that the command prints."""
        return {"equal": self.equal, **asdict(self)}


def compare(
    first: Contents, second: Contents, progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Compare all tensors. `progress` is called with the number of tensors that are done, and of all."""
    left_out = _left_out(first, second)
    both, only_first = _split_keys(first, second, left_out)
    _, only_second = _split_keys(second, first, left_out)
    differences = []
    for done, key in enumerate(both):
        progress(done, len(both))
        differences += _difference(key, first, second)
    return Comparison(
        facts=dict(_manifest_differences(first, second)),
        only_first=list(map(str, only_first)),
        only_second=list(map(str, only_second)),
        left_out=left_out,
        compared=len(both),
        differences=sorted(differences, key=_rank),
    )


def _split_keys(
    contents: Contents, other: Contents, left_out: dict[str, str]
) -> tuple[list[StateKey], list[StateKey]]:
    """Return the keys that both checkpoints have, and those that only the first has."""
    keys = [key for key in contents.tensors if key.section not in left_out]
    return [key for key in keys if key in other.tensors], [key for key in keys if key not in other.tensors]


def _rank(difference: TensorDifference) -> tuple[bool, float]:
    """Return a sort key that puts weights first, and large differences before small ones; NaN and other
    shapes count as the largest."""
    gap = difference.max_abs
    is_weight = StateKey.parse(difference.tensor).is_model
    return not is_weight, -gap if gap is not None and gap == gap else -math.inf


def _left_out(first: Contents, second: Contents) -> dict[str, str]:
    reasons = {}
    sections = [{key.section for key in contents.tensors} for contents in (first, second)]
    if StateKind.FILE.section in sections[0] ^ sections[1]:
        reasons[StateKind.FILE.section] = "one of the two keeps no files of a Hugging Face folder"
    states = [words - {StateKind.FILE.section} for words in sections]
    if {StateKind.MODEL.section} in states:
        reasons |= dict.fromkeys(sorted(states[0] ^ states[1]), "one of the two holds weights alone")
    if first.manifest.world != second.manifest.world:
        reasons[StateKind.RANDOM.section] = "written " + " and ".join(
            f"by {counted(contents.manifest.world, 'process')}" for contents in (first, second)
        )
    return reasons


def _manifest_differences(first: Contents, second: Contents) -> Iterator[tuple[str, tuple[object, object]]]:
    for key in COMPARED_KEYS:
        left, right = getattr(first.manifest, key), getattr(second.manifest, key)
        if not isinstance(left, dict):
            pairs = {key: (left, right)}
        elif not left or not right:  # the manifest of an import has no settings of a run
            pairs = {}
        else:
            names = dict.fromkeys((*left, *right))
            pairs = {f"{key}.{name}": (left.get(name), right.get(name)) for name in names}
        yield from ((name, pair) for name, pair in pairs.items() if pair[0] != pair[1])


def _difference(key: StateKey, first: Contents, second: Contents) -> list[TensorDifference]:
    """Return an empty list where the tensors are equal, else a list of one."""
    name, left, right = str(key), first.tensors[key], second.tensors[key]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        reason = f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
        return [TensorDifference(name, None, 0, reason)]
    largest, numbers = distance(first.read(key), second.read(key))
    reason = f"{numbers:,} of {math.prod(left.shape):,} numbers"
    return [TensorDifference(name, largest, numbers, reason)] if numbers else []


def distance(left: Tensor, right: Tensor) -> tuple[float, int]:
    """Return the largest absolute difference, and the number of elements whose bits differ."""
    largest, numbers = 0.0, 0
    left, right = left.reshape(-1), right.reshape(-1)
    for begin in range(0, len(left), CHUNK):
        a, b = left[begin : begin + CHUNK], right[begin : begin + CHUNK]
        unlike = (a.view(torch.uint8) != b.view(torch.uint8)).view(len(a), -1).any(1)
        if unlike.any():
            numbers += int(unlike.sum())
            gap = float((a[unlike].double() - b[unlike].double()).abs().max())
            largest = gap if gap != gap or gap > largest else largest
    return largest, numbers
