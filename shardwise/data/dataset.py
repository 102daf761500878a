"""Training and held-out sequences, asked for by number.

Each source's tokens, documents end to end, are cut into samples of `sequence_length` inputs and the same
shifted by one as targets: sample k reads tokens [kS, kS + S]. Neighbours share one token, which is a target
of the first and an input of the second, so every token but the very first is a target once an epoch, and
nothing is padded. The last `held_out` share of each source's samples is never trained on.

A run that has seen n sequences takes positions [n, n + global_batch) of the order (order.py) next. A rank
asks for its rows of that batch by number; together the ranks read the same sequences whatever their number,
and nothing is kept between steps but n. It is counted in sequences, not in steps, so that a batch that grows
along the way (Smith et al., "Don't decay the learning rate, increase the batch size", 2018) neither skips nor
repeats any.

With `reset_attention`, `Rows.documents` tells the documents inside a row apart so that attention can be kept
within each, and no loss is taken where the input is a document's last token: what follows it is another
document, and cannot be predicted from it.

Conversations are packed, not cut: a sequence takes whole ones, in their order, as many as fit, and is filled
up with the end-of-document token; one that is longer than a sequence has one to itself, and its end is left
out. So no answer is learnt without its question. It costs what is left at the ends of sequences, half a
conversation each. They are never seen by each other, whether `reset_attention` is asked for or not, and a
loss is taken on their answers alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.config import Config, Data
from shardwise.data.order import HELD_OUT, Integers, Order, key, permute
from shardwise.data.prepare import Progress, prepared, sources_hold_answers
from shardwise.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError

IGNORED = -100
"""Target where no loss is taken; torch's own convention."""

UNIGRAM_TOKENS = 64 << 20


