"""Linear, norm and feed-forward layers that follow the dtype of what flows through them.

Mixed precision here is one rule instead of autocast's table: the activations carry the compute dtype, and
every layer casts its weights to the dtype of its input at the moment of use. Master weights stay float32 (or
whatever they are stored in), gradients come back in the same dtype through the cast, and nothing depends on a
context that someone has to enter. The cost is one read of the weight and one write of its half-size copy a
forward, about 0.4 % of a training step at 1 B parameters and 32k tokens; torch.compile fuses it where it can,
and it is a no-op when the weights arrive already cast, as they do from FSDP2.

Norms take their statistics in float32 inside torch's kernels whatever the input dtype is, and matmuls add up
in float32 before they round. A lookup does not: the gradient of an embedding is a sum over all places where a
token occurs, and torch makes it in the dtype of the weights. In bfloat16 such a sum stands still once it is
256 times its next summand, which is where frequent tokens are. So `lookup` has a backward of its own that
sums in float32 and rounds once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config.model import Model
from shardwise.models.float8_products import Float8
from shardwise.models.products import linear
from shardwise.models.torch_dtypes import wide


class Linear(nn.Linear):
    """`nn.Linear` whose weights follow the input's dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.float8: Float8 | None = None
        """How its product is made in 8 bits, if it is."""

    def forward(self, x: Tensor) -> Tensor:
        if self.float8 is not None:
            product: Tensor = self.float8(x, self.weight)
            return product if self.bias is None else product + self.bias.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` whose vectors have the computing dtype, and whose gradient is summed in float32 or
    better."""

    compute_dtype: torch.dtype | None = None
    """dtype of the vectors; None: that of the weights."""

    @classmethod
    def of(cls, plain: nn.Embedding) -> Embedding:
        """Return one with the weight, hooks and attributes of a plain embedding, to take its place."""
        embedding = cls(plain.num_embeddings, plain.embedding_dim, plain.padding_idx, _weight=plain.weight)
        vars(embedding).update(vars(plain))
        return embedding

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(ids, self.weight, self.compute_dtype, self.padding_idx)


def lookup(
    ids: Tensor, weight: Tensor, dtype: torch.dtype | None = None, padding: int | None = None
) -> Tensor:
    """Rows of a weight (rows, hidden), in that dtype or the weight's own: ids of any shape to (*shape,
    hidden). The row `padding` gets no gradient."""
    vectors: Tensor = _Lookup.apply(weight, ids, dtype or weight.dtype, padding)  # type: ignore[no-untyped-call]
    return vectors


class _Lookup(torch.autograd.Function):
    """Forward: a gather and a cast. Backward: gradients of equal ids summed in the wide dtype, then cast to
    the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, dtype: torch.dtype, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.padding = weight.shape[0], weight.dtype, -1 if padding is None else padding
        return F.embedding(ids, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(
            gradient.to(wide(gradient.dtype)), ids, ctx.rows, ctx.padding, False
        )
        return summed.to(ctx.dtype), None, None, None


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight over the last dim (Zhang and Sennrich 2019): no mean, no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class OffsetRMSNorm(nn.RMSNorm):
    """x / rms(x) · (1 + weight), as Gemma has it: weights begin, and are decayed if at all, towards no
    change. One plus a small weight would lose its digits in 16 bits, so the product is made in float32 or
    better."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.to(x.dtype).to(wide(x.dtype))
        return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation · weight + bias over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )


NORMS: dict[str, type[RMSNorm | LayerNorm | OffsetRMSNorm]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "rms+1": OffsetRMSNorm,
}


def make_norm(config: Model) -> RMSNorm | LayerNorm | OffsetRMSNorm:
    """The norm of the residual stream."""
    return NORMS[config.norm](config.hidden, eps=config.norm_epsilon)


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) · up(x)), the SwiGLU or GeGLU of Shazeer (2020)."""

    def __init__(self, config: Model, width: int | None = None) -> None:
        super().__init__()
        width = width or config.ffn
        self.gelu = config.activation == "geglu"
        self.gate = Linear(config.hidden, width, bias=config.bias is True)
        self.up = Linear(config.hidden, width, bias=config.bias is True)
        self.down = Linear(width, config.hidden, bias=config.bias is True)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        result: Tensor = self.down(
            (F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * self.up(x)
        )
        return result


class FeedForward(nn.Module):
    """down(gelu(up(x))), with GPT-2's tanh approximation."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn, bias=config.bias is True)
        self.down = Linear(config.ffn, config.hidden, bias=config.bias is True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


def make_feed_forward(config: Model) -> GatedFeedForward | FeedForward:
    """The feed-forward layer that the activation asks for."""
    return GatedFeedForward(config) if config.gated else FeedForward(config)
