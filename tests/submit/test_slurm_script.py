"""The batch script of a job: what it asks Slurm for, and what it does after each status of the training step.

The script runs here with programs in place of Slurm's that record how they are called.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.submit.scheduler import Request
from shardwise.submit.slurm import Slurm, SlurmSettings

RECORD = 'echo "$(basename "$0") $*" >> "$CALLS"\n'


def request_of(folder: Path, run: str = "runs/a", spares: int = 0) -> Request:
    words = ("train", "job.toml", "observe.sample=it's", "--workers", "8")
    return Request("job", folder, Path(run), words, 2, spares)


def options(text: str) -> dict[str, str]:
    """The options that sbatch reads: those above the first command."""
    header = text.partition("\n\necho ")[0]
    lines = [line for line in header.splitlines() if line.startswith("#SBATCH --")]
    pairs = [shlex.split(line.removeprefix("#SBATCH --"))[0].partition("=") for line in lines]
    return {name: value for name, _, value in pairs}


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{RECORD}{body}\n")
    (folder / name).chmod(0o755)


def run(folder: Path, text: str, **programs: str) -> tuple[int, list[str], str]:
    """Run a script; what it ended with, the calls of Slurm's programs, and what it printed."""
    for name, body in {"squeue": "echo 3", "module": "", **programs}.items():
        program(folder / "bin", name, body)
    (folder / "runs/a").mkdir(parents=True, exist_ok=True)
    (folder / "script").write_text(text)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1",
    }  # fmt: skip
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            ["bash", "script"],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
    status = process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # as Slurm ends what a script leaves in the background
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return status, calls, (folder / "printed").read_text()


def test_the_header_asks_for_one_task_a_node_and_for_a_signal_to_the_step(tmp_path: Path) -> None:
    _, text = Slurm().file(request_of(tmp_path), SlurmSettings())
    assert options(text) == {
        "job-name": "job", "chdir": str(tmp_path), "nodes": "2", "ntasks-per-node": "1",
        "signal": "TERM@120", "requeue": "", "open-mode": "append", "output": "runs/a/slurm.log",
    }  # fmt: skip
    assert "USR1" not in text


def test_every_key_of_the_profile_is_in_the_script(tmp_path: Path) -> None:
    settings = SlurmSettings(
        partition="gpu", account="my project", gres="gpu:h100:8", cpus=96, memory="0", time="1-00:00:00",
        save_seconds=300, options=["--exclusive", "--qos=high"], modules=["cuda/12.8", "nccl"],
        setup=["export NCCL_SOCKET_IFNAME=ib0"], container="/images/it's.sqsh", mounts="/shared:/shared",
    )  # fmt: skip
    _, text = Slurm().file(request_of(tmp_path), settings)
    asked = options(text)
    assert asked["partition"] == "gpu"
    assert asked["account"] == "my project"
    assert (asked["gres"], asked["cpus-per-task"], asked["mem"]) == ("gpu:h100:8", "96", "0")
    assert (asked["time"], asked["signal"]) == ("1-00:00:00", "TERM@300")
    assert (asked["exclusive"], asked["qos"]) == ("", "high")
    lines = text.splitlines()
    assert lines.index("module load cuda/12.8 nccl") < lines.index("export NCCL_SOCKET_IFNAME=ib0")
    (srun,) = (shlex.split(f"{line[:-1]} ") for line in lines if line.startswith("srun"))
    assert {"--cpus-per-task=96", "--container-image=/images/it's.sqsh"} < set(srun)
    assert {"--container-mounts=/shared:/shared", f"--container-workdir={tmp_path}"} < set(srun)
    assert "    shardwise train job.toml" in text


@pytest.mark.parametrize(
    ("gres", "workers"),
    [(None, None), ("gpu:8", 8), ("gpu:h100:4", 4), ("gpu", None), ("shard:3,gpu:2", 2), ("license:5", None)],
)
def test_the_gpus_of_a_node_are_its_workers(gres: str | None, workers: int | None) -> None:
    assert Slurm().workers_of_node(SlurmSettings(gres=gres)) == workers


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("status", [0, 1, 2, 130, 137])
def test_a_run_that_is_done_or_cannot_go_on_is_not_queued_again(
    tmp_path: Path, status: int, spares: int
) -> None:
    _, text = Slurm().file(request_of(tmp_path, spares=spares), SlurmSettings())
    ended, calls, _ = run(tmp_path, text, srun=f"exit {status}")
    assert ended == status
    assert calls[0].startswith("srun")
    assert not any(call.startswith(("scontrol", "sbatch")) for call in calls)


