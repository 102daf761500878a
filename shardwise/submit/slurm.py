"""Slurm: one batch script, which trains inside one allocation and asks for the next one by itself.

How a run survives what Slurm does:

- *The time limit.* Slurm sends TERM to the training step some time before (`--signal` without `B:`, which
  would reach only the batch script). The run saves and ends with status 75.
- *Status 75.* The script calls `scontrol requeue`, so the job keeps its number and its log. Where the site
  forbids that, it submits itself again, to start when this job has ended.
- *`scontrol requeue` and preemption.* Slurm sends TERM to the step and the script, and starts the job again.
  The script has no handler for TERM, so it also ends at `scancel`, and does not start again what a user
  cancelled.
- *A node fails.* Slurm ends the whole job and starts it again. With spares it leaves the job alone
  (`--no-kill`): the step also runs on the spare nodes, whose workers are idle until they are needed. Only the
  first node has no spare, because it runs the script; if it fails, Slurm starts the job again.

srun answers with the largest status of all tasks, which is 137 after a node was lost, however the run ended.
With spares the first task therefore writes its own status to a file.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shardwise.plurals import counted
from shardwise.resilience.stopping import RESUME_ME
from shardwise.section import Positive, Section
from shardwise.submit.scheduler import Request, call_client
from shardwise.version import __version__

WAIT_SECONDS = 300
"""Seconds after the end of the first task, after which Slurm ends the others if there are no spares."""
WATCH_SECONDS = 60
"""Seconds between two looks at how many nodes are left, if there are spares."""
_Line = Annotated[str, Field(min_length=1, pattern=r"^[^\r\n]*$")]


class SlurmSettings(Section):
    """[slurm] of a profile."""

    partition: _Line | None = Field(default=None, description="Partition.", examples=["gpu"])
    account: _Line | None = Field(
        default=None, description="Account that pays for the job.", examples=["my-project"]
    )
    gres: _Line | None = Field(
        default=None,
        description="Devices of each node. The number after gpu: is the number of workers of a node.",
        examples=["gpu:8"],
    )
    cpus: Positive | None = Field(default=None, description="CPU cores of each node.", examples=[96])
    memory: _Line | None = Field(
        default=None, description="Memory of each node; 0 is all of it.", examples=["0"]
    )
    time: _Line | None = Field(
        default=None, description="Time limit, after which the job is queued again.", examples=["24:00:00"]
    )
    save_seconds: Positive = Field(
        default=120,
        description="Seconds before the time limit at which the run saves and stops.",
        examples=[120],
    )
    options: list[_Line] = Field(
        default=[], description="More options of sbatch.", examples=[["--exclusive", "--qos=high"]]
    )
    modules: list[_Line] = Field(
        default=[], description="Modules to load before training.", examples=[["cuda/12.8"]]
    )
    setup: list[_Line] = Field(
        default=[],
        description="Lines of shell to run before training, on the first node.",
        examples=[["export NCCL_SOCKET_IFNAME=ib0"]],
    )
    container: _Line | None = Field(
        default=None,
        description="Container image in which to train (srun --container-image, of the plugin pyxis).",
        examples=["/shared/images/train.sqsh"],
    )
    mounts: _Line | None = Field(
        default=None, description="Folders that the container sees.", examples=["/shared:/shared"]
    )
    command: _Line | None = Field(
        default=None,
        description="How a node calls shardwise, if not by the Python that wrote the script.",
        examples=["shardwise"],
    )


class Slurm:
    """Submits by `sbatch`."""

    settings = SlurmSettings

    def workers_of_node(self, settings: SlurmSettings) -> int | None:
        """Return the number of GPUs in `gres`, such as 8 for gpu:8 or gpu:h100:8; None if it names none."""
        gpus = re.search(r"\bgpu(?::[a-z]\w*)?:([1-9][0-9]*)\b", settings.gres or "")
        return int(gpus[1]) if gpus else None

    def problems(self, request: Request) -> Iterator[str]:
        """Yield what cannot be written in a batch script."""
        if not request.name.isprintable():
            yield f"{request.name!r}: not a name that can be shown; rename the job's file"
        for what, text in (("run.folder", str(request.run_folder)), ("this folder", str(request.folder))):
            if not text.isprintable() or "%" in text or "\\" in text:
                yield f"{what} = {text!r}: Slurm replaces % and \\ in paths; give another without them"

    def file(self, request: Request, settings: SlurmSettings) -> tuple[Path, str]:
        """Return the path and the text of the batch script."""
        path = request.run_folder / "slurm.sbatch"
        parts = [
            _header(path, request, settings),
            _before(request, settings),
            _train(request, settings),
            _after(path),
        ]
        return path, "\n".join(line for part in parts for line in part)

    def command(self, file: Path) -> list[str]:
        """Return the command that submits the script."""
        return ["sbatch", str(file)]

    def submit(self, file: Path) -> str:
        """Submit the script, and return the job's number."""
        answer = call_client(["sbatch", "--parsable", str(file)], "on a machine that has Slurm's commands")
        return answer.partition(";")[0]  # a cluster's name may follow

    def follow(self, job: str, request: Request) -> Mapping[str, str]:
        """Return the commands that watch a submitted job, cancel it, and read its log."""
        log = shlex.quote(str(_log(request)))
        return {"watch": f"squeue --jobs={job}", "cancel": f"scancel {job}", "log": f"tail -F {log}"}


