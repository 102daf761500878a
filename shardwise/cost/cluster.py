"""A cluster as the planner sees it: what a device computes, what its memory moves, and what a link carries.

Devices sit in nodes. A group of devices that talk to each other lies inside one node, or spans several; inside, its members use
the links of the node (NVLink, shared memory), between nodes each device has its own share of the network. Every figure is a
number a data sheet or `shardwise probe` gives; a file holds them in the units people say (TFLOP/s, GB/s, microseconds), the
classes below in FLOP/s, bytes/s and seconds.

A product of matrices (M x K) by (K x N) takes

    2 M N K / (peak x matmul) x (1 + knee (1/M + 1/N + 1/K))

`matmul` is the share of the peak that large products reach in a running training step (power limits included), `knee` the length
at which a short side costs as much as the work itself. Flash attention has a share and a knee of its own, over the sequence.

What collectives cost is in `cost/collectives.py`. Where a link was measured, `measured` holds for each kind of collective and
number of devices (inside) or nodes (between) the latency and the bandwidth found, and these go before the link's own figures.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.errors import ConfigError, UserError

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
KINDS: tuple[str, ...] = get_args(Kind)
PRECISIONS = ("float64", "float32", "bfloat16", "float16", "float8", "float4")
GIB = 2.0**30


@dataclass(frozen=True)
class Device:
    """One device: a GPU, or a CPU worker."""

    name: str
    memory: float
    """Bytes that a training process may use."""
    peak: Mapping[str, float]
    """Dense FLOP/s by precision: float32, bfloat16, float16, float8; float64 where it was measured."""
    bandwidth: float
    """Bytes/s of device memory, by the data sheet."""
    matmul: float = 0.75
    matmul_float8: float = 0.65
    """The same for products of 8 or 4 bits, whose peak is higher and whose power is not."""
    matmul_knee: float = 64.0
    attention: float = 0.5
    """Share of the peak that the forward pass of attention reaches on long sequences; backward reaches less."""
    attention_portable: float = 0.5
    """The same for kernels that were not written for this device (FlashAttention-2 on a Hopper)."""
    attention_knee: float = 400.0
    stream: float = 0.85
    """Share of the memory's bandwidth that elementwise kernels reach."""
    launch: float = 5e-6
    """Seconds the host needs to start one kernel."""
    overhead: float = 1.5 * GIB
    """Bytes that each worker's runtime, libraries and communication buffers take, whatever is trained."""
    host_bandwidth: float = 50e9
    """Bytes/s to and from the host's memory."""
    overlap: float = 1.0
    """Share of the communication that can run beside computing: 1 on a GPU, 0 where the same cores do both."""
    watts: float | None = None


@dataclass(frozen=True)
class Measured:
    """What one kind of collective was found to do on so many devices of a node, or on so many nodes."""

    kind: str
    members: int
    latency: float
    bandwidth: float
    """Bus bandwidth of one device in bytes/s: what a ring's formula must be given to answer with the time measured."""


