"""`shardwise plan JOB`: the winner with every term, for programs, for people and as a page; and what is said
where none is."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.cost.cluster_file import write_cluster
from shardwise.cost.clusters import named

ROOT = Path(__file__).parents[2]
LARGE, SMALL = str(ROOT / "examples" / "llama3-70b-64xh100.toml"), str(ROOT / "examples" / "quickstart.toml")
H100 = "cluster.preset=h100x8"
TERMS = {"matmul", "attention", "elementwise", "launch", "recompute", "optimizer", "bubble", "imbalance",
"tensor", "context",
         "expert", "data", "replica", "pipeline_sends", "offload"}  # fmt: skip
KINDS = {"weights", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "overhead"}
Done = tuple[int, str, str]
Plan = Callable[..., Done]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run the command in this process: (status, standard output, standard error)."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["shardwise", "plan", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def answer(plan: Plan, *arguments: str) -> dict[str, Any]:
    status, out, err = plan(*arguments, "--json")
    assert status == 0, err
    return dict(json.loads(out))


def step(found: dict[str, Any]) -> dict[str, Any]:
    """What is predicted of the winner."""
    best = found["best"]
    return {name: best[name] for name in ("layout", "micro_batch", "recompute", "step_seconds", "memory_gib")}


# -- answers -------------------------------------------------------------------------------------------------


def test_the_winner_of_70b_on_64_devices_fits_and_has_every_term(plan: Plan) -> None:
    found = answer(plan, LARGE)
    best = found["best"]
    assert {"layout", "micro_batch", "schedule", "recompute", "memory_gib", "step_seconds",
    "tokens_per_second_per_device", "mfu",
            "bytes", "config", "reason", "memory_limit_gib", "timeline", "map",
            "links"} <= set(best)  # fmt: skip
    assert {"version", "job", "cluster", "model", "tokens_per_step", "best", "runner_up", "binding",
    "candidates", "rejected",
            "considered", "seconds"} <= set(found)  # fmt: skip
    assert best["fits"]
    assert best["memory_gib"]["total"] <= best["memory_limit_gib"] < found["cluster"]["memory_gib"]
    assert set(best["step_seconds"]) >= TERMS | {"total"}
    assert set(best["memory_gib"]) >= KINDS | {"total"}
    for parts in (best["step_seconds"], best["memory_gib"]):
        assert sum(value for name, value in parts.items() if name != "total") == pytest.approx(
            parts["total"], rel=1e-9
        )
        assert all(value >= 0 for value in parts.values())
    layout = best["layout"]
    assert (
        layout["pipeline"] * layout["replica"] * layout["data"] * layout["context"] * layout["tensor"] == 64
    )
    assert best["micro_batch"] * best["accumulation"] * layout["replica"] * layout["data"] == 512
    assert best["tokens_per_second_per_device"] == pytest.approx(
        512 * 8192 / 64 / best["step_seconds"]["total"]
    )
    assert 0.2 < best["mfu"] < 0.7
    assert len(best["map"]) == 64
    assert {place["node"] for place in best["map"]} == set(range(8))


def test_candidates_are_fitting_layouts_best_first_and_nothing_is_uncounted(plan: Plan) -> None:
    found = answer(plan, SMALL, H100, "layout.data=-1", "--all")
    seconds = [one["step_seconds"]["total"] for one in found["candidates"]]
    assert seconds[1:] == sorted(seconds[1:])
    assert seconds[0] <= 1.02 * min(seconds)
    assert all(one["fits"] for one in found["candidates"])
    assert found["considered"] == len(found["candidates"]) + sum(found["rejected"].values())
    assert found["candidates"][0]["layout"] == found["best"]["layout"]


def test_a_full_layout_is_predicted_as_it_is(plan: Plan) -> None:
    asked = {"pipeline": 2, "data": 4, "tensor": 8, "zero": 1}
    words = [*(f"layout.{name}={value}" for name, value in asked.items()), "layout.schedule=zb1p"]
    found = answer(plan, LARGE, *words, "train.micro_batch=1", "train.recompute=full")
    layout = found["best"]["layout"]
    assert {name: layout[name] for name in asked} == asked
    assert (layout["schedule"], layout["replica"], layout["context"]) == ("zb1p", 1, 1)
    assert (found["best"]["micro_batch"], found["best"]["recompute"]) == (1, "full")


def test_one_field_is_pinned_and_the_others_are_searched(plan: Plan) -> None:
    found = answer(plan, LARGE, "layout.tensor=8", "train.recompute=none")
    assert {one["layout"]["tensor"] for one in found["candidates"]} == {8}
    assert {one["recompute"] for one in found["candidates"]} == {"none"}
    assert len({one["layout"]["pipeline"] for one in found["candidates"]}) > 1


@pytest.mark.full
def test_what_is_to_be_pasted_gives_the_same_prediction_again(plan: Plan, tmp_path: Path) -> None:
    for pins in (
        [],
        ["layout.pipeline=4", "layout.schedule=interleaved"],
        ["layout.context=2", "layout.attention=ring"],
    ):
        first = answer(plan, LARGE, *pins)
        lines = tomllib.loads(Path(LARGE).read_text())
        pasted = tomllib.loads(first["best"]["config"])
        job = {**lines, "layout": pasted["layout"], "train": {**lines["train"], **pasted["train"]}}
        (tmp_path / "job.toml").write_text("\n".join(_toml(job)))
        assert step(answer(plan, str(tmp_path / "job.toml"))) == step(first)


def _toml(tables: dict[str, dict[str, Any]]) -> list[str]:
    return [
        line
        for name, table in tables.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()))
    ]


def test_a_terminal_shows_the_lines_to_paste_the_reason_and_the_bars(plan: Plan) -> None:
    status, out, err = plan(LARGE)
    assert (status, err) == (0, "")
    shown = out[out.index("[layout]") : out.index("memory ")]
    assert set(tomllib.loads(shown)) == {"layout", "train"}
    for word in (
        "70.6B parameters",
        "64 x H100",
        "why: ",
        "GiB of 72.77",
        "tokens/s a device, MFU",
        "next best of another kind",
        "loses on",
        "on storage of 20 GB/s in all (--storage-gb-per-s)",
    ):
        assert word in " ".join(out.split()), word


def test_the_curve_of_a_job_has_every_number_of_devices_that_was_asked_for(plan: Plan) -> None:
    status, out, err = plan(SMALL, H100, "layout.data=-1", "--scale", "1,2,4")
    assert status == 0, err
    strong, weak = out.partition("weak scaling")[::2]
    for curve in (strong, weak):
        assert [line.split()[0] for line in curve.splitlines() if " ms " in line] == ["1", "2", "4"]


def test_a_page_is_written_and_a_program_still_gets_its_object(plan: Plan, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    status, out, err = plan(LARGE, "--html", str(page), "--json")
    assert status == 0
    json.loads(out)
    assert str(page) in err
    text = page.read_text()
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert 'src="http' not in text


def test_it_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; from shardwise.cli.main import main; main()"
    command = [sys.executable, "-c", script, "plan", LARGE, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best"]["fits"]


def test_a_budget_of_recomputation_is_the_users_to_keep(plan: Plan) -> None:
    assert answer(plan, LARGE, "train.recompute=0.5")["best"]["recompute"] == "selective"


def test_stages_cut_by_hand_leave_schedules_that_have_as_many(plan: Plan) -> None:
    found = answer(plan, SMALL, H100, "layout.pipeline=2", "layout.data=-1", "layout.stages=[1, 3]", "--all")
    assert {one["layout"]["schedule"] for one in found["candidates"]} == {"1f1b", "zb1p"}
    assert tomllib.loads(found["best"]["config"])["layout"]["stages"] == [1, 3]


# -- requests that cannot be met -----------------------------------------------------------------------------

OPEN = (
    LARGE,
    "model.layers=6",
    "model.hidden=512",
    "model.heads=8",
    "model.kv_heads=8",
    "model.head_dim=64",
    "model.ffn=1408",
)
BAD: dict[str, tuple[list[str], list[str]]] = {
    "nothing fits": (
        [LARGE, H100, "layout.offload=false"],
        [
            "nothing fits",
            "GiB more than the 72.8 GiB a plan may use",
            "use about 16 devices",
            "layout.offload=true",
        ],
    ),
    "long sequences on one device": (
        [
            LARGE,
            "cluster.preset=h100x1",
            "model.layers=1",
            "model.max_positions=4194304",
            "data.sequence_length=4194304",
            "train.global_batch=1",
        ],
        ["nothing fits", "GiB more than", "shorter data.sequence_length"],
    ),
    "unknown device": (
        [LARGE, "cluster.preset=h10x8"],
        ["cluster.preset = 'h10x8'", "did you mean h100", "cluster.file"],
    ),
    "seven devices and eight heads": (
        [*OPEN, "cluster.preset=h100x8", "cluster.devices=7", "train.global_batch=8"],
        ["7 devices", "8 heads", "global batch of 8", "6 blocks", "there are some on 6 or 8 devices"],
    ),
    "a batch that nothing divides": (
        [
            *OPEN,
            "cluster.preset=h100x8",
            "train.global_batch=7",
            "data.sequence_length=8191",
            "model.layers=5",
        ],
        ["global batch of 7 does not divide", "a sequence of 8191 does not divide"],
    ),
    "part of a node too many": (
        [LARGE, "cluster.devices=60"],
        ["cluster.devices = 60", "whole nodes of 8", "use 56 or 64"],
    ),
    "no devices": ([LARGE, "cluster.devices=0"], ["cluster.devices = 0", "greater than or equal to 1"]),
    "preset and file": (
        [LARGE, "cluster.file=mine.toml"],
        ["cluster.preset and cluster.file are both given; keep one"],
    ),
    "heads refuse": (
        [LARGE, "layout.tensor=3"],
        ["layout.tensor = 3", "model.heads = 64", "nearest layout that works: layout.tensor=4"],
    ),
    "more stages than blocks": (
        [LARGE, "layout.pipeline=128"],
        ["layout.pipeline = 128", "model.layers = 80", "layout.pipeline=64"],
    ),
    "a degree that does not divide": (
        [LARGE, "layout.pipeline=5"],
        ["layout.pipeline = 5 cannot be part of 64 devices", "40 or 80 devices"],
    ),
    "sequence too long": (
        [SMALL, H100, "data.sequence_length=4096"],
        ["data.sequence_length = 4096", "model.max_positions = 2048"],
    ),
    "float64 on a GPU": (
        [SMALL, H100, "train.precision=float64"],
        ["train.precision = 'float64'", "H100", "float32, bfloat16, float16", "device.peak.float64"],
    ),
    "bfloat16 on a V100": (
        [SMALL, "cluster.preset=v100", "train.precision=bfloat16"],
        ["'bfloat16'", "V100", "float32, float16"],
    ),
    "margin": ([LARGE, "cluster.margin=1.5"], ["cluster.margin = 1.5", "less than 1"]),
    "micro-batch": (
        [LARGE, "train.micro_batch=3"],
        ["train.micro_batch = 3 does not divide", "global batch of 512"],
    ),
    "a module of one's own": ([SMALL, H100, "model.module=mine.py:Net"], ["model.module", "[layout]"]),
    "unknown key": ([LARGE, "cluster.device=h100"], ["cluster.device", "unknown key"]),
    "no such job": (["nowhere.toml"], ["nowhere.toml"]),
}


def refused(done: Done, *words: str) -> None:
    """Status 2, one message that says these words, and nothing else."""
    status, out, err = done
    assert status == 2, err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert out == ""
    flat = " ".join(err.split())
    for word in words:
        assert word in flat, f"{word!r} is not in: {err}"


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_cannot_be_met_is_answered_with_what_can(plan: Plan, name: str) -> None:
    arguments, words = BAD[name]
    refused(plan(*arguments), *words)


def test_the_devices_advised_do_fit(plan: Plan) -> None:
    assert answer(plan, LARGE, "cluster.preset=h100x16", "layout.offload=false")["best"]["fits"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('preset = "h100"\n[between]\nbandwidth_gb_s = -50', ["between.bandwidth_gb_s = -50", "more than 0"]),
        ('preset = "h10"', ["preset = 'h10'", "unknown"]),
        ("nodes = =", ["is not valid TOML"]),
        (
            "nodes = 0\n[device]\nmemory_gib = 0",
            ["nodes = 0", "device.memory_gib = 0", "device.peak: missing", "inside.latency_us: missing"],
        ),
        (None, ["cannot be read", "shardwise probe"]),
    ],
)
def test_a_bad_cluster_file_is_named(plan: Plan, tmp_path: Path, text: str | None, words: list[str]) -> None:
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_text(text)
    refused(plan(SMALL, f"cluster.file={path}"), str(path), *words)


def test_a_device_with_brackets_in_its_name_is_shown_as_it_is(plan: Plan, tmp_path: Path) -> None:
    cluster = named("cpux2")
    path = tmp_path / "cluster.toml"
    path.write_text(write_cluster(replace(cluster, device=replace(cluster.device, name="mine [/red]"))))
    assert "2 x mine [/red] (" in plan(SMALL, f"cluster.file={path}")[1]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(plan: Plan, tmp_path: Path) -> None:
    refused(plan(LARGE, "--html", str(tmp_path)), "is a folder; give the path of a file")
    refused(
        plan(LARGE, "--html", str(tmp_path / "no" / "page.html")), "cannot be written", "give another path"
    )
    refused(
        plan(LARGE, "--html", str(tmp_path / ("x" * 300))),
        "cannot be written (File name too long); give another path",
    )


def test_the_beginning_of_an_option_is_answered_with_the_option(plan: Plan) -> None:
    """It is no key of the job, even where a key is named alike."""
    status, _, errors = plan(LARGE, "--storage", "3")
    assert status == 2
    assert "--storage-gb-per-s" in errors
    assert "layout.zero" not in errors
