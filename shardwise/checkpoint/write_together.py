"""All ranks write one checkpoint together: each rank writes a file, and rank 0 commits.

torch's Distributed Checkpoint tells which part of a tensor a rank holds, whatever its placements; a part that
several ranks hold is written by one of them. Its exchanges unpickle data from the network, so our own are
used (JSON, comm/peers.py):

1. Each rank tells rank 0 what it holds, and rank 0 answers what to write.
2. Each rank writes, and tells rank 0 what it has written. Rank 0 commits.
3. Rank 0 sends the result to all ranks.

Each exchange carries failures too, so that a save fails on all ranks or on none.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from shardwise.checkpoint.folder import Manifest, WrittenFile
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.storage import Storage
from shardwise.checkpoint.tensor_files import (
    DTYPES,
    Files,
    Shape,
    StoredTensor,
    TensorPiece,
    commit,
    data_file,
)
from shardwise.comm import Peers

log = logging.getLogger("shardwise")

Guard = Callable[[Callable[[], Manifest]], Manifest]
"""Function that runs a commit, or raises an error."""
Outcome = dict[str, Any]
"""The result of a rank's part of a save: {"value": …} or {"error": "reason"}."""


class SaveRefused(Exception):
    """Some rank could not do its part of a save. The message is that rank's."""


def write_together(
    peers: Peers,
    where: Storage,
    state: Mapping[StateKey, Tensor],
    parts: Mapping[StateKey, Tensor],
    manifest: Manifest,
    identity: str,
    guard: Guard,
) -> int:
    """Write a checkpoint and return its bytes once it is complete. Every rank calls this at the same time.

    `state` has the tensors with their placements, and `parts` this rank's part of each. All ranks use the
    `identity` that rank 0 passes. `guard` runs the commit, or refuses it if the save has been abandoned.
    """
    local = held_pieces(state)
    reports = peers.gather([piece.to_json() for piece in local])
    held = [] if reports is None else _pieces_of_ranks(reports)
    shares = None if reports is None else _attempt(lambda: _prepare(where, held))
    assigned = peers.scatter(None if shares is None else _for_each_rank(shares, identity, peers.world))
    identity, indices = _value(assigned)
    file = f"rank-{peers.rank}-{identity}.data"
    results = peers.gather(_attempt(lambda: _write(where, file, _select(local, indices), parts)))
    outcome = None
    if shares is not None and results is not None:
        written = list(map(_select, held, shares["value"]))
        outcome = _attempt(
            lambda: guard(lambda: _commit(where, manifest, written, results, identity)).total_bytes
        )
    return int(_value(peers.broadcast(outcome, 0)))


def _pieces_of_ranks(reports: Sequence[Sequence[list[Any]]]) -> list[list[HeldPiece]]:
    return [[HeldPiece.from_json(piece) for piece in pieces] for pieces in reports]


def _select(pieces: Sequence[HeldPiece], indices: Sequence[int]) -> list[HeldPiece]:
    return [pieces[index] for index in indices]


def _attempt(action: Callable[[], object]) -> Outcome:
    try:
        return {"value": action()}
    except Exception as error:  # of whatever kind the storage raises
        log.info("a part of a save failed", exc_info=True)
        return {"error": str(error) or type(error).__name__}


def _value(outcome: Outcome) -> Any:
    if "error" in outcome:
        raise SaveRefused(outcome["error"])
    return outcome["value"]


def _prepare(where: Storage, held: Sequence[Sequence[HeldPiece]]) -> list[list[int]]:
    where.make()
    return shares_of_ranks(held)


def _for_each_rank(shares: Outcome, identity: str, world: int) -> list[Outcome]:
    if "error" in shares:
        return [shares] * world
    return [{"value": [identity, share]} for share in shares["value"]]


def _commit(
    where: Storage,
    manifest: Manifest,
    shares: Sequence[Sequence[HeldPiece]],
    results: Sequence[Outcome],
    identity: str,
) -> Manifest:
    """Commit the checkpoint on rank 0, when the files of all ranks are durable."""
    tensors, files = _listed(shares, [_value(result) for result in results])
    return commit(where, manifest, tensors, files, identity)


