"""One host's link to the other hosts of its run: it leads them, calls their leader, or replaces it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from shardwise.errors import RunFailed, UserError
from shardwise.mesh.sockets import address_towards
from shardwise.resilience.channel import Credentials
from shardwise.resilience.first_node_file import FirstNodeFile, FirstNodeStatus
from shardwise.resilience.host_description import HostDescription
from shardwise.resilience.leader_connection import LeaderClient, LeaderServer
from shardwise.resilience.leader_file import SILENT_SECONDS, LeaderFile
from shardwise.resilience.stopping import error_with_status
from shardwise.resilience.team import Leader, Orders, Report
from shardwise.resilience.team_store import FindPort, open_store

GIVE_UP_SECONDS = 1800.0
"""Seconds for which a host tries to reach its leader."""
UNHEARD_SECONDS = 300.0
"""Seconds for which a node waits for a first node that has left no sign at all."""
REFUSED_SECONDS = 60.0
"""Seconds for which a host is refused before it gives up, because the file with the secret may come a moment
later. A first node whose folder is in use tries equally long to reach the host that leads the run there.
"""
TRY_SECONDS = 1.0
"""Seconds between two attempts to take over."""

Hold = Callable[[], AbstractContextManager[object]]
"""Function that locks the run's folders. It raises a UserError if another process holds a lock."""
MakeLeader = Callable[[FindPort], Leader]
"""Function that creates the leader, given a function that returns the port of the workers' store."""


