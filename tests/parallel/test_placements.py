"""Who holds what is as written down in placements/*.txt, and what is written down is every parameter,
once."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "placements"
WRITE = FOLDER / "write.py"
TABLES = sorted(path.name for path in FOLDER.glob("*.txt"))


@pytest.mark.full
def test_every_rank_holds_the_slices_written_down(tmp_path: Path) -> None:
    """In a process of its own, which forks one for each rank: a process that has used torch's threads should
    not fork."""
    subprocess.run([sys.executable, str(WRITE), str(tmp_path)], check=True)
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == TABLES
    different = [line for name in TABLES for line in changes(FOLDER / name, tmp_path / name)]
    if different:
        pytest.fail(
            "\n".join([*different, "", "If that is meant: python tests/parallel/placements/write.py"]),
            pytrace=False,
        )


def changes(old: Path, new: Path) -> list[str]:
    lines = (path.read_text().splitlines() for path in (old, new))
    return list(
        difflib.unified_diff(*lines, f"{old.name} as committed", f"{old.name} as built", n=2, lineterm="")
    )


@pytest.mark.parametrize("name", TABLES)
def test_the_slices_of_a_parameter_make_up_the_whole_without_overlap(name: str) -> None:
    for entry in re.split(r"(?<=\d)\n(?=\S)", (FOLDER / name).read_text().split("\n\n", 1)[1].rstrip()):
        head = next(line for line in entry.splitlines() if not line.startswith(" "))
        shape = [int(size) for size in head[head.rindex("(") + 1 : -1].split(",")]
        slices = [line.split("  ranks ")[0].strip() for line in entry.splitlines() if line.startswith(" ")]
        boxes = [box(words, shape) for words in slices if words != "nothing"]
        assert sum(prod(stop - start for start, stop in bounds) for bounds in boxes) == prod(shape), head
        assert not any(overlap(one, other) for index, one in enumerate(boxes) for other in boxes[:index]), (
            head
        )


def box(words: str, shape: list[int]) -> list[tuple[int, int]]:
    bounds = [(0, size) for size in shape]
    for dim, part in enumerate(words.split(", ") if words != "whole" else []):
        if part != ":":
            start, stop = part.split(":")
            bounds[dim] = int(start), int(stop)
    return bounds


def overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    return all(
        first[0] < second[1] and second[0] < first[1] for first, second in zip(one, other, strict=True)
    )