def _log(request: Request) -> Path:
    return request.run_folder / "slurm.log"


def _header(path: Path, request: Request, settings: SlurmSettings) -> Iterator[str]:
    """Yield the options of sbatch."""
    spares = f", with {counted(request.spares, 'spare node')}" if request.spares else ""
    yield "#!/bin/bash"
    yield f"# Trains {request.name} on {counted(request.nodes, 'node')}{spares} (shardwise {__version__})."
    yield f"# Start it, or continue it, with: sbatch {shlex.quote(str(path))}"
    yield ""
    yield _option("job-name", request.name)
    yield _option("chdir", str(request.folder))
    values: dict[str, object] = {"partition": settings.partition, "account": settings.account}
    values |= {"gres": settings.gres, "cpus-per-task": settings.cpus}
    values |= {"mem": settings.memory, "time": settings.time}
    yield from (_option(name, str(value)) for name, value in values.items() if value is not None)
    yield from (f"#SBATCH {option}" for option in settings.options)
    yield "# One task on each node: shardwise starts the workers of its node by itself."
    yield _option("nodes", str(request.nodes + request.spares))
    yield _option("ntasks-per-node", "1")
    if request.spares:
        yield "# If a node fails, the job goes on with the others."
        yield "#SBATCH --no-kill"
    yield "# Before the time limit the training step (not this script: no B:) gets TERM, and saves."
    yield _option("signal", f"TERM@{settings.save_seconds}")
    yield "# The job may be started again, and then appends to the same log."
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield _option("output", str(_log(request)))
    yield ""


def _option(name: str, value: str) -> str:
    return f"#SBATCH --{name}={shlex.quote(value)}"


def _before(request: Request, settings: SlurmSettings) -> Iterator[str]:
    """Yield what runs before training."""
    yield 'echo "$(date): job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start ${SLURM_RESTART_COUNT:-0}"'
    yield "# This script runs on the first node, so its name is where the other nodes find the first one."
    yield "export MASTER_ADDR=$SLURMD_NODENAME"
    if settings.modules:
        yield f"module load {' '.join(map(shlex.quote, settings.modules))}"
    yield from settings.setup
    yield ""
    if request.spares:
        yield from _WATCH.format(nodes=request.nodes, seconds=WATCH_SECONDS).splitlines()


_WATCH = """\
# Too few nodes: the run would wait until the time limit. The job is queued again for a new set of nodes.
while sleep {seconds}; do
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D) || continue
    [ "${{nodes:-{nodes}}}" -ge {nodes} ] || scontrol requeue "$SLURM_JOB_ID"
done &

"""


def _train(request: Request, settings: SlurmSettings) -> Iterator[str]:
    """Yield the training step, after which `status` says how the run ended."""
    srun = ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    if settings.cpus:
        srun.append(f"--cpus-per-task={settings.cpus}")  # srun does not take it from sbatch
    if settings.container:
        inside = {"image": settings.container, "mounts": settings.mounts, "workdir": str(request.folder)}
        srun += [f"--container-{name}={shlex.quote(value)}" for name, value in inside.items() if value]
    python = f"{shlex.quote(sys.executable)} -m shardwise"
    program = settings.command or ("shardwise" if settings.container else python)
    step = _STEP_WITH_SPARES if request.spares else _STEP
    train = f"{program} {shlex.join(request.arguments)}"
    ended = shlex.quote(str(request.run_folder / "slurm.status"))
    yield from step.format(srun=" ".join(srun), train=train, wait=WAIT_SECONDS, ended=ended).splitlines()
    yield ""


_STEP = """\
# A task that was killed does not come back, so {wait} s after the first end Slurm ends the other tasks.
status=0
{srun} --wait={wait} \\
    {train} || status=$?
"""
_STEP_WITH_SPARES = """\
# The others go on without a lost task (--no-kill, --wait=0). srun then answers 137, however the run ended.
# The first task is on the node of this script, so its own status says how the run ended.
status=0
ended={ended}
rm -f "$ended"
# shellcheck disable=SC2016  # it is the shell of each task that replaces these variables
{srun} --no-kill --wait=0 bash -c '
    trap : TERM  # training answers this signal, and this shell waits for it
    file=$1; shift
    "$@"; code=$?
    [ "$SLURM_PROCID" != 0 ] || echo "$code" > "$file"
    exit "$code"
' task "$ended" \\
    {train} || status=$?
[ ! -s "$ended" ] || status=$(cat "$ended")
rm -f "$ended"
"""


def _after(path: Path) -> Iterator[str]:
    """Yield what follows from the status."""
    yield from _AFTER.format(resume=RESUME_ME, script=shlex.quote(str(path))).splitlines()
    yield ""


_AFTER = """\
echo "$(date): training ended with status $status"

# {resume} means: saved, start the same command again. Other statuses are for a person: 0 all steps are done,
# 1 the run cannot go on, 2 a mistake in the job, 130 Ctrl-C, above that a task was killed.
if [ "$status" = {resume} ]; then
    # Requeue this job: the same number, the same log. Where that is not allowed, submit the next one.
    scontrol requeue "$SLURM_JOB_ID" ||
        sbatch --dependency="afterany:$SLURM_JOB_ID" {script} ||
        echo "continue by hand: sbatch "{script} >&2
fi
exit "$status"
"""
