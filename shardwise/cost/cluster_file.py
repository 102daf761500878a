"""Cluster files: a `Cluster` as TOML, in common units (TFLOP/s, GB/s, GiB, microseconds).

A file describes a whole cluster, or names a preset and gives only what differs from it. The tables below
define what a file may contain. Pydantic checks it, and all problems are reported at once, each with what to
give instead. Figures are written with six digits, which is more than they are accurate to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import tomli_w
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from shardwise.config.dtype_names import PeakPrecision
from shardwise.cost.cluster import KINDS, Cluster, Device, Kind, Link, Measured
from shardwise.errors import ConfigError, UserError, shown
from shardwise.files import Json, parse_toml, read_bytes
from shardwise.plans.step_terms import TERMS, Term
from shardwise.section import Section
from shardwise.units import GIB

_LARGEST = 1e18
"""Largest figure in a file, so that its product with a unit is finite."""
_MOST = 2**24
"""Largest number of nodes, and of devices in a node."""


def _or(advice: str) -> WrapValidator:
    """Return a validator that answers every wrong value with this advice."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError as error:
            detail = error.errors()[0]
            most = detail["ctx"]["le"] if detail["type"] == "less_than_equal" else 1
            limit = f", at most {most:g}" if most > 1 else ""
            raise PydanticCustomError("advice", "{advice}", {"advice": advice + limit}) from None

    return WrapValidator(check)


# Every key may be left out if there is a preset. `_missing` reports the keys that a file without one lacks.
_Text = Annotated[str | None, _or("give a text")]
_Flag = Annotated[bool | None, _or("give true or false")]
_Count = Annotated[int | None, Field(ge=1, le=_MOST), _or("give a whole number from 1")]
_Members = Annotated[int, Field(ge=2, le=_MOST), _or("give a whole number from 2")]
_AboveZero = Annotated[float | None, Field(gt=0, le=_LARGEST), _or("give a number, more than 0")]
_FromZero = Annotated[float | None, Field(ge=0, le=_LARGEST), _or("give a number, 0 or more")]
_Share = Annotated[float | None, Field(gt=0, le=1), _or("is a share; give a number from 0 to 1, more than 0")]
_ShareOrNone = Annotated[float | None, Field(ge=0, le=1), _or("is a share; give a number from 0 to 1")]


class DeviceTable(Section):
    """[device]: as `Device`, in the units of its keys."""

    name: _Text = None
    memory_gib: _AboveZero = None
    bandwidth_gb_s: _AboveZero = None
    matmul: _Share = None
    matmul_float8: _Share = None
    matmul_knee: _FromZero = None
    attention: _Share = None
    attention_portable: _Share = None
    attention_knee: _FromZero = None
    stream: _Share = None
    launch_us: _FromZero = None
    overhead_gib: _FromZero = None
    host_gb_s: _AboveZero = None
    overlap: _ShareOrNone = None
    watts: _AboveZero = None
    peak: Annotated[dict[PeakPrecision, _AboveZero] | None, Field(min_length=1)] = None
    """Peak speed by precision in TFLOP/s."""


class MeasuredRow(Section):
    """A row of `measured`: as `Measured`."""

    kind: Kind
    members: _Members
    latency_us: _FromZero
    bandwidth_gb_s: _AboveZero


class LinkTable(Section):
    """[inside] or [between]: as `Link`."""

    bandwidth_gb_s: _AboveZero = None
    latency_us: _FromZero = None
    measured: list[MeasuredRow] | None = None


class ClusterTable(Section):
    """All tables and keys of a cluster file."""

    name: _Text = None
    preset: _Text = None
    nodes: _Count = None
    devices_per_node: _Count = None
    shared: _Flag = None
    host_memory_gib: _AboveZero = None
    host_memory_gb_s: _AboveZero = None
    price: _FromZero = None
    device: DeviceTable = DeviceTable()
    inside: LinkTable = LinkTable()
    between: LinkTable = LinkTable()
    corrections: dict[Term, _AboveZero] = Field(default_factory=dict)


