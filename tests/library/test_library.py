"""The Python library: its public names and signatures, and that each function does what its command does."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.config import read

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples/quickstart.toml"
LARGE = ROOT / "examples/llama3-70b-64xh100.toml"
SIGNATURES = {
    "Job.read": "(path: 'str | Path', *overrides: 'str', **tables: 'Tables') -> 'Job'",
    "Job.changed": "(self, *overrides: 'str', **tables: 'Tables') -> 'Job'",
    "Job.of": "(what: 'Job | str | Path | Callable[[Any], object]', **tables: 'Tables') -> 'Job'",
    "plan": "(job: 'Trained', cluster: 'str | None' = None, everything: 'bool' = "
    "False, **tables: 'Tables') -> 'PlanAnswer'",
    "launch": "(job: 'Trained', workers: 'int | None' = None, min_workers: 'int | None'"
    " = None, max_workers: 'int | None' = None, **tables: 'Tables') -> 'Run'",
    "verify": "(job: 'Trained', steps: 'int' = 3, dtype: 'Dtype' = 'float64', against: "
    "'Reference' = 'one-device', device: 'Device | None' = None, **tables: "
    "'Tables') -> 'Proof'",
    "drill": "(job: 'Trained', faults: 'str' = 'kill,hang,corrupt,full,term', count: "
    "'int' = 5, seed: 'int' = 0, workers: 'int | None' = None, device: "
    "'Device | None' = None, **tables: 'Tables') -> 'Drill'",
    "Engine.prepare": "(self, make: 'Callable[[], torch.nn.Module] | None' = None, sharding: "
    "'object' = None) -> 'None'",
    "Engine.optimizer": "(self, name: 'str | type[torch.optim.Optimizer]' = 'adamw', lr: 'float | None' = "
    "None, *, groups: 'Mapping[str, Mapping[str, float]] | None' = None, **settings: 'object') -> 'None'",
    "Engine.batches": "(self, dataset: 'object' = None, *, global_batch: 'int | None' = None, "
    "collate: 'Collate | None' = None, steps: 'int | None' = None, epochs: "
    "'float | None' = None, workers: 'int' = 0, sequences: 'Sequence[str]' = ()) -> 'Iterator[StepBatch]'",
    "Engine.forward_backward": "(self, loss: 'LossFunction', batch: 'StepBatch') -> 'Metrics'",
    "Engine.clip_grad_norm": "(self, limit: 'float') -> 'None'",
    "Engine.optim_step": "(self) -> 'Metrics'",
    "Engine.evaluate": "(self, function: 'LossFunction', dataset: 'object', *, collate: 'Collate"
    " | None' = None) -> 'dict[str, float]'",
    "Engine.add_callback": "(self, callback: 'object') -> 'None'",
    "Engine.log": "(self, **values: 'float') -> 'None'",
    "Engine.save": "(self) -> 'None'",
    "Engine.state_dict": "(self) -> 'dict[str, Any]'",
    "Engine.export": "(self, path: 'str') -> 'None'",
    "Engine.stop": "(self) -> 'None'",
    "next_token_loss": "(model: 'Any', batch: 'Mapping[str, torch.Tensor]') -> "
    "'tuple[torch.Tensor, torch.Tensor]'",
}
"""What users rely on. A change here is a change for them, and belongs in CHANGELOG.md."""
NAMES = [
    "Drill", "Engine", "Job", "Metrics", "PlanAnswer", "Proof", "Run", "RunFailed", "Sharding",
    "StepBatch", "UserError", "__version__", "columns", "drill", "experts", "gathered", "launch",
    "next_token_loss", "plan", "positions", "rows", "verify", "vocabulary", "whole",
]  # fmt: skip


def small(tmp_path: Path, **tables: Any) -> sw.Job:
    """A job that takes seconds."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"preset": "bytes-400k"},
        "data": {"source": str(ROOT / "examples/shakespeare.txt"), "sequence_length": 32},
        "train": {"steps": 6, "global_batch": 4, "evaluate_every": 0},
        "layout": {"data": 2},
        "observe": {"sample": None},
        "run": {"folder": str(tmp_path / "run")},
    }
    for name, table in tables.items():
        settings[name] = {**settings.get(name, {}), **table}
    return sw.Job.read(JOB, **settings)


def test_the_public_names_and_signatures_are_those_that_users_rely_on() -> None:
    assert sorted(sw.__all__) == NAMES
    for name, signature in SIGNATURES.items():
        owner, _, method = name.rpartition(".")
        function = getattr(getattr(sw, owner) if owner else sw, method)
        assert str(inspect.signature(function)) == signature.replace("(self, ", "(self, "), name


def test_every_public_name_is_on_its_page() -> None:
    page = (ROOT / "docs/library.md").read_text()
    for name in set(NAMES) - {"__version__"}:
        assert re.search(rf"\bsw\.{name}\b|`{name}`", page), f"{name} is not in docs/library.md"


def test_a_job_is_what_the_command_line_makes_of_the_same_changes() -> None:
    job = sw.Job.read(JOB, "train.steps=7", layout={"tensor": 2, "data": 1}, model={"preset": "bytes-400k"})
    words = ["train.steps=7", "layout.tensor=2", "layout.data=1", "model.preset=bytes-400k"]
    assert job.config == read(JOB, words)
    assert job.changed(layout={"tensor": None}).config == read(JOB, [*words, "layout.tensor="])
    assert read_again(str(job)) == job.config.model_dump()


def read_again(text: str) -> Any:
    import tomllib

    from shardwise.config import from_tables

    return from_tables(tomllib.loads(text)).model_dump()


