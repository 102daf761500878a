"""`shardwise probe`: measure this machine, or the cluster this was started on, and write the file that the
planner reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.arguments import AsJson
from shardwise.cli.signals import stopped_as_interrupted
from shardwise.resilience.stopping import INTERRUPTED
from shardwise.units import GIB

if TYPE_CHECKING:
    from shardwise.cost.cluster import Cluster, Link
    from shardwise.mesh import Worker
    from shardwise.probe.probe_budget import Budget
    from shardwise.probe.probe_progress import ProgressCallback


def probe(
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, help="Local workers; left out: one a GPU, or one a core, from 2 to 4."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="The cluster file to write.")] = Path(
        "cluster.toml"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds, from fewer sizes; collectives over all devices only.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Measure this machine (products, attention, memory, collectives) and write a cluster file that `plan`
    and `train` use."""
    start = time.monotonic()
    try:
        with stopped_as_interrupted():
            cluster = _probe(workers, output, quick)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if cluster is None:  # another node or another worker prints the result
        return
    seconds = time.monotonic() - start
    if json:
        from json import dumps

        print(dumps({"file": str(output), "seconds": seconds, "quick": quick, "cluster": asdict(cluster)}))
        return
    print("\n".join(_as_text(cluster)))
    print(f'\n{output} written after {seconds:.0f} s; a job uses it with cluster.file = "{output}"')


def _probe(workers: int | None, output: Path, quick: bool) -> Cluster | None:
    """Measure the cluster, write it and return it; None if another process writes it."""
    from shardwise.errors import UserError
    from shardwise.library.torch_version import need_torch
    from shardwise.mesh import Node, Worker, launch_mode
    from shardwise.probe import measure_this_machine, worker_count
    from shardwise.probe.probe_budget import FULL, QUICK
    from shardwise.probe.probe_workers import busy_warning

    need_torch()
    launch, budgets = launch_mode(), QUICK if quick else FULL
    if isinstance(launch, Worker):
        if workers is not None:
            started = f"{launch.launcher} has started the workers, {launch.world} of them"
            raise UserError(f"--workers {workers}: {started}; leave it out")
        return _be_worker(launch, output, budgets)
    node = launch if isinstance(launch, Node) else None
    leads = node is None or node.node_rank == 0
    if leads:
        _check(output)
        if busy := busy_warning():
            typer.echo(busy, err=True)
    count = worker_count(workers, node)
    with _shown(leads) as on_progress:
        cluster = measure_this_machine(count, budgets, on_progress, node)
    return _written(output, cluster) if leads else None


def _be_worker(worker: Worker, output: Path, budgets: Mapping[str, Budget]) -> Cluster | None:
    """Measure as one of the workers that another launcher started; rank 0 writes the cluster."""
    from shardwise.probe.measure_cluster import measure_cluster

    leads = worker.rank == 0
    if leads:
        _check(output)
    with _shown(leads) as on_progress:
        cluster = measure_cluster(worker, budgets, on_progress)
    return _written(output, cluster) if leads else None


def _check(output: Path) -> None:
    """Raise an error if the file cannot be written, before minutes are spent."""
    from shardwise.errors import UserError
    from shardwise.files import reading

    folder = output.absolute().parent
    problem = None
    with reading(f"--output {output}:", "Give another path."):
        if output.is_dir():
            problem = "is a folder; give a file in it"
        elif not folder.is_dir():
            problem = f"there is no folder {folder}; make it, or give another path"
        elif not os.access(folder, os.W_OK) or (output.exists() and not os.access(output, os.W_OK)):
            problem = "cannot be written; give another path"
    if problem:
        raise UserError(f"--output {output}: {problem}")


def _written(output: Path, cluster: Cluster) -> Cluster:
    from shardwise.errors import UserError
    from shardwise.probe.quick_probe import save_cluster

    try:
        save_cluster(output, cluster)
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); give another path"
        raise UserError(f"--output {output}: {reason}") from None
    return cluster


@contextmanager
def _shown(leads: bool) -> Iterator[ProgressCallback]:
    """Show on standard error what is measured: as a progress bar, or without a terminal as one line for each
    measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if not leads or not console.is_terminal:
        yield _tell_in_lines() if leads else _tell_nothing
        return
    columns = (TextColumn("measuring"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting workers", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _tell_in_lines() -> ProgressCallback:
    shown: list[str] = []

    def on_progress(what: str, share: float) -> None:
        if what not in shown and share < 1:
            shown.append(what)
            typer.echo(f"measuring {what}", err=True)

    return on_progress


def _tell_nothing(what: str, share: float) -> None:
    pass


def _as_text(cluster: Cluster) -> list[str]:
    device = cluster.device
    whose = "all workers together" if cluster.shared else "each"
    nodes = f"{cluster.nodes} nodes of " if cluster.nodes > 1 else ""
    rows = {
        "devices": f"{nodes}{cluster.devices_per_node} x {device.name}; figures are of {whose}",
        **{
            f"{precision} products": _speed(peak, device.matmul_share(precision))
            for precision, peak in device.peak.items()
        },
        "short sides": f"cost as much as the work at {device.matmul_knee:.0f}",
        "attention": f"{device.attention:.0%} of the peak, knee at {device.attention_knee:.0f} tokens",
        "memory moves": _reached(device.bandwidth, device.stream, "GB/s", 1e9),
        "to the host": f"{device.host_bandwidth / 1e9:.1f} GB/s; it has {cluster.host_memory / GIB:,.0f} GiB",
        "starting a kernel": f"{device.launch * 1e6:.1f} us",
        "memory": f"{device.memory / GIB:.1f} GiB, of which the runtime takes {device.overhead / GIB:.2f}",
    }
    margin = max(map(len, rows))
    lines = [f"{name:<{margin}}  {value}" for name, value in rows.items()]
    return [
        *lines,
        *_link_rows("inside a node", cluster.inside),
        *_link_rows("between nodes", cluster.between),
    ]


def _link_rows(where: str, link: Link) -> list[str]:
    if not link.measured:
        return []
    head = f"{where:<16}{'members':>8}{'latency us':>12}{'GB/s':>10}"
    rows = (
        f"{row.kind:<16}{row.members:>8}{row.latency * 1e6:>12.1f}{row.bandwidth / 1e9:>10.2f}"
        for row in link.measured
    )
    return ["", head, *rows]


def _speed(peak: float, share: float) -> str:
    return _reached(peak, share, "TFLOP/s", 1e12)


def _reached(peak: float, share: float, unit: str, scale: float) -> str:
    amount = f"{peak * share / scale:.3g} {unit}"
    return amount if share == 1 else f"{amount}, {share:.0%} of {peak / scale:.4g}"
