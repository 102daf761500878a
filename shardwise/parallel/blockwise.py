"""Attention of some queries to some keys, in a form whose parts can be put together again.

Softmax attention over all keys is a weighted mean of values. If the keys come in blocks, each block's own
attention `out` and the logarithm `lse` of its sum of exponentials are enough to find the mean over all of
them:

    lse = log(exp(lse₁) + exp(lse₂))        out = exp(lse₁ - lse) out₁ + exp(lse₂ - lse) out₂

and the gradient of a block needs only the *merged* out and lse beside its own queries, keys and values,
because the probability of a key is exp(score - lse) wherever that key came from (Dao et al.,
"FlashAttention", 2022; Liu et al., "Blockwise Parallel Transformer", 2023). So a block runs through the
device's fused kernel as it is, forward and backward. Public `scaled_dot_product_attention` does not hand out
the lse; the operators beneath it do, and here they all get one shape: (batch, heads, queries, head_dim) for
out, (batch, heads, queries) for lse, in float32, or float64 where out is.

| kernel    | where                           | grouped-query                          | document mask |
| --------- | ------------------------------- | -------------------------------------- | ------------- |
| cpu       | CPU                             | shares heads                           | yes           |
| cudnn     | CUDA, 16 bits: the fastest      | shares heads                           | no            |
| flash     | CUDA, 16 bits                   | shares heads                           | no            |
| efficient | CUDA, also float32              | repeats keys and values for each block | yes           |
| plain     | anywhere: matrix products       | repeats keys and values for each block | yes           |

A mask is added to the scores as a large negative number, never as minus infinity: for a row without any
visible key kernels disagree on what they return then (the CPU's says lse = 0, which would count as a real
block), while a finite one gives an lse so low that the merge weighs the row with exactly zero. It is made for
a slice of the queries at a time, of at most `MASK_ELEMENTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models.attention import masked_attention, visibility_mask
from shardwise.models.products import multiplies_in_float32
from shardwise.models.torch_dtypes import wide

_aten = torch.ops.aten

Attended = tuple[Tensor, Tensor]
"""out and lse."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""
Documents = tuple[Tensor, Tensor]
"""Document numbers of the queries and of the keys, each (batch, tokens)."""

MASK_ELEMENTS = 1 << 26
_LSE_MULTIPLE = 32  # the efficient kernel's lse has rows of such a multiple
_BIAS_MULTIPLE = 16  # and the rows of its mask start at such a multiple


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block: `forward(query, key, value, causal, bias)`, and its backward.

    `backward` takes the gradient of out, the same, and the merged out and lse, after the query, key and
    value.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Attended]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Tensor | None], Gradients]
    shares_heads: bool = True
    fused: bool = True


def attend(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    documents: Documents | None = None,
) -> Attended:
    """Attention of a block; with `causal`, the i-th query sees the first i keys.

    `query` is (batch, heads, queries, head_dim), `key` and `value` are (batch, kv_heads, keys, head_dim).
    """
    if documents is None and kernel.fused:
        return kernel.forward(query, _for(kernel, query, key), _for(kernel, query, value), causal, None)
    slices = []  # of the queries, one after another: a mask for all of them at once may not fit
    for rows, seen, bias in _masked_slices(kernel, query, key, causal, documents):
        keys, values = (_for(kernel, query, tensor[:, :, seen]) for tensor in (key, value))
        slices.append(
            kernel.forward(query[:, :, rows], keys, values, False, bias)
        )  # (batch, heads, rows, head_dim), its lse
    return torch.cat([out for out, _ in slices], 2), torch.cat([lse for _, lse in slices], 2)


def attend_backward(
    kernel: Kernel,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merged: Attended,
    causal: bool,
    documents: Documents | None = None,
) -> Gradients:
    """What a block adds to the gradients of its queries, keys and values, given the out and lse over all
    blocks."""
    if documents is None and kernel.fused:
        keys, values = _for(kernel, query, key), _for(kernel, query, value)
        of_query, of_keys, of_values = kernel.backward(gradient, query, keys, values, *merged, causal, None)
        return of_query, _shared(of_keys, key), _shared(of_values, value)
    of_query = torch.empty_like(query)
    # A key is seen by several slices of the queries: its gradient is a sum, taken in the wide dtype.
    of_key, of_value = (torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in (key, value))
    for rows, seen, bias in _masked_slices(kernel, query, key, causal, documents):
        keys, values = (_for(kernel, query, tensor[:, :, seen]) for tensor in (key, value))
        out, lse = (tensor[:, :, rows] for tensor in merged)
        of_rows, of_keys, of_values = kernel.backward(
            gradient[:, :, rows], query[:, :, rows], keys, values, out, lse, False, bias
        )
        of_query[:, :, rows] = of_rows  # (batch, heads, rows, head_dim)
        of_key[:, :, seen] += _shared(of_keys, key[:, :, seen])  # (batch, kv_heads, seen, head_dim)
        of_value[:, :, seen] += _shared(of_values, value[:, :, seen])
    return of_query, of_key, of_value


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Put another block into `out` and `lse`, which hold the blocks so far, in place."""
    both = torch.logaddexp(lse, block_lse)  # (batch, heads, queries)
    out.mul_(
        (lse - both).exp_().unsqueeze(-1)
    )  # (batch, heads, queries, 1): each old row's share of the new sum
    out.addcmul_(block_out, (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each document and window of a whole sequence, by torch's own choice of
    kernel."""
    mask = visibility_mask(documents, torch.arange(query.shape[2], device=query.device), window)
    return masked_attention(query, key, value, mask, softcap)


