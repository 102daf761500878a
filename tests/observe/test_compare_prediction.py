import io
import json

import pytest
from rich.console import Console

from shardwise.observe import render, summarise

GIB = 2**30
SUM = "all_reduce/data"
TERMS = {
    **dict.fromkeys(
        ("tensor", "context", "expert", "replica", "imbalance", "bubble", "pipeline_sends", "offload"), 0.0
    ),
    **{"matmul": 0.5, "attention": 0.125, "elementwise": 0.25, "launch": 0.0625, "recompute": 0.0625},
    **{"optimizer": 0.25, "data": 0.75, "total": 2.0},
}
PREDICTED = {
    "cluster": "here",
    "step_seconds": TERMS,
    "memory_gib": {"weights": 1.0, "activations": 2.0, "overhead": 0.5, "total": 3.5},
    "tokens_per_second": 500.0,
    "bytes": [{"kind": "all_reduce", "axis": "data", "count": 2, "bytes": 4096}],
}
SPANS = {"data": 0.25, "forward_backward": 2.0, "exposed_communication": 0.75, "optimizer": 0.5}
CPU, GPU = "resident set of the process", "allocated by torch on the GPU"


def line(step, seconds=4.0, spans=SPANS, **more):
    common = {
        "step": step,
        "loss": 1.0,
        "seconds": seconds,
        "tokens_per_second": 1000 / seconds,
        "memory_bytes": 4 * GIB,
    }
    return {**common, "spans": spans, "collectives": {SUM: {"count": 2, "bytes": 4096}}, **more}


