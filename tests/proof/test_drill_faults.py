"""When and what: the schedule of faults is drawn from the seed alone, spread over the run, and does what it
says to files."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardwise.errors import UserError
from shardwise.proof import drill_faults
from shardwise.proof.drill_faults import KINDS, SPACING, FullDisk, Kind, flip, schedule

FOUR: list[Kind] = ["kill", "hang", "corrupt", "term"]


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_spread_over_the_run_and_every_kind_occurs(seed: int) -> None:
    planned = schedule(FOUR, 6, seed, steps=72, every=5)
    assert {fault.kind for fault in planned} == set(FOUR)
    steps = [fault.step for fault in planned]
    assert all(later - earlier >= SPACING for earlier, later in itertools.pairwise(steps))
    assert 2 <= steps[0] < 16
    assert 56 < steps[-1] <= 70
    assert all(0 <= fault.fraction < 1 for fault in planned)


def test_the_seed_alone_decides() -> None:
    assert schedule(FOUR, 6, 7, 72, 5) == schedule(FOUR, 6, 7, 72, 5)
    assert len({schedule(FOUR, 6, seed, 72, 5) for seed in range(20)}) == 20


@pytest.mark.parametrize("kind", ["full", "error"])
@pytest.mark.parametrize("seed", range(5))
def test_after_a_full_disk_or_an_exception_in_a_save_there_is_time_to_save_again(
    seed: int, kind: Kind
) -> None:
    planned = schedule([kind, "kill"], 4, seed, steps=60, every=8)
    assert planned[-1].step <= 60 - 2 * 8 - 1


def test_a_host_is_lost_first_because_coming_back_takes_long() -> None:
    assert all(schedule(KINDS, len(KINDS), seed, 90, 5)[0].kind == "lose" for seed in range(10))


def test_more_faults_than_fit_are_refused_with_how_many_do() -> None:
    with pytest.raises(UserError, match="room for 6 such faults"):
        schedule(["kill"], 7, 0, steps=21, every=5)
    assert len(schedule(["kill"], 6, 0, steps=21, every=5)) == 6


def test_a_checkpoint_cannot_be_spoiled_before_there_are_two() -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every = 30"):
        schedule(["corrupt"], 1, 0, steps=40, every=30)


def test_one_byte_is_flipped_and_nothing_else(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    (tmp_path / "file").write_bytes(content)
    flip(tmp_path / "file", 700, 0x10)
    found = (tmp_path / "file").read_bytes()
    assert [place for place in range(1024) if found[place] != content[place]] == [700]
    assert found[700] ^ content[700] == 0x10


def test_a_worker_with_a_full_disk_cannot_write_until_the_limit_is_lifted(tmp_path: Path) -> None:
    script = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "wb", buffering=0) as file:
            written = file.write(bytes(5000)) + file.write(bytes(5000))
        print(written, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def tried() -> int:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return int(process.stdout.readline())  # type: ignore[union-attr]

        assert tried() == 10000
        disk = FullDisk(process.pid, 5000)
        assert tried() == 27  # EFBIG
        disk.lift()
        assert tried() == 10000
        process.stdin.close()


def commit(folder: Path, step: int) -> None:
    (folder / f"step-{step}").mkdir()
    (folder / f"step-{step}/checkpoint.json").write_text("{}")
    (folder / f"step-{step}/rank-0-a.data").write_bytes(bytes(100))


def test_a_checkpoint_that_is_committed_while_the_worker_is_stopped_is_the_one_that_is_damaged(
    tmp_path: Path,
) -> None:
    commit(tmp_path, 5)
    left = [15, 10]

    def save_in_flight() -> bool:
        """The saves of steps 10 and 15 have all their parts: they are committed after the worker stopped."""
        if left:
            commit(tmp_path, left.pop())
            return True
        return False

    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    damage = drill_faults.corrupt(str(tmp_path), worker.pid, random.Random(3), save_in_flight)
    assert worker.wait(10) == -signal.SIGKILL
    assert damage.checkpoint.endswith("step-15")


def test_spoiling_takes_the_newest_checkpoint_and_the_worker_with_it(tmp_path: Path) -> None:
    for step in (5, 10):
        commit(tmp_path, step)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    damage = drill_faults.corrupt(str(tmp_path), worker.pid, random.Random(3), lambda: False)
    assert worker.wait(10) == -signal.SIGKILL
    assert damage.checkpoint.endswith("step-10")
    spoilt = (tmp_path / "step-10" / damage.file).read_bytes()
    assert spoilt != (tmp_path / "step-5" / damage.file).read_bytes()


def test_a_stopped_worker_is_alive_and_does_nothing() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        drill_faults.hang(worker.pid)
        deadline = time.monotonic() + 10
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        assert worker.poll() is None
    finally:
        drill_faults.kill(worker.pid)
        worker.wait()
