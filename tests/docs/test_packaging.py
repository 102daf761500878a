"""The files that a public project has agree with pyproject.toml, the Makefile and the version."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))


def _jobs() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]


def _matrix(package: str) -> set[tuple[int, ...]]:
    """The versions of `python` or `torch` that hosted CI runs, as numbers."""
    rows = _jobs()["test"]["strategy"]["matrix"]["include"]
    return {tuple(map(int, row[package].split("."))) for row in rows}


def _written() -> Iterator[Path]:
    """The files that we write: no build output, no data."""
    for folder in ("", ".github/**/", "benchmarks/", "docs/", "examples/", "shardwise/**/"):
        for suffix in ("py", "md", "toml", "yml", "yaml", "html"):
            yield from ROOT.glob(f"{folder}*.{suffix}")


def test_hosted_ci_runs_the_two_commands_of_the_readme() -> None:
    block = re.search(r"```sh\n((?:make .*\n)+)```", (ROOT / "README.md").read_text())
    assert block
    run = [step.get("run", "") for step in _jobs()["test"]["steps"]]
    assert [line for line in run if line.startswith("make ")] == block[1].splitlines()


def test_hosted_ci_begins_with_the_oldest_python_that_is_supported() -> None:
    oldest = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])
    assert oldest
    versions = _matrix("python")
    assert versions == {(3, minor) for minor in range(int(oldest[1]), max(versions)[1] + 1)}


def test_hosted_ci_runs_every_torch_that_is_supported() -> None:
    (torch,) = PROJECT["optional-dependencies"]["torch"]
    bounds = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch)
    assert bounds
    assert _matrix("torch") == {(2, minor) for minor in range(int(bounds[1]), int(bounds[2]))}


def test_hosted_ci_can_choose_torch_in_the_constraints() -> None:
    """The workflow replaces this line."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert sum(line.startswith("torch==") for line in lines) == 1


def test_pre_commit_runs_the_checks_of_make_lint() -> None:
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint
    checks = re.findall(r"\$\(BIN\)/(ruff \w+|\S+)", lint[1])
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["name"]: hook["entry"] for hook in repository["hooks"]}
    assert list(hooks) == checks
    assert all(entry.startswith(f".venv/bin/{name}") for name, entry in hooks.items())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_has_a_name_and_says_what_it_is_for(path: Path) -> None:
    heading = yaml.safe_load(path.read_text().split("---\n")[1])
    assert set(heading) == {"name", "about", "labels"}


def test_the_version_is_written_in_one_place() -> None:
    """The changelog names every release, so it has the version too: the next test compares them."""
    assert "version" in PROJECT["dynamic"]
    ours = re.compile(rf"(shardwise|version)[\W_]{{1,6}}{re.escape(__version__)}\b")
    copies = {path.relative_to(ROOT).as_posix() for path in _written() if ours.search(path.read_text())}
    assert copies == {"shardwise/version.py"}


def test_the_changelog_has_what_is_unreleased_above_the_newest_release() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_no_address_is_made_up() -> None:
    made_up = re.compile(r"(https?://\S*|shardwise)\.example\b")
    assert not [path for path in _written() if made_up.search(path.read_text())]
