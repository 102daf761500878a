"""The fire drill: a job trained undisturbed, then again while its workers are killed, frozen and betrayed, and the two compared.

A run that survives faults in its tests may still lose a step, read a batch twice, or resume from half a checkpoint in a user's
own job. So the drill is done with that job: both runs are real `shardwise train` commands in their own folders, and faults come
from outside (verify/faults.py). Afterwards every step's loss, the data of every step and the final weights must be those of the
undisturbed run (verify/sameness.py).

What is taken from the undisturbed run: how long a step takes, to place faults inside steps and to tell a hang soon; how long a
start takes, to know when to give up. Each fault waits until a step is done after the one before.

It costs two runs of the job and the recoveries. `goodput` is the time that the steps take undisturbed over the time that they
take with faults, each from the beginning of the first to the end of the last.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint import checkpoints
from shardwise.config import Config, to_toml
from shardwise.errors import RunFailed, UserError
from shardwise.locks import take_lock
from shardwise.observe import read_lines
from shardwise.plan import fit
from shardwise.resilience.host import RESUME_ME
from shardwise.verify.commands import Commands
from shardwise.verify.faults import FullDisk, Kind, Planned, corrupt, hang, kill, limits, schedule
from shardwise.verify.sameness import TOLERANCE, Sameness, compare_runs

POLL_SECONDS = 0.02
GRACE_SECONDS = 30.0
"""From SIGTERM to the end: what Slurm and Kubernetes give unless told otherwise."""
PATIENCE_SECONDS = 120.0
"""How long to wait for a recovery, at least."""
SHORTEST_HANG = 2.0
HANG_STEPS, HANG_SLOWEST = 20.0, 3.0
"""A hang is this many times the usual step, and this many times the slowest, unless the job says it."""
ROOM_SECONDS = 0.5
"""What must be left of the run after the last fault."""
BEGIN = ("start", "resume")


class Audience(Protocol):
    """Who is told how it goes."""

    def at(self, phase: str, step: int, faults: int) -> None:
        """This far, with so many faults survived."""

    def say(self, text: str) -> None:
        """Something happened."""


@dataclass(frozen=True)
class Survived:
    """A fault, and what came of it."""

    kind: Kind
    step: int
    rank: int | None
    seconds_to_recover: float
    steps_lost: int
    happened: str
    more: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        facts = asdict(self)
        more = facts.pop("more")
        return {**facts, **more}


@dataclass(frozen=True)
class Usual:
    """What the undisturbed run was like, in seconds."""

    training: float
    """From the beginning of the first step to the end of the last."""
    start: float
    """From the command to the end of the first step."""
    step: float
    slowest: float


@dataclass(frozen=True)
class Result:
    """What a drill found."""

    planned: tuple[Planned, ...]
    faults: tuple[Survived, ...]
    failure: str | None
    """Why the drilled run did not reach its end; None: it did."""
    unexpected: tuple[str, ...]
    """All faults of the run, should it have had more than the drill did."""
    sameness: Sameness | None
    layout_changed: bool
    changed: dict[str, Any]
    """Settings that the drill gave the job."""
    workers: int
    usual: Usual
    drilled_seconds: float
    seconds: float

    @property
    def passes(self) -> bool:
        """Every fault was survived, and nothing differs."""
        return self.failure is None and self.sameness is not None and self.sameness.equal

    @property
    def goodput(self) -> float:
        """Time of the undisturbed steps over that of the drilled ones."""
        return self.usual.training / self.drilled_seconds

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        same = self.sameness
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
            "undisturbed": asdict(self.usual),
            "drilled_seconds": self.drilled_seconds,
            "comparison": asdict(same) if same else None,
        }


class NotSurvived(Exception):
    """The drilled run did not go on."""


def drill(config: Config, workers: int, kinds: Sequence[Kind], count: int, seed: int, audience: Audience) -> Result:
    """Run the job twice, once with faults, and compare. Nothing is left running, however it ends."""
    began = time.monotonic()
    config, changed = _prepared(config)
    _check(config, workers, kinds)
    schedule(kinds, count, seed, config.train.steps, config.checkpoint.every)  # a mistake is answered before anything runs
    for key, value in changed.items():
        audience.say(f"the drill sets {key} = {value}")
    with _holding(Path(config.run.folder)) as base:
        usual = _undisturbed(base, config, workers, audience)
        config, more = _with_limits(config, usual)
        for key, value in more.items():
            audience.say(f"the drill sets {key} = {value:.3g}, from the undisturbed run")
        room = max(2, math.ceil(ROOM_SECONDS / usual.step))
        planned = schedule(kinds, count, seed, config.train.steps, config.checkpoint.every, room)
        _check_time_to_return(planned, config, usual)
        rehearsal = _Drilled(base / "drilled", config, workers, planned, usual, audience)
        failure, seconds = rehearsal.run()
        audience.at("comparing", config.train.steps, len(rehearsal.survived))
        changes = any(fault.kind == "lose" for fault in planned)
        tolerance = TOLERANCE[config.train.precision] if changes else None
        same = None if failure else compare_runs(base / "undisturbed", base / "drilled", config.train.steps, tolerance)
        return Result(
            planned=planned,
            faults=tuple(rehearsal.survived),
            failure=failure,
            unexpected=tuple(rehearsal.unexpected()),
            sameness=same,
            layout_changed=changes,
            changed={**changed, **more},
            workers=workers,
            usual=usual,
            drilled_seconds=seconds,
            seconds=time.monotonic() - began,
        )


def _prepared(config: Config) -> tuple[Config, dict[str, Any]]:
    """The job as the drill runs it, and what of that is worth saying."""
    checkpoint: dict[str, Any] = {}
    if not config.checkpoint.every:
        checkpoint["every"] = max(1, config.train.steps // 12)
    if config.checkpoint.folder is not None:
        checkpoint["folder"] = None
    if config.checkpoint.resume != "auto":
        checkpoint["resume"] = "auto"
    observe = {"sample": None, "wandb": None, "tensorboard": False, "trace": 0}
    told = {
        f"checkpoint.{key}": value if value is not None else "checkpoints in its run folders" for key, value in checkpoint.items()
    }
    update = {
        "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        "observe": config.observe.model_copy(update=observe),
    }
    return config.model_copy(update=update), told


def _check(config: Config, workers: int, kinds: Sequence[Kind]) -> None:
    if workers < 2:
        raise UserError("a drill needs 2 workers or more, so that some outlive a fault; give --workers 4, or layout.data=4")
    if "corrupt" in kinds and config.checkpoint.keep < 2:
        raise UserError("checkpoint.keep = 1: with `corrupt` there must be an older checkpoint to fall back to; set 2 or more")
    if "lose" in kinds and fit(config, workers - 1, workers - 1) is None:
        batch = f"train.global_batch = {config.train.global_batch}"
        raise UserError(f"lose: no layout of this job works on {workers - 1} workers; choose {batch} so that it divides by both")
    import resource

    if "full" in kinds and not hasattr(resource, "prlimit"):
        raise UserError("full: needs Linux, where one process can limit what another may write")


def _with_limits(config: Config, usual: Usual) -> tuple[Config, dict[str, float]]:
    """Hangs are to be noticed soon, unless the job says when."""
    hung = max(SHORTEST_HANG, HANG_STEPS * usual.step, HANG_SLOWEST * usual.slowest)
    wanted = {"hang_seconds": hung, "start_seconds": max(60.0, 10 * usual.start)}
    more = {key: value for key, value in wanted.items() if key not in config.recovery.model_fields_set}
    told = {f"recovery.{key}": value for key, value in more.items()}
    return config.model_copy(update={"recovery": config.recovery.model_copy(update=more)}), told


def _check_time_to_return(planned: Sequence[Planned], config: Config, usual: Usual) -> None:
    """A host that was lost takes as long to come back as a start takes, and the others go on meanwhile."""
    lost = [fault for fault in planned if fault.kind == "lose"]
    if not lost:
        return
    away = math.ceil(1.5 * usual.start / usual.step)
    after = sum(fault.kind != "lose" for fault in planned)
    needed = lost[0].step + len(lost) * away + 3 * after + 5
    if needed > config.train.steps:
        raise UserError(
            f"train.steps = {config.train.steps}: a lost host takes about {away} steps to come back here; set {needed} or more"
        )


@contextmanager
def _holding(folder: Path) -> Iterator[Path]:
    """The drill's folder, without what an earlier drill left in it; nobody else may use it meanwhile."""
    in_use = f"run.folder = {str(folder)!r}: another run is writing there now; give another run.folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = take_lock(folder / ".lock", in_use)
    except OSError as error:
        raise UserError(f"run.folder = {str(folder)!r}: cannot be written ({error.strerror}); give another run.folder") from None
    with held:
        for name in ("undisturbed", "drilled"):
            _clear(folder / name)
        yield folder


