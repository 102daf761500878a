"""Attention of some queries to some keys, in a form whose results can be merged.

Softmax attention over all keys is a weighted mean of values. If the keys come in blocks, the attention `out`
of each block and the logarithm `lse` of its sum of exponentials are enough to compute the mean over all keys:

    lse = log(exp(lse₁) + exp(lse₂))        out = exp(lse₁ - lse) out₁ + exp(lse₂ - lse) out₂

and the gradient of a block needs only the *merged* out and lse beside its queries, keys and values, because
the probability of a key is exp(score - lse) in any block (Dao et al., "FlashAttention", 2022; Liu et al.,
"Blockwise Parallel Transformer", 2023). So a block runs through the device's fused kernel as it is, forward
and backward. The public `scaled_dot_product_attention` does not return the lse; the operators beneath it do,
and here all of them use one shape: (batch, heads, queries, head_dim) for out, (batch, heads, queries) for
lse, in float32, or float64 where out is.

| kernel    | where                           | grouped-query                          | document mask |
| --------- | ------------------------------- | -------------------------------------- | ------------- |
| cpu       | CPU                             | shares heads                           | yes           |
| cudnn     | CUDA, 16 bits: the fastest      | shares heads                           | no            |
| flash     | CUDA, 16 bits                   | shares heads                           | no            |
| efficient | CUDA, also float32              | repeats keys and values for each block | yes           |
| plain     | anywhere: matrix products       | repeats keys and values for each block | yes           |

A mask is added to the scores as a large negative number, never as minus infinity. With infinity, kernels
return different results for a row without any visible key (on a CPU lse = 0, which would count as a real
block); a finite number gives an lse so low that the merge gives the row a weight of exactly zero. A mask is
made for a slice of the queries at a time, of at most `MASK_ELEMENTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models.attention import masked_attention, visibility_mask
from shardwise.models.products import multiplies_in_float32
from shardwise.models.torch_dtypes import wide

_aten = torch.ops.aten

Attended = tuple[Tensor, Tensor]
"""Result of attention and its log-sum-exp: (out, lse)."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""
Documents = tuple[Tensor, Tensor]
"""Document numbers of the queries and of the keys, each (batch, tokens)."""

MASK_ELEMENTS = 1 << 26
"""Number of elements that a mask has at most."""
_LSE_MULTIPLE = 32  # the efficient kernel pads its lse to a multiple of this number of queries
_BIAS_MULTIPLE = 16  # the efficient kernel needs the rows of its mask to start at a multiple of this


