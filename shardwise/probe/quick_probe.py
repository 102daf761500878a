"""The quick probe and its cache: what `shardwise train` plans with if a job names no cluster.

The probe takes seconds, so its result is kept in the user's cache folder, in one file for each machine,
device, torch version and number of workers. A file that cannot be read or is a month old is measured again.
If it cannot be written, a warning says so.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.config import Device
from shardwise.cost.cluster import Cluster
from shardwise.cost.cluster_file import read_cluster, write_cluster
from shardwise.errors import UserError
from shardwise.mesh import cache_folder, cores
from shardwise.probe.probe_budget import QUICK
from shardwise.probe.probe_progress import ProgressCallback, no_progress
from shardwise.probe.probe_workers import busy_warning, measure_this_machine

FORMAT = 1
"""Version of the file, increased when the meaning of a number changes."""
VALID_SECONDS = 30 * 24 * 3600.0
"""Seconds for which a result is valid."""
BUSY_VALID_SECONDS = 3600.0
"""Seconds for which a result is valid that was measured while other programs were busy."""

log = logging.getLogger("shardwise")


def quick_cluster(
    workers: int,
    on_progress: ProgressCallback = no_progress,
    warn: Callable[[str], None] = log.warning,
    asked: Device = "auto",
) -> Cluster:
    """Return this machine as a cluster of this number of workers, from the cache or measured now.

    `asked` is the kind of device that the workers are to use (`run.device`). Call this in the process that
    starts the workers.
    """
    path = cache_file(workers, asked)
    cluster = _read_cache(path, workers)
    if cluster is None:
        busy = busy_warning()
        if busy:
            warn(busy)
        cluster = measure_this_machine(workers, QUICK, on_progress, asked=asked)
        _write_cache(path, cluster, BUSY_VALID_SECONDS if busy else VALID_SECONDS, warn)
    return cluster


def cache_file(workers: int, asked: Device = "auto") -> Path:
    """Return the path of the cached result."""
    return cache_folder() / _file_name(workers, asked)


def valid_cache_file(workers: int, asked: Device = "auto") -> Path | None:
    """Return the path of the cached result if it is still valid, else None."""
    path = cache_file(workers, asked)
    return path if _read_cache(path, workers) is not None else None


def _file_name(workers: int, asked: Device) -> str:
    parts = (
        "probe",
        FORMAT,
        socket.gethostname(),
        _device(workers, asked),
        cores(),
        importlib.metadata.version("torch"),
        workers,
    )
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(map(str, parts))) + ".toml"


def _device(workers: int, asked: Device) -> str:
    from shardwise.mesh import device_name, uses_gpus

    if not uses_gpus(workers, asked):
        return "cpu"
    import torch

    return device_name(torch.device("cuda", 0))


def _read_cache(path: Path, workers: int) -> Cluster | None:
    try:
        if time.time() - path.stat().st_mtime > VALID_SECONDS:
            return None
        cluster = read_cluster(path, {})
    except (OSError, UserError, TypeError, ValueError, KeyError):  # a bad file can be measured again
        return None
    return cluster if cluster.devices == workers else None


def _write_cache(path: Path, cluster: Cluster, valid_seconds: float, warn: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_cluster(path, cluster)
        written = time.time() - VALID_SECONDS + valid_seconds
        os.utime(path, (written, written))
    except OSError as error:
        warn(
            f"{path.parent}: cannot be written ({error.strerror}), so this machine is measured anew each time"
        )


def save_cluster(path: Path, cluster: Cluster) -> None:
    """Write a cluster file in one step, so that a reader finds either the old file or the new one."""
    aside = path.with_name(f".{path.name}.{time.time_ns()}")
    try:
        aside.write_text(write_cluster(cluster), encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