def _clear(folder: Path) -> None:
    """Remove a run of an earlier drill, and nothing else."""
    folder.with_suffix(".log").unlink(missing_ok=True)
    if folder.exists() and not (folder / "logs").is_dir():
        raise UserError(f"{folder} is in the way, and is no run; move it, or give another run.folder")
    if folder.exists():
        shutil.rmtree(folder)


def _job_file(folder: Path, config: Config) -> Path:
    """The job of one of the two runs, to be given to the command."""
    update = {"run": config.run.model_copy(update={"folder": str(folder)})}
    path = folder.with_suffix(".toml")
    path.write_text(to_toml(config.model_copy(update=update)))
    return path


def _undisturbed(base: Path, config: Config, workers: int, audience: Audience) -> Usual:
    folder, began = base / "undisturbed", time.time()
    with Commands(_job_file(folder, config), folder) as commands:
        commands.start([workers])
        while commands.running():
            audience.at("undisturbed", newest(folder).get("step", 0), 0)
            time.sleep(5 * POLL_SECONDS)
        if any(status := commands.statuses()):
            kind = UserError if UserError.status in status else RunFailed
            raise kind(f"the undisturbed run failed:\n{commands.last_words()}")
    records = list(read_lines(folder / "metrics.jsonl"))
    seconds = sorted(record["seconds"] for record in records[1:] or records)
    return Usual(
        training=records[-1]["time"] - records[0]["time"] + records[0]["seconds"],
        start=records[0]["time"] - began,
        step=seconds[len(seconds) // 2],
        slowest=seconds[-1],
    )


def newest(folder: Path) -> dict[str, Any]:
    """The record of the last step in a run folder; empty before the first. Reads only the end of the file."""
    path = folder / "metrics.jsonl"
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - (1 << 16)))
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return {}
    import json

    return dict(json.loads(lines[-1])) if lines else {}


