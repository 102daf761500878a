"""Run a job while faults are injected from outside, and wait for each recovery.

This code takes no part in the recovery of the run. It knows only what anyone can see: the processes of the
commands, the metrics and events in the run folder, and the checkpoints. Each fault waits until a step was
completed after the previous fault.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

from shardwise.checkpoint import checkpoints, step_of
from shardwise.config import Config, to_toml
from shardwise.files import Json
from shardwise.observe import newest, read_events, read_metrics
from shardwise.observe.records import Record
from shardwise.plurals import counted
from shardwise.proof.drill_faults import (
    ERROR_PLACES,
    ErrorPlace,
    FullDisk,
    Kind,
    PlannedFault,
    corrupt,
    hang,
    kill,
    limits,
    raise_error,
)
from shardwise.proof.train_commands import TrainCommands
from shardwise.resilience.stopping import RESUME_ME

POLL_SECONDS = 0.02
GRACE_SECONDS = 30.0
"""Seconds from SIGTERM to the end of the process, as Slurm and Kubernetes grant by default."""
PATIENCE_SECONDS = 120.0
"""Least number of seconds to wait for a recovery."""
BEGIN = ("start", "resume")
"""Names of the events with which workers begin to train."""
ERROR_NAMES: dict[ErrorPlace, str] = {
    "collective": "a collective",
    "group": "the creation of a process group",
    "communicator": "the first collective of a team",
    "save": "a save",
}
"""For each place in which a worker can raise an exception, the words of the drill's table."""

_Result = TypeVar("_Result")


class DrillProgress(Protocol):
    """Interface of an object that shows the progress of a drill."""

    def at(self, phase: str, step: int, faults: int) -> None:
        """Show which phase the drill is in, at which step, and how many faults were survived."""

    def say(self, text: str) -> None:
        """Print a sentence about what happened."""


@dataclass(frozen=True)
class SurvivedFault:
    """A fault that was injected, and how the run recovered from it."""

    kind: Kind
    step: int
    rank: int | None
    seconds_to_recover: float
    steps_lost: int
    happened: str
    more: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        """Return the fault as the command prints it."""
        fields = asdict(self)
        more = fields.pop("more")
        return {**fields, **more}


@dataclass(frozen=True)
class Baseline:
    """Durations in the undisturbed run, in seconds."""

    training: float
    """Seconds from the beginning of the first step to the end of the last."""
    start: float
    """Seconds from the start of the command to the end of the first step."""
    step: float
    slowest: float


class NotSurvived(Exception):
    """The drilled run ended before its last step."""


def job_file(folder: Path, config: Config) -> Path:
    """Write the job file of one of the two runs, and return its path."""
    update = {"run": config.run.model_copy(update={"folder": str(folder)})}
    path = folder.with_suffix(".toml")
    path.write_text(to_toml(config.model_copy(update=update)))
    return path


