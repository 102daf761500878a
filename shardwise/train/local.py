"""Groups that train by themselves and meet now and then: local SGD, and DiLoCo (Douillard et al. 2023).

A group is a layout of its own, with its own rows of every global batch and its own optimizer. All groups
begin with the same weights, the *anchor*. After `local.steps` steps each has moved away from it by some
difference; the mean of the differences is taken as a gradient of the anchor, on which an outer optimizer
makes a step (SGD with Nesterov's momentum). Every group goes on from there. The anchor is the model of the
run: what is evaluated, saved as the model, and exported.

With several *fragments* (Douillard et al. 2025) parts of the model meet in turn, one every local.steps /
fragments steps, so that no moment needs the whole link. With `overlap` the exchange goes on behind so many
further steps. What a group has learnt meanwhile is kept: its weights move by what the anchor moved, less what
the group had brought to it.

Between meetings groups exchange nothing at all, so whatever all of them have to agree on (that the run is to
stop, that a save is due) is agreed on when they meet. Devices of the same place in each group exchange the
slices that they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.save import State
from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.codecs import parse_row_codec
from shardwise.comm import Comm
from shardwise.comm.under_way import SumUnderWay
from shardwise.config import Local
from shardwise.optim import local
from shardwise.parallel import ParallelModel

AXIS = "group"


@dataclass
class Meeting:
    """An exchange under way."""

    names: Sequence[str]
    """Of the parameters, those of the whole model: a pipeline stage has some of them."""
    own: Tensor
    """The anchor less this group's weights, when the exchange began; flat, of what this rank holds."""
    sum: SumUnderWay
    """Of all groups' differences."""
    groups: int
    """That they are of."""
    behind: bool
    """Whether the group goes on meanwhile."""


