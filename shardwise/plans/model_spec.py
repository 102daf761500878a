"""The model of a run as it is built on one device, independent of any layout.

It is made once from the job. Packages that build and split the model read this value, and never the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.config import Config, Model
from shardwise.files import Json
from shardwise.plans.dtypes import Dtypes
from shardwise.plans.float8_choice import in_float8, unfit


@dataclass(frozen=True)
class Float8Spec:
    """Which products are computed in float8, and how they are scaled."""

    scaling: str
    """`delayed`: scales come from the steps before; `dynamic`: from the tensor itself."""
    products: tuple[str, ...]
    """Names of the modules, or expert weights, whose products are computed in float8."""
    unfit: tuple[str, ...]
    """Names of products whose sizes float8 does not support."""


@dataclass(frozen=True)
class ModelSpec:
    """A model, its dtypes and its seed."""

    shape: Model
    """Sizes and kinds of its layers, or the user's module."""
    seed: int
    """Seed of the first weights, and of what a user's module draws."""
    sequence_length: int
    dtypes: Dtypes
    float8: Float8Spec | None
    """Settings of float8; None: no product is computed in float8."""

    @classmethod
    def of(cls, config: Config) -> ModelSpec:
        """Return the model of a job."""
        model, train = config.model, config.train
        float8 = None
        if train.precision == "float8":
            made, left_out = in_float8(model, train), unfit(model, train)
            float8 = Float8Spec(train.float8_scaling, tuple(made), tuple(left_out))
        return cls(
            shape=model,
            seed=train.seed,
            sequence_length=config.data.sequence_length,
            dtypes=Dtypes.of(train),
            float8=float8,
        )

    @property
    def is_user_module(self) -> bool:
        """Whether the model is a user's module and not the transformer."""
        return self.shape.module is not None

    def to_json(self) -> Json:
        """Return plain data, which `from_json` turns back into this value."""
        return {
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "shape": self.shape.model_dump(mode="json"),
            "dtypes": asdict(self.dtypes),
            "float8": None if self.float8 is None else asdict(self.float8),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelSpec:
        """Return the value that `to_json` wrote."""
        float8 = value["float8"]
        if float8 is not None:
            names = {key: tuple(float8[key]) for key in ("products", "unfit")}
            float8 = Float8Spec(float8["scaling"], **names)
        shape = Model.model_validate(value["shape"])
        return cls(**{**value, "shape": shape, "dtypes": Dtypes(**value["dtypes"]), "float8": float8})
