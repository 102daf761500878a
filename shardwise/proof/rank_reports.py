"""What the workers of a proof return: plain numbers, so that the code that judges them does not need
torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.files import Json

Box = tuple[tuple[int, int], ...]
"""A slice of a tensor: its begin and end in each dim."""
Key = tuple[str, str, int]
"""(parameter, quantity, step). The quantity is "gradient", "weight" or "buffer"; for a mixture of experts
"load"; and with an empty parameter name "loss", "gradient norm", "expert imbalance" or "held-out loss"."""
ShortSum = tuple[str, str]
"""A sum in 16 bits: the operator, and the function that called it. The function is "autograd" where autograd
adds several gradients of one tensor."""
HELD_OUT, LOAD = "held-out loss", "load"


@dataclass(frozen=True)
class SliceComparison:
    """One rank's slice of one quantity compared with the reference, as sums over the elements of the
    slice."""

    key: Key
    box: Box
    difference: float
    """Sum of the squares of (actual - reference)."""
    reference: float
    """Sum of the squares of the reference."""
    actual: float
    """Sum of the squares of the rank's values."""
    product: float
    """Sum of the products of the rank's values and the reference."""


@dataclass(frozen=True)
class RankReport:
    """The comparison of one rank with the reference."""

    rank: int
    coordinates: dict[str, int]
    """Coordinates of the rank on every axis."""
    slices: list[SliceComparison]
    losses: list[float]
    missing: list[str]
    """Names of the parameters that received no gradient."""
    reductions: dict[str, dict[str, int]]
    """For each parameter, the names and sizes of the axes over which its gradient is summed."""
    sabotaged: Json | None = None
    frozen: dict[str, bool] = field(default_factory=dict)
    """For each parameter that is not trained, whether this rank's slice equals that of one device to the
    bit."""
    data: list[str] = field(default_factory=list)
    """For each step, the checksum of the sequences that all ranks read."""


@dataclass(frozen=True)
class Reference:
    """What one device computed, as the reference for every rank. The tensors are in a file."""

    losses: list[float]
    norms: list[float]
    shapes: dict[str, tuple[int, ...]]
    """Shape of every parameter by its name."""
    buffers: dict[str, tuple[int, ...]]
    squares: dict[Key, float]
    """Sum of the squares of every quantity."""
    learning_rate: float
    data: list[str] = field(default_factory=list)
    """For each step, the checksum of the sequences that one device read."""
    numbers: dict[Key, float] = field(default_factory=dict)
    """Quantities that belong to no parameter."""
    idle_experts: dict[str, list[int]] = field(default_factory=dict)
    """For each mixture of experts, the experts that no token chose in any step."""


@dataclass(frozen=True)
class CompressedReport:
    """What one rank measured in the first step with compressed gradients or weights."""

    rank: int
    lost: float | None
    """Largest difference between one device's gradient and the sum of what all devices received and keep,
    relative to the largest element of the parameter. None if the codec keeps nothing."""
    off: float
    """Sum of the squares of the difference between this rank's gradient and one device's gradient."""
    size: float
    """Sum of the squares of one device's gradient."""
    checksums: dict[str, int]
    """Checksum of each gradient, by parameter and slice."""
    weights: dict[str, list[int]] = field(default_factory=dict)
    """Checksums of the gathered weights that this rank computed with, by parameter and slice: one for each
    version that it used in forward or backward. Empty where weights are not compressed."""


@dataclass(frozen=True)
class ModuleDifference:
    """A module whose output, or the gradient of whose output, differs from the reference on one rank."""

    module: str
    position: int
    """Position among all modules, in the order in which one device finishes them."""
    error: float
    micro_batch: int
    """The first micro-batch in which the module differs."""
    reference: float = 0.0
    """Sum of the squares of the reference over all compared elements of all micro-batches."""
    actual: float = 0.0
    """Sum of the squares of the rank's values."""
    product: float = 0.0
    """Sum of the products of the rank's values and the reference."""
    called: bool = True
    """False if one device calls the module and this rank holds it but does not call it."""


@dataclass(frozen=True)
class RankTrace:
    """Where one rank first differs from the reference in the traced step, module by module."""

    rank: int
    forward: ModuleDifference | None
    """The first module whose output differs."""
    backward: ModuleDifference | None
    """The last module whose output has a different gradient, which is the first in the order of the backward
    pass."""
    summed: dict[str, list[str]]
    """For parameters with a wrong gradient, the axes over which the copies add up to the reference."""
    step: int = 1
    before: list[str] = field(default_factory=list)
    """Names of the weights and buffers that differ before the step begins."""
    left_over: list[str] = field(default_factory=list)
    """Parameters whose gradient is the reference plus a multiple of the previous step's reference."""
