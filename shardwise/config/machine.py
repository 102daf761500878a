"""The table `[cluster]` of a job, and the names of devices and of recomputation modes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwise.section import Degree, Section

Device = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "selective", "all-but-attention", "full"]


class ClusterSection(Section):
    """The cluster that the planner plans for. Left out: this machine, measured once."""

    preset: str | None = Field(
        None,
        description="a named cluster with a number of devices, such as `h100x64`; docs/planner.md lists the "
        "names",
    )
    file: str | None = Field(
        None, description="a cluster file as `shardwise probe` writes it, instead of a preset"
    )
    devices: Degree | None = Field(
        None, description="number of devices to plan for; left out: all devices of the preset or file"
    )
    margin: float = Field(0.08, ge=0, lt=1, description="share of a device's memory that a plan leaves free")
