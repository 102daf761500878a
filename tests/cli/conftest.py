"""Running the command in a process and a folder of its own: forked from a warm server, or as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import Command, Server

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., Command]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `examples/` at hand."""
    if not (tmp_path / "examples").exists():
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def shardwise(folder: Path, warm: Server) -> Shardwise:
    """Call `shardwise ARGUMENTS`; whatever happens, no process of it may be left."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return warm.run(*arguments, cwd=folder, environment=environment)

    return call


@pytest.fixture
def started(folder: Path, warm: Server) -> Started:
    """Start `shardwise ARGUMENTS` and go on."""

    def start(*arguments: str, **environment: str) -> Command:
        return warm.start(*arguments, cwd=folder, environment=environment)

    return start


@pytest.fixture
def shardwise_of_a_user(folder: Path) -> Shardwise:
    """Call it in a new Python, with all that it imports."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardwise", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call