def write_run(folder, lines, predicted=PREDICTED, layout=None, kind=CPU, events=()):
    layout = layout or {"data": 2}
    events = events or [{"event": "start", "memory_kind": kind, "layout": layout}]
    timed = [{"time": f"2030-01-01T00:00:{second:02}+00:00", **event} for second, event in enumerate(events)]
    for name, rows in (("metrics.jsonl", lines), ("events.jsonl", timed)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plan.json").write_text(json.dumps({"layout": layout, "predicted": predicted}))
    return folder


def rows_of(folder):
    return {row["what"]: row for row in summarise(folder)["predicted_and_measured"]}


def shown(folder, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(summarise(folder), console)
    return console.file.getvalue()


def pair(row):
    return row["predicted"], row["measured"]


def test_each_term_has_what_was_predicted_and_what_the_steady_steps_measured(tmp_path):
    rows = rows_of(write_run(tmp_path, [line(1, 90.0), line(2, 80.0), *(line(step) for step in range(3, 8))]))
    assert pair(rows["step time"]) == (2.0, 4.0)
    assert pair(rows["computing"]) == (1.0, 2.0)
    assert pair(rows["exposed communication"]) == (0.75, 0.75)
    assert pair(rows["optimizer"]) == (0.25, 0.5)
    assert pair(rows["reading data"]) == (0.0, 0.25)
    assert pair(rows["unclaimed"]) == (0.0, 0.5)
    assert pair(rows["tokens a second"]) == (500.0, 250.0)
    assert pair(rows["peak memory"]) == (3.5 * GIB, 4 * GIB)
    assert pair(rows["memory of weights"]) == (GIB, None)
    assert pair(rows[SUM]) == (4096, 4096)
    assert (rows[SUM]["predicted_calls"], rows[SUM]["measured_calls"]) == (2, 2)
    assert rows["computing"]["ratio"] == 2.0
    assert rows["reading data"]["ratio"] is None
    assert {row["kind"] for row in rows.values()} == {"seconds", "rate", "memory", "bytes"}


def test_the_terms_of_both_sides_add_up_to_the_step(tmp_path):
    lines = [
        line(step, seconds, {**SPANS, "forward_backward": seconds / 3})
        for step, seconds in enumerate((9, 8, 4, 5, 11, 3, 4), 1)
    ]
    rows = rows_of(write_run(tmp_path, lines))
    parts = [row for row in rows.values() if "terms" in row]
    for side in ("predicted", "measured"):
        assert sum(row[side] for row in parts) == pytest.approx(rows["step time"][side], rel=1e-12)


def test_a_run_without_a_prediction_has_no_such_section(tmp_path):
    write_run(tmp_path, [line(1)], predicted=None)
    assert summarise(tmp_path)["predicted_and_measured"] is None
    assert "predicted and measured" not in shown(tmp_path)


def test_what_a_gpu_cannot_tell_apart_is_not_known_and_not_zero(tmp_path):
    spans = {name: value for name, value in SPANS.items() if name != "exposed_communication"}
    folder = write_run(tmp_path, [line(step, spans=spans) for step in range(1, 8)], kind=GPU)
    rows = rows_of(folder)
    assert pair(rows["computing"]) == (1.0, None)
    assert pair(rows["exposed communication"]) == (0.75, None)
    assert pair(rows["computing and communication together"]) == (1.75, 2.0)
    assert "only both together were measured" in shown(folder)


def test_one_gpu_waits_for_nobody_and_that_is_known(tmp_path):
    rows = rows_of(
        write_run(
            tmp_path, [line(1, spans={**SPANS, "exposed_communication": 0.0})], layout={"data": 1}, kind=GPU
        )
    )
    assert rows["exposed communication"]["measured"] == 0.0
    assert rows["computing"]["measured"] == 2.0


def test_the_allocator_of_a_gpu_does_not_see_the_runtime(tmp_path):
    assert (
        rows_of(write_run(tmp_path, [line(1)], kind=GPU))["peak memory, without overhead"]["predicted"]
        == 3.0 * GIB
    )


def test_reading_behind_the_devices_work_costs_only_what_is_left_of_the_step(tmp_path):
    rows = rows_of(write_run(tmp_path, [line(1, spans={**SPANS, "data": 3.0})], kind=GPU))
    assert rows["reading data"]["measured"] == 0.75
    assert rows["unclaimed"]["measured"] == 0.0


def test_a_pipelines_idle_time_is_counted_with_its_messages_and_that_is_said(tmp_path):
    predicted = {**PREDICTED, "step_seconds": {**TERMS, "bubble": 0.5, "imbalance": 0.125, "total": 2.625}}
    folder = write_run(tmp_path, [line(1)], predicted, layout={"pipeline": 2})
    assert pair(rows_of(folder)["exposed communication, bubble, imbalance"]) == (1.375, 0.75)
    assert "bubble and imbalance are measured as communication" in shown(folder)


def test_spans_that_were_not_recorded_are_not_known(tmp_path):
    bare = {"step": 1, "loss": 1.0, "seconds": 4.0, "tokens_per_second": 250.0}
    folder = write_run(tmp_path, [bare])
    rows = rows_of(folder)
    assert all(
        rows[name]["measured"] is None
        for name in ("computing", "optimizer", "reading data", "unclaimed", "peak memory", SUM)
    )
    assert "Nothing but the step time was measured." in shown(folder)


def test_bytes_are_equal_or_the_difference_is_shown(tmp_path):
    folder = write_run(tmp_path, [line(1)])
    assert "equal" in shown(folder)
    extra = {SUM: {"count": 3, "bytes": 4104}, "send/pipeline": {"count": 1, "bytes": 512}}
    write_run(tmp_path, [line(step, collectives=extra) for step in range(1, 4)])
    assert pair(rows_of(folder)["send/pipeline"]) == (0, 512)
    assert "+8 bytes, +1 calls" in shown(folder)
    assert "512 B in 1 call" in shown(folder)


def test_the_report_says_why_experts_got_other_bytes(tmp_path):
    exchange = {"kind": "all_to_all", "axis": "expert", "count": 7, "bytes": 4096}
    for size in (4096, 4090):
        ledger = {"all_to_all/expert": {"count": 7, "bytes": size}}
        folder = write_run(tmp_path, [line(1, collectives=ledger)], {**PREDICTED, "bytes": [exchange]})
        assert ("an even load was predicted" in shown(folder)) == (size != 4096)


def test_a_collective_that_did_not_happen_was_measured_as_none(tmp_path):
    rows = rows_of(write_run(tmp_path, [line(1, collectives={})]))
    assert pair(rows[SUM]) == (4096, 0)


def test_the_largest_disagreement_is_named(tmp_path):
    folder = write_run(tmp_path, [line(1)])
    assert "Largest disagreement: computing, 1 s predicted, 2 s measured (25 % of the step)." in shown(folder)
    close = {**SPANS, "data": 0.0, "forward_backward": 1.0, "exposed_communication": 0.75, "optimizer": 0.25}
    write_run(tmp_path, [line(1, 2.0, close, memory_bytes=int(3.5 * GIB))])
    assert "All that was measured is within 5 % of the prediction." in shown(folder)


def test_a_term_that_is_off_by_more_goes_before_memory_that_is_off_by_less(tmp_path):
    off = {**SPANS, "data": 0.0, "forward_backward": 1.0, "exposed_communication": 3.0, "optimizer": 0.25}
    folder = write_run(tmp_path, [line(1, 4.25, off, memory_bytes=int(8 * GIB))])
    rows = rows_of(folder)
    assert rows["exposed communication"]["ratio"] > rows["peak memory"]["ratio"] > 1.2
    assert "Largest disagreement: exposed communication" in shown(folder)


def test_only_steps_on_the_plans_own_layout_are_compared(tmp_path):
    two, one = {"data": 2}, {"data": 1}
    events = [
        {"event": "start", "memory_kind": CPU, "layout": two},
        {"event": "resume", "step": 4, "memory_kind": CPU, "layout": one},
    ]
    lines = [*(line(step, 4.0) for step in range(1, 5)), *(line(step, 8.0) for step in range(5, 10))]
    folder = write_run(tmp_path, lines, layout=one, events=events)
    assert rows_of(folder)["step time"]["measured"] == 8.0
    assert summarise(folder)["measured_steps"] == 3
    write_run(tmp_path, lines[:4], layout=one, events=events)
    assert summarise(folder)["predicted_and_measured"] is None


def test_the_table_fits_a_narrow_terminal(tmp_path):
    assert all(len(row) <= 80 for row in shown(write_run(tmp_path, [line(1)]), 80).splitlines())
