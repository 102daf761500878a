"""Save while training goes on, and load on any mesh.

State is one flat dictionary from keys (state_key.py) to tensors: the model's, and what the optimizer keeps
for each parameter. Names in keys are the plain model's, never a rank's or a wrapper's, and sharded tensors
are DTensors that know their place in the whole, so the same dictionary can be loaded under another layout.

A save in the background costs training one copy of the state to host memory, at the speed of that memory; the
buffers are kept for the next save, and page-locked where the state is on a GPU. A thread then writes, fsyncs
and commits while steps go on (as CheckFreq does: Mohan et al., FAST 2021). It costs host memory the size of
this rank's state. A save that is waited for copies nothing. At most one is in flight: the next one waits for
it, and that wait counts as stall as well.

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
    check_same_model,
    checkpoints,
    none_is_whole,
    prune,
    read_manifest,
    resume_candidates,
    step_of,
)
from shardwise.checkpoint.saved_residuals import deal_out
from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.checkpoint.storage import storage
from shardwise.checkpoint.tensor_files import Contents, damaged_files, save_id
from shardwise.checkpoint.write_together import SaveRefused, write_together
from shardwise.comm import Peers
from shardwise.config import Layout
from shardwise.errors import RunFailed, Unreadable, UserError
from shardwise.files import is_temporary
from shardwise.mesh import Mesh

State = dict[StateKey, Tensor]
PATIENCE = 1.0
"""Seconds that giving up a save may take."""
PAUSES = (1.0, 4.0, 15.0)
"""Seconds between attempts to read a checkpoint from storage that does not answer."""
T = TypeVar("T")

log = logging.getLogger("shardwise")


class HoldsState(Protocol):
    """An optimizer, as far as a checkpoint needs to know it."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter by slot; it is made, as zeros, where there is none yet."""


def state_of(
    named: Iterable[tuple[str, nn.Parameter]],
    optimizer: HoldsState,
    buffers: Iterable[tuple[str, Tensor]] = (),
) -> State:
    """Return every tensor that a run consists of. Frozen weights have no state of the optimizer."""
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
    """Put the random generators of this rank where they were, as far as the state tells."""
    if (of_cpu := state.get(StateKey.random(rank, "cpu"))) is not None:
        torch.set_rng_state(of_cpu)
    if (of_gpu := state.get(StateKey.random(rank, "cuda"))) is not None:
        torch.cuda.set_rng_state(of_gpu, device)


@dataclass(frozen=True)
class Saved:
    """A checkpoint is in place. `stall_seconds` is how long training stood still for it, `bytes` what all
    ranks wrote."""

    step: int
    folder: str
    seconds: float
    stall_seconds: float
    bytes: int


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written; the older ones are as they were."""

    step: int
    message: str


@dataclass(frozen=True)
class ResumeCheckpoint:
    """What a run starts from: a checkpoint of which every byte was looked at, or None. Skipped ones come with
    the reason."""

    folder: str | None
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep`, and those whose step `keep_every` divides."""

    keep: int
    keep_every: int = 0


class HostCopies:
    """Copies of this rank's part of the state in host memory, in buffers that are used again for the next."""

    def __init__(self) -> None:
        self._buffers: State = {}

    def take(self, state: State) -> State:
        """Copy, and wait until the copies are there."""
        parts = own_parts(state)
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


def own_parts(state: State) -> State:
    """What of each tensor is on this rank."""
    return {
        key: (value.to_local() if isinstance(value, DTensor) else value).detach()
        for key, value in state.items()
    }


