"""What a person sees while training: what was chosen, then how it goes.

On a terminal two lines are redrawn in place: how far, and how well, with the loss drawn as it falls. Anywhere
else (a file, a batch system's log) the same numbers come as plain lines, about twenty over the run plus the
first and the last; which steps are shown depends on their number alone, so the logs of two runs line up. All
of it goes to standard error, which leaves standard output to results. Redrawing happens on updates, at most
ten times a second, and starts no thread.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from shardwise.observe.draw import Series, sparkline
from shardwise.observe.format import format_bytes, format_count, format_duration, format_percent

_LINES = 20
_REDRAW_SECONDS = 0.1
_CURVE = 24


def error_console() -> Console:
    """Standard error, without guessing at colours for numbers."""
    return Console(stderr=True, highlight=False)


def header(console: Console, title: str, choices: Mapping[str, str]) -> None:
    """Print what is about to run and what was chosen for it, a line each."""
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
    """The steps that get a plain line: the first, the last, and about twenty evenly between them."""
    every = -(-(steps - first_step + 1) // _LINES)
    return (
        sorted({first_step, steps, *range(every * (first_step // every + 1), steps + 1, every)})
        if steps >= first_step
        else []
    )


class TrainingProgress:
    """How training goes, drawn from the metrics record of each step.

    `first_step` is the first step this run does: 1, or N + 1 after resuming at step N. Use it as a context
    manager, so that the terminal is given back whatever happens.
    """

    def __init__(self, console: Console, steps: int, first_step: int = 1) -> None:
        self._console = console
        self._steps, self._first = steps, first_step
        self._shown = frozenset(shown_steps(first_step, steps))
        self._losses = Series()
        self._first_loss: float | None = None
        self._recent: deque[float] = deque(maxlen=20)
        self._record: Mapping[str, Any] = {}
        self._live: Live | None = None
        self._drawn = 0.0
        self._widths: list[int] = []
        """Of the lines on the screen."""
        self._seconds = 0.0

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, record: Mapping[str, Any]) -> None:
        """One step is done."""
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
        """A lasting line above the progress: a save, an evaluation, a skipped step."""
        self._print(Text(text, style="" if self._live is None else "cyan"))

    def close(self) -> None:
        """Leave the last state on the screen; where nothing was redrawn, draw the loss once."""
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
        if self._live is not None:  # it is drawn again below
            self._widths = self._widths_of(self._live.renderable)

    def _redraw(self, now: bool) -> None:
        if self._live is None:
            # Standard output stays untouched: it is for results.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        elif not now and monotonic() - self._drawn < _REDRAW_SECONDS:
            return
        self._erase_what_was_folded()
        self._live.update(self._picture(), refresh=True)
        self._widths = self._widths_of(self._live.renderable)
        self._drawn = monotonic()

    def _erase_what_was_folded(self) -> None:
        """A terminal that became narrower folds the lines on it, so that they take more rows than were drawn:
        the rows beyond would stay as they are."""
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

    def _plain(self, record: Mapping[str, Any]) -> str:
        width = len(str(self._steps))
        skipped = "  (skipped)" if record.get("skipped") else ""
        line = (
            f"step {record['step']:>{width}}/{self._steps}  loss {record['loss']:.4f}  lr "
            f"{record['learning_rate']:.2e}  "
            f"gradient {record['gradient_norm']:.3f}  {_speed(record)}{_experts(record)}  "
            f"{self._left()}{skipped}"
        )
        return line.rstrip()

    def _left(self) -> str:
        """From the median of the last steps, and not before the third: the first ones compile and warm up."""
        remaining = self._steps - self._record["step"]
        if not remaining:
            return f"done in {format_duration(self._seconds)}"
        return (
            f"{format_duration(statistics.median(self._recent) * remaining)} left"
            if len(self._recent) > 2
            else ""
        )

    def _curve(self, width: int) -> str:
        return sparkline(self._losses.values, width, ascii_only=self._console.options.ascii_only)


def _experts(record: Mapping[str, Any]) -> str:
    """How many times an even load the busiest expert has; nothing for a model without experts."""
    imbalance = record.get("expert_imbalance")
    return "" if imbalance is None else f"  busiest expert {imbalance:.2f}"


def _speed(record: Mapping[str, Any]) -> str:
    return (
        f"{format_count(record['tokens_per_second'])} tokens/s  "
        f"{format_count(record['sequences_per_second'])} samples/s  "
        f"MFU {format_percent(record['mfu'])}  {format_bytes(record['memory_bytes'])}"
    )
