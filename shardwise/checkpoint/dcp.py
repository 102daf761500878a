"""How torch's Distributed Checkpoint writes and reads our files: each rank its own part, whatever the mesh.

Distributed Checkpoint plans. It asks every rank which parts of which tensors it holds, lets one rank write what several hold,
and when loading works out which stored pieces overlap what a rank holds now. That is all that it takes to save on one mesh and
load on another. What it leaves to us is storage, and its own storage keeps the plan in a pickle; ours is JSON.

A save is one call, and its two exchanges are the only ones: the plans, with which rank 0 hands out the save's id, and the
results, on which rank 0 commits. A rank that fails says so in the same exchange, so that all ranks learn the same outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.contents import DTYPES, Contents, Files, StoredTensor, TensorPiece, commit, data_file, save_id
from shardwise.checkpoint.folder import Manifest
from shardwise.checkpoint.storage import storage


class DcpSavePlanner(DefaultSavePlanner):
    """Plans with the tensors that know their place in the whole, and takes the numbers from copies that no step changes."""

    def __init__(self, numbers: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._numbers = numbers

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """This rank's part of a tensor."""
        return self._numbers[index.fqn]


def load_planner() -> DefaultLoadPlanner:
    """The state is one flat dictionary of tensors already."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class _Written(NamedTuple):
    """Where a piece went, and what the whole file came to."""

    file: str
    start: int
    size_and_crc: dict[str, int]


Commit = Callable[[Callable[[], Manifest]], Manifest]


@dataclass
class DcpWriter(StorageWriter):
    """Writes one checkpoint. `guard` runs the commit, or refuses it where the save was given up meanwhile."""

    address: str
    rank: int
    manifest: Manifest
    guard: Commit
    identity: str | None = None
    """The id of this save, on rank 0, once there is one."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 makes the folder, and tells everyone the id."""
        storage(self.address).make()
        self.identity = save_id()
        return [replace(plan, storage_data=self.identity) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All that is this rank's to write, into one file."""
        results: list[WriteResult] = []
        if plan.items:
            file = f"rank-{self.rank}-{plan.storage_data}.data"
            with data_file(storage(self.address), file) as data:
                tensors = [planner.resolve_data(item) for item in plan.items]
                starts = [data.append(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
                size_and_crc = data.size_and_crc()
            results = [
                WriteResult(item.index, 0, _Written(file, start, size_and_crc))
                for item, start in zip(plan.items, starts, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, when every rank's file is durable."""
        files: Files = {}
        pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        shapes = _chunk_shapes(metadata)
        for result in (result for part in results for result in part):
            written: _Written = result.storage_data
            files[written.file] = written.size_and_crc
            offset = tuple(result.index.offset or ())
            shape = shapes[result.index.fqn, offset]
            if 0 not in shape:  # shards past the end of a short dim are empty
                pieces[result.index.fqn].append(TensorPiece(offset, shape, written.file, written.start))
        tensors = {name: _stored(described, pieces[name]) for name, described in sorted(metadata.state_dict_metadata.items())}
        identity = self.identity
        assert identity, "rank 0 planned before it finishes"
        self.manifest = self.guard(lambda: commit(storage(self.address), self.manifest, tensors, files, identity))

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the constructor was given everything."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The default plan, unchanged."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Addresses are given to the writer itself."""
        return False


def _chunk_shapes(metadata: Metadata) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    shapes = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor"
        shapes.update({(name, tuple(chunk.offsets)): tuple(chunk.sizes) for chunk in tensor.chunks})
    return shapes


def _stored(tensor: Any, pieces: list[TensorPiece]) -> StoredTensor:
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return StoredTensor(dtype, tuple(tensor.size), tuple(sorted(pieces, key=lambda piece: piece.offset)))


@dataclass
class DcpReader(StorageReader):
    """Reads the parts of a checkpoint that this rank holds."""

    contents: Contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the list of tensors says, in Distributed Checkpoint's words."""
        return Metadata(state_dict_metadata={name: _described(stored) for name, stored in self.contents.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, straight to where it belongs."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _part(self, item: ReadItem) -> Tensor:
        """The overlap of a stored piece with what is wanted: whole rows are read, and the rest cut off."""
        stored = self.contents.tensors[item.storage_index.fqn]
        offset = tuple(item.storage_index.offset or ())
        piece = next(piece for piece in stored.pieces if piece.offset == offset)
        begins, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        part = self.contents.read_rows(stored, piece, *((begins[0], lengths[0]) if begins else (0, 1)))
        for dim in range(1, len(begins)):
            part = part.narrow(dim, begins[dim], lengths[dim])
        return part

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader is used once."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the constructor was given everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The default plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The default plan, unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Addresses are given to the reader itself."""
        return False


def _described(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in stored.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[stored.dtype]), torch.Size(stored.shape), chunks)
