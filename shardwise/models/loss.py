"""The output head and the cross-entropy as one operation that never holds the full logits.

For 32k tokens and a vocabulary of 128k the logits are 8 GiB in bfloat16, 16 in float32, and plain autograd
keeps several such copies: the largest tensors of the whole step, for one number. But the gradient of the loss
with respect to the logits is known as soon as they are (softmax minus one-hot), so the head can be computed
in chunks of tokens: compute a chunk's logits and its loss, overwrite the logits by their gradient, multiply
that into the gradients of the hidden states and of the weight, and reuse the buffer. All three matmuls happen
in the forward pass, none twice; backward only scales the saved gradients. (The idea is known from Liger
Kernel and from "Cut Your Losses", Wijmans et al. 2024.)

Several devices may share the vocabulary (`VocabularyPart`): each has the rows of the weight for its ids, so
no device ever holds even a chunk of whole logits. They combine three numbers per token: the largest logit,
the sum of exponentials and the target's logit.

Saved from forward to backward: the gradient of the hidden states, as large as they are, and that of the
weight, accumulated in float32 (1 GiB at 128k × 2048). Nothing is copied to the host.

A GPU reads rows in units of 16 bytes: with a vocabulary of 50,257 its products take four times as long. There
the weight is padded with rows of zeros while it is used; the logits of the padding and their gradients are
zero, so no product has to treat them in a special way.

Gemma 2 keeps logits within ± a cap by cap · tanh(logit / cap). That is elementwise, so it is computed with
the softmax: the gradient of the plain logits is that of the capped ones times 1 - tanh².

float16: the tails of a softmax are below its smallest normal number, 6e-5, so there the gradient of the
logits is written 1024 times larger (it is at most 1, so it cannot overflow), the gradient of the hidden
states is saved in float32, and backward divides both together with the loss scale. bfloat16 has float32's
range and needs none of this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import AutogradContext
from shardwise.models.float8_products import E4M3, E5M2, Float8Product, cast, multiply, quantise, transposed
from shardwise.models.products import multiplies_in_float32
from shardwise.models.torch_dtypes import wide
from shardwise.plans.chunks import chunk_tokens

IGNORED = -100
"""Target of a position that takes no part in the loss."""

FLOAT16_GRADIENT_SCALE = 1024.0
ROUND_ROWS = {"cuda": 64, "cpu": 1}
"""The number of rows of the weight is padded to a multiple of this, for which products are fast."""


@dataclass(frozen=True)
class VocabularyPart:
    """One device's part of the vocabulary: as many ids as its weight has rows."""

    first: int
    """The first id of the part."""
    max_rows: int
    """Number of rows of the largest part, from which all parts compute the same chunks of tokens."""
    maximum: Callable[[Tensor], Tensor]
    """Function that takes this part's numbers and returns their maximum over all parts."""
    total: Callable[[Tensor], Tensor]
    """Function that takes this part's numbers and returns their sum over all parts."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    compiled: bool = False,
    part: VocabularyPart | None = None,
    split_backward: bool = False,
    softcap: float | None = None,
    float8: Float8Product | None = None,
) -> Tensor:
    """Return the exact sum over tokens of the cross-entropy of `hidden @ weight.T`, computed in chunks.

    `hidden` is (tokens, hidden), `weight` (vocabulary, hidden) in any dtype, `targets` (tokens) with -100 for
    none; a chunk has at most `chunk` tokens. The matmuls run in the dtype of `hidden`, the softmax in float32
    (or float64). Backward may run once; with `split_backward` in two halves, for the hidden states and for
    the weight, as in zero-bubble pipelines.

    With a `softcap`, a tanh keeps logits within ± it. With a `part` of the vocabulary, the loss is that of
    all parts, and the gradient of `hidden` is this part's summand of it. With `float8` the three products are
    made in 8 bits.
    """
    rows = weight.shape[0] if part is None else part.max_rows
    chunk = chunk or chunk_tokens(
        hidden.shape[0], rows, hidden.dtype.itemsize, hidden.device.type, float8 is not None
    )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        chosen = (targets, chunk, compiled, part, softcap, float8, split_backward)
        given = weight.detach() if split_backward else weight
        result = _LinearCrossEntropy.apply(hidden, given, *chosen)  # type: ignore[no-untyped-call]
        if split_backward:
            loss, gradient = result
            return _with_gradient(loss, weight, gradient)
        whole: Tensor = result
        return whole
    return _loss_alone(hidden, weight, targets, chunk, part, softcap, float8)


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits that a tanh keeps within ± the cap; None: unchanged."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _with_gradient(loss: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the loss with the known gradient for the weight.

    A split backward starts its second half at the node where the paths of inputs and weights meet. That node
    must not be our autograd function; here it is a plain sum.
    """
    # In 16 bits the factor of the loss would be rounded before its use.
    product = (weight.to(gradient.dtype) * gradient).sum()
    return loss + (product - product.detach())


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the loss and both gradients for a loss gradient of one; backward multiplies them by
    the actual loss gradient."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        compiled: bool,
        part: VocabularyPart | None,
        softcap: float | None,
        float8: Float8Product | None,
        gives_weight: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or gives_weight
        gradient_dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        hidden_gradient = torch.empty_like(hidden, dtype=gradient_dtype) if wants_hidden else None
        used_weight = _padded(weight, hidden.dtype)
        products = _products(hidden, used_weight, weight.shape[0], chunk, float8, compiled)
        if float8 is not None and isinstance(products, _Float8Products):
            float8.observations.append(products.seen)
        weight_gradient = torch.zeros_like(used_weight, dtype=wide(hidden.dtype)) if wants_weight else None
        chunk_loss = _choose_chunk_loss(hidden, compiled, part)
        loss = hidden.new_zeros((), dtype=wide(hidden.dtype))
        for start in range(0, hidden.shape[0], chunk):
            rows, real = slice(start, start + chunk), weight.shape[0]
            logits = products.logits(rows)
            gradient = products.room_for_gradient(logits)
            loss += chunk_loss(logits[:, :real], targets[rows], gradient[:, :real], products.scale, softcap)
            del logits  # in float8 it is another tensor, and makes room for the gradient's transposed copy
            products.add_gradients(gradient, rows, hidden_gradient, weight_gradient)
            del gradient  # before that of the next chunk
        if weight_gradient is not None:
            weight_gradient = weight_gradient[: weight.shape[0]]
        ctx.scale = 1.0 if float8 is not None else products.scale
        ctx.dtypes = hidden.dtype, weight.dtype
        if not gives_weight:
            ctx.save_for_backward(hidden_gradient, weight_gradient)
            return loss
        assert weight_gradient is not None
        ctx.save_for_backward(hidden_gradient, None)
        weight_gradient = weight_gradient / ctx.scale
        ctx.mark_non_differentiable(weight_gradient)
        return loss, weight_gradient

    @staticmethod
    def backward(ctx: AutogradContext, loss_gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        factor = loss_gradient / ctx.scale
        # In place, so that no second copy exists; autograd's version check then refuses a second backward.
        hidden, weight = (
            None if saved is None else saved.mul_(factor).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden, weight, *7 * (None,)


class _Products:
    """Computes logits, and the gradients that follow from theirs, in the dtype of the hidden states."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunk: int) -> None:
        self.hidden, self.weight = hidden, weight
        self.scale = FLOAT16_GRADIENT_SCALE if hidden.dtype == torch.float16 else 1.0
        self.buffer = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])

    def logits(self, rows: slice) -> Tensor:
        hidden = self.hidden[rows]
        logits = self.buffer[: hidden.shape[0]]
        _multiply(hidden, self.weight.t(), into=logits)
        return logits

    def room_for_gradient(self, logits: Tensor) -> Tensor:
        """Return the tensor for `scale` times the gradient of the logits, which overwrites them."""
        return logits

    def add_gradients(
        self, gradient: Tensor, rows: slice, hidden_gradient: Tensor | None, weight_gradient: Tensor | None
    ) -> None:
        """Write the gradient of the hidden states of these rows, and add to that of the weight."""
        if hidden_gradient is not None:
            _multiply(gradient, self.weight, into=hidden_gradient[rows])
        if weight_gradient is not None:
            _multiply_add(gradient.t(), self.hidden[rows], into=weight_gradient)


class _Float8Products:
    """The same in 8 bits. The gradient of a logit is at most one, so its scale is known; the hidden states of
    all chunks have one scale."""

    scale = 2.0**15
    """Factor of the gradient as it is written: the largest that fits into e5m2."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, real: int, float8: Float8Product, compiled: bool
    ) -> None:
        self.dtype, self.real = hidden.dtype, real
        make_hidden, make_weight = (_compiled(quantise), _compiled(cast)) if compiled else (quantise, cast)
        self.hidden: Tensor
        self.hidden_scale: Tensor
        self.hidden, self.hidden_scale, seen = make_hidden(
            hidden, float8.input.value, E4M3, float8.dynamic, float8.plain
        )
        self.weight_scale = float8.weight.value
        self.weight = make_weight(weight, self.weight_scale, None if float8.plain else E4M3)
        self.gradient_dtype = hidden.dtype if float8.plain else E5M2
        self.gradient_scale = torch.full_like(self.weight_scale, self.scale)
        self.weight_transposed: Tensor | None = None
        self.seen = torch.stack((seen, torch.zeros_like(seen)))

    def logits(self, rows: slice) -> Tensor:
        return multiply(self.hidden[rows], self.weight.t(), self.hidden_scale, self.weight_scale, self.dtype)

    def room_for_gradient(self, logits: Tensor) -> Tensor:
        """Return a new tensor for `scale` times the gradient of the logits, with zeros in the padding."""
        room = torch.empty_like(logits, dtype=self.gradient_dtype)
        room[:, self.real :].zero_()
        return room

    def add_gradients(
        self, gradient: Tensor, rows: slice, hidden_gradient: Tensor | None, weight_gradient: Tensor | None
    ) -> None:
        """Write the gradient of the hidden states of these rows, and add to that of the weight."""
        if hidden_gradient is not None:
            if self.weight_transposed is None:
                self.weight_transposed = transposed(self.weight)
            right, dtype = self.weight_transposed.t(), hidden_gradient.dtype
            hidden_gradient[rows] = multiply(gradient, right, self.gradient_scale, self.weight_scale, dtype)
        if weight_gradient is not None:
            left, right, dtype = (
                transposed(gradient),
                transposed(self.hidden[rows]).t(),
                weight_gradient.dtype,
            )
            weight_gradient += multiply(left, right, self.gradient_scale, self.hidden_scale, dtype)


def _products(
    hidden: Tensor,
    weight: Tensor,
    real: int,
    chunk: int,
    float8: Float8Product | None,
    compiled: bool = False,
) -> _Products | _Float8Products:
    """Return the products of a weight whose rows after the first `real` are padding."""
    if float8 is None:
        return _Products(hidden, weight, chunk)
    return _Float8Products(hidden, weight, real, float8, compiled)


_ChunkLoss = Callable[[Tensor, Tensor, Tensor, float, float | None], Tensor]


def _choose_chunk_loss(hidden: Tensor, compiled: bool, part: VocabularyPart | None) -> _ChunkLoss:
    if part is not None:
        return functools.partial(_chunk_loss_and_gradient_of_part, part=part)
    if hidden.is_cuda and hidden.dtype != torch.float64:
        from shardwise.models.kernels import cross_entropy

        return functools.partial(cross_entropy, ignored=IGNORED)
    return _compiled(_chunk_loss_and_gradient) if compiled else _chunk_loss_and_gradient


def _chunk_loss_and_gradient(
    logits: Tensor, targets: Tensor, into: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Return the summed loss of a chunk, and write `scale` times the gradient of the logits to `into`, which
    may be the logits.

    It is written for the compiler: one-hot is a comparison of indices, so everything fuses into a pass for
    the softmax statistics and a pass that writes the gradient.
    """
    valid = targets != IGNORED
    scores = logits if softcap is None else cap_logits(logits.to(wide(logits.dtype)), softcap)
    log_probabilities = torch.log_softmax(scores, dim=1, dtype=wide(logits.dtype))
    chosen = log_probabilities.gather(1, torch.where(valid, targets, 0).unsqueeze(1)).squeeze(1)
    one_hot = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    gradient = log_probabilities.exp_().sub_(one_hot.to(log_probabilities.dtype))
    if softcap is not None:
        gradient = gradient * _slope(scores, softcap)
    into.copy_(gradient.mul_(scale).masked_fill_(~valid.unsqueeze(1), 0.0))
    return -torch.where(valid, chosen, 0.0).sum()


def _slope(capped: Tensor, softcap: float) -> Tensor:
    """Return the derivative of capped logits by the plain ones: 1 - tanh²."""
    return 1 - (capped / softcap).square()


def _chunk_loss_and_gradient_of_part(
    logits: Tensor, targets: Tensor, into: Tensor, scale: float, softcap: float | None, part: VocabularyPart
) -> Tensor:
    """Return the same as `_chunk_loss_and_gradient` for logits of a part of the vocabulary."""
    valid = targets != IGNORED
    scores = cap_logits(logits.to(wide(logits.dtype)), softcap)
    slope = None if softcap is None else _slope(scores, softcap)
    lowest = scores.new_full((scores.shape[0], 1), -math.inf)  # a part may be empty
    peak = part.maximum(torch.cat((scores, lowest), 1).amax(1))
    scores = scores - peak.unsqueeze(1)
    ids = torch.arange(part.first, part.first + scores.shape[1], device=scores.device)
    one_hot = ids == targets.unsqueeze(1)
    target_scores = torch.where(one_hot, scores, 0.0).sum(1)
    exponentials = scores.exp_()
    sums, chosen = part.total(torch.stack((exponentials.sum(1), target_scores)))
    gradient = exponentials.div_(sums.unsqueeze(1)).sub_(one_hot.to(scores.dtype))
    gradient = gradient if slope is None else gradient.mul_(slope)
    into.copy_(gradient.mul_(scale).masked_fill_(~valid.unsqueeze(1), 0.0))
    return torch.where(valid, sums.log() - chosen, 0.0).sum()


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _loss_alone(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    part: VocabularyPart | None,
    softcap: float | None,
    float8: Float8Product | None,
) -> Tensor:
    loss, used_weight = hidden.new_zeros((), dtype=wide(hidden.dtype)), _padded(weight, hidden.dtype)
    products = _products(hidden, used_weight, weight.shape[0], chunk, float8)
    for start in range(0, hidden.shape[0], chunk):
        logits = products.logits(slice(start, start + chunk))[:, : weight.shape[0]]
        chosen = targets[start : start + chunk]
        if part is not None:
            loss = loss + _chunk_loss_and_gradient_of_part(logits, chosen, logits, 1.0, softcap, part)
        else:
            scores = cap_logits(logits.to(loss.dtype), softcap)
            loss = loss + F.cross_entropy(scores, chosen, ignore_index=IGNORED, reduction="sum")
    return loss


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in this dtype, with rows of zeros up to a round number of rows."""
    missing = -weight.shape[0] % ROUND_ROWS["cpu" if weight.device.type == "cpu" else "cuda"]
    if not missing:
        return weight.to(dtype)
    padded = weight.new_zeros(weight.shape[0] + missing, weight.shape[1], dtype=dtype)
    padded[: weight.shape[0]] = weight
    return padded


def _multiply(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Write left @ right to `into`, rounded only to the dtype of `into`."""
    if multiplies_in_float32(into.dtype, into.device.type):
        into.copy_(torch.mm(left.float(), right.float(), out=into.new_empty(into.shape, dtype=torch.float32)))
    elif left.dtype == into.dtype:
        torch.mm(left, right, out=into)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=into.dtype, out=into)
    else:
        torch.mm(left.to(into.dtype), right.to(into.dtype), out=into)


def _multiply_add(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Add left @ right to `into`, in the dtype of `into`: with 8 bits of fraction, later summands would be
    lost."""
    if left.dtype == into.dtype:
        torch.addmm(into, left, right, out=into)
    elif left.is_cuda:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        torch.addmm(into, left.to(into.dtype), right.to(into.dtype), out=into)