@dataclass(frozen=True)
class Rows:
    """Sequences, one a row: (rows, sequence_length)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int32] | None
    """Of each token, where in the row its document begins; None: all are one document."""

    @property
    def valid(self) -> int:
        """Targets that count in the loss."""
        return int(np.count_nonzero(self.targets != IGNORED))


@dataclass(frozen=True)
class DatasetSummary:
    """What a data set holds, over all its sources."""

    sources: int
    tokens: int
    documents: int
    samples: int
    held_out: int
    tokenizer: str
    vocabulary: int
    cut: int = 0
    """Conversations that are longer than a sequence."""


@dataclass(frozen=True)
class Stream:
    """One source: its tokens, and how its samples are split. Samples from `training` on are held out."""

    tokens: Tokens
    training: int
    held_out: int
    weight: float
    firsts: Integers | None = None
    """Of conversations: the first token of each sample, and after the last the number of tokens; None:
    samples are windows."""

    def window(self, sample: int, length: int) -> tuple[int, int]:
        """The first of a sample's tokens, and how many it has: one more than a sequence, or fewer where it is
        filled up."""
        if self.firsts is None:
            return sample * length, length + 1
        first, after = self.firsts[sample : sample + 2].tolist()
        return first, min(after - first, length + 1)

    def tokens_before(self, sample: int, length: int) -> int:
        """How many tokens of the source are in samples before this one."""
        return sample * length + 1 if self.firsts is None else int(self.firsts[sample])


@dataclass(frozen=True)
class Dataset:
    """The sequences of a job's sources, training and held out."""

    streams: tuple[Stream, ...]
    sequence_length: int
    reset_attention: bool
    seed: int

    @classmethod
    def open(cls, data: Data, seed: int, progress: Progress | None = None) -> Dataset:
        """Open a job's data, preparing what is not prepared yet."""
        streams = tuple(_stream(folder, weight, data) for folder, weight in prepared(data, progress))
        _check_same_tokenizer(streams)
        apart = data.reset_attention or any(stream.tokens.index.holds_answers for stream in streams)
        return cls(streams, data.sequence_length, apart, seed)

    def sequences(self, first: int, count: int) -> Rows:
        """Training sequences [first, first + count), in the order in which a run sees them, without end."""
        assert first >= 0, "sequences count from 0"
        sources, samples, _ = self.order.at(np.arange(first, first + count, dtype=np.int64))
        return self._rows(sources, samples)

    def held_out_rows(self, start: int, count: int) -> Rows:
        """Held-out sequences [start, start + count), in an order that mixes the sources and is the same for
        every seed."""
        assert 0 <= start <= start + count <= self.held_out_count, "rows outside the held-out split"
        shuffled = permute(np.arange(start, start + count), max(1, self.held_out_count), key(HELD_OUT))
        ends = np.cumsum([stream.held_out for stream in self.streams])
        sources = np.searchsorted(ends, shuffled, side="right")
        firsts = np.asarray([stream.training for stream in self.streams]) - np.concatenate([[0], ends[:-1]])
        return self._rows(sources, shuffled + firsts[sources])

    @cached_property
    def order(self) -> Order:
        """Which sample stands at which position of the training stream."""
        sizes = tuple(stream.training for stream in self.streams)
        return Order(sizes, tuple(stream.weight for stream in self.streams), self.seed)

    @property
    def content(self) -> str:
        """What the data hold, with a checksum over all of it: two hosts with the same text have the same
        data."""
        indexes = [stream.tokens.index for stream in self.streams]
        known = [(index.tokenizer_fingerprint, index.end, index.shards) for index in indexes]
        checksum = hashlib.sha256(repr(known).encode()).hexdigest()[:12]
        return f"{sum(index.tokens for index in indexes):,} tokens (checksum {checksum})"

    @property
    def held_out_count(self) -> int:
        """Held-out sequences in all."""
        return sum(stream.held_out for stream in self.streams)

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""
        return self.streams[0].tokens.index.vocabulary

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the data were made with, read when first asked for."""
        tokens = self.streams[0].tokens
        return load_tokenizer(BYTES if tokens.index.tokenizer == BYTES else tokens.folder, tokens.index.end)

    def describe(self) -> DatasetSummary:
        """Counts over all sources."""
        indexes = [stream.tokens.index for stream in self.streams]
        return DatasetSummary(
            sources=len(self.streams),
            tokens=sum(index.tokens for index in indexes),
            documents=sum(index.documents for index in indexes),
            samples=sum(stream.training for stream in self.streams),
            held_out=self.held_out_count,
            tokenizer=indexes[0].tokenizer,
            vocabulary=self.vocabulary,
            cut=sum(
                _longer(stream.tokens, self.sequence_length)
                for stream in self.streams
                if stream.firsts is not None
            ),
        )

    def _rows(self, sources: Integers, samples: Integers) -> Rows:
        length = self.sequence_length
        window = np.empty((len(samples), length + 1), dtype=np.int64)
        ends = np.zeros((len(samples), length), dtype=bool)
        learnt = np.ones((len(samples), length + 1), dtype=bool)
        for row, (source, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
            stream = self.streams[source]
            tokens, (first, count) = stream.tokens, stream.window(sample, length)
            window[row, :count], window[row, count:] = tokens.read(first, count), tokens.index.end
            if self.reset_attention:
                ends[row, tokens.boundaries(first, min(count, length))] = True
            if tokens.index.holds_answers:
                learnt[row, :count], learnt[row, count:] = tokens.learnt(first, count), False
        return rows_of(window, ends, self.reset_attention, learnt)


def rows_of(
    window: NDArray[np.int64],
    ends: NDArray[np.bool_],
    reset_attention: bool,
    learnt: NDArray[np.bool_] | None = None,
) -> Rows:
    """Rows from tokens (rows, sequence_length + 1), whether each input is the last of its document, and
    whether each token is to be learnt."""
    inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()
    if not reset_attention:
        return Rows(inputs, targets, None)
    targets[ends] = IGNORED
    if learnt is not None:
        targets[~learnt[:, 1:]] = IGNORED
    begins = np.zeros(ends.shape, dtype=np.int32)
    begins[:, 1:] = np.where(
        ends[:, :-1], np.arange(1, ends.shape[1]), 0
    )  # an end still belongs to the document it ends
    return Rows(inputs, targets, np.maximum.accumulate(begins, axis=1))


def settled(config: Config, dataset: Dataset | None = None) -> Config:
    """The job, with what its data decide: conversations are kept apart whether it says so or not, and
    prepared data have a tokenizer. Without the data set, a look at its sources tells the first of these."""
    apart = (
        dataset.reset_attention
        if dataset
        else config.data.reset_attention or sources_hold_answers(config.data)
    )
    update: dict[str, Any] = {"reset_attention": apart}
    if dataset and config.data.tokenizer == BYTES and dataset.streams[0].tokens.index.tokenizer != BYTES:
        update["tokenizer"] = str(dataset.streams[0].tokens.folder)
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def check_vocabulary(dataset: Dataset, model_vocabulary: int, pretrained: str | None = None) -> None:
    """Token ids must be rows of the model's embedding."""
    for problem in too_large_ids(dataset.vocabulary, model_vocabulary, pretrained):
        raise UserError(problem)


