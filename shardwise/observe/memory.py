"""How much memory a worker used at most, and what exactly that number is.

On a GPU it is what torch's allocator handed out to tensors: the number that decides whether a job fits. The
driver, NCCL and the allocator's own slack come on top (a few GiB). On a CPU it is the peak resident set of
the process, which also holds the interpreter and torch itself (roughly 0.3 GiB). The two are not comparable,
so a number is always shown with its kind.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def memory_kind(device_type: str) -> str:
    """What `peak_memory` counts on this kind of device, in words."""
    return "allocated by torch on the GPU" if device_type == "cuda" else "resident set of the process"


def peak_memory(device_type: str) -> int:
    """Bytes at the peak, since the process began."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _peak_resident()


def _peak_resident() -> int:
    # getrusage would do on Linux too, but its peak survives exec: a worker would inherit its launcher's.
    if _STATUS.exists() and (high_water := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())):
        return int(high_water.group(1)) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
