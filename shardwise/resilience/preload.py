"""The first module that the fork server imports. Its settings hold for the server and for all its workers.

The server does not collect garbage; its workers do. Importing torch creates hundreds of thousands of objects
and hardly any garbage, and the search for it took a sixth of the server's time. In a worker, imported objects
are frozen: collections look only at objects that the worker created, and do not touch the memory pages that
all workers share.

The kernel kills the server and its workers when the command that started them ends (stopping.py).
"""

from __future__ import annotations

import gc
import os

from shardwise.resilience.stopping import signal_on_death_of_parent

_forking: list[int] = []
"""Id of the process that is forking now."""


def _begin_worker() -> None:
    signal_on_death_of_parent()
    if os.getppid() != _forking[0]:  # the parent died before the line above was executed
        os._exit(1)
    gc.freeze()
    gc.enable()


def _note_parent() -> None:
    _forking[:] = [os.getpid()]


gc.disable()
signal_on_death_of_parent()
os.register_at_fork(before=_note_parent, after_in_child=_begin_worker)
