"""The base of every table of a job file, and the kinds of numbers that its keys hold.

It is below `config`, because a driver declares its own table and `config` collects those tables from the
registry of drivers (drivers/registry.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

# The limits exceed what is trained today, and are small enough for every sum and every search to end.
Positive = Annotated[int, Field(ge=1, le=2**40)]
NonNegative = Annotated[int, Field(ge=0, le=2**40)]
Degree = Annotated[int, Field(ge=1, le=2**20)]


class Section(BaseModel):
    """A table of the job file. Unknown keys are refused, and values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def without(self, keys: Iterable[str]) -> Self:
        """Return a copy without these keys; reading one of them raises an AttributeError. Tables with wrong
        values are checked in this form."""
        copy = self.model_copy()
        for key in keys:
            del copy.__dict__[key]
        return copy

    @property
    def is_whole(self) -> bool:
        """Whether all keys have a value."""
        return self.__dict__.keys() >= type(self).model_fields.keys()

    def changed_keys(self) -> list[str]:
        """Return the keys whose values are not their defaults."""
        fields = type(self).model_fields
        return [key for key, value in self.__dict__.items() if value != fields[key].default]
