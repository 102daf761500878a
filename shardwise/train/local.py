"""Groups that train by themselves and meet now and then: local SGD, and DiLoCo (Douillard et al. 2023).

A group is a layout of its own, with its own rows of every global batch and its own optimizer. All groups begin with the same
weights, the *anchor*. After `local.steps` steps each has moved away from it by some difference; the mean of the differences is
taken as a gradient of the anchor, on which an outer optimizer makes a step (SGD with Nesterov's momentum). Every group goes on
from there. The anchor is the model of the run: what is evaluated, saved as the model, and exported.

With several *fragments* (Douillard et al. 2025) parts of the model meet in turn, one every local.steps / fragments steps, so that
no moment needs the whole link. With `overlap` the exchange goes on behind so many further steps. What a group has learnt
meanwhile is kept: its weights move by what the anchor moved, less what the group had brought to it.

Between meetings groups exchange nothing at all, so whatever all of them have to agree on (that the run is to stop, that a save
is due) is agreed on when they meet. Devices of the same place in each group exchange the slices that they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.comm.codecs import codec
from shardwise.config import Local
from shardwise.config.compression import Compression
from shardwise.observe import Collective
from shardwise.optim import local
from shardwise.parallel import ParallelModel

AXIS = "group"


@dataclass
class Meeting:
    """An exchange under way: of which parameters, what this group brought, and what comes of all groups' together."""

    names: Sequence[str]
    own: Tensor
    """The anchor less this group's weights, when the exchange began; flat, as all of them."""
    arriving: Tensor
    """The sum of all groups' differences once it is there; or, encoded, each group's."""
    under_way: dist.Work | None
    begun: Collective | None
    seed: int


