"""Linear, norm and feed-forward layers that compute in the dtype of their input.

Mixed precision here is one rule instead of autocast's table: the activations have the compute dtype, and
every layer casts its weights to the dtype of its input when it uses them. Master weights stay float32 (or
whatever they are stored in), their gradients have the same dtype, and no context has to be entered. The cost
is one read of the weight and one write of its half-size copy per forward, about 0.4 % of a training step at
1 B parameters and 32k tokens; torch.compile fuses it where it can, and weights that arrive already cast, as
those from FSDP2, cost nothing.

torch's kernels compute the statistics of norms in float32 whatever the input dtype is, and matmuls sum in
float32 before they round. A lookup does not: the gradient of an embedding is a sum over all occurrences of a
token, which torch computes in the dtype of the weights. In bfloat16 such a sum stops growing once it is 256
times its next summand, as happens to frequent tokens. So `lookup` has its own backward, which sums in float32
and rounds once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._torch import AutogradContext
from shardwise.config.model import Model
from shardwise.models.float8_products import Float8Product
from shardwise.models.products import linear
from shardwise.models.torch_dtypes import rounded_to, wide


class Linear(nn.Linear):
    """`nn.Linear` whose weights follow the input's dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.float8: Float8Product | None = None
        """The product in 8 bits; None: it is made in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias in the dtype of x."""
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
    def from_plain(cls, plain: nn.Embedding) -> Embedding:
        """Return an embedding with the weight, hooks and attributes of a plain one, to take its place."""
        embedding = cls(plain.num_embeddings, plain.embedding_dim, plain.padding_idx, _weight=plain.weight)
        vars(embedding).update(vars(plain))
        return embedding

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors of these ids: (*shape of ids, hidden)."""
        return lookup(ids, self.weight, self.compute_dtype, self.padding_idx)


def lookup(
    ids: Tensor, weight: Tensor, dtype: torch.dtype | None = None, padding: int | None = None
) -> Tensor:
    """Return the rows `ids` of a weight (rows, hidden), in `dtype` or else the weight's: (*shape of ids,
    hidden). The row `padding` gets no gradient."""
    dtype = dtype or weight.dtype
    vectors: Tensor = _Lookup.apply(weight, ids, dtype, padding)  # type: ignore[no-untyped-call]
    return vectors


class _Lookup(torch.autograd.Function):
    """Forward gathers and casts. Backward sums the gradients of equal ids in the wide dtype, then casts the
    sum to the weight's dtype."""

    @staticmethod
    def forward(
        ctx: AutogradContext, weight: Tensor, ids: Tensor, dtype: torch.dtype, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.padding = weight.shape[0], weight.dtype, -1 if padding is None else padding
        return rounded_to(dtype, F.embedding(ids, weight))

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(
            gradient.to(wide(gradient.dtype)), ids, ctx.rows, ctx.padding, False
        )
        return summed.to(ctx.dtype), None, None, None


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight over the last dim (Zhang and Sennrich 2019), without mean and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed tensor in the dtype of x."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class OffsetRMSNorm(nn.RMSNorm):
    """x / rms(x) · (1 + weight), as in Gemma: weights begin at zero, and weight decay pulls them to zero.

    In 16 bits, one plus a small weight would lose the weight's digits, so it computes in float32 or better.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed tensor in the dtype of x."""
        weight = 1 + self.weight.to(x.dtype).to(wide(x.dtype))
        return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation · weight + bias over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed tensor in the dtype of x."""
        return F.layer_norm(
            x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )


NORMS: dict[str, type[RMSNorm | LayerNorm | OffsetRMSNorm]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "rms+1": OffsetRMSNorm,
}


def make_norm(config: Model) -> RMSNorm | LayerNorm | OffsetRMSNorm:
    """Return a new norm of the residual stream."""
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
        """Return the layer's output, of the shape of x."""
        gate = self.gate(x)
        activated = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        result: Tensor = self.down(activated * self.up(x))
        return result


class FeedForward(nn.Module):
    """down(gelu(up(x))), with GPT-2's tanh approximation."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn, bias=config.bias is True)
        self.down = Linear(config.ffn, config.hidden, bias=config.bias is True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, of the shape of x."""
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


def make_feed_forward(config: Model) -> GatedFeedForward | FeedForward:
    """Return a new feed-forward layer with the configured activation."""
    return GatedFeedForward(config) if config.gated else FeedForward(config)
