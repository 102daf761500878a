"""Where every command begins and ends.

A user's mistake ends in one message on standard error and the error's status, never in a traceback. So does a
limit of the system that is too low (limits.py).

Importing this file costs a few milliseconds. The commands (app.py) are imported once signals are answered
for: a scheduler may change its mind in the first moment of a job. What comes before, the start of Python
itself, cannot be covered.
"""

from __future__ import annotations

import os
import sys

from shardwise.errors import UserError
from shardwise.limits import limit_reached
from shardwise.resilience.stopping import stopped_with_nothing_begun


def main() -> None:
    """Run a command; turn a user's mistake into one message. Mistakes in the words of the command are typer's
    to answer."""
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
    """What is wrong with where the command is run, if that is why it failed."""
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
