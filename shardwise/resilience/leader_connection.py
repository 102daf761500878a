"""Communication between hosts: each host repeatedly sends a report to the leader and receives orders.

Each host has one connection (channel.py) with one line each way per call. If anything goes wrong with it (a
broken cable, a leader that is not there yet), the host closes the connection and opens another. Reports and
orders are complete in themselves, so nothing is lost. The leader keeps only the newest report of each host
and the time at which it arrived. Clocks are not compared.

The first message of a host on each connection describes the host (host_description.py). A host that does not
fit the run gets orders to end, which contain the reason, and its reports do not reach the leader.

Anyone may connect. A caller that has not proven that it knows the run's secret has a few seconds and a few
hundred bytes, the number of such callers is limited, and nothing that they send is processed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

from shardwise.errors import UserError
from shardwise.mesh.sockets import listen
from shardwise.resilience.channel import (
    HELLO_BYTES,
    LINE_BYTES,
    Channel,
    Credentials,
    MessageTooLong,
    UntrustedMessage,
    admit,
    answer,
    greeted_version,
    greeting,
)
from shardwise.resilience.host_description import HostDescription, refusal_reason
from shardwise.resilience.team import Orders, Refusal, Report

REPLY_SECONDS = 3.0
"""Seconds that a call may take on the host's side."""
HELLO_SECONDS = 5.0
"""Seconds within which a caller must prove that it knows the secret."""
IDLE_SECONDS = 60.0
"""Seconds after which the connection of a host that does not call is closed."""
MAX_UNKNOWN_CALLERS = 64
"""Maximum number of callers that have not proven that they know the secret. A new one replaces the oldest."""
_REFUSED = b"refused\n"