def kernel_for(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Kernel:
    """The fastest kernel that takes these tensors. Ask before autograd is left: some kernels have no backward
    for some sizes."""
    if query.device.type == "cpu" and query.dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        return CPU
    if query.device.type == "cuda":
        return next((kernel for kernel, suits in _ON_CUDA if suits(query, key, value, masked)), PLAIN)
    return PLAIN


def _masked_slices(
    kernel: Kernel, query: Tensor, key: Tensor, causal: bool, documents: Documents | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Slices of the queries, the keys that each may see, and the mask between them where there is one.

    A mask is (batch or 1, 1, rows, seen). Under a causal one, the keys behind a slice's last query are left
    out altogether.
    """
    queries, keys = query.shape[2], key.shape[2]
    copies = query.shape[0] * (
        1 if kernel.fused else query.shape[1]
    )  # products without a fused kernel write each head's scores
    step = max(1, MASK_ELEMENTS // (copies * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = slice(0, rows.stop if causal else keys)
        hidden = _hidden(rows, seen, causal, documents, query.device)
        yield rows, seen, None if hidden is None else _bias(hidden, query.dtype)


def _hidden(
    rows: slice, seen: slice, causal: bool, documents: Documents | None, device: torch.device
) -> Tensor | None:
    """True where a query may not look: (batch or 1, 1, rows, seen)."""
    hidden: Tensor | None = None
    if causal:
        of_rows, of_seen = (
            torch.arange(part.start, part.stop, device=device) for part in (rows, seen)
        )  # positions
        hidden = (of_rows[:, None] < of_seen)[None, None]  # (1, 1, rows, seen)
    if documents is not None:
        of_queries, of_keys = documents[0][:, rows], documents[1][:, seen]
        other = (of_queries[:, :, None] != of_keys[:, None, :]).unsqueeze(1)  # (batch, 1, rows, seen)
        hidden = other if hidden is None else other.logical_or_(hidden)
    return hidden


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, of the same shape; its rows lie further apart than they are long, as one
    kernel wants them."""
    width = _multiple(hidden.shape[-1], _BIAS_MULTIPLE)
    bias = torch.zeros(*hidden.shape[:-1], width, dtype=dtype, device=hidden.device)[..., : hidden.shape[-1]]
    return bias.masked_fill_(hidden, -3e4 if dtype == torch.float16 else -1e30)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _for(kernel: Kernel, query: Tensor, key: Tensor) -> Tensor:
    return key if kernel.shares_heads else _repeated(query, key)


def _repeated(query: Tensor, key: Tensor) -> Tensor:
    """Keys or values with a head for each head of the queries."""
    repeats = query.shape[1] // key.shape[1]
    return key if repeats == 1 else key.repeat_interleave(repeats, 1)


def _shared(gradient: Tensor, key: Tensor) -> Tensor:
    """The gradient of keys or values, summed over the query heads that share one: (batch, kv_heads, keys,
    head_dim)."""
    if gradient.shape[1] == key.shape[1]:
        return gradient
    batch, heads, keys, head_dim = gradient.shape
    grouped = gradient.reshape(batch, key.shape[1], heads // key.shape[1], keys, head_dim)
    return grouped.sum(2, dtype=wide(gradient.dtype))


def _cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    dtype = _multiplied_in(query)
    block, mask = (
        (tensor.to(dtype) for tensor in (query, key, value)),
        None if bias is None else bias.to(dtype),
    )
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*block, 0.0, causal, attn_mask=mask)
    return out.to(query.dtype), lse


def _cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
) -> Gradients:
    dtype = _multiplied_in(query)
    block, mask = (
        (tensor.to(dtype) for tensor in (gradient, query, key, value, out)),
        None if bias is None else bias.to(dtype),
    )
    gradients: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *block, lse, 0.0, causal, attn_mask=mask
    )
    of_query, of_key, of_value = (tensor.to(query.dtype) for tensor in gradients)
    return of_query, of_key, of_value


