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
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.comm.codecs import codec
from shardwise.comm.under_way import SumUnderWay
from shardwise.config import Local
from shardwise.config.compression import Compression
from shardwise.optim import local
from shardwise.parallel import ParallelModel

AXIS = "group"


@dataclass
class Meeting:
    """An exchange under way: of which parameters, what this group brought, and what comes of all groups' together."""

    names: Sequence[str]
    own: Tensor
    """The anchor less this group's weights, when the exchange began; flat."""
    sum: SumUnderWay
    """Of all groups' differences."""


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
        meeting = self.meeting or self._arrived(names, self._zeros(names), self._zeros(names))
        for name, own, total in zip(
            names, self._parts(meeting.own, names), self._parts(meeting.sum.result(), names), strict=True
        ):
            state[f"group.{group}.outer.own.{name}"] = self._like(name, own)
            state[f"outer.sum.{name}"] = self._like(name, total)
        return state

    def taken(self, state: dict[str, Tensor], group: int, step: int) -> None:
        """What `state` gave was filled: what was under way is, again."""
        names = self._under_way(step)
        if names is None:
            self.meeting = None
            return
        own, total = (
            torch.cat([local(state[f"{key}.{name}"]).reshape(-1) for name in names])
            for key in (f"group.{group}.outer.own", "outer.sum")
        )
        self.meeting = self._arrived(names, own, total)

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
        return Meeting(names, own, SumUnderWay(self.comm, AXIS, self._apart, own, self._codec, seed=step))

    def _arrived(self, names: Sequence[str], own: Tensor, total: Tensor) -> Meeting:
        """An exchange that is over already."""
        return Meeting(names, own, SumUnderWay(self.comm, AXIS, None, total, None, seed=0))

    def _land(self, meeting: Meeting) -> None:
        """Make the outer step of these parameters, and go on from it."""
        mean = meeting.sum.result() / self.groups
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
