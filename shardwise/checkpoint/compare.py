"""Two checkpoints compared tensor by tensor, to the bit, whoever wrote them and on whatever layout.

Tensors are put together whole (checkpoint/contents.py), so two layouts' checkpoints of the same state are equal although no file
of theirs is. One tensor of each is in memory at a time. Equal means the same bits: a NaN equals the same NaN, 0.0 is not -0.0.

The state of random generators belongs to ranks; between different numbers of ranks it cannot be compared. A checkpoint that
holds weights alone (an import) is compared by its weights. Both are said, not passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.contents import Contents

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


def compare(first: Contents, second: Contents, progress: Callable[[int, int], None] = lambda done, total: None) -> Comparison:
    """Compare all tensors; `progress` is told how many are done, of how many."""
    left_out = _left_out(first, second)
    one, other = ([name for name in held.tensors if name.partition(".")[0] not in left_out] for held in (first, second))
    both = [name for name in one if name in second.tensors]
    differences = []
    for done, name in enumerate(both):
        progress(done, len(both))
        differences += _difference(name, first, second)
    return Comparison(
        facts=dict(_manifest_differences(first, second)),
        only_first=[name for name in one if name not in second.tensors],
        only_second=[name for name in other if name not in first.tensors],
        left_out=left_out,
        compared=len(both),
        differences=sorted(differences, key=_rank),
    )


def _rank(difference: TensorDifference) -> tuple[bool, float]:
    """Weights first, and among them what is furthest apart; NaN and other shapes are further than any number."""
    gap = difference.max_abs
    return not difference.tensor.startswith("model."), -gap if gap is not None and gap == gap else -math.inf


def _left_out(first: Contents, second: Contents) -> dict[str, str]:
    found = {}
    kinds = [{name.partition(".")[0] for name in held.tensors} for held in (first, second)]
    if {"model"} in kinds:
        found = dict.fromkeys(sorted(kinds[0] ^ kinds[1]), "one of the two holds weights alone")
    if first.manifest.world != second.manifest.world:
        found["random"] = f"written by {first.manifest.world} and by {second.manifest.world} processes"
    return found


def _manifest_differences(first: Contents, second: Contents) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in COMPARED_KEYS:
        one, other = getattr(first.manifest, key), getattr(second.manifest, key)
        if not isinstance(one, dict):
            pairs = {key: (one, other)}
        elif not one or not other:  # an import knows of no run
            pairs = {}
        else:
            pairs = {f"{key}.{name}": (one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other))}
        yield from ((name, pair) for name, pair in pairs.items() if pair[0] != pair[1])


def _difference(name: str, first: Contents, second: Contents) -> list[TensorDifference]:
    """None or one."""
    one, other = first.tensors[name], second.tensors[name]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return [TensorDifference(name, None, 0, f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")]
    largest, numbers = distance(first.read(name), second.read(name))
    return [TensorDifference(name, largest, numbers, f"{numbers:,} of {math.prod(one.shape):,} numbers")] if numbers else []


def distance(one: Tensor, other: Tensor) -> tuple[float, int]:
    """The largest absolute difference, and how many numbers have other bits."""
    largest, numbers = 0.0, 0
    one, other = one.reshape(-1), other.reshape(-1)
    for begin in range(0, len(one), CHUNK):
        a, b = one[begin : begin + CHUNK], other[begin : begin + CHUNK]
        unlike = (a.view(torch.uint8) != b.view(torch.uint8)).view(len(a), -1).any(1)
        if unlike.any():
            numbers += int(unlike.sum())
            gap = float((a[unlike].double() - b[unlike].double()).abs().max())
            largest = gap if gap != gap or gap > largest else largest
    return largest, numbers
