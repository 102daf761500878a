"""Products in float8: both factors in 8 bits, sums in float32, the result as in bfloat16. Those of experts:
models/float8_grouped.py.

    y  = x8 · w8ᵀ      x, w in e4m3 (3 bits of fraction, up to 448)
    dx = g8 · w8       g    in e5m2 (2 bits of fraction, up to 57,344)
    dw = g8ᵀ · x8

Every tensor is multiplied by a scale before it is cast, so that its largest number lies near the end of the
format's range, and divided by it in the product. Scales are powers of two: then a scale moves the range and
rounds nothing, so that two devices whose scales differ still agree on all numbers that neither of them loses
below the range.

Where a scale comes from:

- delayed: from the largest magnitudes of the last steps, over all devices and micro-batches, with room for
  growth. It is known before the tensor is, so casting is one more number to write for whatever kernel makes
  the tensor; and it is the same on every layout. A tensor that outgrows its scale is noticed at the end of
  the step, before the weights are touched, and the step is made again with scales that fit (train/steps.py);
  so is the first step of a run, which is only to look at the magnitudes.
- dynamic: from this tensor, on this device, now. One more pass over each tensor.

A weight is there before the step is: its scale is that of the weight itself, over all devices that have a
part of it. So sharded weights can be gathered in 8 bits (comm/weight_gathers.py), and cast again they are
what they were.

Backward needs `x`, kept in 8 bits: half of what bfloat16 keeps. A GPU multiplies in float8 only what lies
along the summed dimension, so each tensor is transposed once; where a size is no multiple of 16, on GPUs
without float8 and on CPUs the product is made of the same 8-bit numbers in the computing dtype.

What was seen (largest magnitudes, and how many numbers fell below the range) comes out of backward. In eager
code it is noted right there. A compiled block must not write to anything, so there it leaves as the gradient
of a `probe`, whose hook notes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import float8_mm
from shardwise.models.torch_dtypes import wide
from shardwise.models.unallocated import ExactBuffers
from shardwise.plan.float8_choice import MULTIPLE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
ROOM = {E4M3: 2.0, E5M2: 8.0}
"""By how much a tensor may outgrow the largest that was seen of it before a step has to be made again. e5m2
has room."""
HISTORY = 16
"""Steps whose largest magnitudes are remembered."""


class Scale(ExactBuffers):
    """Of one kind of tensor: an input, a weight or a gradient."""

    value: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("value", torch.ones(()), persistent=False)


class DelayedScale(Scale):
    """From the largest magnitudes of former steps."""

    maxima: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.register_buffer("maxima", torch.zeros(HISTORY))


class ScaledProduct(nn.Module):
    """A product in float8: its scales, and what is seen of its tensors. Subclasses make it."""

    def __init__(self, source: DelayedScale | None, weights: tuple[str, ...]) -> None:
        super().__init__()
        self.input, self.weight, self.gradient = source or DelayedScale(E4M3), Scale(E4M3), DelayedScale(E5M2)
        self.weights = weights
        """What it multiplies by, as the module calls it that holds the product; all with one scale."""
        self.dynamic = True
        """Whether scales of inputs and gradients are taken from the tensors themselves."""
        self.plain = False
        """Whether nothing is cast: to look at the magnitudes alone."""
        self.alone = True
        """Whether nobody else uses the weight, so that it may be gathered in 8 bits."""
        self.kept: tuple[Tensor, Tensor] | None = None
        """Its weights in 8 bits, joined, as they are and transposed, where they are cast once for all
        micro-batches of a step."""
        self.noted: list[Tensor] = []
        """What was seen in this step: of each backward, for input and gradient, (2, 2)."""
        self.probe = self._new_probe(torch.device("cpu"))

    def settings(self) -> tuple[Any, ...]:
        """What a product is told beside its factors: weights that are cast already, as they are and
        transposed, the probe, three scales, whether they are dynamic, whether nothing is cast, and where to
        note what was seen."""
        kept = (None, None) if self.kept is None or self.plain else self.kept
        probe, note = (self.probe, None) if torch.compiler.is_compiling() else (None, self.noted.append)
        return (
            *kept,
            probe,
            self.input.value,
            self.weight.value,
            self.gradient.value,
            self.dynamic,
            self.plain,
            note,
        )

    @torch.no_grad()
    def keep(self, weights: Sequence[Tensor], dtype: torch.dtype, compiled: bool) -> None:
        """Cast the weights for all micro-batches to come; `dtype` is that of the values between products."""
        make = _compiled_join() if compiled else joined
        weight8 = make([weight.detach() for weight in weights], self.weight.value, dtype, E4M3)
        both = weight8, transposed(weight8)
        if self.kept is None:  # not what compiled code returned: that is marked as of any size
            self.kept = torch.empty_like(both[0]), torch.empty_like(both[1])
        for old, new in zip(self.kept, both, strict=True):  # in place: compiled code knows them
            old.copy_(new)

    def delayed(self) -> list[DelayedScale]:
        """Of input and gradient."""
        return [self.input, self.gradient]

    def note_on(self, device: torch.device) -> None:
        """Where compiled code will run."""
        self.probe = self._new_probe(device)

    def _new_probe(self, device: torch.device) -> Tensor:
        probe = torch.zeros(2, 2, device=device, requires_grad=True)
        probe.register_hook(self.noted.append)  # type: ignore[no-untyped-call]
        return probe


class Float8(ScaledProduct):
    """How a product `x · weightᵀ` is made in float8. Products of one input share its scale."""

    def __init__(self, source: DelayedScale | None = None) -> None:
        super().__init__(source, ("weight",))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(..., inputs) and (outputs, inputs) to (..., outputs)."""
        rows: Tensor = _Product.apply(x.flatten(0, -2), weight, *self.settings())  # type: ignore[no-untyped-call]
        return rows.view(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """Rows (n, inputs) times weight (outputs, inputs) transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        kept: Tensor | None,
        kept_transposed: Tensor | None,
        probe: Tensor | None,
        of_input: Tensor,
        of_weight: Tensor,
        of_gradient: Tensor,
        dynamic: bool,
        plain: bool,
        note: Callable[[Tensor], None] | None,
    ) -> Tensor:
        x8, of_input, seen = quantise(x, of_input, E4M3, dynamic, plain)
        w8 = cast(weight.to(x.dtype), of_weight, None if plain else E4M3) if kept is None else kept
        needed = weight if kept is None else None
        ctx.save_for_backward(x8, needed, kept_transposed, of_input, of_weight, of_gradient, seen)
        ctx.dynamic, ctx.plain, ctx.note, ctx.dtype, ctx.weight_dtype = (
            dynamic,
            plain,
            note,
            x.dtype,
            weight.dtype,
        )
        return multiply(x8, w8.t(), of_input, of_weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, weight, w8t, of_input, of_weight, of_gradient, seen = ctx.saved_tensors
        g8, of_gradient, seen_of_gradient = quantise(gradient, of_gradient, E5M2, ctx.dynamic, ctx.plain)
        if w8t is None:
            w8t = transposed(cast(weight.to(ctx.dtype), of_weight, None if ctx.plain else E4M3))
        x_gradient = multiply(g8, w8t.t(), of_gradient, of_weight, ctx.dtype)
        weight_gradient = multiply(transposed(g8), transposed(x8).t(), of_gradient, of_input, ctx.dtype).to(
            ctx.weight_dtype
        )
        all_seen = torch.stack((seen, seen_of_gradient))
        if ctx.note is not None:
            ctx.note(all_seen)
        return x_gradient, weight_gradient, None, None, all_seen if ctx.note is None else None, *6 * (None,)


def quantise(
    x: Tensor, scale: Tensor, dtype: torch.dtype, dynamic: bool, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in 8 bits, the scale they were multiplied by, and what was seen: (largest magnitude, share of
    numbers lost)."""
    largest = _largest(x)
    if dynamic:
        scale = scale_for(largest, LARGEST[dtype])
    magnitudes = x.abs().to(wide(x.dtype))
    lost = ((magnitudes <= SMALLEST[dtype] / 2 / scale) & (magnitudes > 0)).sum(-1, dtype=torch.int32).sum()
    seen = torch.stack((largest.float(), lost / max(1, x.numel())))
    return cast(x, scale, None if plain else dtype), scale, seen


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude; not a number where one of them is none. In float32 bits of magnitudes are in
    their order, those that are no numbers above all others: a maximum of integers is one instruction of a
    GPU, one of floats four."""
    if not len(x):
        return x.new_zeros((), dtype=wide(x.dtype))
    if wide(x.dtype) != torch.float32:
        return x.abs().amax(-1).amax()
    return (x.float().view(torch.int32) & 0x7FFFFFFF).amax(-1).amax().view(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x times the scale in 8 bits, where what is above the range becomes its end; None: not cast. Row after
    row, however x lies in memory: gradients of a single sequence come out of attention column by column."""
    if dtype is None:
        return x * scale
    scaled = x.to(wide(x.dtype)) * scale
    if not (x.is_cuda and torch.compiler.is_compiling()):  # where the instruction that casts does so too
        scaled = scaled.clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.to(dtype).contiguous()


def joined(
    weights: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, narrow: torch.dtype | None
) -> Tensor:
    """Weights cast as values of this dtype are, along their outputs, which are the last dim but one."""
    parts = [cast(weight.to(dtype), scale, narrow) for weight in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


@functools.cache
def _compiled_join() -> Callable[..., Tensor]:
    return torch.compile(joined, dynamic=True)


def transposed(matrix: Tensor) -> Tensor:
    """(rows, columns) in 8 bits to (columns, rows), contiguous; of several matrices, each."""
    if not matrix.is_cuda or matrix.dtype.itemsize > 1:
        return matrix.transpose(-2, -1).contiguous()
    from shardwise.models.kernels import transpose8

    turned: Tensor = transpose8(matrix)
    return turned


def scale_for(largest: Tensor, end: Tensor | float) -> Tensor:
    """The largest power of two by which such numbers stay within ± end; one where nothing but zeros was
    seen."""
    exponent_alone = (end / largest.float()).view(torch.int32) & 0x7F800000
    return torch.where(largest > 0, exponent_alone.view(torch.float32), 1.0).clamp(2.0**-100, 2.0**100)


def multiply(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype) -> Tensor:
    """left (n, k) row by row times right (k, m) column by column, without their scales."""
    fits = not any(size % MULTIPLE for size in (*left.shape, right.shape[1]))
    if left.is_cuda and left.dtype.itemsize == 1 and dtype != torch.float64 and fits:
        return float8_mm(left, right, 1 / of_left, 1 / of_right, dtype)
    exact = wide(dtype)
    return rounded_to(dtype, (left.to(exact) @ right.to(exact)) * (1 / (of_left * of_right)))


def rounded_to(dtype: torch.dtype, product: Tensor) -> Tensor:
    """The same tensor where it is of that dtype already, not a view: compiled by torch 2.11, that would get
    no gradient."""
    return product if product.dtype == dtype else product.to(dtype)
