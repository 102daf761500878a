"""What the user asks for: typed, validated, TOML and overrides. No torch."""

from shardwise.config.check import divisors, problems_of_batch
from shardwise.config.presets import PRESETS
from shardwise.config.read import from_tables, read
from shardwise.config.schema import (
    AXES,
    Checkpoint,
    Config,
    Data,
    Layout,
    Model,
    Observe,
    Precision,
    Run,
    Source,
    Train,
)
from shardwise.config.write import to_toml

__all__ = [
    "AXES",
    "PRESETS",
    "Checkpoint",
    "Config",
    "Data",
    "Layout",
    "Model",
    "Observe",
    "Precision",
    "Run",
    "Source",
    "Train",
    "divisors",
    "from_tables",
    "problems_of_batch",
    "read",
    "to_toml",
]
