"""Save while training goes on, and load on any mesh.

State is one flat dictionary from names to tensors: `model.NAME`, and `optimizer.NAME.MOMENT` for each
parameter. Names are the plain model's, never a rank's or a wrapper's, and sharded tensors are DTensors that
know their place in the whole, so the same dictionary can be loaded under another layout.

A save in the background costs training one copy of the state to host memory, at the speed of that memory; the
buffers are kept for the next save, and page-locked where the state is on a GPU. A thread then writes, fsyncs
and commits while steps go on (as CheckFreq does: Mohan et al., FAST 2021). It costs host memory the size of
this rank's state. A save that is waited for copies nothing. At most one is in flight: the next one waits for
it, and that wait counts as stall as well.

A save that fails leaves the older checkpoints as they were. All ranks learn of it, because each exchange of a
save carries failures too (checkpoint/write.py); a rank that dies breaks the connection, which ends the
exchange for the others.
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
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.contents import Contents, damaged_files, is_float8_maxima, is_moment, save_id
from shardwise.checkpoint.dcp import DcpReader, load_planner
from shardwise.checkpoint.folder import (
    MANIFEST,
    Manifest,
    check_same_model,
    checkpoint_folder,
    checkpoints,
    none_is_whole,
    prune,
    read_manifest,
    resume_candidates,
    step_of,
)
from shardwise.checkpoint.residuals import FACTOR, RESIDUAL, deal_out
from shardwise.checkpoint.storage import storage
from shardwise.checkpoint.write import SaveRefused, write_together
from shardwise.comm import Peers
from shardwise.config import Config, Layout
from shardwise.errors import RunFailed, Unreadable, UserError
from shardwise.files import is_temporary
from shardwise.mesh import Mesh

State = dict[str, Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")
PATIENCE = 1.0
"""Seconds that giving up a save may take."""
PAUSES = (1.0, 4.0, 15.0)
"""Seconds between attempts to read a checkpoint from storage that does not answer."""
T = TypeVar("T")

log = logging.getLogger("shardwise")


def state_of(
    named: Iterable[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    buffers: Iterable[tuple[str, Tensor]] = (),
) -> State:
    """Every tensor a run consists of, by name; moments that do not exist yet are made as zeros. Frozen
    weights have none."""
    state: State = {f"model.{name}": buffer for name, buffer in buffers}
    for name, parameter in named:
        state[f"model.{name}"] = parameter.detach()
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments.update({moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS})
        state.update({f"optimizer.{name}.{key}": value for key, value in moments.items()})
    return state


def random_state(rank: int, device: torch.device) -> State:
    """The random generators of this rank."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: State, rank: int, device: torch.device) -> None:
    """Put the random generators of this rank where they were, as far as the state tells."""
    if f"random.{rank}.cpu" in state:
        torch.set_rng_state(state[f"random.{rank}.cpu"])
    if f"random.{rank}.cuda" in state:
        torch.cuda.set_rng_state(state[f"random.{rank}.cuda"], device)


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
        for name, part in parts.items():
            self._buffer(name, part).copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts.values()):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in parts}

    def _buffer(self, name: str, part: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
            buffer = self._buffers[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return buffer


def own_parts(state: State) -> State:
    """What of each tensor is on this rank."""
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach()
        for name, value in state.items()
    }


class Checkpointer:
    """Saves and loads a run's state. It talks over a gloo group of its own, so that it never mixes with
    training traffic."""

    def __init__(self, mesh: Mesh, background: bool = True) -> None:
        self.mesh, self.background = mesh, background
        self.peers = Peers.meet(mesh)
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

    def choose_checkpoint(self, config: Config) -> ResumeCheckpoint:
        """What to start from. Rank 0 lists the folder and everyone hears; then each reads a share of the
        files, to see that they are what was saved. A damaged checkpoint is skipped for an older one, unless
        it was asked for by its path.
        """
        candidates = _patiently(lambda: self._from_main(lambda: resume_candidates(config)))
        skipped: list[tuple[str, str]] = []
        for address in candidates:
            try:
                manifest = _patiently(partial(self._checked_manifest, address))
            except Unreadable:  # it may be whole, and newer than all others
                raise
            except UserError as error:
                if config.checkpoint.resume != "auto":
                    raise
                skipped.append((address, str(error)))
                continue
            check_same_model(address, manifest, config.model)
            return ResumeCheckpoint(address, tuple(skipped))
        if skipped:
            raise none_is_whole(checkpoint_folder(config), [reason for _, reason in skipped])
        return ResumeCheckpoint(None)

    def newest_step(self, config: Config) -> int:
        """Of the checkpoints in the run's folder, whole or not, as rank 0 sees them; -1 if there is none."""
        steps = _patiently(
            lambda: self._from_main(
                lambda: [step_of(address) for address in checkpoints(checkpoint_folder(config))]
            )
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
            name: value
            for name, value in random_state(rank, device).items()
            if same_world and name in contents.tensors
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
        everyone = self.peers.from_everyone(mine)
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
    residuals = {name: value for name, value in state.items() if name.startswith(RESIDUAL)}
    same = contents.manifest.layout == layout.model_dump(mode="json") and all(
        name in contents.tensors for name in residuals
    )
    if residuals and not same:
        deal_out(residuals, contents)
    known = {
        name
        for name, value in state.items()
        if name in contents.tensors and contents.tensors[name].shape == value.shape
    }
    state = {
        name: value
        for name, value in state.items()
        if (name not in residuals or same) and (not name.startswith(FACTOR) or name in known)
    }
    missing = {name for name in state if name not in contents.tensors}
    looks_anew = any(map(is_float8_maxima, missing))
    new = {
        name: value
        for name, value in state.items()
        if (is_moment(name) and name in missing) or (is_float8_maxima(name) and looks_anew)
    }
    for part in own_parts(new).values():
        part.zero_()
    return {name: value for name, value in state.items() if name not in new}


def _load(state: State, contents: Contents) -> None:
    """Fill this rank's part of the state. Every rank plans what it reads by itself, of which Distributed
    Checkpoint warns."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        load_shards(state, storage_reader=DcpReader(contents), planner=load_planner(), no_dist=True)
    except (OSError, CheckpointException) as error:
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else [error]
        cause = causes[0][0] if isinstance(causes[0], tuple) else causes[0]
        kind = Unreadable if isinstance(cause, Unreadable) or is_temporary(cause) else UserError
        raise kind(f"{contents.address} could not be loaded: {cause}") from None