class DisturbedRun:
    """Starts the commands, injects the planned faults one after the other, and waits for each recovery."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        workers: int,
        planned: Sequence[PlannedFault],
        baseline: Baseline,
        progress: DrillProgress,
    ) -> None:
        self.folder, self.config, self.workers, self.planned = folder, config, workers, planned
        self.baseline, self.progress = baseline, progress
        self.survived: list[SurvivedFault] = []
        raises_errors = any(fault.kind == "error" for fault in planned)
        self.commands = TrainCommands(job_file(folder, config), folder, raises_errors)
        self._hosts = [workers - 1, 1] if any(fault.kind == "lose" for fault in planned) else [workers]
        self._phase = "starting"
        self._expected = 0
        self._actions: dict[Kind, Callable[[int, float, random.Random], SurvivedFault]] = {
            "kill": self._kill,
            "hang": self._hang,
            "error": self._error,
            "corrupt": self._corrupt,
            "full": self._full,
            "term": self._term,
            "lose": self._lose,
        }

    def run(self) -> tuple[str | None, float]:
        """Run the job to its end. Return why it failed, or None if it did not, and the seconds from the
        beginning of the first step to the end of the last."""
        began = ended = time.time()
        with self.commands:
            try:
                self.commands.start(self._hosts)
                self._wait(lambda: newest(self.folder), "no step was done")
                first = next(iter(read_metrics(self.folder, needs=("time", "seconds"))))
                began = first["time"] - first["seconds"]
                for fault in self.planned:
                    self._do(fault)
                self._phase = "to the end"
                self._wait(lambda: not self.commands.running(), "the run did not end", ended_well=True)
                failure, ended = self._bad_end(), newest(self.folder)["time"]
            except NotSurvived as error:
                failure = (
                    f"{self._phase}: {error}. The last lines of the command ({self.commands.log}):\n"
                    f"{self.commands.log_tail()}"
                )
                ended = time.time()
        return failure, ended - began

    def unexpected(self) -> Iterator[str]:
        """Yield all faults that the run recorded, if it recorded more than were injected."""
        done = sum(fault.kind in ("kill", "hang", "error", "corrupt", "lose") for fault in self.survived)
        faults = [event for event in self._events() if event["event"] == "fault"]
        if len(faults) > done + self._expected:
            yield from (f"{event['kind']} at step {event['step']}: {event['cause']}" for event in faults)

    # Waiting

    def _events(self) -> list[Record]:
        events = read_events(self.folder)
        return list(events) if events.path.is_file() else []

    def _wait(
        self,
        condition: Callable[[], _Result | None],
        complaint: str,
        ended_well: bool = False,
        seconds: float | None = None,
    ) -> _Result:
        """Wait until the condition returns a true value, and return that value.

        The run must not end while waiting, unless `ended_well` is set.
        """
        recovery = self.config.recovery
        patience = PATIENCE_SECONDS + 5 * self.baseline.start + (recovery.hang_seconds or 60.0)
        deadline = time.monotonic() + (seconds or patience)
        before = -1
        while not (result := condition()):
            step = newest(self.folder).get("step", 0)
            self.progress.at(self._phase, step, len(self.survived))
            if step != before and seconds is None:  # the run makes progress
                before, deadline = step, time.monotonic() + patience
            if not ended_well:
                self._check_running()
            if time.monotonic() > deadline:
                raise NotSurvived(f"{complaint} within {seconds or patience:.0f} s")
            time.sleep(POLL_SECONDS)
        return result

    def _check_running(self) -> None:
        """Raise NotSurvived if a command has ended."""
        ended = [status for status in self.commands.statuses() if status is not None]
        if any(ended):
            raise NotSurvived(f"the command ended with status {ended[0]}")
        if ended:
            raise NotSurvived("the run ended before")

    def _bad_end(self) -> str | None:
        status = [code for code in self.commands.statuses() if code]
        return f"the command ended with status {status[0]}:\n{self.commands.log_tail()}" if status else None

    def _resumed(self, events_before: int, world: int | None = None) -> tuple[Record, Record] | None:
        """Return the newest event with which training began, and the record of the first step after it; None
        if there is none yet. The first `events_before` events are left out."""
        begun = [event for event in self._events()[events_before:] if event["event"] in BEGIN]
        if not begun or (world is not None and begun[-1]["world"] != world):
            return None
        at = datetime.fromisoformat(begun[-1]["time"]).timestamp()
        if newest(self.folder).get("time", 0.0) <= at:
            return None
        record = next(record for record in read_metrics(self.folder, needs=("time",)) if record["time"] > at)
        return begun[-1], record

    # Faults

    def _do(self, fault: PlannedFault) -> None:
        """Wait until the fault is due, inject it, and wait for the recovery."""
        self._phase = f"before {fault.kind}"
        late = f"step {fault.step} was not done"
        self._wait(lambda: newest(self.folder).get("step", 0) >= fault.step, late)
        saved, folder = {"corrupt": 2, "full": 1}.get(fault.kind, 0), self.folder / "checkpoints"
        self._wait(lambda: len(checkpoints(folder)) >= saved, f"{saved} checkpoints were not there")
        time.sleep(fault.fraction * self.baseline.step)
        step, at = int(newest(self.folder)["step"]), time.time()
        self._phase = f"{fault.kind} after step {step}"
        self.progress.at(self._phase, step, len(self.survived))
        survived = self._actions[fault.kind](step, at, random.Random(fault.seed))
        self.survived.append(survived)
        lost = f", {counted(survived.steps_lost, 'step')} done again" if survived.steps_lost else ""
        self.progress.say(
            f"{fault.kind} after step {step}: {survived.happened}; {survived.seconds_to_recover:.1f} s{lost}"
        )

    def _victim(self, draw: random.Random) -> tuple[int, int]:
        """Return the rank and the process id of the worker to inject the fault into."""
        workers = self.commands.workers()
        if not workers:
            raise NotSurvived("the logs name no worker that runs")
        rank = draw.choice(sorted(workers))
        return rank, workers[rank]

    def _recovered(
        self, kind: Kind, step: int, at: float, rank: int | None, happened: str, events_before: int
    ) -> SurvivedFault:
        """Wait for the first step after a fault, and return what the fault cost."""
        begun, record = self._wait(lambda: self._resumed(events_before), "no step was done after it")
        from_step, lost = self._cost(step, begun, events_before)
        more = {"resumed_from": from_step, "world": begun["world"]}
        return SurvivedFault(
            kind, step, rank, record["time"] - at, lost, f"{happened}; on from step {from_step}", more
        )

    def _cost(self, step: int, begun: Record, events_before: int) -> tuple[int, int]:
        """Return the step that the run resumed from, and the number of steps that it lost.

        Both come from the recovery event where there is one, and from what was observed otherwise.
        """
        recovery = self._event("recovery", events_before)
        if recovery is None:
            return begun.get("step", 0), max(0, step - begun.get("step", 0))
        return recovery["step"], recovery["lost_steps"]

    def _kill(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        events_before, (rank, pid) = len(self._events()), self._victim(draw)
        kill(pid)
        return self._recovered("kill", step, at, rank, f"rank {rank} killed", events_before)

    def _hang(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        events_before, (rank, pid) = len(self._events()), self._victim(draw)
        hang(pid)
        return self._recovered("hang", step, at, rank, f"rank {rank} frozen", events_before)

    def _error(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        """Let a worker raise an exception, and wait for the recovery.

        Process groups and communicators are created when a team meets. So for these places one worker raises
        an exception in a collective, and another one when the workers meet again.
        """
        events_before, (rank, pid) = len(self._events()), self._victim(draw)
        place: ErrorPlace = draw.choice(ERROR_PLACES)
        others = {other: other_pid for other, other_pid in self.commands.workers().items() if other != rank}
        second = draw.choice(sorted(others)) if place in ("group", "communicator") and others else None
        if second is not None:
            raise_error(others[second], place)
        first: ErrorPlace = place if second is None else "collective"
        raise_error(pid, first)
        fault = self._wait(lambda: self._event("fault", events_before), "no exception was raised")
        raised_at = datetime.fromisoformat(fault["time"]).timestamp()
        self._wait(lambda: self._resumed(events_before), "no step was done after it")
        faults = [event for event in self._events()[events_before:] if event["event"] == "fault"]
        raised = sum("DrillError" in event["cause"] for event in faults)
        if not raised:
            raise NotSurvived(f"rank {rank} raised no exception; the fault was: {fault['cause']}")
        self._expected += max(0, raised - 1)
        happened = f"an exception in rank {rank} in {ERROR_NAMES[first]}"
        if second is not None:
            happened += _what_second_did(second, place, raised)
        survived = self._recovered("error", step, raised_at, rank, happened, events_before)
        return replace(survived, more={**survived.more, "place": place, "exceptions": raised})

    def _corrupt(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        events_before, (rank, pid) = len(self._events()), self._victim(draw)
        damage = corrupt(str(self.folder / "checkpoints"), pid, draw, self._save_in_flight)
        name = f"{Path(damage.checkpoint).name}/{damage.file}"
        happened = f"a byte of {name} flipped, rank {rank} killed"
        survived = self._recovered("corrupt", step, at, rank, happened, events_before)
        used = [
            event.get("checkpoint") for event in self._events()[events_before:] if event["event"] in BEGIN
        ]
        if damage.checkpoint in used:
            raise NotSurvived(f"it resumed from {damage.checkpoint}, which is damaged")
        damaged = step_of(damage.checkpoint)
        if used and all(checkpoint and step_of(checkpoint) > damaged for checkpoint in used):
            self._expected += 1  # a save was committed in between, so the damaged one was not the newest
            return self._corrupt(int(newest(self.folder)["step"]), time.time(), draw)
        return survived

    def _save_in_flight(self) -> bool:
        """Return whether the checkpoint of the last step that is to be saved has not been committed yet."""
        every, step = self.config.checkpoint.every, int(newest(self.folder).get("step", 0))
        saved = checkpoints(self.folder / "checkpoints")
        return every > 0 and step_of(saved[-1]) < step // every * every

    def _full(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        events_before, limit_of = len(self._events()), limits(str(self.folder / "checkpoints"))
        candidates = {rank: pid for rank, pid in self.commands.workers().items() if rank in limit_of}
        if not candidates:
            raise NotSurvived("no worker but the first writes enough to fill its disk; use a larger model")
        rank = draw.choice(sorted(candidates))
        disk = FullDisk(candidates[rank], limit_of[rank])
        unnoticed = "no save failed, though the disk is full"
        failed = self._wait(lambda: self._event("save_failed", events_before), unnoticed)
        disk.lift()
        unsaved = "no checkpoint was saved once there was room again"
        saved = self._wait(lambda: self._event("save", events_before, after=failed["step"]), unsaved)
        if self._event("fault", events_before):
            raise NotSurvived("a full disk ended a worker")
        seconds = datetime.fromisoformat(saved["time"]).timestamp() - at
        happened = f"rank {rank} could not save step {failed['step']}; step {saved['step']} is saved"
        more = {"save_failed": failed["step"], "saved": saved["step"]}
        return SurvivedFault("full", step, rank, seconds, 0, happened, more)

    def _event(self, name: str, events_before: int, after: int = -1) -> Record | None:
        """Return the last event of this name and of a step later than `after`, or None. The first
        `events_before` events are left out."""
        events = [
            event
            for event in self._events()[events_before:]
            if event["event"] == name and (event.get("step") or 0) > after
        ]
        return events[-1] if events else None

    def _term(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        events_before = len(self._events())
        self.commands.terminate()
        late = "it had not ended"
        self._wait(lambda: not self.commands.running(), late, ended_well=True, seconds=GRACE_SECONDS)
        took, statuses = time.time() - at, self.commands.statuses()
        if set(statuses) != {RESUME_ME}:
            raise NotSurvived(f"after SIGTERM the command ended with status {statuses}, not {RESUME_ME}")
        stopped = self._event("stop", events_before)
        reached = stopped["step"] if stopped else step
        self.commands.start(self._hosts)
        happened = f"saved step {reached} and left with status {RESUME_ME} after {took:.1f} s; started again"
        return self._recovered("term", reached, at, None, happened, events_before)

    def _lose(self, step: int, at: float, draw: random.Random) -> SurvivedFault:
        events_before, fewer = len(self._events()), self.workers - 1
        gone = self.commands.lose_last()
        stuck = f"no step was done by the {fewer} workers left"
        begun, record = self._wait(lambda: self._resumed(events_before, fewer), stuck)
        self._expected += sum(event["event"] == "fault" for event in self._events()[events_before:]) - 1
        (from_step, lost), middle = self._cost(step, begun, events_before), len(self._events())
        self.progress.say(f"{fewer} workers go on from step {from_step}; the lost host comes back")
        self.commands.start_again()
        again, first = self._wait(lambda: self._resumed(middle, self.workers), "the host was not taken back")
        happened = (
            f"host with ranks {', '.join(map(str, gone))} lost; {fewer} workers from step {from_step}, "
            f"{self.workers} again from step {again.get('step', 0)}"
        )
        more = {"seconds_to_return": first["time"] - record["time"], "returned_at": again.get("step", 0)}
        rank = gone[0] if gone else None
        return SurvivedFault("lose", step, rank, record["time"] - at, lost, happened, more)


def _what_second_did(rank: int, place: ErrorPlace, raised: int) -> str:
    """Return what became of the second worker that was to raise an exception, to be added to the first's."""
    if raised > 1:
        return f", then one in rank {rank} in {ERROR_NAMES[place]}"
    return f"; rank {rank} was replaced before it raised one in {ERROR_NAMES[place]}"
