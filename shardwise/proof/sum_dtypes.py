"""Check in which dtype a layout takes its sums, compared with one device.

A sum in bfloat16 loses whatever is below 1/256 of the sum so far, so sums are taken in float32
(plans/dtypes.py). A layout has some sums that one device does not have: the blocks of ring attention, the
partial sums over devices. The numbers do not show whether these are in float32. In float64 every sum is in
float64, and in bfloat16 a few more roundings cost less than a layout is allowed. So the first step is run
once more in bfloat16, and every sum in 16 bits is recorded with the function that takes it. The sums of one
device are those that the model itself asks for; a layout with any other is wrong.

A sum here is an addition in place, a reduction over a dim or by an index, or a collective. Matrix products
are not included, because their kernels sum in float32 and round once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import DispatchMode, Operator
from shardwise.comm import gloo
from shardwise.mesh import Worker
from shardwise.parallel import ring
from shardwise.proof.compare_layout import build_proof, watch
from shardwise.proof.proof_job import ProofJob
from shardwise.proof.rank_reports import ShortSum

_IN_PLACE = ("add_", "sub_", "addcmul_", "addcdiv_", "addmm_", "addbmm_", "baddbmm_", "_foreach_add_")
_BY_INDEX = ("index_add", "index_add_", "index_put_", "_index_put_impl_", "embedding_dense_backward")
_REDUCTIONS = ("sum", "cumsum", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
_COLLECTIVES = ("allreduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
SUMMING = frozenset((*_IN_PLACE, *_BY_INDEX, *_REDUCTIONS, *_COLLECTIVES))
"""Names without overload of the operators that add up."""
SHORT = (torch.bfloat16, torch.float16)
ACTIVATIONS = frozenset(
    (name, "shardwise/comm/comm.py reduce_scatter")
    for name in ("_reduce_scatter_base_", "reduce_scatter_", "add_")
)
"""Sums that are in the dtype of the activations by design: the partial products of a matrix that tensor
devices split by its inputs."""
AUTOGRAD = "autograd"


class SumRecorder(DispatchMode):
    """Records every sum in 16 bits while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.short: dict[ShortSum, None] = {}

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = call_operator(self, func, args, kwargs or {})
        name = func.overloadpacket.__name__
        if name in SUMMING and _first_dtype(result, args) in SHORT:
            self.short[name, _caller(sys._getframe(1))] = None
        return result


def call_operator(
    mode: DispatchMode, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Call an operator that a mode has seen. The mode also sees the operators inside our own operator."""
    if operator is ring.RING:
        with mode:
            return ring.ring_forward(*args, **kwargs)
    return operator(*args, **kwargs)


def _first_dtype(*values: object) -> torch.dtype | None:
    """Return the dtype of the first tensor among the values.

    The result is searched before the arguments, because a collective returns a work handle and no tensor.
    """
    for value in values:
        if isinstance(value, Tensor):
            return value.dtype
        if isinstance(value, list | tuple) and (dtype := _first_dtype(*value)) is not None:
            return dtype
    return None


def _caller(frame: FrameType | None) -> str:
    """Return the innermost function outside torch and our reduce-scatter, as "file function"; or "autograd"
    if autograd's engine made the call."""
    here, ours = Path(torch.__file__).parent, Path(gloo.__file__)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if here not in path.parents and path != ours:
            return f"{'/'.join(path.parts[-3:])} {frame.f_code.co_name}"
        if frame.f_code.co_name == "_engine_run_backward":
            break
        frame = frame.f_back
    return AUTOGRAD


def short_sums(worker: Worker, proof: ProofJob) -> list[ShortSum]:
    """Return the sums in 16 bits that this rank takes in the first step."""
    training = build_proof(worker, proof)
    with SumRecorder() as recorder:
        watch(training, 1, lambda step: None)
    return [short_sum for short_sum in recorder.short if short_sum not in ACTIVATIONS]
