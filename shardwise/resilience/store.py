"""The store in which workers of one team after another find each other, held by a process that outlives every team.

torch's TCPStore needs torch, which the host itself does without: importing it would cost as much processor time again as in the
server that workers are forked from. So the store has a process of its own, forked from that same server in a moment. It ends
with the host, also where the host is killed, and with nothing else: not with the server, which the host can start again, and not
by a SIGTERM that a scheduler sends to every process of the job, while workers still save.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from shardwise.errors import RunFailed
from shardwise.resilience.forked import Died, end, fork
from shardwise.resilience.stopping import signal_on_death_of_parent


@contextmanager
def open_store(address: str) -> Iterator[int]:
    """Hold a store at this address of the machine, for as long as the `with` block lasts; its port."""
    with tempfile.TemporaryDirectory(prefix="shardwise-store-") as folder:
        process = fork(0, _hold, (address,), Path(folder))
        try:
            port = process.hear()
            if isinstance(port, Died):
                raise RunFailed(f"the store in which workers meet could not be opened: {port.message}")
            yield port
        finally:
            end([process])


def _hold(pipe: Connection, address: str) -> None:
    from shardwise.mesh import open_rendezvous_store

    signal_on_death_of_parent(signal.SIGCONT)  # the server's: where it ended with the host, a store that is stopped must see it
    store = open_rendezvous_store(address)
    pipe.send(store.port)
    pipe.poll(None)  # nothing is ever sent: this returns when the host is gone