def too_large_ids(ids: int, model_vocabulary: int, pretrained: str | None = None) -> Iterator[str]:
    """The problem that the tokenizer has more ids than the model, which is that of the folder `pretrained` if
    it is from one."""
    if ids > model_vocabulary and pretrained is not None:
        yield (
            f"data.tokenizer: has {ids} ids, and the model in {pretrained} has {model_vocabulary}. "
            "Use the tokenizer that the model was trained with."
        )
    elif ids > model_vocabulary:
        yield (
            f"model.vocabulary = {model_vocabulary}: the tokenizer has {ids} ids. "
            f"Set model.vocabulary to at least {ids}, or use a smaller tokenizer (data.tokenizer)."
        )


def too_short(source: str | Path, tokens: int, length: int, most: str = "") -> Iterator[str]:
    """The problem that a source has not one sequence of this length."""
    if tokens < length + 1:
        yield (
            f"data.sequence_length = {length}: longer than the data. {source} holds {most}{tokens} "
            f"tokens, one "
            f"sequence needs {length + 1}. Shorten the sequence or give more text."
        )


def unigram_loss(dataset: Dataset) -> float:
    """Cross-entropy in nats of the held-out targets when each token is predicted by its frequency alone.

    The bar any language model must clear. Frequencies are counted on the training tokens (at most the first
    64 Mi of each source) with one added to each count, so that a token never seen there still has a
    probability.
    """
    if not dataset.held_out_count:
        raise UserError(
            "data.held_out = 0: nothing is held out to evaluate on. Set data.held_out, for example to 0.05."
        )
    counts = np.ones(dataset.vocabulary, dtype=np.int64)
    for stream in dataset.streams:
        length = min(stream.tokens_before(stream.training, dataset.sequence_length), UNIGRAM_TOKENS)
        for start in range(0, length, 1 << 20):
            part = (start, min(1 << 20, length - start))
            counts += np.bincount(
                stream.tokens.read(*part)[stream.tokens.learnt(*part)], minlength=len(counts)
            )
    surprise = np.log(counts.sum()) - np.log(counts)
    total, number = 0.0, 0
    for start in range(0, min(dataset.held_out_count, UNIGRAM_TOKENS // dataset.sequence_length + 1), 64):
        targets = dataset.held_out_rows(start, min(64, dataset.held_out_count - start)).targets
        valid = targets[targets != IGNORED]
        total, number = total + float(surprise[valid].sum()), number + len(valid)
    return total / max(1, number)


def _stream(folder: Path, weight: float, data: Data) -> Stream:
    tokens, length = Tokens.open(folder), data.sequence_length
    firsts = _packed(tokens, length) if tokens.index.holds_answers else None
    for problem in (
        too_short(folder, len(tokens), length) if firsts is None else _no_answer_in_reach(tokens, length)
    ):
        raise UserError(problem)
    samples = (len(tokens) - 1) // length if firsts is None else len(firsts) - 1
    held_out = min(max(1, round(samples * data.held_out)), samples - 1) if data.held_out > 0 else 0
    return Stream(tokens, samples - held_out, held_out, weight, firsts)


def _packed(tokens: Tokens, length: int) -> Integers:
    """Where samples of whole conversations begin, each of as many as fit, in order; and where the last is
    over."""
    ends = tokens.ends
    firsts, documents = [0], 0
    while documents < len(ends):
        fitting = int(np.searchsorted(ends, firsts[-1] + length + 1, side="right"))
        documents = max(fitting, documents + 1)  # one that is too long is alone
        firsts.append(int(ends[documents - 1]))
    return np.asarray(firsts, dtype=np.int64)


def _longer(tokens: Tokens, length: int) -> int:
    return int(np.count_nonzero(np.diff(tokens.ends, prepend=0) > length + 1))


def _no_answer_in_reach(tokens: Tokens, length: int) -> Iterator[str]:
    """The problem that every conversation is cut before its first answer."""
    firsts, answers = np.concatenate([[0], tokens.ends[:-1]]), np.append(tokens.answers, len(tokens))
    reach = answers[np.searchsorted(answers, firsts)] - firsts  # tokens before the first answer of each
    if reach.min() > length:
        yield (
            f"data.sequence_length = {length}: in {tokens.folder} every conversation has more before its "
            f"first answer, so there "
            f"is nothing to learn. Give at least {int(reach.min()) + 1}; {int(reach.max()) + 1} reaches an "
            f"answer of each."
        )


def _check_same_tokenizer(streams: tuple[Stream, ...]) -> None:
    first = streams[0].tokens
    for other in (stream.tokens for stream in streams[1:]):
        if other.index.tokenizer_fingerprint != first.index.tokenizer_fingerprint:
            raise UserError(
                f"data.sources: {first.folder} (tokenizer {first.index.tokenizer}) and {other.folder} "
                f"(tokenizer "
                f"{other.index.tokenizer}) were prepared with different tokenizers. Prepare all sources "
                f"with one."
            )