class Outer:
    """The anchor, its momentum, and the exchanges of one rank."""

    def __init__(self, parallel: ParallelModel, comm: Comm, settings: Local, last: int) -> None:
        self.comm, self.settings, self.last = comm, settings, last
        self.groups = comm.mesh.size(AXIS)
        self.copies: dict[str, list[nn.Parameter]] = {}
        """By name; a tied weight may be on this rank twice."""
        for name, parameter in parallel.named_parameters():
            if parameter.requires_grad:
                self.copies.setdefault(name, []).append(parameter)
        self.anchors = {name: copies[0].detach().clone() for name, copies in self.copies.items()}
        self.momenta = {name: torch.zeros_like(anchor) for name, anchor in self.anchors.items()}
        self.meeting: Meeting | None = None
        self._codec = None if settings.compression is None else codec(Compression.parse(settings.compression))
        self._apart = comm.mesh.second_group(AXIS) if settings.overlap else comm.mesh.group(AXIS)
        self._fragments = self._cut(settings.fragments)

    def meets(self, step: int) -> bool:
        """Whether groups begin an exchange after this step."""
        return step == self.last or self._beginning(step) is not None

    @torch.no_grad()
    def after(self, step: int) -> None:
        """The group has made this step."""
        if self.meeting is not None and (step == self.last or self._arrives(step)):
            self._land(self.meeting)
        if step == self.last:
            self._land(self._begin(list(self.anchors), step))
        elif (fragment := self._beginning(step)) is not None:
            self.meeting = self._begin(self._fragments[fragment], step)
            if not self.settings.overlap:
                self._land(self.meeting)

    @torch.no_grad()
    def anchor_here(self) -> None:
        """The weights are those that all groups begin with."""
        for name, anchor in self.anchors.items():
            local(anchor).copy_(local(self.copies[name][0]))
            local(self.momenta[name]).zero_()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the model is the anchor."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self, of_group: dict[str, Tensor], group: int, step: int) -> dict[str, Tensor]:
        """Everything that a run of groups consists of, by name: the anchor as the model, what this group has for itself, and
        what is under way after this step."""
        state = {f"group.{group}.{name}": value for name, value in of_group.items()}
        state |= {name: value for name, value in of_group.items() if name.startswith("model.")}  # buffers, that is
        state |= {f"model.{name}": anchor for name, anchor in self.anchors.items()}
        state |= {f"outer.momentum.{name}": momentum for name, momentum in self.momenta.items()}
        if (names := self._under_way(step)) is None:
            return state
        meeting = self._arrived(names)
        for name, own, mean in zip(names, self._parts(meeting.own, names), self._parts(meeting.arriving, names), strict=True):
            state[f"group.{group}.outer.own.{name}"] = self._like(name, own)
            state[f"outer.sum.{name}"] = self._like(name, mean)
        return state

    def taken(self, state: dict[str, Tensor], group: int, step: int) -> None:
        """What `state` gave was filled: what was under way is, again."""
        names = self._under_way(step)
        if names is None:
            self.meeting = None
            return
        own, arrived = (
            torch.cat([local(state[f"{key}.{name}"]).reshape(-1) for name in names])
            for key in (f"group.{group}.outer.own", "outer.sum")
        )
        self.meeting = Meeting(names, own, arrived, None, None, 0)

    # When

    def _beginning(self, step: int) -> int | None:
        """The fragment whose exchange begins after this step."""
        every, count = self.settings.steps, len(self._fragments)
        return next((index for index in range(count) if step % every == (index + 1) * every // count % every), None)

    def _arrives(self, step: int) -> bool:
        """Whether what began `overlap` steps ago is to be there."""
        return self._beginning(step - self.settings.overlap) is not None and step > self.settings.overlap

    def _under_way(self, step: int) -> list[str] | None:
        """The parameters that are being exchanged after this step is done."""
        if step >= self.last:
            return None
        for since in range(self.settings.overlap):
            fragment = self._beginning(step - since)
            if fragment is not None and step - since > 0:
                return self._fragments[fragment]
        return None

    # What

    def _cut(self, count: int) -> list[list[str]]:
        """Fragments of about the same size, in the order of the model."""
        sizes = [local(anchor).numel() for anchor in self.anchors.values()]
        fragments: list[list[str]] = [[] for _ in range(count)]
        before = 0
        for name, size in zip(self.anchors, sizes, strict=True):
            fragments[min(count - 1, (before + size // 2) * count // max(1, sum(sizes)))].append(name)
            before += size
        return fragments

    def _begin(self, names: Sequence[str], step: int) -> Meeting:
        differences = [(local(self.anchors[name]) - local(self.copies[name][0])).reshape(-1) for name in names]
        own = torch.cat(differences) if differences else self._zeros(names)
        if self.groups == 1 or not own.numel():
            return Meeting(names, own, own.clone(), None, None, step)
        if self._codec is None:
            arriving = own.clone()
            begun = self.comm.begin("all_reduce", AXIS, arriving)
            work = dist.all_reduce(arriving, group=self._apart, async_op=True)
            return Meeting(names, own, arriving, work, begun, step)
        wire = self._codec.encode(own.unsqueeze(0), seed=step)
        arriving = wire.new_empty(self.groups, wire.shape[1])
        begun = self.comm.begin("all_gather", AXIS, arriving, plain=own.expand(self.groups, -1))
        work = dist.all_gather(list(arriving), wire[0], group=self._apart, async_op=True)
        return Meeting(names, own, arriving, work, begun, step)

    def _wait(self, meeting: Meeting) -> Tensor:
        """The sum of all groups' differences."""
        if meeting.under_way is not None and meeting.begun is not None:
            with self.comm.waiting():
                meeting.under_way.wait()
            meeting.begun.end()
            meeting.under_way = None
            if self._codec is not None:
                total = torch.zeros_like(meeting.own)
                for wire in meeting.arriving:
                    self._codec.decode(wire.unsqueeze(0), total.unsqueeze(0), meeting.seed, add=True)
                meeting.arriving = total
        return meeting.arriving

    def _arrived(self, names: Sequence[str]) -> Meeting:
        """What is under way, with its sum in place; zeros of its size where it is yet to be read from a checkpoint."""
        if self.meeting is None:
            self.meeting = Meeting(names, self._zeros(names), self._zeros(names), None, None, 0)
        self._wait(self.meeting)
        return self.meeting

    def _land(self, meeting: Meeting) -> None:
        """Make the outer step of these parameters, and go on from it."""
        mean = self._wait(meeting) / self.groups
        for name, own, gradient in zip(
            meeting.names, self._parts(meeting.own, meeting.names), self._parts(mean, meeting.names), strict=True
        ):
            anchor, momentum = local(self.anchors[name]), local(self.momenta[name])
            at_meeting = anchor - own
            momentum.mul_(self.settings.momentum).add_(gradient)
            anchor.add_(gradient.add(momentum, alpha=self.settings.momentum), alpha=-self.settings.learning_rate)
            for copy in self.copies[name]:
                local(copy).copy_(anchor + (local(copy) - at_meeting) if self.settings.overlap else anchor)
        self.meeting = None

    def _parts(self, flat: Tensor, names: Sequence[str]) -> list[Tensor]:
        """A flat tensor in the shapes of these parameters' slices."""
        wholes = [local(self.anchors[name]) for name in names]
        pieces = torch.split(flat, [whole.numel() for whole in wholes])
        return [piece.view_as(whole) for piece, whole in zip(pieces, wholes, strict=True)]

    def _zeros(self, names: Sequence[str]) -> Tensor:
        dtype = next(iter(self.anchors.values())).dtype
        return torch.zeros(sum(local(self.anchors[name]).numel() for name in names), dtype=dtype, device=self.comm.device)

    def _like(self, name: str, own: Tensor) -> Tensor:
        """This rank's slice, as the parameter is kept."""
        whole = torch.empty_like(self.anchors[name])
        local(whole).copy_(own)
        return whole

    @torch.no_grad()
    def _swap(self) -> None:
        for name, anchor in self.anchors.items():
            kept = local(anchor).clone()
            local(anchor).copy_(local(self.copies[name][0]))
            for copy in self.copies[name]:
                local(copy).copy_(kept)
