import json
import math
import os
import struct
import sys
import types
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Observe
from shardwise.errors import UserError
from shardwise.observe import EventsFile, MetricsFile, from_json, open_sinks, read_lines, to_json
from shardwise.observe.sinks import scalars


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.floats(allow_nan=False))
def test_a_float_reads_back_to_the_same_bits(value):
    assert bits(from_json(to_json({"loss": value}))["loss"]) == bits(value)


def test_floats_round_trip_through_the_file_and_numbers_that_json_lacks_stay_strict_json(tmp_path):
    values = [0.1, 1 / 3, 2.0**-1074, 1e308, -0.0, math.pi, math.inf, -math.inf, math.nan]
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "spans": {str(i): value for i, value in enumerate(values)}})
    file.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    back = list(record["spans"].values())
    assert [bits(value) for value in back[:-1]] == [bits(value) for value in values[:-1]]
    assert math.isnan(back[-1])


def test_every_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.write({"step": step, "loss": 1.0})
        assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))


def test_resuming_at_a_step_leaves_each_step_once_even_after_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 8):
        first.write({"step": step, "loss": 0.1 * step, "life": 1})
    first.close()
    kept = path.read_bytes().splitlines(keepends=True)[:5]
    with path.open("ab") as file:
        file.write(b'{"step": 8, "loss": 0.7')  # killed in the middle of a write
    second = MetricsFile(path, resume_step=5)
    for step in (6, 7, 8):
        second.write({"step": step, "loss": 0.1 * step, "life": 2})
    second.close()
    records = list(read_lines(path))
    assert [(record["step"], record["life"]) for record in records] == [(s, 1 if s <= 5 else 2) for s in range(1, 9)]
    assert path.read_bytes().splitlines(keepends=True)[:5] == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_run_starts_with_empty_metrics(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").write({"step": 1})
    MetricsFile(tmp_path / "metrics.jsonl").close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_events_carry_a_utc_time_and_outlive_a_resume_and_a_torn_line(tmp_path):
    path = tmp_path / "events.jsonl"
    EventsFile(path).write("start", world=4)
    with path.open("ab") as file:
        file.write(b'{"time": "20')
    EventsFile(path).write("resume", step=10)
    start, resume = read_lines(path)
    assert (start["event"], start["world"], resume["event"], resume["step"]) == ("start", 4, "resume", 10)
    assert datetime.fromisoformat(start["time"]).utcoffset().total_seconds() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("kind", [MetricsFile, EventsFile])
def test_a_full_disk_is_explained_with_the_file_and_the_reason(tmp_path, kind):
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    file = kind(path)
    with pytest.raises(UserError, match=r"log\.jsonl cannot be written: No space left on device"):
        file.write({"step": 1}) if kind is MetricsFile else file.write("start")
    file.close()


def test_a_run_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"run\.folder"):
        open_sinks(tmp_path / "taken" / "run", Observe())


def test_the_bundle_writes_metrics_and_events_to_the_run_folder(tmp_path):
    sinks = open_sinks(tmp_path / "a" / "run", Observe())
    sinks.event("start")
    sinks.metrics({"step": 1, "loss": 2.5})
    sinks.close()
    assert list(read_lines(tmp_path / "a" / "run" / "metrics.jsonl")) == [{"step": 1, "loss": 2.5}]
    assert [event["event"] for event in read_lines(tmp_path / "a" / "run" / "events.jsonl")] == ["start"]


@pytest.mark.parametrize(("setting", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "p"}, "wandb")])
def test_a_missing_extra_is_named_with_its_install_line_before_any_metrics_are_touched(tmp_path, monkeypatch, setting, package):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for name in list(sys.modules):
        if name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as error:
        open_sinks(tmp_path, Observe(**setting))
    assert f"pip install 'shardwise[{package}]'" in str(error.value)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_scalars_are_every_number_by_its_path():
    record = {
        "step": 3,
        "mfu": None,
        "spans": {"data": 0.5},
        "collectives": {"all_reduce/data": {"count": 1}},
        "skipped": True,
    }
    assert dict(scalars(record)) == {"step": 3, "spans/data": 0.5, "collectives/all_reduce/data/count": 1, "skipped": 1}


def test_tensorboard_reads_back_what_was_written_and_drops_steps_a_resume_repeats(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume, steps, loss in ((0, (1, 2, 3), 1.0), (2, (3, 4), 2.0)):
        sinks = open_sinks(tmp_path, Observe(tensorboard=True), resume)
        for step in steps:
            sinks.metrics({"step": step, "loss": loss, "spans": {"data": 0.25}})
        sinks.close()
        # its files are named by the second and read in that order
        for file in (tmp_path / "tensorboard").iterdir():
            if f".{os.getpid()}." in file.name and not file.name.startswith("events.out.tfevents.000"):
                file.rename(file.with_name(f"events.out.tfevents.000000000{resume}.host.{resume}"))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [event.value for event in events.Scalars("spans/data")] == [0.25] * 4


def test_wandb_gets_the_job_and_the_records_and_a_resume_continues_its_run(tmp_path, monkeypatch):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)

    def init(**settings):
        started.append(settings)
        return run

    names = iter(("first", "second"))
    fake = types.SimpleNamespace(init=init, util=types.SimpleNamespace(generate_id=lambda: next(names)))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "config.toml").write_text("[train]\nsteps = 7\n")
    (tmp_path / "plan.json").write_text('{"decisions": {"layout.zero": {"value": 1, "asked": false, "why": "it fits"}}}')
    for resume in (0, 1):
        sinks = open_sinks(tmp_path, Observe(wandb="project"), resume)
        sinks.metrics({"step": resume + 1, "loss": 0.5})
        sinks.close()
    assert [settings["id"] for settings in started] == ["first", "first"]
    assert started[0]["project"] == "project"
    assert started[0]["config"] == {"train": {"steps": 7}, "layout": {"zero": 1}}
    assert logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
