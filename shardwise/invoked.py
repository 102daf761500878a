"""How this very command is typed again, so that no message which says what to run next ends in "command not
found".

A program in an environment that is not active is not on the shell's path: `make quickstart` calls
`.venv/bin/shardwise`, and what it prints has to be called by that path too.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "shardwise"


def typed() -> str:
    """`shardwise` where a shell finds this environment's by that name; else the path, or the module, by which
    it was called."""
    if _is_ours(shutil.which(NAME)):
        return NAME
    if Path(sys.argv[0]).name == NAME:
        return shlex.quote(str(Path(sys.argv[0]).absolute()))  # it may be typed in another folder
    python = Path(sys.executable).name
    return f"{python if _is_ours(shutil.which(python)) else shlex.quote(sys.executable)} -m {NAME}"


def _is_ours(program: str | None) -> bool:
    """Whether it lies in the environment of this Python."""
    return program is not None and Path(program).parent == Path(sys.executable).parent
