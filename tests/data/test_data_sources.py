from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import source_files
from shardwise.data.source_files import find_files, read_pieces
from shardwise.errors import ConfigError, UserError

DOCUMENTS = ["first\nof all", "second: café 中文", "third"]


def documents(source: str | Path, field: str = "text") -> list[str]:
    """Pieces joined back into whole documents."""
    found, parts = [], []
    for file in find_files(source):
        for piece in read_pieces(file, field):
            parts.append(piece.text)
            assert 0 < piece.position <= file.size
            if piece.ends:
                found.append("".join(parts))
                parts = []
    assert not parts, "the last document has no end"
    return found


def json_lines(field: str = "text") -> str:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(DOCUMENTS))


def save_to_disk(folder: Path, *, file_form: bool = False) -> Path:
    """What Hugging Face `datasets` leaves on disk: Arrow streams named in state.json."""
    folder.mkdir(parents=True)
    for number, texts in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        table = pa.table({"id": list(range(len(texts))), "text": texts})
        form = pa.ipc.new_file if file_form else pa.ipc.new_stream
        with form(str(folder / f"data-{number:05d}-of-00002.arrow"), table.schema) as writer:
            writer.write_table(table)
    names = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(
        json.dumps({"_data_files": names, "_split": "train", "_indices_data_files": None})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    for name in ("a.txt", "a.md", "plain"):
        (tmp_path / name).write_bytes("\ufeffone\r\ntwo é\n".encode())
        assert documents(tmp_path / name) == ["one\r\ntwo é\n"]


@given(
    st.lists(st.sampled_from(["a", "\n", "é", "中", "😀", "line of words\n"]), max_size=60), st.integers(1, 9)
)
@settings(max_examples=150)
def test_pieces_of_a_text_file_join_into_the_file_and_end_after_lines(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "PIECE_BYTES", size)
        pieces = [piece for file in find_files(path) for piece in read_pieces(file, "text")]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    assert all(len(piece.text.encode()) <= 2 * size + 4 for piece in pieces)


def test_a_large_text_file_is_read_in_pieces_cut_after_lines(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text("".join(f"line {i} é\n" for i in range(300_000)), encoding="utf-8")
    pieces = list(read_pieces(find_files(path)[0], "text"))
    assert len(pieces) >= 3
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert "".join(piece.text for piece in pieces) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz"])
def test_json_lines_are_read(tmp_path: Path, name: str) -> None:
    content = (
        json_lines() + "\n" + json.dumps({"text": None}) + "\n" + json.dumps({"text": ""}) + "\n"
    ).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert documents(tmp_path / name) == DOCUMENTS


def test_half_a_character_in_json_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert documents(tmp_path / "a.jsonl") == ["a\ufffdb 😀"]


def test_parquet_is_read_by_the_named_field(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3, 4], "body": [*DOCUMENTS, None]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert documents(tmp_path / "a.parquet", "body") == DOCUMENTS


@pytest.mark.parametrize("file_form", [False, True])
def test_a_hugging_face_folder_is_read_in_the_order_of_its_state(tmp_path: Path, file_form: bool) -> None:
    assert documents(save_to_disk(tmp_path / "saved", file_form=file_form)) == DOCUMENTS


def test_a_hub_style_folder_gives_its_data_files_only(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.jsonl").write_text("not data")
    (tmp_path / "README.md").write_text("# a card")
    (tmp_path / "dataset_infos.json").write_text("{}")
    pq.write_table(pa.table({"text": DOCUMENTS[:2]}), tmp_path / "data" / "train-00000.parquet")
    (tmp_path / "data" / "train-00001.jsonl").write_text(json.dumps({"text": DOCUMENTS[2]}))
    assert documents(tmp_path) == DOCUMENTS


def test_folders_and_globs_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/9.txt", "a/10.txt", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a/10.txt", "a/9.txt", "b/2.txt", "c.md"]
    assert documents(f"{tmp_path}/**/*.txt") == ["a/10.txt", "a/9.txt", "b/2.txt"]
    assert documents(f"{tmp_path}/[ab]") == ["a/10.txt", "a/9.txt", "b/2.txt"]


def test_the_folders_of_runs_are_no_data(tmp_path: Path) -> None:
    """As where a job lies beside its data, and its runs beneath them."""
    for name in (
        "runs/demo/config.toml",
        "runs/demo/plan.json",
        "runs/demo/events.jsonl",
        "runs/demo/logs/rank-0.log",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "text.txt").write_text("to be")
    assert [file.path.name for file in find_files(tmp_path)] == ["text.txt"]
    (tmp_path / "more.jsonl").write_text(json_lines())
    assert documents(tmp_path) == DOCUMENTS
    with pytest.raises(UserError, match="no files in it"):
        find_files(tmp_path / "runs" / "demo")


def test_missing_and_empty_places_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data source: an empty path"):
        find_files("")
    with pytest.raises(UserError, match=r"nowhere\.txt: no such file or folder"):
        find_files(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match=r"^data source x+: cannot be read: File name too long$"):
        find_files("x" * 300)
    with pytest.raises(UserError, match="no files in it"):
        find_files(tmp_path)
    with pytest.raises(UserError, match="no files in it"):
        find_files(f"{tmp_path}/*.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": oops}', r"a\.jsonl, line 2: not valid JSON"),
        (b'{"text": "\xff"}', r"a\.jsonl, line 2: not valid JSON"),
        (b'{"text": ' + b"[" * 200_000, r"a\.jsonl, line 2: not valid JSON"),
        (b'["text"]', r"a\.jsonl, line 2: a JSON list, not an object"),
        (b'{"body": "x", "id": 1}', r"a\.jsonl, line 2: no field 'text'; there are: body, id"),
        (b'{"text": 3}', r"a\.jsonl, line 2: field 'text' holds int, not text"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        documents(tmp_path / "a.jsonl")


def test_text_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 10 + b"caf\xe9\n")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text \(byte 53\)"):
        documents(tmp_path / "a.txt")


def test_tables_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"bad\.parquet is not a readable Parquet file"):
        documents(tmp_path / "bad.parquet")
    (tmp_path / "bad.arrow").write_bytes(b"nonsense nonsense nonsense")
    with pytest.raises(UserError, match=r"bad\.arrow is not a readable Arrow file"):
        documents(tmp_path / "bad.arrow")
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match="no field 'text'; there are: body, id"):
        documents(tmp_path / "other.parquet")
    with pytest.raises(UserError, match=r"other\.parquet, row 0: field 'id' holds int, not text"):
        documents(tmp_path / "other.parquet", "id")
    with pytest.raises(UserError, match="no field 'body'; there are: id, text"):
        documents(save_to_disk(tmp_path / "saved"), "body")


