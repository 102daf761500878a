"""Products in float8: both factors have 8 bits, sums are float32, the result has the computing dtype.

Products of experts are in models/float8_grouped.py.

    y  = x8 · w8ᵀ      x, w in e4m3 (3 bits of fraction, up to 448)
    dx = g8 · w8       g    in e5m2 (2 bits of fraction, up to 57,344)
    dw = g8ᵀ · x8

Every tensor is multiplied by a scale before it is cast, so that its largest number lies near the end of the
format's range, and the product is divided by the scales. Scales are powers of two: such a scale moves the
range and rounds nothing, so two devices with different scales still agree on all numbers that neither of them
loses below the range.

There are two kinds of scales:

- delayed: from the largest magnitudes of the last steps, over all devices and micro-batches, with room for
  growth. The scale is known before the tensor, so the kernel that computes the tensor can write the cast copy
  too; and it is the same on every layout. A tensor that outgrows its scale is noticed at the end of the step,
  before the update, and the step is repeated with scales that fit (train/steps.py). The first step of a run
  is repeated too: it only measures the magnitudes.
- dynamic: from this tensor on this device. That costs one more pass over each tensor.

Weights are known before the step, so the scale of a weight is that of the weight itself, over all devices
that hold a part of it. So sharded weights can be gathered in 8 bits (comm/weight_gathers.py), and casting
them again changes nothing.

Backward needs `x`, which is saved in 8 bits: half the memory of bfloat16. A GPU multiplies in float8 only
matrices that are contiguous along the summed dimension, so each tensor is transposed once. Where a size is
not a multiple of 16, on GPUs without float8 and on CPUs, the same 8-bit numbers are multiplied in the
computing dtype.

Observations of tensors (the largest magnitude, and the share of numbers below the range) are made in
backward. Eager code stores them directly. Compiled code must not write to anything, so there they are the
gradient of a `probe`, whose hook stores them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise._torch import AutogradContext, float8_mm
from shardwise.models.torch_dtypes import rounded_to, wide
from shardwise.models.unallocated import ExactBuffers
from shardwise.plans.float8_choice import MULTIPLE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
HEADROOM = {E4M3: 2.0, E5M2: 8.0}
"""Factor by which a tensor may exceed its largest magnitude so far before a step has to be repeated. e5m2 has
the larger range."""
HISTORY = 16
"""Number of steps whose largest magnitudes are remembered."""


class Settings(NamedTuple):
    """Arguments of a product beside its factors, as autograd functions take them: one after the other."""

    cached8: Tensor | None
    """The weights in 8 bits, if they are cached."""
    cached8_transposed: Tensor | None
    probe: Tensor | None
    """Tensor whose gradient is the observation, in compiled code."""
    input_scale: Tensor
    weight_scale: Tensor
    gradient_scale: Tensor
    dynamic: bool
    """Whether scales of inputs and gradients are taken from the tensors themselves."""
    plain: bool
    """Whether nothing is cast to 8 bits, so that the product has the dtype of its input."""
    note: Callable[[Tensor], None] | None
    """Function that stores an observation; None: the probe gets it."""


class Scale(ExactBuffers):
    """The scale of an input, a weight or a gradient."""

    value: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("value", torch.ones(()), persistent=False)


class DelayedScale(Scale):
    """A scale that follows from the largest magnitudes of earlier steps."""

    maxima: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.register_buffer("maxima", torch.zeros(HISTORY))


class ScaledProduct(nn.Module):
    """A product in float8, with its scales and the observations of its tensors. Subclasses compute it."""

    def __init__(self, source: DelayedScale | None, weights: tuple[str, ...]) -> None:
        super().__init__()
        self.input, self.weight, self.gradient = source or DelayedScale(E4M3), Scale(E4M3), DelayedScale(E5M2)
        self.weights = weights
        """Names of its weights in the module that holds the product; all have one scale."""
        self.dynamic = True
        """Whether scales of inputs and gradients are taken from the tensors themselves."""
        self.plain = False
        """Whether nothing is cast, because only the magnitudes are to be measured."""
        self.has_weight_alone = True
        """Whether nothing else uses the weight, so that it may be gathered in 8 bits."""
        self.cached_weights: tuple[Tensor, Tensor] | None = None
        """Its weights in 8 bits, joined, plain and transposed, where they are cast once for all micro-batches
        of a step."""
        self.observations: list[Tensor] = []
        """Observations of input and gradient, (2, 2), from each backward of this step."""
        self.probe = self._new_probe(torch.device("cpu"))

    def settings(self) -> Settings:
        """Return the arguments of the product beside its factors."""
        weight8, transposed8 = (None, None) if self.plain else self.cached_weights or (None, None)
        probe, note = (
            (self.probe, None) if torch.compiler.is_compiling() else (None, self.observations.append)
        )
        scales = self.input.value, self.weight.value, self.gradient.value
        return Settings(weight8, transposed8, probe, *scales, self.dynamic, self.plain, note)

    @torch.no_grad()
    def cache_weights(self, weights: Sequence[Tensor], dtype: torch.dtype, compiled: bool) -> None:
        """Cast the weights for all micro-batches to come; `dtype` is that of the values between products."""
        join = _compiled_join() if compiled else join_weights
        weight8 = join([weight.detach() for weight in weights], self.weight.value, dtype, E4M3)
        both = weight8, transposed(weight8)
        if self.cached_weights is None:  # new tensors: those of compiled code are marked as of dynamic size
            self.cached_weights = torch.empty_like(both[0]), torch.empty_like(both[1])
        for old, new in zip(self.cached_weights, both, strict=True):  # in place: compiled code refers to them
            old.copy_(new)

    def delayed(self) -> list[DelayedScale]:
        """Return the scales of input and gradient."""
        return [self.input, self.gradient]

    def move_probe(self, device: torch.device) -> None:
        """Make a new probe on the device where compiled code will run."""
        self.probe = self._new_probe(device)

    def _new_probe(self, device: torch.device) -> Tensor:
        probe = torch.zeros(2, 2, device=device, requires_grad=True)
        probe.register_hook(self.observations.append)
        return probe


class Float8Product(ScaledProduct):
    """The product `x · weightᵀ` in float8. Products of one input share the input's scale."""

    def __init__(self, source: DelayedScale | None = None) -> None:
        super().__init__(source, ("weight",))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return (..., outputs) from (..., inputs) and a weight (outputs, inputs)."""
        rows = x.flatten(0, -2)
        result: Tensor = _Product.apply(rows, weight, *self.settings())  # type: ignore[no-untyped-call]
        return result.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Rows (n, inputs) times weight (outputs, inputs) transposed."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        w8, w8t, _, input_scale, weight_scale, gradient_scale, dynamic, plain, note = Settings(*settings)
        x8, input_scale, seen = quantise(x, input_scale, E4M3, dynamic, plain)
        needed = weight if w8 is None else None
        if w8 is None:
            w8 = cast(weight.to(x.dtype), weight_scale, None if plain else E4M3)
        ctx.save_for_backward(x8, needed, w8t, input_scale, weight_scale, gradient_scale, seen)
        ctx.dynamic, ctx.plain, ctx.note = dynamic, plain, note
        ctx.dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return multiply(x8, w8.t(), input_scale, weight_scale, x.dtype)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, weight, w8t, input_scale, weight_scale, gradient_scale, seen = ctx.saved_tensors
        g8, gradient_scale, gradient_seen = quantise(gradient, gradient_scale, E5M2, ctx.dynamic, ctx.plain)
        if w8t is None:
            w8t = transposed(cast(weight.to(ctx.dtype), weight_scale, None if ctx.plain else E4M3))
        x_gradient = multiply(g8, w8t.t(), gradient_scale, weight_scale, ctx.dtype)
        weight_gradient = multiply(transposed(g8), transposed(x8).t(), gradient_scale, input_scale, ctx.dtype)
        to_probe = observe(seen, gradient_seen, ctx.note)
        return x_gradient, weight_gradient.to(ctx.weight_dtype), None, None, to_probe, *6 * (None,)


def observe(seen: Tensor, gradient_seen: Tensor, note: Callable[[Tensor], None] | None) -> Tensor | None:
    """Store the observations of input and gradient by `note`; without it, return the gradient of the
    probe."""
    observation = torch.stack((seen, gradient_seen))
    if note is None:
        return observation
    note(observation)
    return None


def quantise(
    x: Tensor, scale: Tensor, dtype: torch.dtype, dynamic: bool, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows in 8 bits, the scale they were multiplied by, and (largest magnitude, share of numbers
    lost below the range)."""
    largest = _largest(x)
    if dynamic:
        scale = scale_for(largest, LARGEST[dtype])
    magnitudes = x.abs().to(wide(x.dtype))
    lost = ((magnitudes <= SMALLEST[dtype] / 2 / scale) & (magnitudes > 0)).sum(-1, dtype=torch.int32).sum()
    seen = torch.stack((largest.float(), lost / max(1, x.numel())))
    return cast(x, scale, None if plain else dtype), scale, seen


