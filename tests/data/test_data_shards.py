from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import tokens as reader
from shardwise.data.shards import BLOCK, Index, ShardWriter, token_dtype
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError
from shardwise.files import seal


def write(folder: Path, shards: list[list[tuple[list[int], bool]]], vocabulary: int = 257) -> Index:
    """Shards of appended (ids, ends a document) parts."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, parts in enumerate(shards):
        writer = ShardWriter(folder, number, token_dtype(vocabulary))
        for ids, ends in parts:
            writer.append(np.asarray(ids), ends)
        written.append(writer.finish())
    index = Index("source", "bytes", "bytes-257", vocabulary, 256, token_dtype(vocabulary), tuple(written))
    index.write(folder)
    return index


def large(folder: Path) -> np.ndarray:
    """One shard of a little over two blocks."""
    ids = np.arange(BLOCK + 1000) % 257
    write(folder, [[(ids.tolist(), True)]])
    return ids


part = st.tuples(st.lists(st.integers(0, 256), min_size=1, max_size=9), st.booleans())


@given(shards=st.lists(st.lists(part, min_size=1, max_size=5), min_size=1, max_size=4), choose=st.data())
@settings(max_examples=60)
def test_windows_and_boundaries_equal_those_of_one_long_list(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[tuple[list[int], bool]]],
    choose: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    write(folder, shards)
    everything: list[int] = []
    closing: list[int] = []
    for ids, ends in (part for shard in shards for part in shard):
        everything += ids
        if ends:
            closing.append(len(everything) - 1)
    tokens = Tokens.open(folder)
    assert len(tokens) == len(everything) == tokens.index.tokens
    assert tokens.index.documents == len(closing)
    start = choose.draw(st.integers(0, len(everything) - 1))
    length = choose.draw(st.integers(1, len(everything) - start))
    assert tokens.read(start, length).tolist() == everything[start : start + length]
    assert tokens.boundaries(start, length).tolist() == [
        place - start for place in closing if start <= place < start + length
    ]


@pytest.mark.parametrize(("vocabulary", "width"), [(257, 2), (65536, 2), (65537, 4), (128256, 4)])
def test_ids_take_two_bytes_where_the_vocabulary_allows(tmp_path: Path, vocabulary: int, width: int) -> None:
    write(tmp_path, [[([0, vocabulary - 1], True)]], vocabulary)
    assert (tmp_path / "shard-00000.bin").stat().st_size == 2 * width
    assert Tokens.open(tmp_path).read(0, 2).tolist() == [0, vocabulary - 1]


def test_blocks_join_across_checksums(tmp_path: Path) -> None:
    ids = large(tmp_path)
    tokens = Tokens.open(tmp_path)
    assert len(tokens.index.shards[0].blocks) == 3
    middle = BLOCK // 2
    assert np.array_equal(tokens.read(middle - 5, 10), ids[middle - 5 : middle + 5])
    assert np.array_equal(tokens.read(0, len(ids)), ids)


@pytest.mark.parametrize("offset", [0, BLOCK + 3, 2 * BLOCK + 100])
def test_one_flipped_bit_is_found_when_opened(tmp_path: Path, offset: int) -> None:
    large(tmp_path)
    path = tmp_path / "shard-00000.bin"
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        UserError,
        match=rf"shard-00000\.bin is damaged: the checksum of MiB {offset // BLOCK} .*prepare the data again",
    ):
        Tokens.open(tmp_path)


def test_large_data_are_checked_when_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = large(tmp_path)
    path = tmp_path / "shard-00000.bin"
    content = bytearray(path.read_bytes())
    content[BLOCK + 3] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(reader, "CHECKED_WHOLE", 0)
    tokens = Tokens.open(tmp_path)
    assert np.array_equal(tokens.read(0, BLOCK // 2), ids[: BLOCK // 2])  # the sound block
    with pytest.raises(UserError, match="is damaged"):
        tokens.read(BLOCK // 2 - 1, 2)  # one token of it lies in the damaged one


@pytest.mark.parametrize("name", ["shard-00000.bin", "shard-00000.ends"])
def test_a_truncated_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    large(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
        UserError, match=rf"{name} is damaged: it has \d+ bytes, not \d+.*prepare the data again"
    ):
        Tokens.open(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=rf"{name} is damaged: it cannot be read"):
        Tokens.open(tmp_path)


def test_damaged_document_ends_are_found(tmp_path: Path) -> None:
    large(tmp_path)
    (tmp_path / "shard-00000.ends").write_bytes(np.array([7], dtype="<i8").tobytes())
    with pytest.raises(UserError, match=r"shard-00000\.ends is damaged: its checksum"):
        Tokens.open(tmp_path)


def test_a_damaged_or_foreign_index_is_explained(tmp_path: Path) -> None:
    large(tmp_path)
    index = tmp_path / "index.json"
    values = json.loads(index.read_text())
    assert (values["tokens"], values["documents"]) == (BLOCK + 1000, 1)
    del values["crc32"]
    index.write_bytes(seal({**values, "version": 99}))
    with pytest.raises(
        UserError, match=r"index\.json has format 99; this version of shardwise reads 2\. Delete the folder"
    ):
        Tokens.open(tmp_path)
    index.write_text(index.read_text()[:50])
    with pytest.raises(UserError, match=r"index\.json is damaged.*prepare the data again"):
        Tokens.open(tmp_path)
    index.write_text("[]")
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        Tokens.open(tmp_path)


def test_an_unfinished_shard_never_has_its_final_name(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0, "<u2")
    writer.append(np.arange(2 * BLOCK), True)
    assert not (tmp_path / "shard-00000.bin").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
