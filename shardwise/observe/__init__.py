"""What is measured and how it is shown: counters, MFU, memory, the ledger of collectives, sinks, progress, report."""

from shardwise.observe.clock import SPANS, StepClock
from shardwise.observe.devices import mfu, peak_flops
from shardwise.observe.files import EventsFile, MetricsFile, from_json, read_lines, to_json
from shardwise.observe.ledger import Ledger
from shardwise.observe.memory import memory_kind, peak_memory
from shardwise.observe.report import render, summarise
from shardwise.observe.sinks import Sinks, TensorBoardSink, WandbSink, open_sinks
from shardwise.observe.terminal import TrainingProgress, error_console, header

__all__ = [
    "SPANS",
    "EventsFile",
    "Ledger",
    "MetricsFile",
    "Sinks",
    "StepClock",
    "TensorBoardSink",
    "TrainingProgress",
    "WandbSink",
    "error_console",
    "from_json",
    "header",
    "memory_kind",
    "mfu",
    "open_sinks",
    "peak_flops",
    "peak_memory",
    "read_lines",
    "render",
    "summarise",
    "to_json",
]
