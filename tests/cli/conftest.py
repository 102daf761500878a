"""Running the command as a user does: in its own process, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shardwise(tmp_path: Path) -> Iterator[Shardwise]:
    """Call `shardwise ARGUMENTS` with `examples/` at hand; whatever happens, no process of it may be left."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    mark = f"{tmp_path.name}-{os.getpid()}"

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardwise", *arguments],
            cwd=tmp_path,
            env={**os.environ, "SHARDWISE_TEST": mark, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    yield call
    left = [
        process for process in psutil.process_iter(["environ"]) if (process.info["environ"] or {}).get("SHARDWISE_TEST") == mark
    ]
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"
