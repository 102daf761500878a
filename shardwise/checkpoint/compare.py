"""Two checkpoints compared tensor by tensor, to the bit, whoever wrote them and on whatever layout.

Tensors are put together whole (checkpoint/tensor_files.py), so two layouts' checkpoints of the same state are
equal although no file of theirs is. One tensor of each is in memory at a time. Equal means the same bits: a
NaN equals the same NaN, 0.0 is not -0.0.

The state of random generators belongs to ranks; between different numbers of ranks it cannot be compared. A
checkpoint that holds weights alone (an import) is compared by its weights, and files kept from a Hugging Face
folder with others of their kind. All this is said, not passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.checkpoint.tensor_files import Contents
from shardwise.plurals import counted

COMPARED_KEYS = ("step", "model", "train", "data", "layout", "loss_scale", "world", "torch")
CHUNK = 1 << 22
"""Numbers compared at once: their copies in float64 stay small."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both."""

    tensor: str
    max_abs: float | None
    """Largest difference of two numbers; None where dtype or shape differ."""
    numbers: int
    """How many of its numbers have other bits."""
    reason: str


@dataclass(frozen=True)
class Comparison:
    """What differs between a first and a second checkpoint."""

    facts: dict[str, tuple[Any, Any]]
    only_first: list[str]
    only_second: list[str]
    left_out: dict[str, str]
    """Kinds of tensors that were not compared, and why."""
    compared: int
    differences: list[TensorDifference]

    @property
    def equal(self) -> bool:
        """Whether all tensors that were compared have the same bits. What the manifests say may differ."""
        return not (self.only_first or self.only_second or self.differences)

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return {"equal": self.equal, **asdict(self)}


def compare(
    first: Contents, second: Contents, progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Compare all tensors; `progress` is told how many are done, of how many."""
    left_out = _left_out(first, second)
    keys_first, keys_second = (
        [key for key in contents.tensors if key.section not in left_out] for contents in (first, second)
    )
    both = [key for key in keys_first if key in second.tensors]
    differences = []
    for done, key in enumerate(both):
        progress(done, len(both))
        differences += _difference(key, first, second)
    return Comparison(
        facts=dict(_manifest_differences(first, second)),
        only_first=[str(key) for key in keys_first if key not in second.tensors],
        only_second=[str(key) for key in keys_second if key not in first.tensors],
        left_out=left_out,
        compared=len(both),
        differences=sorted(differences, key=_rank),
    )


def _rank(difference: TensorDifference) -> tuple[bool, float]:
    """Weights first, and among them what is furthest apart; NaN and other shapes are further than any
    number."""
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
            f"by {counted(one.manifest.world, 'process')}" for one in (first, second)
        )
    return reasons


def _manifest_differences(first: Contents, second: Contents) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in COMPARED_KEYS:
        left, right = getattr(first.manifest, key), getattr(second.manifest, key)
        if not isinstance(left, dict):
            pairs = {key: (left, right)}
        elif not left or not right:  # an import knows of no run
            pairs = {}
        else:
            pairs = {
                f"{key}.{name}": (left.get(name), right.get(name)) for name in dict.fromkeys((*left, *right))
            }
        yield from ((name, pair) for name, pair in pairs.items() if pair[0] != pair[1])


def _difference(key: StateKey, first: Contents, second: Contents) -> list[TensorDifference]:
    """Return an empty list where the tensors are equal, else a list of one."""
    name, left, right = str(key), first.tensors[key], second.tensors[key]
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return [
            TensorDifference(
                name, None, 0, f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
            )
        ]
    largest, numbers = distance(first.read(key), second.read(key))
    return (
        [TensorDifference(name, largest, numbers, f"{numbers:,} of {math.prod(left.shape):,} numbers")]
        if numbers
        else []
    )


def distance(left: Tensor, right: Tensor) -> tuple[float, int]:
    """The largest absolute difference, and how many numbers have other bits."""
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
