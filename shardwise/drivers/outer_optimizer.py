"""The outer optimizer of local training: local SGD, and DiLoCo (Douillard et al. 2023).

Groups of devices train by themselves, each with its own rows of every global batch and its own optimizer. All
begin with the same weights, the *anchor*. After `local.sync_every` steps each group has moved away from the
anchor by some difference. The mean of these differences is taken as a gradient of the anchor, and SGD with
Nesterov momentum makes a step on it. Every group goes on from there. The anchor is the model of the run: it
is evaluated, saved as the model, and exported.

With several *fragments* (Douillard et al. 2025) parts of the model are exchanged in turn, one every
sync_every / fragments steps, so that the link between groups is used evenly. With `overlap` groups make that
many further steps while an exchange is under way. What a group has learnt meanwhile is kept: its weights move
by what the anchor moved, less what the group had contributed.

Devices of the same place in each group exchange the slices that they hold: 4 bytes a parameter for each
exchange, less with a codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.checkpoint.save import State
from shardwise.checkpoint.state_key import StateKey, StateKind
from shardwise.codecs import parse_row_codec
from shardwise.comm import Comm
from shardwise.comm.async_sum import AsyncSum
from shardwise.optim import local
from shardwise.parallel import ParallelModel

AXIS = "group"


class OuterSettings(Protocol):
    """What the table `[local]` of a job says (drivers/local.py)."""

    @property
    def sync_every(self) -> int:
        """Number of steps between two exchanges."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the outer step."""

    @property
    def momentum(self) -> float:
        """Nesterov momentum of the outer step."""

    @property
    def fragments(self) -> int:
        """Parts of the model that are exchanged in turn."""

    @property
    def overlap(self) -> int:
        """Steps that groups make while an exchange is under way."""

    @property
    def compression(self) -> str | None:
        """The codec of differences; None: they are sent as they are."""


@dataclass
class GroupExchange:
    """An exchange between groups that is under way."""

    names: Sequence[str]
    """The parameters of the whole model that are exchanged; a pipeline stage holds some of them."""
    local_difference: Tensor
    """The anchor less this group's weights, when the exchange began; flat, of what this rank holds."""
    sum: AsyncSum
    """The sum of the groups' differences."""
    groups: int
    """Number of groups whose differences are in the sum."""
    in_background: bool
    """Whether the group trains on meanwhile."""


