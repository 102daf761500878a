from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from shardwise.config import Data, TextSource
from shardwise.data import Dataset, source_files
from shardwise.data.prepare import prepare, prepare_sources
from shardwise.data.tokens import Tokens
from shardwise.errors import UserError

module = import_module("shardwise.data.prepare")  # the package's own attribute of that name is the function


class InterruptedWorkError(Exception):
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three text files and one of JSON lines, larger than a few small shards."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"document {i} " * (i % 7)}) + "\n" for i in range(200))
    )
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"another {i} é " * (i % 5)}) + "\n" for i in range(100))
    )
    return folder


def documents_of(folder: Path) -> list[list[int]]:
    tokens = Tokens.open(folder)
    ids, ends = tokens.read(0, len(tokens)), tokens.boundaries(0, len(tokens))
    return [part.tolist() for part in np.split(ids, ends[:-1] + 1)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def expected_texts(source: Path) -> list[str]:
    lines = [
        json.loads(line)["text"]
        for name in ("a", "b")
        for line in (source / f"{name}.jsonl").read_text().splitlines()
    ]
    return [text for text in lines if text]


def test_every_document_is_there_with_its_end_token(source: Path, tmp_path: Path) -> None:
    index = prepare(source, "bytes", tmp_path / "out", shard_tokens=1000)
    expected = [[*text.encode(), 256] for text in expected_texts(source)]
    assert documents_of(tmp_path / "out") == expected
    assert len(index.shards) > 3
    assert (index.documents, index.tokens) == (len(expected), sum(map(len, expected)))
    assert not list((tmp_path / "out").glob("*.partial"))
    assert not (tmp_path / "out" / "preparing.json").exists()


def test_a_tokenizer_file_is_used_and_kept(source: Path, tmp_path: Path, bpe: Path) -> None:
    index = prepare(source, bpe, tmp_path / "out")
    library = Library.from_file(str(bpe))
    library.no_truncation()
    library.no_padding()
    end = library.token_to_id("<|endoftext|>")
    expected = [[*library.encode(text, add_special_tokens=False).ids, end] for text in expected_texts(source)]
    assert documents_of(tmp_path / "out") == expected
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bpe.read_bytes()
    assert (index.tokenizer, index.vocabulary, index.end) == ("tokenizer.json", library.get_vocab_size(), end)


@pytest.mark.parametrize("kind", ["rows", "pieces of a long text"])
@pytest.mark.parametrize("after", [2, 7, 13])
def test_resuming_after_an_interruption_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: int
) -> None:
    if kind != "rows":
        for name in ("a", "b"):  # the same words as one document a file, read in small pieces
            (source / f"{name}.jsonl").rename(source / f"{name}.txt")
        monkeypatch.setattr(source_files, "PIECE_BYTES", 700)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 600)
    seen: list[int] = []
    straight: list[int] = []
    continued: list[int] = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == after:
            raise InterruptedWorkError

    prepare(
        source,
        "bytes",
        tmp_path / "straight",
        shard_tokens=1000,
        progress=lambda done, total: straight.append(done),
    )
    with pytest.raises(InterruptedWorkError):
        prepare(source, "bytes", tmp_path / "broken", shard_tokens=1000, progress=interrupt)
    assert not (tmp_path / "broken" / "index.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "broken").glob("shard-*.bin")}
    prepare(
        source,
        "bytes",
        tmp_path / "broken",
        shard_tokens=1000,
        progress=lambda done, total: continued.append(done),
    )
    assert content(tmp_path / "broken") == content(tmp_path / "straight")
    assert kept
    assert all((tmp_path / "broken" / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert len(continued) < len(straight)


def test_a_changed_source_is_noticed_and_starts_over(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare(source, "bytes", tmp_path / "out", shard_tokens=500)
    assert prepare(source, "bytes", tmp_path / "out", shard_tokens=500) == first
    (source / "b.jsonl").write_text(json.dumps({"text": "all new"}))
    (source / "a.jsonl").unlink()
    second = prepare(source, "bytes", tmp_path / "out", shard_tokens=500)
    assert second.source != first.source
    assert documents_of(tmp_path / "out") == [[*b"all new", 256]]
    assert len(list((tmp_path / "out").glob("shard-*.bin"))) == 1
    assert "preparing it again" in caplog.text


def test_a_half_prepared_folder_of_another_source_starts_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 600)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise InterruptedWorkError

    with pytest.raises(InterruptedWorkError):
        prepare(source, "bytes", tmp_path / "out", shard_tokens=500, progress=interrupt)
    assert (tmp_path / "out" / "preparing.json").exists()
    with pytest.raises(UserError, match="only half prepared"):
        prepare_sources(Data(source=str(tmp_path / "out")))
    os.utime(source / "a.jsonl", (1, 1))
    prepare(source, "bytes", tmp_path / "out", shard_tokens=500)
    assert documents_of(tmp_path / "out") == [[*text.encode(), 256] for text in expected_texts(source)]


def test_progress_rises_to_the_total(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 600)
    calls: list[tuple[int, int]] = []
    prepare(source, "bytes", tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    total = sum(path.stat().st_size for path in source.iterdir())
    assert len(calls) > 5
    assert {total for _, total in calls} == {total}
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert done[-1] <= total


def test_processes_that_prepare_the_same_folder_at_once_agree(source: Path, tmp_path: Path) -> None:
    """Fresh processes, since a file lock is what is tested."""
    script = (
        "import sys; from shardwise.data.prepare import prepare; print(prepare(*sys.argv[1:4], "
        "shard_tokens=1000).tokens)"
    )
    command = [sys.executable, "-c", script, str(source), "bytes", str(tmp_path / "out")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], answers
    assert len({out for out, _ in answers}) == 1
    prepare(source, "bytes", tmp_path / "alone", shard_tokens=1000)
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_preparing_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import shardwise.data.prepare, shardwise.data.dataset"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_sources_of_a_job_are_prepared_once_into_the_cache(source: Path, tmp_path: Path, bpe: Path) -> None:
    cache = str(tmp_path / "cache")
    job = Data(
        sources=(
            TextSource(path=str(source), weight=2.0),
            TextSource(path=str(source / "a.jsonl"), weight=1.0),
        ),
        cache=cache,
    )
    first = prepare_sources(job)
    assert [weight for _, weight in first] == [2.0, 1.0]
    assert len({folder for folder, _ in first}) == 2
    calls: list[int] = []
    assert prepare_sources(job, lambda done, total: calls.append(done)) == first
    assert not calls
    ((other, _),) = prepare_sources(Data(source=str(source), cache=cache, tokenizer=str(bpe)))
    assert other not in {folder for folder, _ in first}


def test_a_prepared_folder_is_used_as_it_is_with_its_own_tokenizer(
    source: Path, tmp_path: Path, bpe: Path, make_tokenizer: Callable[..., Path]
) -> None:
    out = tmp_path / "out"
    prepare(source, bpe, out)
    assert prepare_sources(Data(source=str(out))) == [(out, 1.0)]
    assert prepare_sources(Data(source=str(out), tokenizer=str(bpe))) == [(out, 1.0)]
    other = make_tokenizer(tmp_path / "other.json", size=310)
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        prepare_sources(Data(source=str(out), tokenizer=str(other)))


def test_empty_data_and_unwritable_places_are_explained(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=r"empty\.txt: no text in it"):
        prepare(tmp_path / "empty.txt", "bytes", tmp_path / "out")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written to"):
        prepare(source, "bytes", tmp_path / "file" / "out")
    with pytest.raises(UserError, match=r"data\.source: missing"):
        prepare_sources(Data())


def test_documents_end_with_the_token_that_a_job_names(
    source: Path, tmp_path: Path, make_tokenizer: Callable[..., Path]
) -> None:
    path = make_tokenizer(tmp_path / "odd.json", ("<stop>", "<|endoftext|>"))
    usual, named = (
        Data(source=str(source), tokenizer=str(path), end_of_document=end, cache=str(tmp_path / "cache"))
        for end in (None, "<stop>")
    )
    stop = Library.from_file(str(path)).token_to_id("<stop>")
    (first, _), (second, _) = prepare_sources(usual)[0], prepare_sources(named)[0]
    assert first != second
    assert {document[-1] for document in documents_of(second)} == {stop}
    assert stop not in {document[-1] for document in documents_of(first)}
    assert Dataset.open(named.model_copy(update={"source": str(second)}), 0).tokenizer.end == stop
    with pytest.raises(
        UserError, match=r"prepared with '<\|endoftext\|>' .* data\.end_of_document is '<stop>'"
    ):
        prepare_sources(named.model_copy(update={"source": str(first)}))
