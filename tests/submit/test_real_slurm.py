"""A run under a real Slurm survives its requeue, its time limit, a killed worker and a failed node, with the
bits of a run that was never disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from submit.cluster import POSSIBLE, WHY_NOT, Cluster, slurm

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.skipif(not POSSIBLE, reason=WHY_NOT), pytest.mark.timeout(900)]
STEPS = 240
JOB = f"""\
[model]
preset = "bytes-400k"
[data]
source = "examples/shakespeare.txt"
sequence_length = 64
[train]
steps = {STEPS}
global_batch = 8
evaluate_every = 0
evaluate_sequences = 8
[layout]
data = 2
[checkpoint]
every = 20
[observe]
sample = ""
callbacks = ["pause.py:Pause"]
"""
PAUSE = """\
import time


class Pause:
    def on_step(self, record):
        time.sleep(0.15)
"""
PROFILE = """\
[slurm]
memory = "400"
time = "{time}"
save_seconds = {save_seconds}
# The virtual nodes have no names in the network, and share two cores.
setup = ["export MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1"]
"""


@dataclass
class Site:
    """A folder that all nodes of a cluster share, and what a run there came to."""

    cluster: Cluster
    folder: Path
    losses: list[float]
    """Losses of the undisturbed run."""

    def submit(self, run: str, *options: str, time: str = "30:00", save_seconds: int = 60) -> str:
        """Submit the job on two nodes, and return its number."""
        profile = self.folder / f"{run}.site.toml"
        profile.write_text(PROFILE.format(time=time, save_seconds=save_seconds))
        words = ["submit", "job.toml", f"run.folder={run}", "--nodes", "2", "--profile", str(profile)]
        done = shardwise(self.folder, *words, *options, "--yes", **self.cluster.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def metrics(self, run: str) -> list[dict[str, Any]]:
        return lines(self.folder / run / "metrics.jsonl")

    def events(self, run: str, name: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.folder / run / "events.jsonl") if event["event"] == name]

    def wait_for_step(self, run: str, step: int) -> None:
        self.wait(run, lambda: len(self.metrics(run)) >= step)

    def wait(self, run: str, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Wait for a condition. A job that was queued again need not wait for Slurm's pause."""
        deadline = time.monotonic() + seconds
        while not condition():
            log = self.folder / run / "slurm.log"
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.2)

    def finish(self, number: str, run: str) -> None:
        """Wait for the end of the job, and compare its losses with those of the undisturbed run."""
        self.wait(run, lambda: self._has_ended(number), 500)
        told = (self.folder / run / "slurm.log").read_text()
        assert self.cluster.job(number)["JobState"] == "COMPLETED", told
        assert [line["step"] for line in self.metrics(run)] == list(range(1, STEPS + 1))
        assert [line["loss"] for line in self.metrics(run)] == self.losses

    def _has_ended(self, number: str) -> bool:
        job = self.cluster.job(number)
        if job["JobState"] == "PENDING":
            time.sleep(5)  # a job that starts at once after a requeue fails: "Job credential revoked"
            self.cluster.call("scontrol", "update", f"jobid={number}", "StartTime=now", check=False)
        return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def show(self, title: str, run: str, began: float, fault: float | None = None) -> None:
        """Print the numbers of the table in docs/slurm.md: `fault` is when the run was disturbed."""
        resumed = [event["step"] for event in self.events(run, "resume")]
        took = f"{title}: {time.time() - began:.0f} s in all, resumed from {resumed}"
        if fault is not None:
            after = next(line["time"] for line in self.metrics(run) if line["step"] == resumed[-1] + 1)
            took += f", next step {after - fault:.1f} s later"
        lost = sum(event["lost_steps"] for event in self.events(run, "recovery"))
        print(f"\n{took}, {lost} steps lost inside of the job")


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def shardwise(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "job.toml").write_text(JOB)
    (folder / "pause.py").write_text(PAUSE)
    done = shardwise(folder, "train", "job.toml", "run.folder=undisturbed", "observe.callbacks=[]")
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in lines(folder / "undisturbed" / "metrics.jsonl")]
    with slurm(folder / "cluster", 3) as cluster:
        yield Site(cluster, folder, losses)


