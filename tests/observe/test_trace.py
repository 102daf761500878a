"""Timelines against the format's rules: events of a lane nest or lie apart, times are microseconds, ranks are
processes."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.observe import Collective, SpanPart, StepTrace
from shardwise.observe.trace import merge


def traced(rank: int, folder: Path) -> list[dict]:
    trace = StepTrace(rank)
    stretches = [SpanPart("forward_backward", 10.0, 11.0), SpanPart("exposed_communication", 11.0, 11.5)]
    collectives = [
        Collective("all_reduce", "data", 800, 1600, 10.25, 11.0),
        Collective("all_reduce", "data", 400, None, 10.5, 11.5),
        Collective("all_gather", "data", 80, None, 11.0, 11.25),
        Collective("send", "pipeline", 8, None, 10.0, None),
    ]
    trace.add(7, stretches, collectives)
    trace.write(folder)
    return json.loads((folder / f"trace-rank{rank}.json").read_text())["traceEvents"]


def test_each_event_has_its_lane_its_microseconds_and_its_bytes(tmp_path: Path) -> None:
    events = traced(3, tmp_path)
    assert {event["pid"] for event in events} == {3}
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    done = [event for event in events if event["ph"] == "X"]
    first = min(event["ts"] for event in done)
    shown = {(lanes[e["tid"]], e["name"], round(e["ts"] - first), round(e["dur"])): e["args"] for e in done}
    assert shown == {
        ("step", "forward_backward", 0, 1_000_000): {"step": 7},
        ("step", "exposed_communication", 1_000_000, 500_000): {"step": 7},
        ("data", "all_reduce", 250_000, 750_000): {"step": 7, "bytes": 800, "plain_bytes": 1600},
        ("data (2)", "all_reduce", 500_000, 1_000_000): {"step": 7, "bytes": 400},
        ("data", "all_gather", 1_000_000, 250_000): {"step": 7, "bytes": 80},
    }


def test_events_of_a_lane_do_not_overlap(tmp_path: Path) -> None:
    done = [event for event in traced(0, tmp_path) if event["ph"] == "X"]
    for lane in {event["tid"] for event in done}:
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in done if event["tid"] == lane)
        # One microsecond is allowed for rounding, because times are since the epoch.
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(own))


def test_the_merged_trace_has_every_ranks_events(tmp_path: Path) -> None:
    assert merge(tmp_path) is None
    own = [event for rank in (0, 1) for event in traced(rank, tmp_path)]
    merged = merge(tmp_path)
    assert merged == tmp_path / "trace.json"
    assert json.loads(merged.read_text())["traceEvents"] == own
    assert merge(tmp_path) == merged


def test_a_trace_that_is_damaged_is_named(tmp_path: Path) -> None:
    traced(0, tmp_path)
    (tmp_path / "trace-rank1.json").write_text('{"traceEvents": 3}')
    with pytest.raises(UserError, match=r"trace-rank1\.json"):
        merge(tmp_path)
