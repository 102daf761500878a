"""Training and held-out sequences, requested by number.

The tokens of each source, with its documents one after the other, are cut into samples: `sequence_length`
inputs, and the same tokens shifted by one as targets. Sample k reads tokens [kS, kS + S]. Neighbouring
samples share one token, which is a target of the first and an input of the second. Every token except the
very first is therefore a target once per epoch, and nothing is padded. The last `held_out` fraction of each
source's samples is never trained on.

A run that has seen n sequences continues with positions [n, n + global_batch) of the order (order.py). A rank
requests its rows of that batch by number. Together the ranks read the same sequences whatever their number,
and n is the only state between steps. It counts sequences and not steps, so that a batch that grows during
training (Smith et al., "Don't decay the learning rate, increase the batch size", 2018) neither skips nor
repeats a sequence.

With `reset_attention`, `Rows.documents` tells the documents inside a row apart, so that attention stays
within each document. There is no loss where the input is the last token of a document, because the next token
belongs to another document and cannot be predicted from it.

Conversations are packed and not cut: a sequence takes as many whole conversations as fit, in order, and is
filled up with the end-of-document token. A conversation that is longer than a sequence has a sequence of its
own, and its end is left out. No answer is therefore learned without its question. The cost is the unused end
of each sequence, half a conversation on average. Conversations never attend to each other, whether
`reset_attention` is set or not, and only their answers have a loss.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.config import Config, Data
from shardwise.data.order import HELD_OUT, Integers, Order, key, permute
from shardwise.data.prepare import Progress, prepare_sources, sources_hold_answers
from shardwise.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError
from shardwise.files import Json

IGNORED = -100
"""Target of tokens without a loss, as in torch's `ignore_index`."""

UNIGRAM_TOKENS = 64 << 20
"""Maximum number of tokens of each source that `unigram_loss` counts."""


