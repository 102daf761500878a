"""Whoever starts the tests, and however, they and what they start have the signals of a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHILD = """
import signal
usual = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN}
usual[signal.SIGINT] = signal.default_int_handler
handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
print("child", sorted(n for n, handler in handlers.items() if handler != usual.get(n, signal.SIG_DFL)))
print("child", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
"""
PARENT = """
import os, signal, subprocess, sys
from dispositions import forget_inherited_signals
forget_inherited_signals()
os.kill(os.getpid(), signal.SIGHUP)
print("the parent is alive", flush=True)
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
STARTER = """
import os, signal, sys
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def test_ignored_and_blocked_signals_are_not_handed_on_and_a_closed_terminal_ends_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", STARTER, PARENT, CHILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the parent is alive", "child []", "child []"]
