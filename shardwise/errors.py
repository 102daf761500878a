"""The exception for everything that the user can correct.

A misspelt key, a missing file, a full disk or an unsupported torch is raised as a `UserError`. The command
line prints its message without a traceback and exits with status 2. Any other exception is a bug of shardwise
and keeps its traceback.

A message often quotes the contents of a file, and a file may contain anything. Control characters are
therefore written as escapes, so that none of them reaches the terminal as a command, and long lines are
shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.plurals import counted

MAX_LINE_LENGTH = 1000
"""Maximum number of characters of a line of a message. The middle of a longer line is left out."""
MAX_PROBLEMS = 40
"""Maximum number of problems of one configuration that are listed. The others are only counted."""
_MAX_QUOTED = 100
"""Maximum number of characters of a value that is quoted in a message."""


def printable(text: str) -> str:
    """Return the text with all unprintable characters as escapes, so that it is safe to print.

    These are control characters, surrogates and the marks that reverse the direction of text.
    """
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def shown(value: Any) -> str:
    """Return the `repr` of a value for a message, printable and of limited length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with thousands of digits, or endless nesting
        return f"a huge {type(value).__name__}"
    return printable(without_middle(text, _MAX_QUOTED))


def without_middle(text: str, longest: int) -> str:
    """Return the text; if it is longer than `longest` characters, only its beginning and its end."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


class UserError(Exception):
    """An error that the user can correct. The message says what is wrong, where, and what to do about it."""

    status = 2

    def __init__(self, message: str) -> None:
        super().__init__(
            "\n".join(without_middle(printable(line), MAX_LINE_LENGTH) for line in message.split("\n"))
        )


class RunFailed(UserError):
    """The job was valid, but the run could not continue, for example after a non-finite loss or a dead
    worker.
    """

    status = 1


class Unreadable(RunFailed):
    """A file could not be read at this moment. It may exist and be intact, so a later attempt may succeed."""


class ConfigError(UserError):
    """All problems of one configuration, reported together."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        listed = [f"  {problem}" for problem in [*problems[:MAX_PROBLEMS], *more]]
        super().__init__("\n".join([f"{source} has {counted(len(problems), 'problem')}:", *listed]))
