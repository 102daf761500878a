"""The fire drill: train a job undisturbed, train it again while faults are injected, and compare the two
runs.

A system that survives faults in its own tests may still fail with a user's job: lose a step, read a batch
twice, or resume from half a checkpoint. So the drill runs that job. Both runs are real `shardwise train`
commands in their own folders, and faults come from outside (proof/drill_faults.py). Afterwards the loss of
every step, the data of every step and the final weights must equal those of the undisturbed run
(proof/compare_runs.py).

The undisturbed run is also measured. The duration of a step places faults inside steps and makes it possible
to notice a hang soon; the duration of a start tells when to give up. Each fault waits until a step was
completed after the previous fault.

A drill costs two runs of the job and the recoveries. `goodput` is the time that the steps take undisturbed
over the time that they take with faults, each from the beginning of the first step to the end of the last.
"""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.config import Config
from shardwise.drivers.registry import driver_of
from shardwise.errors import RunFailed, UserError
from shardwise.files import Json
from shardwise.locks import lock_run_folder
from shardwise.mesh import local_gpus
from shardwise.observe import newest, read_metrics
from shardwise.plans import fit
from shardwise.proof.compare_runs import TOLERANCE, RunComparison, compare_runs
from shardwise.proof.disturbed_run import (
    POLL_SECONDS,
    Baseline,
    DisturbedRun,
    DrillProgress,
    SurvivedFault,
    job_file,
)
from shardwise.proof.drill_faults import ERROR_SIGNALS, Kind, PlannedFault, schedule
from shardwise.proof.train_commands import TrainCommands

SHORTEST_HANG = 2.0
HANG_STEPS, HANG_SLOWEST = 20.0, 3.0
"""A worker hangs if it takes this many times the median step, and this many times the slowest step, unless
the job sets `recovery.hang_seconds`."""
ROOM_SECONDS = 0.5
"""Seconds of training that must be left after the last fault."""


@dataclass(frozen=True)
class DrillResult:
    """The result of a drill."""

    planned: tuple[PlannedFault, ...]
    faults: tuple[SurvivedFault, ...]
    failure: str | None
    """Why the drilled run did not reach its end; None means that it did."""
    unexpected: tuple[str, ...]
    """All faults that the run recorded, if it recorded more than the drill injected."""
    comparison: RunComparison | None
    layout_changed: bool
    changed: Json
    """Settings that the drill changed in the job."""
    workers: int
    baseline: Baseline
    drilled_seconds: float
    seconds: float

    @property
    def passes(self) -> bool:
        """Whether every fault was survived, and nothing differs."""
        return self.failure is None and self.comparison is not None and self.comparison.equal

    @property
    def goodput(self) -> float:
        """Time of the undisturbed steps over the time of the same steps with faults."""
        return self.baseline.training / self.drilled_seconds

    def to_json(self) -> Json:
        """Return the result as the command prints it."""
        same = self.comparison
        return {
            "pass": self.passes,
            "faults": [fault.to_json() for fault in self.faults],
            "loss_equal": same is not None and same.loss_equal,
            "weights_equal": same is not None and same.weights_equal,
            "data_repeated": same.data_repeated if same else None,
            "data_skipped": same.data_skipped if same else None,
            "goodput": self.goodput,
            "layout_changed": self.layout_changed,
            "seconds": self.seconds,
            "failure": self.failure,
            "unexpected": list(self.unexpected),
            "workers": self.workers,
            "planned": [asdict(fault) for fault in self.planned],
            "settings": self.changed,
            "undisturbed": asdict(self.baseline),
            "drilled_seconds": self.drilled_seconds,
            "comparison": asdict(same) if same else None,
        }


def drill(
    config: Config, workers: int, kinds: Sequence[Kind], count: int, seed: int, progress: DrillProgress
) -> DrillResult:
    """Run the job twice, once with faults, and compare the two runs. No process is left running, however the
    drill ends."""
    began = time.monotonic()
    config, changed = _prepared(config, kinds)
    _check(config, workers, kinds)
    # This schedule is not used. It is drawn so that impossible settings are refused before anything runs.
    schedule(kinds, count, seed, config.train.steps, config.checkpoint.every)
    for key, value in changed.items():
        progress.say(f"the drill sets {key} = {value}")
    with _holding(Path(config.run.folder)) as base:
        baseline = _undisturbed(base, config, workers, progress)
        config, more = _with_limits(config, baseline)
        for key, value in more.items():
            progress.say(f"the drill sets {key} = {value:.3g}, from the undisturbed run")
        room = max(2, math.ceil(ROOM_SECONDS / baseline.step))
        planned = schedule(kinds, count, seed, config.train.steps, config.checkpoint.every, room)
        _check_time_to_return(planned, config, baseline)
        run = DisturbedRun(base / "drilled", config, workers, planned, baseline, progress)
        failure, seconds = run.run()
        progress.at("comparing", config.train.steps, len(run.survived))
        changes = any(fault.kind == "lose" for fault in planned)
        tolerance = TOLERANCE[config.train.precision] if changes or driver_of(config).varies_rows else None
        comparison = None
        if not failure:
            runs = base / "undisturbed", base / "drilled"
            comparison = compare_runs(*runs, config.train.steps, tolerance)
        return DrillResult(
            planned=planned,
            faults=tuple(run.survived),
            failure=failure,
            unexpected=tuple(run.unexpected()),
            comparison=comparison,
            layout_changed=changes,
            changed={**changed, **more},
            workers=workers,
            baseline=baseline,
            drilled_seconds=seconds,
            seconds=time.monotonic() - began,
        )