def _multiplied_in(query: Tensor) -> torch.dtype:
    """The dtype in which the kernel for CPUs computes: that of the query, or float32 where this CPU has no
    bfloat16."""
    return torch.float32 if multiplies_in_float32(query.dtype, query.device.type) else query.dtype


def _cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    assert bias is None
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)
    return out, lse.reshape(out.shape[:-1])  # cuDNN's has a last dim of 1


def _cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
) -> Gradients:
    lengths = (None, None, query.shape[2], key.shape[2])
    gradients: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        gradient,
        query,
        key,
        value,
        out,
        lse.contiguous().unsqueeze(-1),
        *_no_dropout(query),
        None,
        *lengths,
        0.0,
        causal,
    )
    return gradients


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    assert bias is None
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
) -> Gradients:
    lengths = (None, None, query.shape[2], key.shape[2])
    gradients: Gradients = _aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse.contiguous(), *lengths, 0.0, causal, *_no_dropout(query)
    )
    return gradients


def _efficient(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    spread = (
        None if bias is None else bias.expand(*query.shape[:2], -1, -1)
    )  # (batch, heads, queries, keys), without a copy
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(query, key, value, spread, True, 0.0, causal)
    return out, lse[:, :, : query.shape[2]]  # its lse is padded to a multiple of queries


def _efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
) -> Gradients:
    spread = (
        None if bias is None else bias.expand(*query.shape[:2], -1, -1)
    )  # (batch, heads, queries, keys), without a copy
    rows = lse.shape[2]
    padded = F.pad(
        lse, (0, _multiple(rows, _LSE_MULTIPLE) - rows), value=math.inf
    )  # a row that weighs nothing
    wanted = (True, True, True, False)
    of_query, of_key, of_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
        gradient,
        query,
        key,
        value,
        spread,
        out,
        padded.contiguous(),
        *_no_dropout(query),
        0.0,
        wanted,
        causal,
    )
    return of_query, of_key, of_value


def _plain(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    scores = _scores(query, key, bias)
    lse = scores.logsumexp(-1)  # (batch, heads, queries)
    out = (scores - lse.unsqueeze(-1)).exp_() @ value.to(scores.dtype)  # (batch, heads, queries, head_dim)
    return out.to(query.dtype), lse


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
) -> Gradients:
    share = (
        _scores(query, key, bias) - lse.unsqueeze(-1)
    ).exp_()  # softmax over all blocks' keys: (batch, heads, queries, keys)
    gradient, query, key, value, out = (
        tensor.to(share.dtype) for tensor in (gradient, query, key, value, out)
    )
    # The backward of softmax takes off a row's mean gradient, Σ share · of_share over all keys, which is
    # gradient · out.
    of_share = gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)
    of_score = share * of_share * query.shape[-1] ** -0.5
    return of_score @ key, of_score.mT @ query, share.mT @ gradient


def _scores(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, heads, queries, keys), in the wide dtype."""
    dtype = wide(query.dtype)
    scores: Tensor = query.to(dtype) @ key.to(dtype).mT * query.shape[-1] ** -0.5
    return scores if bias is None else scores + bias


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a random generator that nobody asks."""
    seed = torch.empty(2, dtype=torch.int64, device=query.device)
    return seed, seed


def _cuda_call(query: Tensor, key: Tensor, value: Tensor) -> Any:
    grouped = key.shape[1] < query.shape[1]
    return torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)


def _cudnn_suits(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    fits = not masked and query.shape[-1] % 8 == 0
    return fits and torch.backends.cuda.can_use_cudnn_attention(_cuda_call(query, key, value))


def _flash_suits(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    fits = not masked and query.shape[-1] % 8 == 0  # other sizes torch would pad first
    return fits and torch.backends.cuda.can_use_flash_attention(_cuda_call(query, key, value))


def _efficient_suits(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    return torch.backends.cuda.can_use_efficient_attention(
        _cuda_call(query, query, query)
    )  # heads will be repeated


CPU = Kernel("cpu", _cpu, _cpu_backward)
CUDNN = Kernel("cudnn", _cudnn, _cudnn_backward)
FLASH = Kernel("flash", _flash, _flash_backward)
EFFICIENT = Kernel("efficient", _efficient, _efficient_backward, shares_heads=False)
PLAIN = Kernel("plain", _plain, _plain_backward, shares_heads=False, fused=False)
KERNELS = {kernel.name: kernel for kernel in (CPU, CUDNN, FLASH, EFFICIENT, PLAIN)}
_ON_CUDA = ((CUDNN, _cudnn_suits), (FLASH, _flash_suits), (EFFICIENT, _efficient_suits))
