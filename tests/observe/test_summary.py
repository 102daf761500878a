import io
import json
import math
import tracemalloc
from datetime import UTC, datetime

import pytest
from rich.console import Console

from shardwise.config import Layout, Observe
from shardwise.errors import UserError
from shardwise.observe import open_sinks, render, summarise
from shardwise.observe.goodput import goodput
from shardwise.observe.render_report import _layout
from shardwise.observe.totals import RunTotals
from shardwise.search.interval import DEVICE_HOURS, advise

GATHER, REDUCE = "all_gather/data", "all_reduce/data"


def write_run(folder, records, plan=None):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[train]\nsteps = 6\nprecision = "bfloat16"\n\n[layout]\ndata = 4\n')
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    sinks = open_sinks(folder, Observe())
    sinks.event("start", device="4 x CPU", memory_kind="resident set of the process")
    for record in records:
        sinks.metrics(record)
    sinks.event("save", step=6)
    sinks.close()


def record(step, loss, seconds, speed, exposed, **more):
    return {
        "step": step,
        "loss": loss,
        "gradient_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 1000,
        "tokens_per_second": speed,
        "sequences_per_second": speed / 100,
        "seconds": seconds,
        "mfu": None,
        "memory_bytes": 100 * step,
        "spans": {
            "data": 0.0625,
            "forward_backward": 0.5,
            "exposed_communication": exposed,
            "optimizer": 0.125,
        },
        "collectives": {GATHER: {"count": 4, "bytes": 4000}},
        **more,
    }


RECORDS = [
    record(1, 6.0, 8.0, 125.0, 0.5),
    record(2, 5.0, 2.0, 500.0, 0.5),
    record(3, 4.0, 1.0, 1000.0, 0.25, held_out_loss=4.5),
    record(4, math.nan, 1.0, 1001.0, 0.25, skipped=True),
    record(5, 2.0, 1.0, 1010.0, 0.0),
    record(6, 3.0, 1.0, 900.0, 0.0, held_out_loss=3.5),
]
RECORDS[5]["collectives"][REDUCE] = {"count": 1, "bytes": 8}
PLAN = {
    "layout": {"replica": 1, "data": 4, "zero": 3},
    "parameters": 123456,
    "micro_batch": 2,
    "accumulation": 1,
    "flop_convention": "6 N + attention",
    "memory_gib": {"weights": 0.5, "states": 1.5},
}


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", RECORDS, PLAN)
    return tmp_path / "run"


def test_a_summary_equals_the_values_worked_out_by_hand(run):
    summary = summarise(run)
    assert summary["steps"] == summary["planned_steps"] == 6
    assert summary["seconds"] == 14.0
    assert summary["tokens"] == 6000
    assert summary["loss"] == {"first": 6.0, "last": 3.0, "minimum": 2.0, "minimum_step": 5}
    assert summary["held_out"] == [{"step": 3, "loss": 4.5}, {"step": 6, "loss": 3.5}]
    assert summary["tokens_per_second"] == {"median": 1000.5, "last": 900.0}
    assert summary["sequences_per_second"] == pytest.approx(10.005)
    assert summary["peak_memory_bytes"] == 600
    assert summary["memory_kind"] == "resident set of the process"
    assert summary["predicted_states_gib"] == 1.5
    assert summary["mfu"] is None
    assert summary["flop_convention"] == "6 N + attention"
    assert summary["skipped_steps"] == [4]
    assert summary["events"] == {"start": 1, "save": 1}
    unknown = dict.fromkeys(("save_seconds", "stall_seconds", "bytes", "advice"))
    assert summary["checkpoints"] == {"saved": 1, "kept_steps": None, **unknown}
    assert (summary["layout"], summary["precision"], summary["device"]) == (
        PLAN["layout"],
        "bfloat16",
        "4 x CPU",
    )
    assert [step for step, _ in summary["curve"]] == [1, 2, 3, 4, 5, 6]


def test_time_shares_are_of_the_steady_steps_and_add_up_to_one(run):
    summary = summarise(run)
    shares = summary["time"]["shares"]
    assert shares == {
        "data": 0.0625,
        "forward_backward": 0.5,
        "exposed_communication": 0.125,
        "optimizer": 0.125,
        "other": 0.1875,
    }
    assert sum(shares.values()) == 1
    assert summary["time"]["seconds_a_step"] == 1.0
    assert summary["communication"] == {
        "efficiency": 0.875,
        "overlap": None,
        "axes": {"data": {"bytes": 4000, "seconds": None, "hidden": None}},
    }


