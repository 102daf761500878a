"""A `Config` back to TOML, so that a run folder holds the job exactly as it was understood."""

from __future__ import annotations

from typing import Any

import tomli_w

from shardwise.config.schema import Config


def to_toml(config: Config) -> str:
    """Every key of every section, defaults included; keys that are unset are left out."""
    tables = {name: _given(getattr(config, name).model_dump()) for name in Config.model_fields}
    if config.train.clip is None:
        tables["train"]["clip"] = False
    return tomli_w.dumps(tables)


def _given(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None and value != ()}
