import io
import math
import re

import pytest
from rich.console import Console

from shardwise.observe import TrainingProgress, error_console, header
from shardwise.observe.format import (
    format_bytes,
    format_count,
    format_duration,
    format_energy,
    format_percent,
    format_span,
)
from shardwise.observe.terminal import shown_steps
from shardwise.observe.text_plots import Series, bar, line_plot, sparkline
from shardwise.plurals import counted


def record(step: int, **more):
    return {
        "step": step,
        "loss": 5.0 / step,
        "tokens_per_second": 41234.0,
        "sequences_per_second": 161.0,
        "seconds": 2.0,
        "learning_rate": 3e-4,
        "gradient_norm": 0.5,
        "mfu": None,
        "memory_bytes": 3 << 30,
        "spans": {},
        **more,
    }


def console(terminal: bool, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, color_system=None
    )


@pytest.mark.parametrize(
    ("first", "steps"), [(1, 1), (1, 7), (1, 20), (1, 21), (1, 300), (11, 20), (501, 1000), (1, 10**6)]
)
def test_plain_lines_are_about_twenty_with_the_first_and_the_last(first, steps):
    shown = shown_steps(first, steps)
    count = steps - first + 1
    assert shown[0] == first
    assert shown[-1] == steps
    assert min(count, 10) <= len(shown) <= 22
    assert all(first <= step <= steps for step in shown)


def test_away_from_a_terminal_there_is_one_plain_line_a_shown_step():
    plain = console(False)
    with TrainingProgress(plain, steps=100) as progress:
        for step in range(1, 101):
            progress.update(record(step))
    text = plain.file.getvalue()
    lines = [line for line in text.splitlines() if line.startswith("step")]
    assert len(lines) == len(shown_steps(1, 100)) == 21
    assert "\x1b" not in text
    assert "41.2k tokens/s  161 samples/s  MFU n/a  3 GiB" in lines[0]
    assert lines[10].startswith("step  50/100  loss 0.1000  lr 3.00e-04  gradient 0.500")
    assert lines[10].endswith("1:40 left")
    assert lines[-1].endswith("done in 3:20")


@pytest.mark.parametrize("terminal", [False, True])
def test_how_busy_the_busiest_expert_is_stands_in_the_line(terminal):
    shown = console(terminal, 140)
    with TrainingProgress(shown, steps=1) as progress:
        progress.update(record(1, expert_imbalance=1.375, expert_load=[1.25, 0.75]))
    assert "busiest expert 1.38" in shown.file.getvalue()


def test_messages_are_lasting_lines_and_brackets_survive():
    for terminal in (False, True):
        shown = console(terminal)
        with TrainingProgress(shown, steps=3) as progress:
            progress.update(record(1))
            progress.message("saved [runs/a/checkpoints/step-1]")
        assert "saved [runs/a/checkpoints/step-1]" in shown.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_on_a_terminal_the_last_picture_shows_where_the_run_stands(width):
    terminal = console(True, width)
    with TrainingProgress(terminal, steps=40, first_step=11) as progress:
        for step in range(11, 41):
            progress.update(record(step, mfu=0.4311))
    text = terminal.file.getvalue()
    assert "40 / 40 steps" in text
    assert "loss 0.1250" in text
    assert width == 60 or "MFU 43.1 %  3 GiB" in text


def test_a_run_that_never_stepped_closes_quietly():
    plain = console(False)
    with TrainingProgress(plain, steps=10):
        pass
    assert plain.file.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_the_header_shows_every_fact(terminal):
    shown = console(terminal)
    header(shown, "shardwise train [job]", {"layout": "data 4, zero 3", "attention": "cuDNN [flash]"})
    text = shown.file.getvalue()
    assert all(
        part in text for part in ("shardwise train [job]", "layout", "data 4, zero 3", "cuDNN [flash]")
    )


def test_a_sparkline_follows_the_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 7, 0, 0], 2) == "█▁"
    assert sparkline([1, math.nan, 2], 3) == "▁ █"
    assert sparkline([3, 3], 4) == "▁▁"
    assert sparkline([], 4) == sparkline([math.nan], 4) == ""


def test_a_long_series_stays_small_and_keeps_its_mean():
    series = Series(capacity=64)
    for value in range(4096):
        series.add(float(value))
    assert len(series.values) < 64
    assert series.values == sorted(series.values)
    stride = 4096 // len(series.values)
    assert series.values[0] == pytest.approx(sum(range(stride)) / stride)


