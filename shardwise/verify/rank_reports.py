"""What the workers of a proof hand back: plain numbers, so that whoever judges them needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Box = tuple[tuple[int, int], ...]
"""A slice of a tensor: where it begins and ends in each dim."""
Key = tuple[str, str, int]
"""(parameter, quantity, step). Quantities are gradient, weight, buffer; of a mixture of experts, its load;
and with no parameter loss, gradient norm, expert imbalance and held-out loss."""
ShortSum = tuple[str, str]
"""A sum in 16 bits: the operator, and the function that called it; autograd: where gradients of one tensor
meet."""
HELD_OUT, LOAD = "held-out loss", "load"


@dataclass(frozen=True)
class SliceComparison:
    """One rank's slice of one quantity compared with the reference: sums over the elements of the slice."""

    key: Key
    box: Box
    difference: float
    """Of the squares of (own - reference)."""
    reference: float
    """Of the squares of the reference."""
    own: float
    """Of the squares of what the rank has."""
    product: float
    """Of own times reference."""


@dataclass(frozen=True)
class RankReport:
    """How one rank compares with the reference."""

    rank: int
    coordinates: dict[str, int]
    """On every axis."""
    slices: list[SliceComparison]
    losses: list[float]
    missing: list[str]
    """Parameters that got no gradient."""
    reductions: dict[str, dict[str, int]]
    """For each parameter the axes that its gradient is summed over, as people read them, and their sizes."""
    sabotaged: dict[str, Any] | None = None
    frozen: dict[str, bool] = field(default_factory=dict)
    """Of each parameter that is not trained, whether this rank's slice is, to the bit, what one device began
    and ended with."""
    data: list[str] = field(default_factory=list)
    """Of each step, the checksum of the sequences that all ranks read."""


@dataclass(frozen=True)
class Reference:
    """What one device computed, which every rank is compared with; the tensors are in a file."""

    losses: list[float]
    norms: list[float]
    shapes: dict[str, tuple[int, ...]]
    """Of every parameter."""
    buffers: dict[str, tuple[int, ...]]
    squares: dict[Key, float]
    """Sums of squares."""
    learning_rate: float
    data: list[str] = field(default_factory=list)
    """Of each step, the checksum of the sequences."""
    numbers: dict[Key, float] = field(default_factory=dict)
    """Quantities that belong to no parameter."""
    idle_experts: dict[str, list[int]] = field(default_factory=dict)
    """By layer, experts that no token chose in any step."""


@dataclass(frozen=True)
class CompressedReport:
    """What one rank saw of the first step with compressed gradients or weights."""

    rank: int
    lost: float | None
    """The most that a number of what all got and keep differs from one device's gradient, relative to the
    largest of its parameter; None: what is left out is not kept."""
    off: float
    """Sum of the squares of the difference between what this rank was given and one device's gradient,"""
    size: float
    """and of the latter."""
    checksums: dict[str, int]
    """Of the gradients, by parameter and slice."""
    weights: dict[str, list[int]] = field(default_factory=dict)
    """Checksums of the gathered weights that this rank computed with, by parameter and slice: one for each
    version that it had in forward or backward. Empty where weights are not compressed."""


@dataclass(frozen=True)
class ModuleDifference:
    """A module whose output, or the gradient of it, is not the reference's, on one rank."""

    module: str
    position: int
    """Among all modules, in the order in which one device finishes them."""
    error: float
    micro_batch: int
    """The first in which it differs."""
    reference: float = 0.0
    """Sums over the elements compared, in all micro-batches, as in a SliceComparison: of the squares of the
    reference,"""
    own: float = 0.0
    """of the squares of what the rank has,"""
    product: float = 0.0
    """and of one times the other."""
    called: bool = True
    """False: one device calls it, and this rank, which has it, does not."""


@dataclass(frozen=True)
class RankTrace:
    """Where one rank first departs from the reference in the step that was traced, module by module."""

    rank: int
    forward: ModuleDifference | None
    """The first module whose output differs."""
    backward: ModuleDifference | None
    """The first, from the end, whose output has another gradient."""
    summed: dict[str, list[str]]
    """For parameters whose gradient is off: the axes over which the copies, added up, give the reference."""
    step: int = 1
    before: list[str] = field(default_factory=list)
    """Weights and buffers that differ before that step begins."""
    left_over: list[str] = field(default_factory=list)
    """Parameters whose gradient is the reference and some of the reference of the step before."""
