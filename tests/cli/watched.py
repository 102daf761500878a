"""A run seen from outside, by the file of its steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def records(run: Path) -> list[dict[str, Any]]:
    """Of the steps so far; the last line may not be whole yet."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while len(records(run)) < step:
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.02)
