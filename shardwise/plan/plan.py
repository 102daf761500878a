"""The `Plan`: what a run will do, decided once by the process that starts the workers, and obeyed by every
worker.

It holds a complete layout and the other choices, for each of them whether it was asked for or chosen and why,
and the numbers behind them. It is plain data: it travels with a team to every worker, as JSON between hosts,
and a run keeps it as plan.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.config import Config, Layout, Recompute
from shardwise.config.compression import SumCompression, WeightGathers
from shardwise.config.dtype_names import BYTES
from shardwise.files import parse_as, read_bytes
from shardwise.optimizers import Optimizer, from_table
from shardwise.plan.compilation import why_not_compiled
from shardwise.plan.engine import Engine, engine_of
from shardwise.plan.float8_choice import casts_once
from shardwise.plan.flops import FLOP_CONVENTION
from shardwise.plan.memory import StateBytes
from shardwise.plan.model_spec import ModelSpec
from shardwise.units import GIB

DEFAULT = "the default"
"""Why a setting is as it is, where nobody gave it and nothing decides it."""


def _with_total(parts: dict[str, Any]) -> dict[str, Any]:
    if "total" not in parts:
        raise ValueError("the total is missing")
    return parts


@dataclass(frozen=True)
class Decision:
    """The value of one setting: as it was asked for, or as it was chosen and why."""

    value: Any
    asked: bool
    why: str


@dataclass(frozen=True)
class Plan:
    """What every worker of a team obeys."""

    model: ModelSpec
    """The model as it is built on one device."""
    layout: Layout
    """Complete: no field is left open."""
    micro_batch: int
    accumulation: int
    """Micro-batches of one step on one device."""
    recompute: Recompute | float
    decisions: Mapping[str, Decision]
    """By the setting's name in a job: `layout.zero`, `train.micro_batch`."""
    optimizer: Optimizer
    compile: bool | Literal["auto"]
    """Whether blocks are compiled; auto: on GPUs."""
    parameters: int
    flops_per_token: float
    state_bytes: StateBytes
    flop_convention: str = FLOP_CONVENTION
    bucket_bytes: int | None = None
    """Of gradients that DistributedDataParallel sums at once (cost/buckets.py); None: as torch does."""
    frozen: int = 0
    """Of the parameters, those that are never trained."""
    cluster_file: str | None = None
    """The file that describes the cluster, where one does: also this machine's, which a job need not name."""
    predicted: dict[str, Any] | None = None
    """What a step will take (search/forecast.py), where the cluster is known."""
    unpredicted: str | None = None
    """Why nothing is predicted though the cluster is known."""
    groups: int = 1
    """That train by themselves, each on this layout."""

    varies_rows: bool = False
    """Whether a device may get another number of rows in each step, so that shapes change."""
    one_copy: bool = False
    """Whether all workers hold one and the same copy of the weights, in memory that they share."""

    @property
    def engine(self) -> Engine:
        """Which engine holds the data axes, and what it moves when."""
        return engine_of(self.layout, self.model.shape.experts)

    @property
    def gradient_sums(self) -> SumCompression | None:
        """How sums of gradients are compressed; None: they are not."""
        return SumCompression.of(self.layout)

    @property
    def weight_gathers(self) -> WeightGathers | None:
        """How sharded weights are gathered; None: as they are."""
        return WeightGathers.of(self.layout)

    def why_not_compiled(self, device: str) -> str | None:
        """Return why blocks are not compiled on this kind of device ("cpu", "cuda"); None: they are."""
        return why_not_compiled(self.compile, device, self.model.float8 is not None, self.layout)

    def is_compiled(self, device: str) -> bool:
        """Return whether blocks go through torch.compile on this kind of device."""
        return self.why_not_compiled(device) is None

    @property
    def casts_weights_once(self) -> bool:
        """Whether weights are cast to float8 once a step, for all its micro-batches."""
        return bool(casts_once(self.accumulation, self.engine))

    @property
    def state_numbers(self) -> int:
        """How many numbers the whole model has: its weights, and the optimizer's states of those that are
        trained."""
        return self.parameters + len(self.optimizer.slots) * (self.parameters - self.frozen)

    @property
    def state_width(self) -> int:
        """Bytes of one number of the weights and of the optimizer's states."""
        return BYTES[self.model.dtypes.states]

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.groups * self.layout.world

    def put_into(self, config: Config) -> Config:
        """The job with nothing left open: as the cost model wants it."""
        train = config.train.model_copy(update={"micro_batch": self.micro_batch, "recompute": self.recompute})
        return config.model_copy(update={"layout": self.layout, "train": train})

    def chosen(self) -> str:
        """What was neither asked for nor a default, and why, in a line."""
        by_reason: dict[str, list[str]] = {}
        for name, decision in self.decisions.items():
            if not decision.asked and decision.why != DEFAULT:
                value = list(decision.value) if isinstance(decision.value, tuple) else decision.value
                value = "none" if value is None else value
                by_reason.setdefault(decision.why, []).append(f"{name.partition('.')[2]} {value}")
        return (
            "; ".join(f"{', '.join(settings)}: {why}" for why, settings in by_reason.items())
            or "all as asked"
        )

    def to_json(self) -> dict[str, Any]:
        """What plan.json holds, and what is sent to other hosts; `from_json` gives the same plan again."""
        memory = {
            name: value / GIB for name, value in asdict(self.state_bytes).items()
        }  # exact: a power of two
        return {
            "model": self.model.to_json(),
            "layout": self.layout.model_dump(mode="json"),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "recompute": self.recompute,
            "decisions": {name: _listed(asdict(decision)) for name, decision in self.decisions.items()},
            "optimizer": self.optimizer.model_dump(mode="json"),
            "compile": self.compile,
            "varies_rows": self.varies_rows,
            "one_copy": self.one_copy,
            "resolved": self._resolved(),
            "parameters": self.parameters,
            "frozen": self.frozen,
            "flops_per_token": self.flops_per_token,
            "flop_convention": self.flop_convention,
            "memory_gib": {**memory, "states": self.state_bytes.total / GIB},
            "bucket_bytes": self.bucket_bytes,
            "cluster_file": self.cluster_file,
            "predicted": self.predicted,
            "unpredicted": self.unpredicted,
            "groups": self.groups,
        }

    def _resolved(self) -> dict[str, Any]:
        """Return what follows from the other fields, in words, for whoever reads plan.json."""
        sums, gathers = self.gradient_sums, self.weight_gathers
        return {
            "engine": self.engine.name,
            "gradient_codec": None if sums is None else str(sums.codec),
            "weight_codec": None if gathers is None or gathers.codec is None else str(gathers.codec),
            "gradients_summed_in": self.model.dtypes.summed_by(self.engine),
            "optimizer_slots": list(self.optimizer.slots),
            "not_compiled": {device: self.why_not_compiled(device) for device in ("cpu", "cuda")},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """A plan as another host sent it, or as a run keeps it."""
        fields = {name: part for name, part in value.items() if name not in ("memory_gib", "resolved")}
        memory = {name: part * GIB for name, part in value["memory_gib"].items() if name != "states"}
        decisions = {name: Decision(**_tupled(decision)) for name, decision in value["decisions"].items()}
        layout = Layout.model_validate(value["layout"])
        values = {"layout": layout, "decisions": decisions, "state_bytes": StateBytes(**memory)}
        values |= {"model": ModelSpec.from_json(value["model"]), "optimizer": from_table(value["optimizer"])}
        return cls(**{**fields, **values})


# -- plan.json, as a report reads it -------------------------------------------------------------------------

Number = Annotated[int | float, Field(ge=0, le=1e18)]
_KEPT = ConfigDict(strict=True, extra="allow")


@with_config(_KEPT)
class PredictedFlow(TypedDict):
    """What a step sends of one kind over one axis."""

    kind: str
    axis: str
    count: Number
    bytes: Number


@with_config(_KEPT)
class Prediction(TypedDict):
    """What search/forecast.py predicts of a step."""

    step_seconds: Annotated[dict[str, Number], AfterValidator(_with_total)]
    memory_gib: Annotated[dict[str, Number], AfterValidator(_with_total)]
    tokens_per_second: Number
    bytes: list[PredictedFlow]


@with_config(_KEPT)
class KeptLayout(TypedDict, total=False):
    """The degrees of a layout; its other choices are only shown."""

    pipeline: int
    replica: int
    data: int
    context: int
    tensor: int
    expert: int


@with_config(_KEPT)
class KeptPlan(TypedDict, total=False):
    """A plan.json, perhaps of another version: any key may be missing, but none is of another type."""

    layout: KeptLayout
    micro_batch: Annotated[int, Field(ge=1, le=2**40)]
    accumulation: Annotated[int, Field(ge=1, le=2**40)]
    recompute: str | float
    decisions: dict[str, dict[str, Any]]
    parameters: Number
    flop_convention: str
    memory_gib: dict[str, Number]
    bucket_bytes: Annotated[int, Field(ge=1, le=2**60)] | None
    cluster_file: str | None
    predicted: Prediction | None


def read_plan(path: Path) -> KeptPlan:
    """The plan that a run keeps; an empty one where it keeps none."""
    advice = "It is written by `shardwise train`; restore or remove it."
    try:
        return parse_as(KeptPlan, read_bytes(path, advice), path, advice)
    except FileNotFoundError:
        return {}


def _listed(decision: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where the stages of a layout are a tuple."""
    return {name: list(part) if isinstance(part, tuple) else part for name, part in decision.items()}


def _tupled(decision: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(part) if isinstance(part, list) else part for name, part in decision.items()}
