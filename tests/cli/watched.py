"""A run seen from outside, by the file of its steps."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from warm import Command


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


def kill_a_worker_and_stop(run: Path, process: Command) -> None:
    """Kill the second worker after step 8, and ask the run to stop once it has gone on to step 12."""
    wait_for_step(run, 8)
    known = json.loads(next((run / "logs").glob("workers-*.json")).read_text())
    os.kill(known["workers"][1]["pid"], signal.SIGKILL)
    wait_for_step(run, 12)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 75, errors