@pytest.fixture(autouse=True)
def healthy(site: Site) -> Iterator[None]:
    """Every test begins with three idle nodes, and leaves no job."""
    yield
    site.cluster.call("scancel", "--user=root", check=False)
    site.cluster.call("scontrol", "update", "nodename=n[1-3]", "state=RESUME", check=False)
    deadline = time.monotonic() + 60
    while site.cluster.call("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.5)


def test_a_submitted_job_trains_on_two_nodes_to_its_end(site: Site) -> None:
    began = time.time()
    number = site.submit("plain")
    site.finish(number, "plain")
    assert "on n[1-2], start 0" in (site.folder / "plain" / "slurm.log").read_text()
    site.show("two nodes", "plain", began)


def test_a_requeued_job_saves_and_continues(site: Site) -> None:
    began = time.time()
    number = site.submit("requeued")
    site.wait_for_step("requeued", 50)
    asked, fault = len(site.metrics("requeued")), time.time()
    site.cluster.call("scontrol", "requeue", number)
    site.finish(number, "requeued")
    (stopped,) = site.events("requeued", "stop")
    (resumed,) = site.events("requeued", "resume")
    assert resumed["step"] == stopped["step"] >= asked
    assert site.cluster.job(number)["Restarts"] == "1"
    site.show(f"requeued after step {asked}", "requeued", began, fault)


@pytest.mark.parametrize("spares", [0, 1])
def test_a_job_saves_before_its_time_limit_and_queues_itself_again(site: Site, spares: int) -> None:
    began, run = time.time(), f"limited-{spares}"
    number = site.submit(run, "--spares", str(spares), time="2", save_seconds=85)
    site.finish(number, run)
    stops, resumes = site.events(run, "stop"), site.events(run, "resume")
    assert [event["step"] for event in stops] == [event["step"] for event in resumes] != []
    assert int(site.cluster.job(number)["Restarts"]) >= len(stops)  # a busy machine may stop before a step
    fault = datetime.fromisoformat(stops[-1]["time"]).timestamp()
    site.show(f"time limit, {spares} spares", run, began, fault)


def test_a_killed_worker_is_replaced_inside_of_the_step(site: Site) -> None:
    began = time.time()
    number = site.submit("killed")
    site.wait_for_step("killed", 50)
    workers = [
        worker["pid"]
        for file in (site.folder / "killed" / "logs").glob("workers-*.json")
        for worker in json.loads(file.read_text())["workers"]
        if worker["rank"] == 1
    ]
    fault = time.time()
    os.kill(workers[0], signal.SIGKILL)
    site.finish(number, "killed")
    assert len(site.events("killed", "recovery")) == 1
    assert site.cluster.job(number)["Restarts"] == "0"
    site.show("worker killed", "killed", began, fault)


@pytest.mark.parametrize("spares", [0, 1])
def test_a_failed_node_is_replaced_by_a_spare_or_by_a_new_start(site: Site, spares: int) -> None:
    began, run = time.time(), f"down-{spares}"
    number = site.submit(run, "--spares", str(spares))
    site.wait_for_step(run, 50)
    fault, reached = time.time(), len(site.metrics(run))
    kill_processes_of("n2", number)
    site.cluster.call("scontrol", "update", "nodename=n2", "state=DOWN", "reason=test")
    site.finish(number, run)
    assert site.cluster.job(number)["Restarts"] == str(1 - spares)
    site.show(f"n2 lost after step {reached}, {spares} spares", run, began, fault)


def kill_processes_of(node: str, number: str) -> None:
    """Kill all that a job runs on a node, as its loss of power does."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if (environment.get("SLURMD_NODENAME"), environment.get("SLURM_JOB_ID")) == (node, number):
                process.kill()


def test_a_job_that_its_user_cancels_stays_cancelled(site: Site) -> None:
    number = site.submit("cancelled")
    site.wait_for_step("cancelled", 20)
    site.cluster.call("scancel", number)
    site.wait("cancelled", lambda: site.cluster.job(number)["JobState"] == "CANCELLED")
    site.wait("cancelled", lambda: bool(site.events("cancelled", "stop")))
    time.sleep(3)
    assert site.cluster.call("squeue", "--noheader").strip() == ""


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('partition = "nosuch"', "invalid partition specified: nosuch"),
        ('gres = "gpu:8"', "Invalid generic resource (gres) specification"),
        ('time = "soon"', "Invalid --time specification"),
    ],
)
def test_what_the_cluster_refuses_is_one_line_and_leaves_nothing(site: Site, setting: str, says: str) -> None:
    (site.folder / "wrong.toml").write_text(f"[slurm]\n{setting}\n")
    words = ["submit", "job.toml", "layout=", "run.folder=refused", "--profile", "wrong.toml", "--yes"]
    done = shardwise(site.folder, *words, **site.cluster.environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: sbatch refused the job: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (site.folder / "refused").exists()


@pytest.mark.parametrize("spares", ["0", "1"])
def test_sbatch_accepts_every_script(site: Site, spares: str) -> None:
    words = ["submit", "job.toml", "run.folder=it's two", "--nodes", "2", "--spares", spares]
    done = shardwise(site.folder, *words)
    assert done.returncode == 0, done.stderr
    answer = site.cluster.call("sbatch", "--test-only", str(site.folder / "it's two" / "slurm.sbatch"))
    assert f"using {2 + int(spares)} processors on nodes" in answer
