"""How torch's Distributed Checkpoint reads our files: each rank its own part, whatever the mesh.

Its planner works out which stored pieces overlap what a rank holds now, which is all that it takes to save on
one mesh and load on another. What it would also do is talk to the other ranks and keep its plan in a file,
both by pickle: so every rank plans by itself, which needs no talk, and the files are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import DTYPES, Contents, StoredTensor


def load_planner() -> DefaultLoadPlanner:
    """The state is one flat dictionary of tensors already."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


@dataclass
class DcpReader(StorageReader):
    """Reads the parts of a checkpoint that this rank holds."""

    contents: Contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the list of tensors says, in Distributed Checkpoint's words."""
        return Metadata(
            state_dict_metadata={
                str(key): _described(stored) for key, stored in self.contents.tensors.items()
            }
        )

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
        stored = self.contents.tensors[StateKey.parse(item.storage_index.fqn)]
        offset = tuple(item.storage_index.offset or ())
        piece = next(piece for piece in stored.pieces if piece.offset == offset)
        begins, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        part = self.contents.read_rows(stored, piece, *((begins[0], lengths[0]) if begins else (0, 1)))
        for dim in range(1, len(begins)):
            part = part.narrow(dim, begins[dim], lengths[dim])
        return part

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader is used once."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
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
    chunks = [
        ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in stored.pieces
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[stored.dtype]), torch.Size(stored.shape), chunks
    )