@dataclass(frozen=True)
class Link:
    """What one device can send while it receives as much."""

    bandwidth: float
    latency: float
    """Seconds of one hop."""
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, and the links between them."""

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    inside: Link
    between: Link
    shared: bool = False
    """Whether the workers of a node share one device's figures, as CPU workers share cores and memory."""
    price: float | None = None
    """Of one device for an hour, in any currency."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Factors on predicted terms, folded in from earlier runs by `shardwise report --calibrate`."""

    @property
    def devices(self) -> int:
        """All of them."""
        return self.devices_per_node * self.nodes

    def of(self, devices: int) -> Cluster:
        """The same kind of cluster with so many devices: whole nodes, or a part of one."""
        per_node = min(self.devices_per_node, devices)
        return replace(self, nodes=-(-devices // per_node), devices_per_node=per_node)


# -- files --------------------------------------------------------------------------------------------------------------

_UNITS: dict[str, tuple[str, float]] = {
    # key in a file: field, factor to the field's unit
    "memory_gib": ("memory", GIB),
    "bandwidth_gb_s": ("bandwidth", 1e9),
    "launch_us": ("launch", 1e-6),
    "overhead_gib": ("overhead", GIB),
    "host_gb_s": ("host_bandwidth", 1e9),
    "latency_us": ("latency", 1e-6),
}
_DEVICE = ("name", "memory_gib", "bandwidth_gb_s", "matmul", "matmul_float8", "matmul_knee", "attention",
           "attention_portable", "attention_knee", "stream",
           "launch_us", "overhead_gib", "host_gb_s", "overlap", "watts", "peak")  # fmt: skip
_NEEDED = {"device": ("memory_gib", "bandwidth_gb_s", "peak"), "link": ("bandwidth_gb_s", "latency_us")}
_TOP = ("name", "preset", "nodes", "devices_per_node", "shared", "price", "device", "inside", "between", "corrections")
_SHARES = ("matmul", "matmul_float8", "attention", "attention_portable", "stream", "overlap")
_MAY_BE_ZERO = ("matmul_knee", "attention_knee", "launch_us", "overhead_gib", "overlap", "latency_us", "price")


def read_cluster(path: Path, presets: Mapping[str, Cluster]) -> Cluster:
    """The cluster that a file describes, whole or as changes to a preset; every problem in it is reported at once."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cluster.file = '{path}': cannot be read ({reason}); `shardwise probe` writes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"cluster.file = '{path}': is not TOML ({error})") from None
    problems = _problems(table, presets)
    if problems:
        raise ConfigError(f"cluster.file = '{path}'", problems)
    return _cluster(table, presets, path.stem)


def _problems(table: Mapping[str, Any], presets: Mapping[str, Cluster]) -> list[str]:
    found = [f"{key}: unknown; known are {', '.join(_TOP)}" for key in table if key not in _TOP]
    preset = table.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in presets):
        found.append(f"preset = {preset!r}: unknown; known are {', '.join(sorted(presets))}")
    for key in ("nodes", "devices_per_node"):
        value = table.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{key} = {value!r}: give a whole number from 1")
    found += _text("name", table)
    if not isinstance(table.get("shared", False), bool):
        found.append(f"shared = {table['shared']!r}: give true or false")
    if preset is None and "between" not in table and isinstance(table.get("nodes"), int) and table["nodes"] > 1:
        found.append("between: missing, with several nodes; give bandwidth_gb_s and latency_us of one device's network")
    if "price" in table:
        found += _number("price", table["price"])
    found += _device_problems(table.get("device", {}), whole=preset is None)
    for name in ("inside", "between"):
        found += _link_problems(name, table.get(name, {}), whole=preset is None)
    corrections = table.get("corrections", {})
    if not isinstance(corrections, dict):
        return [*found, "corrections: give a table, [corrections]"]
    return [*found, *(problem for name, value in corrections.items() for problem in _number(f"corrections.{name}", value))]


def _text(key: str, table: Mapping[str, Any], where: str = "") -> list[str]:
    good = isinstance(table.get(key, ""), str)
    return [] if good else [f"{where}{key} = {table[key]!r}: give a text"]


def _device_problems(device: Any, whole: bool) -> list[str]:
    if not isinstance(device, dict):
        return ["device: give a table, [device]"]
    found = [f"device.{key}: unknown; known are {', '.join(_DEVICE)}" for key in device if key not in _DEVICE]
    found += _text("name", device, "device.")
    if whole:
        found += [f"device.{key}: missing (or give a preset to change)" for key in _NEEDED["device"] if key not in device]
    for key, value in device.items():
        if key == "peak":
            if not isinstance(value, dict) or not value:
                found.append("device.peak: give TFLOP/s by precision, as in { bfloat16 = 989 }")
                continue
            for precision, peak in value.items():
                known = precision in PRECISIONS
                unknown = f"device.peak.{precision}: unknown; known are {', '.join(PRECISIONS)}"
                found += _number(f"device.peak.{precision}", peak) if known else [unknown]
        elif key in _DEVICE and key != "name":
            found += _number(f"device.{key}", value)
    return found


def _link_problems(name: str, link: Any, whole: bool) -> list[str]:
    if not isinstance(link, dict):
        return [f"{name}: give a table, [{name}]"]
    known = (*_NEEDED["link"], "measured")
    found = [f"{name}.{key}: unknown; known are {', '.join(known)}" for key in link if key not in known]
    if whole and (link or name == "inside"):
        found += [f"{name}.{key}: missing" for key in _NEEDED["link"] if key not in link]
    for key in _NEEDED["link"]:
        if key in link:
            found += _number(f"{name}.{key}", link[key])
    measured = link.get("measured", [])
    if not isinstance(measured, list):
        return [*found, f"{name}.measured: give rows, [[{name}.measured]]"]
    for row in measured:
        wanted = {"kind", "members", *_NEEDED["link"]}
        if not isinstance(row, dict) or set(row) != wanted or row["kind"] not in KINDS:
            found.append(f"{name}.measured: each row has kind (of {', '.join(KINDS)}), members, latency_us and bandwidth_gb_s")
            break
        if not isinstance(row["members"], int) or isinstance(row["members"], bool) or row["members"] < 2:
            found.append(f"{name}.measured.members = {row['members']!r}: give a whole number from 2")
        found += [p for key in _NEEDED["link"] for p in _number(f"{name}.measured.{key}", row[key])]
    return found


def _number(key: str, value: Any) -> list[str]:
    last = key.rsplit(".", 1)[-1]
    least = "0 or more" if last in _MAY_BE_ZERO else "more than 0"
    good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not good or value < 0 or (value == 0 and last not in _MAY_BE_ZERO):
        return [f"{key} = {value!r}: give a number, {least}"]
    if last in _SHARES and not key.startswith("corrections.") and value > 1:
        return [f"{key} = {value!r}: is a share; give a number from 0 to 1"]
    return []


def _cluster(table: Mapping[str, Any], presets: Mapping[str, Cluster], name: str) -> Cluster:
    base = presets.get(str(table.get("preset")))
    figures = _fields(table.get("device", {}))
    if "peak" in figures:
        old = base.device.peak if base else {}
        figures["peak"] = {**old, **{precision: 1e12 * value for precision, value in figures["peak"].items()}}
    device = replace(base.device, **figures) if base else Device(**{"name": name, **figures})
    inside = _link(table.get("inside", {}), base.inside if base else None)
    between = _link(table.get("between", {}), base.between if base else replace(inside, measured=()))
    keys = ("nodes", "devices_per_node", "shared", "price", "corrections")
    rest = {"name": name, "nodes": 1, "devices_per_node": 1, **{key: table[key] for key in ("name", *keys) if key in table}}
    if base is None:
        return Cluster(device=device, inside=inside, between=between, **rest)
    own = {key: value for key, value in rest.items() if key in table or key == "name"}
    return replace(base, device=device, inside=inside, between=between, **own)


def _link(table: Mapping[str, Any], base: Link | None) -> Link:
    rows = tuple(Measured(**_fields(row)) for row in table.get("measured", ()))
    own = _fields({key: value for key, value in table.items() if key != "measured"})
    if rows:
        own["measured"] = rows
    if base is not None:
        return replace(base, **own)
    return Link(**own)


def _fields(table: Mapping[str, Any]) -> dict[str, Any]:
    named = {_UNITS.get(key, (key, 1.0)): value for key, value in table.items()}
    return {name: value * factor if (name, factor) in _UNITS.values() else value for (name, factor), value in named.items()}


def write_cluster(cluster: Cluster) -> str:
    """The text of the file that describes this cluster."""
    top: dict[str, Any] = {"name": cluster.name, "nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node}
    if cluster.shared:
        top["shared"] = True
    if cluster.price is not None:
        top["price"] = cluster.price
    lines = [f"{key} = {_toml(value)}" for key, value in top.items()]
    device = {key: getattr(cluster.device, _UNITS.get(key, (key, 1.0))[0]) for key in _DEVICE}
    device["peak"] = {precision: value / 1e12 for precision, value in cluster.device.peak.items()}
    lines += ["", "[device]", *_rows(device)]
    for name in ("inside", "between"):
        link: Link = getattr(cluster, name)
        lines += ["", f"[{name}]", *_rows({"bandwidth_gb_s": link.bandwidth, "latency_us": link.latency})]
        for row in link.measured:
            table = {"kind": row.kind, "members": row.members, "latency_us": row.latency, "bandwidth_gb_s": row.bandwidth}
            lines += ["", f"[[{name}.measured]]", *_rows(table)]
    if cluster.corrections:
        lines += ["", "[corrections]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in cluster.corrections.items())]
    return "\n".join(lines) + "\n"


def _rows(table: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} = {_toml(value / _UNITS[key][1] if key in _UNITS else value)}"
        for key, value in table.items()
        if value is not None
    ]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else _toml(key)
