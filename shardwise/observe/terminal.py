"""What a person sees while training: what was chosen, then the progress.

On a terminal, two lines are redrawn in place: the progress, and the numbers with the curve of the loss.
Anywhere else (a file, a batch system's log) the same numbers are plain lines, about twenty over the run plus
the first and the last. Which steps are shown depends only on their number, so that the logs of two runs can
be compared line by line. Everything goes to standard error, so that standard output contains only results.
Redrawing happens on updates, at most ten times a second, and starts no thread.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Mapping
from time import monotonic

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from shardwise.observe.format import format_bytes, format_count, format_duration, format_percent
from shardwise.observe.records import Record
from shardwise.observe.text_plots import Series, sparkline

_LINES = 20
"""Approximate number of plain lines over a run."""
_REDRAW_SECONDS = 0.1
"""Minimum number of seconds between two redraws."""
_CURVE = 24
"""Maximum number of characters of the curve of the loss."""


def error_console() -> Console:
    """Return a console for standard error that does not colour numbers.

    In a notebook the kernel shows what workers print below the cell. It sets FORCE_COLOR, by which rich would
    take that for a terminal; but lines there cannot be drawn again, so they would pile up.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return Console(
        stderr=True, highlight=False, force_jupyter=False, force_terminal=None if is_terminal else False
    )


def header(console: Console, title: str, choices: Mapping[str, str]) -> None:
    """Print the title of a run and what was chosen for it, one line each."""
    if not console.is_terminal:
        margin = max(map(len, choices), default=0)
        lines = [title, *(f"  {name:<{margin}}  {value}" for name, value in choices.items())]
        console.print("\n".join(lines), markup=False, soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in choices.items():
        grid.add_row(Text(name), Text(value))
    console.print(
        Panel(grid, title=Text(title, style="bold"), title_align="left", border_style="cyan", expand=False)
    )


def shown_steps(first_step: int, steps: int) -> list[int]:
    """Return the steps that get a plain line: the first, the last, and about twenty evenly between them."""
    if steps < first_step:
        return []
    every = -(-(steps - first_step + 1) // _LINES)
    return sorted({first_step, steps, *range(every * (first_step // every + 1), steps + 1, every)})


class TrainingProgress:
    """Shows the progress of training, from the metrics record of each step.

    `first_step` is the first step of this run: 1, or N + 1 after resuming at step N. Use it as a context
    manager, so that the terminal is restored whatever happens.
    """

    def __init__(self, console: Console, steps: int, first_step: int = 1) -> None:
        self._console = console
        self._steps, self._first = steps, first_step
        self._shown = frozenset(shown_steps(first_step, steps))
        self._losses = Series()
        self._first_loss: float | None = None
        self._recent: deque[float] = deque(maxlen=20)
        self._record: Record = {}
        self._live: Live | None = None
        self._drawn = 0.0
        self._widths: list[int] = []
        """Widths of the lines on the screen."""
        self._seconds = 0.0

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, record: Record) -> None:
        """Show the record of a completed step."""
        self._record = record
        self._losses.add(record["loss"])
        self._first_loss = record["loss"] if self._first_loss is None else self._first_loss
        self._recent.append(record["seconds"])
        self._seconds += record["seconds"]
        if self._console.is_terminal:
            self._redraw(now=record["step"] == self._steps)
        elif record["step"] in self._shown:
            self._print(Text(self._plain(record)))

    def message(self, text: str) -> None:
        """Print a lasting line above the progress, for example about a save or a skipped step."""
        self._print(Text(text, style="" if self._live is None else "cyan"))

    def close(self) -> None:
        """Leave the last state on the screen. If nothing was redrawn, print the curve of the loss once."""
        if self._live is not None:
            self._redraw(now=True)
            self._live.stop()
            self._live, self._widths = None, []
        elif not self._console.is_terminal and self._first_loss is not None:
            self._print(Text(f"loss {self._first_loss:.4f} {self._curve(60)} {self._record['loss']:.4f}"))
        self._first_loss = None

    def _print(self, text: Text) -> None:
        self._erase_what_was_folded()
        self._console.print(text, soft_wrap=True)
        if self._live is not None:  # it was drawn again below the text
            self._widths = self._widths_of(self._live.renderable)

    def _redraw(self, now: bool) -> None:
        if self._live is None:
            # Standard output is for results only.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        elif not now and monotonic() - self._drawn < _REDRAW_SECONDS:
            return
        self._erase_what_was_folded()
        self._live.update(self._picture(), refresh=True)
        self._widths = self._widths_of(self._live.renderable)
        self._drawn = monotonic()

    def _erase_what_was_folded(self) -> None:
        """Erase rows that a terminal has added because it became narrower and wrapped the lines on it.

        The rows beyond those that were drawn would otherwise stay.
        """
        width = self._console.width
        folded = sum(max(0, -(-drawn // width) - 1) for drawn in self._widths)
        for _ in range(folded):
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)))

    def _widths_of(self, picture: RenderableType) -> list[int]:
        rows = self._console.render_lines(picture, pad=False)
        return [sum(segment.cell_length for segment in row) for row in rows]

    def _picture(self) -> Group:
        record, step = self._record, self._record["step"]
        room = min(44, max(10, self._console.width - 40))
        line = Table.grid(padding=(0, 1))
        line.add_row(
            ProgressBar(total=self._steps, completed=step, width=room),
            Text.assemble((f" {step:,}", "bold"), f" / {self._steps:,} steps", (f"  {self._left()}", "dim")),
        )
        loss, speed = f"{record['loss']:.4f} ", _speed(record) + _experts(record)
        curve = self._curve(min(_CURVE, max(8, self._console.width - len(loss) - len(speed) - 8)))
        numbers = Text.assemble(("loss ", "dim"), (loss, "bold green"), (curve, "green"), "  ", speed)
        numbers.no_wrap, numbers.overflow = True, "crop"
        return Group(line, numbers)

    def _plain(self, record: Record) -> str:
        width = len(str(self._steps))
        skipped = "  (skipped)" if record.get("skipped") else ""
        line = (
            f"step {record['step']:>{width}}/{self._steps}  loss {record['loss']:.4f}  "
            f"lr {record['learning_rate']:.2e}  gradient {record['gradient_norm']:.3f}  "
            f"{_speed(record)}{_experts(record)}  {self._left()}{skipped}"
        )
        return line.rstrip()

    def _left(self) -> str:
        """Return the remaining time, from the median of the last steps.

        It is empty before the third step, because the first ones compile and warm up.
        """
        remaining = self._steps - self._record["step"]
        if not remaining:
            return f"done in {format_duration(self._seconds)}"
        if len(self._recent) <= 2:
            return ""
        return f"{format_duration(statistics.median(self._recent) * remaining)} left"

    def _curve(self, width: int) -> str:
        return sparkline(self._losses.values, width, ascii_only=self._console.options.ascii_only)


def _experts(record: Record) -> str:
    """Return the load of the busiest expert relative to an even load; empty for a model without experts."""
    imbalance = record.get("expert_imbalance")
    return "" if imbalance is None else f"  busiest expert {imbalance:.2f}"


def _speed(record: Record) -> str:
    """Return the speed, without tokens if the samples are those of a program."""
    tokens = record["tokens_per_second"]
    return (
        f"{'' if tokens is None else f'{format_count(tokens)} tokens/s  '}"
        f"{format_count(record['sequences_per_second'])} samples/s  "
        f"MFU {format_percent(record['mfu'])}  {format_bytes(record['memory_bytes'])}"
    )
