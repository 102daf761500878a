"""The one reader of files from outside: what it takes, and how it says what it does not."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from shardwise import files
from shardwise.errors import ConfigError, UserError
from shardwise.files import (
    file_in_folder,
    file_or_link_in_folder,
    parse_as,
    parse_json,
    parse_toml,
    read_bytes,
    reading,
    seal,
    unseal,
)


def test_what_was_sealed_comes_back_and_one_flipped_bit_is_noticed() -> None:
    content = seal({"step": 3, "name": "ä"})
    body = unseal(content)
    assert body is not None
    assert parse_json(body, "it") == {"step": 3, "name": "ä"}
    assert int(content.split()[-2]) == zlib.crc32(body.removesuffix(b"\n}"))
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unseal(bytes(flipped)) is None
    for length in range(len(content)):
        assert unseal(content[:length]) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "f.json is not valid JSON: "),
        ('{"a": NaN}', "f.json is not valid JSON: NaN is not a number"),
        ('{"a": [1, 1e999]}', "f.json: a[1] is not a finite number"),
        ('{"a": {"b": 99999999999999999999}}', "f.json: a.b is a number of 67 bits, of at most 63"),
        ('{"a": "\\u001b[2J"}', "f.json: a = '\\x1b[2J' has a control character"),
        ('{"a\\nb": 1}', "f.json: has a key 'a\\nb' with a control character"),
        ('["\\ud800"]', "f.json: [0] = '\\ud800' has a control character"),
        ("[" * 70 + "]" * 70, "f.json is nested more than 64 times"),
        ("[" * 100_000, "f.json is not valid JSON: "),
        ('{"a": "x"}', "f.json: a = 'x': input should be a valid integer"),
    ],
)
def test_file_place_and_reason_are_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_as(dict[str, int], text.encode(), "f.json")
    assert str(refusal.value).startswith(reason)
    assert "\n" not in str(refusal.value)


def test_text_with_lines_and_tabs_is_text() -> None:
    assert parse_toml(b"\xef\xbb\xbfsteps = 2", "f.toml") == {"steps": 2}  # as some editors begin a file
    assert parse_toml(b'sample = "a\\tb\\nc"', "f.toml") == {"sample": "a\tb\nc"}


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    refused: dict[Any, str] = {
        "pipe": "is not a regular file",
        "large": "is larger than",
        "": "is a folder",
        "a\0b": "cannot be read",
    }
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            read_bytes(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


def test_a_name_stays_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "within").mkdir(parents=True)
    for name in ("outside", "folder/within/file"):
        (tmp_path / name).write_text("text")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "in").symlink_to("within/file")
    (tmp_path / "elsewhere").symlink_to(folder)
    assert file_in_folder(folder, "in").read_text() == "text"
    assert file_in_folder(tmp_path / "elsewhere", "in").read_text() == "text"
    assert file_or_link_in_folder(folder, "out").read_text() == "text"
    with pytest.raises(UserError, match="leads out of its folder"):
        file_in_folder(folder, "out")
    for name in ("..", ".", "", "within/file", "/etc/passwd", "../outside", "a\0b", "x" * 300):
        for find in (file_in_folder, file_or_link_in_folder):
            with pytest.raises(UserError):
                find(folder, name)


def test_links_are_followed_to_regular_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        "absent": "is not there",
        "loop": "leads back to it",
        "pipe": "is not a regular file",
        "/dev/zero": "is not a regular file",
    }
    wrong |= {".": "is not a regular file"}
    for target, why in wrong.items():
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to(target)
        with pytest.raises(UserError, match=f"loop is a link to {re.escape(target)}, which {why}"):
            file_or_link_in_folder(tmp_path, "loop")
    assert not file_or_link_in_folder(tmp_path, "nothing").exists()


def test_a_path_that_the_system_refuses_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A name too long stands for all of them: no permission and a broken disk come by the same calls."""
    too_long = tmp_path / ("x" * 300)
    with (
        pytest.raises(UserError, match=r"x cannot be read: File name too long\. Try another$"),
        reading(too_long, "Try another"),
    ):
        too_long.is_file()
    with pytest.raises(UserError, match=r"checkpoint\.json cannot be read: File name too long"):
        file_in_folder(too_long, "checkpoint.json")
    with pytest.raises(FileNotFoundError), reading(tmp_path / "absent"):
        os.listdir(tmp_path / "absent")


def test_a_link_to_itself_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert not file_in_folder(tmp_path, "loop").is_file()


def test_a_message_is_bounded_and_shows_what_would_command_a_terminal() -> None:
    assert str(UserError("a\x1b[2J\x9b\u202eb\nc\td")) == "a\\x1b[2J\\x9b\\u202eb\nc\\td"
    assert len(str(UserError("x" * 10**6))) <= 1001
    problems = str(ConfigError("job", [f"problem {number}" for number in range(1000)]))
    assert problems.startswith("job has 1,000 problems:")
    assert problems.endswith("and 960 more")
