"""The entry point of every command.

A user's mistake, or a system limit that is too low (limits.py), ends in one message on standard error and the
error's exit status, never in a traceback.

Importing this file takes a few milliseconds. The commands (app.py) are imported after signal handlers are
installed, because a scheduler may stop a job in its first moment. The start of Python itself, which comes
before, cannot be covered.
"""

from __future__ import annotations

import os
import sys

from shardwise.errors import UserError
from shardwise.limits import limit_reached
from shardwise.resilience.stopping import stopped_with_nothing_begun


def main() -> None:
    """Run a command, and print a user's mistake as one message. Mistakes in the command's arguments are
    answered by typer."""
    try:
        with stopped_with_nothing_begun(sys.argv[1:2] == ["train"]):
            from shardwise.cli.app import app

            app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if (mistake := _mistake_of_place(error) or limit_reached(error)) is None:
            raise
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(UserError.status)


def _mistake_of_place(error: BaseException) -> str | None:
    """Return what is wrong with the current folder or the shell, if that is why the command failed."""
    if not isinstance(error, OSError):
        return None
    try:
        os.getcwd()
    except OSError:
        return "the folder that this shell is in was removed; change to another, with cd"
    if "--install-completion" in sys.argv:
        return (
            f"{error.filename}: cannot be written ({error.strerror}); --show-completion prints what "
            f"belongs there"
        )
    return None
