"""The peak memory of a worker, and what that number counts.

On a GPU it is the memory that torch's allocator gave to tensors, which decides whether a job fits. The
driver, NCCL and unused memory of the allocator come on top (a few GiB). On a CPU it is the peak resident set
of the process, which also contains the interpreter and torch (about 0.3 GiB). The two cannot be compared, so
a number is always shown with its kind.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def memory_kind(device_type: str) -> str:
    """Return what `peak_memory` counts on this kind of device, in words."""
    return "allocated by torch on the GPU" if device_type == "cuda" else "resident set of the process"


def peak_memory(device_type: str) -> int:
    """Return the peak memory in bytes since the process began."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _peak_resident()


def _peak_resident() -> int:
    # getrusage also works on Linux, but its peak survives exec: a worker would inherit that of its launcher.
    if _STATUS.exists() and (high_water := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())):
        return int(high_water.group(1)) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
