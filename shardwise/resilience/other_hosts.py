"""One host's link to the other hosts of its run: it leads them, or it calls their leader, and takes over
should that be lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from shardwise.errors import RunFailed, UserError
from shardwise.mesh.sockets import address_towards
from shardwise.resilience.first_node import FirstNodeFile, Sign
from shardwise.resilience.meeting import SILENT_SECONDS, MeetingFile
from shardwise.resilience.newcomer import Newcomer
from shardwise.resilience.rendezvous import Rendezvous, RendezvousClient
from shardwise.resilience.store import FindPort, open_store
from shardwise.resilience.team import Lead, Orders, Report

GIVE_UP_SECONDS = 1800.0
"""How long a host looks for its leader."""
UNHEARD_SECONDS = 300.0
"""How long a node waits for a first node of which it has heard nothing at all."""
REFUSED_SECONDS = 60.0
"""How long a host is refused before it gives up: the file with the secret may come a moment later. A first
node whose folder is in use looks just as long for the host that leads the run there.
"""
TRY_SECONDS = 1.0
"""Between two attempts to take over."""

Hold = Callable[[], AbstractContextManager[Any]]
"""Takes the locks of the run's folders; a UserError where another process has them."""
MakeLead = Callable[[FindPort], Lead]
"""From what knows the port of the store in which workers meet."""


