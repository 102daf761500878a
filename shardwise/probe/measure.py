"""The probe, as each worker runs it: meet the others, measure the device, measure the links, and put a
cluster together.

All workers do the same and come to the same figures; the first one's answer is kept. Costs under two minutes
and a few hundred MiB a worker (a few GiB on a GPU); the quick probe takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import psutil
import torch.distributed as dist

from shardwise.config import Layout
from shardwise.cost.cluster import Cluster
from shardwise.mesh import Worker, join, leave
from shardwise.probe import devices, links
from shardwise.probe.bench import TIMEOUT, Bench
from shardwise.probe.budget import Budget
from shardwise.probe.progress import ProbeProgress, Tell, silent


def measure(worker: Worker, budgets: Mapping[str, Budget], tell: Tell = silent) -> Cluster:
    """The cluster that these workers are, measured within the budget for its kind of device ("cpu" or
    "cuda")."""
    mesh = join(worker, Layout.model_validate({"data": worker.world}))
    try:
        budget = budgets[mesh.device.type]
        everyone = dist.new_group(timeout=TIMEOUT) if worker.world > 1 else None
        bench = Bench(mesh.device, everyone, budget.window, budget.windows)
        progress = ProbeProgress(devices.cells(budget, mesh.device.type) + links.cells(budget, worker), tell)
        device = devices.measure_device(bench, worker, budget, progress)
        inside, between = links.measure_links(bench, worker, budget, progress)
        if mesh.device.type == "cuda":  # only now are all its buffers there
            device = replace(device, overhead=bench.longest([devices.gpu_overhead(mesh.device)])[0])
            sheet = devices.data_sheet(device.name, device.memory)
            inside = sheet.inside if sheet and worker.local_world == 1 else inside
            between = sheet.between if sheet and worker.world == worker.local_world else between
    finally:
        leave()
    tell("done", 1.0)
    on_cpu = mesh.device.type == "cpu"
    measured = Cluster(
        name=f"{device.name} x {worker.world}",
        device=device,
        devices_per_node=worker.local_world,
        nodes=max(1, worker.world // worker.local_world),
        inside=inside,
        between=between,
        shared=on_cpu,
        host_memory=float(psutil.virtual_memory().total),
    )
    known = (
        device.bandwidth
        if on_cpu
        else sheet.host_memory_bandwidth
        if sheet
        else measured.host_memory_bandwidth
    )
    return replace(measured, host_memory_bandwidth=known)