_UNITS: dict[str, tuple[str, float]] = {
    # key in a file: field, factor to the field's unit
    "memory_gib": ("memory", GIB),
    "bandwidth_gb_s": ("bandwidth", 1e9),
    "launch_us": ("launch", 1e-6),
    "overhead_gib": ("overhead", GIB),
    "host_gb_s": ("host_bandwidth", 1e9),
    "host_memory_gib": ("host_memory", GIB),
    "host_memory_gb_s": ("host_memory_bandwidth", 1e9),
    "latency_us": ("latency", 1e-6),
}
_TFLOP = 1e12
_NEEDED = {
    "device": ("memory_gib", "bandwidth_gb_s", "peak"),
    **dict.fromkeys(("inside", "between"), ("bandwidth_gb_s", "latency_us")),
}


# -- reading -------------------------------------------------------------------------------------------------


def read_cluster(path: Path, presets: Mapping[str, Cluster]) -> Cluster:
    """Return the cluster that a file describes. Raises one error with all problems of the file."""
    source = f"cluster.file = '{path}'"
    try:
        raw = parse_toml(read_bytes(path), source)
    except FileNotFoundError:
        raise UserError(f"{source}: cannot be read (no such file); `shardwise probe` writes one") from None
    problems = list(_missing(raw, presets))
    try:
        table = ClusterTable.model_validate(raw)
    except ValidationError as error:
        explained = [_explain(detail) for detail in error.errors()]
        raise ConfigError(source, list(dict.fromkeys([*explained, *problems]))) from None
    if problems:
        raise ConfigError(source, problems)
    return _cluster(table, presets.get(table.preset or ""), path.stem)


def _missing(raw: Json, presets: Mapping[str, Cluster]) -> Iterator[str]:
    """Yield the problems of the preset: that it is unknown, or which keys a file without one lacks."""
    preset = raw.get("preset")
    if preset is not None:
        if not isinstance(preset, str) or preset not in presets:
            yield f"preset = {shown(preset)}: unknown; known are {', '.join(sorted(presets))}"
        return
    nodes = raw.get("nodes", 1)
    if "between" not in raw and isinstance(nodes, int) and nodes > 1:
        yield (
            "between: missing, with several nodes; give bandwidth_gb_s and latency_us of one device's network"
        )
    for name in ("device", "inside", "between") if raw.get("between") else ("device", "inside"):
        table, advice = raw.get(name, {}), " (or give a preset to change)" if name == "device" else ""
        if isinstance(table, dict):
            lacking = [key for key in _NEEDED[name] if key not in table]
            yield from (f"{name}.{key}: missing{advice}" for key in lacking)


_KEY_ADVICE = {
    "device.peak": "give TFLOP/s by precision, as in { bfloat16 = 989 }",
    "inside.measured": "give rows, [[inside.measured]]",
    "between.measured": "give rows, [[between.measured]]",
}
_ROW_ADVICE = f"each row has kind (of {', '.join(KINDS)}), members, latency_us and bandwidth_gb_s"


def _explain(detail: ErrorDetails) -> str:
    """Return an error of pydantic in words: the key, the given value, and what to give."""
    path = [part for part in detail["loc"] if isinstance(part, str) and part != "[key]"]
    key, problem = ".".join(path), detail["type"]
    if "measured" in path and len(detail["loc"]) > 2 and problem != "advice":
        return f"{path[0]}.measured: {_ROW_ADVICE}"
    if problem == "advice":
        return f"{key} = {shown(detail['input'])}: {detail['msg']}"
    if problem == "extra_forbidden":
        tables: dict[str, type[Section]] = {"device": DeviceTable, "inside": LinkTable, "between": LinkTable}
        table = tables[path[0]] if len(path) > 1 else ClusterTable
        return f"{key}: unknown; known are {', '.join(table.model_fields)}"
    if "[key]" in detail["loc"]:
        known = TERMS if path[0] == "corrections" else get_args(PeakPrecision)
        return f"{key}: unknown; known are {', '.join(known)}"
    return f"{key}: {_KEY_ADVICE.get(key, f'give a table, [{key}]')}"


