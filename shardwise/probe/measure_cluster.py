"""The probe as each worker runs it: join the others, measure the device and the links, and return a cluster.

All workers do the same and get the same numbers; the result of the first one is used. It takes less than two
minutes and a few hundred MiB per worker (a few GiB on a GPU). The quick probe takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from shardwise.config import Device, Layout
from shardwise.cost.cluster import Cluster
from shardwise.mesh import Worker, join, leave, machine_memory
from shardwise.probe import device_speed, link_speed
from shardwise.probe.bench import TIMEOUT, Bench
from shardwise.probe.probe_budget import Budget
from shardwise.probe.probe_progress import ProbeProgress, ProgressCallback, no_progress


def measure_cluster(
    worker: Worker,
    budgets: Mapping[str, Budget],
    on_progress: ProgressCallback = no_progress,
    asked: Device = "auto",
) -> Cluster:
    """Return the cluster that these workers form, measured within the budget of its device type. `asked` is
    the kind of device to measure (`run.device`)."""
    mesh = join(worker, Layout.model_validate({"data": worker.world}), asked)
    try:
        budget = budgets[mesh.device.type]
        everyone = dist.new_group(timeout=TIMEOUT) if worker.world > 1 else None
        bench = Bench(mesh.device, everyone, budget.window, budget.windows)
        device_count = device_speed.measurement_count(budget, mesh.device.type)
        link_count = link_speed.measurement_count(budget, worker)
        progress = ProbeProgress(device_count + link_count, on_progress)
        device = device_speed.measure_device(bench, worker, budget, progress)
        inside, between = link_speed.measure_links(bench, worker, budget, progress)
        if mesh.device.type == "cuda":  # all buffers have been allocated by now
            device = replace(device, overhead=bench.longest([device_speed.gpu_overhead(mesh.device)])[0])
            sheet = device_speed.data_sheet(device.name, device.memory)
            inside = sheet.inside if sheet and worker.local_world == 1 else inside
            between = sheet.between if sheet and worker.world == worker.local_world else between
    finally:
        leave()
    on_progress("done", 1.0)
    on_cpu = mesh.device.type == "cpu"
    measured = Cluster(
        name=f"{device.name} x {worker.world}",
        device=device,
        devices_per_node=worker.local_world,
        nodes=max(1, worker.world // worker.local_world),
        inside=inside,
        between=between,
        shared=on_cpu,
        host_memory=machine_memory(),
    )
    if on_cpu:
        return replace(measured, host_memory_bandwidth=device.bandwidth)
    return replace(measured, host_memory_bandwidth=sheet.host_memory_bandwidth) if sheet else measured
