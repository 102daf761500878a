"""Measure a device: matrix products, attention, memory bandwidth, kernel launches, and transfers to the host.

For a GPU, the peak and the memory bandwidth come from the data sheet where it is known (the driver tells the
memory's clock and bus width). The measurements then give the fraction of it that real kernels reach. For
large products that fraction is measured over two seconds without a pause, because GPUs slow down some time
after they reach their power limit. Without a data sheet, the best measurement takes its place.

For a CPU, the numbers are those of the whole machine with all its workers: each worker computes its own
products at the same time as the others, on its share of the cores, and their speeds are added. Elementwise
kernels allocate a new tensor each time, as in training, so that the cost of new memory is included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import float8_mm
from shardwise.cost.cluster import Cluster, Device
from shardwise.cost.clusters import CLUSTERS
from shardwise.cost.device_peaks import peak_flops
from shardwise.mesh import Worker, device_memory, device_name
from shardwise.models.attention import attention_backends
from shardwise.models.products import linear
from shardwise.probe.bench import Bench
from shardwise.probe.fit import (
    Shape,
    Speed,
    attention_flops,
    fit_attention,
    fit_products,
    product_flops,
    speed_with_knee,
)
from shardwise.probe.probe_budget import MIB, Budget
from shardwise.probe.probe_progress import ProbeProgress

PRECISIONS = {"cpu": ("float32", "bfloat16", "float64"), "cuda": ("bfloat16", "float16", "float32", "float8")}
"""Precisions to measure. The first is the main one, whose knee is measured; for the others only the
speed is.
"""
TOO_SLOW = 50.0
"""A precision that takes this many times as long as the main one has no kernel of its own on this device."""
TRIAL: Shape = (256, 256, 256)
"""Shape of the product that decides whether a precision is measured."""
SUSTAINED: Shape = (8192, 8192, 8192)
"""Shape of the product that is repeated without a pause."""
HEADS, HEAD_DIM = 8, 128
"""Number of attention heads, and the size of each."""
TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens in one call of attention, by device type. They are split into sequences of the measured length."""

PARTS = 8
"""Number of tensors that elementwise kernels use in turn, so that their inputs are no longer in the
caches.
"""


@dataclass(frozen=True)
class _Products:
    """Speed at which one worker computed matrix products."""

    precision: str
    main: Speed
    sustained: float
    others: dict[str, float]

    @property
    def flops(self) -> dict[str, float]:
        """FLOP/s in every measured precision."""
        return {self.precision: self.main.flops, **self.others}


