"""The devices of this machine and of this process. On a machine without GPUs, workers share the cores evenly.

The process that starts workers uses this module too. It does not need torch where there is no GPU, so torch
is imported only to query a GPU, or in a worker.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shardwise.errors import UserError
from shardwise.mesh.environment import Worker, gpus_are_hidden, threads_of_worker

if TYPE_CHECKING:
    import torch

    from shardwise.config.machine import Device

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt` (malloc.h)."""
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory in bytes that a container may use, of both versions of Linux's control groups."""
GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""Patterns of the files that a GPU driver creates in /dev: NVIDIA's for cards and for boards, AMD's, and that
of Windows for Linux.
"""


def local_gpus() -> int:
    """Return the number of GPUs that this process may use. torch is not imported if there is no driver."""
    if not _has_gpu_driver() or gpus_are_hidden():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_gpu_driver() -> bool:
    return any(True for pattern in GPU_FILES for _ in Path("/dev").glob(pattern))


def uses_gpus(workers: int, asked: Device = "auto") -> bool:
    """Return whether this number of workers on this machine compute on GPUs.

    They do if each worker has its own GPU, or if the user asked for GPUs (`run.device`).
    """
    if asked == "cuda" and not local_gpus():
        raise UserError(
            "run.device = 'cuda': this machine has no GPU that torch can use; leave it out, or see "
            "`shardwise doctor`"
        )
    return asked == "cuda" or (asked == "auto" and local_gpus() >= workers)


def gpus_are_shared(workers: int) -> bool:
    """Return whether this machine has more workers than GPUs, so that some share one."""
    return workers > local_gpus()


def pick_device(worker: Worker, asked: Device = "auto") -> torch.device:
    """Return the device of a worker: the GPU with its local rank, or the CPU.

    The CPU is used where there are fewer GPUs than workers, or where the user asked for it. If the user asked
    for GPUs, workers share them.
    """
    import torch

    if uses_gpus(worker.local_world, asked):
        device = torch.device("cuda", worker.local_rank % local_gpus())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads_of_worker(worker.local_world))
    _keep_freed_memory()
    return torch.device("cpu")


def _keep_freed_memory() -> None:
    """Let this process keep the memory that tensors free, because the next step needs as much again.

    glibc returns large blocks to the system and requests them again. That takes as long as computing their
    contents: a seventh of a step with ZeRO-2.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do not have it
    if mallopt is not None:
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)


def device_name(device: torch.device) -> str:
    """Return the maker's name of a GPU, or `cpu` for a CPU."""
    if device.type != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(device)


def device_memory(workers_here: int, asked: Device = "auto") -> float:
    """Return the bytes of memory that one worker may use: of its GPU, or its share of a GPU or of the
    machine.
    """
    if uses_gpus(workers_here, asked):
        import torch

        sharing = -(-workers_here // local_gpus())
        return float(torch.cuda.get_device_properties(0).total_memory) / sharing
    return machine_memory() / workers_here


def machine_memory() -> float:
    """Return the bytes of memory of this machine, or the part that its container may use."""
    total = psutil.virtual_memory().total
    limits = [path.read_text().strip() for path in CONTAINER_LIMITS if path.is_file()]
    return float(min([total, *(int(limit) for limit in limits if limit.isdigit())]))
