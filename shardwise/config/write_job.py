"""A `Config` back to TOML, so that a run folder holds the job exactly as it was understood."""

from __future__ import annotations

from typing import Any

import tomli_w

from shardwise.config.layout import Layout
from shardwise.config.schema import Config

PLANNED = {"layout": set(Layout.model_fields), "train": {"micro_batch", "recompute"}}
"""The settings that a plan decides where a job leaves them out."""


def to_toml(config: Config, *, as_asked: bool = False) -> str:
    """Every key of every section, defaults included; keys that are unset are left out. `as_asked`: of the
    settings that a plan decides only those that the job gives, so that reading it again leaves the same ones
    open.
    """
    tables = {name: _without_unset(getattr(config, name).model_dump()) for name in Config.model_fields}
    if config.train.clip is None:
        tables["train"]["clip"] = False
    for name, planned in PLANNED.items() if as_asked else ():
        left_out = planned - getattr(config, name).model_fields_set
        tables[name] = {key: value for key, value in tables[name].items() if key not in left_out}
    return tomli_w.dumps(tables)


def _without_unset(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None and value != ()}
