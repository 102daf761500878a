"""Check a job, then start its workers, or be one of another launcher's.

Nothing that is slow is imported before the job is known to be sound, so a mistake is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.config.parameters import ModuleParameters
    from shardwise.drivers.driver import WorkerCounts
    from shardwise.mesh import Node, Worker
    from shardwise.plans import Plan
    from shardwise.resilience.first_node_file import FirstNodeFile
    from shardwise.search.planner import Planner

Limits = tuple[int | None, int | None]
"""Smallest and largest number of workers over all nodes; None: not given."""


def start(
    job: Path, overrides: Sequence[str] = (), workers: int | None = None, limits: Limits = (None, None)
) -> int:
    """Train a job as its launcher wants it: with local workers, as a node of several, or as one worker of
    another launcher. Return the exit status."""
    from shardwise.config import read
    from shardwise.library.check_job import checks_of_run
    from shardwise.limits import check_limits
    from shardwise.mesh import Node, Worker, launch_mode

    check_limits()  # before libraries start threads: OpenBLAS interrupts the process if it cannot
    launch = launch_mode()
    if isinstance(launch, Worker):
        config = _read_by_worker(job, overrides)
        with _holding(config) if launch.rank == 0 else nullcontext():
            return _be_worker(config, launch)
    node = launch if isinstance(launch, Node) else None
    checks = checks_of_run(lambda config: worker_counts(config, node, workers, limits))
    config = with_program(read(job, overrides, workers or limits[1], checks))
    return _start(config, node, workers, limits)


def _read_by_worker(job: Path, overrides: Sequence[str]) -> Config:
    """Read the job in a worker, without checking the data: thousands of ranks would read it at the same
    time."""
    from shardwise.config import read
    from shardwise.library.torch_version import need_torch

    config = read(job, overrides)
    need_torch()
    return with_program(config)


def with_program(config: Config) -> Config:
    """Return the job with what its program asks for. Only a job with a program needs torch for this."""
    if config.run.program is None:
        return config
    from shardwise.train.program_source import described

    return described(config)


@contextmanager
def _holding(config: Config) -> Iterator[None]:
    """Create the folders of the run, and lock them against other runs."""
    from shardwise.checkpoint import hold
    from shardwise.locks import lock_run_folder
    from shardwise.train.resume import checkpoint_folder

    with lock_run_folder(Path(config.run.folder), "logs"), hold(checkpoint_folder(config)):
        yield


def _check_data(config: Config) -> str:
    """Prepare the data, and check the job against all of it, before any worker starts. Return a description
    of the data that is the same on all hosts."""
    from shardwise.config import brings_data
    from shardwise.data import Dataset, check_vocabulary
    from shardwise.library.progress import preparing

    if brings_data(config):
        return ""

    with preparing() as progress:
        dataset = Dataset.open(config.data, config.train.seed, progress)
    check_vocabulary(dataset, config.model.vocabulary, config.model.pretrained)
    return dataset.content


def worker_counts(config: Config, node: Node | None, workers: int | None, limits: Limits) -> WorkerCounts:
    """Return how many workers take part, or raise an error if the numbers asked for are impossible."""
    from shardwise.drivers.driver import WorkerCounts
    from shardwise.drivers.registry import driver_of

    driver, nodes = driver_of(config), node.nodes if node else 1
    driver.check_hosts(nodes)
    here = workers or (node.workers if node else None) or workers_here(config, limits, nodes)
    counts = WorkerCounts(here, limits[0] or limits[1] or here * nodes, limits[1] or here * nodes)
    if driver.has_loose_workers:
        driver.check_worker_counts(config, counts, limits[0])
    else:
        _check_worker_counts(config, counts, other_hosts=node is not None)
    return counts


def workers_here(config: Config, limits: Limits = (None, None), nodes: int = 1) -> int:
    """Return how many workers this machine starts without --workers."""
    from shardwise.config import workers_without_gpus
    from shardwise.drivers.registry import driver_of
    from shardwise.mesh import local_gpus

    driver = driver_of(config)
    here = _requested_workers(config, limits, nodes) or (local_gpus() if driver.workers_use_gpus else 0)
    return here or workers_without_gpus(config.layout) * driver.groups(config)


def _check_worker_counts(config: Config, counts: WorkerCounts, other_hosts: bool) -> None:
    from shardwise.errors import UserError

    if not other_hosts and counts.most != counts.here:
        raise UserError(
            f"--max-workers {counts.most}: this machine starts {counts.here}, and no other takes part; "
            "leave it out, or give --workers the same number"
        )
    if counts.least > counts.most:
        raise UserError(
            f"--min-workers {counts.least}: more than the {counts.most} workers that there can be"
        )
    if counts.most > 1 and (config.checkpoint.folder or "").startswith("memory:"):
        given = f"checkpoint.folder = {config.checkpoint.folder!r}"
        raise UserError(f"{given}: workers do not share their memory; give a folder")


def _start(config: Config, node: Node | None, workers: int | None, limits: Limits) -> int:
    """Plan, prepare the data, and start, in this order, so that a refused job leaves nothing behind."""
    from shardwise.checkpoint import to_resume
    from shardwise.drivers.registry import driver_of
    from shardwise.limits import check_limits
    from shardwise.mesh.sockets import check_resolves
    from shardwise.plurals import counted
    from shardwise.resilience.team import Bounds
    from shardwise.train.launch import launch
    from shardwise.train.resume import resume_of

    to_resume(resume_of(config))
    driver, nodes = driver_of(config), node.nodes if node else 1
    leads = node is None or node.node_rank == 0
    config, counts = driver.processes(config, worker_counts(config, node, workers, limits), first_host=leads)
    slots, bounds = counts.here, Bounds(counts.least, counts.most)
    check_limits(slots)
    _warn(config, slots)
    planner = _checked_planner(config, slots, bounds.maximum, nodes)
    first_node = _first_node_file(config, node)
    # The other nodes wait for this file.
    with first_node.report_start_and_failure() if first_node and leads else nullcontext():
        if node is not None and leads and nodes > 1:
            check_resolves(node.address)
        if leads:
            _check_room(config, planner.first)
        content = _check_data(config)
        # The first worker imports torch, so that its first message comes seconds later.
        print(f"starting {counted(slots, 'worker')}…", file=sys.stderr)
        data = content if node is not None else ""  # other hosts must have the same data
        return launch(config, slots, bounds, node, planner, lambda: _holding(config), first_node, data)


def _checked_planner(config: Config, local_workers: int, devices: int, nodes: int) -> Planner:
    """Return the planner of this run, after the checks of its first plan."""
    from shardwise.drivers.registry import driver_of

    driver, planner = driver_of(config), _planner(config, local_workers, devices, nodes)
    if driver.ranks_on_host:
        planner = replace(planner, memory_bytes=None)
    _check(planner)
    driver.check_memory(config, planner.first)
    return planner


def _first_node_file(config: Config, node: Node | None) -> FirstNodeFile | None:
    """Return the file through which the first node tells the others how it started; None on one node."""
    from shardwise.resilience.first_node_file import FirstNodeFile

    if node is None or node.nodes <= 1:
        return None
    return FirstNodeFile(Path(config.run.folder), node.run_id)


def _warn(config: Config, workers: int) -> None:
    """Print warnings about this number of workers before they start, or before this machine is measured."""
    from shardwise.cost.clusters import requested_cluster
    from shardwise.library.machine import doubts, note_links

    if config.model.pretrained is not None:
        note_links(Path(config.model.pretrained))
    named = requested_cluster(config.cluster) if config.model.module is None else None
    for doubt in doubts(workers, named, config.run.device):
        print(f"warning: {doubt}", file=sys.stderr)


def _planner(config: Config, local_workers: int, devices: int, nodes: int) -> Planner:
    """Return the planner of this run: for the cluster that the job names, or for this machine if no other
    takes part."""
    from shardwise.cost.clusters import requested_cluster
    from shardwise.library.machine import this_machine
    from shardwise.mesh import device_memory
    from shardwise.probe.quick_probe import valid_cache_file
    from shardwise.resilience.fork_server import start_server
    from shardwise.search.planner import Planner, left_to_the_planner
    from shardwise.train.launch import WORKERS_IMPORT

    if config.model.module is not None:
        return Planner(config, devices, device_memory(local_workers, config.run.device), _parameters(config))
    cluster, file = requested_cluster(config.cluster), config.cluster.file
    searches = left_to_the_planner(config, devices, cluster_is_named=cluster is not None)
    if cluster is None and nodes == 1:
        path = valid_cache_file(local_workers, config.run.device)
        if path is None and searches:
            start_server(WORKERS_IMPORT)  # the workers of the probe and of the run are forked from it
            cluster, path = this_machine(local_workers, config.run.device)
        if path is not None:
            file = str(path)
            with_file = config.cluster.model_copy(update={"file": file})
            cluster = requested_cluster(with_file)
    return Planner(
        config,
        devices,
        device_memory(local_workers, config.run.device),
        cluster=cluster,
        cluster_file=file,
        searches=searches and cluster is not None,
    )


def _check(planner: Planner) -> None:
    """Refuse a job that cannot run, before any worker starts, and print what the planner chose."""
    plan = planner.first
    if planner.searched:
        named = planner.config.cluster.preset is not None or planner.config.cluster.file is not None
        where = f"on {planner.cluster.name}, " if named and planner.cluster else ""
        print(where + planner.searched, file=sys.stderr)
    if planner.config.model.module is not None:
        from shardwise.checkpoint import to_resume
        from shardwise.data import with_data_settings
        from shardwise.train.check_module import check_first_values, check_module
        from shardwise.train.resume import resume_of

        check_module(with_data_settings(planner.config), plan.layout)
        if not to_resume(resume_of(planner.config)):
            check_first_values(planner.config)


def _check_room(config: Config, plan: Plan) -> None:
    """Refuse folders that cannot be written, or have no room for one checkpoint, before days of training."""
    from shardwise.drivers.registry import driver_of
    from shardwise.observe.record_files import check_room, check_run_files
    from shardwise.train.resume import checkpoint_folder

    check_room(Path(config.run.folder), "run.folder", 0)
    check_run_files(Path(config.run.folder))
    saved_to = checkpoint_folder(config)
    if "://" not in saved_to:
        numbers = driver_of(config).saved_numbers(plan)
        check_room(Path(saved_to), "checkpoint.folder", plan.state_width * numbers)


def _requested_workers(config: Config, limits: Limits, nodes: int) -> int | None:
    """Return the number of workers per node that the command or the layout asks for; None if neither does."""
    from shardwise.drivers.registry import driver_of
    from shardwise.errors import UserError

    groups = driver_of(config).groups(config)
    total = limits[1] or (groups * config.layout.world if config.layout.data > 0 else None)
    if total is not None and total % nodes:
        raise UserError(
            f"layout: {total} devices do not divide over {nodes} nodes; give --workers, or layout.data=-1"
        )
    return total // nodes if total else None


def _parameters(config: Config) -> ModuleParameters | None:
    """Return the parameters of a user's own module.

    Only such a job needs torch before the workers start.
    """
    from shardwise.train.check_module import count_parameters

    return count_parameters(config)


def _be_worker(config: Config, worker: Worker) -> int:
    """Train as one of the workers that another launcher started. That launcher handles failures."""
    from shardwise.drivers.registry import driver_of
    from shardwise.errors import UserError
    from shardwise.resilience.stopping import CollectSignals, cut_short

    if driver_of(config).starts_own_processes:
        what = f"train.driver = {config.train.driver!r}"
        raise UserError(
            f"{what}: starts its own processes; run it without torchrun, or as one process a node"
        )
    # Signals are collected before anything is imported: if one rank left alone, the others would wait for it.
    with CollectSignals() as signals:
        from shardwise.mesh import peer_is_gone
        from shardwise.observe import unblocked_output
        from shardwise.resilience.worker_link import WorkerLink
        from shardwise.train.launch import log_to, newest_saved
        from shardwise.train.run import run

        signals.stop_without_parent()
        log_to(Path(config.run.folder) / "logs" / f"rank-{worker.rank}.log")
        plan = _planner_of_worker(config, worker).first
        if worker.rank == 0:
            _check_room(config, plan)
        link = WorkerLink(worker, plan, signals)
        try:
            with unblocked_output():
                return run(config, link)
        except Exception as error:
            if signals.status is None or not peer_is_gone(error):
                raise
            cause = f"a peer was lost while the run was stopping: {str(error).splitlines()[0]}"
            raise cut_short(cause, newest_saved(config), link.reached > 0, signals.status) from error


def _planner_of_worker(config: Config, worker: Worker) -> Planner:
    """Return the planner of a worker that another launcher started. It searches for nothing, because two CPUs
    could decide near ties differently."""
    from shardwise.cost.clusters import requested_cluster
    from shardwise.errors import UserError
    from shardwise.mesh import device_memory
    from shardwise.search.planner import Planner
    from shardwise.train.check_module import count_parameters

    cluster = None
    with suppress(UserError):  # only a prediction is lost
        cluster = requested_cluster(config.cluster)
    memory = device_memory(worker.local_world, config.run.device)
    return Planner(config, worker.world, memory, count_parameters(config), cluster, config.cluster.file)