@pytest.mark.parametrize("spares", [0, 1])
def test_status_75_queues_the_job_again(tmp_path: Path, spares: int) -> None:
    _, text = Slurm().file(request_of(tmp_path, spares=spares), SlurmSettings())
    ended, calls, _ = run(tmp_path, text, srun="exit 75", scontrol="", sbatch="")
    assert ended == 75
    assert calls[-1] == "scontrol requeue 7"
    assert not any(call.startswith("sbatch") for call in calls)


def test_where_a_job_may_not_be_requeued_the_next_one_is_submitted(tmp_path: Path) -> None:
    _, text = Slurm().file(request_of(tmp_path), SlurmSettings())
    ended, calls, _ = run(tmp_path, text, srun="exit 75", scontrol="exit 1", sbatch="")
    assert (ended, calls[-1]) == (75, "sbatch --dependency=afterany:7 runs/a/slurm.sbatch")


def test_where_neither_is_allowed_the_command_to_type_is_in_the_log(tmp_path: Path) -> None:
    _, text = Slurm().file(request_of(tmp_path), SlurmSettings())
    ended, _, printed = run(tmp_path, text, srun="exit 75", scontrol="exit 1", sbatch="exit 1")
    assert (ended, printed.splitlines()[-1]) == (75, "continue by hand: sbatch runs/a/slurm.sbatch")


def test_with_spares_the_status_of_the_first_task_counts(tmp_path: Path) -> None:
    """srun answers 137 because a node was lost, and the first task ended well."""
    _, text = Slurm().file(request_of(tmp_path, spares=1), SlurmSettings(command="true"))
    task = 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 "$@"; exit 137'
    ended, calls, _ = run(tmp_path, text, srun=task)
    assert ended == 0
    assert "--no-kill" in next(call for call in calls if call.startswith("srun"))
    assert options(text)["nodes"] == "3"
    assert not (tmp_path / "runs/a/slurm.status").exists()


def test_a_status_that_an_earlier_start_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/slurm.status").write_text("0\n")
    _, text = Slurm().file(request_of(tmp_path, spares=1), SlurmSettings())
    assert run(tmp_path, text, srun="exit 137")[0] == 137


def test_with_spares_a_job_with_too_few_nodes_left_is_queued_again(tmp_path: Path) -> None:
    _, text = Slurm().file(request_of(tmp_path, spares=1), SlurmSettings())
    text = text.replace("while sleep 60", "while sleep 0.2")
    _, calls, _ = run(tmp_path, text, srun="sleep 2", squeue="echo 1", scontrol="")
    assert "squeue --noheader --jobs=7 --format=%D" in calls
    assert "scontrol requeue 7" in calls
    (tmp_path / "calls").unlink()
    for answer in ("echo 2", "echo", "exit 1"):  # enough; no answer; Slurm is away
        _, calls, _ = run(tmp_path, text, srun="sleep 1", squeue=answer, scontrol="")
        assert "scontrol requeue 7" not in calls


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("spares", [0, 1])
def test_shellcheck_finds_nothing(tmp_path: Path, spares: int) -> None:
    settings = SlurmSettings(modules=["a b"], cpus=4, container="/it's", mounts="/a:/b")
    _, text = Slurm().file(request_of(tmp_path, "runs/it's two", spares), settings)
    (tmp_path / "script").write_text(text)
    done = subprocess.run(["shellcheck", "script"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("run_folder", ["runs/50%", "runs/a\\b", "runs/a\nb"])
def test_paths_that_slurm_would_change_are_refused(tmp_path: Path, run_folder: str) -> None:
    (problem,) = Slurm().problems(request_of(tmp_path, run_folder))
    assert problem.startswith(f"run.folder = {run_folder!r}: ")


def test_a_name_with_a_line_break_is_refused(tmp_path: Path) -> None:
    request = replace(request_of(tmp_path), name="a\n#SBATCH --exclusive")
    assert "rename the job's file" in " ".join(Slurm().problems(request))
