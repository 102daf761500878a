"""The documentation is true: every command in it runs, every example trains, the reference matches the
definitions."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import Server

from shardwise.config import read
from shardwise.config.reference import markdown

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAST = [
    "train.steps=2",
    "train.global_batch=8",
    "data.sequence_length=32",
    "observe.sample_tokens=2",
    "train.evaluate_sequences=4",
]
SMALL = "model.preset=bytes-400k"


def commands() -> dict[str, str]:
    """The lines of every fenced `sh` block, once each, in the order a reader meets them; and the folder each
    is typed in, which a `cd` above it in its block says."""
    blocks = [
        block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    typed: dict[str, str] = {}
    for block in blocks:
        folder = "."
        for line in block.splitlines():
            if line.startswith("cd "):
                folder = line.removeprefix("cd ")
            elif line and not line.startswith("#"):
                typed.setdefault(line, folder)
    return typed


NOT_CALLED = ("make ", "pip ", "source ")
"""`make test` is what runs this; what installs is in tests/docs/test_wheel.py."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


LONG = (
    "examples/own_model.toml",
    "examples/programs",
    "examples/verify.toml",
    "layout=auto+lossy",
    "--html",
    "--scale",
    "torchrun",
    "runs/sharded",
    "runs/hybrid",
    "runs/guarded",
    "runs/eight",
    "doctor --devices",
    "--device cuda",
    *("probe --quick", "cluster.file=cluster.toml", "runs/held-to-account"),  # which need each other
)
"""In commands that take seconds, of what has tests of its own."""


GPUS, CPUS = "--device cuda", "--device cpu"
"""A command for GPUs runs on as many CPU workers here: commands of the tests see no GPU."""


def _marks(line: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full] if any(words in line for words in LONG) else []


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=_marks(line)) for line in commands() if not line.startswith(NOT_CALLED)]
)
def test_every_command_in_the_documentation_runs(workplace: Path, warm: Server, line: str) -> None:
    """In order, as a reader would; training is cut to two steps of a small model. The job of `make
    quickstart` is among the examples below."""
    program, *words = shlex.split(line.replace(GPUS, CPUS))
    folder = workplace / commands()[line]
    if "train" in words:
        words += [*FAST, SMALL]
    if program == "shardwise":
        done = warm.run(*words, cwd=folder, environment={})
    else:
        started = [sys.executable, "-m", "torch.distributed.run"] if program == "torchrun" else [program]
        done = subprocess.run(
            [*started, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr


def test_every_command_for_the_first_hour_on_eight_gpus_is_among_them() -> None:
    """None stands in a block that no test runs. Those of a user's own job and of the driver are in the
    text."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "eight-gpus.md").read_text(), re.DOTALL)
    elsewhere = [line for kind, block in blocks if kind != "sh" for line in block.splitlines()]
    assert [line for line in elsewhere if line.lstrip("$ ").startswith("shardwise")] == []
    page = [line for kind, block in blocks if kind == "sh" for line in block.splitlines()]
    assert set(page) <= commands().keys()
    steps = ("doctor --devices", "plan ", "verify ", "drill ", "train ")
    assert all(any(line.startswith(f"shardwise {step}") for line in page) for step in steps)


def _shown() -> list[tuple[str, str]]:
    """Commands whose output a page shows, and that output: those that start no work."""
    blocks = [
        block for page in PAGES for block in re.findall(r"```text\n\$ (.*?)```", page.read_text(), re.DOTALL)
    ]
    parted = (block.partition("\n") for block in blocks)
    return [(command, output) for command, _, output in parted if output.startswith("error:")]


@pytest.mark.parametrize(("command", "output"), _shown(), ids=lambda text: text.split("\n")[0])
def test_a_mistake_is_answered_as_the_documentation_shows(
    workplace: Path, warm: Server, command: str, output: str
) -> None:
    done = warm.run(*command.split()[1:], cwd=workplace, environment={})
    assert (done.returncode, done.stderr) == (2, output)


def test_the_documentation_names_the_two_commands_and_they_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in ("make quickstart", "make test"):
        assert command in (ROOT / "README.md").read_text()
        assert command.split()[1] in targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def _examples() -> Iterator[Any]:
    for path in sorted((ROOT / "examples").glob("*.toml")):
        planned_above = f"shardwise plan examples/{path.name}" in commands()
        yield pytest.param(path, id=path.name, marks=[pytest.mark.full] if planned_above else [])


@pytest.mark.parametrize("example", [*_examples()])
def test_every_example_trains_or_is_planned(workplace: Path, warm: Server, example: Path) -> None:
    if read(example).cluster.preset:  # for a cluster that is not here
        assert warm.run("plan", str(example), "--json", cwd=workplace, environment={}).returncode == 0
        return
    command = ["train", str(example), *FAST, f"run.folder={example.stem}-run"]
    done = warm.run(*command, cwd=workplace, environment={})
    assert done.returncode == 0, done.stderr
    assert "a sample" in done.stderr


def test_the_reference_matches_the_definitions() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), "run `make reference`"


def test_the_reference_shows_defaults_as_a_job_file_has_them() -> None:
    defaults = re.findall(r"^\| `\w+` \| [^|]+ \| `([^|]+)` \|", markdown(), re.MULTILINE)
    assert '"runs/default"' in defaults
    for default in {*defaults} - {"unset", "required"}:
        tomllib.loads(f"key = {default}")


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [
        *PAGES,
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "examples" / "README.md",
        ROOT / "benchmarks" / "RESULTS.md",
    ]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_models_do_not_know_torch_distributed() -> None:
    """import-linter cannot forbid part of an outside package, so this does."""
    for path in (ROOT / "shardwise" / "models").glob("*.py"):
        assert not re.search(r"(from|import) torch\.distributed", path.read_text()), path


def test_only_one_module_reads_the_environment() -> None:
    for path in (ROOT / "shardwise").rglob("*.py"):
        text = path.read_text()
        if path.name != "environment.py":
            assert not re.search(r"os\.(environ\b(?!\.update)|getenv)", text), path


def test_config_and_plan_work_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; import shardwise.config, shardwise.plans; print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "fine\n", done.stderr