class BackwardTensors(NamedTuple):
    """Tensors that the backward of a block reads, in the order of torch's kernels."""

    gradient: Tensor
    """Gradient of `out`, the result of attention."""
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    """Result of attention over all blocks of keys."""
    lse: Tensor
    """Log-sum-exp of the scores of each query over all blocks of keys."""

    def to(self, dtype: torch.dtype) -> BackwardTensors:
        """Return all tensors but lse in this dtype."""
        gradient, query, key, value, out = (tensor.to(dtype) for tensor in self[:5])
        return BackwardTensors(gradient, query, key, value, out, self.lse)


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block: `forward(query, key, value, causal, bias)` and `backward(tensors, causal,
    bias)`."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Attended]
    backward: Callable[[BackwardTensors, bool, Tensor | None], Gradients]
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
    """Return the attention of a block; with `causal`, the i-th query sees the first i keys.

    `query` is (batch, heads, queries, head_dim), `key` and `value` are (batch, kv_heads, keys, head_dim).
    """
    if documents is None and kernel.fused:
        keys, values = _match_heads(kernel, query, key, value)
        return kernel.forward(query, keys, values, causal, None)
    slices = []  # results of slices of the queries: a mask for all queries at once may not fit in memory
    for rows, seen, bias in _masked_slices(kernel, query, key, causal, documents):
        keys, values = _match_heads(kernel, query, key[:, :, seen], value[:, :, seen])
        slices.append(kernel.forward(query[:, :, rows], keys, values, False, bias))
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
    """Return what a block adds to the gradients of its queries, keys and values, given the out and lse over
    all blocks."""
    if documents is None and kernel.fused:
        keys, values = _match_heads(kernel, query, key, value)
        tensors = BackwardTensors(gradient, query, keys, values, *merged)
        of_query, of_keys, of_values = kernel.backward(tensors, causal, None)
        return of_query, _sum_shared(of_keys, key), _sum_shared(of_values, value)
    of_query = torch.empty_like(query)
    # Several slices of the queries see a key: its gradient is a sum, taken in the wide dtype.
    of_key, of_value = (torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in (key, value))
    for rows, seen, bias in _masked_slices(kernel, query, key, causal, documents):
        keys, values = _match_heads(kernel, query, key[:, :, seen], value[:, :, seen])
        of_out, queries, out, lse = (tensor[:, :, rows] for tensor in (gradient, query, *merged))
        tensors = BackwardTensors(of_out, queries, keys, values, out, lse)
        of_rows, of_keys, of_values = kernel.backward(tensors, False, bias)
        of_query[:, :, rows] = of_rows  # (batch, heads, rows, head_dim)
        of_key[:, :, seen] += _sum_shared(of_keys, key[:, :, seen])  # (batch, kv_heads, seen, head_dim)
        of_value[:, :, seen] += _sum_shared(of_values, value[:, :, seen])
    return of_query, of_key, of_value


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge another block in place into `out` and `lse`, which hold the blocks so far."""
    both = torch.logaddexp(lse, block_lse)  # (batch, heads, queries)
    out.mul_((lse - both).exp_().unsqueeze(-1))  # (batch, heads, queries, 1): the old rows' share of the sum
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
    """Return causal attention within each document and window of a whole sequence, by a kernel that torch
    chooses."""
    mask = visibility_mask(documents, torch.arange(query.shape[2], device=query.device), window)
    return masked_attention(query, key, value, mask, softcap)


def kernel_for(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Kernel:
    """Return the fastest kernel that takes these tensors; call this while autograd records, because some
    kernels have no backward for some sizes."""
    if query.device.type == "cpu" and query.dtype in _CPU_DTYPES:
        return CPU
    if query.device.type == "cuda":
        return next((kernel for kernel, suits in _ON_CUDA if suits(query, key, value, masked)), PLAIN)
    return PLAIN


def _masked_slices(
    kernel: Kernel, query: Tensor, key: Tensor, causal: bool, documents: Documents | None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield slices of the queries, the keys that each may see, and the mask between them, if there is one.

    A mask is (batch or 1, 1, rows, seen). Under a causal one, keys after a slice's last query are left out.
    """
    queries, keys = query.shape[2], key.shape[2]
    # Without a fused kernel, the scores of every head are in memory.
    copies = query.shape[0] * (1 if kernel.fused else query.shape[1])
    step = max(1, MASK_ELEMENTS // (copies * keys))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        seen = slice(0, rows.stop if causal else keys)
        hidden = _hidden(rows, seen, causal, documents, query.device)
        yield rows, seen, None if hidden is None else _bias(hidden, query.dtype)


def _hidden(
    rows: slice, seen: slice, causal: bool, documents: Documents | None, device: torch.device
) -> Tensor | None:
    """Return a mask that is true where a query must not see a key: (batch or 1, 1, rows, seen)."""
    hidden: Tensor | None = None
    if causal:
        queries, keys = (torch.arange(part.start, part.stop, device=device) for part in (rows, seen))
        hidden = (queries[:, None] < keys)[None, None]  # (1, 1, rows, seen)
    if documents is not None:
        of_queries, of_keys = documents[0][:, rows], documents[1][:, seen]
        other = (of_queries[:, :, None] != of_keys[:, None, :]).unsqueeze(1)  # (batch, 1, rows, seen)
        hidden = other if hidden is None else other.logical_or_(hidden)
    return hidden


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores, with a padded row stride, as the efficient kernel needs it."""
    width = _multiple(hidden.shape[-1], _BIAS_MULTIPLE)
    bias = torch.zeros(*hidden.shape[:-1], width, dtype=dtype, device=hidden.device)[..., : hidden.shape[-1]]
    return bias.masked_fill_(hidden, -3e4 if dtype == torch.float16 else -1e30)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _match_heads(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the kernel needs: as they are, or one per query head."""
    repeats = query.shape[1] // key.shape[1]
    if kernel.shares_heads or repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _sum_shared(gradient: Tensor, key: Tensor) -> Tensor:
    """Return the gradient of keys or values, summed over the query heads that share a key head: (batch,
    kv_heads, keys, head_dim)."""
    if gradient.shape[1] == key.shape[1]:
        return gradient
    batch, heads, keys, head_dim = gradient.shape
    grouped = gradient.reshape(batch, key.shape[1], heads // key.shape[1], keys, head_dim)
    return grouped.sum(2, dtype=wide(gradient.dtype))


def _cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    dtype = _kernel_dtype(query)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query.to(dtype), key.to(dtype), value.to(dtype), 0.0, causal, attn_mask=_cast(bias, dtype)
    )
    return out.to(query.dtype), lse


def _cpu_backward(tensors: BackwardTensors, causal: bool, bias: Tensor | None) -> Gradients:
    dtype = _kernel_dtype(tensors.query)
    gradients: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors.to(dtype), 0.0, causal, attn_mask=_cast(bias, dtype)
    )
    of_query, of_key, of_value = (gradient.to(tensors.query.dtype) for gradient in gradients)
    return of_query, of_key, of_value


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _kernel_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which the CPU kernel computes: that of the query, or float32 where this CPU has no
    bfloat16."""
    return torch.float32 if multiplies_in_float32(query.dtype, query.device.type) else query.dtype


def _cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    assert bias is None
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)
    return out, lse.reshape(out.shape[:-1])  # cuDNN's lse has a last dim of 1


def _cudnn_backward(tensors: BackwardTensors, causal: bool, bias: Tensor | None) -> Gradients:
    given = tensors._replace(lse=tensors.lse.contiguous().unsqueeze(-1))
    gradients: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        *given, *_no_dropout(given.query), None, *_lengths(given), 0.0, causal
    )
    return gradients


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    assert bias is None
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def _flash_backward(tensors: BackwardTensors, causal: bool, bias: Tensor | None) -> Gradients:
    given = tensors._replace(lse=tensors.lse.contiguous())
    gradients: Gradients = _aten._scaled_dot_product_flash_attention_backward(
        *given, *_lengths(given), 0.0, causal, *_no_dropout(given.query)
    )
    return gradients


def _expand(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the mask as (batch, heads, queries, keys), without a copy."""
    return None if bias is None else bias.expand(*query.shape[:2], -1, -1)