def _cluster(table: ClusterTable, base: Cluster | None, name: str) -> Cluster:
    """Return the cluster of a file: the preset with the file's values, or the file's values alone."""
    figures = _in_si(table.device)
    if "peak" in figures:
        given_peaks = {precision: _TFLOP * value for precision, value in figures["peak"].items()}
        figures["peak"] = {**(base.device.peak if base else {}), **given_peaks}
    device = replace(base.device, **figures) if base else Device(**{"name": name, **figures})
    inside = _link(table.inside, base.inside if base else None)
    between = _link(table.between, base.between if base else replace(inside, measured=()))
    given = {"name": name, **_in_si(table, exclude={"preset", "device", "inside", "between"})}
    if base is not None:
        return replace(base, device=device, inside=inside, between=between, **given)
    return Cluster(
        device=device, inside=inside, between=between, **{"nodes": 1, "devices_per_node": 1, **given}
    )


def _link(table: LinkTable, base: Link | None) -> Link:
    figures = _in_si(table)
    figures.pop("measured", None)
    if table.measured:
        figures["measured"] = tuple(Measured(**_in_si(row)) for row in table.measured)
    return replace(base, **figures) if base is not None else Link(**figures)


def _in_si(table: Section, exclude: set[str] | None = None) -> dict[str, Any]:
    """Return the fields that a table gives, in FLOP/s, bytes/s, bytes and seconds."""
    given = table.model_dump(exclude_unset=True, exclude=exclude)
    for key in given.keys() & _UNITS.keys():
        name, factor = _UNITS[key]
        given[name] = given.pop(key) * factor
    return given


# -- writing -------------------------------------------------------------------------------------------------


def write_cluster(cluster: Cluster) -> str:
    """Return the text of the file that describes this cluster."""
    top: Json = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
    }
    if cluster.shared:
        top["shared"] = True
    top["host_memory_gib"] = _six_digits(cluster.host_memory / GIB)
    top["host_memory_gb_s"] = _six_digits(cluster.host_memory_bandwidth / 1e9)
    if cluster.price is not None:
        top["price"] = _six_digits(cluster.price)
    device = _in_file_units(cluster.device, DeviceTable)
    device["peak"] = {
        precision: _six_digits(value / _TFLOP) for precision, value in cluster.device.peak.items()
    }
    top |= {"device": device, "inside": _link_table(cluster.inside), "between": _link_table(cluster.between)}
    return tomli_w.dumps(top) + ("\n" + write_corrections(cluster) if cluster.corrections else "")


def write_corrections(cluster: Cluster) -> str:
    """Return the [corrections] table of a file, which `shardwise report --calibrate` writes."""
    factors = {term: _six_digits(factor) for term, factor in cluster.corrections.items()}
    return tomli_w.dumps({"corrections": factors}) if factors else ""


def _link_table(link: Link) -> Json:
    table = _in_file_units(link, LinkTable)
    rows = [_in_file_units(row, MeasuredRow) for row in link.measured]
    return {**table, "measured": rows} if rows else table


def _in_file_units(value: Device | Link | Measured, table: type[Section]) -> Json:
    """Return the fields of a value under the keys of a table, without those that are None."""
    entries: Json = {}
    for key in table.model_fields:
        name, factor = _UNITS.get(key, (key, 1.0))
        field = getattr(value, name)
        if isinstance(field, str | int):
            entries[key] = field
        elif isinstance(field, float):
            entries[key] = _six_digits(field / factor)
    return entries


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
