import errno
import json
import math
import os
import shutil
import struct
import sys
import time
import types
from datetime import datetime
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Observe
from shardwise.errors import UserError
from shardwise.observe import (
    EventsFile,
    MetricsFile,
    from_json,
    newest,
    open_sinks,
    read_events,
    read_metrics,
    record_files,
    records,
    to_json,
)
from shardwise.observe.sinks import curves, scalars


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.floats(allow_nan=False))
def test_a_float_reads_back_to_the_same_bits(value):
    assert bits(from_json(to_json({"loss": value}))["loss"]) == bits(value)


def test_floats_round_trip_through_the_file_and_numbers_that_json_lacks_stay_strict_json(tmp_path):
    values = [0.1, 1 / 3, 2.0**-1074, 1e308, -0.0, math.pi, math.inf, -math.inf, math.nan]
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "expert_load": values})
    file.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    back = record["expert_load"]
    assert [bits(value) for value in back[:-1]] == [bits(value) for value in values[:-1]]
    assert math.isnan(back[-1])


def test_every_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.write({"step": step, "loss": 1.0})
        assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, step + 1))


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
    kept_records = list(read_metrics(tmp_path))
    assert [(record["step"], record["life"]) for record in kept_records] == [
        (s, 1 if s <= 5 else 2) for s in range(1, 9)
    ]
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
    start, resume = read_events(tmp_path)
    assert (start["event"], start["world"], resume["event"], resume["step"]) == ("start", 4, "resume", 10)
    assert datetime.fromisoformat(start["time"]).utcoffset().total_seconds() == 0


def step(number: int, **more: object) -> dict[str, object]:
    return {"step": number, "loss": 1.0, "seconds": 0.5, **more}