def _efficient(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    mask = _expand(bias, query)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, causal)
    return out, lse[:, :, : query.shape[2]]  # the kernel pads its lse


def _efficient_backward(tensors: BackwardTensors, causal: bool, bias: Tensor | None) -> Gradients:
    gradient, query, key, value, out, lse = tensors
    rows = lse.shape[2]
    # An infinite lse gives a padded row a weight of zero.
    padded = F.pad(lse, (0, _multiple(rows, _LSE_MULTIPLE) - rows), value=math.inf).contiguous()
    mask, needed = _expand(bias, query), (True, True, True, False)
    of_query, of_key, of_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, mask, out, padded, *_no_dropout(query), 0.0, needed, causal
    )
    return of_query, of_key, of_value


def _plain(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None) -> Attended:
    scores = _scores(query, key, bias)
    lse = scores.logsumexp(-1)  # (batch, heads, queries)
    out = (scores - lse.unsqueeze(-1)).exp_() @ value.to(scores.dtype)  # (batch, heads, queries, head_dim)
    return out.to(query.dtype), lse


def _plain_backward(tensors: BackwardTensors, causal: bool, bias: Tensor | None) -> Gradients:
    # Softmax over the keys of all blocks: (batch, heads, queries, keys).
    probability = (_scores(tensors.query, tensors.key, bias) - tensors.lse.unsqueeze(-1)).exp_()
    gradient, query, key, value, out, _ = tensors.to(probability.dtype)
    # The backward of softmax subtracts a row's mean gradient over all keys, which is gradient · out.
    of_probability = gradient @ value.mT - (gradient * out).sum(-1, keepdim=True)
    of_score = probability * of_probability * query.shape[-1] ** -0.5
    return of_score @ key, of_score.mT @ query, probability.mT @ gradient


def _scores(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Return the scores (batch, heads, queries, keys), in the wide dtype."""
    dtype = wide(query.dtype)
    scores: Tensor = query.to(dtype) @ key.to(dtype).mT * query.shape[-1] ** -0.5
    return scores if bias is None else scores + bias


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return a state of the random generator, which kernels take but do not use without dropout."""
    seed = torch.empty(2, dtype=torch.int64, device=query.device)
    return seed, seed


def _lengths(tensors: BackwardTensors) -> tuple[None, None, int, int]:
    """Return what kernels take about lengths: no sequences of unequal length, and the queries and keys."""
    return None, None, tensors.query.shape[2], tensors.key.shape[2]


def _cuda_call(query: Tensor, key: Tensor, value: Tensor) -> torch.backends.cuda.SDPAParams:
    grouped = key.shape[1] < query.shape[1]
    return torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)


def _cudnn_suits(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    fits = not masked and query.shape[-1] % 8 == 0
    return fits and torch.backends.cuda.can_use_cudnn_attention(_cuda_call(query, key, value))


def _flash_suits(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    fits = not masked and query.shape[-1] % 8 == 0  # torch would pad other sizes first
    return fits and torch.backends.cuda.can_use_flash_attention(_cuda_call(query, key, value))


def _efficient_suits(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    call = _cuda_call(query, query, query)  # heads will be repeated
    return torch.backends.cuda.can_use_efficient_attention(call)


CPU = Kernel("cpu", _cpu, _cpu_backward)
CUDNN = Kernel("cudnn", _cudnn, _cudnn_backward)
FLASH = Kernel("flash", _flash, _flash_backward)
EFFICIENT = Kernel("efficient", _efficient, _efficient_backward, shares_heads=False)
PLAIN = Kernel("plain", _plain, _plain_backward, shares_heads=False, fused=False)
KERNELS = {kernel.name: kernel for kernel in (CPU, CUDNN, FLASH, EFFICIENT, PLAIN)}
_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ON_CUDA = ((CUDNN, _cudnn_suits), (FLASH, _flash_suits), (EFFICIENT, _efficient_suits))
