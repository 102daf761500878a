"""Parameter groups: a weight decay and a learning rate of their own for weights whose names match a pattern.

    [optimizer.groups]
    "*.bias" = { weight_decay = 0.01 }
    "encoder.*" = { lr_factor = 0.1 }

A `*` stands for any text, also with dots in it, and a pattern has to match the whole name. If several
patterns match a weight, each setting comes from the last one that gives it, as if the lines were executed one
after the other: above, a bias of the encoder has both. `lr_factor` multiplies the learning rate of the
schedule, so warm-up and decay stay the same for all weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.errors import shown

NEAR = 3
"""Number of names that a message about a wrong pattern lists."""


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class GroupSettings(TypedDict, total=False):
    """The settings of one group; a setting that is left out is that of the other weights."""

    lr_factor: Annotated[float, Field(ge=0)]
    """Factor on the learning rate of the schedule."""
    weight_decay: Annotated[float, Field(ge=0)]
    """Weight decay of all weights that match, also of norms, biases and embeddings."""


Groups = Mapping[str, GroupSettings]
"""The settings of each group, by the pattern that its weights match, in the order in which they are given."""
KEYS = tuple(GroupSettings.__annotations__)
_ONE = TypeAdapter(GroupSettings)


def check_groups(groups: object) -> object:
    """Return the groups that a user has written; raise a `ValueError` that says what is wrong with one."""
    example = '"*.bias" = { weight_decay = 0.0 }'
    if not isinstance(groups, Mapping):
        raise ValueError(f"give a table of patterns, each with its settings, such as {example}")
    for pattern, settings in groups.items():
        if not isinstance(settings, Mapping) or not settings:
            raise ValueError(f"{shown(pattern)} needs {' or '.join(KEYS)}, such as {example}")
        if unknown := [key for key in settings if key not in KEYS]:
            raise ValueError(
                f"{shown(pattern)} has the unknown key {shown(unknown[0])}; known are: {', '.join(KEYS)}"
            )
        try:
            _ONE.validate_python(settings)
        except ValidationError as error:
            detail = error.errors()[0]
            where = f"{shown(pattern)}, {'.'.join(map(str, detail['loc']))} = {shown(detail['input'])}"
            raise ValueError(f"{where}: {detail['msg'][0].lower()}{detail['msg'][1:]}") from None
    return {str(pattern): dict(settings) for pattern, settings in groups.items()}


def settings_of(groups: Groups, name: str) -> GroupSettings:
    """Return the settings of the weight of this name, each from the last pattern that matches and gives
    it."""
    merged = GroupSettings()
    for pattern, settings in groups.items():
        if fnmatchcase(name, pattern):
            merged.update(settings)
    return merged


def unmatched(groups: Groups, trained: Sequence[str], frozen: Sequence[str] = ()) -> Iterator[str]:
    """Yield a problem for each pattern that matches none of the trained weights."""
    for pattern in groups:
        if any(fnmatchcase(name, pattern) for name in trained):
            continue
        what = f"optimizer.groups: {shown(pattern)} matches"
        if stuck := [name for name in frozen if fnmatchcase(name, pattern)]:
            yield f"{what} frozen weights only ({stuck[0]}), which no optimizer updates; leave it out"
            continue
        near = difflib.get_close_matches(pattern, trained, n=NEAR, cutoff=0.3) or list(trained[:NEAR])
        yield f"{what} the name of no weight, and * stands for any text; near it are {', '.join(near)}"


def describe_groups(groups: Groups, names: Sequence[str]) -> str:
    """Return how many of these weights match each pattern and what it sets, in one line."""
    parts = []
    for pattern, settings in groups.items():
        number = sum(fnmatchcase(name, pattern) for name in names)
        values = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        parts.append(f"{pattern} ({number} {'weight' if number == 1 else 'weights'}): {values}")
    others = sum(not any(fnmatchcase(name, pattern) for pattern in groups) for name in names)
    return "; ".join([*parts, f"{others} in no group"])
