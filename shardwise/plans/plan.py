"""The `Plan`: all decisions of a run, made once by the process that starts the workers.

It has the complete layout and the other choices, the reason for each of them, and the numbers behind them. It
is plain data: it is sent to every worker (as JSON between hosts) and saved in the run folder as plan.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.config import Config, Layout, Recompute
from shardwise.config.axes import MODEL_AXES
from shardwise.config.compression import SumCompression, WeightGathers
from shardwise.config.dtype_names import BYTES
from shardwise.files import Json, parse_as, read_bytes
from shardwise.optimizers import Optimizer, from_table
from shardwise.plans.compilation import why_not_compiled
from shardwise.plans.engine import Engine, engine_of
from shardwise.plans.float8_choice import casts_once
from shardwise.plans.flops import FLOP_CONVENTION
from shardwise.plans.memory import StateBytes
from shardwise.plans.model_spec import ModelSpec
from shardwise.plans.slices import parameter_slices
from shardwise.units import GIB

DEFAULT = "the default"
"""Reason for a setting that was neither given nor decided."""


def _with_total(parts: dict[str, float]) -> dict[str, float]:
    if "total" not in parts:
        raise ValueError("the total is missing")
    return parts


@dataclass(frozen=True)
class Decision:
    """The value of one setting, whether the user asked for it, and why it was chosen."""

    value: object
    asked: bool
    why: str


@dataclass(frozen=True)
class Plan:
    """The decisions that every worker of a run follows."""

    model: ModelSpec
    """The model as it is built on one device."""
    layout: Layout
    """Complete: no field is left open."""
    micro_batch: int
    accumulation: int
    """Number of micro-batches of one step on one device."""
    recompute: Recompute | float
    decisions: Mapping[str, Decision]
    """Decisions by the name of the setting in a job: `layout.zero`, `train.micro_batch`."""
    optimizer: Optimizer
    compile: bool | Literal["auto"]
    """Whether blocks are compiled; auto: on GPUs."""
    parameters: int
    flops_per_token: float
    state_bytes: StateBytes
    flop_convention: str = FLOP_CONVENTION
    bucket_bytes: int | None = None
    """Bytes of a gradient bucket of DistributedDataParallel (cost/buckets.py); None: torch's default."""
    frozen: int = 0
    """Number of parameters that are never trained."""
    cluster_file: str | None = None
    """File that describes the cluster. It may be the file of this machine, which a job does not name."""
    predicted: dict[str, Any] | None = None
    """Predicted time and memory of a step (search/forecast.py), if the cluster is known."""
    unpredicted: str | None = None
    """Why nothing is predicted though the cluster is known."""
    groups: int = 1
    """Number of groups that train separately, each on this layout."""
    varies_rows: bool = False
    """Whether a device may get another number of rows in each step, so that shapes change."""
    one_copy: bool = False
    """Whether all workers use one copy of the weights in shared memory."""

    @property
    def engine(self) -> Engine:
        """How devices with the same weights keep them equal (plans/engine.py)."""
        engine = engine_of(self.layout, self.model.shape.experts)
        return engine.without_copies() if self.one_copy else engine

    @property
    def gradient_sums(self) -> SumCompression | None:
        """How gradient sums are compressed; None: they are not."""
        return SumCompression.of(self.layout)

    @property
    def weight_gathers(self) -> WeightGathers | None:
        """How sharded weights are gathered; None: in the usual way."""
        return WeightGathers.of(self.layout)

    def waits_are_known(self, device: str) -> bool:
        """Return whether waits for other devices can be told from computing on this kind of device.

        On a GPU they cannot if FSDP2 waits on its own streams, or if devices wait between kernels, as along
        the pipeline, context, tensor and expert axes.
        """
        split = any(getattr(self.layout, axis) > 1 for axis in MODEL_AXES)
        return device == "cpu" or not (self.engine.sharded or split)

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
        """Number of elements of all weights, and of the optimizer's states of the trained ones. A state of
        another width counts as many as its bytes."""
        states = self.optimizer.state_bytes(self.state_width) / self.state_width
        return self.parameters + round(states * (self.parameters - self.frozen))

    @property
    def state_width(self) -> int:
        """Bytes of one element of the weights and of the optimizer's states."""
        return BYTES[self.model.dtypes.states]

    @property
    def world(self) -> int:
        """Total number of devices, over all groups."""
        return self.groups * self.layout.world

    def applied_to(self, config: Config) -> Config:
        """Return the job with the decisions of this plan filled in."""
        train = config.train.model_copy(update={"micro_batch": self.micro_batch, "recompute": self.recompute})
        return config.model_copy(update={"layout": self.layout, "train": train})

    def chosen(self) -> str:
        """Return the settings that were chosen, and why, in one line."""
        by_reason: dict[str, list[str]] = {}
        for name, decision in self.decisions.items():
            if not decision.asked and decision.why != DEFAULT:
                value = list(decision.value) if isinstance(decision.value, tuple) else decision.value
                value = "none" if value is None else value
                by_reason.setdefault(decision.why, []).append(f"{name.partition('.')[2]} {value}")
        reasons = [f"{', '.join(settings)}: {why}" for why, settings in by_reason.items()]
        return "; ".join(reasons) or "all as asked"

    def to_json(self) -> Json:
        """Return the content of plan.json and of messages to other hosts, which `from_json` reads."""
        # Dividing by a power of two is exact.
        memory = {name: value / GIB for name, value in asdict(self.state_bytes).items()}
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

    def _resolved(self) -> Json:
        """Return facts that follow from the other fields, for people who read plan.json."""
        sums, gathers = self.gradient_sums, self.weight_gathers
        ours, zero = not self.model.is_user_module, int(self.engine.zero)
        return {
            "weights": parameter_slices(self.model.shape, self.layout, zero) if ours else None,
            "engine": self.engine.name,
            "gradient_codec": None if sums is None else str(sums.codec),
            "weight_codec": None if gathers is None or gathers.codec is None else str(gathers.codec),
            "gradients_summed_in": self.model.dtypes.summed_by(self.engine),
            "optimizer_slots": list(self.optimizer.slots),
            "not_compiled": {device: self.why_not_compiled(device) for device in ("cpu", "cuda")},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` wrote."""
        fields = {name: part for name, part in value.items() if name not in ("memory_gib", "resolved")}
        memory = {name: part * GIB for name, part in value["memory_gib"].items() if name != "states"}
        decisions = {name: Decision(**_tupled(decision)) for name, decision in value["decisions"].items()}
        layout = Layout.model_validate(value["layout"])
        values = {"layout": layout, "decisions": decisions, "state_bytes": StateBytes(**memory)}
        values |= {"model": ModelSpec.from_json(value["model"]), "optimizer": from_table(value["optimizer"])}
        return cls(**{**fields, **values})


# -- plan.json, as a report reads it -------------------------------------------------------------------------

Number = Annotated[int | float, Field(ge=0, le=1e18)]
_STRICT = ConfigDict(strict=True, extra="allow")


@with_config(_STRICT)
class PredictedFlow(TypedDict):
    """Messages of one kind over one axis in a step."""

    kind: str
    axis: str
    count: Number
    bytes: Number


@with_config(_STRICT)
class PredictedStep(TypedDict):
    """The prediction of a step by search/forecast.py."""

    step_seconds: Annotated[dict[str, Number], AfterValidator(_with_total)]
    memory_gib: Annotated[dict[str, Number], AfterValidator(_with_total)]
    tokens_per_second: Number
    bytes: list[PredictedFlow]


@with_config(_STRICT)
class SavedLayout(TypedDict, total=False):
    """The degrees of a layout in plan.json."""

    pipeline: int
    replica: int
    data: int
    context: int
    tensor: int
    expert: int


@with_config(_STRICT)
class SavedPlan(TypedDict, total=False):
    """The content of a plan.json of any version: keys may be missing, but have the right types."""

    layout: SavedLayout
    micro_batch: Annotated[int, Field(ge=1, le=2**40)]
    accumulation: Annotated[int, Field(ge=1, le=2**40)]
    recompute: str | float
    decisions: dict[str, Json]
    parameters: Number
    flop_convention: str
    memory_gib: dict[str, Number]
    bucket_bytes: Annotated[int, Field(ge=1, le=2**60)] | None
    cluster_file: str | None
    predicted: PredictedStep | None


def read_plan(path: Path) -> SavedPlan:
    """Return the content of a run's plan.json; empty if there is none."""
    advice = "It is written by `shardwise train`; restore or remove it."
    try:
        return parse_as(SavedPlan, read_bytes(path, advice), path, advice)
    except FileNotFoundError:
        return {}


def _listed(decision: Json) -> Json:
    """Return a decision with lists in place of tuples, as JSON has them."""
    return {name: list(part) if isinstance(part, tuple) else part for name, part in decision.items()}


def _tupled(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision with tuples in place of lists."""
    return {name: tuple(part) if isinstance(part, list) else part for name, part in decision.items()}
