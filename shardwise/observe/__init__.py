"""Measurements and how they are shown: counters, MFU, memory, the ledger of collectives, sinks and report."""

from shardwise.observe.clock import SpanPart, StepClock, present_time
from shardwise.observe.ledger import AxisTimes, Collective, Ledger, axis_times
from shardwise.observe.memory_use import memory_kind, peak_memory
from shardwise.observe.mfu import mfu
from shardwise.observe.output import unblocked_output
from shardwise.observe.record_files import EventsFile, MetricsFile, write_text
from shardwise.observe.records import from_json, newest, read_events, read_metrics, to_json
from shardwise.observe.render_report import render, summarise
from shardwise.observe.sinks import Sinks, TensorBoardSink, WandbSink, open_sinks
from shardwise.observe.spans import EXPOSED, SPANS
from shardwise.observe.terminal import TrainingProgress, error_console, header
from shardwise.observe.trace import StepTrace

__all__ = [
    "EXPOSED",
    "SPANS",
    "AxisTimes",
    "Collective",
    "EventsFile",
    "Ledger",
    "MetricsFile",
    "Sinks",
    "SpanPart",
    "StepClock",
    "StepTrace",
    "TensorBoardSink",
    "TrainingProgress",
    "WandbSink",
    "axis_times",
    "error_console",
    "from_json",
    "header",
    "memory_kind",
    "mfu",
    "newest",
    "open_sinks",
    "peak_memory",
    "present_time",
    "read_events",
    "read_metrics",
    "render",
    "summarise",
    "to_json",
    "unblocked_output",
    "write_text",
]
