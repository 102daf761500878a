"""The devices of this machine and of this process. On a CPU machine, workers share the cores evenly.

The process that starts workers asks here too. It can do without torch where there is no GPU, so torch is
imported only to ask a GPU, or to be a worker.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from shardwise.errors import UserError
from shardwise.mesh.launched import Worker, gpus_are_hidden, threads_of_worker

if TYPE_CHECKING:
    import torch

    from shardwise.config import Device

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt (malloc.h)."""
GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""What a driver puts into /dev: NVIDIA's for cards and for boards, AMD's, and Windows' for Linux inside
it."""


def local_gpus() -> int:
    """Number of GPUs that this process may use. Torch is not imported where the answer is 0 without it."""
    if not _has_gpu_driver() or gpus_are_hidden():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_gpu_driver() -> bool:
    return any(True for pattern in GPU_FILES for _ in Path("/dev").glob(pattern))


def on_gpus(workers: int, asked: Device = "auto") -> bool:
    """Whether so many workers of this machine compute on GPUs: where each has one, or where that is asked for
    (`run.device`)."""
    if asked == "cuda" and not local_gpus():
        raise UserError(
            "run.device = 'cuda': this machine has no GPU that torch can use; leave it out, or see "
            "`shardwise doctor`"
        )
    return asked == "cuda" or (asked == "auto" and local_gpus() >= workers)


def share_gpus(workers: int) -> bool:
    """Whether there are more workers of this machine than GPUs; what they send to each other then goes
    through host memory."""
    return workers > local_gpus()


def pick_device(worker: Worker, asked: Device = "auto") -> torch.device:
    """The GPU with this worker's local number, or the CPU where there are fewer GPUs than workers or it is
    asked for. Where GPUs are asked for, workers share them."""
    import torch

    if on_gpus(worker.local_world, asked):
        device = torch.device("cuda", worker.local_rank % local_gpus())
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads_of_worker(worker.local_world))
    _keep_freed_memory()
    return torch.device("cpu")


def _keep_freed_memory() -> None:
    """Let this process keep what tensors give back: a step needs as much as the one before. glibc hands large
    pieces back to the system and asks for them anew, and that takes as long as computing what goes into them
    (a step of ZeRO-2: a seventh).
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


def device_memory(workers_here: int, asked: Device = "auto") -> float:
    """Bytes of memory one worker may count on: its GPU's, or its share of a GPU's or of the machine's."""
    if on_gpus(workers_here, asked):
        import torch

        sharing = -(-workers_here // local_gpus())
        return float(torch.cuda.get_device_properties(0).total_memory) / sharing
    return float(psutil.virtual_memory().total) / workers_here
