"""How hosts hear of each other: each tells the leader its report, again and again, and gets its orders in return.

One line of JSON each way over one connection a host. Whatever goes wrong with it (a cut cable, a leader that is not there
yet), the host forgets the connection and dials anew; since a report says everything and orders say everything, nothing is lost.
The leader keeps only the newest report of each host, with the time it came: no clocks are compared.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from typing import Any

from shardwise.errors import UserError
from shardwise.resilience.team import Orders, Report

REPLY_SECONDS = 3.0


class Rendezvous:
    """The leader's end: takes reports, hands out the newest orders."""

    def __init__(self, address: str, port: int, run: str) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, tuple[Report, float]] = {}
        self._informed: set[str] = set()
        self._newest: Orders | None = None
        self._orders = json.dumps(Orders().to_json()).encode() + b"\n"
        self._run = run
        rendezvous = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for request in self.rfile:
                    self.wfile.write(rendezvous._answer(request))

        try:
            self._server = _Server(("", port), Handler)
        except OSError as error:
            raise UserError(
                f"port {port} of {address}, where the nodes meet, cannot be used: {error.strerror}. Is another run using it?"
            ) from None
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()

    def new_reports(self) -> list[tuple[Report, float]]:
        """The newest report of each host that sent one since the last call, and when it came."""
        with self._lock:
            reports, self._reports = list(self._reports.values()), {}
        return reports

    def tell(self, orders: Orders) -> None:
        """Answer every host with these orders from now on."""
        if orders is self._newest:
            return
        self._newest = orders
        answer = json.dumps(orders.to_json()).encode() + b"\n"
        with self._lock:
            if answer != self._orders:
                self._orders, self._informed = answer, set()

    def all_know(self, hosts: set[str]) -> bool:
        """Whether the newest orders have reached all these hosts."""
        with self._lock:
            return hosts <= self._informed

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: bytes) -> bytes:
        try:
            message: Any = json.loads(request)
            if message["run"] != self._run:
                return json.dumps({"error": f"here meets run {self._run!r}, not {message['run']!r}"}).encode() + b"\n"
            report = Report.from_json(message["report"])
        except (ValueError, TypeError, KeyError):
            return b'{"error": "this is where nodes of a shardwise run meet"}\n'
        with self._lock:
            self._reports[report.host] = (report, time.monotonic())
            self._informed.add(report.host)
            return self._orders


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is the host's to notice: it dials anew."""


class RendezvousClient:
    """A host's end. `call` never blocks for longer than a few seconds, and returns None while the leader is out of reach."""

    def __init__(self, address: str, port: int, run: str) -> None:
        self.address, self.port, self._run = address, port, run
        self._socket: socket.socket | None = None
        self._received = b""

    def call(self, report: Report) -> Orders | None:
        """Tell the leader how things are here; what it wants."""
        try:
            answer = json.loads(self._ask(json.dumps({"run": self._run, "report": report.to_json()}).encode() + b"\n"))
        except (OSError, ValueError):
            self.close()
            return None
        if "error" in answer:
            raise UserError(f"{self.address}:{self.port}: {answer['error']}")
        return Orders.from_json(answer)

    def own_address(self) -> str:
        """This machine's address, as seen on the way to the leader."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            try:
                probe.connect((self.address, self.port))
            except OSError:
                return "127.0.0.1"
            return str(probe.getsockname()[0])

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._received = None, b""

    def _ask(self, request: bytes) -> bytes:
        if self._socket is None:
            self._socket = socket.create_connection((self.address, self.port), timeout=REPLY_SECONDS)
        self._socket.sendall(request)
        while b"\n" not in self._received:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError("the leader hung up")
            self._received += received
        answer, _, self._received = self._received.partition(b"\n")
        return answer
