"""Let torch's Distributed Checkpoint read our files: each rank reads its part, whatever the mesh.

Its planner computes which stored pieces overlap with what a rank holds now, which is all that is needed to
save on one mesh and load on another. It would also exchange plans with other ranks and store them in a file,
both by pickle. So every rank plans by itself, without communication, and the files are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Return a planner for a state that is a flat dictionary of tensors."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


@dataclass
class DcpReader(StorageReader):
    """Reads the parts of a checkpoint that this rank holds."""

    contents: Contents

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the list of tensors in the types of Distributed Checkpoint."""
        return Metadata(
            state_dict_metadata={
                str(key): _described(stored) for key, stored in self.contents.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts in the plan directly into their tensors."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _part(self, item: ReadItem) -> Tensor:
        """Return the overlap of a stored piece with the wanted part: whole rows are read, and then cut."""
        stored = self.contents.tensors[StateKey.parse(item.storage_index.fqn)]
        offset = tuple(item.storage_index.offset or ())
        piece = next(piece for piece in stored.pieces if piece.offset == offset)
        begins, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        part = self.contents.read_rows(stored, piece, *((begins[0], lengths[0]) if begins else (0, 1)))
        for dim in range(1, len(begins)):
            part = part.narrow(dim, begins[dim], lengths[dim])
        return part

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: a reader is used once."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Do nothing: the constructor has set everything up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the default plan of this rank, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the default plans of all ranks, unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return False: the constructor is given the checkpoint, so no id is valid."""
        return False


def _described(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in stored.pieces
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[stored.dtype]), torch.Size(stored.shape), chunks
    )
