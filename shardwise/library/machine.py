"""Describe this machine as a cluster: measure it for jobs that name none, and compare it with the cluster
that a job names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import Device
    from shardwise.cost.cluster import Cluster


def this_machine(workers: int | None, device: Device = "auto") -> tuple[Cluster, Path | None]:
    """Return the cluster of this many local workers, and the file that stores it.

    `device` is the kind of device that they are to use (`run.device`). By default there is one worker per
    GPU, or without GPUs one per core, up to four.
    """
    from shardwise.errors import UserError
    from shardwise.library.torch_version import torch_problem
    from shardwise.plurals import counted

    if problem := torch_problem():
        raise UserError(
            f"no [cluster] given, and this machine cannot be measured: {problem}; or name a cluster: "
            f"cluster.preset=h100x8"
        )
    from shardwise.probe.probe_workers import worker_count
    from shardwise.probe.quick_probe import quick_cluster, valid_cache_file

    count = workers or worker_count(None, asked=device)
    if valid_cache_file(count, device) is None:
        measuring = f"measuring this machine with {counted(count, 'worker')}, a few seconds, once"
        print(f"no [cluster] given: {measuring}", file=sys.stderr)
    cluster = quick_cluster(count, warn=lambda text: print(f"warning: {text}", file=sys.stderr), asked=device)
    return cluster, valid_cache_file(count, device)


def doubts(workers: int, named: Cluster | None, device: Device = "auto") -> Iterator[str]:
    """Yield warnings before this many workers start here: they share cores or GPUs, or the job names another
    machine."""
    from shardwise.mesh import cores, uses_gpus
    from shardwise.plurals import counted

    have_gpus = uses_gpus(workers, device)  # every worker will decide the same
    if have_gpus:
        yield from sharing(workers)
    elif workers > cores():
        share = f"{counted(workers, 'worker')} on {counted(cores(), 'core')} take turns"
        yield (
            f"{share}: starting them and every step take that much longer. It shows that a layout works, not "
            f"how fast it is"
        )
    if named is not None and (here := _unlike(named, have_gpus)):
        cluster = f"the cluster {named.name} ({named.devices:,} x {named.device.name}) is not this machine"
        yield f"{cluster}, which {here}: what is predicted is for that cluster, and the training is here"


def with_device(overrides: Sequence[str] | None, device: str | None) -> list[str]:
    """Return the overrides of a job, with the setting that --device stands for."""
    return [*(overrides or ()), *([f"run.device={device}"] if device is not None else ())]


def sharing(workers: int) -> Iterator[str]:
    """Yield a warning if several workers share a GPU."""
    from shardwise.mesh import gpus_are_shared, local_gpus
    from shardwise.plurals import counted

    if gpus_are_shared(workers):
        yield (
            f"{counted(workers, 'worker')} share {counted(local_gpus(), 'GPU')}: they compute in turns, and "
            f"NCCL sends through sockets, so this shows what a layout computes, not how fast it is"
        )


def _unlike(named: Cluster, uses_gpus: bool) -> str | None:
    """Return what this machine has instead of the cluster's devices; None if it has such devices."""
    if named.device_type == "cpu":
        return "computes on GPUs" if uses_gpus else None
    if not uses_gpus:
        from shardwise.mesh import local_gpus

        return "has too few GPUs for its workers and computes on CPU cores" if local_gpus() else "has no GPU"
    import torch

    from shardwise.mesh import device_name

    name = device_name(torch.device("cuda", 0))
    return None if named.device.name.split("-")[0].lower() in name.lower() else f"has {name}"


def note_links(folder: Path) -> None:
    """Print a note if files of a Hugging Face folder are links to files elsewhere. Such files are read, and
    stored in checkpoints."""
    from shardwise.config.pretrained_folder import links_outside

    if sentence := links_outside(folder):
        print(f"note: {sentence}", file=sys.stderr)
