"""Listens for the workers of a parameter server, and answers what they pull, push, ask for and bring.

Each worker has a thread. One thread greets all callers, so that a flood of strangers costs at most
`MOST_STRANGERS` connections and no threads. Pulled weights and pushed gradients are in the `GradientStore`;
the first server has a `Scheduler` too, which hands out the work. The server's main thread takes the next
update from the scheduler and the store, and publishes new weights.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Container, Iterator
from contextlib import suppress

from shardwise.asynchronous import messages
from shardwise.asynchronous.gradient_store import GradientStore
from shardwise.asynchronous.scheduler import Scheduler
from shardwise.asynchronous.wire import Stranger, Wire
from shardwise.mesh.sockets import listen
from shardwise.resilience.channel import Credentials, UntrustedMessage

log = logging.getLogger("shardwise")

MOST_STRANGERS = 64
"""Callers that have not shown yet that they know the secret: the next one takes the place of the oldest."""
GREETER_SECONDS = 0.5
"""How long at most until the thread that greets callers notices that the time of one is over."""


class _Strangers:
    """Callers that have not shown yet that they know the secret, the oldest first. One thread waits for all
    of them."""

    def __init__(self, credentials: Credentials) -> None:
        self.selector = selectors.DefaultSelector()
        self._credentials = credentials
        self._strangers: dict[socket.socket, Stranger] = {}

    def __enter__(self) -> _Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._strangers):
            self._hang_up(connection)
        self.selector.close()

    def add(self, stranger: Stranger) -> None:
        """Wait for the answer of one more."""
        self._strangers[stranger.connection] = stranger
        self.selector.register(stranger.connection, selectors.EVENT_READ)

    def admitted(self, ready: Container[object]) -> Iterator[Wire]:
        """Return the connections of callers that have shown that they know the secret, and close the others
        that have spoken."""
        for connection, stranger in [entry for entry in self._strangers.items() if entry[0] in ready]:
            try:
                wire = stranger.admitted(self._credentials)
            except (OSError, UntrustedMessage):
                self._hang_up(connection)
                continue
            if wire is not None:
                self._forget(connection)
                yield wire

    def hang_up_on_late_ones(self) -> None:
        """Hang up on those whose time is over, and on the oldest while there are too many."""
        now = time.monotonic()
        for connection, stranger in list(self._strangers.items()):
            if stranger.deadline < now or len(self._strangers) > MOST_STRANGERS:
                self._hang_up(connection)

    def _forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        del self._strangers[connection]

    def _hang_up(self, connection: socket.socket) -> None:
        self._forget(connection)
        _hang_up(connection)


class Listener:
    """Listens for workers, and talks with each in a thread of its own."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        store: GradientStore,
        scheduler: Scheduler | None,
        job: str = "",
        rows: int = 1,
    ) -> None:
        """`scheduler` is that of the first server; `job` is a checksum of the job; `rows` are those of a
        portion."""
        self._credentials, self._store, self._scheduler = credentials, store, scheduler
        self._job, self._rows = job, rows
        self._listener = listen(address)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._closed = False
        self._greeter = threading.Thread(target=self._greet_callers, name="listener", daemon=True)
        self._greeter.start()

    def close(self) -> None:
        """Close all connections."""
        self._store.close()
        self._closed = True
        with suppress(
            OSError
        ):  # on some systems what only listens cannot be shut down; the thread looks up soon anyway
            self._listener.shutdown(socket.SHUT_RDWR)
        self._greeter.join()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()

    def _greet_callers(self) -> None:
        """Take callers in and greet them, until the server ends. A worker that knows the secret gets a
        thread."""
        with self._listener, _Strangers(self._credentials) as strangers:
            strangers.selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                ready = {key.fileobj for key, _ in strangers.selector.select(GREETER_SECONDS)}
                # Strangers come before the next caller, which may take the place of one that has just
                # answered.
                for wire in strangers.admitted(ready):
                    self._start_thread(wire)
                if self._listener in ready and (stranger := self._take_in()) is not None:
                    strangers.add(stranger)
                strangers.hang_up_on_late_ones()

    def _take_in(self) -> Stranger | None:
        """The next caller, greeted; None where it is gone already, or there is nothing left to take it in
        with."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closed:
                time.sleep(0.1)  # out of file descriptors, say
            return None
        try:
            return Stranger(connection)
        except OSError:
            _hang_up(connection)
            return None

    def _start_thread(self, wire: Wire) -> None:
        with self._lock:
            self._wires.add(wire)
        try:
            threading.Thread(target=self._converse, args=(wire,), name="worker", daemon=True).start()
        except RuntimeError as error:  # the system allows no more threads, for now
            log.warning("a worker was turned away, and may call again: %s", error)
            with self._lock:
                self._wires.discard(wire)
            wire.close()

    def _converse(self, wire: Wire) -> None:
        worker: str | None = None
        try:
            worker = self._welcome(wire)
            while self._answer(wire, worker):
                pass
        except (OSError, EOFError, UntrustedMessage) as error:
            if worker is not None and not self._closed:
                log.warning("worker %s is gone: %s", worker, error)
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.close()
            if worker is not None:
                self._store.gone(worker)
                if self._scheduler is not None:
                    self._scheduler.lost(worker)

    def _welcome(self, wire: Wire) -> str:
        message = _received(wire)
        if not isinstance(message, messages.Hello):
            raise UntrustedMessage(f"{message} before hello")
        slices = {
            name: tuple((part.start, part.stop) for part in where)
            for name, where in self._store.slices.items()
        }
        wire.send(messages.to_json(messages.Welcome(slices, self._job, self._rows)))
        return message.worker

    def _answer(self, wire: Wire, worker: str) -> bool:
        """Answer one message; whether there may be more."""
        text, behind = wire.receive()
        message = messages.from_json(text)
        if isinstance(message, messages.Push):
            if behind != self._store.pushed_bytes:
                raise UntrustedMessage(f"a gradient of {behind} bytes")
            self._store.put((worker, message.portion), self._store.read(wire, message.portion))
            wire.send(messages.to_json(messages.Stored()))
            return True
        if behind:
            raise UntrustedMessage(f"{behind} bytes behind {message}")
        match message:
            case messages.Pull(least, have):
                newest, weights = self._store.weights(least)
                wire.send(messages.to_json(messages.Weights(newest)), weights if newest != have else None)
            case messages.Ask() if self._scheduler is not None:
                task = self._scheduler.ask(worker)
                wire.send(messages.to_json(task))
                return not isinstance(task, messages.End)
            case messages.Bring() if self._scheduler is not None:
                wire.send(messages.to_json(messages.Noted(self._scheduler.bring(worker, message))))
            case _:
                raise UntrustedMessage(f"{message} to a server that has nothing to do with it")
        return True


def _received(wire: Wire) -> messages.Message:
    text, behind = wire.receive()
    if behind:
        raise UntrustedMessage(f"{behind} bytes behind {text}")
    return messages.from_json(text)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the other end may have been first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