def _prepared(config: Config, kinds: Sequence[Kind]) -> tuple[Config, Json]:
    """Return the job as the drill runs it, and the settings that it changes, to be shown.

    The loss of a host changes the layout, and with it the order of sums; so does a driver that gives a device
    other rows. In float32, training makes the rounding errors grow until they look like a fault (1.4e-3 of a
    loss was seen). In float64 the same growth ends hundreds of times below the tolerance.
    """
    checkpoint = _checkpoint_settings(config)
    observe = {"sample": None, "wandb": None, "tensorboard": False, "trace": 0}
    settings: Json = {
        f"checkpoint.{key}": value if value is not None else "checkpoints in its run folders"
        for key, value in checkpoint.items()
    }
    train: Json = {}
    if local_gpus() and not config.train.deterministic:  # the two runs must be equal to the bit
        train["deterministic"] = settings["train.deterministic"] = True
    if ("lose" in kinds or driver_of(config).varies_rows) and config.train.precision == "float32":
        train |= {"precision": "float64", "state_dtype": "auto"}
        settings["train.precision"] = "float64, to tell roundings from faults"
    update = {
        "train": config.train.model_copy(update=train),
        "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        "observe": config.observe.model_copy(update=observe),
    }
    return config.model_copy(update=update), settings


def _checkpoint_settings(config: Config) -> Json:
    """Return the settings with which a run saves often enough, in its own folder, and resumes by itself."""
    checkpoint: Json = {}
    if not config.checkpoint.every:
        checkpoint["every"] = max(1, config.train.steps // 12)
    if config.checkpoint.folder is not None:
        checkpoint["folder"] = None
    if config.checkpoint.resume != "auto":
        checkpoint["resume"] = "auto"
    return checkpoint


def _check(config: Config, workers: int, kinds: Sequence[Kind]) -> None:
    if workers < 2:
        raise UserError(
            "a drill needs 2 workers or more, so that some survive a fault; "
            "give --workers 4, or layout.data=4"
        )
    if "corrupt" in kinds and config.checkpoint.keep < 2:
        raise UserError(
            "checkpoint.keep = 1: with `corrupt` there must be an older checkpoint to fall back to; set 2 or "
            "more"
        )
    if "lose" in kinds and fit(config, workers - 1, workers - 1) is None:
        raise UserError(
            f"lose: no layout of this job works on {workers - 1} workers; "
            f"a train.global_batch that is a multiple of {workers} and of {workers - 1} usually allows one"
        )
    if "error" in kinds and not ERROR_SIGNALS:
        raise UserError("error: needs Linux, whose real-time signals tell a worker to raise an exception")
    if "full" in kinds and not hasattr(resource, "prlimit"):
        raise UserError("full: needs Linux, where one process can limit what another may write")


def _with_limits(config: Config, baseline: Baseline) -> tuple[Config, dict[str, float]]:
    """Return the job with limits by which a hang is noticed soon, and the limits that were set.

    A limit that the job sets itself is left as it is.
    """
    hung = max(SHORTEST_HANG, HANG_STEPS * baseline.step, HANG_SLOWEST * baseline.slowest)
    wanted = {"hang_seconds": hung, "start_seconds": max(60.0, 10 * baseline.start)}
    more = {key: value for key, value in wanted.items() if key not in config.recovery.model_fields_set}
    settings = {f"recovery.{key}": value for key, value in more.items()}
    return config.model_copy(update={"recovery": config.recovery.model_copy(update=more)}), settings


def _check_time_to_return(planned: Sequence[PlannedFault], config: Config, baseline: Baseline) -> None:
    """Refuse a run that would end before a lost host is back.

    A host takes as long to come back as a start takes, and the other hosts continue meanwhile.
    """
    lost = [fault for fault in planned if fault.kind == "lose"]
    if not lost:
        return
    away = math.ceil(1.5 * baseline.start / baseline.step)
    after = sum(fault.kind != "lose" for fault in planned)
    needed = lost[0].step + len(lost) * away + 3 * after + 5
    if needed > config.train.steps:
        raise UserError(
            f"train.steps = {config.train.steps}: a lost host takes about {away} steps to come back here; "
            f"set {needed} or more"
        )


@contextmanager
def _holding(folder: Path) -> Iterator[Path]:
    """Lock the folder of the drill, and remove what an earlier drill left in it."""
    with lock_run_folder(folder):
        for name in ("undisturbed", "drilled"):
            _clear(folder / name)
        yield folder


def _clear(folder: Path) -> None:
    """Remove a run of an earlier drill, and nothing else."""
    folder.with_suffix(".log").unlink(missing_ok=True)
    if folder.exists() and not (folder / "logs").is_dir():
        raise UserError(f"{folder} exists and is no run folder; move it, or give another run.folder")
    if folder.exists():
        shutil.rmtree(folder)


def _undisturbed(base: Path, config: Config, workers: int, progress: DrillProgress) -> Baseline:
    folder, began = base / "undisturbed", time.time()
    with TrainCommands(job_file(folder, config), folder) as commands:
        commands.start([workers])
        while commands.running():
            progress.at("undisturbed", newest(folder).get("step", 0), 0)
            time.sleep(5 * POLL_SECONDS)
        if any(status := commands.statuses()):
            kind = UserError if UserError.status in status else RunFailed
            raise kind(f"the undisturbed run failed:\n{commands.log_tail()}")
    records = list(read_metrics(folder, needs=("time", "seconds")))
    seconds = sorted(record["seconds"] for record in records[1:] or records)
    return Baseline(
        training=records[-1]["time"] - records[0]["time"] + records[0]["seconds"],
        start=records[0]["time"] - began,
        step=seconds[len(seconds) // 2],
        slowest=seconds[-1],
    )