@dataclass(frozen=True)
class HeldPiece:
    """A part of a tensor. Ranks that hold the same part have equal values of this class."""

    key: StateKey
    dtype: str
    whole: Shape
    offset: Shape
    shape: Shape

    @property
    def bytes(self) -> int:
        """Size of the piece in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def to_json(self) -> list[object]:
        """Return the piece as JSON, which is sent to rank 0."""
        return [str(self.key), self.dtype, self.whole, self.offset, self.shape]

    @classmethod
    def from_json(cls, value: list[Any]) -> HeldPiece:
        """Return the piece that received JSON stands for."""
        key, dtype, whole, offset, shape = value
        return cls(StateKey.parse(key), dtype, tuple(whole), tuple(offset), tuple(shape))


def held_pieces(state: Mapping[StateKey, Tensor]) -> list[HeldPiece]:
    """Return the part of each tensor that this rank holds. A rank that is not on a tensor's mesh holds
    nothing of it."""
    pieces, by_text = [], {str(key): tensor for key, tensor in state.items()}
    for item in create_default_local_save_plan(by_text, is_coordinator=True).items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is no tensor"
        dtype = str(data.properties.dtype).removeprefix("torch.")
        offset, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        pieces.append(HeldPiece(StateKey.parse(item.index.fqn), dtype, tuple(data.size), offset, shape))
    return pieces


def shares_of_ranks(held: Sequence[Sequence[HeldPiece]]) -> list[list[int]]:
    """Return the pieces that each rank writes, as indices into those that it holds. A piece that several
    ranks hold goes to the one with the fewest bytes so far."""
    holders: dict[HeldPiece, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        for index, piece in enumerate(pieces):
            holders[piece].append((rank, index))
    bytes_of_rank = [0] * len(held)
    shares: list[list[int]] = [[] for _ in held]
    for piece, places in holders.items():
        rank, index = min(places, key=lambda place: bytes_of_rank[place[0]])
        bytes_of_rank[rank] += piece.bytes
        shares[rank].append(index)
    return shares


class Written(TypedDict):
    """The file that a rank has written, and where each piece begins in it."""

    file: str
    size_and_crc: WrittenFile
    starts: list[int]


def _write(
    where: Storage, file: str, pieces: Sequence[HeldPiece], parts: Mapping[StateKey, Tensor]
) -> Written | None:
    """Write these pieces, whose values are in `parts`, into one file; None: there are no pieces."""
    if not pieces:
        return None
    with data_file(where, file) as data:
        starts = [data.append(parts[piece.key]) for piece in pieces]
        size_and_crc = data.size_and_crc()
    return {"file": file, "size_and_crc": size_and_crc, "starts": starts}


def _listed(
    shares: Sequence[Sequence[HeldPiece]], written: Sequence[Written | None]
) -> tuple[dict[StateKey, StoredTensor], Files]:
    """Return the list of the checkpoint's tensors, and its files, from what every rank has written."""
    pieces: dict[StateKey, list[TensorPiece]] = defaultdict(list)
    wholes: dict[StateKey, HeldPiece] = {}
    files: Files = {}
    for share, result in zip(shares, written, strict=True):
        if result is None:
            continue
        files[result["file"]] = result["size_and_crc"]
        for piece, start in zip(share, result["starts"], strict=True):
            wholes[piece.key] = piece
            if 0 not in piece.shape:  # shards past the end of a short dim are empty
                pieces[piece.key].append(TensorPiece(piece.offset, piece.shape, result["file"], start))
    tensors = {
        key: StoredTensor(
            whole.dtype, whole.whole, tuple(sorted(pieces[key], key=lambda piece: piece.offset))
        )
        for key, whole in sorted(wholes.items(), key=lambda pair: str(pair[0]))
    }
    return tensors, files