@dataclass(frozen=True)
class Rows:
    """Sequences, one per row: (rows, sequence_length)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int32] | None
    """For each token, the position in its row at which its document begins; None if a row is one document."""

    @property
    def valid(self) -> int:
        """Number of targets that count in the loss."""
        return int(np.count_nonzero(self.targets != IGNORED))


@dataclass(frozen=True)
class DatasetSummary:
    """Counts over all sources of a dataset."""

    sources: int
    tokens: int
    documents: int
    samples: int
    held_out: int
    tokenizer: str
    vocabulary: int
    cut: int = 0
    """Number of conversations that are longer than a sequence."""


@dataclass(frozen=True)
class Stream:
    """One source: its tokens, and how its samples are split. Samples from `training` on are held out."""

    tokens: Tokens
    training: int
    held_out: int
    weight: float
    sample_starts: Integers | None = None
    """For conversations, the first token of each sample, followed by the number of tokens. None for other
    sources, whose samples all have the same length.
    """

    def window(self, sample: int, length: int) -> tuple[int, int]:
        """Return the first token of a sample and its number of tokens.

        The number is `length + 1`, or less where the sample is filled up.
        """
        if self.sample_starts is None:
            return sample * length, length + 1
        first, after = self.sample_starts[sample : sample + 2].tolist()
        return first, min(after - first, length + 1)

    def tokens_before(self, sample: int, length: int) -> int:
        """Return the number of tokens of the source that are in samples before this one."""
        return sample * length + 1 if self.sample_starts is None else int(self.sample_starts[sample])


@dataclass(frozen=True)
class Dataset:
    """The training and held-out sequences of a job's sources."""

    streams: tuple[Stream, ...]
    sequence_length: int
    reset_attention: bool
    seed: int

    @classmethod
    def open(cls, data: Data, seed: int, progress: Progress | None = None) -> Dataset:
        """Open a job's data, and prepare the sources that are not prepared yet."""
        streams = tuple(_stream(folder, weight, data) for folder, weight in prepare_sources(data, progress))
        _check_same_tokenizer(streams)
        conversations = any(stream.tokens.index.holds_answers for stream in streams)
        return cls(streams, data.sequence_length, data.reset_attention or conversations, seed)

    def sequences(self, first: int, count: int) -> Rows:
        """Return training sequences [first, first + count) in the order of the run. The stream never ends."""
        assert first >= 0, "sequences count from 0"
        sources, samples, _ = self.order.at(np.arange(first, first + count, dtype=np.int64))
        return self._rows(sources, samples)

    def fingerprint(self, first: int) -> int:
        """Return a checksum of the sequence at a place of the run."""
        return zlib.crc32(np.ascontiguousarray(self.sequences(first, 1).inputs).tobytes())

    def held_out_rows(self, start: int, count: int) -> Rows:
        """Return held-out sequences [start, start + count).

        Their order mixes the sources and is the same for every seed.
        """
        assert 0 <= start <= start + count <= self.held_out_count, "rows outside the held-out split"
        shuffled = permute(np.arange(start, start + count), max(1, self.held_out_count), key(HELD_OUT))
        ends = np.cumsum([stream.held_out for stream in self.streams])
        sources = np.searchsorted(ends, shuffled, side="right")
        firsts = np.asarray([stream.training for stream in self.streams]) - np.concatenate([[0], ends[:-1]])
        return self._rows(sources, shuffled + firsts[sources])

    @cached_property
    def order(self) -> Order:
        """Function that says which sample is at which position of the training stream."""
        sizes = tuple(stream.training for stream in self.streams)
        return Order(sizes, tuple(stream.weight for stream in self.streams), self.seed)

    @property
    def content(self) -> str:
        """Number of tokens and a checksum of all data. Two hosts with the same text have the same value."""
        indexes = [stream.tokens.index for stream in self.streams]
        contents = [(index.tokenizer_fingerprint, index.end, index.shards) for index in indexes]
        checksum = hashlib.sha256(repr(contents).encode()).hexdigest()[:12]
        return f"{sum(index.tokens for index in indexes):,} tokens (checksum {checksum})"

    @property
    def held_out_count(self) -> int:
        """Number of held-out sequences of all sources."""
        return sum(stream.held_out for stream in self.streams)

    @property
    def vocabulary(self) -> int:
        """Largest token id plus one."""
        return self.streams[0].tokens.index.vocabulary

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data were prepared with, read when it is first used."""
        tokens = self.streams[0].tokens
        return load_tokenizer(BYTES if tokens.index.tokenizer == BYTES else tokens.folder, tokens.index.end)

    def describe(self) -> DatasetSummary:
        """Return counts over all sources."""
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
                _count_longer(stream.tokens, self.sequence_length)
                for stream in self.streams
                if stream.sample_starts is not None
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
    """Return rows from tokens of shape (rows, sequence_length + 1).

    `ends` says whether each input is the last token of its document, and `learnt` whether each token has a
    loss.
    """
    inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()
    if not reset_attention:
        return Rows(inputs, targets, None)
    targets[ends] = IGNORED
    if learnt is not None:
        targets[~learnt[:, 1:]] = IGNORED
    begins = np.zeros(ends.shape, dtype=np.int32)
    # The last token of a document still belongs to it; the next document begins after it.
    begins[:, 1:] = np.where(ends[:, :-1], np.arange(1, ends.shape[1]), 0)
    return Rows(inputs, targets, np.maximum.accumulate(begins, axis=1))


def with_data_settings(config: Config, dataset: Dataset | None = None) -> Config:
    """Return the job with the settings that its data decide.

    Conversations never attend to each other, whatever the job says, and prepared data have a tokenizer.
    Without the dataset, the sources are read to find out whether they contain conversations.
    """
    if dataset:
        reset_attention = dataset.reset_attention
    else:
        reset_attention = config.data.reset_attention or sources_hold_answers(config.data)
    update: Json = {"reset_attention": reset_attention}
    if dataset and config.data.tokenizer == BYTES and dataset.streams[0].tokens.index.tokenizer != BYTES:
        update["tokenizer"] = str(dataset.streams[0].tokens.folder)
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def check_vocabulary(dataset: Dataset, model_vocabulary: int, pretrained: str | None = None) -> None:
    """Raise a UserError if a token id is not a row of the model's embedding."""
    for problem in too_large_ids(dataset.vocabulary, model_vocabulary, pretrained):
        raise UserError(problem)


