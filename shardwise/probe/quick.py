"""The quick probe, remembered: what `shardwise train` plans with where a job names no cluster.

It takes seconds, so its answer is kept in the user's cache, one file for each machine, device, torch and
number of workers. A file that cannot be read, or is a month old, is measured anew; where it cannot be kept,
that is said, and nothing else is lost.
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

from shardwise.cost.cluster import Cluster
from shardwise.cost.cluster_file import read_cluster, write_cluster
from shardwise.errors import UserError
from shardwise.mesh import cache_folder, cores
from shardwise.probe.budget import QUICK
from shardwise.probe.local import measure_here, others_busy
from shardwise.probe.progress import Tell, silent

FORMAT = 1
"""Counted up when the meaning of a figure changes."""
LASTS = 30 * 24 * 3600.0
"""Seconds for which an answer holds."""
BUSY_LASTS = 3600.0
"""The same where other programs were in the way."""

log = logging.getLogger("shardwise")


def quick_cluster(workers: int, tell: Tell = silent, warn: Callable[[str], None] = log.warning) -> Cluster:
    """This machine with so many workers: as remembered, or measured now. To be asked by the process that
    starts workers."""
    path = quick_file(workers)
    cluster = _remembered(path, workers)
    if cluster is None:
        busy = others_busy()
        if busy:
            warn(busy)
        cluster = measure_here(workers, QUICK, tell)
        _remember(path, cluster, BUSY_LASTS if busy else LASTS, warn)
    return cluster


def quick_file(workers: int) -> Path:
    """Where what was measured is kept."""
    return cache_folder() / _file_name(workers)


def remembered(workers: int) -> Path | None:
    """The file of an earlier measurement that still holds."""
    path = quick_file(workers)
    return path if _remembered(path, workers) is not None else None


def _file_name(workers: int) -> str:
    parts = (
        "probe",
        FORMAT,
        socket.gethostname(),
        _device(workers),
        cores(),
        importlib.metadata.version("torch"),
        workers,
    )
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(map(str, parts))) + ".toml"


def _device(workers: int) -> str:
    from shardwise.mesh import device_name, local_gpus

    if local_gpus() < workers:
        return "cpu"
    import torch

    return device_name(torch.device("cuda", 0))


def _remembered(path: Path, workers: int) -> Cluster | None:
    try:
        if time.time() - path.stat().st_mtime > LASTS:
            return None
        cluster = read_cluster(path, {})
    except (OSError, UserError, TypeError, ValueError, KeyError):  # whatever is in it, it can be made again
        return None
    return cluster if cluster.devices == workers else None


def _remember(path: Path, cluster: Cluster, lasts: float, warn: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_cluster(path, cluster)
        written = time.time() - LASTS + lasts
        os.utime(path, (written, written))
    except OSError as error:
        warn(
            f"{path.parent}: cannot be written ({error.strerror}), so this machine is measured anew each time"
        )


def save_cluster(path: Path, cluster: Cluster) -> None:
    """Write a cluster file in one step: a reader finds the old one or the new."""
    aside = path.with_name(f".{path.name}.{time.time_ns()}")
    try:
        aside.write_text(write_cluster(cluster), encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
