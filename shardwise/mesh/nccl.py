"""NCCL on shared GPUs, and the way out of a collective whose peer is gone.

**Sharing a GPU.** NCCL refuses two ranks of one host on one GPU, but it only knows hosts by an identifier.
Each worker that shares a GPU therefore gets an identifier of its own (`NCCL_HOSTID`). NCCL then takes the
workers for hosts with one GPU each and sends through its network transport, over sockets of this machine.
Kernels, streams, communicators and their order are those of several GPUs; the speed is not, because the GPU
runs one process after the other. CUDA's multi-process service runs them side by side, but there a killed
process ends all others too.

**A lost peer.** A collective whose peer is gone never ends: its kernel waits on the device, and the host
waits for the kernel. The host of the run notices first (resilience/host.py), and tells the workers that are
left. A thread of each aborts the communicators (`interrupt`). The kernels end, with wrong numbers in their
outputs. So everything that is read from the device after that must not be used: `check_not_interrupted`
raises an error before it is. torch's own watchdog would end the whole process instead, with the copy of the
state that the next team needs, so it is turned off for these workers.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections import Counter
from pathlib import Path

from shardwise.mesh.environment import nccl_may_share_gpus

_interrupted = threading.Event()
_aborting = threading.Lock()


class Interrupted(RuntimeError):
    """The collectives of this team were aborted because a peer is gone."""


def share_gpus() -> None:
    """Let NCCL accept several workers of this host on one GPU. Call this before the first communicator."""
    if not nccl_may_share_gpus():
        os.environ.update(NCCL_HOSTID=uuid.uuid4().hex)


def write_log(folder: Path) -> None:
    """Let NCCL write its log to a file for each process. Call this before the first communicator."""
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(folder / "nccl-%p.log"))


def transports(log: str) -> Counter[str]:
    """Return how many connections of NCCL's log use each transport, for example `P2P/CUMEM` or `NET/Socket`.

    A connection between two GPUs of a host that goes through `NET` uses no NVLink, PCIe or shared memory.
    """
    found = re.findall(r"Channel \S+ : \d+\[\S+ -> \d+\[\S+ .*?via ([A-Za-z0-9]+/[A-Za-z0-9]+)", log)
    return Counter(found)


def leave_faults_to_the_host() -> None:
    """Turn off what torch does after an error of NCCL: its watchdog and its monitor end the process, and the
    flight recorder delays that. The host writes the stacks of a hang itself (resilience/hangs.py).
    """
    names = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT")
    os.environ.update({f"TORCH_NCCL_{name}": "0" for name in names})


def interrupt() -> None:
    """Abort all collectives of this process. Another thread may be waiting for one."""
    from shardwise._torch import abort_nccl  # imported here, because the host's side needs no torch

    _interrupted.set()
    with _aborting:
        abort_nccl()


def is_interrupted() -> bool:
    """Return whether the collectives of the present team were aborted."""
    return _interrupted.is_set()


def check_not_interrupted() -> None:
    """Raise an error if numbers that were just read from the device may be wrong, because collectives were
    aborted.
    """
    if _interrupted.is_set():
        raise Interrupted("a peer is gone, and the collectives with it were aborted")


def forget_interruption() -> None:
    """Begin a new team, whose collectives are not aborted."""
    _interrupted.clear()
