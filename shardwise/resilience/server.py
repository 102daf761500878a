"""The process that workers are forked from: it imports torch once, and a new worker is there in a moment.

Importing this module needs no torch, so the server can be started first and do its imports while the command that started it
still reads its job. The server has no threads of computation and touches no GPU, so forking it is safe.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Sequence
from multiprocessing import forkserver


def start_server(preload: Sequence[str]) -> None:
    """Start it, if it does not run yet. It inherits that Ctrl-C is ignored, also while it still imports torch."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["shardwise.resilience.preload", *preload])
    if threading.current_thread() is not threading.main_thread():  # others may not set signals
        return forkserver.ensure_running()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