class Leadership:
    """The hosts of a run as one of them sees them.

    `first` is the address and port of the run's first node, as the launcher gave them.
    """

    def __init__(
        self,
        description: HostDescription,
        first: tuple[str, int],
        leader_file: LeaderFile,
        first_node: FirstNodeFile,
        hold: Hold,
        make_leader: MakeLeader,
    ) -> None:
        self.address = address_towards(*first)
        """Address of this host as others see it. If names cannot be resolved yet, it is right once a leader
        has answered.
        """
        self.leader_server: LeaderServer | None = None
        """Server for the other hosts, if this host leads."""
        self._description, self._first, self._leader_file = description, first, leader_file
        self._hold, self._make_leader, self._first_node = hold, make_leader, first_node
        self._unanswered = 0
        """Number of calls since a leader last answered."""
        self._client = LeaderClient(lambda: leader_file.find(self._unanswered), description)
        self._locks, self._resources = ExitStack(), ExitStack()
        """Locks of the run's folders, and other things that end with this host's leadership."""
        self._folder_in_use: UserError | None = None
        """Error that another process uses the folder, so that this host does not lead. None after the leader
        of that run has answered.
        """
        self._last_orders: Orders | None = None
        self._answered = self._accepted = time.monotonic()
        """Times at which a leader last answered, and at which this host was last not refused."""
        self._tried = 0.0
        self._printed: set[str] = set()

    def begin(self) -> Leader | None:
        """Lead a new run, as its first node does.

        Return None if the run exists and another host leads it: this host was lost for a while and takes part
        again.
        """
        try:
            self._locks.enter_context(self._hold())
        except UserError as in_use:
            if self._leader_file.read() is None:
                raise
            self._folder_in_use = in_use
            return None
        self.leader_server = LeaderServer(*self._first, self._leader_file.begin(), self._description)
        try:
            self._leader_file.announce(*self._first)
        except OSError as error:
            raise UserError(self._unwritable(error)) from None
        return self._make_leader(self._resources.enter_context(open_store(self.address)))

    def take_over(self) -> Leader | None:
        """Lead the run if its leader is lost and no other host has taken over. Otherwise return None."""
        now = time.monotonic()
        if self._last_orders is None or self.silence() < SILENT_SECONDS or now - self._tried < TRY_SECONDS:
            return None
        self._tried = now
        former = self._leader_file.read()
        if former is None or not self._leader_file.leader_is_silent():
            return None
        try:
            self._locks.enter_context(self._hold())
        except UserError:
            return None
        try:
            self._announce_this_host()
        except OSError as error:  # for example a full disk; the first host that can write leads
            self._stop_leading()
            self._print_once(f"no host can lead this run on: {self._unwritable(error)}")
            return None
        leader = self._make_leader(self._resources.enter_context(open_store(self.address)))
        leader.take_over(self._last_orders, self._description.host, former.leader, time.monotonic())
        return leader

    def _announce_this_host(self) -> None:
        """Accept calls from the other hosts, and write the address for them."""
        credentials = self.credentials()
        try:
            self.leader_server = LeaderServer(self.address, self._first[1], credentials, self._description)
        except UserError:  # on one machine, several hosts cannot have the same port
            self.leader_server = LeaderServer(self.address, 0, credentials, self._description)
        self._leader_file.announce(self.address, self.leader_server.port)

    def credentials(self) -> Credentials:
        """Return the credentials of the run. This host leads it, or has called its leader."""
        _, _, credentials = self._leader_file.find()
        assert credentials is not None, "this host leads, or has called a leader"
        return credentials

    def _unwritable(self, error: OSError) -> str:
        file = f"{self._leader_file.path}, where hosts look for their leader,"
        return f"{file} cannot be written ({error.strerror}); make room there"

    def _stop_leading(self) -> None:
        """Stop leading: accept no more calls, and release the run's folder."""
        if self.leader_server is not None:
            self.leader_server.close()
        self.leader_server = None
        self._resources.close()
        self._locks.close()

    def _print_once(self, text: str) -> None:
        """Print a text, unless it was printed before."""
        if text not in self._printed:
            self._printed.add(text)
            print(text, file=sys.stderr, flush=True)

    def call(self, report: Report) -> Orders | None:
        """Send a report to the leader. Return its orders, or None if it cannot be reached."""
        orders = self._client.call(report)
        now = time.monotonic()
        if not self._client.refused:
            self._accepted = now
        if orders is None:
            self._unanswered += 1
            return None
        self._unanswered, self._answered, self._last_orders = 0, now, orders
        self.address = self._client.local_address
        # The user may have meant another run or this one, so the message names both problems.
        if self._folder_in_use is not None and orders.message:
            message = f"{self._folder_in_use}. To take part in that run instead: {orders.message}"
            return replace(orders, message=message)
        if self._folder_in_use is not None:
            self._folder_in_use = None
            self._print_once(
                f"this run has begun already, led by {self._client.address}:{self._client.port}, and this "
                "host takes part in it. If another run was meant, stop this one and give it another "
                "run.folder"
            )
        return orders

    def check(self) -> None:
        """Write the leader's heartbeat. If another host has taken over, raise an error that ends this
        host.
        """
        if self.is_lost():
            problem = "another host leads this run now: this one gave no sign of life for too long"
            raise RunFailed(f"{problem}. Start it again to take part.")

    def is_lost(self) -> bool:
        """Return whether another host has taken over."""
        return not self._leader_file.still_leads(self._hold_again)

    def _hold_again(self) -> None:
        """Create the run's folders again after they were deleted, and lock the new ones.

        The old locks do not keep other processes out of the new folders.
        """
        self._locks.close()
        try:
            self._locks.enter_context(self._hold())
        except UserError as error:
            self._print_once(
                f"warning: the run's folder was deleted, and others are not kept out of the new one: {error}"
            )

    def silence(self) -> float:
        """Return the seconds since a leader last answered."""
        return time.monotonic() - self._answered

    def patience(self) -> float:
        """Return for how many seconds this host tries to reach a leader that does not answer.

        A first node that shares no folder with this host leaves no sign in it.
        """
        if self._folder_in_use is not None or self._failed_first_node() is not None:
            return REFUSED_SECONDS
        has_signs = self._leader_file.has_news() or self._first_node.status_of_this_run() is not None
        is_known = self._last_orders is not None or has_signs or self._leader_file.given
        return GIVE_UP_SECONDS if is_known else UNHEARD_SECONDS

    def trouble(self) -> str:
        """Return why there is no leader, as far as this host knows, and what can be done."""
        _, _, credentials = self._leader_file.find()
        address, port = self._client.address, self._client.port
        if self._folder_in_use is not None:
            silent = f"{address}:{port}, which leads it, does not answer"
            return f"{self._folder_in_use} (should that be this run: {silent})"
        if (failed := self._failed_first_node()) is not None:
            return f"the first node has ended: {failed.ended}"
        if credentials is None and self._first_node.status_of_this_run() is not None:
            return "the first node has started, and does not lead the run yet (it may be preparing the data)"
        if credentials is None:
            return (
                f"the run's secret is not known yet: the first node writes {self._leader_file.path}, and "
                "this host has not heard from it yet. Is it running, and do all nodes see the same "
                "run.folder? If not, give all of them the same SHARDWISE_SECRET"
            )
        if self._client.older:
            return (
                f"{address}:{port}, which leads this run, has an older version of shardwise, which does not "
                f"say its number, and this host has {self._description.version}: install the same version on "
                "every host"
            )
        if self._client.refused:
            return (
                f"{address}:{port} refuses this host: a run with another secret or name (PET_RDZV_ID) is "
                f"there. If nodes do not share {self._leader_file.path}, give all of them the same "
                "SHARDWISE_SECRET"
            )
        return f"the host that leads this run, {address}:{port}, does not answer"

    def _failed_first_node(self) -> FirstNodeStatus | None:
        """Return what the first node wrote when it failed, if this host waits for it and no other leader."""
        if self._last_orders is not None or self._folder_in_use is not None:
            return None
        status = self._first_node.status_of_this_run()
        return status if status is not None and status.ended else None

    def give_up_if_too_long(self) -> None:
        """Raise an error once there is no hope that a leader will answer."""
        failed = self._failed_first_node()
        if failed is not None and (not self._first_node.is_left_over() or self.silence() > self.patience()):
            raise error_with_status(failed.status, self.trouble())
        if self.silence() > self.patience():
            raise self._folder_in_use or RunFailed(self.trouble())
        if time.monotonic() - self._accepted > REFUSED_SECONDS:
            raise UserError(self.trouble())

    def close(self) -> None:
        """Leave the run, and release everything that this host holds."""
        if self.leader_server is not None and self.leader_server.has_ended():
            self._leader_file.remove()
        self._client.close()
        self._stop_leading()
