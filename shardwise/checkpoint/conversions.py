"""Convert our tensors to those of Hugging Face folders, and back, as config/family_tensors.py declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwise.config.family_tensors import TensorMatch

if TYPE_CHECKING:
    from torch import Tensor

_Convert = Callable[["list[Tensor]"], "list[Tensor]"]


def to_theirs(match: TensorMatch, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors of a Hugging Face folder from ours."""
    return _TO_THEIRS[match.conversion](tensors)


def to_ours(match: TensorMatch, tensors: list[Tensor]) -> list[Tensor]:
    """Return our tensors from those of a Hugging Face folder."""
    return _TO_OURS[match.conversion](tensors)


def _concatenated(tensors: list[Tensor], dim: int) -> Tensor:
    import torch

    return torch.cat(tensors, dim)


def _stacked(tensors: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(tensors)


_TO_THEIRS: dict[str, _Convert] = {
    "same": lambda tensors: tensors,
    "transposed": lambda tensors: [tensors[0].t()],
    "joined": lambda tensors: [_concatenated(tensors, 0).t()],
    "stacked": lambda tensors: list(tensors[0].unbind()),
    "paired": lambda tensors: [_concatenated(tensors, 1)],
}
_TO_OURS: dict[str, _Convert] = {
    "same": lambda tensors: tensors,
    "transposed": lambda tensors: [tensors[0].t()],
    "joined": lambda tensors: list(tensors[0].t().chunk(3)),
    "stacked": lambda tensors: [_stacked(tensors)],
    "paired": lambda tensors: list(tensors[0].chunk(2, 1)),
}