class Checkpointer:
    """Saves and loads a run's state. It talks over a gloo group of its own, so that it never mixes with
    training traffic."""

    def __init__(self, mesh: Mesh, background: bool = True) -> None:
        self.mesh, self.background = mesh, background
        self.peers = Peers.create(mesh)
        self._copies = HostCopies()
        self._outcomes: deque[Saved | SaveFailed] = deque()
        self.failed_in_a_row = 0
        """Saves that failed since the last whole one, as far as `outcomes` has told of them."""
        self._in_flight: threading.Thread | None = None
        self._committing, self._given_up = threading.Lock(), False
        self._checked: str | None = None

    def save(
        self, folder: str, state: State, manifest: Manifest, retention: Retention, wait: bool = True
    ) -> str:
        """Write a checkpoint, in the background unless it is to be waited for; where it is, or will be.

        What came of it is told by `outcomes`. A save that is waited for raises if it fails.
        """
        began = time.monotonic()
        self.finish()
        assert not self._given_up, "workers that broke up save no more"
        state = {**state, **random_state(self.mesh.worker.rank, self.mesh.device)}
        task = _Save(folder, manifest, retention, began, state)
        if self.background and not wait:
            numbers = self._copies.take(state)
            stall = time.monotonic() - began
            self._in_flight = threading.Thread(
                target=self._run_in_background, args=(task, numbers, stall), name="checkpoint", daemon=True
            )
            self._in_flight.start()
        else:
            outcome = self._run(task, own_parts(state), None)
            self._outcomes.append(outcome)
            if wait and isinstance(outcome, SaveFailed):
                raise RunFailed(outcome.message)
        return task.address

    def outcomes(self) -> list[Saved | SaveFailed]:
        """What came of saves since this was last asked."""
        outcomes = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        for outcome in outcomes:
            self.failed_in_a_row = self.failed_in_a_row + 1 if isinstance(outcome, SaveFailed) else 0
        return outcomes

    def finish(self, seconds: float | None = None) -> None:
        """Wait for the save in flight, if there is one, but no longer than this."""
        if self._in_flight is not None:
            self._in_flight.join(seconds)
            if not self._in_flight.is_alive():
                self._in_flight = None

    def abandon(self) -> None:
        """Give up what is in flight without waiting for peers that may be gone. It will not be committed from
        now on."""
        self._given_up = True
        if self._committing.acquire(timeout=PATIENCE):  # a commit under way is left to end: it is whole
            self._committing.release()
        self._in_flight = None

    def choose_checkpoint(self, resume: Resume) -> ResumeCheckpoint:
        """What to start from. Rank 0 lists the folder and everyone hears; then each reads a share of the
        files, to see that they are what was saved. A damaged checkpoint is skipped for an older one, unless
        it was asked for by its path.
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
            raise none_is_whole(resume.folder, [reason for _, reason in skipped])
        return ResumeCheckpoint(None)

    def newest_step(self, folder: str) -> int:
        """Return the newest step of the checkpoints in a folder, whole or not, as rank 0 sees them; -1 if
        there is none."""
        steps = _patiently(
            lambda: self._from_main(lambda: [step_of(address) for address in checkpoints(folder)])
        )
        return max(steps, default=-1)

    def load(self, folder: str, state: State, same_world: bool) -> None:
        """Fill `state` in place, once every byte is known to be what was saved. A checkpoint of weights only
        leaves the optimizer as it is when new.
        """
        if self._checked != folder:
            _patiently(lambda: self._checked_manifest(folder))
        rank, device = self.mesh.worker.rank, self.mesh.device
        opened: list[Contents] = []
        _patiently(
            lambda: self._together(lambda: opened.append(Contents.open(folder)))
        )  # by all or none: nobody waits in vain
        contents = opened[-1]
        # A run that moves from CPU to GPU finds no state of the GPU's generator.
        random = {
            key: value
            for key, value in random_state(rank, device).items()
            if same_world and key in contents.tensors
        }
        _patiently(
            lambda: self._together(
                lambda: _load({**_expected(state, contents, self.mesh.layout), **random}, contents)
            )
        )
        set_random_state(random, rank, device)

    def _run_in_background(self, task: _Save, numbers: State, stall: float) -> None:
        """A save in its thread: nothing that happens there may end the run."""
        try:
            self._outcomes.append(self._run(task, numbers, stall))
        except Exception as error:
            log.info("the save of step %d ended", task.manifest.step, exc_info=True)
            self._outcomes.append(task.failed(error))

    def _run(self, task: _Save, numbers: State, stall: float | None) -> Saved | SaveFailed:
        identity = save_id()
        where = storage(task.address)
        try:
            total_bytes = write_together(
                self.peers, where, task.state, numbers, task.manifest, identity, self._commit
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
        """The manifest of a checkpoint of which the ranks have read every byte, each its share of the
        files."""
        manifest = Manifest(**self._from_main(lambda: asdict(Contents.open(address).manifest)))
        share = sorted(manifest.files)[self.mesh.worker.rank :: self.mesh.worker.world]
        problems = self._together(lambda: list(damaged_files(storage(address), manifest, share)))
        for problem in (problem for part in problems for problem in part):
            raise UserError(f"{problem}. Remove {address} to resume from an older checkpoint.")
        self._checked = address
        return manifest

    def _from_main(self, action: Callable[[], Any]) -> Any:
        """Run on rank 0 alone; its result, or its failure, on every rank."""
        return self._together(action if self.mesh.is_main else lambda: None)[0]

    def _together(self, action: Callable[[], Any]) -> list[Any]:
        """Run on every rank and share the results; a failure of one is raised on all, so that none goes on or
        waits alone."""
        try:
            mine = {"value": action()}
        except Unreadable as error:
            mine = {"unreadable": str(error)}
        except UserError as error:
            mine = {"refused": str(error)}
        except Exception as error:  # of whatever kind the storage raises
            mine = {"unreadable": f"checkpoints cannot be read: {error}"}
        everyone = self.peers.all_gather(mine)
        for kind, raised in (("refused", UserError), ("unreadable", Unreadable)):
            for outcome in everyone:
                if kind in outcome:
                    raise raised(outcome[kind])
        return [outcome["value"] for outcome in everyone]


def _patiently(action: Callable[[], T]) -> T:
    """Try again while storage does not answer; if that is in vain, a new team may try later. All ranks fail
    and wait together."""
    for seconds in PAUSES:
        try:
            return action()
        except Unreadable as error:
            log.warning("%s; trying again in %g s", error, seconds)
            time.sleep(seconds)
    return action()


@dataclass(frozen=True)
class _Save:
    """One save: what, where, and since when."""

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
    """Remove what a failed save has written, and nothing else. A save may fail after its manifest is in
    place, when that is made durable: then it is there and whole, and stays.
    """
    where = storage(task.address)
    try:
        if where.size(MANIFEST) is not None and any(
            identity in name for name in read_manifest(task.address).files
        ):
            return
        for name in where.names():
            if identity in name:
                where.remove(name)
        if not where.names():
            storage(task.folder).remove(task.name)
    except Exception:
        log.info("remains of a failed save stay in %s", task.address, exc_info=True)


def _prune(task: _Save) -> None:
    """The new checkpoint is in place; that old ones cannot be removed does not change that."""
    try:
        prune(task.folder, task.retention.keep, task.retention.keep_every)
    except Exception as error:
        log.warning("old checkpoints in %s could not be removed: %s", task.folder, error)


def _expected(state: State, contents: Contents, layout: Layout) -> State:
    """What a checkpoint is to fill. Moments are left out, and zero, where it holds none: none at all, or not
    of weights that were frozen then; so are maxima of products in float8, all of them, where it does not hold
    each. What compression left out is dealt out anew where the layout is another, and PowerSGD's factors stay
    as they begin where there are none of this size."""
    _check_slots(state, contents)
    residuals = {key: value for key, value in state.items() if key.kind is StateKind.RESIDUAL}
    same = contents.manifest.layout == layout.model_dump(mode="json") and all(
        key in contents.tensors for key in residuals
    )
    if residuals and not same:
        deal_out(residuals, contents)
    known = {
        key
        for key, value in state.items()
        if key in contents.tensors and contents.tensors[key].shape == value.shape
    }
    state = {
        key: value
        for key, value in state.items()
        if (key not in residuals or same) and (key.kind is not StateKind.FACTOR or key in known)
    }
    missing = {key for key in state if key not in contents.tensors}
    looks_anew = any(key.is_float8_history for key in missing)
    new = {
        key: value
        for key, value in state.items()
        if (key.kind is StateKind.OPTIMIZER and key in missing) or (key.is_float8_history and looks_anew)
    }
    for part in own_parts(new).values():
        part.zero_()
    return {key: value for key, value in state.items() if key not in new}


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
    """Fill this rank's part of the state. Every rank plans what it reads by itself, of which Distributed
    Checkpoint warns."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        by_text = {str(key): value for key, value in state.items()}
        load_shards(by_text, storage_reader=DcpReader(contents), planner=load_planner(), no_dist=True)
    except (OSError, CheckpointException) as error:
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else [error]
        cause = causes[0][0] if isinstance(causes[0], tuple) else causes[0]
        kind = Unreadable if isinstance(cause, Unreadable) or is_temporary(cause) else UserError
        raise kind(f"{contents.address} could not be loaded: {cause}") from None
