"""Measuring a device: its products, attention, memory, the host that starts its kernels, and the way to the
host's memory.

A GPU's peak and memory bandwidth are the data sheet's where that is known (the driver tells the memory's
clock and width), and what is measured are the shares of it that real kernels reach. The share of large
products is that of two seconds without a pause, because GPUs slow down when they reach their limit of power,
which takes a moment. Where there is no data sheet, the best seen stands for it.

The figures of a CPU are the whole machine's, as its workers reach them together: each worker does its own
products at the same time as the others, on its share of the cores, and their speeds are added. Elementwise
kernels make a new tensor each time here, as they do in training, so that the cost of fresh memory is in the
figure.
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
from shardwise.probe.budget import MIB, Budget
from shardwise.probe.fit import (
    Shape,
    Speed,
    attention_flops,
    fit_attention,
    fit_products,
    product_flops,
    speed_with_knee,
)
from shardwise.probe.progress import ProbeProgress

PRECISIONS = {"cpu": ("float32", "bfloat16", "float64"), "cuda": ("bfloat16", "float16", "float32", "float8")}
"""The first is the main one, whose knee is found; of the others only the speed."""
TOO_SLOW = 50.0
"""A precision that takes so many times as long as the main one has no kernel of its own here."""
TRIAL: Shape = (256, 256, 256)
SUSTAINED: Shape = (8192, 8192, 8192)
HEADS, HEAD_DIM = 8, 128
TOKENS = {"cpu": 1024, "cuda": 16384}
"""Of one call of attention, in as many sequences as that makes."""

PARTS = 8
"""Tensors that elementwise kernels go round, so that what they read has left the caches."""


@dataclass(frozen=True)
class _Products:
    """How fast one worker computed matrix products."""

    precision: str
    main: Speed
    sustained: float
    others: dict[str, float]

    @property
    def flops(self) -> dict[str, float]:
        """In every precision."""
        return {self.precision: self.main.flops, **self.others}


BETWEEN_OTHERS = 1.03
"""How much quicker a large product is inside a training step than without pause: kernels that only move
memory draw less power in between (benchmarks/planner_gpu.py, eight jobs on an H200)."""


def precisions(device: torch.device) -> tuple[str, ...]:
    """Those that a device has units for, main one first: before Ampere, GPUs have none for bfloat16; before
    Ada, for float8."""
    kinds = PRECISIONS[device.type]
    if device.type == "cpu":
        return kinds
    needs = {"bfloat16": (8, 0), "float8": (8, 9)}
    return tuple(
        kind for kind in kinds if torch.cuda.get_device_capability(device) >= needs.get(kind, (0, 0))
    )


def cells(budget: Budget, device_type: str) -> int:
    """How many things `measure_device` times, at most."""
    others = (len(PRECISIONS[device_type]) - 1) * (1 + len(budget.few_shapes))
    return len(budget.shapes) + others + len(budget.lengths) + 6


def measure_device(bench: Bench, worker: Worker, budget: Budget, progress: ProbeProgress) -> Device:
    """The device of each worker, or the CPU that they share. What a GPU's runtime takes of its memory is
    looked at later."""
    device = bench.device
    launch = _launch(bench, progress)
    resident = float(psutil.Process().memory_info().rss)  # before the probe's own tensors
    streams = [_stream(bench, budget, progress)]
    products = _products(bench, budget, launch, progress)
    streams.append(_stream(bench, budget, progress))
    attending = _attention(bench, budget, launch, progress)
    streams.append(_stream(bench, budget, progress))
    streamed = max(
        streams
    )  # other guests of a machine can take most of its memory's bandwidth for seconds at a time
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
    if "float8" in peaks:  # no whole share of the other precisions' peak: it has one of its own
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
    """The preset with this very device, if there is one: a preset's first word in the name, the same peak,
    and its memory."""
    for key, preset in CLUSTERS.items():
        peak = preset.device.peak.get("float16")
        same = key.partition("-")[0] in re.split("[- ]", name.lower()) and peak == peak_flops(name, "float16")
        if peak and same and abs(memory / preset.device.memory - 1) < 0.1:
            return preset
    return None


def gpu_overhead(device: torch.device) -> float:
    """Bytes in use on a GPU that are none of torch's tensors: contexts, libraries, communication buffers,
    other programs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))


# -- one thing each ------------------------------------------------------------------------------------------


def _launch(bench: Bench, progress: ProbeProgress) -> float:
    """Seconds the host takes to start a kernel: of a tiny one, in which the kernel itself is no time, or runs
    meanwhile."""
    progress.next("starting kernels")
    tiny = torch.ones(16, device=bench.device)
    return bench.seconds(lambda: tiny + tiny)


def _products(bench: Bench, budget: Budget, launch: float, progress: ProbeProgress) -> _Products:
    main, *rest = precisions(bench.device)
    sustained = _sustained(bench, main, budget.sustained, progress) if budget.sustained else None
    launch_seconds = (
        launch if bench.device.type == "cpu" else None
    )  # on a GPU kernels follow each other without it
    times = _product_times(bench, main, budget.shapes, progress)
    speed = fit_products(budget.shapes, times, launch_seconds)
    if sustained is not None:  # the large product too has short sides, if hardly
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
    """FLOP/s in another precision, if the device does it to any use."""
    expected = (
        float(product_flops([TRIAL])[0]) / main.flops * (1 + main.knee * sum(1 / side for side in TRIAL))
        + launch
    )
    try:
        [trial] = _product_times(bench, precision, [TRIAL], progress)
    except RuntimeError:  # no such kernel: the same on every worker, so none of them waits
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
    """Zeros would not do: a GPU draws less power for them, and runs faster."""
    return torch.randn(rows, columns, device=device).to(getattr(torch, precision))


def _attention(bench: Bench, budget: Budget, launch: float, progress: ProbeProgress) -> Speed:
    dtype = getattr(torch, precisions(bench.device)[0])
    flops, times = [], []
    for length in budget.lengths:
        progress.next("attention")
        batch = max(1, TOKENS[bench.device.type] // length)
        x = torch.randn(3, batch, length, HEADS, HEAD_DIM, device=bench.device, dtype=dtype)
        # (batch, heads, length, head_dim) each, laid out as projections leave them.
        query, key, value = x.transpose(2, 3)
        attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        with attention_backends(bench.device.type):
            times.append(bench.seconds(attend))
        flops.append(attention_flops(length, HEADS, HEAD_DIM, batch))
    return fit_attention(budget.lengths, flops, times, launch if bench.device.type == "cpu" else 0.0)


def _stream(bench: Bench, budget: Budget, progress: ProbeProgress) -> float:
    """Bytes a second that an elementwise kernel reads and writes."""
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
    """Bytes/s of a GPU's memory by its clock and the width of its bus, which moves data twice a cycle; None
    where untold."""
    properties = torch.cuda.get_device_properties(device)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 or None  # kHz, bits
