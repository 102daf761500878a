"""The `Plan`: what a run will do, decided once by the process that starts the workers, and obeyed by every worker.

It holds a complete layout and the other choices, for each of them whether it was asked for or chosen and why, and the numbers
behind them. It is plain data: it travels with a team to every worker, as JSON between hosts, and a run keeps it as plan.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.config import Config, Layout
from shardwise.plan.flops import FLOP_CONVENTION
from shardwise.plan.memory import StateBytes

GIB = 2**30
Recompute = Literal["none", "selective", "full"] | float
DEFAULT = "the default"
"""Why a setting is as it is, where nobody gave it and nothing decides it."""


@dataclass(frozen=True)
class Decision:
    """The value of one setting: as it was asked for, or as it was chosen and why."""

    value: Any
    asked: bool
    why: str


@dataclass(frozen=True)
class Plan:
    """What every worker of a team obeys."""

    layout: Layout
    """Complete: no field is left open."""
    micro_batch: int
    accumulation: int
    """Micro-batches of one step on one device."""
    recompute: Recompute
    decisions: Mapping[str, Decision]
    """By the setting's name in a job: `layout.zero`, `train.micro_batch`."""
    parameters: int
    flops_per_token: float
    state_bytes: StateBytes
    flop_convention: str = FLOP_CONVENTION
    cluster_file: str | None = None
    """The file that describes the cluster, where one does: also this machine's, which a job need not name."""
    predicted: dict[str, Any] | None = None
    """What a step will take (search/forecast.py), where the cluster is known."""
    unpredicted: str | None = None
    """Why nothing is predicted though the cluster is known."""

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.layout.world

    def put_into(self, config: Config) -> Config:
        """The job with nothing left open: as the cost model wants it."""
        train = config.train.model_copy(update={"micro_batch": self.micro_batch, "recompute": self.recompute})
        return config.model_copy(update={"layout": self.layout, "train": train})

    def chosen(self) -> str:
        """What was neither asked for nor a default, and why, in a line."""
        by_reason: dict[str, list[str]] = {}
        for name, decision in self.decisions.items():
            if not decision.asked and decision.why != DEFAULT and decision.value is not None:
                value = list(decision.value) if isinstance(decision.value, tuple) else decision.value
                by_reason.setdefault(decision.why, []).append(f"{name.partition('.')[2]} {value}")
        return "; ".join(f"{', '.join(settings)}: {why}" for why, settings in by_reason.items()) or "all as asked"

    def to_json(self) -> dict[str, Any]:
        """What plan.json holds, and what is sent to other hosts; `from_json` gives the same plan again."""
        memory = {name: value / GIB for name, value in asdict(self.state_bytes).items()}  # exact: a power of two
        return {
            "layout": self.layout.model_dump(mode="json"),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "recompute": self.recompute,
            "decisions": {name: _listed(asdict(decision)) for name, decision in self.decisions.items()},
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "flop_convention": self.flop_convention,
            "memory_gib": {**memory, "states": self.state_bytes.total / GIB},
            "cluster_file": self.cluster_file,
            "predicted": self.predicted,
            "unpredicted": self.unpredicted,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """A plan as another host sent it, or as a run keeps it."""
        fields = {name: part for name, part in value.items() if name != "memory_gib"}
        memory = {name: part * GIB for name, part in value["memory_gib"].items() if name != "states"}
        decisions = {name: Decision(**_tupled(decision)) for name, decision in value["decisions"].items()}
        layout = Layout.model_validate(value["layout"])
        return cls(**{**fields, "layout": layout, "decisions": decisions, "state_bytes": StateBytes(**memory)})


def _listed(decision: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where the stages of a layout are a tuple."""
    return {name: list(part) if isinstance(part, tuple) else part for name, part in decision.items()}


def _tupled(decision: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(part) if isinstance(part, list) else part for name, part in decision.items()}