class _Drilled:
    """The run with faults: it starts the commands, does things to them, and waits until they have recovered."""

    def __init__(
        self, folder: Path, config: Config, workers: int, planned: Sequence[Planned], usual: Usual, audience: Audience
    ) -> None:
        self.folder, self.config, self.workers, self.planned = folder, config, workers, planned
        self.usual, self.audience = usual, audience
        self.survived: list[Survived] = []
        self.commands = Commands(_job_file(folder, config), folder)
        self._hosts = [workers - 1, 1] if any(fault.kind == "lose" for fault in planned) else [workers]
        self._phase = "starting"
        self._expected = 0

    def run(self) -> tuple[str | None, float]:
        """Why it failed, if it did; and how long it took, from the beginning of the first step to the end of the last."""
        began = ended = time.time()
        with self.commands:
            try:
                self.commands.start(self._hosts)
                self._wait(lambda: newest(self.folder), "no step was done")
                first = next(read_lines(self.folder / "metrics.jsonl"))
                began = first["time"] - first["seconds"]
                for fault in self.planned:
                    self._do(fault)
                self._phase = "to the end"
                self._wait(lambda: not self.commands.running(), "the run did not end", ended_well=True)
                failure, ended = self._bad_end(), newest(self.folder)["time"]
            except NotSurvived as error:
                failure = (
                    f"{self._phase}: {error}. The last words of the command ({self.commands.log}):\n{self.commands.last_words()}"
                )
                ended = time.time()
        return failure, ended - began

    def unexpected(self) -> Iterator[str]:
        """All faults of the run, should it have had more than were done here."""
        done = sum(fault.kind in ("kill", "hang", "corrupt", "lose") for fault in self.survived)
        faults = [event for event in self._events() if event["event"] == "fault"]
        if len(faults) > done + self._expected:
            yield from (f"{event['kind']} at step {event['step']}: {event['cause']}" for event in faults)

    # Waiting

    def _events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return list(read_lines(path)) if path.is_file() else []

    def _wait(self, condition: Callable[[], Any], reproach: str, ended_well: bool = False, seconds: float | None = None) -> Any:
        """Until something holds, which is returned; the run must not end before."""
        recovery = self.config.recovery
        patience = PATIENCE_SECONDS + 5 * self.usual.start + (recovery.hang_seconds or 60.0)
        deadline = time.monotonic() + (seconds or patience)
        before = -1
        while not (found := condition()):
            step = newest(self.folder).get("step", 0)
            self.audience.at(self._phase, step, len(self.survived))
            if step != before and seconds is None:  # it gets on
                before, deadline = step, time.monotonic() + patience
            if not ended_well and (ended := [status for status in self.commands.statuses() if status is not None]):
                raise NotSurvived(f"the command ended with status {ended[0]}" if any(ended) else "the run ended before")
            if time.monotonic() > deadline:
                raise NotSurvived(f"{reproach} within {seconds or patience:.0f} s")
            time.sleep(POLL_SECONDS)
        return found

    def _bad_end(self) -> str | None:
        status = [one for one in self.commands.statuses() if one]
        return f"the command ended with status {status[0]}:\n{self.commands.last_words()}" if status else None

    def _resumed(self, events_before: int, world: int | None = None) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The newest beginning since then, and the first step done after it; None if there is none yet."""
        begun = [event for event in self._events()[events_before:] if event["event"] in BEGIN]
        if not begun or (world is not None and begun[-1]["world"] != world):
            return None
        at = datetime.fromisoformat(begun[-1]["time"]).timestamp()
        if newest(self.folder).get("time", 0.0) <= at:
            return None
        record = next(record for record in read_lines(self.folder / "metrics.jsonl") if record["time"] > at)
        return begun[-1], record

    # Faults

    def _do(self, fault: Planned) -> None:
        """Wait for the moment, do it, wait for the recovery."""
        self._phase = f"before {fault.kind}"
        self._wait(lambda: newest(self.folder).get("step", 0) >= fault.step, f"step {fault.step} was not done")
        saved = {"corrupt": 2, "full": 1}.get(fault.kind, 0)
        self._wait(lambda: len(checkpoints(self.folder / "checkpoints")) >= saved, f"{saved} checkpoints were not there")
        time.sleep(fault.fraction * self.usual.step)
        step, at = int(newest(self.folder)["step"]), time.time()
        self._phase = f"{fault.kind} after step {step}"
        self.audience.at(self._phase, step, len(self.survived))
        survived: Survived = getattr(self, f"_{fault.kind}")(step, at, random.Random(fault.seed))
        self.survived.append(survived)
        lost = f", {survived.steps_lost} steps done again" if survived.steps_lost else ""
        self.audience.say(f"{fault.kind} after step {step}: {survived.happened}; {survived.seconds_to_recover:.1f} s{lost}")

    def _victim(self, draw: random.Random) -> tuple[int, int]:
        """A worker to suffer: its rank and its process."""
        found = self.commands.workers()
        if not found:
            raise NotSurvived("no worker is to be found in the logs")
        rank = draw.choice(sorted(found))
        return rank, found[rank]

    def _recovered(self, kind: Kind, step: int, at: float, rank: int | None, happened: str, before: int) -> Survived:
        """Wait for the first step after a fault, and count what it cost."""
        begun, record = self._wait(lambda: self._resumed(before), "no step was done after it")
        from_step, lost = self._cost(step, begun, before)
        more = {"resumed_from": from_step, "world": begun["world"]}
        return Survived(kind, step, rank, record["time"] - at, lost, f"{happened}; on from step {from_step}", more)

    def _cost(self, step: int, begun: dict[str, Any], before: int) -> tuple[int, int]:
        """The step that the run went on from, and how many it had done after that, as it says or as was seen."""
        recovery = self._event("recovery", before)
        if recovery is None:
            return begun.get("step", 0), max(0, step - begun.get("step", 0))
        return recovery["step"], recovery["lost_steps"]

    def _kill(self, step: int, at: float, draw: random.Random) -> Survived:
        before, (rank, pid) = len(self._events()), self._victim(draw)
        kill(pid)
        return self._recovered("kill", step, at, rank, f"rank {rank} killed", before)

    def _hang(self, step: int, at: float, draw: random.Random) -> Survived:
        before, (rank, pid) = len(self._events()), self._victim(draw)
        hang(pid)
        return self._recovered("hang", step, at, rank, f"rank {rank} frozen", before)

    def _corrupt(self, step: int, at: float, draw: random.Random) -> Survived:
        before, (rank, pid) = len(self._events()), self._victim(draw)
        damage = corrupt(str(self.folder / "checkpoints"), pid, draw)
        name = f"{Path(damage.checkpoint).name}/{damage.file}"
        survived = self._recovered("corrupt", step, at, rank, f"a byte of {name} flipped, rank {rank} killed", before)
        used = [event.get("checkpoint") for event in self._events()[before:] if event["event"] in BEGIN]
        if damage.checkpoint in used:
            raise NotSurvived(f"it resumed from {damage.checkpoint}, which is damaged")
        return survived

    def _full(self, step: int, at: float, draw: random.Random) -> Survived:
        before, limit_of = len(self._events()), limits(str(self.folder / "checkpoints"))
        fit_for_it = {rank: pid for rank, pid in self.commands.workers().items() if rank in limit_of}
        if not fit_for_it:
            raise NotSurvived("no worker but the first writes enough to fill its disk with; use a larger model")
        rank = draw.choice(sorted(fit_for_it))
        disk = FullDisk(fit_for_it[rank], limit_of[rank])
        failed = self._wait(lambda: self._event("save_failed", before), "no save failed, though the disk is full")
        disk.lift()
        saved = self._wait(
            lambda: self._event("save", before, after=failed["step"]), "no checkpoint was saved once there was room again"
        )
        if self._event("fault", before):
            raise NotSurvived("a full disk ended a worker")
        seconds = datetime.fromisoformat(saved["time"]).timestamp() - at
        happened = f"rank {rank} could not save step {failed['step']}; step {saved['step']} is saved"
        return Survived("full", step, rank, seconds, 0, happened, {"save_failed": failed["step"], "saved": saved["step"]})

    def _event(self, name: str, before: int, after: int = -1) -> dict[str, Any] | None:
        """The last such event since then, of a later step."""
        found = [event for event in self._events()[before:] if event["event"] == name and (event.get("step") or 0) > after]
        return found[-1] if found else None

    def _term(self, step: int, at: float, draw: random.Random) -> Survived:
        before = len(self._events())
        self.commands.terminate()
        self._wait(lambda: not self.commands.running(), "it was not gone", ended_well=True, seconds=GRACE_SECONDS)
        took, statuses = time.time() - at, self.commands.statuses()
        if set(statuses) != {RESUME_ME}:
            raise NotSurvived(f"after SIGTERM the command ended with status {statuses}, not {RESUME_ME}")
        stopped = self._event("stop", before)
        reached = stopped["step"] if stopped else step
        self.commands.start(self._hosts)
        happened = f"saved step {reached} and left with status {RESUME_ME} after {took:.1f} s; started again"
        return self._recovered("term", reached, at, None, happened, before)

    def _lose(self, step: int, at: float, draw: random.Random) -> Survived:
        before, fewer = len(self._events()), self.workers - 1
        gone = self.commands.lose_last()
        begun, record = self._wait(lambda: self._resumed(before, fewer), f"no step was done by the {fewer} workers left")
        self._expected += sum(event["event"] == "fault" for event in self._events()[before:]) - 1
        (from_step, lost), middle = self._cost(step, begun, before), len(self._events())
        self.audience.say(f"{fewer} workers go on from step {from_step}; the lost host comes back")
        self.commands.start_again()
        again, first = self._wait(lambda: self._resumed(middle, self.workers), "the host was not taken back")
        happened = (
            f"host with ranks {', '.join(map(str, gone))} lost; {fewer} workers from step {from_step}, "
            f"{self.workers} again from step {again.get('step', 0)}"
        )
        more = {"seconds_to_return": first["time"] - record["time"], "returned_at": again.get("step", 0)}
        return Survived("lose", step, gone[0] if gone else None, record["time"] - at, lost, happened, more)