BETWEEN_OTHERS = 1.03
"""Speed of a large product inside a training step, relative to its speed without a pause.

It is higher because kernels that only move memory draw less power in between (benchmarks/planner_gpu.py,
eight jobs on an H200).
"""


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the precisions that a device has units for, the main one first.

    GPUs before Ampere have none for bfloat16, and GPUs before Ada have none for float8.
    """
    kinds = PRECISIONS[device.type]
    if device.type == "cpu":
        return kinds
    needs = {"bfloat16": (8, 0), "float8": (8, 9)}
    return tuple(
        kind for kind in kinds if torch.cuda.get_device_capability(device) >= needs.get(kind, (0, 0))
    )


def measurement_count(budget: Budget, device_type: str) -> int:
    """Return the maximum number of things that `measure_device` times."""
    others = (len(PRECISIONS[device_type]) - 1) * (1 + len(budget.few_shapes))
    return len(budget.shapes) + others + len(budget.lengths) + 6


def measure_device(bench: Bench, worker: Worker, budget: Budget, progress: ProbeProgress) -> Device:
    """Measure the device of each worker, or the CPU that the workers share.

    The memory that a GPU's runtime uses is measured later, by `gpu_overhead`.
    """
    device = bench.device
    launch = _launch(bench, progress)
    resident = float(psutil.Process().memory_info().rss)  # measured before the probe allocates tensors
    streams = [_stream(bench, budget, progress)]
    products = _products(bench, budget, launch, progress)
    streams.append(_stream(bench, budget, progress))
    attending = _attention(bench, budget, launch, progress)
    streams.append(_stream(bench, budget, progress))
    # Other virtual machines on the host can use most of the memory bandwidth for seconds at a time.
    streamed = max(streams)
    if device.type == "cuda":
        return _gpu(bench, products, attending, streamed, launch, progress)
    workers = worker.local_world
    return Device(
        name=device_name(device),
        memory=workers * device_memory(workers),
        peak={name: workers * speed for name, speed in products.flops.items()},
        bandwidth=workers * streamed,
        matmul=1.0,
        matmul_knee=products.main.knee,
        attention=min(1.0, attending.flops / products.main.flops),
        attention_portable=min(1.0, attending.flops / products.main.flops),
        attention_knee=attending.knee,
        stream=1.0,
        launch=launch,
        overhead=resident,
        host_bandwidth=workers * streamed,
        overlap=0.0,
    )


def _gpu(
    bench: Bench,
    products: _Products,
    attending: Speed,
    streamed: float,
    launch: float,
    progress: ProbeProgress,
) -> Device:
    name, main, memory = device_name(bench.device), products.precision, device_memory(1)
    sheet = data_sheet(name, memory)
    peak = peak_flops(name, main) or max(products.main.flops, products.sustained)
    share = min(1.0, products.sustained / peak)
    peaks = {
        main: peak,
        **{key: peak_flops(name, key) or speed / share for key, speed in products.others.items()},
    }
    narrow = {}
    if "float8" in peaks:  # products in float8 reach another fraction of their peak
        peaks["float8"] = sheet.device.peak.get("float8", peaks["float8"]) if sheet else peaks["float8"]
        narrow["matmul_float8"] = min(1.0, products.others["float8"] / peaks["float8"])
    bandwidth = sheet.device.bandwidth if sheet else _clocked_bandwidth(bench.device) or streamed
    attention = min(1.0, attending.flops / peak)
    return Device(
        name=name,
        memory=memory,
        peak=peaks,
        bandwidth=bandwidth,
        matmul=share,
        matmul_knee=products.main.knee,
        attention=attention,
        attention_portable=min(attention, sheet.device.attention_portable) if sheet else attention,
        attention_knee=attending.knee,
        stream=min(1.0, streamed / bandwidth),
        launch=launch,
        host_bandwidth=_to_host_and_back(bench, progress),
        overlap=1.0,
        watts=sheet.device.watts if sheet else None,
        **narrow,
    )


def data_sheet(name: str, memory: float) -> Cluster | None:
    """Return the preset cluster that has this device; None if there is none.

    The first word of its name must be in the device's name, and the peak and the memory must be the same.
    """
    for key, preset in CLUSTERS.items():
        peak = preset.device.peak.get("float16")
        same = key.partition("-")[0] in re.split("[- ]", name.lower()) and peak == peak_flops(name, "float16")
        if peak and same and abs(memory / preset.device.memory - 1) < 0.1:
            return preset
    return None


def gpu_overhead(device: torch.device) -> float:
    """Return the bytes in use on a GPU that are not torch's tensors.

    These are contexts, libraries, communication buffers and other programs.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))


# -- one measurement each ------------------------------------------------------------------------------------


def _launch(bench: Bench, progress: ProbeProgress) -> float:
    """Return the seconds that the host takes to start a kernel.

    The kernel is so small that its own time does not count, or it runs while the host continues.
    """
    progress.next("starting kernels")
    tiny = torch.ones(16, device=bench.device)
    return bench.seconds(lambda: tiny + tiny)


def _products(bench: Bench, budget: Budget, launch: float, progress: ProbeProgress) -> _Products:
    main, *rest = precisions(bench.device)
    sustained = _sustained(bench, main, budget.sustained, progress) if budget.sustained else None
    # On a GPU, kernels follow each other without waiting for the host.
    launch_seconds = launch if bench.device.type == "cpu" else None
    times = _product_times(bench, main, budget.shapes, progress)
    speed = fit_products(budget.shapes, times, launch_seconds)
    if sustained is not None:  # corrects for the sides of the large product, which are not infinitely long
        sustained *= BETWEEN_OTHERS * (1 + speed.knee * sum(1 / side for side in SUSTAINED))
    others = {}
    for precision in rest:
        flops = _other(bench, precision, budget, speed, launch_seconds or 0.0, progress)
        if flops is not None:
            others[precision] = flops
    return _Products(main, speed, sustained or speed.flops, others)


