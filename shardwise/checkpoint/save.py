"""Save and load through torch's Distributed Checkpoint: each rank writes the shards it holds.

State is one flat dictionary from names to tensors: `model.NAME`, and `optimizer.NAME.MOMENT` for each parameter. Names are the
plain model's, never a rank's or a wrapper's, and sharded tensors are DTensors that know their place in the whole, so the same
dictionary can be loaded under another layout.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from shardwise.checkpoint.folder import Manifest, checksum, prune, read_manifest
from shardwise.errors import UserError
from shardwise.mesh import Mesh

T = TypeVar("T")
MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, buffers: Iterable[tuple[str, Tensor]] = ()
) -> dict[str, Tensor]:
    """Every tensor a run consists of, by name; moments that do not exist yet are made as zeros."""
    state: dict[str, Tensor] = {f"model.{name}": buffer for name, buffer in buffers}
    for name, parameter in named:
        state[f"model.{name}"] = parameter.detach()
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments.update({moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS})
        state.update({f"optimizer.{name}.{key}": value for key, value in moments.items()})
    return state


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The random generators of this rank."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


class Checkpointer:
    """Saves and loads a run's state. It talks over a gloo group of its own, so that it never mixes with training traffic."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.group = dist.new_group(backend="gloo") if mesh.worker.world > 1 else None

    def save(self, run: Path, state: dict[str, Tensor], keep: int, manifest: Callable[[dict[str, Any]], Manifest]) -> Path:
        """Write aside, checksum, then rename into place; an error anywhere leaves the older checkpoints as they were."""
        step = manifest({}).step
        target = run / "checkpoints" / f"step-{step}"
        aside = run / "checkpoints" / f".step-{step}.writing"
        try:
            self._on_main(lambda: _fresh(aside))
            with _quiet():
                save_shards(
                    {**state, **random_state(self.mesh.worker.rank, self.mesh.device)},
                    storage_writer=FileSystemWriter(aside, sync_files=True),
                    process_group=self.group,
                    no_dist=self.group is None,
                )
            parts = self._together(lambda: self._own_files(aside))
            files = {name: facts for part in parts for name, facts in part.items()}
            self._on_main(lambda: _commit(manifest(files), aside, target))
        except (OSError, CheckpointException) as error:
            if self.mesh.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise UserError(f"the checkpoint of step {step} could not be written to {aside.parent}: {_cause(error)}") from None
        self._on_main(lambda: prune(run, keep))
        return target

    def load(self, folder: Path, state: dict[str, Tensor], same_world: bool) -> None:
        """Fill `state` in place, once every byte is known to be what was saved."""
        self._together(lambda: self._check_files(folder))
        rank, device = self.mesh.worker.rank, self.mesh.device
        held = _names(folder)  # a run that moves from CPU to GPU finds no state of the GPU's generator
        random = {name: value for name, value in random_state(rank, device).items() if same_world and name in held}
        try:
            with _quiet():
                load_shards(
                    {**state, **random},
                    storage_reader=FileSystemReader(folder),
                    process_group=self.group,
                    no_dist=self.group is None,
                )
        except (OSError, CheckpointException) as error:
            raise UserError(f"{folder} could not be loaded: {_cause(error)}") from None
        if f"random.{rank}.cpu" in random:
            torch.set_rng_state(random[f"random.{rank}.cpu"])
        if f"random.{rank}.cuda" in random:
            torch.cuda.set_rng_state(random[f"random.{rank}.cuda"], device)

    def _own_files(self, folder: Path) -> dict[str, dict[str, int]]:
        """Checksums of what this rank wrote; the main rank also answers for the metadata."""
        mine = sorted(folder.glob(f"__{self.mesh.worker.rank}_*"))
        if self.mesh.is_main:
            mine.append(folder / ".metadata")
        return {path.name: checksum(path) for path in mine}

    def _check_files(self, folder: Path) -> None:
        """Compare checksums, each rank for its share of the files."""
        files = read_manifest(folder).files
        for name in sorted(files)[self.mesh.worker.rank :: self.mesh.worker.world]:
            if checksum(folder / name) != files[name]:
                raise UserError(f"{folder / name} is damaged. Remove {folder} to resume from an older checkpoint.")

    def _on_main(self, action: Callable[[], None]) -> None:
        self._together(action if self.mesh.is_main else lambda: None)

    def _together(self, action: Callable[[], T]) -> list[T]:
        """Run on every rank and share the results; a failure of one is raised on all, so that none goes on or waits alone."""
        try:
            mine: T | Exception = action()
        except (OSError, UserError) as error:
            mine = error
        everyone: list[Any] = [mine]
        if self.group is not None:
            everyone = [None] * self.mesh.worker.world
            dist.all_gather_object(everyone, mine, group=self.group)
        for result in everyone:
            if isinstance(result, Exception):
                raise result
        return everyone


def _names(folder: Path) -> set[str]:
    """What a checkpoint holds; nothing where its metadata is damaged, of which the load itself will tell."""
    try:
        return set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception:
        return set()


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _commit(manifest: Manifest, aside: Path, target: Path) -> None:
    manifest.write(aside)
    _flush(aside / "checkpoint.json")
    _flush(aside)
    if target.exists():  # the same step saved again, after a resume
        target.rename(aside.with_suffix(".replaced"))
    aside.rename(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """The first real cause inside a Distributed Checkpoint error."""
    if isinstance(error, CheckpointException):
        causes = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
        return str(causes[0]) if causes else str(error)
    return str(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Distributed Checkpoint warns of things that are as we mean them (a single process, a private group)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
