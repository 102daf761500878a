"""What the user asks for: typed, validated, TOML and overrides. No torch."""

from shardwise.config.check import divisors, needs_whole_momenta, problems_of_batch, problems_of_compression
from shardwise.config.layouts import (
    IN_A_V,
    SPLIT_BACKWARD,
    borrowed,
    can_borrow,
    context_attention,
    fewest_devices,
    nearest_layout,
    nearest_to,
    problems_of_layout,
    sequence_multiple,
    stages_on_a_rank,
)
from shardwise.config.presets import PRESETS
from shardwise.config.read import from_tables, read
from shardwise.config.schema import (
    AXES,
    Checkpoint,
    ClusterSection,
    Config,
    Data,
    Layout,
    Model,
    Observe,
    Precision,
    Recovery,
    Run,
    Source,
    Train,
)
from shardwise.config.write import to_toml

__all__ = [
    "AXES",
    "IN_A_V",
    "PRESETS",
    "SPLIT_BACKWARD",
    "Checkpoint",
    "ClusterSection",
    "Config",
    "Data",
    "Layout",
    "Model",
    "Observe",
    "Precision",
    "Recovery",
    "Run",
    "Source",
    "Train",
    "borrowed",
    "can_borrow",
    "context_attention",
    "divisors",
    "fewest_devices",
    "from_tables",
    "nearest_layout",
    "nearest_to",
    "needs_whole_momenta",
    "problems_of_batch",
    "problems_of_compression",
    "problems_of_layout",
    "read",
    "sequence_multiple",
    "stages_on_a_rank",
    "to_toml",
]
