from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from shardwise.config import Data, TextSource
from shardwise.data.prepare import prepare, prepare_sources
from shardwise.data.source_files import find_files
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError

module = import_module("shardwise.data.prepare")  # the package's own attribute of that name is the function

FOREIGN = {"version": 2, "shards": [{"raw_data": {"basename": "shard.00000.mds"}}]}
"""An index as another library writes it."""


class KilledError(Exception):
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_that_the_system_refuses_is_named_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"^x+ cannot be read: File name too long$"):
        prepare_sources(Data(source="x" * 300))


@pytest.mark.parametrize(
    "files",
    [
        {"notes.md": "mine"},
        {"tokenizer.json": "{}", "shard-00000.bin": "mine", "download.partial": "mine"},
        {"index.json": json.dumps(FOREIGN), "shard-00000.bin": "mine"},
        {"index.json": "not JSON"},
        {"index.json": "[" * 200_000},
        {"preparing.json": json.dumps({"dinner": "soup"})},
        {".lock": "mine", "x.txt": "mine"},
    ],
)
def test_a_folder_of_the_users_own_is_refused_and_left_as_it_is(
    source: Path, tmp_path: Path, files: dict[str, str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = content(folder)
    with pytest.raises(
        UserError, match=r"mine is not empty and was not made by shardwise.*Choose another folder"
    ):
        prepare(source, "bytes", folder)
    assert content(folder) == before


@pytest.mark.parametrize("files", [(), (".lock",), (".lock", "preparing.json.partial")])
def test_an_empty_folder_or_one_with_our_lock_is_accepted(
    source: Path, tmp_path: Path, files: tuple[str, ...]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    assert prepare(source, "bytes", folder).documents == 1
    assert sorted(content(folder)) == [".lock", "index.json", "shard-00000.bin", "shard-00000.ends"]


def test_starting_over_in_our_folder_keeps_what_the_user_put_there(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    prepare(source, "bytes", folder)
    mine = {"notes.md": b"mine", "download.partial": b"mine", "shard-mine.bin": b"mine"}
    for name, text in mine.items():
        (folder / name).write_bytes(text)
    (folder / "shard-00007.bin").write_bytes(b"left by an earlier source")
    source.write_text("other words")
    prepare(source, "bytes", folder)
    tokens = Tokens.open(folder)
    assert bytes(tokens.read(0, len(tokens) - 1).tolist()) == b"other words"
    assert set(content(folder)) == {".lock", "index.json", "shard-00000.bin", "shard-00000.ends", *mine}
    assert {name: content(folder)[name] for name in mine} == mine


@pytest.mark.parametrize("prepared_before", [False, True])
def test_a_folder_is_still_ours_when_killed_before_or_after_clearing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared_before: bool
) -> None:
    folder = tmp_path / "out"
    if prepared_before:
        prepare(source, "bytes", folder)
        source.write_text("other words")
    real = module.clear

    def killed_before(folder: Path) -> None:
        raise KilledError

    def killed_after(folder: Path) -> None:
        real(folder)
        (folder / "shard-00000.bin.partial").write_bytes(b"half")
        raise KilledError

    for stand_in in (killed_before, killed_after):
        monkeypatch.setattr(module, "clear", stand_in)
        with pytest.raises(KilledError):
            prepare(source, "bytes", folder)
    monkeypatch.setattr(module, "clear", real)
    prepare(source, "bytes", folder)
    assert Tokens.open(folder).index.tokens == len(source.read_text()) + 1
    assert sorted(content(folder)) == [".lock", "index.json", "shard-00000.bin", "shard-00000.ends"]


def test_a_source_folder_with_a_foreign_index_is_an_ordinary_folder(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("some text")
    for text in (json.dumps(FOREIGN), "{}", "[]", "not JSON"):
        (folder / "index.json").write_text(text)
        (folder / "preparing.json").write_text(text)
        ((made, _),) = prepare_sources(Data(source=str(folder), cache=str(tmp_path / "cache")))
        assert Tokens.open(made).index.tokens == len("some text") + 1


@pytest.mark.parametrize("damage", ["cut short", "no shards named", "not an object", "deeply nested"])
def test_a_damaged_index_of_ours_is_called_damaged(source: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "out"
    prepare(source, "bytes", folder)
    index = folder / "index.json"
    values = json.loads(index.read_text())
    del values["shards"]
    texts = {
        "cut short": index.read_text()[:50],
        "no shards named": json.dumps(values),
        "not an object": "[]",
    }
    index.write_text(texts.get(damage, "[" * 200_000))
    with pytest.raises(UserError, match=r"index\.json is damaged.*Delete the folder"):
        Tokens.open(prepare_sources(Data(source=str(folder)))[0][0])
    with pytest.raises(UserError, match=r"index\.json is damaged.*Delete the folder"):
        prepare(source, "bytes", folder)


def _socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)  # the path may be longer than an address can be
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


@pytest.mark.parametrize(
    "beside",
    [{}, {"notes.txt": "a text"}, {"more.jsonl": '{"text": "a line"}\n'}],
    ids=["alone", "text", "json"],
)
@pytest.mark.parametrize(
    ("put", "found"),
    [
        pytest.param(lambda path: None, "is missing", id="nothing"),
        pytest.param(os.mkfifo, "is not a regular file", id="pipe"),
        pytest.param(Path.mkdir, "is not a regular file", id="folder"),
        pytest.param(lambda path: path.symlink_to(path.name), "is not a regular file", id="link to itself"),
        pytest.param(lambda path: path.symlink_to("/dev/null"), "is not a regular file", id="device"),
        pytest.param(_socket_at, "is not a regular file", id="socket"),
        pytest.param(
            lambda path: path.write_text(json.dumps(FOREIGN)), "is not one that shardwise wrote", id="foreign"
        ),
    ],
)
def test_shards_whose_index_is_not_a_file_of_ours_are_never_read_as_text(
    source: Path, tmp_path: Path, put: Callable[[Path], object], found: str, beside: dict[str, str]
) -> None:
    folder = tmp_path / "out"
    prepare(source, "bytes", folder)
    (folder / "index.json").unlink()
    put(folder / "index.json")
    for name, text in beside.items():
        (folder / name).write_text(text)
    before = sorted(os.listdir(folder))
    data = Data(source=str(folder), sequence_length=4, cache=str(tmp_path / "cache"))
    with pytest.raises(
        UserError, match=rf"out/index\.json {found}.*shard-00000\.bin.*prepare the data again"
    ):
        prepare_sources(data)
    with pytest.raises(UserError, match=r"index\.json"):
        prepare(folder, "bytes", tmp_path / "copy")
    assert sorted(os.listdir(folder)) == before
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("given", ["out", "out/shard-00000.bin", "out/shard-*"])
def test_prepared_tokens_are_no_text_wherever_they_are_met(
    source: Path, tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, "bytes", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"out/shard-00000\.(bin|ends)? holds prepared tokens"):
        prepare(given, "bytes", tmp_path / "copy")


@pytest.mark.parametrize("given", ["out/shard-00000.bin.partial", "out/*", "out"])
def test_half_prepared_tokens_are_no_text(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that was killed leaves them, and somebody who removes what looks like a leftover."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-00000.bin.partial").write_bytes(b"0" * 64)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"index\.json is missing, so shard-00000\.bin\.partial beside it cannot be read"
    ):
        prepare(given, "bytes", tmp_path / "copy")


def test_prepared_tokens_below_a_source_are_passed_over(source: Path, tmp_path: Path) -> None:
    """As where data.cache lies among the files that it was made of."""
    text = source if source.is_file() else next(path for path in source.rglob("*") if path.is_file())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_bytes(text.read_bytes())
    prepare(tmp_path / "data", "bytes", tmp_path / "data" / "cache")
    assert [file.path.name for file in find_files(tmp_path / "data")] == ["text.txt"]


def test_a_file_as_target_is_named_as_such(source: Path) -> None:
    with pytest.raises(UserError, match=r"a\.txt is a file, not a folder\. Choose another folder"):
        prepare(source, "bytes", source)
    assert source.read_text() == "some text"


def test_empty_paths_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match="folder for the prepared data is an empty path"):
        prepare(source, "bytes", "")
    with pytest.raises(UserError, match="data source: an empty path"):
        prepare("", "bytes", tmp_path / "out")
    for data in (Data(source=""), Data(sources=(TextSource(path=""),))):
        with pytest.raises(UserError, match=r"data\.source: an empty path"):
            prepare_sources(data)
    assert list(here.iterdir()) == []
