from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import Data, TextSource
from shardwise.data.dataset import Dataset, Rows, check_vocabulary, unigram_loss
from shardwise.data.prepare import prepare
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError

SHAKESPEARE = Path(__file__).parents[2] / "examples" / "shakespeare.txt"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two prepared sources of short documents, in small shards so that sequences cross them."""
    root = tmp_path_factory.mktemp("dataset")
    random = np.random.default_rng(0)
    made = []
    for name, count in (("one", 60), ("two", 25)):
        rows = [
            {"text": "".join(random.choice(list("abcde \n"), size=random.integers(1, 60)))}
            for _ in range(count)
        ]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        prepare(root / f"{name}.jsonl", "bytes", root / name, shard_tokens=300)
        made.append(root / name)
    return made


def one(folders: list[Path], **more: object) -> Data:
    return Data.model_validate({"source": str(folders[0]), "sequence_length": 16, "held_out": 0.1, **more})


def two(folders: list[Path], **more: object) -> Data:
    sources = (
        TextSource(path=str(folders[0]), weight=3.0),
        TextSource(path=str(folders[1]), weight=1.0),
    )
    return Data.model_validate({"sources": sources, "sequence_length": 16, "held_out": 0.1, **more})


def equal(left: Rows, right: Rows) -> bool:
    pairs = [(left.inputs, right.inputs), (left.targets, right.targets), (left.documents, right.documents)]
    return all(a is b is None or np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


def join(parts: list[Rows]) -> Rows:
    documents = None if parts[0].documents is None else np.concatenate([part.documents for part in parts])  # type: ignore[misc]
    return Rows(
        np.concatenate([p.inputs for p in parts]), np.concatenate([p.targets for p in parts]), documents
    )


@given(
    cuts=st.sets(st.integers(1, 23)),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 2**32),
    reset=st.booleans(),
)
@settings(max_examples=40)
def test_the_batch_of_a_step_is_the_same_over_any_split(
    folders: list[Path], cuts: set[int], step: int, seed: int, reset: bool
) -> None:
    dataset = Dataset.open(two(folders, reset_attention=reset), seed)
    edges = [0, *sorted(cuts), 24]
    parts = [dataset.sequences(24 * step + start, stop - start) for start, stop in pairwise(edges)]
    assert equal(join(parts), dataset.sequences(24 * step, 24))


def test_a_larger_batch_reads_the_same_stream(folders: list[Path]) -> None:
    dataset = Dataset.open(two(folders), 1)
    small = join([dataset.sequences(8 * step, 8) for step in range(6)])
    large = join([dataset.sequences(24 * step, 24) for step in range(2)])
    assert equal(small, large)


def windows(folder: Path, length: int) -> list[tuple[int, ...]]:
    tokens = Tokens.open(folder)
    ids = tokens.read(0, len(tokens)).tolist()
    return [tuple(ids[start : start + length + 1]) for start in range(0, len(ids) - length, length)]


def rows_of(rows: Rows) -> list[tuple[int, ...]]:
    return [
        (*line, last) for line, last in zip(rows.inputs.tolist(), rows.targets[:, -1].tolist(), strict=True)
    ]


def test_an_epoch_is_every_training_sequence_once_and_epochs_differ(folders: list[Path]) -> None:
    dataset = Dataset.open(one(folders), 3)
    expected = windows(folders[0], 16)
    facts = dataset.describe()
    assert facts.samples + facts.held_out == len(expected)
    first, second = (rows_of(dataset.sequences(epoch * facts.samples, facts.samples)) for epoch in range(2))
    assert sorted(first) == sorted(second) == sorted(expected[: facts.samples])
    assert first != second


def test_held_out_sequences_are_the_last_of_each_source_and_never_trained_on(folders: list[Path]) -> None:
    dataset = Dataset.open(two(folders), 3)
    held_out, trained = Counter[tuple[int, ...]](), set()
    for folder, stream in zip(folders, dataset.streams, strict=True):
        every = windows(folder, 16)
        assert stream.held_out == max(1, round(len(every) * 0.1))
        assert stream.training == len(every) - stream.held_out
        held_out.update(every[stream.training :])
        trained |= set(every[: stream.training])
    assert Counter(rows_of(dataset.held_out_rows(0, dataset.held_out_count))) == held_out
    seen = set(rows_of(join([dataset.sequences(64 * step, 64) for step in range(20)])))
    assert seen == trained
    assert not seen & set(held_out)


def test_held_out_rows_do_not_depend_on_the_seed_or_the_split(folders: list[Path]) -> None:
    dataset, other = Dataset.open(two(folders), 3), Dataset.open(two(folders), 4)
    count = dataset.held_out_count
    assert equal(dataset.held_out_rows(0, count), other.held_out_rows(0, count))
    assert equal(join([dataset.held_out_rows(i, 1) for i in range(count)]), dataset.held_out_rows(0, count))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.999])
def test_small_and_large_held_out_shares_leave_something_to_train_on(
    folders: list[Path], share: float
) -> None:
    facts = Dataset.open(one(folders, held_out=share), 0).describe()
    assert facts.samples >= 1
    assert facts.held_out == (0 if share == 0 else facts.held_out)
    assert facts.held_out >= (share > 0)


def test_targets_are_the_next_tokens(folders: list[Path]) -> None:
    rows = Dataset.open(one(folders), 0).sequences(40, 8)
    assert rows.documents is None
    assert (rows.inputs.dtype, rows.targets.dtype) == (np.int64, np.int64)
    assert np.array_equal(rows.inputs[:, 1:], rows.targets[:, :-1])
    assert rows.valid == 8 * 16


@pytest.mark.parametrize("length", [1, 2, 7, 16, 100])
def test_reset_attention_equals_a_plain_loop(folders: list[Path], length: int) -> None:
    dataset = Dataset.open(one(folders, reset_attention=True, sequence_length=length), 0)
    plain = Dataset.open(one(folders, sequence_length=length), 0)
    rows, whole = dataset.sequences(0, 20), plain.sequences(0, 20)
    assert np.array_equal(rows.inputs, whole.inputs)
    valid = 0
    for row in range(20):
        document = 0
        for place in range(length):
            assert rows.documents is not None
            assert rows.documents[row, place] == document
            if whole.inputs[row, place] == 256:  # byte text cannot hold this id, so it marks exactly the ends
                assert rows.targets[row, place] == -100
                document = place + 1
            else:
                assert rows.targets[row, place] == whole.targets[row, place]
                valid += 1
    assert rows.valid == valid
    assert rows.documents is not None
    assert rows.documents.dtype == np.int32


def test_mixed_sources_follow_their_weights(folders: list[Path]) -> None:
    dataset = Dataset.open(two(folders), 0)
    sources, _, _ = dataset.order.at(np.arange(65536))
    assert np.bincount(sources).tolist() == [49152, 16384]


def test_unigram_loss_equals_a_plain_count(folders: list[Path]) -> None:
    dataset = Dataset.open(two(folders), 0)
    counts: Counter[int] = Counter(range(257))
    for folder, stream in zip(folders, dataset.streams, strict=True):
        counts.update(Tokens.open(folder).read(0, stream.training * 16 + 1).tolist())
    targets = dataset.held_out_rows(0, dataset.held_out_count).targets.ravel().tolist()
    expected = sum(log(counts.total() / counts[target]) for target in targets) / len(targets)
    assert unigram_loss(dataset) == pytest.approx(expected, rel=1e-12)


def test_the_bundled_text_is_plain_and_large_enough(tmp_path: Path) -> None:
    dataset = Dataset.open(Data(source=str(SHAKESPEARE), cache=str(tmp_path)), 0)
    facts = dataset.describe()
    assert (facts.documents, facts.tokenizer, facts.vocabulary) == (1, "bytes", 257)
    assert 1_000_000 < facts.tokens < 1_200_000
    text = dataset.tokenizer.decode(
        dataset.streams[0].tokens.read(0, len(dataset.streams[0].tokens)).tolist()
    )
    assert text == SHAKESPEARE.read_text(encoding="ascii")
    # English with punctuation is known to have about 4.8 bits per character.
    assert 3.0 < unigram_loss(dataset) < 3.6


def test_a_sequence_longer_than_the_data_is_explained(folders: list[Path]) -> None:
    tokens = len(Tokens.open(folders[0]))
    assert Dataset.open(one(folders, sequence_length=tokens - 1), 0).describe().samples == 1
    with pytest.raises(
        UserError, match=rf"longer than the data\. .* holds {tokens} tokens, one sequence needs {tokens + 1}"
    ):
        Dataset.open(one(folders, sequence_length=tokens), 0)


def test_a_vocabulary_larger_than_the_models_is_explained(folders: list[Path]) -> None:
    dataset = Dataset.open(one(folders), 0)
    check_vocabulary(dataset, 257)
    with pytest.raises(UserError, match=r"model\.vocabulary = 256: the tokenizer has 257 ids"):
        check_vocabulary(dataset, 256)


def test_sources_of_different_tokenizers_are_refused(folders: list[Path], tmp_path: Path, bpe: Path) -> None:
    prepare(SHAKESPEARE.parent / "README.md", bpe, tmp_path / "other")
    sources = (
        TextSource(path=str(folders[0]), weight=1.0),
        TextSource(path=str(tmp_path / "other"), weight=1.0),
    )
    with pytest.raises(UserError, match="prepared with different tokenizers"):
        Dataset.open(Data(sources=sources, sequence_length=8), 0)


def test_the_tokenizer_comes_from_the_prepared_folder(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 20)
    prepare(tmp_path / "a.txt", bpe, tmp_path / "out")
    dataset = Dataset.open(Data(source=str(tmp_path / "out"), sequence_length=8, held_out=0.0), 0)
    tokens = dataset.streams[0].tokens
    assert (
        dataset.tokenizer.decode(tokens.read(0, len(tokens)).tolist())
        == "the quick brown fox " * 20 + "<|endoftext|>"
    )
    with pytest.raises(UserError, match=r"data\.held_out = 0"):
        unigram_loss(dataset)


def test_a_corrupt_shard_stops_before_training(folders: list[Path], tmp_path: Path) -> None:
    prepare(folders[0].with_suffix(".jsonl"), "bytes", tmp_path)
    path = tmp_path / "shard-00000.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 255
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-00000\.bin is damaged"):
        Dataset.open(Data(source=str(tmp_path), sequence_length=8), 0)


def test_the_same_text_has_the_same_content_wherever_it_lies(tmp_path: Path) -> None:
    """By which hosts compare their data: neither the path nor the time of a file counts."""
    texts = {
        "here": "to be or not to be" * 9,
        "there": "to be or not to be" * 9,
        "other": "to be or not to bee" + "to be or not to be" * 8,
    }
    contents = {}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
        data = Data(
            source=str(tmp_path / name / "text.txt"), sequence_length=8, cache=str(tmp_path / name / "cache")
        )
        contents[name] = Dataset.open(data, seed=1).content
    assert contents["here"] == contents["there"] != contents["other"]
    assert contents["here"].startswith("163 tokens (checksum ")