DAMAGE = {
    "a flipped bit in a name": (b'"step": 4', b'"stdp": 4'),
    "a flipped bit in a quote": (b'{"step": 4', b'{*step": 4'),
    "a number that became text": (b'"seconds": 0.5}\n{"step": 5', b'"seconds": "x"}\n{"step": 5'),
    "a number that is none": (b'"step": 4', b'"step": 4.5'),
    "a byte that is no text": (b'"step": 4', b'"st\xffp": 4'),
    "brackets without an end": (b'{"step": 4', b"[" * 100_000 + b'{"step": 4'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_skipped_and_counted_by_every_reader_and_stops_no_resume(tmp_path, damage):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for number in range(1, 9):
        file.write(step(number))
    file.close()
    whole, (before, after) = (tmp_path / "metrics.jsonl").read_bytes(), DAMAGE[damage]
    (tmp_path / "metrics.jsonl").write_bytes(whole.replace(before, after, 1))
    lines = read_metrics(tmp_path)
    assert [record["step"] for record in lines] == [1, 2, 3, 5, 6, 7, 8]
    assert lines.damaged == 1
    assert [record["step"] for _, record in lines.backwards()] == [8, 7, 6, 5, 3, 2, 1]
    assert lines.damaged == 1
    for resume, kept in ((6, [1, 2, 3, 5, 6]), (4, [1, 2, 3])):
        resumed = MetricsFile(tmp_path / "metrics.jsonl", resume_step=resume)
        assert resumed.dropped == [0.5, 0.5]
        resumed.close()
        assert [record["step"] for record in read_metrics(tmp_path)] == kept


def test_a_step_whose_number_was_damaged_is_not_taken_for_the_one_to_go_on_after(tmp_path):
    lines = [json.dumps(step(number)) + "\n" for number in (7, 8, 9, 10, 11, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    MetricsFile(tmp_path / "metrics.jsonl", resume_step=9).close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [7, 8, 9]


def test_resuming_reads_the_end_of_a_long_file_and_leaves_the_rest_alone(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    path.write_text("".join(json.dumps(step(number, data="0" * 200)) + "\n" for number in range(1, 5001)))
    kept = path.read_bytes().splitlines(keepends=True)[:4990]
    parse = records.Lines.parse
    monkeypatch.setattr(records.Lines, "parse", lambda self, line: parsed.append(line) or parse(self, line))
    assert len(MetricsFile(path, resume_step=4990).dropped) == 10
    assert len(parsed) <= 12
    assert path.read_bytes().splitlines(keepends=True) == kept


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_a_line_that_is_too_long_is_damaged_from_either_end_and_never_put_together(
    tmp_path, monkeypatch, size
):
    monkeypatch.setattr(records, "LONGEST_LINE", 200)
    monkeypatch.setattr(records, "_BLOCK", size)
    path, put_together = tmp_path / "metrics.jsonl", []
    fills = [0, 250, 60, 900, 900, 30, 5000]
    path.write_text(
        "".join(
            json.dumps(step(number, data="0" * fill)) + "\n" for number, fill in enumerate(fills, start=1)
        )
    )
    ends = [end for end, byte in enumerate(path.read_bytes(), start=1) if byte == ord("\n")]
    lines = read_metrics(tmp_path)
    assert [record["step"] for record in lines] == [1, 3, 6]
    assert lines.damaged == 4
    parse = records.Lines.parse
    monkeypatch.setattr(
        records.Lines, "parse", lambda self, line: put_together.append(len(line)) or parse(self, line)
    )
    assert [(end, record["step"]) for end, record in lines.backwards()] == [
        (ends[5], 6),
        (ends[2], 3),
        (ends[0], 1),
    ]
    assert lines.damaged == 4
    assert max(put_together) <= 200 + max(200, size)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_records_that_are_no_regular_file_are_refused_and_hold_nobody_up(tmp_path, name, kind):
    make = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[
        kind
    ]
    make(tmp_path / name)
    lines = (read_metrics if name == "metrics.jsonl" else read_events)(tmp_path)
    for read in (iter(lines), lines.backwards()):
        with pytest.raises(
            UserError, match=r"jsonl is (not a regular file|a folder)\. It is written by `shardwise train`"
        ):
            next(read)
    assert newest(tmp_path) == {}


NOT_FILES = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_in_a_run_folder_is_never_waited_for(tmp_path, kind):
    """Put there while a run goes on: it is said, and records are kept until they can be written."""
    for name in ("metrics.jsonl", "events.jsonl", "plan.json.part"):
        NOT_FILES[kind](tmp_path / name)
    said = []
    metrics, events = (
        MetricsFile(tmp_path / "metrics.jsonl", 3, said.append),
        EventsFile(tmp_path / "events.jsonl", said.append),
    )
    metrics.write({"step": 4, "loss": 1.0})
    events.write("save")
    record_files.write_text(tmp_path / "plan.json", "{}", said.append)
    refused = [text for text in said if "cannot be written" in text]
    assert len(refused) == 3, said
    (tmp_path / "metrics.jsonl").rmdir() if kind == "folder" else (tmp_path / "metrics.jsonl").unlink()
    metrics.write({"step": 5, "loss": 1.0})
    metrics.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [4, 5]


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.timeout(20)
def test_a_run_folder_with_such_files_is_refused_before_workers_start(tmp_path, kind):
    names = ["config.toml", "events.jsonl", "logs/rank-1.log", "metrics.jsonl", "plan.json", "wandb-id"]
    (tmp_path / "logs").mkdir()
    for name in names:
        NOT_FILES[kind](tmp_path / name)
    with pytest.raises(UserError) as refused:
        record_files.check_run_files(tmp_path)
    assert str(refused.value) == (
        f"run.folder = {str(tmp_path)!r}: config.toml, events.jsonl, logs/rank-1.log, metrics.jsonl, "
        f"plan.json and wandb-id are "
        "not regular files, which a run would write. Remove them, or give another run.folder"
    )
    record_files.check_run_files(tmp_path / "elsewhere")


class Disk:
    """Stands between a file and its disk: room for so many more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        disk = self

        class LimitedFile(FileIO):
            def write(self, data):
                if disk.room <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                part = bytes(data)[: disk.room]
                disk.room -= len(part)
                return super().write(part)

        monkeypatch.setattr(record_files, "FileIO", LimitedFile)


@pytest.mark.parametrize("room", [0, 25, 60])
def test_what_a_full_disk_does_not_take_is_said_once_and_written_when_there_is_room(
    tmp_path, monkeypatch, room
):
    disk, said = Disk(monkeypatch), []
    sinks = open_sinks(tmp_path, Observe(), 0, said.append)
    sinks.metrics(step(1))
    disk.room = room
    for number in range(2, 6):
        sinks.metrics(step(number))
        sinks.event("save", step=number)
    assert len(said) == 2
    assert all("No space left on device" in text and "Training goes on" in text for text in said)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, *([2] if room == 60 else [])]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n"), "no half line is left"
    disk.room = 10**9
    sinks.metrics(step(6))
    sinks.event("end")
    sinks.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [event.get("step") for event in read_events(tmp_path)] == [2, 3, 4, 5, None]
    assert [text.partition("; ")[2] for text in said[2:]] == ["nothing was lost"] * 2


def test_what_cannot_be_written_is_kept_up_to_a_limit_and_what_is_lost_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "BUFFER_BYTES", 500)
    disk, said = Disk(monkeypatch), []
    file = MetricsFile(tmp_path / "metrics.jsonl", 0, said.append)
    disk.room = 0
    for number in range(1, 41):
        file.write(step(number))
    disk.room = 10**9
    file.write(step(41))
    kept = [record["step"] for record in read_metrics(tmp_path)]
    assert kept == list(range(kept[0], 42))
    assert f"{kept[0] - 1} records were too many to keep and are lost" in said[-1]
    disk.room = 0
    file.write(step(42))
    file.close()
    assert "1 records could not be written" in said[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_disk_that_is_really_full_stops_nothing(tmp_path, name, monkeypatch):
    monkeypatch.setattr(record_files, "regular_file_opener", None)  # else a device is refused
    (tmp_path / name).symlink_to("/dev/full")
    said: list[str] = []
    sinks = open_sinks(tmp_path, Observe(), 0, said.append)
    sinks.metrics(step(1))
    sinks.event("start")
    sinks.close()
    assert f"{name} cannot be written: No space left on device" in said[0]


def test_a_deleted_run_folder_is_noticed_said_and_made_again(tmp_path):
    said: list[str] = []
    sinks = open_sinks(tmp_path / "run", Observe(), 0, said.append)
    sinks.metrics(step(1))
    shutil.rmtree(tmp_path / "run")
    sinks.metrics(step(2))
    sinks.metrics(step(3))
    sinks.close()
    assert len([text for text in said if "metrics.jsonl was deleted or moved" in text]) == 1
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [2, 3]


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_mirror_that_fails_is_said_and_done_without(tmp_path, monkeypatch, kind):
    def log(values, step):
        raise kind("the network is down")

    run = types.SimpleNamespace(log=log, finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **settings: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    said: list[str] = []
    sinks = open_sinks(tmp_path, Observe(wandb="project"), 0, said.append)
    sinks.metrics(step(1))
    sinks.metrics(step(2))
    sinks.close()
    assert len(said) == 1
    assert "the network is down" in said[0]
    assert len(list(read_metrics(tmp_path))) == 2


def test_a_mirror_that_cannot_be_opened_is_said_and_holds_up_neither_the_run_nor_the_other_mirror(
    tmp_path, monkeypatch
):
    class CommError(Exception):
        """As wandb raises it, of no kind that Python knows."""

    def init(**settings):
        raise CommError("the service is away")

    fake = types.SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    shown: list[str] = []
    mirror = types.SimpleNamespace(write=shown.append, close=lambda: None)
    for open_tensorboard, mirrored in ((lambda *_: mirror, 1), (lambda *_: [][0], 0)):
        monkeypatch.setattr("shardwise.observe.sinks.TensorBoardSink", open_tensorboard)
        said: list[str] = []
        sinks = open_sinks(tmp_path, Observe(tensorboard=True, wandb="project"), 0, said.append)
        sinks.metrics(step(1))
        sinks.close()
        assert (len(shown), len(said)) == (mirrored, 2 - mirrored)
        assert said[-1].startswith("Weights & Biases cannot be opened and gets no records")
        assert said[-1].endswith("the service is away")
        assert len(list(read_metrics(tmp_path))) == 1
        shown.clear()


def test_the_time_of_records_does_not_jump_with_the_clock(tmp_path, monkeypatch):
    events = EventsFile(tmp_path / "events.jsonl")
    events.write("fault")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    events.write("recovery", seconds=1.0)
    first, second = (datetime.fromisoformat(event["time"]) for event in read_events(tmp_path))
    assert 0 <= (second - first).total_seconds() < 60


def test_a_run_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"run\.folder"):
        open_sinks(tmp_path / "taken" / "run", Observe())


def test_the_bundle_writes_metrics_and_events_to_the_run_folder(tmp_path):
    sinks = open_sinks(tmp_path / "a" / "run", Observe())
    sinks.event("start")
    sinks.metrics({"step": 1, "loss": 2.5})
    sinks.close()
    assert list(read_metrics(tmp_path / "a" / "run")) == [{"step": 1, "loss": 2.5}]
    assert [event["event"] for event in read_events(tmp_path / "a" / "run")] == ["start"]


def test_neither_the_step_nor_the_time_of_day_is_a_curve():
    record = {"step": 1, "time": 1.7e9, "loss": 2.5, "spans": {"data": 0.1}}
    assert dict(curves(record)) == {"loss": 2.5, "spans/data": 0.1}


@pytest.mark.parametrize(
    ("setting", "package"),
    [({"tensorboard": True}, "tensorboard"), ({"wandb": "p"}, "wandb"), ({"mlflow": "p"}, "mlflow")],
)
def test_a_missing_extra_is_named_with_its_install_line_before_any_metrics_are_touched(
    tmp_path, monkeypatch, setting, package
):
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
    assert dict(scalars(record)) == {
        "step": 3,
        "spans/data": 0.5,
        "collectives/all_reduce/data/count": 1,
        "skipped": 1,
    }


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
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
    ]
    assert [event.value for event in events.Scalars("spans/data")] == [0.25] * 4


def test_wandb_gets_the_job_and_the_records_and_a_resume_continues_its_run(tmp_path, monkeypatch):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)

    def init(**settings):
        started.append(settings)
        return run

    fake = types.SimpleNamespace(init=init)  # and nothing else: the service's own helpers come and go
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "config.toml").write_text("[train]\nsteps = 7\n")
    (tmp_path / "plan.json").write_text(
        '{"decisions": {"layout.zero": {"value": 1, "asked": false, "why": "it fits"}}}'
    )
    for resume in (0, 1):
        sinks = open_sinks(tmp_path, Observe(wandb="project"), resume)
        sinks.metrics({"step": resume + 1, "loss": 0.5})
        sinks.close()
    first, second = [settings["id"] for settings in started]
    assert (first, len(first)) == (second, 8)
    assert started[0]["project"] == "project"
    assert started[0]["config"] == {"train": {"steps": 7}, "layout": {"zero": 1}}
    assert logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]


def test_wandb_gets_the_names_of_the_run(tmp_path, monkeypatch):
    started = []
    run = types.SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **settings: started.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    names = {"wandb_entity": "team", "name": "third", "group": "sweep", "tags": ("a", "b")}
    open_sinks(tmp_path, Observe(wandb="project", **names)).close()
    open_sinks(tmp_path, Observe(wandb="project")).close()
    keys = ("project", "entity", "name", "group", "tags")
    assert [started[0][key] for key in keys] == ["project", "team", "third", "sweep", ("a", "b")]
    assert [started[1][key] for key in keys] == ["project", None, tmp_path.name, None, None]


class FakeMlflow(types.SimpleNamespace):
    """The functions of MLflow's client that are used, with what they were called with."""

    def __init__(self):
        super().__init__(calls=[])

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append((name, *arguments, named))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

        return call


def test_mlflow_gets_the_job_and_the_records_and_a_resume_continues_its_run(tmp_path, monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    (tmp_path / "config.toml").write_text("[train]\nsteps = 7\n")
    observe = Observe(mlflow="experiment", name="third", group="sweep", tags=("a",))
    for resume in (0, 1):
        sinks = open_sinks(tmp_path, observe, resume)
        sinks.metrics({"step": resume + 1, "loss": 0.5, "spans": {"data": 0.25}})
        sinks.close()
    started = ("start_run", {"run_name": "third", "tags": {"a": "true", "group": "sweep"}})
    record = {"loss": 0.5, "spans/data": 0.25}
    assert fake.calls == [
        ("set_experiment", "experiment", {}),
        started,
        ("log_params", {"train.steps": 7}, {}),
        ("log_metrics", record, {"step": 1}),
        ("end_run", {}),
        ("set_experiment", "experiment", {}),
        ("start_run", {"run_id": "abc"}),
        ("log_metrics", record, {"step": 2}),
        ("end_run", {}),
    ]


CALLBACKS = """
from pathlib import Path
class Notes:
    def __init__(self):
        self.lines = Path(__file__).with_name("notes.txt").open("a")
    def on_step(self, record):
        print("step", record["step"], record["loss"], file=self.lines, flush=True)
    def on_save(self, event):
        print("save", event["checkpoint"], file=self.lines, flush=True)
class Broken:
    def on_step(self, record):
        raise KeyError(record["step"])
class NotMade:
    def __init__(self):
        raise ValueError("no")
"""


def test_callbacks_are_called_with_steps_and_events_and_one_that_fails_is_named_with_its_line(tmp_path):
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    file, said = tmp_path / "callbacks.py", []
    observe = Observe(callbacks=(f"{file}:Broken", f"{file}:Notes", f"{file}:NotMade"))
    sinks = open_sinks(tmp_path / "run", observe, 0, said.append)
    for step in (1, 2):
        sinks.metrics({"step": step, "loss": step / 2})
    sinks.event("save", step=2, checkpoint="step-2")
    sinks.event("evaluate", step=2, held_out_loss=1.0)  # the class has no method for it
    sinks.close()
    assert (tmp_path / "notes.txt").read_text() == "step 1 0.5\nstep 2 1.0\nsave step-2\n"
    assert len(said) == 2
    assert said[0].startswith(f"the callback {file}:NotMade cannot be opened")
    assert said[1].startswith(f"the callback {file}:Broken failed and gets no more records")
    assert said[1].endswith(f"KeyError: 1 ({file}, line 12)")


def test_a_folder_without_room_is_refused_at_the_start_with_the_reason(tmp_path, monkeypatch):
    record_files.check_room(tmp_path / "run", "run.folder", 1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        UserError, match=r"checkpoint\.folder = .* are free, and one checkpoint of this model takes 1024 PiB"
    ):
        record_files.check_room(tmp_path / "run", "checkpoint.folder", 2**60)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.folder = .*cannot be written \(Not a directory\)"):
        record_files.check_room(tmp_path / "file" / "run", "run.folder", 0)

    def full(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device"):
        record_files.check_room(tmp_path / "run", "run.folder", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
