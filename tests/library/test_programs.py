"""The example programs: each is proven and trained on two layouts and survives a kill, and the notebook
runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from warm import Server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/programs"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
ZERO_3 = "layout.data=4 layout.zero=3"
TENSOR = "layout.tensor=2 layout.data=2 layout.zero=1"
REPLICAS = "layout.replica=2 layout.data=2 layout.zero=2"
WITH_TABLE = ("distillation", "recurrent", "vision_transformer")
LARGEST_ERROR = 1e-9
FEWEST_STEPS = 40
"""So that there are steps before and after the one in which a worker is killed."""


def layouts(quick: Mapping[str, str]) -> Iterator[Any]:
    """Each program with its two layouts, of which the one in `quick` is not only for the full suite."""
    for name in PROGRAMS:
        other = TENSOR if name in WITH_TABLE else REPLICAS
        for layout, words in ((ZERO_3, "zero"), (other, "tensor" if other == TENSOR else "replica")):
            marks = [] if quick.get(name) == layout else [pytest.mark.full]
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{words}")


PROVEN = {"vision_transformer": TENSOR, "dpo": ZERO_3, "recurrent": ZERO_3}
TRAINED = {"recurrent": ZERO_3}


def call(warm: Server, folder: Path, command: str, name: str, *words: str) -> str:
    """Run a command on a program, and return its standard output."""
    done = warm.run(command, f"{FOLDER / name}.py:program", *words, cwd=folder, environment={})
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def falls(values: list[float]) -> bool:
    """Whether the last tenth is on average far below the first values."""
    return mean(values[-len(values) // 10 :]) < 0.6 * mean(values[:3])


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    assert f"    python examples/programs/{name}.py\n" in text
    assert f"    shardwise verify examples/programs/{name}.py:program layout." in text


def test_the_readme_of_the_examples_names_every_program() -> None:
    page = (ROOT / "examples/README.md").read_text()
    for path in FOLDER.iterdir():
        assert f"| `{path.name}` |" in page or path.name == "__pycache__"


@pytest.mark.parametrize(("name", "layout"), list(layouts(PROVEN)))
def test_a_program_computes_on_several_devices_what_one_computes(
    warm: Server, tmp_path: Path, name: str, layout: str
) -> None:
    proof = json.loads(call(warm, tmp_path, "verify", name, *layout.split(), "--json"))
    assert proof["pass"]
    assert proof["world"] == 4
    assert proof["worst"]["relative_error"] < LARGEST_ERROR


@pytest.mark.parametrize(("name", "layout"), list(layouts(TRAINED)))
def test_a_program_learns_on_four_workers(warm: Server, tmp_path: Path, name: str, layout: str) -> None:
    call(warm, tmp_path, "run", name, *layout.split(), "--workers", "4", "run.folder=run")
    steps = records(tmp_path / "run")
    assert len(steps) >= FEWEST_STEPS
    assert falls([step["loss"] for step in steps])


@pytest.mark.full  # the quick suite drills a smaller program (tests/train/test_engine.py)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_whose_worker_is_killed_ends_with_the_same_bits(
    warm: Server, tmp_path: Path, name: str
) -> None:
    """That of the recurrent program includes its mean of losses, a value of the program's own."""
    words = (*ZERO_3.split(), "--workers", "4", "--faults", "kill", "--count", "1", "--json")
    drill = json.loads(call(warm, tmp_path, "drill", name, *words, "run.folder=run"))
    assert drill["pass"]
    assert drill["comparison"]["tolerance"] is None
    assert [fault["kind"] for fault in drill["faults"]] == ["kill"]


def test_a_notebook_trains_and_proves_a_program_of_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is in no file, so it is sent to workers with the classes and functions of other cells."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # a kernel that finds it does not show what workers print
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    losses = [step["loss"] for step in records(tmp_path / "runs/notebook")]
    assert falls(losses)
    pages = [output["data"]["text/html"] for output in shown(notebook)]
    assert "PASS" in pages[-1]
    assert len(pages) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_notebook_that_has_used_cuda_trains_on_the_gpu_and_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has used CUDA cannot fork workers that use it too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = nbformat.read(FOLDER / "notebook.ipynb", as_version=4).cells
    definitions = [cell for cell in cells if cell.cell_type == "code"][:3]
    launches = """
assert float(torch.ones(4, device="cuda").sum()) == 4
for name, workers, device in (("gpu", 1, "cuda"), ("shared", 2, "cuda"), ("cpu", 2, "cpu")):
    run = sw.launch(program, workers=workers, run={"folder": f"runs/{name}", "device": device})
    assert run.status == 0
proof = sw.verify(program, layout={"data": 2, "zero": 3}, device="cuda")
assert proof.passes, proof
assert float(torch.ones(4, device="cuda").sum()) == 4
"""
    notebook = nbformat.v4.new_notebook(cells=[*definitions, nbformat.v4.new_code_cell(launches)])
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    runs = {
        name: [step["loss"] for step in records(tmp_path / "runs" / name)]
        for name in ("gpu", "shared", "cpu")
    }
    for losses in runs.values():
        assert falls(losses)
        assert losses[:3] == pytest.approx(runs["cpu"][:3], rel=1e-3)


def shown(notebook: Any) -> Iterator[Any]:
    """Outputs of a notebook that are shown as pages."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", {}):
                yield output
