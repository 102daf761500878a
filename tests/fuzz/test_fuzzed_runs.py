"""A run folder from anywhere: `report` draws it or says which file is not as it should be."""

from __future__ import annotations

import io
import json
import random
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fuzz.damage import (
    ESCAPE,
    SOME_AND_MANY,
    as_json,
    as_toml,
    damaged,
    lacking,
    read_or_refused,
    rewritten,
    throughout,
)
from rich.console import Console

from shardwise.config import Observe, from_tables, to_toml
from shardwise.cost.clusters import requested_cluster
from shardwise.observe import open_sinks, render, summarise
from shardwise.observe.records import to_json
from shardwise.plans import choose
from shardwise.search.forecast import forecast
from shardwise.search.interval import advise

JOB = {
    "model": {"preset": "moe-tiny"},
    "data": {"source": "none", "sequence_length": 128},
    "train": {"steps": 9, "global_batch": 32, "micro_batch": 16},
    "layout": {"data": 2, "zero": 0},
    "cluster": {"preset": "cpux2"},
}
LINE = {
    "loss": 1.5, "seconds": 0.25, "tokens": 4096, "tokens_per_second": 16384.0, "sequences_per_second": 128.0,
    "mfu": 0.4,
    "memory_bytes": 10**9, "spans": {"data": 0.01, "forward_backward": 0.2, "exposed_communication": 0.02,
    "optimizer": 0.01},
    "collectives": {"all_reduce/data": {"count": 4, "bytes": 4000}}, "expert_load": [0.5, 1.5, 1.0, 1.0],
    "expert_imbalance": 1.5, "latest": {"rank": 1, "behind": 0.01},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a prediction, two faults that were survived, a slow rank and some saves."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = from_tables(JOB)
    cluster = requested_cluster(config.cluster)
    assert cluster is not None
    predicted = forecast(config, config.layout, 16, 1, cluster.with_devices(2))
    sinks = open_sinks(folder, Observe())
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "plan.json").write_text(json.dumps({**choose(config, 2).to_json(), "predicted": predicted}))
    sinks.event(
        "start",
        step=0,
        device="2 x CPU",
        memory_kind="resident set of the process",
        world=2,
        layout={"data": 2},
    )
    for step in range(1, 8):
        sinks.metrics(
            {"step": step, "time": 1.9e9 + step, **LINE, **({"held_out_loss": 2.0} if step == 4 else {})}
        )
    sinks.event("straggler", rank=1, factor=2.0, cause="computing", step=3)
    sinks.event("save", step=4, seconds=0.5, stall_seconds=0.1, bytes=1000)
    sinks.event("evaluate", step=4, seconds=0.1, loss=2.0)
    sinks.event("fault", step=5, kind="died", rank=1, where="worker 1", cause="killed", generation=1)
    sinks.event("recovery", step=4, seconds=1.0, lost_steps=1, source="checkpoint", generation=2)
    sinks.event("straggler_gone", rank=1, step=6)
    sinks.event(
        "fault", step=7, kind="hung", rank=None, where="worker 0", cause="no step for a minute", generation=2
    )
    sinks.event(
        "recovery", step=6, seconds=1.0, lost_steps=1, lost_seconds=0.5, source="copies", generation=3
    )
    sinks.event("end", step=7)
    sinks.close()
    return folder


def drawn(folder: Path) -> str:
    """The report as a terminal gets it."""
    console = Console(file=io.StringIO(), width=100, highlight=False, force_terminal=False)
    summary = summarise(folder, advise)
    render(summary, console)
    text = console.file.getvalue() + to_json(summary, indent=1)
    assert not [mark for mark in text if mark != "\n" and (ord(mark) < 32 or 127 <= ord(mark) < 160)]
    return text


def records(content: bytes) -> Any:
    return [json.loads(line) for line in content.splitlines()]


def as_lines(values: Any) -> bytes:
    return b"".join(as_json(value).replace(b"\n", b" ") + b"\n" for value in values)


FORMS = {
    "plan.json": (json.loads, as_json),
    "config.toml": (lambda content: tomllib.loads(content.decode()), as_toml),
    "metrics.jsonl": (records, as_lines),
    "events.jsonl": (records, as_lines),
}


@pytest.mark.parametrize("count", SOME_AND_MANY)
@pytest.mark.parametrize("name", FORMS)
def test_a_run_folder_is_reported_or_the_damaged_file_is_named(
    whole: Path, tmp_path: Path, name: str, count: int
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    parse, write = FORMS[name]
    content = (folder / name).read_bytes()
    assert "predicted and measured" in drawn(folder)
    for changed in [*damaged(content, 13, count // 2), *map(write, rewritten(parse(content), 14, count))]:
        (folder / name).write_bytes(changed)
        read_or_refused(lambda: drawn(folder), changed)


@pytest.mark.parametrize("count", SOME_AND_MANY)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_records_that_lack_an_entry_or_all_have_the_same_wrong_one_are_reported(
    whole: Path, tmp_path: Path, name: str, count: int
) -> None:
    """What damage to a single place seldom hits, in a report that goes on with the rest."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    values = records((folder / name).read_bytes())
    few = values if name == "events.jsonl" else values[3:5]
    cases = [*lacking(few), *throughout(values)]
    for changed in random.Random(39).sample(cases, min(count, len(cases))):
        (folder / name).write_bytes(as_lines(changed))
        read_or_refused(lambda: drawn(folder), changed)


def test_what_events_say_reaches_the_terminal_as_text(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    content = (folder / "events.jsonl").read_text()
    for harmless in ('"killed"', '"2 x CPU"'):
        content = content.replace(harmless, json.dumps(ESCAPE))
    (folder / "events.jsonl").write_text(content)
    (folder / "checkpoints" / "step-²").mkdir(parents=True)  # a digit to Python, but no number
    assert "\\x1b" in drawn(folder)
