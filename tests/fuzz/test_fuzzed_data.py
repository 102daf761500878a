"""Prepared data and tokenizers: read as they were written, or refused; never a token that the model has no
row for."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.damage import SOME_AND_MANY, as_json, damaged, nothing_outside, read_or_refused, rewritten, sealed
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from shardwise.data.prepare import prepare
from shardwise.data.shards import Index, shard_name
from shardwise.data.source_files import find_files
from shardwise.data.tokenizer import load_tokenizer
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError
from shardwise.files import seal, unseal

SHARD = shard_name(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of a few documents, and beside them a file that nobody may read."""
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefghij ", k=draw.randint(1, 300))) for _ in range(30)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(tmp_path / "text.jsonl", "bytes", tmp_path / "prepared", shard_tokens=1500)
    (tmp_path / "x.bin").write_bytes((tmp_path / "prepared" / SHARD).read_bytes())
    (tmp_path / "x.ends").write_bytes((tmp_path / "prepared" / SHARD.replace(".bin", ".ends")).read_bytes())
    return tmp_path / "prepared"


Row = tuple[list[int], list[int]]


def everything(folder: Path) -> Row:
    """All tokens, and where documents end."""
    tokens = Tokens.open(folder)
    row = tokens.read(0, len(tokens))
    assert int(row.max()) < tokens.index.vocabulary
    return row.tolist(), tokens.boundaries(0, len(tokens)).tolist()


def sealed_values(path: Path) -> Any:
    body = unseal(path.read_bytes())
    assert body is not None
    return json.loads(body)


@pytest.mark.parametrize("count", SOME_AND_MANY)
@pytest.mark.parametrize("name", ["index.json", SHARD, SHARD.replace(".bin", ".ends")])
def test_a_damaged_file_is_never_read_as_something_else(folder: Path, name: str, count: int) -> None:
    whole, content = everything(folder), (folder / name).read_bytes()
    for changed in damaged(content, 5, count):
        (folder / name).write_bytes(changed)
        assert read_or_refused(lambda: everything(folder), changed) == (whole if changed == content else None)


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_an_index_that_a_hand_has_changed_and_sealed_again_reads_nothing_outside_and_no_unknown_token(
    folder: Path, count: int
) -> None:
    whole, path, taken = everything(folder), folder / "index.json", 0
    for values in rewritten(sealed_values(path), 6, 3 * count):
        path.write_bytes(sealed(values))
        with nothing_outside(folder):
            row = read_or_refused(lambda: everything(folder), values)
        assert row is None or row == whole or len(row[0]) < len(whole[0])  # a shard may have been left out
        taken += row is not None
    assert taken


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": ">u2"}, "dtype = '>u2'"),
        ({"dtype": "<u4"}, "a vocabulary of 257 with dtype <u4"),
        ({"dtype": 2}, "dtype = 2"),
        ({"vocabulary": 200, "end": 100}, "a token 256 of a vocabulary of 200"),
        ({"shards": []}, "at least 1 item"),
        ({"shards": 3}, "shards = 3"),
        ({"version": 1}, "has format 1; this version of shardwise reads 2"),
    ],
)
def test_what_an_index_may_not_say_is_refused_by_place(
    folder: Path, change: dict[str, Any], reason: str
) -> None:
    path = folder / "index.json"
    path.write_bytes(seal({**sealed_values(path), **change}))
    with pytest.raises(UserError) as refusal:
        everything(folder)
    assert reason in str(refusal.value)
    assert "prepare the data again" in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blocks": []}, "tokens and 0 checksums"),
        ({"file": "../x.bin"}, "shards[0].file = '../x.bin'"),
        ({"file": shard_name(1)}, "shards[0] is shard-00001.bin"),
        ({"documents": 10**9}, "tokens and 1000000000 documents"),
    ],
)
def test_what_a_shard_may_not_say_is_refused_by_place(
    folder: Path, change: dict[str, Any], reason: str
) -> None:
    path = folder / "index.json"
    values = sealed_values(path)
    path.write_bytes(seal({**values, "shards": [{**values["shards"][0], **change}, *values["shards"][1:]]}))
    with pytest.raises(UserError) as refusal, nothing_outside(folder):
        everything(folder)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("name", ["index.json", SHARD, SHARD.replace(".bin", ".ends")])
def test_a_link_that_leads_out_of_the_folder_is_not_followed(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")
    with pytest.raises(UserError, match="is a link that leads out of its folder"), nothing_outside(folder):
        everything(folder)


def test_an_index_of_an_earlier_version_is_made_again_by_its_owner(folder: Path) -> None:
    values = sealed_values(folder / "index.json")
    (folder / "index.json").write_text(json.dumps({**values, "version": 1}))
    with pytest.raises(
        UserError, match=r"index\.json has format 1; this version of shardwise reads 2\. Delete the folder"
    ):
        Index.read(folder)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_damaged_record_of_unfinished_work_never_changes_what_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    text, half = tmp_path / "text.jsonl", tmp_path / "half"
    text.write_text("\n".join(json.dumps({"text": f"document {number} " * 9}) for number in range(60)))
    prepare(text, "bytes", tmp_path / "whole", shard_tokens=1500)
    whole = everything(tmp_path / "whole")

    def stop(index: Index, folder: Path) -> None:
        raise Stopped

    monkeypatch.setattr(Index, "write", stop)
    with pytest.raises(Stopped):
        prepare(text, "bytes", half, shard_tokens=1500)
    monkeypatch.undo()
    record = (half / "preparing.json").read_bytes()
    values = json.loads(record)
    del values["crc32"]
    for content in [*damaged(record, 7, count // 3), *map(as_json, rewritten(values, 8, count // 3))]:
        again = tmp_path / "again"
        shutil.copytree(half, again)
        (again / "preparing.json").write_bytes(content)
        done = read_or_refused(
            lambda folder=again: prepare(text, "bytes", folder, shard_tokens=1500), content
        )
        assert done is None or everything(again) == whole
        shutil.rmtree(again)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
    library.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return path.read_bytes()


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_tokenizer_file_gives_ids_of_its_vocabulary_or_is_refused(
    tokenizer: bytes, tmp_path: Path, count: int
) -> None:
    path = tmp_path / "tokenizer.json"
    values = json.loads(tokenizer)
    for content in [*damaged(tokenizer, 9, count), *map(as_json, rewritten(values, 10, 2 * count))]:
        path.write_bytes(content)
        ids = read_or_refused(lambda: ids_of(path), content)
        assert ids is None or all(0 <= number < limit for limit, row in [ids] for number in row)


def ids_of(path: Path) -> tuple[int, list[int]]:
    tokenizer = load_tokenizer(path)
    return tokenizer.vocabulary, np.append(
        tokenizer.encode_batch(["the lazy dog is brown"])[0], tokenizer.end
    ).tolist()


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_the_files_of_a_saved_data_set_are_in_its_folder_or_it_is_refused(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for name in ("a.arrow", "b.arrow"):
        (folder / name).write_bytes(b"")
    (tmp_path / "x.bin").write_bytes(b"")
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "a.arrow"}, {"filename": "b.arrow"}], "_fingerprint": "0"}
    for content in [*damaged(as_json(state), 11, count), *map(as_json, rewritten(state, 12, count))]:
        (folder / "state.json").write_bytes(content)
        files = read_or_refused(lambda: find_files(folder), content)
        assert files is None or all(
            file.path.parent == folder and os.path.exists(file.path) for file in files
        )
