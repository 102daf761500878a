"""Everything that shardwise uses from private parts of torch, in one place, each with its reason.

Check a new torch release against this file first.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._functorch.config as _functorch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class AutogradContext(Protocol):
    """The `ctx` of an autograd function, which holds what its forward keeps for its backward.

    torch declares it as `Any`: the attributes are those that the function sets.
    """

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for backward, which finds them in `saved_tensors`."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Declare outputs that have no gradient."""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


DispatchMode = TorchDispatchMode
"""A mode that sees every operator while it is active. torch has no public name for it."""


def default_store() -> Any:
    """Return the store through which the workers of the process group have met. torch hands it out by a
    private function only."""
    return dist.distributed_c10d._get_default_store()


Operator = torch._ops.OpOverload
"""An operator as a dispatch mode sees it. torch has no public name for its type."""


all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""All-gather into one tensor. torch 2.13 renamed `all_gather_into_tensor` and warns at each use of the old
name.
"""

reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Reduce-scatter from one tensor. torch 2.13 renamed `reduce_scatter_tensor` to this name."""


_NOT_ENOUGH_MEMORY = (
    "DefaultCPUAllocator:",
    "Storage size calculation overflowed",
    "Cannot allocate memory",
    "std::bad_alloc",
)
"""Texts in torch's RuntimeError for a CPU without enough memory.

torch has no exception for this case, and the text after the allocator's name depends on the processor.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory could not be allocated, on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NOT_ENOUGH_MEMORY)


def cpu_multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16 products. torch has no public function for
    it.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    # On other processors this function checks for the instructions themselves.
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_GPU_CLOCK = 1.5e9
"""Clock cycles per second of a GPU, roughly."""


def abort_nccl() -> None:
    """Abort all NCCL communicators of this process, so that collectives that wait for a lost peer end.

    torch's own function for this (`_abort_process_group`) also forgets the groups, while another thread may
    still use them. All are aborted together, because the abort of one can wait for another's kernel.
    """
    backends: list[Any] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            backends.append(group._get_backend(torch.device("cuda")))
        except RuntimeError:  # the group is for CPUs only
            continue
    nccl = [backend for backend in backends if backend.name() == "nccl"]
    if nccl:
        nccl[0]._group_start()
        for backend in reversed(nccl):
            backend.abort()
        nccl[0]._group_end()


def delay_stream(seconds: float) -> None:
    """Let the current stream of the GPU do nothing for about this long.

    torch has no public function for this.
    """
    torch.cuda._sleep(int(seconds * _GPU_CLOCK))


def set_activation_memory_budget(share: float) -> None:
    """Set how much memory the compiler may use for activations before it recomputes them.

    The setting is private.
    """
    _functorch.activation_memory_budget = share


def recompute_casts() -> None:
    """Let the compiler recompute 8-bit copies of tensors that backward has anyway, instead of saving them.

    By default it saves a copy that a matrix product reads. The setting is private.
    """
    _functorch.ban_recompute_materialized_backward = False


def compute_deterministically() -> None:
    """Let this process's GPU run only kernels that give the same bits in every run.

    Other kernels add numbers in the order in which threads arrive. The compiler also chooses kernels by
    timing them, which only a private setting turns off. Call this before the GPU is first used, because
    cuBLAS reads its setting then. torch raises an error that names any operator without a deterministic
    kernel.
    """
    import torch._inductor.config as inductor

    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Nothing here reads uninitialized memory, so filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if hasattr(inductor, "deterministic"):  # not in torch 2.11
        inductor.deterministic = True


def lock_progress_bars_among_threads() -> None:
    """Let tqdm lock its progress bars between the threads of this process only.

    The compiler uses a hidden progress bar while it walks a graph. By default tqdm locks bars between
    processes, with a semaphore that Python reports as leaked when a worker exits at once.
    """
    bar: object = getattr(torch.hub, "tqdm", None)
    if hasattr(bar, "set_lock"):  # it has none if tqdm is not installed
        bar.set_lock(threading.RLock())


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh whose axes are joined into one. The method is still private in torch 2.11 to 2.13."""
    return mesh._flatten(name)


