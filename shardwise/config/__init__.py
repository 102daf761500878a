"""What the user asks for: typed, validated, TOML and overrides. No torch."""

from shardwise.config.axes import AXES, MODEL_AXES, RANK_AXES, TOKEN_AXES
from shardwise.config.check import (
    divisors,
    least_zero,
    problems_of_compression,
)
from shardwise.config.dtype_names import Precision
from shardwise.config.layout import Layout
from shardwise.config.layout_rules import (
    BY_OPERATOR,
    borrowed,
    can_borrow,
    context_attention,
    sequence_multiple,
    with_nearby_that_divides,
)
from shardwise.config.layouts import (
    fewest_devices,
    layout_is_possible,
    nearest_layout,
    nearest_to,
    problems_of_layout,
    workers_without_gpus,
)
from shardwise.config.machine import ClusterSection, Device, Recompute
from shardwise.config.model import Model
from shardwise.config.presets import PRESETS
from shardwise.config.read import Check, Origins, Sections, from_tables, read, read_with_origins, whole
from shardwise.config.schedules import SCHEDULES, splits_backward, stages_per_rank
from shardwise.config.schema import Checkpoint, Config, Data, Observe, Recovery, Run, Source, Train
from shardwise.config.write_job import to_toml

__all__ = [
    "AXES",
    "BY_OPERATOR",
    "MODEL_AXES",
    "PRESETS",
    "RANK_AXES",
    "SCHEDULES",
    "TOKEN_AXES",
    "Check",
    "Checkpoint",
    "ClusterSection",
    "Config",
    "Data",
    "Device",
    "Layout",
    "Model",
    "Observe",
    "Origins",
    "Precision",
    "Recompute",
    "Recovery",
    "Run",
    "Sections",
    "Source",
    "Train",
    "borrowed",
    "can_borrow",
    "context_attention",
    "divisors",
    "fewest_devices",
    "from_tables",
    "layout_is_possible",
    "least_zero",
    "nearest_layout",
    "nearest_to",
    "problems_of_compression",
    "problems_of_layout",
    "read",
    "read_with_origins",
    "sequence_multiple",
    "splits_backward",
    "stages_per_rank",
    "to_toml",
    "whole",
    "with_nearby_that_divides",
    "workers_without_gpus",
]
