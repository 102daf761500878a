"""Linear, norm and feed-forward layers that follow the dtype of what flows through them.

Mixed precision here is one rule instead of autocast's table: the activations carry the compute dtype, and every layer
casts its weights to the dtype of its input at the moment of use. Master weights stay float32 (or whatever they are stored
in), gradients come back in the same dtype through the cast, and nothing depends on a context that someone has to enter.
The cost is one read of the weight and one write of its half-size copy a forward, about 0.4 % of a training step at 1 B
parameters and 32k tokens; torch.compile fuses it where it can, and it is a no-op when the weights arrive already cast, as
they do from FSDP2.

Norms take their statistics in float32 inside torch's kernels whatever the input dtype is.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import Model


class Linear(nn.Linear):
    """`nn.Linear` whose weights follow the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight over the last dim (Zhang and Sennrich 2019): no mean, no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """(x - mean) / deviation · weight + bias over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(config: Model) -> RMSNorm | LayerNorm:
    """The norm of the residual stream."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden, eps=config.norm_epsilon)


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), the SwiGLU of Shazeer (2020)."""

    def __init__(self, config: Model, width: int | None = None) -> None:
        super().__init__()
        width = width or config.ffn
        self.gate = Linear(config.hidden, width, bias=config.bias)
        self.up = Linear(config.hidden, width, bias=config.bias)
        self.down = Linear(width, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class FeedForward(nn.Module):
    """down(gelu(up(x))), with GPT-2's tanh approximation."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn, bias=config.bias)
        self.down = Linear(config.ffn, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


def make_feed_forward(config: Model) -> GatedFeedForward | FeedForward:
    """The feed-forward layer that the activation asks for."""
    return GatedFeedForward(config) if config.activation == "swiglu" else FeedForward(config)
