"""Causal attention, and the choice of the kernel that computes it.

Several query heads may share one key and value head (grouped-query attention, Ainslie et al. 2023): the keys
and values shrink by that ratio, the arithmetic stays. Everything runs through `scaled_dot_product_attention`,
whose fused kernels never write the (sequence × sequence) scores to memory.

Which fused kernel matters: on Hopper GPUs cuDNN's is about 1.5 times as fast as the bundled flash attention
at head size 64, yet torch prefers flash. So the caller enters `attention_backends` around the model's
forward, which sets our order of preference; torch takes the first that supports the call.
`describe_attention` tells which one that is.

Gemma 2 keeps scores within ± a cap by cap · tanh(score / cap), which none of these kernels does: such
attention is written out, and holds sequence² scores for each head.

With a mask the flash kernel drops out (it takes none). A mask of documents has sequence² bytes for each row
of the batch, one of a sliding window (Jiang et al., "Mistral 7B", 2023) as many for all of them; kernels then
compute the whole square of scores.
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


class CausalAttention(nn.Module):
    """softmax(q kᵀ / sqrt(head_dim)) v, over this token and those before it. No weights: only the mixing of
    tokens.

    The mask says which tokens those are. `window` is for whoever makes masks of its own, because it has the
    whole sequence only here: parallel/context.py. With a `softcap`, scores are kept within ± it.
    """

    def __init__(self, window: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.window, self.softcap = window, softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Each (batch, heads, sequence, head_dim), keys and values with fewer heads or as many; the result as
        the query."""
        return attend_to(query, key, value, mask, self.softcap)


def attend_to(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None = None
) -> Tensor:
    """Attention to where the mask is True; None: to this token and all before it."""
    if softcap is not None:
        return _capped(query, key, value, mask, softcap)
    grouped = key.shape[1] < query.shape[1]
    if (
        grouped and query.is_cuda and query.dtype == torch.float32
    ):  # no fused GPU kernel shares heads in float32
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    return attention(query, key, value, mask, grouped)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float) -> Tensor:
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
    """What a token may look at: back within its own document, and no further than the window."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, documents: Tensor | None, positions: Tensor) -> Tensor | None:
        """From where documents begin (batch, sequence), or None where there is one, and positions
        (sequence)."""
        return visible(documents, positions, self.window)


def visible(documents: Tensor | None, positions: Tensor, window: int | None) -> Tensor | None:
    """True where a token may look: (batch or 1, 1 for all heads, sequence, sequence). None: at all before
    it."""
    if window is not None and window >= positions.shape[0]:
        window = None
    if documents is None and window is None:
        return None
    back = positions[:, None] - positions[None, :]  # how far, (sequence, sequence)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    if documents is None:
        return seen[None, None]
    same = documents[:, :, None] == documents[:, None, :]  # (batch, sequence, sequence)
    return (same & seen).unsqueeze(1)


class Attention(nn.Module):
    """Queries, keys and values from the stream; tokens mixed; the result projected back."""

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
        # Kernels divide scores by sqrt(head_dim); what else there is to divide by is put into the queries.
        self.query_factor = (
            1.0 if config.query_scalar is None else math.sqrt(config.head_dim / config.query_scalar)
        )

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        """(batch, sequence, hidden) to the same; how many heads there are is read from the weights."""
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
    """Our order of attention kernels while the model's forward runs; the backward follows its forward by
    itself."""
    with sdpa_kernel(list(PREFERENCE.get(device_type, (SDPBackend.MATH,))), set_priority=True):
        yield


def describe_attention(
    config: Model, device_type: str, dtype: torch.dtype, sequence_length: int, *, masked: bool = False
) -> str:
    """The kernel that attention will really use here, in words."""
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
        return (
            "memory-efficient"
            if torch.backends.cuda.can_use_efficient_attention(parameters)
            else "math (slow)"
        )


def _example_call(
    config: Model, dtype: torch.dtype, length: int, masked: bool
) -> torch.backends.cuda.SDPAParams:
    def projected(heads: int) -> Tensor:
        rows = torch.empty(1, length, heads, config.head_dim, dtype=dtype, device="cuda", requires_grad=True)
        return rows.transpose(1, 2)

    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda") if masked else None
    kv_heads = config.heads if dtype == torch.float32 else config.kv_heads  # see CausalAttention
    key = projected(kv_heads)
    return torch.backends.cuda.SDPAParams(
        projected(config.heads), key, key, mask, 0.0, not masked, kv_heads < config.heads
    )