class OtherHosts:
    """`first` is the address and port of the run's first node, as the launcher gave them."""

    def __init__(
        self,
        own: Newcomer,
        first: tuple[str, int],
        meeting: MeetingFile,
        first_node: FirstNodeFile,
        hold: Hold,
        make_lead: MakeLead,
    ) -> None:
        self.address = address_towards(*first)
        """This host's, as the others see it; where names are not known yet, only once a leader has
        answered."""
        self.rendezvous: Rendezvous | None = None
        """Where this host leads."""
        self._own, self._first, self._meeting, self._hold, self._make_lead = (
            own,
            first,
            meeting,
            hold,
            make_lead,
        )
        self._first_node = first_node
        self._unanswered = 0
        """Calls since a leader answered."""
        self._client = RendezvousClient(lambda: meeting.find(self._unanswered), own)
        self._locks, self._held = ExitStack(), ExitStack()
        """Of the run's folders, and what else ends with this host."""
        self._folder_in_use: UserError | None = None
        """Until the host answers that leads the run there."""
        self._last_orders: Orders | None = None
        self._answered = self._accepted = time.monotonic()
        """When a leader last answered, and when somebody did not refuse us last."""
        self._tried = 0.0
        self._said: set[str] = set()

    def begin(self) -> Lead | None:
        """Lead a new run, as its first node does. None where the run lives and another host leads it: this
        one was lost for a while, and takes part again.
        """
        try:
            self._locks.enter_context(self._hold())
        except UserError as in_use:
            if self._meeting.read() is None:
                raise
            self._folder_in_use = in_use
            return None
        self.rendezvous = Rendezvous(*self._first, self._meeting.begin(), self._own)
        try:
            self._meeting.announce(*self._first)
        except OSError as error:
            raise UserError(self._unwritten(error)) from None
        return self._make_lead(self._held.enter_context(open_store(self.address)))

    def take_over(self) -> Lead | None:
        """Lead the run from where its lost leader left it, if it is lost and no other host is quicker."""
        now = time.monotonic()
        if self._last_orders is None or self.silence() < SILENT_SECONDS or now - self._tried < TRY_SECONDS:
            return None
        self._tried = now
        former = self._meeting.read()
        if former is None or not self._meeting.leader_is_silent():
            return None
        try:
            self._locks.enter_context(self._hold())
        except UserError:
            return None
        try:
            self._announce_oneself()
        except OSError as error:  # a full disk, say: whoever finds room first leads, this host or another
            self._let_go()
            self._say_once(f"no host can lead this run on: {self._unwritten(error)}")
            return None
        lead = self._make_lead(self._held.enter_context(open_store(self.address)))
        lead.take_over(self._last_orders, self._own.host, former.leader, time.monotonic())
        return lead

    def _announce_oneself(self) -> None:
        """Take calls from the other hosts, and let them know where."""
        _, _, credentials = self._meeting.find()
        assert credentials is not None, "it has called a leader"
        try:
            self.rendezvous = Rendezvous(self.address, self._first[1], credentials, self._own)
        except UserError:  # on one machine, several hosts cannot have the same port
            self.rendezvous = Rendezvous(self.address, 0, credentials, self._own)
        self._meeting.announce(self.address, self.rendezvous.port)

    def _unwritten(self, error: OSError) -> str:
        return (
            f"{self._meeting.path}, where hosts look for their leader, cannot be written ({error.strerror}); "
            f"make room there"
        )

    def _let_go(self) -> None:
        """Lead no more: take no calls, and leave the run's folder to others."""
        if self.rendezvous is not None:
            self.rendezvous.close()
        self.rendezvous = None
        self._held.close()
        self._locks.close()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)

    def call(self, report: Report) -> Orders | None:
        """Tell the leader how things are here; what it wants, or None if it cannot be reached."""
        orders = self._client.call(report)
        now = time.monotonic()
        if not self._client.refused:
            self._accepted = now
        if orders is None:
            self._unanswered += 1
            return None
        self._unanswered, self._answered, self._last_orders = 0, now, orders
        self.address = self._client.own_address
        if (
            self._folder_in_use is not None and orders.message
        ):  # perhaps another run was meant, perhaps this one
            return replace(
                orders, message=f"{self._folder_in_use}. To take part in that run instead: {orders.message}"
            )
        if self._folder_in_use is not None:
            self._folder_in_use = None
            self._say_once(
                f"this run has begun already, led by {self._client.address}:{self._client.port}, and this "
                f"host takes part in it. "
                "If another run was meant, stop this one and give it another run.folder"
            )
        return orders

    def check_lead(self) -> None:
        """Give the sign of life of a leader; if another host has taken over, this one must end."""
        if self.lost_lead():
            raise RunFailed(
                "another host leads this run now: this one gave no sign of life for too long. Start it again "
                "to take part."
            )

    def lost_lead(self) -> bool:
        """Whether another host has taken over."""
        return not self._meeting.still_leads(self._hold_again)

    def _hold_again(self) -> None:
        """Make the run's folders again, which were deleted, and keep others out of the new ones: the old
        locks do not."""
        self._locks.close()
        try:
            self._locks.enter_context(self._hold())
        except UserError as error:
            self._say_once(
                f"warning: the run's folder was deleted, and others are not kept out of the new one: {error}"
            )

    def silence(self) -> float:
        """Seconds since a leader answered."""
        return time.monotonic() - self._answered

    def patience(self) -> float:
        """Seconds for which this host looks for a leader that does not answer. A first node that shares no
        folder with this one leaves no sign in it."""
        if self._folder_in_use is not None or self._failed_first_node() is not None:
            return REFUSED_SECONDS
        heard = (
            self._last_orders is not None or self._meeting.has_news() or self._first_node.heard() is not None
        )
        return GIVE_UP_SECONDS if heard or self._meeting.given else UNHEARD_SECONDS

    def trouble(self) -> str:
        """Why there is no leader, as far as this host can tell, and what can be done."""
        _, _, credentials = self._meeting.find()
        address, port = self._client.address, self._client.port
        if self._folder_in_use is not None:
            return (
                f"{self._folder_in_use} (should that be this run: {address}:{port}, which leads it, does not "
                f"answer)"
            )
        if (failed := self._failed_first_node()) is not None:
            return f"the first node has ended: {failed.ended}"
        if credentials is None and self._first_node.heard() is not None:
            return "the first node has started, and does not lead the run yet (it may be preparing the data)"
        if credentials is None:
            return (
                f"the run's secret is not known yet: the first node writes {self._meeting.path}, and nothing "
                f"was heard of it so "
                "far. Is it running, and do all nodes see the same run.folder? If not, give all of them the "
                "same SHARDWISE_SECRET"
            )
        if self._client.older:
            return (
                f"{address}:{port}, which leads this run, has an older version of shardwise, which does not "
                f"say its number, "
                f"and this host has {self._own.version}: install the same version on every host"
            )
        if self._client.refused:
            return (
                f"{address}:{port} refuses this host: a run with another secret or name (PET_RDZV_ID) is "
                f"there. If nodes do "
                f"not share {self._meeting.path}, give all of them the same SHARDWISE_SECRET"
            )
        return f"the host that leads this run, {address}:{port}, does not answer"

    def _failed_first_node(self) -> Sign | None:
        """What the first node said when it failed, if this host waits for it and for no other leader."""
        sign = self._first_node.heard() if self._last_orders is None and self._folder_in_use is None else None
        return sign if sign is not None and sign.ended else None

    def give_up_if_too_long(self) -> None:
        """Raise once there is no hope that a leader will answer."""
        failed = self._failed_first_node()
        if failed is not None and (not self._first_node.is_left_over() or self.silence() > self.patience()):
            raise (UserError if failed.status == UserError.status else RunFailed)(self.trouble())
        if self.silence() > self.patience():
            raise self._folder_in_use or RunFailed(self.trouble())
        if time.monotonic() - self._accepted > REFUSED_SECONDS:
            raise UserError(self.trouble())

    def close(self) -> None:
        """Leave."""
        if self.rendezvous is not None and self.rendezvous.has_ended():
            self._meeting.remove()
        self._client.close()
        self._let_go()
