"""Devices and clusters by name.

Memory, bandwidth and power are the makers' figures, and so are the peaks (cost/device_peaks.py). What devices
reach in a running training step is measured or published: large matrix products (the "maximum achievable
matmul FLOPS" tables of the ML engineering handbook), flash attention's own papers, links by nccl-tests. There
is one set of constants for each device and each cluster, none for a model.

A name followed by x and a number asks for so many devices: `h100x64` is eight nodes of eight. A cloud's name
picks its network: `h100-gcp-a3x64`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from shardwise.config.machine import ClusterSection
from shardwise.cost.cluster import Cluster, Device, Link, Measured
from shardwise.cost.cluster_file import read_cluster
from shardwise.cost.device_peaks import PEAKS
from shardwise.errors import UserError
from shardwise.units import GIB

_T, _G, _US = 1e12, 1e9, 1e-6


def _device(peaks: str, name: str, gib: float, gb_s: float, watts: float, **figures: float) -> Device:
    """Return a device: the peaks of this row of cost/device_peaks.py, its memory, bandwidth and rated power;
    `figures` are those that differ from the defaults of `Device`."""
    return Device(name, gib * GIB, PEAKS[peaks].flops, gb_s * _G, watts=watts, **figures)


def _attends(native: float, portable: float, knee: float = 400.0) -> dict[str, float]:
    """Attention by kernels written for an architecture, and by those written for the one before it."""
    return {"attention": native, "attention_portable": portable, "attention_knee": knee}


_VOLTA, _AMPERE, _CDNA3 = _attends(0.3, 0.3), _attends(0.42, 0.42, 310), _attends(0.25, 0.25)
_HOPPER = _attends(0.56, 0.21, 450)
_BLACKWELL, _BLACKWELL_ULTRA = _attends(0.38, 0.15), _attends(0.5, 0.15)
"""Blackwell doubled the products and not the exponentials between them, which Blackwell Ultra then did."""

DEVICES: dict[str, Device] = {
    "v100": _device(
        "v100", "V100-SXM2-32GB", 31.7, 900, 300, matmul=0.72,
        host_bandwidth=12 * _G, **_VOLTA
    ),
    "a100-40": _device(
        "a100", "A100-SXM4-40GB", 39.4, 1555, 400, matmul=0.77, matmul_knee=62,
        host_bandwidth=25 * _G, **_AMPERE
    ),
    "h100": _device(
        "h100", "H100-SXM5-80GB", 79.1, 3350, 700, matmul=0.67, matmul_float8=0.64,
        matmul_knee=80, **_HOPPER
    ),
    "h100-96": _device(
        "h100", "H100-96GB-500W", 94.5, 2400, 500, matmul=0.52, matmul_float8=0.53,
        **_attends(0.43, 0.21, 450)
    ),
    "h200": _device(
        "h200", "H200-SXM5-141GB", 139.8, 4800, 700, matmul=0.735, matmul_float8=0.76,
        stream=0.8, **_HOPPER
    ),
    # Blackwell's products are held back by power: 1.1 to 1.3 TFLOP/s a watt in bfloat16, twice that in 8
    # bits.
    "b200": _device(
        "b200", "B200-180GB", 178.0, 7700, 1000, matmul=0.5, matmul_float8=0.5,
        **_BLACKWELL
    ),
    "gb200": _device(
        "gb200", "GB200-186GB", 184.0, 8000, 1200, matmul=0.6, matmul_float8=0.6,
        host_bandwidth=200 * _G, **_BLACKWELL,
    ),
    "b300": _device(
        "b300", "B300-270GB", 268.0, 7700, 1200, matmul=0.6, matmul_float8=0.6,
        **_BLACKWELL_ULTRA
    ),
    "gb300": _device(
        "gb300", "GB300-278GB", 276.0, 8000, 1400, matmul=0.73, matmul_float8=0.73,
        host_bandwidth=200 * _G, **_BLACKWELL_ULTRA,
    ),
    "mi300x": _device("mi300x", "MI300X-192GB", 191.5, 5300, 750, matmul=0.5, **_CDNA3),
    "cpu": Device(
        "CPU", 16 * GIB,
        {"float32": 0.1 * _T, "bfloat16": 0.1 * _T, "float16": 0.02 * _T, "float64": 0.05 * _T},
        20 * _G, watts=100, matmul=1.0, matmul_knee=16.0, attention=0.3, stream=0.7, launch=10 * _US,
        overhead=0.4 * GIB, host_bandwidth=20 * _G, overlap=0.0,
    ),
}  # fmt: skip
DEVICES["a100-80"] = replace(
    DEVICES["a100-40"], name="A100-SXM4-80GB", memory=79.2 * GIB, bandwidth=2039 * _G
)


def _nvlink(gb_s: float) -> Link:
    """What one device reaches on its node's NVLink, of the maker's figure in one direction."""
    return Link(0.8 * gb_s * _G, 2.5 * _US)


def _network(gbit_s: float, latency_us: float = 12.0) -> Link:
    """A device's share of the network, at nine tenths of the line's rate."""
    return Link(0.9 * gbit_s / 8 * _G, latency_us * _US)


_HF_ALL_REDUCE = {2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9}
_HF_ALL_GATHER = {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}
_HF_REDUCE_SCATTER = {2: 181.6, 4: 115.8, 8: 68.6, 16: 54.5, 32: 27.9, 64: 11.1}


def _hf_rows() -> tuple[Measured, ...]:
    """Bus bandwidth of whole nodes of eight, by nodes, as the Ultra-Scale Playbook measured it; a device has
    an eighth."""
    tables = {
        "all_reduce": _HF_ALL_REDUCE,
        "all_gather": _HF_ALL_GATHER,
        "reduce_scatter": _HF_REDUCE_SCATTER,
    }
    return tuple(
        Measured(kind, nodes, 12 * _US * (nodes - 1), busbw * _G / 8)
        for kind, table in tables.items()
        for nodes, busbw in table.items()
    )


CLUSTERS: dict[str, Cluster] = {
    "v100": Cluster("v100", DEVICES["v100"], 8, 1, _nvlink(150), _network(100 / 8 * 4)),
    "dgx2": Cluster("dgx2", DEVICES["v100"], 16, 1, _nvlink(150), _network(100)),
    "a100-40": Cluster("a100-40", DEVICES["a100-40"], 8, 1, _nvlink(300), _network(200)),
    "a100-80": Cluster("a100-80", DEVICES["a100-80"], 8, 1, _nvlink(300), _network(200)),
    "h100": Cluster("h100", DEVICES["h100"], 8, 1, _nvlink(450), _network(400)),
    "h100-96": Cluster("h100-96", DEVICES["h100-96"], 8, 1, _nvlink(450), _network(400)),
    "h200": Cluster("h200", DEVICES["h200"], 8, 1, _nvlink(450), _network(400)),
    "b200": Cluster("b200", DEVICES["b200"], 8, 1, _nvlink(900), _network(400)),
    "b300": Cluster("b300", DEVICES["b300"], 8, 1, _nvlink(900), _network(800)),
    "gb200": Cluster("gb200", DEVICES["gb200"], 64, 1, _nvlink(900), _network(400)),
    "gb300": Cluster("gb300", DEVICES["gb300"], 64, 1, _nvlink(900), _network(800)),
    "mi300x": Cluster("mi300x", DEVICES["mi300x"], 8, 1, Link(0.8 * 448 * _G, 4 * _US), _network(400)),
    "cpu": Cluster("cpu", DEVICES["cpu"], 4, 1, Link(2 * _G, 50 * _US), _network(10, 60), shared=True),
    # The clouds' networks, per device.
    "a100-aws-p4d": Cluster("a100-aws-p4d", DEVICES["a100-40"], 8, 1, _nvlink(300), _network(50, 25)),
    "a100-aws-p4de": Cluster("a100-aws-p4de", DEVICES["a100-80"], 8, 1, _nvlink(300), _network(50, 25)),
    "a100-azure-nd": Cluster("a100-azure-nd", DEVICES["a100-80"], 8, 1, _nvlink(300), _network(200)),
    "a100-gcp-a2": Cluster("a100-gcp-a2", DEVICES["a100-40"], 8, 1, _nvlink(300), _network(12.5, 30)),
    "h100-aws-p5": Cluster("h100-aws-p5", DEVICES["h100"], 8, 1, _nvlink(450), _network(400, 25)),
    "h200-aws-p5en": Cluster("h200-aws-p5en", DEVICES["h200"], 8, 1, _nvlink(450), _network(400, 20)),
    "h100-azure-nd": Cluster("h100-azure-nd", DEVICES["h100"], 8, 1, _nvlink(450), _network(400)),
    "h100-gcp-a3": Cluster("h100-gcp-a3", DEVICES["h100"], 8, 1, _nvlink(450), _network(100, 25)),
    "h100-gcp-a3-mega": Cluster("h100-gcp-a3-mega", DEVICES["h100"], 8, 1, _nvlink(450), _network(200, 25)),
    "mi300x-azure-nd": Cluster(
        "mi300x-azure-nd", DEVICES["mi300x"], 8, 1, Link(0.8 * 448 * _G, 4 * _US), _network(400)
    ),
    # The cluster of the Ultra-Scale Playbook's sweep, whose network was measured.
    "h100-hf": Cluster(
        "h100-hf",
        DEVICES["h100"],
        8,
        1,
        Link(360 * _G, 2.5 * _US),
        replace(_network(400), measured=_hf_rows()),
    ),
}

_HOSTS: dict[str, tuple[float, float]] = {
    # GiB of a node's own memory, and GB/s of it: about seven tenths of what its channels do by their data
    # sheet.
    "v100": (480, 110), "dgx2": (1400, 180), "a100-40": (950, 290), "a100-80": (1900, 290), "h100": (1900,
    430),
    "h100-96": (1900, 430), "h200": (1900, 430), "b200": (1900, 500), "b300": (1900, 500), "gb200": (14300,
    11500),
    "gb300": (14300, 11500), "mi300x": (2200, 640), "cpu": (16, 20), "a100-aws-p4d": (1100, 250),
    "a100-aws-p4de": (1100, 250),
    "a100-azure-nd": (1800, 290), "a100-gcp-a2": (630, 200), "h100-aws-p5": (1950, 430),
    "h200-aws-p5en": (1950, 430),
    "h100-azure-nd": (1800, 430), "h100-gcp-a3": (1740, 430), "h100-gcp-a3-mega": (1740, 430),
    "mi300x-azure-nd": (1800, 430),
    "h100-hf": (1900, 430),
}  # fmt: skip
for _name, (_gib, _gb_s) in _HOSTS.items():
    CLUSTERS[_name] = replace(CLUSTERS[_name], host_memory=_gib * GIB, host_memory_bandwidth=_gb_s * _G)


def named(name: str) -> Cluster:
    """The preset of this name, with as many devices as the name says (`h100x64`), else one node."""
    match = re.fullmatch(r"(.+?)(?:x(\d+))?", name.strip().lower())
    base, count = (match.group(1), match.group(2)) if match else (name, None)
    if base not in CLUSTERS:
        near = get_close_matches(base, CLUSTERS, n=3, cutoff=0.4)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        known = ", ".join(sorted(CLUSTERS))
        raise UserError(
            f"cluster.preset = {name!r}: unknown; {meant}Known are {known}; for another, give cluster.file"
        )
    cluster = CLUSTERS[base]
    if count is None:
        return cluster
    if int(count) < 1:
        raise UserError(f"cluster.preset = {name!r}: give at least one device, as in {base}x8")
    return replace(_of(cluster, int(count), f"cluster.preset = {name!r}"), name=f"{base}x{int(count)}")


def requested_cluster(asked: ClusterSection) -> Cluster | None:
    """Return the cluster that a job names, with as many devices as it says; None if it names none."""
    if asked.file is None and asked.preset is None:
        return None
    cluster = read_cluster(Path(asked.file), CLUSTERS) if asked.file else named(str(asked.preset))
    return _of(cluster, asked.devices, f"cluster.devices = {asked.devices}") if asked.devices else cluster


def _of(cluster: Cluster, devices: int, asked: str) -> Cluster:
    """So many devices of it, if they are whole nodes or part of one."""
    per_node = cluster.devices_per_node
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        raise UserError(
            f"{asked}: {devices} devices are not whole nodes of {per_node}; use {below} or "
            f"{below + per_node}, or a cluster.file with another devices_per_node"
        )
    return cluster.of(devices)
