"""The one exception that means "the user can mend this".

Everything a person can put right (a misspelt key, a missing file, a full disk, an unsupported torch) is
raised as a `UserError`. The command line prints its message, without a traceback, and leaves with status 2.
Any other exception is a fault of ours and keeps its traceback.

A message often quotes what a file holds, and a file may hold anything: control characters are shown as
escapes, so that none reaches a terminal as a command to it, and lines have an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.words import counted

LONGEST = 1000
"""Characters of a line; of a longer one the middle is left out."""
MOST_PROBLEMS = 40
"""Of one configuration that are listed; the rest is counted."""
_SHOWN = 100


def printable(text: str) -> str:
    """Text that is safe to show: control characters, halves of characters and marks that turn text around as
    escapes."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def shown(value: Any) -> str:
    """A value in a message: as Python writes it, and not too much of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without end
        return f"a huge {type(value).__name__}"
    return printable(without_middle(text, _SHOWN))


def without_middle(text: str, longest: int) -> str:
    """The beginning and the end of a text that is longer than this."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


class UserError(Exception):
    """What is wrong, where, and what to do about it."""

    status = 2

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(without_middle(printable(line), LONGEST) for line in message.split("\n")))


class RunFailed(UserError):
    """The job was well formed, but the run could not go on (a non-finite loss, a dead worker)."""

    status = 1


class Unreadable(RunFailed):
    """A file that the system could not read just now. It may be there and whole: trying again later may
    help."""


class ConfigError(UserError):
    """Every problem found in one configuration, reported together."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        listed = [f"  {problem}" for problem in [*problems[:MOST_PROBLEMS], *more]]
        super().__init__("\n".join([f"{source} has {counted(len(problems), 'problem')}:", *listed]))
