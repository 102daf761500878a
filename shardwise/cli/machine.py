"""This machine as a cluster, for jobs that name none: a quick measurement that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shardwise.cost.cluster import Cluster


def this_machine(workers: int | None) -> tuple[Cluster, Path | None]:
    """The cluster of so many local workers (None: the GPUs here, or one a core up to four), and the file that it is kept in."""
    from shardwise.cli.doctor import torch_problem
    from shardwise.errors import UserError

    if problem := torch_problem():
        raise UserError(f"no [cluster] given, and this machine cannot be measured: {problem}; or name one: cluster.preset=h100x8")
    from shardwise.probe.local import local_workers
    from shardwise.probe.quick import quick_cluster, remembered

    count = local_workers(workers)
    if remembered(count) is None:
        typer.echo(f"no [cluster] given: measuring this machine with {count} workers, a few seconds, once", err=True)
    cluster = quick_cluster(count, warn=lambda text: typer.echo(f"warning: {text}", err=True))
    return cluster, remembered(count)
