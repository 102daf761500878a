"""The table `[cluster]` of a job, and the names of devices and of recomputation modes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwise.section import Degree, Section

Device = Literal["auto", "cpu", "cuda"]
Recompute = Literal["none", "selective", "all-but-attention", "full"]


class ClusterSection(Section):
    """What the job runs on, for the planner. Left out: this machine, measured once."""

    preset: str | None = Field(
        None,
        description="a named cluster, with a number of devices: `h100x64`; the names are in docs/planner.md",
    )
    file: str | None = Field(
        None, description="a cluster file, as `shardwise probe` writes it, instead of a preset"
    )
    devices: Degree | None = Field(
        None, description="devices to plan for; left out: all that the preset or the file names"
    )
    margin: float = Field(0.08, ge=0, lt=1, description="share of a device's memory that a plan leaves free")