def test_damaged_gzip_and_odd_hugging_face_folders_are_explained(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json_lines().encode())[:-20])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz cannot be read"):
        documents(tmp_path / "cut.jsonl.gz")
    saved = save_to_disk(tmp_path / "both" / "train")
    (tmp_path / "both" / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match="holds several splits; give one of them: train"):
        find_files(tmp_path / "both")
    (saved / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json: _data_files: field required.*Save the data set again"):
        find_files(saved)


def test_parquet_without_pyarrow_names_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'shardwise\[parquet\]'"):
        documents(tmp_path / "a.parquet")


def test_the_first_twenty_bad_records_are_named_with_their_lines_and_files(tmp_path: Path) -> None:
    good, bad = json.dumps({"text": "fine"}), ["{", '{"text": 3}', "[]", '{"body": "x"}']
    lines = [bad[number // 3 % 4] if number % 3 == 0 else good for number in range(30)]
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = find_files(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        list(read_pieces(files[0], "text", following=files[1:]))
    places = [str(problem).partition(":")[0] for problem in refusal.value.problems]
    expected = [f"{tmp_path / name}.jsonl, line {number + 1}" for name in "ab" for number in range(0, 30, 3)]
    assert places == expected
    assert str(refusal.value).startswith("the data has 20 problems:")
    assert str(refusal.value).endswith("and perhaps more: the search ended after 20")
    with pytest.raises(ConfigError) as refusal:
        list(read_pieces(files[2], "text"))
    assert len(refusal.value.problems) == 10


def test_good_records_before_a_bad_one_are_read_and_one_bad_record_is_named_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{\n{"text": "two"}\n')
    pieces = read_pieces(find_files(tmp_path)[0], "text")
    assert next(pieces).text == "one"
    with pytest.raises(UserError, match=r"^\S+a\.jsonl, line 2: not valid JSON"):
        next(pieces)
