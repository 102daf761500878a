"""In which dtype sums are taken, on a layout and on one device.

What is added up in bfloat16 loses whatever is below 1/256 of the sum so far, so sums are taken in float32
(plan/dtypes.py). A layout has some that one device does not: the blocks of a ring, the parts of a sum over
devices. Numbers do not show whether it keeps to that: in float64 every sum is in float64, and in bfloat16 a
few roundings more cost less than a layout is allowed. So the first step is run once more in bfloat16, and
every sum in 16 bits is noted with the function that takes it. Those of one device are what the model itself
asks for; a layout that has others is wrong.

A sum here is an addition in place, a reduction over a dim or by an index, or a collective. Products of
matrices are not: their kernels sum in float32 and round once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import DispatchMode
from shardwise.comm import gloo
from shardwise.mesh import Worker, host_memory_group
from shardwise.parallel import ring
from shardwise.verify.job import ProofJob
from shardwise.verify.measure import build_proof, watch
from shardwise.verify.reports import ShortSum

_IN_PLACE = ("add_", "sub_", "addcmul_", "addcdiv_", "addmm_", "addbmm_", "baddbmm_", "_foreach_add_")
_REDUCTIONS = ("sum", "cumsum", "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_",
"_index_put_impl_",
               "scatter_reduce", "scatter_reduce_", "embedding_dense_backward")  # fmt: skip
_COLLECTIVES = ("allreduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
SUMMING = frozenset((*_IN_PLACE, *_REDUCTIONS, *_COLLECTIVES))
"""Operators that add up, by their names without overload."""
SHORT = (torch.bfloat16, torch.float16)
ACTIVATIONS = frozenset(
    (name, "shardwise/comm/comm.py reduce_scatter")
    for name in ("_reduce_scatter_base_", "reduce_scatter_", "add_")
)
"""By design in the dtype of the activations: the partial products of a matrix that tensor devices split by
its inputs."""
AUTOGRAD = "autograd"


class SumRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes every sum in 16 bits while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.short: dict[ShortSum, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ring.RING:  # an operator of ours, with sums inside
            with self:
                return ring.around(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in SUMMING and _first_dtype(result, args) in SHORT:
            self.short[name, _caller(sys._getframe(1))] = None
        return result


def _first_dtype(*values: Any) -> torch.dtype | None:
    """Of the first tensor in a result, or else in the arguments: a collective returns its work."""
    for value in values:
        if isinstance(value, Tensor):
            return value.dtype
        if isinstance(value, list | tuple) and (dtype := _first_dtype(*value)) is not None:
            return dtype
    return None


def _caller(frame: FrameType | None) -> str:
    """The innermost function outside of torch, our reduce-scatter and our group, as "file function", unless
    autograd's engine calls from within."""
    here = Path(torch.__file__).parent
    ours = (Path(gloo.__file__), Path(host_memory_group.__file__))
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if here not in path.parents and path not in ours:
            return f"{'/'.join(path.parts[-3:])} {frame.f_code.co_name}"
        if frame.f_code.co_name == "_engine_run_backward":
            break
        frame = frame.f_back
    return AUTOGRAD


def short_sums(worker: Worker, proof: ProofJob) -> list[ShortSum]:
    """Sums in 16 bits of the first step, on this rank."""
    training = build_proof(worker, proof)
    with SumRecorder() as recorder:
        watch(training, 1, lambda step: None)
    return [found for found in recorder.short if found not in ACTIVATIONS]
