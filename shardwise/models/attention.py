"""Causal attention, and the choice of the kernel that computes it.

Several query heads may share one key and value head (grouped-query attention, Ainslie et al. 2023): the keys
and values shrink by that ratio, the arithmetic stays. Everything runs through `scaled_dot_product_attention`,
whose fused kernels never write the (sequence × sequence) scores to memory.

Which fused kernel matters: on Hopper GPUs cuDNN's is about 1.5 times as fast as the bundled flash attention
at head size 64, yet torch prefers flash. So the caller enters `attention_backends` around the model's
forward, which sets our order of preference; torch takes the first that supports the call.
`describe_attention` tells which one that is.

Gemma 2 keeps scores within ± a cap by cap · tanh(score / cap), which none of these kernels does. Such
attention is written as plain products, and holds sequence² scores for each head.

The flash kernel takes no mask, so it cannot be used with one. A mask of documents has sequence² bytes for
each row of the batch; a mask of a sliding window (Jiang et al., "Mistral 7B", 2023) has sequence² bytes in
all. With a mask, kernels compute the whole square of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.config.model import Model
from shardwise.models.layers import Linear, RMSNorm
from shardwise.models.products import attention, matmul
from shardwise.models.rotary import Angles, rotate
from shardwise.models.torch_dtypes import wide

PREFERENCE = {
    "cuda": (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ),
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
}
"""Attention kernels of each type of device, the preferred one first."""


class CausalAttention(nn.Module):
    """softmax(q kᵀ / sqrt(head_dim)) v, over each token and those before it. It has no weights.

    The mask says which tokens are seen. `window` is for context parallelism (parallel/context.py), which
    makes its masks here, where it has the whole sequence. With a `softcap`, scores stay within ± it.
    """

    def __init__(self, window: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.window, self.softcap = window, softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mixed values, of the query's shape.

        Each input is (batch, heads, sequence, head_dim); keys and values may have fewer heads.
        """
        return masked_attention(query, key, value, mask, self.softcap)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Tensor:
    """Return attention to the keys where the mask is True; without a mask, causal attention."""
    if softcap is not None:
        return _capped_attention(query, key, value, mask, softcap)
    grouped = key.shape[1] < query.shape[1]
    if grouped and query.is_cuda and query.dtype == torch.float32:
        # No fused GPU kernel shares heads in float32.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return attention(query, key, value, mask, grouped)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float
) -> Tensor:
    repeats, length = query.shape[1] // key.shape[1], query.shape[2]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = matmul(query * query.shape[-1] ** -0.5, key.mT)  # (batch, heads, sequence, sequence)
    capped = softcap * (scores.to(wide(scores.dtype)) / softcap).tanh()
    shares = capped.masked_fill(~mask, -math.inf).softmax(-1)
    return matmul(shares.to(value.dtype), value)


class AttentionMask(nn.Module):
    """Makes the mask of what a token sees: its own document up to itself, and no further than the window."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, documents: Tensor | None, positions: Tensor) -> Tensor | None:
        """Return the mask, or None where causal attention needs none.

        `documents` (batch, sequence) says where the document of each token begins; None: there is only one.
        `positions` are (sequence).
        """
        return visibility_mask(documents, positions, self.window)


def visibility_mask(documents: Tensor | None, positions: Tensor, window: int | None) -> Tensor | None:
    """Return a mask that is True where a token sees another: (batch or 1, 1 for all heads, sequence,
    sequence).

    It is None where every token sees all tokens before it.
    """
    if window is not None and window >= positions.shape[0]:
        window = None
    if documents is None and window is None:
        return None
    distance = positions[:, None] - positions[None, :]  # (sequence, sequence)
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if documents is None:
        return seen[None, None]
    same = documents[:, :, None] == documents[:, None, :]  # (batch, sequence, sequence)
    return (same & seen).unsqueeze(1)


class Attention(nn.Module):
    """The attention layer of a block: projections to queries, keys and values, attention, and a projection
    back to the residual stream."""

    def __init__(self, config: Model, window: int | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = Linear(config.hidden, query, bias=bool(config.bias))
        self.key = Linear(config.hidden, key, bias=bool(config.bias))
        self.value = Linear(config.hidden, key, bias=bool(config.bias))
        self.output = Linear(query, config.hidden, bias=config.bias is True)
        self.query_norm = (
            RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.qk_norm else nn.Identity()
        )
        self.key_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.qk_norm else nn.Identity()
        self.mixing = CausalAttention(window, config.attention_softcap)
        # Kernels divide scores by sqrt(head_dim). Where a model divides by another number, queries make up
        # for the difference.
        self.query_factor = (
            1.0 if config.query_scalar is None else math.sqrt(config.head_dim / config.query_scalar)
        )

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        """Return (batch, sequence, hidden) from the same shape. The weights tell how many heads there are."""
        query, key = self.query_norm(self._heads(self.query(x))), self.key_norm(self._heads(self.key(x)))
        value = self._heads(self.value(x))  # each (batch, sequence, heads, head_dim)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if self.query_factor != 1:
            query = query * self.query_factor
        mixed = self.mixing(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


@contextmanager
def attention_backends(device_type: str) -> Iterator[None]:
    """Inside this context, torch chooses attention kernels in our order. Backward uses its forward's
    kernel."""
    with sdpa_kernel(list(PREFERENCE.get(device_type, (SDPBackend.MATH,))), set_priority=True):
        yield


def describe_attention(
    config: Model, device_type: str, dtype: torch.dtype, sequence_length: int, *, masked: bool = False
) -> str:
    """Return the name of the kernel that attention will use on this device."""
    if config.attention_softcap is not None:
        return "written out, with capped scores (slow)"
    if device_type == "cpu":
        return "flash (CPU)"
    if device_type != "cuda":
        return "math"
    parameters = _example_call(config, dtype, sequence_length, masked)
    with attention_backends(device_type):
        if torch.backends.cuda.can_use_cudnn_attention(parameters):
            return "cuDNN"
        if torch.backends.cuda.can_use_flash_attention(parameters):
            return "flash"
        efficient = torch.backends.cuda.can_use_efficient_attention(parameters)
        return "memory-efficient" if efficient else "math (slow)"


def _example_call(
    config: Model, dtype: torch.dtype, length: int, masked: bool
) -> torch.backends.cuda.SDPAParams:
    def projected(heads: int) -> Tensor:
        rows = torch.empty(1, length, heads, config.head_dim, dtype=dtype, device="cuda", requires_grad=True)
        return rows.transpose(1, 2)

    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda") if masked else None
    kv_heads = config.heads if dtype == torch.float32 else config.kv_heads  # see masked_attention
    key = projected(kv_heads)
    return torch.backends.cuda.SDPAParams(
        projected(config.heads), key, key, mask, 0.0, not masked, kv_heads < config.heads
    )
