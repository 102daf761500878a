"""Workers answer in order, and end together."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import RunFailed, UserError
from shardwise.proof.proof_workers import Workers


def test_workers_answer_in_rank_order_with_one_thread_each() -> None:
    with Workers(3) as workers:
        assert workers.run("worker_tasks:introduce", "a") == [("a", rank, 3, 1, False) for rank in range(3)]
        assert workers.run("worker_tasks:introduce", "b", on=1) == [("b", 0, 1, 1, False)]


def test_no_answer_ends_with_where_the_silent_rank_stands() -> None:
    with (
        pytest.raises(RunFailed, match=r"(?s)no answer from ranks \[1\].*wait_in_vain"),
        Workers(2, seconds=5) as workers,
    ):
        workers.run("worker_tasks:wait_in_vain")
    assert not workers.folder.exists()


def test_a_mistake_of_the_user_is_raised_here_in_its_own_words() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(UserError, match=r"^write something else$"), Workers(2) as workers:
        workers.run("worker_tasks:mistake")
    assert set(multiprocessing.active_children()) == before


def test_a_script_without_a_guard_can_use_them(tmp_path: Path) -> None:
    """Multiprocessing would run the script again in each of them, and so start them without end."""
    script = tmp_path / "script.py"
    script.write_text(
        "from shardwise.proof.proof_workers import Workers\n"
        "with Workers(2) as workers:\n"
        "    print([answer[1] for answer in workers.run('worker_tasks:introduce', 'a')])\n"
    )
    path = f"{Path(__file__).parent}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[0, 1]\n", done.stderr