def _largest(x: Tensor) -> Tensor:
    """Return the largest magnitude, or NaN if there is one.

    The bits of float32 magnitudes, read as integers, have the same order, with NaN above all others. On a GPU
    a maximum of integers takes one instruction, a maximum of floats four.
    """
    if not len(x):
        return x.new_zeros((), dtype=wide(x.dtype))
    if wide(x.dtype) != torch.float32:
        return x.abs().amax(-1).amax()
    return (x.float().view(torch.int32) & 0x7FFFFFFF).amax(-1).amax().view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return x times the scale in 8 bits, clamped to the range of the dtype; None: not cast.

    The result is contiguous; x may not be: attention gives gradients of a single sequence column by column.
    """
    if dtype is None:
        return x * scale
    scaled = x.to(wide(x.dtype)) * scale
    if not (x.is_cuda and torch.compiler.is_compiling()):  # there the casting instruction clamps
        scaled = scaled.clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.to(dtype).contiguous()


def join_weights(
    weights: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, narrow: torch.dtype | None
) -> Tensor:
    """Return weights rounded to `dtype`, cast to `narrow` and joined along the outputs, the second last
    dim."""
    parts = [cast(weight.to(dtype), scale, narrow) for weight in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


@functools.cache
def _compiled_join() -> Callable[..., Tensor]:
    return torch.compile(join_weights, dynamic=True)


def transposed(matrix: Tensor) -> Tensor:
    """Return the contiguous transpose of a matrix, or of each matrix of a batch."""
    if not matrix.is_cuda or matrix.dtype.itemsize > 1:
        return matrix.transpose(-2, -1).contiguous()
    from shardwise.models.kernels import transpose8

    result: Tensor = transpose8(matrix)
    return result


def scale_for(largest: Tensor, end: Tensor | float) -> Tensor:
    """Return the largest power of two that keeps numbers up to `largest` within ± end; 1 if all are zero."""
    exponent_alone = (end / largest.float()).view(torch.int32) & 0x7F800000
    return torch.where(largest > 0, exponent_alone.view(torch.float32), 1.0).clamp(2.0**-100, 2.0**100)


def multiply(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return left (n, k), stored by rows, times right (k, m), stored by columns, divided by their scales."""
    fits = not any(size % MULTIPLE for size in (*left.shape, right.shape[1]))
    if left.is_cuda and left.dtype.itemsize == 1 and dtype != torch.float64 and fits:
        return float8_mm(left, right, 1 / left_scale, 1 / right_scale, dtype)
    exact = wide(dtype)
    return rounded_to(dtype, (left.to(exact) @ right.to(exact)) * (1 / (left_scale * right_scale)))
