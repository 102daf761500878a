"""Everything shardwise takes from private parts of torch, in one place, each with its reason.

A new torch release is checked against this file first.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as _functorch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""Sees every operator while it is entered. Used all over the field, but torch has no public name for it."""


def writes_to_its_input(operator: Any) -> bool:
    """Whether an operator, as a dispatch mode sees it, changes one of its inputs. Only its private schema
    tells."""
    return bool(operator._schema.is_mutable)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor is in, the same for its views. On the meta device there is no
    address, and torch has no public name for it."""
    return int(tensor.untyped_storage()._cdata)


all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""torch 2.13 renames `all_gather_into_tensor`, which 2.11 has, and warns at each use of the old name."""

reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Likewise for `reduce_scatter_tensor`."""


_NOT_ENOUGH_MEMORY = (
    "DefaultCPUAllocator:",
    "Storage size calculation overflowed",
    "Cannot allocate memory",
    "std::bad_alloc",
)
"""What torch writes into a RuntimeError where a CPU has not enough memory. It has no exception for that, and
what follows the name of the allocator differs between processors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory for a tensor could not be allocated, on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NOT_ENOUGH_MEMORY)


def cpu_multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for products of bfloat16 numbers. torch has no public
    name for that."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )  # on other processors, it asks for the instructions


def set_activation_memory_budget(share: float) -> None:
    """The compiler's trade of memory against recomputation; it has no public setting."""
    _functorch.activation_memory_budget = share


def recompute_casts() -> None:
    """Let the compiler make 8-bit copies of what backward has anyway once more, instead of keeping them: it
    does not by itself where a product reads them. It has no public setting."""
    _functorch.ban_recompute_materialized_backward = False


def compute_deterministically() -> None:
    """From now on this process's GPU runs only kernels that give the same bits again. Others add as threads
    arrive; and the compiler chooses among kernels by timing them, which only a private setting stops.

    To be called before the GPU is first used, when cuBLAS reads its setting. torch refuses what has no such
    kernel, by name.
    """
    import torch._inductor.config as inductor

    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # nobody reads it before writing
    if hasattr(inductor, "deterministic"):  # not in torch 2.11
        inductor.deterministic = True


def lock_progress_bars_among_threads() -> None:
    """The compiler walks its graphs behind a progress bar that nobody sees, and tqdm locks bars among
    processes: by a semaphore, which Python calls leaked when a worker leaves at once. A worker's bars are its
    own.
    """
    bar: Any = getattr(torch.hub, "tqdm", None)
    if hasattr(bar, "set_lock"):  # else tqdm is not installed
        bar.set_lock(threading.RLock())


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the axes of a mesh into one; still underscored in torch 2.11 to 2.13."""
    return mesh._flatten(name)


def part_of(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The part of a mesh that these dimensions span, joined ones among them: torch warns that it wants
    another way for those one day, and has none yet that is public.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        return mesh[names] if len(names) > 1 else mesh[names[0]]


def count_groups_anew() -> None:
    """Groups are numbered, and peers find each other by these numbers. torch begins anew when it leaves its
    groups, but not where joining the first one failed; a process that tries again would wait for its peers
    under another number.
    """
    dist.distributed_c10d._world.group_count = 0


def forget_meshes() -> None:
    """Empty DTensor's caches of how operations are split. They never forget by themselves, and every entry
    holds the mesh it was made on: the groups of a team that has parted, with the threads and sockets of gloo,
    would stay for as long as the process.
    """
    from torch.distributed.tensor import _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # Not all releases of torch have these two.
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def inside_backward() -> bool:
    """Whether this thread is running a backward: a forward seen there is a recomputation. torch's own
    checkpointing asks so.

    To be asked outside of compiled graphs, which would keep the answer of the day they were traced.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def pipeline_runtime(
    stages: list[Any], micro_batches: int, loss: Callable[[Any, Any], Any], actions: dict[int, list[str]]
) -> Any:
    """torch's executor of a list of pipeline actions, which it completes with sends and receives. The
    ready-made schedules are public, the executor behind them is not yet. Actions are written as in "3F0":
    stage, kind, micro-batch.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime  # a second to import

    runtime: Any = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        stages, micro_batches, loss_fn=loss, scale_grads=False
    )
    parsed = {rank: [_Action.from_str(action) for action in own] for rank, own in actions.items()}
    runtime._prepare_schedule_with_comms(parsed)
    return runtime


def _groups(unit: FSDPModule) -> list[Any]:
    """What FSDP2 keeps of a unit: one group of parameters, which torch 2.11 keeps under another name."""
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def forget_forwards(unit: FSDPModule) -> None:
    """Drop FSDP2's record of forwards that no backward followed. It prefetches weights in a backward by that
    record, and after an evaluation the next backward would gather weights that it does not use.
    """
    for group in _groups(unit):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def reduce_gathered(unit: FSDPModule) -> None:
    """Reduce the gradients that FSDP2 holds whole, now; where it is told not to, add to them what has come,
    in the dtype of sums. It does so by itself when a backward ends; after the halves of a split backward,
    which autograd's hooks do not see, it has to be told, as torch's own pipeline stages do.
    """
    for group in _groups(unit):
        group.post_backward()


@dataclass(frozen=True)
class UnitPiece:
    """A parameter of an FSDP2 unit."""

    module: torch.nn.Module
    name: str
    """In that module."""
    shape: torch.Size
    """Of one device's piece, padded where pieces are not equal."""
    trained: bool
    """Else it is frozen: gathered with the others, and without a gradient."""


def unit_pieces(unit: FSDPModule) -> Iterator[UnitPiece]:
    """The parameters of a unit, in the order in which FSDP2 lays them one after the other; of gradients,
    those trained."""
    for group in _groups(unit):
        for parameter in group.fsdp_params:
            info, trained = parameter._module_info, parameter.sharded_param.requires_grad
            yield UnitPiece(info.module, info.param_name, parameter.padded_sharded_param_size, trained)


@torch.no_grad()
def add_to_gradients(unit: FSDPModule, sums: torch.Tensor) -> None:
    """Add to a unit's gradients what FSDP2 would have added: this device's pieces, which lie in `sums` as in
    `unit_pieces`. Frozen weights have none."""
    start = sums.storage_offset()  # where a stride begins is counted in the storage
    for group in _groups(unit):
        for parameter in (own for own in group.fsdp_params if own.sharded_param.requires_grad):
            piece = torch.as_strided(sums, parameter.sharded_size, parameter.contiguous_sharded_stride, start)
            parameter.sharded_param.grad._local_tensor.add_(piece.to(parameter.sharded_param.grad.dtype))
            start += parameter.padded_sharded_param_size.numel()


def end_backward(root: FSDPModule) -> None:
    """Wait for the reductions, and leave FSDP2 as after an ordinary backward."""
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def float8_mm(
    left: torch.Tensor, right: torch.Tensor, of_left: torch.Tensor, of_right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`left @ right` of float8 numbers, times a factor for each; torch has no public name for it yet. `right`
    lies column by column."""
    return torch._scaled_mm(
        left, right, scale_a=of_left, scale_b=of_right, out_dtype=dtype, use_fast_accum=True
    )