def too_large_ids(ids: int, model_vocabulary: int, pretrained: str | None = None) -> Iterator[str]:
    """Yield a problem if the tokenizer has more ids than the model.

    `pretrained` is the folder that the model comes from, if any.
    """
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
    """Yield a problem if a source has fewer tokens than one sequence of this length."""
    if tokens < length + 1:
        yield (
            f"data.sequence_length = {length}: longer than the data. {source} holds {most}{tokens} tokens, "
            f"one sequence needs {length + 1}. Shorten the sequence or give more text."
        )


def unigram_loss(dataset: Dataset) -> float:
    """Return the cross-entropy (in nats) of the held-out targets if each token is predicted by its frequency
    only.

    Every language model must do better than this. Frequencies are counted on the training tokens (at most the
    first 64 Mi of each source), and one is added to each count, so that an unseen token has a probability
    too.
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
            learnt = stream.tokens.read(*part)[stream.tokens.learnt(*part)]
            counts += np.bincount(learnt, minlength=len(counts))
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
    short = too_short(folder, len(tokens), length) if firsts is None else _answers_cut_off(tokens, length)
    for problem in short:
        raise UserError(problem)
    samples = (len(tokens) - 1) // length if firsts is None else len(firsts) - 1
    held_out = min(max(1, round(samples * data.held_out)), samples - 1) if data.held_out > 0 else 0
    return Stream(tokens, samples - held_out, held_out, weight, firsts)


def _packed(tokens: Tokens, length: int) -> Integers:
    """Return the first token of each sample of whole conversations, and after the last the number of tokens.

    Each sample takes as many conversations as fit, in order.
    """
    ends = tokens.ends
    firsts, documents = [0], 0
    while documents < len(ends):
        fitting = int(np.searchsorted(ends, firsts[-1] + length + 1, side="right"))
        documents = max(fitting, documents + 1)  # one that is too long has a sample of its own
        firsts.append(int(ends[documents - 1]))
    return np.asarray(firsts, dtype=np.int64)


def _count_longer(tokens: Tokens, length: int) -> int:
    """Return the number of conversations that are longer than a sequence."""
    return int(np.count_nonzero(np.diff(tokens.ends, prepend=0) > length + 1))


def _answers_cut_off(tokens: Tokens, length: int) -> Iterator[str]:
    """Yield a problem if every conversation is cut before its first answer."""
    firsts, answers = np.concatenate([[0], tokens.ends[:-1]]), np.append(tokens.answers, len(tokens))
    # Number of tokens before the first answer of each conversation.
    reach = answers[np.searchsorted(answers, firsts)] - firsts
    if reach.min() > length:
        yield (
            f"data.sequence_length = {length}: in {tokens.folder} every conversation has more before its "
            f"first answer, so there is nothing to learn. Give at least {int(reach.min()) + 1}; "
            f"{int(reach.max()) + 1} reaches an answer of each."
        )


def _check_same_tokenizer(streams: tuple[Stream, ...]) -> None:
    first = streams[0].tokens
    for other in (stream.tokens for stream in streams[1:]):
        if other.index.tokenizer_fingerprint != first.index.tokenizer_fingerprint:
            raise UserError(
                f"data.sources: {first.folder} (tokenizer {first.index.tokenizer}) and {other.folder} "
                f"(tokenizer {other.index.tokenizer}) were prepared with different tokenizers. Prepare all "
                "sources with one."
            )
