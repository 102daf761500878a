"""Listens for the workers of a parameter server, and answers their messages.

Each worker has a thread. One more thread authenticates all new connections, so that a flood of unknown
callers costs at most `MAX_STRANGERS` connections and no threads. The `GradientStore` holds the weights and
the pushed gradients. The first server also has a `Scheduler`, which hands out portions of the data. The
server's main thread takes the next update from the scheduler and the store, and publishes new weights.
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

MAX_STRANGERS = 64
"""Largest number of callers that have not yet proved to know the secret; one more replaces the oldest."""
GREETER_SECONDS = 0.5
"""Seconds between two checks for callers whose time is over."""


class _Strangers:
    """Callers that have not yet proved to know the secret, the oldest first. One thread serves all of
    them."""

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
        """Wait for the answer of one more caller."""
        self._strangers[stranger.connection] = stranger
        self.selector.register(stranger.connection, selectors.EVENT_READ)

    def admitted(self, ready: Container[object]) -> Iterator[Wire]:
        """Yield the connections of callers that have proved that they know the secret, and close those of
        callers that have answered wrongly."""
        for connection, stranger in [entry for entry in self._strangers.items() if entry[0] in ready]:
            try:
                wire = stranger.admitted(self._credentials)
            except (OSError, UntrustedMessage):
                self._hang_up(connection)
                continue
            if wire is not None:
                self._forget(connection)
                yield wire

    def close_late(self) -> None:
        """Close the connections of callers whose time is over, and of the oldest while there are too many."""
        now = time.monotonic()
        for connection, stranger in list(self._strangers.items()):
            if stranger.deadline < now or len(self._strangers) > MAX_STRANGERS:
                self._hang_up(connection)

    def _forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        del self._strangers[connection]

    def _hang_up(self, connection: socket.socket) -> None:
        self._forget(connection)
        _hang_up(connection)


class Listener:
    """Listens for workers, and answers each of them in a separate thread."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        store: GradientStore,
        scheduler: Scheduler | None,
        job: str = "",
        rows: int = 1,
    ) -> None:
        """`scheduler` is None except in the first server; `job` is a checksum of the job; `rows` is the
        number of rows of a portion."""
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
        """Stop listening and close the connections of all workers."""
        self._store.close()
        self._closed = True
        # some systems cannot shut a listening socket down; the thread ends soon anyway
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._greeter.join()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()

    def _greet_callers(self) -> None:
        """Accept connections until the server ends, and start a thread for each worker that knows the
        secret."""
        with self._listener, _Strangers(self._credentials) as strangers:
            strangers.selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                ready = {key.fileobj for key, _ in strangers.selector.select(GREETER_SECONDS)}
                # Answers first: a new caller may replace the oldest caller, which may just have answered.
                for wire in strangers.admitted(ready):
                    self._start_thread(wire)
                if self._listener in ready and (stranger := self._accept()) is not None:
                    strangers.add(stranger)
                strangers.close_late()

    def _accept(self) -> Stranger | None:
        """Accept and greet the next caller; None if it is gone, or the system has no resources for it."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closed:
                time.sleep(0.1)  # there may be no file descriptors left
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
        except RuntimeError as error:  # the system allows no more threads for now
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
        """Answer one message. Return whether there may be more."""
        text, tensor_bytes = wire.receive()
        message = messages.from_json(text)
        if isinstance(message, messages.Push):
            if tensor_bytes != self._store.pushed_bytes:
                raise UntrustedMessage(f"a gradient of {tensor_bytes} bytes")
            self._store.put((worker, message.portion), self._store.read(wire, message.portion))
            wire.send(messages.to_json(messages.Stored()))
            return True
        if tensor_bytes:
            raise UntrustedMessage(f"{tensor_bytes} bytes behind {message}")
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
                raise UntrustedMessage(f"{message} to a server that does not answer such messages")
        return True


def _received(wire: Wire) -> messages.Message:
    text, tensor_bytes = wire.receive()
    if tensor_bytes:
        raise UntrustedMessage(f"{tensor_bytes} bytes behind {text}")
    return messages.from_json(text)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the other end may have been first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
