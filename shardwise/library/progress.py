"""The progress bar of tokenising, on standard error: how much is done, how fast, and how long it will
take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def preparing() -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in all). The bar appears with the first call."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from shardwise.observe import error_console

    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=error_console(), transient=True)
    task = bar.add_task("tokenising", total=None, start=True)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
