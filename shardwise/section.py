"""A table of a job file, as a type: what every table has in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the job file: unknown keys are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def without(self, keys: Iterable[str]) -> Self:
        """A copy that lacks these keys: reading one of them is an AttributeError. For tables with values that
        are wrong."""
        copy = self.model_copy()
        for key in keys:
            del copy.__dict__[key]
        return copy

    @property
    def is_whole(self) -> bool:
        """Whether no key is lacking."""
        return self.__dict__.keys() >= type(self).model_fields.keys()