def test_a_bar_is_drawn_to_an_eighth():
    assert bar(0.5, 10) == "█████"
    assert bar(1 / 80, 10) == "▏"
    assert bar(0, 10) == ""
    assert bar(math.nan, 10) == ""
    assert bar(2.0, 3) == "███"
    assert bar(0.5, 10, ascii_only=True) == "#####"


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_falling_line_runs_from_the_top_left_to_the_bottom_right(ascii_only):
    lines = line_plot([(1, 10.0), (100, 0.0)], [(100, 10.0)], width=30, height=6, ascii_only=ascii_only)
    rows = [
        line.split("+" if index in (0, 2, 5) else "|")[1] if ascii_only else line[4:]
        for index, line in enumerate(lines[:6])
    ]
    filled = [[x for x, cell in enumerate(row) if cell not in " ●o"] for row in rows]
    centres = [sum(row) / len(row) for row in filled]
    assert centres == sorted(centres)
    assert rows[0].endswith("o" if ascii_only else "●")
    assert lines[0].split()[0] == "10"
    assert lines[5].split()[0].startswith("0")
    assert lines[-1].split() == ["1", "50", "100"]
    assert not ascii_only or "".join(lines).isascii()


def test_a_plot_of_one_point_a_flat_line_or_nothing_does_not_fail():
    assert line_plot([(1, math.nan)]) == []
    assert len(line_plot([(1, 2.0)], height=4)) == 6
    assert len(line_plot([(1, 1e-323), (4, 0.0)], height=4)) == 6
    assert len(line_plot([(1, 0.0), (2, 0.0)], height=4)) == 6


def test_numbers_read_as_people_write_them():
    assert [format_count(n) for n in (0, 950, 999.9, 41234, 1.24e6, 3.1e9)] == [
        "0",
        "950",
        "1.00k",
        "41.2k",
        "1.24M",
        "3.10B",
    ]
    assert [format_bytes(n) for n in (512, 1536, 12.3 * 2**30)] == ["512 B", "1.50 KiB", "12.3 GiB"]
    assert [format_duration(s) for s in (7, 83, 7384, 273900)] == ["0:07", "1:23", "2:03:04", "3 d 04:05"]
    assert [format_percent(s) for s in (0.4311, None)] == ["43.1 %", "n/a"]


class Screen:
    """A terminal that folds long lines anew when it becomes narrower, as tmux does: what is written, as rows
    of one width."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|.|\n|\r", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A"):
                self.row -= int(part[2:-1] or 1)
                assert self.row >= 0
            elif part.endswith("K"):
                self.rows[self.row] = ""
            elif not part.startswith("\x1b"):
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    def narrow(self, width: int) -> None:
        folded = [
            [row[start : start + width] for start in range(0, max(1, len(row)), width)] for row in self.rows
        ]
        assert self.row == len(self.rows) - 1
        self.width, self.rows = width, [part for row in folded for part in row]
        self.row, self.column = len(self.rows) - 1, len(self.rows[-1])


def test_a_terminal_that_becomes_narrower_keeps_no_stale_line():
    terminal, screen, written = console(True, 120), Screen(120), 0

    def shown() -> None:
        nonlocal written
        text = terminal.file.getvalue()
        screen.write(text[written:])
        written = len(text)

    with TrainingProgress(terminal, steps=40) as progress:
        progress.message("before")
        progress.update(record(1))
        shown()
        screen.narrow(70)
        terminal.width = 70
        progress.message("between")
        progress.update(record(40))
        shown()
    rows = [row.rstrip() for row in screen.rows if row.strip()]
    assert rows[:2] == ["before", "between"]
    assert len(rows) == 4
    assert "40 / 40 steps" in rows[2]
    assert rows[3].startswith("loss 0.1250")


def test_lengths_of_time_and_energy_have_a_unit_that_suits_them():
    assert [format_span(seconds) for seconds in (0.5, 95, 477, 4 * 3600, 54 * 86400, 500 * 86400)] == [
        "0.5 seconds", "95 seconds", "7.95 minutes", "4 hours", "54 days", "500 days",
    ]  # fmt: skip
    assert [format_energy(kwh) for kwh in (0.00021, 12.3, 1430.0, 2.5e6)] == [
        "0.00021 kWh",
        "12.3 kWh",
        "1.43 MWh",
        "2,500 MWh",
    ]


def test_nouns_follow_their_numbers():
    assert [counted(number, "document") for number in (0, 1, 2, 1024)] == [
        "0 documents", "1 document", "2 documents", "1,024 documents",
    ]  # fmt: skip
    assert (counted(1, "micro-batch"), counted(4, "micro-batch")) == ("1 micro-batch", "4 micro-batches")


def test_lines_are_drawn_again_on_a_terminal_only_whatever_the_environment_says(monkeypatch):
    """The kernel of a notebook sets FORCE_COLOR, and shows lines one below the other."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert Console(stderr=True).is_terminal
    assert not error_console().is_terminal
