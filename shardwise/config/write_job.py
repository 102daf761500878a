"""Write a `Config` as TOML, so that a run folder has the job as it was read."""

from __future__ import annotations

import tomli_w

from shardwise.config.layout import Layout
from shardwise.config.schema import Config
from shardwise.files import Json

PLANNED = {"layout": set(Layout.model_fields), "train": {"micro_batch", "recompute"}}
"""Settings that a plan decides if a job leaves them out."""


def to_toml(config: Config, *, as_asked: bool = False) -> str:
    """Return the job as TOML, with every key that has a value.

    `as_asked` leaves out settings of a plan that the job does not give, so that a new plan decides them
    again.
    """
    tables = {name: _without_unset(getattr(config, name).model_dump()) for name in Config.model_fields}
    if config.train.clip is None:
        tables["train"]["clip"] = False
    for name, planned in PLANNED.items() if as_asked else ():
        left_out = planned - getattr(config, name).model_fields_set
        tables[name] = {key: value for key, value in tables[name].items() if key not in left_out}
    return tomli_w.dumps(tables)


def _without_unset(section: Json) -> Json:
    return {key: value for key, value in section.items() if value is not None and value not in ((), {})}