def test_overlap_is_the_share_of_communication_that_was_hidden(tmp_path):
    times = {"data": {"seconds": 0.5, "hidden": 0.25}, "replica": {"seconds": 0.5, "hidden": 0.5}}
    steps = [record(step, 1.0, 1.0, 1.0, 0.25, communication=times) for step in range(1, 6)]
    write_run(tmp_path / "run", steps)
    found = summarise(tmp_path / "run")["communication"]
    assert (found["efficiency"], found["overlap"]) == (0.75, 0.75)
    assert {axis: (used["seconds"], used["hidden"]) for axis, used in found["axes"].items()} == {
        "data": (0.5, 0.5)
    }


def test_collectives_are_those_of_a_typical_step_and_of_the_whole_run(run):
    assert summarise(run)["collectives"] == {
        GATHER: {"count": 4, "bytes": 4000, "total_count": 24, "total_bytes": 24000},
        REDUCE: {"count": 0, "bytes": 0, "total_count": 1, "total_bytes": 8},
    }


def test_mfu_is_the_median_of_the_steady_steps(tmp_path):
    values = (0.01, 0.02, 0.4, 0.5, 0.43)
    steps = [record(step, 1.0, 1.0, 1.0, 0.0, mfu=value) for step, value in enumerate(values, start=1)]
    write_run(tmp_path / "run", steps)
    assert summarise(tmp_path / "run")["mfu"] == 0.43


def test_a_run_of_one_step_without_plan_or_config_is_still_summarised(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5, "seconds": 0.5, "tokens_per_second": 10.0}\n{"step": 2, "lo'
    )
    summary = summarise(tmp_path)
    assert (summary["steps"], summary["layout"], summary["peak_memory_bytes"]) == (1, None, None)
    render(summary, Console(file=io.StringIO()))


def test_a_long_run_keeps_few_points_with_both_ends(tmp_path):
    write_run(tmp_path / "run", [record(step, 1.0 / step, 1.0, 1.0, 0.0) for step in range(1, 1001)])
    curve = summarise(tmp_path / "run")["curve"]
    assert len(curve) == 240
    assert curve[0] == [1, 1.0]
    assert curve[-1] == [1000, 0.001]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 100])
def test_the_report_shows_the_numbers_and_fits_any_output(run, encoding, width):
    raw = io.BytesIO()
    out = Console(
        file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width, highlight=False
    )
    render(summarise(run), out)
    text = raw.getvalue().decode(encoding)
    assert all(len(line) <= width for line in text.splitlines())
    if width == 100:
        for part in (
            "6.0000 to 3.0000, lowest 2.0000 at step 5",
            "3.5000 at step 6",
            "n/a",
            "data 4, zero 3",
            "1.50 GiB",
        ):
            assert part in text
        assert "12.5 %" in text
        assert "all gather" in text


T0 = 1_700_000_000.0


def event(at, name, **facts):
    return {
        "time": datetime.fromtimestamp(T0 + at, UTC).isoformat(timespec="milliseconds"),
        "event": name,
        **facts,
    }


FAULT = {"kind": "died", "rank": 2, "step": 6, "cause": "signal 9 (SIGKILL)", "generation": 1}
HISTORY = [
    event(0, "start", world=4, device="CPU"),
    event(5.5, "save", step=4, checkpoint="a", seconds=2.0, stall_seconds=0.5, bytes=1000),
    event(6.5, "fault", **FAULT),
    event(8.0, "resume", step=4, checkpoint="a", world=4),
    event(
        9.5, "recovery", step=4, lost_steps=1, lost_seconds=1.0, seconds=3.0, parts={}, generation=2, world=4
    ),
    event(9.6, "straggler", rank=3, factor=2.1, cause="data", step=5),
    event(11.0, "save", step=6, checkpoint="b", seconds=3.0, stall_seconds=0.5, bytes=2000),
]


@pytest.fixture
def disturbed(tmp_path):
    """Four steps, of which the first takes two seconds to start; a fault at 6.5 that costs step 5; then steps
    5 and 6."""
    folder = tmp_path / "disturbed"
    folder.mkdir()
    ends = {1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 9.5, 6: 10.5}
    steps = [record(step, 1.0, 1.0, 1000.0, 0.0, time=T0 + end) for step, end in ends.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in HISTORY))
    return folder


def test_goodput_and_saves_are_summed_up(disturbed):
    summary = summarise(disturbed)
    found = summary["goodput"]
    assert found["wall_seconds"] == pytest.approx(11)
    assert found["share"] == pytest.approx(6 * 0.9375 / 11)  # of each second a sixteenth is data
    expected = {
        "start_up": 1.0,
        "data": 0.375,
        "productive": 5.625,
        "checkpoint": 1.0,
        "lost": 1.0,
        "recovery": 2.0,
    }
    assert {name: seconds for name, seconds in found["parts"].items() if seconds > 0} == pytest.approx(
        expected, abs=2e-3
    )
    assert found["faults"] == [{"time": HISTORY[2]["time"], **FAULT, "recovery": 0}]
    assert found["stragglers"] == [{"rank": 3, "factor": 2.1, "cause": "data", "step": 5, "until_step": None}]
    assert summary["checkpoints"] == {
        "saved": 2,
        "kept_steps": None,
        "save_seconds": 2.5,
        "stall_seconds": 0.5,
        "bytes": 1500,
        "advice": None,
    }


