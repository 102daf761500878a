"""The name by which the user can call this command again.

Messages say which command to run next, and that command must exist. A program in an environment that is not
active is not on the shell's path: `make quickstart` calls `.venv/bin/shardwise`, so its messages must use
that path too.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "shardwise"


def command_name() -> str:
    """Return the text to type for this command.

    That is `shardwise` if the shell finds this environment's program under that name, and otherwise the path
    or the module by which it was called.
    """
    if _is_ours(shutil.which(NAME)):
        return NAME
    if Path(sys.argv[0]).name == NAME:
        return shlex.quote(str(Path(sys.argv[0]).absolute()))  # the user may type it in another folder
    python = Path(sys.executable).name
    return f"{python if _is_ours(shutil.which(python)) else shlex.quote(sys.executable)} -m {NAME}"


def _is_ours(program: str | None) -> bool:
    """Return whether a program is in the environment of this Python."""
    return program is not None and Path(program).parent == Path(sys.executable).parent
