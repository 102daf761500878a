"""The devices of this machine and of this process. On a CPU machine, workers share the cores evenly.

The process that starts workers asks here too. It can do without torch where there is no GPU, so torch is imported only to ask a
GPU, or to be a worker.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shardwise.mesh.launched import Worker, threads_of_worker

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt (malloc.h)."""
GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""What a driver puts into /dev: NVIDIA's for cards and for boards, AMD's, and Windows' for Linux inside it."""


def local_gpus() -> int:
    """GPUs that this process may use."""
    if not _has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_gpu_driver() -> bool:
    return any(True for pattern in GPU_FILES for _ in Path("/dev").glob(pattern))


def pick_device(worker: Worker, on_cpu: bool = False) -> torch.device:
    """The GPU with this worker's local number, or the CPU where there are fewer GPUs than workers or it is asked for."""
    import torch

    if not on_cpu and local_gpus() >= worker.local_world:
        device = torch.device("cuda", worker.local_rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads_of_worker(worker.local_world))
    _keep_freed_memory()
    return torch.device("cpu")


def _keep_freed_memory() -> None:
    """Let this process keep what tensors give back: a step needs as much as the one before. glibc hands large pieces back to the
    system and asks for them anew, and that takes as long as computing what goes into them (a step of ZeRO-2: a seventh).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(option, 2**31 - 1)


def device_name(device: torch.device) -> str:
    """The maker's name of a GPU; `cpu` for a CPU."""
    if device.type != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(device)


def device_memory(workers_here: int) -> float:
    """Bytes of memory one worker may count on: its GPU's, or its share of the machine's."""
    if local_gpus() >= workers_here:
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(psutil.virtual_memory().total) / workers_here