@pytest.mark.parametrize(
    ("value", "written"),
    [(True, "true"), (3e-3, "0.003"), ("a b", '"a b"'), ([1, 2], "[1, 2]"), ("x=[1]", '"x=[1]"'), (None, "")],
)
def test_values_are_written_as_toml(value: object, written: str) -> None:
    from shardwise.library.job import _as_toml

    assert re.sub(r"\s+", " ", _as_toml("a.b", value)).replace("[ ", "[").replace(", ]", "]") == written


def test_all_mistakes_of_a_job_are_raised_together() -> None:
    with pytest.raises(sw.UserError) as caught:
        sw.Job.read(JOB, train={"stpes": 3}, model={"heads": 7})
    assert "train.stpes" in str(caught.value)
    assert "heads" in str(caught.value)
    with pytest.raises(sw.UserError, match=r"layout = 2: expected a dictionary"):
        sw.Job.read(JOB, layout=2)  # type: ignore[arg-type]
    with pytest.raises(sw.UserError, match=r"train.steps = .*: a object cannot be a setting"):
        sw.Job.read(JOB, train={"steps": object()})


def test_planning_for_a_named_cluster_imports_no_torch_and_gives_what_the_command_gives(warm: Any) -> None:
    code = (
        "import sys, json, shardwise as sw\n"
        f"answer = sw.plan(sw.Job.read({str(LARGE)!r}), cluster='h100x64')\n"
        "assert 'torch' not in sys.modules and 'typer' not in sys.modules\n"
        "assert '<iframe' in answer._repr_html_() and 'tensor' in str(answer)\n"
        "print(json.dumps(answer.layout))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = warm.run("plan", str(LARGE), "--json", cwd=ROOT, environment={})
    assert json.loads(done.stdout) == json.loads(shown.stdout)["best"]["layout"]


NOTES = """
class Notes:
    def __init__(self):
        self.file = open(__file__.replace("notes.py", "notes.txt"), "a")
    def on_step(self, record):
        print(record["step"], file=self.file, flush=True)
    def on_end(self, event):
        print("end after", event["step"], file=self.file, flush=True)
"""


def test_a_launched_run_is_the_run_of_the_command(tmp_path: Path, warm: Any) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    job, before = small(tmp_path), signal.getsignal(signal.SIGINT)
    run = sw.launch(job.changed(observe={"callbacks": [f"{tmp_path}/notes.py:Notes"]}), workers=2)
    assert (tmp_path / "notes.txt").read_text().split("\n") == [*"123456", "end after 6", ""]
    assert (run.status, run.folder) == (0, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
    losses = [record["loss"] for record in run.metrics]
    assert len(losses) == 6
    assert [event["event"] for event in run.events][-1] == "end"
    assert "loss" in str(run)
    assert "<pre>" in run._repr_html_()
    words = [*job.overrides, f"run.folder={tmp_path}/command"]
    done = warm.run("train", str(JOB), *words, "--workers", "2", cwd=tmp_path, environment={})
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "command/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == losses


def test_a_thread_cannot_launch_a_run(tmp_path: Path) -> None:
    job, errors = small(tmp_path), list[str]()

    def launch() -> None:
        try:
            sw.launch(job)
        except sw.UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert errors == ["launch: call it in the main thread, which receives the signals that stop a run"]


PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.full
def test_the_python_lines_of_the_page_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    job = tmp_path / "examples/quickstart.toml"
    smaller = {'"bytes-2m"': '"bytes-400k"', "sequence_length = 128": "sequence_length = 32"}
    for large, small_value in smaller.items():
        assert large in job.read_text()
        job.write_text(job.read_text().replace(large, small_value))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    for lines in PYTHON.findall((ROOT / "docs/library.md").read_text()):
        if "__main__" not in lines:
            exec(lines, names)
    assert "tensor" in capsys.readouterr().out
    assert names["run"].status == 0
    assert str(names["proof"]).splitlines()[-2].startswith("PASS: tensor 2")
    assert "PASS: 1 fault on 2 workers" in str(names["drill"])
    experts, rows = names["Experts"](3, 4), torch.randn(5, 4)
    alone = [F.gelu(rows[[i]] @ experts.up[n]) @ experts.down[n] for i, n in enumerate([0, 0, 2, 2, 2])]
    torch.testing.assert_close(experts(rows, torch.tensor([2, 0, 3])), torch.cat(alone))
    for result in (names["proof"], names["drill"]):
        assert result.to_json()["pass"] is True
        assert "PASS" in result._repr_html_()


def test_the_program_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    (script,) = [
        lines for lines in PYTHON.findall((ROOT / "docs/library.md").read_text()) if "__main__" in lines
    ]
    (tmp_path / "digits.py").write_text(script)
    command = [sys.executable, "digits.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 2.0


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (sw.launch, "workers", 0),
        (sw.launch, "workers", -1),
        (sw.launch, "workers", "2"),
        (sw.launch, "max_workers", 0),
        (sw.verify, "steps", 0),
        (sw.drill, "count", 0),
        (sw.drill, "workers", 0),
    ],
)
def test_a_number_below_one_is_refused(tmp_path: Path, function: Any, name: str, value: object) -> None:
    with pytest.raises(sw.UserError, match=f"^{name} = {value!r}: give a whole number of at least 1"):
        function(small(tmp_path), **{name: value})


def test_an_unknown_choice_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(sw.UserError, match="dtype = 'float8': not known; use one of float64"):
        sw.verify(small(tmp_path), dtype="float8")  # type: ignore[arg-type]
    with pytest.raises(sw.UserError, match="fire is not known; use some of kill"):
        sw.drill(small(tmp_path), faults="fire")