def part_of(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh that these axes span, including joined axes.

    torch warns that slicing joined axes will work in another way one day, but there is no public way yet.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        return mesh[names] if len(names) > 1 else mesh[names[0]]


def count_groups_anew() -> None:
    """Reset torch's counter of process groups.

    Peers find each other by the number of a group. torch resets the counter when it destroys its groups, but
    not when joining the first group fails. A process that tries again would wait for its peers under another
    number.
    """
    dist.distributed_c10d._world.group_count = 0


def forget_meshes() -> None:
    """Empty DTensor's caches of how operations are sharded.

    The caches are never emptied by torch, and every entry holds the mesh that it was made for. Without this
    call, the process groups of a former team, with gloo's threads and sockets, would stay as long as the
    process.
    """
    from torch.distributed.tensor import _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # Some releases of torch do not have these two functions.
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def inside_backward() -> bool:
    """Return whether this thread runs a backward. A forward that runs there is a recomputation.

    torch's activation checkpointing asks in the same way. Do not call this inside a compiled graph, which
    would keep the answer from the time when it was traced.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def graph_owners(outputs: Iterable[torch.Tensor]) -> list[object]:
    """Return objects that keep the autograd graph of these outputs alive.

    The first half of a split backward detaches the outputs of a stage. Before torch 2.13, the node of an
    `autograd.Function` that only these outputs referred to is then freed, although the second half needs it.
    """
    if torch.__version__ >= "2.13":
        return []
    return [torch.autograd.graph.get_gradient_edge(output) for output in outputs if output.requires_grad]


def pipeline_runtime(
    stages: Sequence[object],
    micro_batches: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    actions: dict[int, list[str]],
) -> Any:
    """Return torch's executor of a list of pipeline actions. It adds the sends and receives itself.

    torch's ready-made schedules are public, but the executor behind them is not. An action is written as
    "3F0": stage, kind and micro-batch.
    """
    # Importing this module takes a second.
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime: Any = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss, scale_grads=False)
    parsed = {rank: [_Action.from_str(action) for action in texts] for rank, texts in actions.items()}
    runtime._prepare_schedule_with_comms(parsed)
    return runtime


def _groups(unit: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a unit. torch 2.11 stores its only group under another name."""
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def forget_forwards(unit: FSDPModule) -> None:
    """Delete FSDP2's record of forwards that were not followed by a backward.

    FSDP2 prefetches weights in a backward in the order of that record. After an evaluation the next backward
    would otherwise gather weights that it does not use.
    """
    for group in _groups(unit):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def reduce_gathered(unit: FSDPModule) -> None:
    """Reduce the unsharded gradients of an FSDP2 unit now.

    If reduction is turned off, add the new gradients to the unsharded sums, in the dtype of sums. FSDP2 does
    this itself at the end of a backward. After the two halves of a split backward, which autograd's hooks do
    not see, it must be called, as torch's own pipeline stages do.
    """
    for group in _groups(unit):
        group.post_backward()


@dataclass(frozen=True)
class UnitPiece:
    """A parameter of an FSDP2 unit."""

    module: torch.nn.Module
    """Module that the parameter belongs to."""
    name: str
    """Name of the parameter in its module."""
    shape: torch.Size
    """Shape of one device's shard, padded where shards are not equal."""
    trained: bool
    """Whether the parameter is trained. A frozen one is gathered with the others and has no gradient."""


def unit_pieces(unit: FSDPModule) -> Iterator[UnitPiece]:
    """Yield the parameters of a unit in the order in which FSDP2 puts them into its buffers.

    The buffers of gradients contain only the trained ones.
    """
    for group in _groups(unit):
        for parameter in group.fsdp_params:
            info, trained = parameter._module_info, parameter.sharded_param.requires_grad
            yield UnitPiece(info.module, info.param_name, parameter.padded_sharded_param_size, trained)


@torch.no_grad()
def add_to_gradients(unit: FSDPModule, sums: torch.Tensor) -> None:
    """Add this device's shards of gradient sums to a unit's gradients, as FSDP2 would have done.

    The shards are in `sums` in the order of `unit_pieces`. Frozen weights have none.
    """
    start = sums.storage_offset()  # `as_strided` counts from the beginning of the storage
    for group in _groups(unit):
        for parameter in (each for each in group.fsdp_params if each.sharded_param.requires_grad):
            piece = torch.as_strided(sums, parameter.sharded_size, parameter.contiguous_sharded_stride, start)
            parameter.sharded_param.grad._local_tensor.add_(piece.to(parameter.sharded_param.grad.dtype))
            start += parameter.padded_sharded_param_size.numel()


def end_backward(root: FSDPModule) -> None:
    """Wait for the reductions, and reset FSDP2 as after an ordinary backward."""
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def float8_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `left @ right` of float8 matrices, multiplied by one scale for each; `right` is column-major.

    torch has no public name for it yet.
    """
    return torch._scaled_mm(
        left, right, scale_a=scale_left, scale_b=scale_right, out_dtype=dtype, use_fast_accum=True
    )
