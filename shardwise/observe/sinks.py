"""Where measurements go: always to the run folder, and on request to TensorBoard, Weights & Biases, MLflow
and callbacks of the user.

The run folder is the reference (record_files.py). The others mirror the same records for people who use these
tools. They are optional dependencies and imported only if the job asks for them. Their packages are looked
for before anything in the run folder is changed, so a missing one costs nothing but the message. A mirror
that fails is reported and no longer used, and so is a callback: no mistake in it ends a run.
"""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardwise.errors import UserError
from shardwise.files import Json, parse_toml, read_bytes, regular_file_opener
from shardwise.observe.record_files import EventsFile, MetricsFile, Warn, log
from shardwise.observe.records import Record
from shardwise.plans import read_plan
from shardwise.user_file import load_file, locate

if TYPE_CHECKING:
    from shardwise.config import Observe


MLFLOW_BATCH = 100
"""Largest number of settings that MLflow takes at a time."""


class Sink(Protocol):
    """A place outside the run folder where the record of each step is shown."""

    def write(self, record: Record) -> None:
        """Show the record of one step."""

    def close(self) -> None:
        """Send the remaining records and close the connection."""


def scalars(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a record with its path: `loss`, `spans/data`,
    `collectives/all_reduce/data/bytes`.
    """
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)


def curves(record: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Return the numbers of a record that are shown over steps.

    These are all except the step and the time of day, which the tools record themselves.
    """
    return ((tag, value) for tag, value in scalars(record) if tag not in ("step", "time"))


class TensorBoardSink:
    """Writes scalars to `FOLDER/tensorboard`, with TensorBoard's own writer, which needs no torch."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise _missing("observe.tensorboard = true", "tensorboard") from None
        self._event, self._summary, self._log = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        if resume_step:  # makes TensorBoard ignore what an interrupted run wrote from this step on
            self._add(resume_step + 1, session_log=self._log(status=self._log.START))

    def write(self, record: Record) -> None:
        """Write one summary per step."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in curves(record)]
        self._add(record["step"], summary=self._summary(value=values))

    def close(self) -> None:
        """Write the queued summaries and close the file."""
        self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        """Add an event. The writer uses a thread, and raises at the next call if that failed."""
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))


class WandbSink:
    """Mirrors the run to a Weights & Biases project. Resuming the folder continues the same run there."""

    def __init__(self, folder: Path, observe: Observe, resume_step: int = 0) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing(f"observe.wandb = {observe.wandb!r}", "wandb") from None
        identity = folder / "wandb-id"
        run_id = _saved_id(identity, resume_step) or uuid.uuid4().hex[:8]
        _save_id(identity, run_id)
        self._run = wandb.init(
            project=observe.wandb,
            entity=observe.wandb_entity,
            name=observe.name or folder.name,
            group=observe.group,
            tags=observe.tags or None,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=_job(folder),
        )

    def write(self, record: Record) -> None:
        """Log one row per step."""
        self._run.log(dict(curves(record)), step=record["step"])

    def close(self) -> None:
        """Wait until the upload is complete."""
        self._run.finish()


class MlflowSink:
    """Mirrors the run to an MLflow experiment. Resuming the folder continues the same run there."""

    def __init__(self, folder: Path, observe: Observe, resume_step: int = 0) -> None:
        try:
            import mlflow
        except ImportError:
            raise _missing(f"observe.mlflow = {observe.mlflow!r}", "mlflow") from None
        self._mlflow, identity = mlflow, folder / "mlflow-id"
        mlflow.set_experiment(observe.mlflow)
        if run_id := _saved_id(identity, resume_step):
            mlflow.start_run(run_id=run_id)
            return
        tags = {**dict.fromkeys(observe.tags, "true"), **({"group": observe.group} if observe.group else {})}
        run = mlflow.start_run(run_name=observe.name or folder.name, tags=tags)
        _save_id(identity, run.info.run_id)
        settings = [
            (f"{table}.{key}", value)
            for table, keys in _job(folder).items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        ]
        for first in range(0, len(settings), MLFLOW_BATCH):
            mlflow.log_params(dict(settings[first : first + MLFLOW_BATCH]))

    def write(self, record: Record) -> None:
        """Log the numbers of one step."""
        self._mlflow.log_metrics(dict(curves(record)), step=record["step"])

    def close(self) -> None:
        """End the run in MLflow, which then shows it as finished."""
        self._mlflow.end_run()


def _saved_id(identity: Path, resume_step: int) -> str | None:
    """Return the name that a service gave to the run that is resumed; None for a new run."""
    if not (resume_step and identity.exists()):
        return None
    return read_bytes(identity).decode("utf-8", "replace")


def _save_id(identity: Path, run_id: str) -> None:
    with open(identity, "w", opener=regular_file_opener) as file:
        file.write(run_id)


class CallbackSink:
    """Calls the methods of a user's object: `on_step` with the record of each step, and `on_NAME` with the
    fields of each event of that name. Methods that the object does not have are not called."""

    def __init__(self, name: str, callback: object) -> None:
        self.name, self._callback = f"the callback {name}", callback

    @classmethod
    def at(cls, address: str) -> CallbackSink:
        """Return the sink of a new object of the class that "file.py:Class" names."""
        path, name = locate(f"observe.callbacks: {address!r}", address, "callbacks.py:Notify")
        return cls(address, getattr(load_file(path), name)())

    def write(self, record: Record) -> None:
        """Call `on_step` with the record of a step."""
        self.event("step", record)

    def event(self, name: str, fields: Record) -> None:
        """Call the method for an event."""
        if (method := getattr(self._callback, f"on_{name}", None)) is not None:
            method(fields)

    def close(self) -> None:
        """Do nothing; `on_end` was called before."""