def test_advice_on_saving_is_youngs_interval_of_what_was_measured(disturbed):
    advice = summarise(disturbed, advise)["checkpoints"]["advice"]
    between = DEVICE_HOURS * 3600 / 4
    assert advice["every_seconds"] == pytest.approx(math.sqrt(2 * 0.5 * between))
    assert advice["every_steps"] == round(advice["every_seconds"])
    assert advice["mtbf_hours"] == pytest.approx(between / 3600)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [40, 100, 130])
def test_faults_and_goodput_are_drawn_on_any_output(disturbed, encoding, width):
    raw = io.BytesIO()
    out = Console(
        file=io.TextIOWrapper(raw, encoding=encoding, write_through=True), width=width, highlight=False
    )
    render(summarise(disturbed, advise), out)
    text = raw.getvalue().decode(encoding)
    assert all(len(line) <= width for line in text.splitlines())
    if width == 130:
        for part in (
            "51.1 % of 0:11",
            "lost work",
            "rank 2",
            "3.0 s",
            "signal 9 (SIGKILL)",
            "rank 3, step 5 to the end: 2.1 times",
        ):
            assert part in text


LOADS = [(1.5, [1.5, 0.5]), (2.5, [1.75, 0.25]), (1.25, [1.0, 1.0])]


def test_the_load_of_experts_is_that_of_the_last_step_beside_the_worst(tmp_path):
    steps = [
        record(step, 1.0, 1.0, 1.0, 0.0, expert_imbalance=worst, expert_load=load)
        for step, (worst, load) in enumerate(LOADS, start=1)
    ]
    write_run(tmp_path / "run", steps)
    summary = summarise(tmp_path / "run")
    assert summary["experts"] == {
        "imbalance": {"last": 1.25, "worst": 2.5, "worst_step": 2},
        "load": [1.0, 1.0],
    }
    out = Console(file=io.StringIO(), width=100)
    render(summary, out)
    assert "1.25 times an even load, worst 2.50 at step 2" in out.file.getvalue()
    assert "load of each expert" in out.file.getvalue()


def test_a_model_without_experts_has_no_load(run):
    assert summarise(run)["experts"] is None


def test_of_very_many_experts_the_busiest_and_the_idlest_are_drawn(tmp_path):
    load = [expert / 50 for expert in range(100)]
    write_run(tmp_path / "run", [record(1, 1.0, 1.0, 1.0, 0.0, expert_imbalance=3.0, expert_load=load)])
    out = Console(file=io.StringIO(), width=100)
    render(summarise(tmp_path / "run"), out)
    drawn = out.file.getvalue().partition("load of each expert")[2]
    numbers = [
        int(line.split()[0]) for line in drawn.splitlines() if line[:2] == "  " and line.split()[0].isdigit()
    ]
    assert numbers == [*range(99, 83, -1), *range(15, -1, -1)]


def test_what_is_not_a_run_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no such run folder"):
        summarise(tmp_path / "absent")
    with pytest.raises(UserError, match="no metrics yet"):
        summarise(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.5, "seconds": 0.5, "tokens_per_second": 10.0}\n'
    )
    (tmp_path / "plan.json").write_text("{not json")
    with pytest.raises(UserError, match=r"plan\.json is not valid JSON.*restore or remove it"):
        summarise(tmp_path)


