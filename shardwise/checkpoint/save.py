"""Save while training continues, and load on any mesh.

The state is one flat dictionary from keys (state_key.py) to tensors: those of the model, and the optimizer's
state of each parameter. Keys contain the names of the plain model, never of a rank or a wrapper, and sharded
tensors are DTensors that know their placement, so the same dictionary can be loaded under another layout.

A save in the background costs training one copy of the state to host memory; the buffers are reused for the
next save, and page-locked if the state is on a GPU. A thread then writes, fsyncs and commits while steps
continue (as in CheckFreq: Mohan et al., FAST 2021). It costs host memory of the size of this rank's state. If
training waits for a save, nothing is copied. At most one save is in flight. The next one waits for it, and
that wait counts as stall too.

A save that fails leaves the older checkpoints as they were. All ranks learn of it, because each exchange of a
save carries failures too (checkpoint/write_together.py); a rank that dies breaks the connection, which ends
the exchange for the others.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.dcp import DcpReader, load_planner
from shardwise.checkpoint.folder import (
    MANIFEST,
    Manifest,
    Resume,
    advice_if_damaged,
    check_same_model,
    checkpoints,
    no_whole_checkpoint,
    prune,
    read_manifest,
    resume_candidates,
    step_of,
)
from shardwise.checkpoint.saved_residuals import redistribute_residuals
from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.checkpoint.storage import storage
from shardwise.checkpoint.tensor_files import Contents, damaged_files, save_id
from shardwise.checkpoint.write_together import SaveRefused, write_together
from shardwise.comm import Peers
from shardwise.config.layout import Layout
from shardwise.errors import RunFailed, Unreadable, UserError
from shardwise.files import is_temporary
from shardwise.mesh import Mesh

State = dict[StateKey, Tensor]
ABANDON_SECONDS = 1.0
"""Seconds for which `abandon` waits for a commit that has begun."""
PAUSES = (1.0, 4.0, 15.0)
"""Seconds between attempts to read a checkpoint from storage that does not answer."""
T = TypeVar("T")

log = logging.getLogger("shardwise")


class HoldsState(Protocol):
    """The part of an optimizer that a checkpoint uses."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter by slot. Missing slots are created with zeros."""


def state_of(
    named: Iterable[tuple[str, nn.Parameter]],
    optimizer: HoldsState,
    buffers: Iterable[tuple[str, Tensor]] = (),
) -> State:
    """Return every tensor of a run's state. Frozen weights have no optimizer state."""
    state: State = {StateKey.model(name): buffer for name, buffer in buffers}
    for name, parameter in named:
        state[StateKey.model(name)] = parameter.detach()
        if not parameter.requires_grad:
            continue
        slots = optimizer.state_of(parameter)
        state.update({StateKey.optimizer(name, slot): value for slot, value in slots.items()})
    return state


