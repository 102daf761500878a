"""What workers log stays small, and stops nothing."""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path

import pytest

from shardwise.train import launch
from shardwise.train.launch import log_to


@pytest.fixture
def log() -> logging.Logger:
    log = logging.getLogger("shardwise")
    before = log.handlers[:], log.level, log.propagate, logging.raiseExceptions
    yield log
    for handler in [handler for handler in log.handlers if handler not in before[0]]:
        handler.close()
    log.handlers, log.level, log.propagate, logging.raiseExceptions = before


def test_a_log_is_two_files_at_most_and_all_that_write_to_it_go_on(
    tmp_path: Path, log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOG_BYTES", 5000)
    path = tmp_path / "rank-0.log"
    handler = log_to(path)
    for step in range(1000):
        log.info("step %d", step)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.log", "rank-0.log.1"]
    assert all(file.stat().st_size < 5200 for file in tmp_path.iterdir())
    faulthandler.dump_traceback(file=handler.file)
    log.info("the last")
    kept = (tmp_path / "rank-0.log.1").read_text() + path.read_text()
    assert "step 999" in kept
    assert kept.index("step 999") < kept.index("test_a_log_is_two_files") < kept.index("the last")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("there", ["a file as the folder", "a pipe as the log"])
def test_a_log_that_cannot_be_opened_is_said_and_done_without(
    tmp_path: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    if there == "a file as the folder":
        (tmp_path / "logs").write_text("a file")
    else:
        (tmp_path / "logs").mkdir()
        os.mkfifo(tmp_path / "logs" / "rank-0.log")
    log_to(tmp_path / "logs" / "rank-0.log")
    log.info("lost")
    assert "no log is kept" in capsys.readouterr().err
