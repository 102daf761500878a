"""The devices of this machine and of this process. On a CPU machine, workers share the cores evenly."""

from __future__ import annotations

import psutil
import torch

from shardwise.mesh.launched import Worker, cores


def local_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(worker: Worker) -> torch.device:
    """The GPU with this worker's local number, or the CPU where there are fewer GPUs than workers."""
    if local_gpus() >= worker.local_world:
        device = torch.device("cuda", worker.local_rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(max(1, cores() // worker.local_world))
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The maker's name of a GPU; `cpu` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_memory(workers_here: int) -> float:
    """Bytes of memory one worker may count on: its GPU's, or its share of the machine's."""
    if local_gpus() >= workers_here:
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(psutil.virtual_memory().total) / workers_here