def random_state(rank: int, device: torch.device) -> State:
    """Return the states of this rank's random generators."""
    state = {StateKey.random(rank, "cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        state[StateKey.random(rank, "cuda")] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: State, rank: int, device: torch.device) -> None:
    """Restore those random generators of this rank that are in the state."""
    if (cpu_state := state.get(StateKey.random(rank, "cpu"))) is not None:
        torch.set_rng_state(cpu_state)
    if (gpu_state := state.get(StateKey.random(rank, "cuda"))) is not None:
        torch.cuda.set_rng_state(gpu_state, device)


@dataclass(frozen=True)
class Saved:
    """A save that succeeded. Training waited for it for `stall_seconds`; all ranks together wrote `bytes`."""

    step: int
    folder: str
    seconds: float
    stall_seconds: float
    bytes: int


@dataclass(frozen=True)
class SaveFailed:
    """A save that failed; older checkpoints are unchanged."""

    step: int
    message: str


@dataclass(frozen=True)
class ResumeCheckpoint:
    """The checkpoint from which a run starts."""

    folder: str | None
    """A checkpoint of which every byte was checked; None: there is none."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Checkpoints that were skipped, each with the reason."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are not removed: the newest `keep`, and those whose step is a multiple of
    `keep_every`."""

    keep: int
    keep_every: int = 0


class HostCopies:
    """Copies of this rank's part of the state in host memory, in buffers that each save reuses."""

    def __init__(self) -> None:
        self._buffers: State = {}

    def take(self, state: State) -> State:
        """Return copies of the state, and wait until they are complete."""
        parts = local_parts(state)
        for key, part in parts.items():
            self._buffer(key, part).copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts.values()):
            torch.cuda.synchronize()
        return {key: self._buffers[key] for key in parts}

    def _buffer(self, key: StateKey, part: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
            buffer = self._buffers[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return buffer


def local_parts(state: State) -> State:
    """Return the part of each tensor that this rank holds."""
    return {
        key: (value.to_local() if isinstance(value, DTensor) else value).detach()
        for key, value in state.items()
    }


class Checkpointer:
    """Saves and loads a run's state. It uses a separate gloo group, which training does not use."""

    def __init__(self, mesh: Mesh, background: bool = True) -> None:
        self.mesh, self.background = mesh, background
        self.peers = Peers.create(mesh)
        self._copies = HostCopies()
        self._outcomes: deque[Saved | SaveFailed] = deque()
        self.failed_in_a_row = 0
        """Number of failed saves since the last successful one, among those that `outcomes` has returned."""
        self._in_flight: threading.Thread | None = None
        self._committing, self._given_up = threading.Lock(), False
        self._checked: str | None = None

    def save(
        self, folder: str, state: State, manifest: Manifest, retention: Retention, wait: bool = True
    ) -> str:
        """Write a checkpoint, in the background unless `wait` is set, and return its address.

        `outcomes` returns the result. A save that is waited for raises if it fails.
        """
        began = time.monotonic()
        self.finish()
        assert not self._given_up, "the workers were told to stop"
        state = {**state, **random_state(self.mesh.worker.rank, self.mesh.device)}
        task = _Save(folder, manifest, retention, began, state)
        if self.background and not wait:
            copies = self._copies.take(state)
            stall = time.monotonic() - began
            self._in_flight = threading.Thread(
                target=self._run_in_background, args=(task, copies, stall), name="checkpoint", daemon=True
            )
            self._in_flight.start()
        else:
            outcome = self._run(task, local_parts(state), None)
            self._outcomes.append(outcome)
            if wait and isinstance(outcome, SaveFailed):
                raise RunFailed(outcome.message)
        return task.address

    def outcomes(self) -> list[Saved | SaveFailed]:
        """Return the results of saves since the last call."""
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        for outcome in outcomes:
            self.failed_in_a_row = self.failed_in_a_row + 1 if isinstance(outcome, SaveFailed) else 0
        return outcomes

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the save in flight, if there is one, for at most this many seconds."""
        if self._in_flight is not None:
            self._in_flight.join(seconds)
            if not self._in_flight.is_alive():
                self._in_flight = None

    def abandon(self) -> None:
        """Give up the save in flight without waiting for peers that may be gone. It can no longer be
        committed."""
        self._given_up = True
        if self._committing.acquire(
            timeout=ABANDON_SECONDS
        ):  # a commit that has begun may finish: it is complete
            self._committing.release()
        self._in_flight = None

    def choose_checkpoint(self, resume: Resume) -> ResumeCheckpoint:
        """Return the checkpoint to start from. Rank 0 lists the folder for all; then each rank reads a share
        of the files, to check that they are undamaged. A damaged checkpoint is skipped for an older one,
        unless the user named its path.
        """
        candidates = _patiently(lambda: self._from_main(lambda: resume_candidates(resume)))
        skipped: list[tuple[str, str]] = []
        for address in candidates:
            try:
                manifest = _patiently(partial(self._checked_manifest, address))
            except Unreadable:  # it may be whole, and newer than all others
                raise
            except UserError as error:
                if resume.wanted != "auto":
                    raise
                skipped.append((address, str(error)))
                continue
            check_same_model(address, manifest, resume.model)
            return ResumeCheckpoint(address, tuple(skipped))
        if skipped:
            raise no_whole_checkpoint(resume.folder, [reason for _, reason in skipped])
        return ResumeCheckpoint(None)

    def newest_step(self, folder: str) -> int:
        """Return the newest step of the checkpoints in a folder, whole or not, as rank 0 sees them; -1 if
        there is none."""
        steps = _patiently(
            lambda: self._from_main(lambda: [step_of(address) for address in checkpoints(folder)])
        )
        return max(steps, default=-1)

    def load(self, folder: str, state: State, same_world: bool) -> None:
        """Fill `state` in place, after every byte of the checkpoint was checked. A checkpoint of weights
        alone leaves the optimizer in its initial state.
        """
        if self._checked != folder:
            _patiently(lambda: self._checked_manifest(folder))
        rank, device = self.mesh.worker.rank, self.mesh.device
        opened: list[Contents] = []
        # On all ranks or on none, so that no rank waits for another.
        _patiently(lambda: self._together(lambda: opened.append(Contents.open(folder))))
        contents = opened[-1]
        # A run that moves from CPU to GPU finds no state of the GPU's generator.
        generators = random_state(rank, device).items() if same_world else ()
        random = {key: value for key, value in generators if key in contents.tensors}

        def load() -> None:
            _load({**_expected(state, contents, self.mesh.layout), **random}, contents)

        _patiently(lambda: self._together(load))
        set_random_state(random, rank, device)

    def _run_in_background(self, task: _Save, parts: State, stall: float) -> None:
        """Run a save in its thread, where no exception may end the run."""
        try:
            self._outcomes.append(self._run(task, parts, stall))
        except Exception as error:
            log.info("the save of step %d ended", task.manifest.step, exc_info=True)
            self._outcomes.append(task.failed(error))

    def _run(self, task: _Save, parts: State, stall: float | None) -> Saved | SaveFailed:
        identity = save_id()
        where = storage(task.address)
        try:
            total_bytes = write_together(
                self.peers, where, task.state, parts, task.manifest, identity, self._commit
            )
        except Exception as error:
            if self.mesh.is_main:
                _clear(task, identity)
            if isinstance(error, SaveRefused):
                return task.failed(error)
            raise
        if self.mesh.is_main:
            _prune(task)
        seconds = time.monotonic() - task.began
        return Saved(
            task.manifest.step, task.address, seconds, seconds if stall is None else stall, total_bytes
        )

    def _commit(self, action: Callable[[], Manifest]) -> Manifest:
        with self._committing:
            if self._given_up:
                raise OSError("the workers broke up while it was being written")
            return action()

    def _checked_manifest(self, address: str) -> Manifest:
        """Return the manifest of a checkpoint after the ranks have checked every byte, each a share of the
        files."""
        manifest = Manifest(**self._from_main(lambda: asdict(Contents.open(address).manifest)))
        share = sorted(manifest.files)[self.mesh.worker.rank :: self.mesh.worker.world]
        problems = self._together(lambda: list(damaged_files(storage(address), manifest, share)))
        for problem in (problem for part in problems for problem in part):
            raise UserError(f"{problem}. {advice_if_damaged(storage(address))}")
        self._checked = address
        return manifest

    def _from_main(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 alone, and return its result, or raise its failure, on every rank."""
        return self._together(action if self.mesh.is_main else lambda: None)[0]

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action on every rank and return all results. A failure of one rank is raised on all, so that
        none continues or waits alone."""
        try:
            result = {"value": action()}
        except Unreadable as error:
            result = {"unreadable": str(error)}
        except UserError as error:
            result = {"refused": str(error)}
        except Exception as error:  # storage may raise any kind
            result = {"unreadable": f"checkpoints cannot be read: {error}"}
        everyone = self.peers.all_gather(result)
        for kind, raised in (("refused", UserError), ("unreadable", Unreadable)):
            for outcome in everyone:
                if kind in outcome:
                    raise raised(outcome[kind])
        return [outcome["value"] for outcome in everyone]


def _patiently(action: Callable[[], T]) -> T:
    """Repeat an action while storage does not answer, a few times. All ranks fail and wait together."""
    for seconds in PAUSES:
        try:
            return action()
        except Unreadable as error:
            log.warning("%s; trying again in %g s", error, seconds)
            time.sleep(seconds)
    return action()


@dataclass(frozen=True)
class _Save:
    """A save: the state, its destination, and the time at which it began."""

    folder: str
    manifest: Manifest
    retention: Retention
    began: float
    state: State

    @property
    def name(self) -> str:
        return f"step-{self.manifest.step}"

    @property
    def address(self) -> str:
        return storage(self.folder).inside(self.name).address

    def failed(self, error: BaseException) -> SaveFailed:
        where = f"the checkpoint of step {self.manifest.step} could not be written to {self.folder}"
        return SaveFailed(self.manifest.step, f"{where}: {error}")


def _clear(task: _Save, identity: str) -> None:
    """Remove the files of a failed save. A save may fail after its manifest is written, while the manifest is
    made durable: then the checkpoint is complete, and stays.
    """
    where = storage(task.address)
    try:
        files = read_manifest(task.address).files if where.size(MANIFEST) is not None else {}
        if any(identity in name for name in files):
            return
        for name in where.names():
            if identity in name:
                where.remove(name)
        if not where.names():
            storage(task.folder).remove(task.name)
    except Exception:
        log.info("remains of a failed save stay in %s", task.address, exc_info=True)


def _prune(task: _Save) -> None:
    """Remove old checkpoints. A failure is only logged: the new checkpoint is complete."""
    try:
        prune(task.folder, task.retention.keep, task.retention.keep_every)
    except Exception as error:
        log.warning("old checkpoints in %s could not be removed: %s", task.folder, error)


def _expected(state: State, contents: Contents, layout: Layout) -> State:
    """Return the part of the state that is loaded from the checkpoint, and initialise the rest.

    PowerSGD's factors keep their initial values if the checkpoint has none of this size.
    """
    _check_slots(state, contents)
    state = _without_redistributed(state, contents, layout)
    state = {key: value for key, value in state.items() if _can_fill(contents, key, value)}
    reset = _reset_keys(state, contents)
    for part in local_parts({key: state[key] for key in reset}).values():
        part.zero_()
    return {key: value for key, value in state.items() if key not in reset}


def _without_redistributed(state: State, contents: Contents, layout: Layout) -> State:
    """If the checkpoint has another layout, fill the residuals of compression from the sum over its devices,
    and return the state without them."""
    residuals = {key: value for key, value in state.items() if key.kind is StateKind.RESIDUAL}
    same_layout = contents.manifest.layout == layout.model_dump(mode="json")
    if not residuals or (same_layout and all(key in contents.tensors for key in residuals)):
        return state
    redistribute_residuals(residuals, contents)
    return {key: value for key, value in state.items() if key not in residuals}


def _can_fill(contents: Contents, key: StateKey, value: Tensor) -> bool:
    if key.kind is not StateKind.FACTOR:
        return True
    return key in contents.tensors and contents.tensors[key].shape == value.shape


def _reset_keys(state: State, contents: Contents) -> set[StateKey]:
    """Return the keys of tensors that begin at zero.

    These are optimizer states that the checkpoint lacks, because it has only weights or a weight was frozen,
    and all histories of float8 magnitudes if it lacks any.
    """
    missing = {key for key in state if key not in contents.tensors}
    reset = {key for key in missing if key.kind is StateKind.OPTIMIZER}
    if any(key.is_float8_history for key in missing):
        reset |= {key for key in state if key.is_float8_history}
    return reset


def _check_slots(state: State, contents: Contents) -> None:
    """Refuse the state of an optimizer that keeps other tensors for a parameter than the job's does."""
    wanted, saved = _slots(state), _slots(contents.tensors)
    for parameter, slots in wanted.items():
        if parameter in saved and saved[parameter] != slots:
            name = contents.manifest.optimizer.get("name")
            raise UserError(
                f"{contents.address} holds the state of another optimizer{f' ({name})' if name else ''}: "
                f"{_listed(saved[parameter])}, where this job's keeps {_listed(slots)}. "
                f"{f'Set optimizer.name={name}' if name else 'Use the optimizer that it was saved with'}, or "
                "begin with its weights alone: `shardwise checkpoint export`, then model.pretrained."
            )


def _slots(keys: Iterable[StateKey]) -> dict[str, set[str]]:
    """Return by parameter the names of its optimizer states."""
    slots: dict[str, set[str]] = {}
    for key in keys:
        if key.kind is StateKind.OPTIMIZER:
            slots.setdefault(key.name, set()).add(key.slot)
    return slots


def _listed(slots: set[str]) -> str:
    return " and ".join(sorted(slots - {"step"})) or "no state"


def _load(state: State, contents: Contents) -> None:
    """Fill this rank's part of the state. Every rank plans its reads by itself; the warning of Distributed
    Checkpoint about that is ignored."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        by_text = {str(key): value for key, value in state.items()}
        load_shards(by_text, storage_reader=DcpReader(contents), planner=load_planner(), no_dist=True)
    except (OSError, CheckpointException) as error:
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else [error]
        cause = causes[0][0] if isinstance(causes[0], tuple) else causes[0]
        kind = Unreadable if isinstance(cause, Unreadable) or is_temporary(cause) else UserError
        raise kind(f"{contents.address} could not be loaded: {cause}") from None