class LeaderServer:
    """The leader's side: it receives reports and answers with the newest orders."""

    def __init__(
        self, address: str, port: int, credentials: Credentials, description: HostDescription
    ) -> None:
        self._lock = threading.Lock()
        self._description = description
        """Description of the leader's host, with which other hosts are compared."""
        self._new_refusals: list[Refusal] = []
        """Hosts that did not fit the run when they called."""
        self._refused: dict[str, Refusal] = {}
        """Hosts that fitted the run, and that the leader refuses now."""
        self._reports: dict[str, tuple[Report, float]] = {}
        self._informed: set[str] = set()
        self._orders = Orders()
        self._message = self._orders.to_json()
        self._credentials = credentials
        self._callers: set[asyncio.StreamWriter] = set()
        self._unknown_callers: dict[asyncio.StreamWriter, None] = {}
        """Callers that have not proven that they know the secret, in the order in which they came."""
        try:
            self._listener = listen(address, port)
        except OSError as error:
            problem = f"port {port} of {address}, where the nodes meet, cannot be used: {error.strerror}"
            raise UserError(f"{problem}. Is another run using it?") from None
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )
        self._thread.start()

    def new_reports(self) -> list[tuple[Report, float]]:
        """Return the newest report of each host that sent one since the last call, and when it arrived."""
        with self._lock:
            reports, self._reports = list(self._reports.values()), {}
        return reports

    def new_refusals(self) -> list[Refusal]:
        """Return the hosts that were refused when they called, since the last call of this method."""
        with self._lock:
            refusals, self._new_refusals = self._new_refusals, []
        return refusals

    def refuse(self, refused: Refusal) -> None:
        """From now on, answer this host with orders to end."""
        with self._lock:
            self._refused[refused.host] = refused
            self._reports.pop(refused.host, None)

    def tell(self, orders: Orders) -> None:
        """From now on, answer every host with these orders."""
        if orders is self._orders:
            return
        self._orders = orders
        message = orders.to_json()
        with self._lock:
            if message != self._message:
                self._message, self._informed = message, set()

    def all_know(self, hosts: set[str]) -> bool:
        """Return whether the newest orders have reached all these hosts."""
        with self._lock:
            return hosts <= self._informed

    def has_ended(self) -> bool:
        """Return whether the orders say that the run is over."""
        return self._orders.wish == "end"

    def close(self) -> None:
        """Stop answering and close all connections."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._converse, sock=self._listener, limit=LINE_BYTES)
        await self._closing.wait()
        server.close()
        for writer in self._callers:
            writer.transport.abort()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        self._callers.add(writer)
        self._unknown_callers[writer] = None
        if len(self._unknown_callers) > MAX_UNKNOWN_CALLERS:
            oldest = next(iter(self._unknown_callers))
            del self._unknown_callers[oldest]
            oldest.transport.abort()
        try:
            channel = await asyncio.wait_for(self._greet(reader, writer), HELLO_SECONDS)
            self._unknown_callers.pop(writer, None)
            first = await asyncio.wait_for(reader.readuntil(b"\n"), IDLE_SECONDS)
            refused = self._check_host(channel.message(first))
            writer.write(channel.line(refused.orders().to_json() if refused else self._message))
            if refused:
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), IDLE_SECONDS)
                return
            while True:
                await asyncio.wait_for(writer.drain(), IDLE_SECONDS)
                line = await asyncio.wait_for(reader.readuntil(b"\n"), IDLE_SECONDS)
                writer.write(channel.line(self._answer(channel.message(line))))
        except (OSError, EOFError, asyncio.LimitOverrunError, TimeoutError, UntrustedMessage, MessageTooLong):
            pass  # a host that was cut off connects again
        finally:
            self._unknown_callers.pop(writer, None)
            self._callers.discard(writer)
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
        """Exchange the greetings. Return the channel if the caller knows the secret."""
        greeted = greeting(self._description.version)
        writer.write(greeted)
        answered = await reader.readuntil(b"\n")
        try:
            return admit(self._credentials, greeted, answered[:HELLO_BYTES])
        except UntrustedMessage:
            writer.write(_REFUSED)
            writer.close()
            await writer.wait_closed()
            raise

    def _check_host(self, message: object) -> Refusal | None:
        """Return why the host that sent this first message may not take part in the run; None if it may."""
        try:
            newcomer = HostDescription.from_json(message)
        except ValueError:
            report = _report(message)  # older hosts, which do not send their version, begin with a report
            older = "of an older version, which does not say its number"
            newcomer = HostDescription(report.host, older, workers=len(report.slots))
        why = refusal_reason(self._description, newcomer)
        if why is None:
            return None
        refused = Refusal(newcomer.host, newcomer.workers, why)
        with self._lock:
            self._new_refusals.append(refused)
        return refused

    def _answer(self, message: object) -> object:
        """Record a report, and return the orders for its host."""
        report = _report(message)
        with self._lock:
            if report.host in self._refused:
                return self._refused[report.host].orders().to_json()
            self._reports[report.host] = (report, time.monotonic())
            self._informed.add(report.host)
            return self._message


def _report(message: object) -> Report:
    """Return the report in a message."""
    try:
        return Report.from_json(message)
    except ValueError as error:
        raise UntrustedMessage(f"no report: {error}") from None


class LeaderClient:
    """A host's side. `call` blocks for a few seconds at most, and returns None if the leader cannot be
    reached.
    """

    def __init__(
        self, find: Callable[[], tuple[str, int, Credentials | None]], description: HostDescription
    ) -> None:
        self._find, self._description = find, description
        self.address, self.port, _ = find()
        self.local_address = ""
        """Address of this host as the leader sees it, once it has connected."""
        self.refused = False
        """Whether the last call failed because the other end has another secret or an older version."""
        self.older = False
        """Whether the leader has an older version, which it does not send."""
        self._socket: socket.socket | None = None
        self._channel: Channel | None = None
        self._received = b""
        self._refused_by: Orders | None = None
        """Orders to end, if the leader answered this host's first message with them."""

    def call(self, report: Report) -> Orders | None:
        """Send a report to the leader. Return its orders, or None if it cannot be reached."""
        deadline = time.monotonic() + REPLY_SECONDS
        try:
            channel = self._channel or self._connect(deadline)
            if self._refused_by is not None:
                return self._refused_by
            self._send(_report_line(channel, report), deadline)
            orders = Orders.from_json(channel.message(self._line(deadline)))
        except UntrustedMessage:
            self.refused = True
        except (OSError, ValueError):
            self.refused = False
        else:
            self.refused = False
            return orders
        self.close()
        return None

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._channel, self._received = None, None, b""

    def _connect(self, deadline: float) -> Channel:
        """Connect to the leader, exchange greetings, and send this host's description."""
        self.address, self.port, credentials = self._find()
        if credentials is None:
            raise OSError("the run's secret is not known yet")
        self._socket = socket.create_connection((self.address, self.port), timeout=REPLY_SECONDS)
        self.local_address = str(self._socket.getsockname()[0])
        greeted = self._line(deadline)
        hello, channel = answer(credentials, greeted)
        self.older = not greeted_version(greeted)
        if self.older:  # such a leader would put this host into a team without comparing anything
            raise UntrustedMessage("the leader does not say its version")
        self._send(hello + channel.line(self._description.to_json()), deadline)
        orders = Orders.from_json(channel.message(self._line(deadline)))
        self._refused_by = orders if orders.wish == "end" else None
        self._channel = channel
        return channel

    def _send(self, line: bytes, deadline: float) -> None:
        assert self._socket is not None, "the client is connected"
        self._socket.settimeout(max(0.01, deadline - time.monotonic()))
        self._socket.sendall(line)

    def _line(self, deadline: float) -> bytes:
        """Return the next line from the leader."""
        assert self._socket is not None, "the client is connected"
        while b"\n" not in self._received:
            if len(self._received) > LINE_BYTES:
                raise UntrustedMessage("a line without end")
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError("the leader hung up")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


def _report_line(channel: Channel, report: Report) -> bytes:
    """Return the line that sends a report, without the traces of its faults if they do not fit."""
    try:
        return channel.line(report.to_json())
    except MessageTooLong:
        return channel.line(report.without_traces().to_json())
