"""What a proof trains on: every other row is the job's own, and those between are made to reach what text may
never.

Text of letters is bytes below 128, so the upper half of a vocabulary never occurs in it; one long file has no
end of a document in any sequence. A fault there would stay unseen. A made row therefore has

- ids from every tensor device's part of the vocabulary, among them the first and the last of each, as inputs
  and as targets; the last id of all is frequent, so that its gradient is a sum of many;
- where attention keeps to documents (`data.reset_attention`): in turn a document for each token of the first
  half and one for the rest, a document of the whole sequence, and documents of any length. The last token of
  each has no target;
- where the data are conversations: targets without a loss all over, and now and then a row without any that
  has one.

A row is a function of (seed, its place in the stream of samples), so every layout trains on the same. Which
rows are made changes from step to step, so that a rank which has one row a step gets both kinds. Held-out
rows are mixed in the same way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data import Dataset, Rows
from shardwise.data.dataset import IGNORED, rows_of
from shardwise.plan.chunks import largest_part
from shardwise.verify.proof_job import ProofJob

FREQUENT = 4
"""One token in so many is the frequent one."""
UNLEARNT = 3
"""Of conversations, one target in so many has no loss."""
_TRAINING, _HELD_OUT = 0, 1


@dataclass(frozen=True)
class ProofDataset(Dataset):
    """The job's data, with made rows between its own."""

    ids: int
    """Of the model: from 0 to one below this."""
    parts: int
    """Into which tensor devices cut the ids."""
    batch: int
    """Sequences of a step."""

    @classmethod
    def of(cls, proof: ProofJob, dataset: Dataset | None = None) -> ProofDataset:
        """For a proof, on the data of its job."""
        own = dataset or Dataset.open(proof.config.data, proof.config.train.seed)
        batch = proof.config.train.global_batch
        return cls(
            own.streams, own.sequence_length, own.reset_attention, own.seed, proof.ids, proof.parts, batch
        )

    def sequences(self, first: int, count: int) -> Rows:
        """Training sequences as a run sees them, of which the made ones are replaced."""
        own = super().sequences(first, count)
        return self._replaced(
            own, {row: first + row for row in range(count) if self.is_made(first + row)}, _TRAINING
        )

    def held_out_rows(self, start: int, count: int) -> Rows:
        """Held-out sequences, every other of them made."""
        own = super().held_out_rows(start, count)
        return self._replaced(
            own, {row: start + row for row in range(count) if self.held_out_is_made(start + row)}, _HELD_OUT
        )

    def is_made(self, place: int) -> bool:
        """Whether the row at this place of the stream is made: in turn by step, and by row within it."""
        return sum(divmod(place, self.batch)) % 2 == 0

    def held_out_is_made(self, row: int) -> bool:
        """Whether a held-out row is."""
        return row % 2 == 0

    def edges(self) -> list[range]:
        """The ids of each part, where it has any."""
        rows = largest_part(self.ids, self.parts)
        return [
            part for first in range(0, self.ids, rows) if (part := range(first, min(self.ids, first + rows)))
        ]

    def _replaced(self, own: Rows, places: dict[int, int], purpose: int) -> Rows:
        for row, place in places.items():
            made = self._made(place, purpose)
            own.inputs[row], own.targets[row] = made.inputs[0], made.targets[0]
            if own.documents is not None and made.documents is not None:
                own.documents[row] = made.documents[0]
        return own

    def _made(self, place: int, purpose: int) -> Rows:
        """The row at a place of the stream: (1, sequence_length)."""
        length, draw = self.sequence_length, np.random.default_rng((self.seed % 2**63, purpose, place))
        parts = self.edges()
        chosen = [parts[index] for index in draw.integers(len(parts), size=length + 1)]
        window = np.asarray([draw.integers(part.start, part.stop) for part in chosen])
        window[draw.integers(FREQUENT, size=length + 1) == 0] = self.ids - 1
        edges = np.roll([end for part in parts for end in (part[0], part[-1])], -place)[: max(0, length - 1)]
        window[1 + draw.permutation(length - 1)[: len(edges)]] = (
            edges  # neither first nor last: each is an input and a target
        )
        ends = _ends(length, place // 2, draw) if self.reset_attention else np.zeros(length, dtype=bool)
        learnt = np.ones(length + 1, dtype=bool)
        if any(stream.tokens.index.holds_answers for stream in self.streams):
            learnt = draw.integers(UNLEARNT, size=length + 1) > 0 if place % 5 else ~learnt
        return rows_of(window[None], ends[None], self.reset_attention, learnt[None])


def _ends(length: int, turn: int, draw: np.random.Generator) -> NDArray[np.bool_]:
    """Where documents end in a row; at least its last quarter belongs to one that goes on."""
    ends = np.zeros(length, dtype=bool)
    if turn % 3 == 0:
        ends[: length // 2] = True
    elif turn % 3 == 2:
        shared = length - max(1, length // 4)
        ends[:shared] = draw.integers(3, size=shared) == 0
    return ends


@dataclass(frozen=True)
class Reached:
    """What the steps of a proof came by."""

    vocabulary_parts: tuple[int, int]
    """Those whose first and last id were inputs and targets, of how many."""
    positions: tuple[int, int]
    """Those with a target, of how many."""
    documents: tuple[int, int] | None
    """Tokens of the shortest and of the longest in a row; None: attention does not keep to documents."""
    ignored: int
    """Targets that carry no loss."""
    chunks: int | None
    """Of the loss, for a micro-batch; None: a user's own module computes it."""
    idle_experts: dict[str, list[int]]
    """By layer, those that no token chose in any step."""
    experts: int

    def to_json(self) -> dict[str, Any]:
        """As --json shows it."""
        return asdict(self)

    def sentence(self) -> str:
        """For people."""
        said = [
            f"the first and last ids of {_of(self.vocabulary_parts)} vocabulary shards",
            f"{_of(self.positions)} positions",
        ]
        if self.chunks is not None:
            said.append(f"{self.chunks} chunks of the loss")
        if self.documents is not None:
            said += [
                f"documents of {self.documents[0]} to {self.documents[1]} tokens",
                f"{self.ignored} targets without a loss",
            ]
        if self.experts:
            idle = "; ".join(
                f"{layer} {', '.join(map(str, experts))}" for layer, experts in self.idle_experts.items()
            )
            said.append(f"all but these experts: {idle}" if idle else "every expert")
        return f"reached: {', '.join(said)}"


def _of(pair: tuple[int, int]) -> str:
    return f"{pair[0]} of {pair[1]}"


def what_is_reached(proof: ProofJob, dataset: ProofDataset, idle_experts: dict[str, list[int]]) -> Reached:
    """By all steps of a proof together."""
    rows = dataset.sequences(0, proof.steps * dataset.batch)
    inputs, targets = rows.inputs, rows.targets
    both = set(np.unique(inputs).tolist()) & set(np.unique(targets).tolist())
    parts, length = dataset.edges(), dataset.sequence_length
    lengths = (
        [] if rows.documents is None else [np.unique(row, return_counts=True)[1] for row in rows.documents]
    )
    tokens = proof.plan.micro_batch * length // proof.plan.layout.context
    return Reached(
        vocabulary_parts=(sum({part[0], part[-1]} <= both for part in parts), len(parts)),
        positions=(int((targets != IGNORED).any(0).sum()), length),
        documents=(min(int(row.min()) for row in lengths), max(int(row.max()) for row in lengths))
        if lengths
        else None,
        ignored=int((targets == IGNORED).sum()),
        chunks=None
        if proof.config.model.module is not None or proof.chunk is None
        else -(-tokens // proof.chunk),
        idle_experts=idle_experts,
        experts=proof.config.model.experts,
    )