class Sinks:
    """Everything that the measurements of a run are written to: its two files, and mirrors of them."""

    def __init__(
        self, metrics: MetricsFile, events: EventsFile, mirrors: tuple[Sink, ...], warn: Warn
    ) -> None:
        self._metrics, self._events, self._mirrors, self._warn = metrics, events, mirrors, warn
        self.dropped = metrics.dropped
        """Seconds of each step that was done before and is done again."""

    def metrics(self, record: Record) -> None:
        """Write the record of one step; its `step` counts from 1."""
        self._metrics.write(record)
        for mirror in self._mirrors:
            self._mirror(partial(mirror.write, record), mirror)

    def event(self, name: str, **fields: object) -> None:
        """Write an event, such as `start`, `save`, `resume`, `evaluate`, `skip` or `stop`."""
        self._events.write(name, **fields)
        for mirror in self._mirrors:
            if isinstance(mirror, CallbackSink):
                self._mirror(partial(mirror.event, name, dict(fields)), mirror)

    def close(self) -> None:
        """Close the files, and let the mirrors send what they still have."""
        self._metrics.close()
        self._events.close()
        for mirror in self._mirrors:
            self._mirror(mirror.close, mirror)

    def _mirror(self, action: Callable[[], object], mirror: Sink) -> None:
        """Call a function of a mirror. A mirror that fails in any way is not used any more."""
        try:
            action()
        except (Exception, SystemExit) as error:
            self._mirrors = tuple(other for other in self._mirrors if other is not mirror)
            failed = f"{_name(mirror)} failed and gets no more records"
            self._warn(f"{failed}; metrics.jsonl has them all: {_explained(error, mirror)}")


def _name(mirror: Sink) -> str:
    return mirror.name if isinstance(mirror, CallbackSink) else type(mirror).__name__


def _explained(error: BaseException, mirror: Sink) -> str:
    """Return an error as text; an error of a user's callback with its type and the line that raised it."""
    if not isinstance(mirror, CallbackSink):
        return str(error)
    line = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({line.filename}, line {line.lineno})"


def open_sinks(
    folder: str | Path,
    observe: Observe,
    resume_step: int = 0,
    warn: Warn = log.warning,
    callbacks: Sequence[object] = (),
) -> Sinks:
    """Return the sinks of a run that continues after step `resume_step`; 0 means a new run with empty
    metrics. `callbacks` are objects of a program, beside those that the job names.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run.folder = {str(folder)!r} cannot be made: {error.strerror}. Give a folder you may write to."
        ) from None
    given = (CallbackSink(type(callback).__name__, callback) for callback in callbacks)
    mirrors = (*_mirrors(folder, observe, resume_step, warn), *given)
    metrics = MetricsFile(folder / "metrics.jsonl", resume_step, warn)
    return Sinks(metrics, EventsFile(folder / "events.jsonl", warn), mirrors, warn)


def _mirrors(folder: Path, observe: Observe, resume_step: int, warn: Warn) -> Iterator[Sink]:
    """Yield the mirrors that the job asks for and that can be opened now.

    A mirror that cannot be opened is not used: every team of a run opens them again, and a service that is
    away must not end a run that survived a fault. A missing package is an error that the user can correct.
    """
    asked: dict[str, Callable[[], Sink]] = {}
    if observe.tensorboard:
        asked["TensorBoard"] = lambda: TensorBoardSink(folder, resume_step)
    if observe.wandb is not None:
        asked["Weights & Biases"] = lambda: WandbSink(folder, observe, resume_step)
    if observe.mlflow is not None:
        asked["MLflow"] = lambda: MlflowSink(folder, observe, resume_step)
    for address in observe.callbacks:
        asked[f"the callback {address}"] = partial(CallbackSink.at, address)
    for name, make in asked.items():
        try:
            yield make()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            warn(f"{name} cannot be opened and gets no records; metrics.jsonl has them all: {error}")


def missing_extras(observe: Observe) -> Iterator[str]:
    """Yield a problem for each mirror whose package is missing. Call this before anything starts."""
    if observe.tensorboard and find_spec("tensorboard") is None:
        yield str(_missing("observe.tensorboard = true", "tensorboard"))
    if observe.wandb and find_spec("wandb") is None:
        yield str(_missing(f"observe.wandb = {observe.wandb!r}", "wandb"))
    if observe.mlflow and find_spec("mlflow") is None:
        yield str(_missing(f"observe.mlflow = {observe.mlflow!r}", "mlflow"))


def _missing(setting: str, extra: str) -> UserError:
    return UserError(
        f"{setting} needs a package that is not installed. Install it with: pip install 'shardwise[{extra}]'"
    )


def _job(folder: Path) -> Json:
    """Return the job as the user asked for it, completed by the decisions of the plan."""
    job, plan = folder / "config.toml", folder / "plan.json"
    tables = parse_toml(read_bytes(job), job) if job.exists() else {}
    for setting, decision in read_plan(plan).get("decisions", {}).items():
        table, _, name = setting.partition(".")
        tables.setdefault(table, {})[name] = decision["value"]
    return tables
