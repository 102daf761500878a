"""Devices and clusters by name.

Memory, bandwidth, power and peaks (cost/device_peaks.py) are the makers' figures. What devices reach in a
running training step is measured or published: matrix products in the "maximum achievable matmul FLOPS"
tables of the ML engineering handbook, attention in the papers on flash attention, links by nccl-tests. Each
device and each cluster has one set of constants, which does not depend on the model.

A name followed by x and a number gives the number of devices: `h100x64` is eight nodes of eight. The name of
a cloud selects its network: `h100-gcp-a3x64`.
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
    """Return a device, with the peaks of this row of cost/device_peaks.py. `figures` are those that differ
    from the defaults of `Device`."""
    return Device(name, gib * GIB, PEAKS[peaks].flops, gb_s * _G, watts=watts, **figures)


def _attends(native: float, portable: float, knee: float = 400.0) -> dict[str, float]:
    """Return the figures of attention: for kernels written for this architecture, and for older ones."""
    return {"attention": native, "attention_portable": portable, "attention_knee": knee}


_VOLTA, _AMPERE, _CDNA3 = _attends(0.3, 0.3), _attends(0.42, 0.42, 310), _attends(0.25, 0.25)
_HOPPER = _attends(0.56, 0.21, 450)
_BLACKWELL, _BLACKWELL_ULTRA = _attends(0.38, 0.15), _attends(0.5, 0.15)
"""Blackwell doubled the speed of products, but not that of the exponentials between them; Blackwell Ultra
doubled that too."""

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
    # Power limits Blackwell's products to 1.1 to 1.3 TFLOP/s per watt in bfloat16, and twice that in 8 bits.
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
    """Return the NVLink of one device, which reaches 0.8 of the maker's figure for one direction."""
    return Link(0.8 * gb_s * _G, 2.5 * _US)


def _network(gbit_s: float, latency_us: float = 12.0) -> Link:
    """Return one device's share of the network, which reaches 0.9 of the line's rate."""
    return Link(0.9 * gbit_s / 8 * _G, latency_us * _US)


_HF_ALL_REDUCE = {2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9}
_HF_ALL_GATHER = {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}
_HF_REDUCE_SCATTER = {2: 181.6, 4: 115.8, 8: 68.6, 16: 54.5, 32: 27.9, 64: 11.1}


def _hf_rows() -> tuple[Measured, ...]:
    """Return the bus bandwidths that the Ultra-Scale Playbook measured on whole nodes, by number of nodes.

    Each of a node's eight devices has an eighth.
    """
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


def _preset(
    name: str, device: str, inside: Link, network: Link, host_gib: float, host_gb_s: float, per_node: int = 8
) -> Cluster:
    """Return one node of a preset. `host_gib` and `host_gb_s` are the size of a node's own memory, and its
    bandwidth: about seven tenths of the data sheet's figure for its channels."""
    return Cluster(
        name,
        DEVICES[device],
        per_node,
        1,
        inside,
        network,
        shared=device == "cpu",
        host_memory=host_gib * GIB,
        host_memory_bandwidth=host_gb_s * _G,
    )


_MI300X_LINK = Link(0.8 * 448 * _G, 4 * _US)
_PRESETS = (
    _preset("v100", "v100", _nvlink(150), _network(100 / 8 * 4), 480, 110),
    _preset("dgx2", "v100", _nvlink(150), _network(100), 1400, 180, per_node=16),
    _preset("a100-40", "a100-40", _nvlink(300), _network(200), 950, 290),
    _preset("a100-80", "a100-80", _nvlink(300), _network(200), 1900, 290),
    _preset("h100", "h100", _nvlink(450), _network(400), 1900, 430),
    _preset("h100-96", "h100-96", _nvlink(450), _network(400), 1900, 430),
    _preset("h200", "h200", _nvlink(450), _network(400), 1900, 430),
    _preset("b200", "b200", _nvlink(900), _network(400), 1900, 500),
    _preset("b300", "b300", _nvlink(900), _network(800), 1900, 500),
    _preset("gb200", "gb200", _nvlink(900), _network(400), 14300, 11500, per_node=64),
    _preset("gb300", "gb300", _nvlink(900), _network(800), 14300, 11500, per_node=64),
    _preset("mi300x", "mi300x", _MI300X_LINK, _network(400), 2200, 640),
    _preset("cpu", "cpu", Link(2 * _G, 50 * _US), _network(10, 60), 16, 20, per_node=4),
    # The clouds' networks, per device.
    _preset("a100-aws-p4d", "a100-40", _nvlink(300), _network(50, 25), 1100, 250),
    _preset("a100-aws-p4de", "a100-80", _nvlink(300), _network(50, 25), 1100, 250),
    _preset("a100-azure-nd", "a100-80", _nvlink(300), _network(200), 1800, 290),
    _preset("a100-gcp-a2", "a100-40", _nvlink(300), _network(12.5, 30), 630, 200),
    _preset("h100-aws-p5", "h100", _nvlink(450), _network(400, 25), 1950, 430),
    _preset("h200-aws-p5en", "h200", _nvlink(450), _network(400, 20), 1950, 430),
    _preset("h100-azure-nd", "h100", _nvlink(450), _network(400), 1800, 430),
    _preset("h100-gcp-a3", "h100", _nvlink(450), _network(100, 25), 1740, 430),
    _preset("h100-gcp-a3-mega", "h100", _nvlink(450), _network(200, 25), 1740, 430),
    _preset("mi300x-azure-nd", "mi300x", _MI300X_LINK, _network(400), 1800, 430),
    # The cluster of the Ultra-Scale Playbook's sweep, whose network was measured.
    _preset(
        "h100-hf",
        "h100",
        Link(360 * _G, 2.5 * _US),
        replace(_network(400), measured=_hf_rows()),
        1900,
        430,
    ),
)
CLUSTERS: dict[str, Cluster] = {cluster.name: cluster for cluster in _PRESETS}


def named(name: str) -> Cluster:
    """Return the preset of this name: with as many devices as the name says (`h100x64`), else one node."""
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
    resized = _with_devices(cluster, int(count), f"cluster.preset = {name!r}")
    return replace(resized, name=f"{base}x{int(count)}")


def requested_cluster(section: ClusterSection) -> Cluster | None:
    """Return the cluster that a job names, with as many devices as it says; None if it names none."""
    if section.file is None and section.preset is None:
        return None
    cluster = read_cluster(Path(section.file), CLUSTERS) if section.file else named(str(section.preset))
    if not section.devices:
        return cluster
    return _with_devices(cluster, section.devices, f"cluster.devices = {section.devices}")


def _with_devices(cluster: Cluster, devices: int, setting: str) -> Cluster:
    """Return the cluster with this many devices, if they are whole nodes or part of one."""
    per_node = cluster.devices_per_node
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        raise UserError(
            f"{setting}: {devices} devices are not whole nodes of {per_node}; use {below} or "
            f"{below + per_node}, or a cluster.file with another devices_per_node"
        )
    return cluster.with_devices(devices)