def _sustained(bench: Bench, precision: str, seconds: float, progress: ProbeProgress) -> float:
    progress.next("a large product without pause")
    run = _product(SUSTAINED, precision, bench.device)
    hot = Bench(bench.device, bench.everyone, window=seconds / 2, windows=2)
    return float(product_flops([SUSTAINED])[0]) / hot.seconds(run)


def _other(
    bench: Bench, precision: str, budget: Budget, main: Speed, launch: float, progress: ProbeProgress
) -> float | None:
    """Return the FLOP/s in another precision; None if the device has no usable kernel for it."""
    slowdown = 1 + main.knee * sum(1 / side for side in TRIAL)
    expected = float(product_flops([TRIAL])[0]) / main.flops * slowdown + launch
    try:
        [trial] = _product_times(bench, precision, [TRIAL], progress)
    except RuntimeError:  # there is no such kernel; that holds for every worker, so none of them waits
        return None
    if bench.device.type == "cpu" and trial > TOO_SLOW * expected:
        return None
    times = _product_times(bench, precision, budget.few_shapes, progress)
    return speed_with_knee(budget.few_shapes, times, main.knee, launch)


def _product_times(
    bench: Bench, precision: str, shapes: Sequence[Shape], progress: ProbeProgress
) -> list[float]:
    times = []
    for shape in shapes:
        progress.next(f"{precision} products")
        times.append(bench.seconds(_product(shape, precision, bench.device)))
    return times


def _product(shape: Shape, precision: str, device: torch.device) -> Callable[[], object]:
    m, n, k = shape
    if precision == "float8":
        left, right = (_random(rows, k, "bfloat16", device).to(torch.float8_e4m3fn) for rows in (m, n))
        one = torch.ones((), device=device)
        return lambda: float8_mm(left, right.t(), one, one, torch.bfloat16)
    x, weight = _random(m, k, precision, device), _random(n, k, precision, device)
    return lambda: linear(x, weight)


def _random(rows: int, columns: int, precision: str, device: torch.device) -> Tensor:
    """Return random numbers. With zeros a GPU would draw less power and run faster."""
    return torch.randn(rows, columns, device=device).to(getattr(torch, precision))


def _attention(bench: Bench, budget: Budget, launch: float, progress: ProbeProgress) -> Speed:
    dtype = getattr(torch, precisions(bench.device)[0])
    flops, times = [], []
    for length in budget.lengths:
        progress.next("attention")
        batch = max(1, TOKENS[bench.device.type] // length)
        x = torch.randn(3, batch, length, HEADS, HEAD_DIM, device=bench.device, dtype=dtype)
        # Each is (batch, heads, length, head_dim), with the strides that projections give it.
        query, key, value = x.transpose(2, 3)
        attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        with attention_backends(bench.device.type):
            times.append(bench.seconds(attend))
        flops.append(attention_flops(length, HEADS, HEAD_DIM, batch))
    return fit_attention(budget.lengths, flops, times, launch if bench.device.type == "cpu" else 0.0)


def _stream(bench: Bench, budget: Budget, progress: ProbeProgress) -> float:
    """Return the bytes per second that an elementwise kernel reads and writes."""
    progress.next("memory")
    size = int(min(budget.stream_bytes, device_memory(1) / 64)) // PARTS
    parts = cycle([torch.ones(size // 4, device=bench.device) for _ in range(PARTS)])
    return 2 * size / bench.seconds(lambda: next(parts) * 2.0)


def _to_host_and_back(bench: Bench, progress: ProbeProgress) -> float:
    progress.next("host memory")
    size = 128 * MIB
    on_device = torch.empty(size, dtype=torch.uint8, device=bench.device)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def both_ways() -> None:
        on_device.copy_(on_host, non_blocking=True)
        on_host.copy_(on_device, non_blocking=True)

    return 2 * size / bench.seconds(both_ways)


def _clocked_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second of a GPU's memory, from its clock and bus width; None if the driver tells
    none.

    The memory moves data twice per cycle.
    """
    properties = torch.cuda.get_device_properties(device)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 or None  # the clock is in kHz, the width in bits
