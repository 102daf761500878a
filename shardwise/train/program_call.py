"""Calls of a user's program, and messages for functions that cannot be one.

The training loop waits for a program's first batch. A function that takes other arguments, or whose call only
makes a coroutine or a generator, never comes there.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardwise.errors import UserError

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
"""Folder of shardwise's own files."""


def call_program(address: str, run: Callable[[T], object], program: T) -> object:
    """Call a user's function and return what it returns. Raise if it does not take an engine alone."""
    try:
        return run(program)
    except TypeError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not all(file.startswith(_PACKAGE) for file in files):  # it was raised in the user's code
            raise
        raise UserError(
            f"{address}: {error}; a program is called with the engine alone, as in def program(engine)"
        ) from None


def why_no_batch(returned: object) -> str:
    """Return why a program that returned this asked for no batch, and what to write instead."""
    if inspect.iscoroutine(returned):
        returned.close()  # without it Python warns that nothing has awaited it
    if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
        return "the program is async, so nothing of it has run; write def, not async def"
    if inspect.isgenerator(returned):
        return "the program is a generator, so nothing of it has run; write it without yield"
    return (
        "the program ended before its first batch; call engine.prepare(...), then loop over "
        "engine.batches(...)"
    )