def test_a_damaged_line_is_counted_and_said_and_the_rest_is_summed_up(run):
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join([lines[0], b"\x00" * 10 + b"\n", *lines[1:]]))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0, "secnds": 1.0}\n{"step": 7, "lo')
    summary = summarise(run)
    assert summary["damaged_lines"] == {"metrics.jsonl": 2, "events.jsonl": 1}
    assert (summary["steps"], summary["seconds"], summary["events"]) == (6, 14.0, {"start": 1, "save": 1})
    out = Console(file=io.StringIO(), width=100)
    render(summary, out)
    assert "2 of metrics.jsonl, 1 of events.jsonl (skipped)" in out.file.getvalue()


def report_of(folder, steps, events=()):
    """What `shardwise report` shows, and the summary, of a run with these records."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary, out = summarise(folder, advise), Console(file=io.StringIO(), width=130)
    render(summary, out)
    return out.file.getvalue(), summary


@pytest.mark.parametrize("lacking", [("straggler", "factor"), ("recovery", "seconds")])
def test_an_event_that_lacks_what_it_is_about_is_damaged(tmp_path, lacking):
    name, field = lacking
    second = [event(12.5, "fault", **FAULT), event(14, "recovery", step=5, lost_steps=2, seconds=2.0)]
    history = [*HISTORY, *second]
    number = next(index for index, one in enumerate(history) if one["event"] == name)
    for damage in ({field: None}, {}):
        history[number] = {key: value for key, value in history[number].items() if key != field} | damage
        text, summary = report_of(
            tmp_path / f"run-{len(damage)}", [record(1, 1.0, 1.0, 1.0, 0.0, time=T0 + 2)], history
        )
        assert summary["damaged_lines"]["events.jsonl"] == 1
        assert "in 2.0 s" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 1e308},
        {"loss": -1e308},
        {"spans": {"data": 1e300}},
        {"seconds": -1.0},
        {"memory_bytes": 1e200},
    ],
)
def test_a_number_that_no_run_measures_is_damage(tmp_path, wrong):
    steps = [record(step, 1e30, 1.0, 1.0, 0.0) for step in range(1, 5)]
    text, summary = report_of(
        tmp_path / "run", [*steps, {**steps[0], "step": 5, **wrong}, {**steps[0], "step": 6, **wrong}]
    )
    assert summary["damaged_lines"]["metrics.jsonl"] == 2
    assert (summary["seconds"], summary["loss"]["last"]) == (4.0, 1e30)
    assert "2 of metrics.jsonl (skipped)" in text


@pytest.mark.parametrize("seconds", [0.0, 1e-320])
def test_steps_that_took_no_time_get_no_advice(tmp_path, seconds):
    history = [event(0, "start"), event(5, "save", step=1, seconds=1.0)]
    _, summary = report_of(
        tmp_path / "run", [record(step, 1.0, seconds, 1.0, 0.0) for step in range(1, 5)], history
    )
    assert summary["checkpoints"]["advice"] is None


def test_names_with_brackets_are_shown_as_they_are(tmp_path):
    names = {"all_gather/[/x]": {"count": 1, "bytes": 1}, "[red]kind/[bold]axis": {"count": 1, "bytes": 1}}
    text, _ = report_of(tmp_path / "run", [record(1, 1.0, 1.0, 1.0, 0.0) | {"collectives": names}])
    assert all(part in text for part in ("[/x]", "[red]kind", "[bold]axis"))


def test_loads_of_experts_that_are_no_numbers_are_drawn_without_a_bar(tmp_path):
    load = ["NaN", "Infinity", 1.0]
    text, _ = report_of(
        tmp_path / "run", [record(1, 1.0, 1.0, 1.0, 0.0, expert_imbalance="Infinity", expert_load=load)]
    )
    assert "load of each expert" in text


def long_history(steps):
    """Saves every thousand steps; a step takes a second, of which a quarter is spent on waiting for data, and
    a pause follows."""
    at = 0.0
    for number in range(1, steps + 1):
        at += 1.25
        yield {
            **record(number, 1.0 / number, 1.0, 1000.0, 0.0),
            "time": T0 + at,
            "spans": {"data": 0.25, "optimizer": 0.75},
        }


def test_the_memory_of_a_summary_does_not_grow_with_the_steps_and_sums_stay_exact():
    peaks = []
    for count in (5_000, 15_000):
        history = [
            event(0, "start"),
            *(event(1.25 * n, "save", step=n, seconds=0.1) for n in range(5_000, count + 1, 5_000)),
        ]
        tracemalloc.start()
        totals = RunTotals(0)
        found = goodput(history, totals.gather(long_history(count)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (totals.seconds, totals.tokens, totals.last["step"]) == (count, 1000 * count, count)
        assert found["parts"]["productive"] == pytest.approx(0.75 * count)
        assert found["parts"]["data"] == pytest.approx(0.25 * count)
        assert sum(found["parts"].values()) == pytest.approx(found["wall_seconds"])
        assert 2048 <= len(totals.steady.sample) <= 4096
        assert totals.steady.count == count - 2
    assert peaks[1] < 1.5 * peaks[0]


def test_of_a_layout_what_is_usual_is_left_out():
    plan = Layout().model_dump() | {"data": 1, "zero": 0}
    assert _layout(plan) == "one device"
    assert _layout(plan | {"data": 2}) == "data 2, zero 0"
    chosen = {"pipeline": 2, "schedule": "zbv", "zero": 1, "offload": True}
    assert sorted(_layout(plan | chosen).split(", ")) == sorted(
        f"{name} {value}" for name, value in chosen.items()
    )