class OuterOptimizer:
    """The anchor, its momentum, and the exchanges of one rank."""

    def __init__(
        self,
        parallel: ParallelModel,
        comm: Comm,
        settings: OuterSettings,
        last: int,
        sizes: Mapping[str, int],
        same_on: str | None = None,
    ) -> None:
        """`last` is the last step of the run. `sizes` are those of all parameters of the whole model that are
        trained, in its order. `same_on` is an axis of the group whose devices hold the same weights."""
        self._same_on = same_on
        self.comm, self.settings, self.last = comm, settings, last
        self.groups = comm.mesh.size(AXIS)
        self.copies: dict[str, list[nn.Parameter]] = {}
        """The parameters by name; a tied weight may be on this rank twice."""
        for name, parameter in parallel.named_parameters():
            if parameter.requires_grad:
                self.copies.setdefault(name, []).append(parameter)
        self.anchors = {name: copies[0].detach().clone() for name, copies in self.copies.items()}
        self.momenta = {name: torch.zeros_like(anchor) for name, anchor in self.anchors.items()}
        self.exchange: GroupExchange | None = None
        self._codec = None if settings.compression is None else parse_row_codec(settings.compression)
        self._apart = comm.mesh.second_group(AXIS) if settings.overlap else comm.mesh.group(AXIS)
        self._names = list(sizes)
        self._fragments = _cut(sizes, settings.fragments)

    @property
    def under_way(self) -> tuple[str, ...]:
        """The parameters that are being exchanged."""
        return () if self.exchange is None else tuple(self.exchange.names)

    def exchanges_after(self, step: int) -> bool:
        """Return whether groups begin an exchange after this step."""
        return step == self.last or self._fragment_after(step) is not None

    def waits_in(self, step: int) -> bool:
        """Return whether this group may have to wait for others in this step."""
        return self.exchanges_after(step) or self._ends_after(step)

    @torch.no_grad()
    def after(self, step: int) -> None:
        """End the exchange that is due after this step of the group, and begin the next one."""
        if self.exchange is not None and self.waits_in(step):
            self._end(self.exchange)
        if step == self.last:
            self._end(self._begin(self._names, step))
        elif (fragment := self._fragment_after(step)) is not None:
            self.exchange = self._begin(self._fragments[fragment], step)
            if not self.exchange.in_background:
                self._end(self.exchange)

    @torch.no_grad()
    def reset_anchor(self) -> None:
        """Take the present weights, which are the same in all groups, as the anchor."""
        for name, anchor in self.anchors.items():
            local(anchor).copy_(local(self.copies[name][0]))
            local(self.momenta[name]).zero_()

    @contextmanager
    def anchor_in_model(self) -> Iterator[None]:
        """Return a context in which the model has the anchor's weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    # Checkpoints

    def state(self, of_group: State, group: int) -> State:
        """Return everything that a run of groups consists of: the anchor as the model, the state of this
        group, and the exchange that is under way."""
        model = {key: value for key, value in of_group.items() if key.is_model}
        state = _for_group(of_group, group) | model | self._agreed()  # buffers of the model have no anchor
        if self.exchange is not None:
            mean = self.exchange.sum.result() / self.exchange.groups
            for name, own, gradient in self._parts(self.exchange.names, self.exchange.local_difference, mean):
                state[_own_key(name, group)] = self._like(name, own)
                state[_mean_key(name)] = self._like(name, gradient)
        return state

    def state_to_fill(self, of_group: State, group: int, under_way: Sequence[str]) -> State:
        """Return the tensors that a checkpoint is loaded into, in which these parameters were being
        exchanged. Every group has buffers of its own."""
        state = _for_group(of_group, group) | self._agreed()
        for name in self._here(under_way):
            state[_own_key(name, group)] = torch.zeros_like(self.anchors[name])
            state[_mean_key(name)] = torch.zeros_like(self.anchors[name])
        return state

    def state_loaded(self, state: State, group: int, under_way: Sequence[str]) -> None:
        """A checkpoint was loaded into this state: an exchange that was in progress when it was saved is in
        progress again."""
        here = self._here(under_way)
        own = [local(state[_own_key(name, group)]).reshape(-1) for name in here]
        mean = [local(state[_mean_key(name)]).reshape(-1) for name in here]
        arrived = AsyncSum(self.comm, AXIS, None, mean, None, seed=0, in_thread=False)
        self.exchange = (
            GroupExchange(under_way, self._flat(own), arrived, groups=1, in_background=True)
            if under_way
            else None
        )

    def _agreed(self) -> State:
        """Return what all groups have in common: the anchor and its momentum."""
        anchors = {StateKey.model(name): anchor for name, anchor in self.anchors.items()}
        momenta = {StateKey(StateKind.OUTER_MOMENTUM, name): value for name, value in self.momenta.items()}
        return anchors | momenta

    # When to exchange

    def _fragment_after(self, step: int) -> int | None:
        """Return the fragment whose exchange begins after this step; None: no exchange begins."""
        every, count = self.settings.sync_every, len(self._fragments)
        return next(
            (index for index in range(count) if step % every == (index + 1) * every // count % every), None
        )

    def _ends_after(self, step: int) -> bool:
        """Return whether an exchange that began `overlap` steps ago ends after this step."""
        begun = step - self.settings.overlap
        return begun > 0 and self._fragment_after(begun) is not None

    # An exchange

    def _begin(self, names: Sequence[str], step: int) -> GroupExchange:
        """Begin to sum the differences of all groups in these parameters."""
        in_background = self.settings.overlap > 0 and step != self.last
        here = self._here(names)
        differences = [(local(self.anchors[name]) - local(self.copies[name][0])).reshape(-1) for name in here]
        under_way = AsyncSum(
            self.comm, AXIS, self._apart, differences, self._codec, step, in_background, self._same_on
        )
        return GroupExchange(names, self._flat(differences), under_way, self.groups, in_background)

    def _end(self, exchange: GroupExchange) -> None:
        """Make the outer step of the exchanged parameters, and go on from it."""
        mean = exchange.sum.result() / exchange.groups
        for name, own, gradient in self._parts(exchange.names, exchange.local_difference, mean):
            anchor, momentum = local(self.anchors[name]), local(self.momenta[name])
            when_begun = anchor - own  # this group's weights when the exchange began
            momentum.mul_(self.settings.momentum).add_(gradient)
            anchor.add_(
                gradient.add(momentum, alpha=self.settings.momentum), alpha=-self.settings.learning_rate
            )
            for copy in self.copies[name]:
                local(copy).copy_(anchor + (local(copy) - when_begun) if exchange.in_background else anchor)
        self.exchange = None

    def _here(self, names: Sequence[str]) -> list[str]:
        """Return those of these parameters that this rank has."""
        return [name for name in names if name in self.anchors]

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if parts else torch.empty(0, device=self.comm.device)

    def _parts(self, names: Sequence[str], *flat: Tensor) -> Iterator[tuple[Any, ...]]:
        """Give each of these parameters that this rank has: its name, and its part of each flat tensor in the
        parameter's shape."""
        here = self._here(names)
        wholes = [local(self.anchors[name]) for name in here]
        pieces = [torch.split(each, [whole.numel() for whole in wholes]) for each in flat]
        for index, (name, whole) in enumerate(zip(here, wholes, strict=True)):
            yield name, *(each[index].view_as(whole) for each in pieces)

    def _like(self, name: str, own: Tensor) -> Tensor:
        """Return this rank's slice in the form in which the parameter is stored."""
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
    """Return fragments of about the same size, in the order of the model. All ranks cut alike, whatever they
    hold."""
    fragments: list[list[str]] = [[] for _ in range(count)]
    before, total = 0, max(1, sum(sizes.values()))
    for name, size in sizes.items():
        fragments[min(count - 1, (before + size // 2) * count // total)].append(name)
        before += size
    return fragments
