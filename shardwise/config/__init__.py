"""The job file: typed tables, read from TOML and overrides, and validated. Nothing here imports torch."""

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
    borrowed_devices,
    can_borrow,
    context_attention,
    sequence_multiple,
    with_dividing_backward_shards,
)
from shardwise.config.layouts import (
    fewest_devices,
    layout_is_possible,
    nearest_layout_settings,
    nearest_possible_layout,
    problems_of_layout,
    workers_without_gpus,
)
from shardwise.config.machine import ClusterSection, Device, Recompute
from shardwise.config.model import Model
from shardwise.config.presets import PRESETS
from shardwise.config.read import (
    Check,
    Origins,
    Sections,
    complete_config,
    from_tables,
    read,
    read_with_origins,
)
from shardwise.config.schedules import SCHEDULES, splits_backward, stage_count, stages_per_rank
from shardwise.config.schema import (
    Checkpoint,
    Config,
    Data,
    Observe,
    Recovery,
    Run,
    TextSource,
    Train,
    brings_data,
)
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
    "TextSource",
    "Train",
    "borrowed_devices",
    "brings_data",
    "can_borrow",
    "complete_config",
    "context_attention",
    "divisors",
    "fewest_devices",
    "from_tables",
    "layout_is_possible",
    "least_zero",
    "nearest_layout_settings",
    "nearest_possible_layout",
    "problems_of_compression",
    "problems_of_layout",
    "read",
    "read_with_origins",
    "sequence_multiple",
    "splits_backward",
    "stage_count",
    "stages_per_rank",
    "to_toml",
    "with_dividing_backward_shards",
    "workers_without_gpus",
]