class Outer:
    """The anchor, its momentum, and the exchanges of one rank."""

    def __init__(
        self,
        parallel: ParallelModel,
        comm: Comm,
        settings: Local,
        last: int,
        sizes: Mapping[str, int],
        same_on: str | None = None,
    ) -> None:
        """`last`: the last step; `sizes`: of all parameters of the whole model that are trained, in its
        order; `same_on`: an axis of the group whose devices hold the same weights."""
        self._same_on = same_on
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
        self._codec = None if settings.compression is None else parse_row_codec(settings.compression)
        self._apart = comm.mesh.second_group(AXIS) if settings.overlap else comm.mesh.group(AXIS)
        self._names = list(sizes)
        self._fragments = _cut(sizes, settings.fragments)

    @property
    def under_way(self) -> tuple[str, ...]:
        """The parameters that are being exchanged."""
        return () if self.meeting is None else tuple(self.meeting.names)

    def meets(self, step: int) -> bool:
        """Whether groups begin an exchange after this step."""
        return step == self.last or self._beginning(step) is not None

    def waits(self, step: int) -> bool:
        """Whether this group may have to wait for others in this step."""
        return self.meets(step) or self._arrives(step)

    @torch.no_grad()
    def after(self, step: int) -> None:
        """The group has made this step."""
        if self.meeting is not None and self.waits(step):
            self._land(self.meeting)
        if step == self.last:
            self._land(self._begin(self._names, step))
        elif (fragment := self._beginning(step)) is not None:
            self.meeting = self._begin(self._fragments[fragment], step)
            if not self.meeting.behind:
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

    # Checkpoints

    def state(self, of_group: State, group: int) -> State:
        """Return everything that a run of groups consists of: the anchor as the model, what this group has
        for itself, and what is under way."""
        model = {key: value for key, value in of_group.items() if key.is_model}
        state = _for_group(of_group, group) | model | self._agreed()  # buffers of the model have no anchor
        if self.meeting is not None:
            mean = self.meeting.sum.result() / self.meeting.groups
            for name, own, gradient in self._parts(self.meeting.names, self.meeting.own, mean):
                state[_own_key(name, group)] = self._like(name, own)
                state[_mean_key(name)] = self._like(name, gradient)
        return state

    def to_fill(self, of_group: State, group: int, under_way: Sequence[str]) -> State:
        """What a checkpoint is to fill in which these parameters were under way. Buffers are each group's
        own."""
        state = _for_group(of_group, group) | self._agreed()
        for name in self._here(under_way):
            state[_own_key(name, group)] = torch.zeros_like(self.anchors[name])
            state[_mean_key(name)] = torch.zeros_like(self.anchors[name])
        return state

    def filled(self, state: State, group: int, under_way: Sequence[str]) -> None:
        """Take over the exchange that was in progress when the checkpoint was saved, from a state that was
        loaded."""
        here = self._here(under_way)
        own = [local(state[_own_key(name, group)]).reshape(-1) for name in here]
        mean = [local(state[_mean_key(name)]).reshape(-1) for name in here]
        arrived = SumUnderWay(self.comm, AXIS, None, mean, None, seed=0, behind=False)
        self.meeting = (
            Meeting(under_way, self._flat(own), arrived, groups=1, behind=True) if under_way else None
        )

    def _agreed(self) -> State:
        momentum = StateKind.OUTER_MOMENTUM
        anchors = {StateKey.model(name): anchor for name, anchor in self.anchors.items()}
        return anchors | {StateKey(momentum, name): value for name, value in self.momenta.items()}

    # When

    def _beginning(self, step: int) -> int | None:
        """The fragment whose exchange begins after this step."""
        every, count = self.settings.steps, len(self._fragments)
        return next(
            (index for index in range(count) if step % every == (index + 1) * every // count % every), None
        )

    def _arrives(self, step: int) -> bool:
        """Whether what began `overlap` steps ago is to be there."""
        return self._beginning(step - self.settings.overlap) is not None and step > self.settings.overlap

    # What

    def _begin(self, names: Sequence[str], step: int) -> Meeting:
        behind = self.settings.overlap > 0 and step != self.last
        here = self._here(names)
        differences = [(local(self.anchors[name]) - local(self.copies[name][0])).reshape(-1) for name in here]
        under_way = SumUnderWay(
            self.comm, AXIS, self._apart, differences, self._codec, step, behind, self._same_on
        )
        return Meeting(names, self._flat(differences), under_way, self.groups, behind)

    def _land(self, meeting: Meeting) -> None:
        """Make the outer step of these parameters, and go on from it."""
        mean = meeting.sum.result() / meeting.groups
        for name, own, gradient in self._parts(meeting.names, meeting.own, mean):
            anchor, momentum = local(self.anchors[name]), local(self.momenta[name])
            at_meeting = anchor - own
            momentum.mul_(self.settings.momentum).add_(gradient)
            anchor.add_(
                gradient.add(momentum, alpha=self.settings.momentum), alpha=-self.settings.learning_rate
            )
            for copy in self.copies[name]:
                local(copy).copy_(anchor + (local(copy) - at_meeting) if meeting.behind else anchor)
        self.meeting = None

    def _here(self, names: Sequence[str]) -> list[str]:
        """Those that this rank has."""
        return [name for name in names if name in self.anchors]

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if parts else torch.empty(0, device=self.comm.device)

    def _parts(self, names: Sequence[str], *flat: Tensor) -> Iterator[tuple[Any, ...]]:
        """Of these parameters, each that this rank has: its name, and its part of each flat tensor in its
        shape."""
        here = self._here(names)
        wholes = [local(self.anchors[name]) for name in here]
        pieces = [torch.split(each, [whole.numel() for whole in wholes]) for each in flat]
        for index, (name, whole) in enumerate(zip(here, wholes, strict=True)):
            yield name, *(each[index].view_as(whole) for each in pieces)

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


def _for_group(state: State, group: int) -> State:
    """Return a state under the keys of this group."""
    return {key.of_group(group): value for key, value in state.items()}


def _own_key(name: str, group: int) -> StateKey:
    return StateKey(StateKind.OUTER_OWN, name, group=group)


def _mean_key(name: str) -> StateKey:
    return StateKey(StateKind.OUTER_MEAN, name)


def _cut(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Fragments of about the same size, in the order of the model. All ranks cut alike, whatever they
    hold."""
    fragments: list[list[str]] = [[] for _ in range(count)]
    before, total = 0, max(1, sum(sizes.values()))
    for name, size in sizes.items():
        fragments[min(count - 1, (before + size // 2) * count // total)].append(name)
        before += size
    return fragments
