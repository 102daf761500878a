"""The rows that a proof trains on: every other row is the job's own, and those between are generated to reach
cases that text may never reach.

Text of letters consists of bytes below 128, so the upper half of a vocabulary never occurs in it; one long
file has no end of a document in any sequence. A fault there would not be seen. So a generated row has

- ids from every tensor device's part of the vocabulary, among them the first and the last of each part, as
  inputs and as targets; the last id of all is frequent, so that its gradient is a sum of many;
- where attention does not cross documents (`data.reset_attention`), in turn: one document per token in the
  first half and one for the rest; one document; and documents of any length. The last token of each document
  has no target;
- where the data are conversations: targets without a loss everywhere, and now and then a row in which no
  target has a loss.

A row is a function of the seed and its place in the stream of samples, so every layout trains on the same
rows. Which rows are generated changes from step to step, so that a rank which has one row per step gets both
kinds. Held-out rows are mixed in the same way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.data import Dataset, Rows
from shardwise.data.dataset import IGNORED, rows_of
from shardwise.files import Json
from shardwise.plans.chunks import largest_part
from shardwise.plurals import counted
from shardwise.proof.proof_job import ProofJob

FREQUENT = 4
"""One token in this many is the frequent one."""
UNLEARNT = 3
"""In conversations, one target in this many has no loss."""
_TRAINING, _HELD_OUT = 0, 1


@dataclass(frozen=True)
class ProofDataset(Dataset):
    """The job's data, with generated rows between its own."""

    ids: int
    """Number of token ids of the model."""
    parts: int
    """Number of parts into which tensor devices split the ids."""
    batch: int
    """Number of sequences in a step."""

    @classmethod
    def of(cls, proof: ProofJob, dataset: Dataset | None = None) -> ProofDataset:
        """Return the dataset of a proof, based on the data of its job."""
        data = dataset or Dataset.open(proof.config.data, proof.config.train.seed)
        return cls(
            data.streams,
            data.sequence_length,
            data.reset_attention,
            data.seed,
            ids=proof.ids,
            parts=proof.parts,
            batch=proof.config.train.global_batch,
        )

    def sequences(self, first: int, count: int) -> Rows:
        """Return training sequences as a run reads them, with every other one replaced by a generated row."""
        places = {row: first + row for row in range(count) if self.is_made(first + row)}
        return self._replaced(super().sequences(first, count), places, _TRAINING)

    def held_out_rows(self, start: int, count: int) -> Rows:
        """Return held-out sequences, with every other one replaced by a generated row."""
        places = {row: start + row for row in range(count) if self.held_out_is_made(start + row)}
        return self._replaced(super().held_out_rows(start, count), places, _HELD_OUT)

    def is_made(self, place: int) -> bool:
        """Return whether the row at this place of the stream is generated: every other row, beginning with
        the other one in each next step."""
        return sum(divmod(place, self.batch)) % 2 == 0

    def held_out_is_made(self, row: int) -> bool:
        """Return whether this held-out row is generated."""
        return row % 2 == 0

    def edges(self) -> list[range]:
        """Return the ids of each part that is not empty."""
        rows = largest_part(self.ids, self.parts)
        return [range(first, min(self.ids, first + rows)) for first in range(0, self.ids, rows)]

    def _replaced(self, rows: Rows, places: dict[int, int], purpose: int) -> Rows:
        """Return the rows, those of `places` replaced by the generated row of their place."""
        for row, place in places.items():
            made = self._made(place, purpose)
            rows.inputs[row], rows.targets[row] = made.inputs[0], made.targets[0]
            if rows.documents is not None and made.documents is not None:
                rows.documents[row] = made.documents[0]
        return rows

    def _made(self, place: int, purpose: int) -> Rows:
        """Return the generated row at a place of the stream, of shape (1, sequence_length)."""
        length, draw = self.sequence_length, np.random.default_rng((self.seed % 2**63, purpose, place))
        parts = self.edges()
        chosen = [parts[index] for index in draw.integers(len(parts), size=length + 1)]
        window = np.asarray([draw.integers(part.start, part.stop) for part in chosen])
        window[draw.integers(FREQUENT, size=length + 1) == 0] = self.ids - 1
        edges = np.roll([end for part in parts for end in (part[0], part[-1])], -place)[: max(0, length - 1)]
        # Neither the first nor the last token, so that each edge is an input and a target.
        window[1 + draw.permutation(length - 1)[: len(edges)]] = edges
        ends = _ends(length, place // 2, draw) if self.reset_attention else np.zeros(length, dtype=bool)
        learnt = np.ones(length + 1, dtype=bool)
        if any(stream.tokens.index.holds_answers for stream in self.streams):
            learnt = draw.integers(UNLEARNT, size=length + 1) > 0 if place % 5 else ~learnt
        return rows_of(window[None], ends[None], self.reset_attention, learnt[None])


def _ends(length: int, turn: int, draw: np.random.Generator) -> NDArray[np.bool_]:
    """Return where documents end in a row. At least the last quarter of the row belongs to a document that
    continues."""
    ends = np.zeros(length, dtype=bool)
    if turn % 3 == 0:
        ends[: length // 2] = True
    elif turn % 3 == 2:
        shared = length - max(1, length // 4)
        ends[:shared] = draw.integers(3, size=shared) == 0
    return ends


@dataclass(frozen=True)
class Reached:
    """The cases that the steps of a proof reached."""

    vocabulary_parts: tuple[int, int]
    """Number of parts whose first and last ids were inputs and targets, and number of all parts."""
    positions: tuple[int, int]
    """Number of positions that had a target, and number of all positions."""
    documents: tuple[int, int] | None
    """Lengths in tokens of the shortest and the longest document in a row; None if attention crosses
    documents."""
    ignored: int
    """Number of targets that have no loss."""
    chunks: int | None
    """Number of chunks of the loss for a micro-batch; None if a user's own module computes the loss."""
    idle_experts: dict[str, list[int]]
    """For each mixture of experts, the experts that no token chose in any step."""
    experts: int

    def to_json(self) -> Json:
        """Return these numbers as `--json` prints them."""
        return asdict(self)

    def sentence(self) -> str:
        """Return these numbers as a sentence."""
        cases = [
            f"the first and last ids of {_of(self.vocabulary_parts)} vocabulary shards",
            f"{_of(self.positions)} positions",
        ]
        if self.chunks is not None:
            cases.append(f"{self.chunks} chunks of the loss")
        if self.documents is not None:
            cases += [
                f"documents of {self.documents[0]} to {self.documents[1]} tokens",
                f"{self.ignored} targets without a loss",
            ]
        if self.experts:
            idle = "; ".join(
                f"{layer} {', '.join(map(str, experts))}" for layer, experts in self.idle_experts.items()
            )
            cases.append(f"all but these experts: {idle}" if idle else "every expert")
        return f"reached: {', '.join(cases)}"


@dataclass(frozen=True)
class SamplesReached:
    """The samples of a program's own data that the steps of a proof read."""

    samples: int

    def to_json(self) -> Json:
        """Return the number as `--json` prints it."""
        return asdict(self)

    def sentence(self) -> str:
        """Return the number as a sentence."""
        return f"reached: {counted(self.samples, 'sample')} of the program's data"


def _of(pair: tuple[int, int]) -> str:
    return f"{pair[0]} of {pair[1]}"


def what_is_reached(proof: ProofJob, dataset: ProofDataset, idle_experts: dict[str, list[int]]) -> Reached:
    """Return the cases that all steps of a proof reached together."""
    rows = dataset.sequences(0, proof.steps * dataset.batch)
    inputs, targets = rows.inputs, rows.targets
    both = set(np.unique(inputs).tolist()) & set(np.unique(targets).tolist())
    parts, length = dataset.edges(), dataset.sequence_length
    documents = [] if rows.documents is None else list(rows.documents)
    lengths = [int(tokens) for row in documents for tokens in np.unique(row, return_counts=True)[1]]
    tokens = proof.plan.micro_batch * length // proof.plan.layout.context
    chunk = proof.chunk if proof.config.model.module is None else None
    return Reached(
        vocabulary_parts=(sum({part[0], part[-1]} <= both for part in parts), len(parts)),
        positions=(int((targets != IGNORED).any(0).sum()), length),
        documents=(min(lengths), max(lengths)) if lengths else None,
        ignored=int((targets == IGNORED).sum()),
        chunks=None if chunk is None else -(-tokens // chunk),
        idle_experts=idle_experts,
        experts=proof.config.model.experts,
    )
