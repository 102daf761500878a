"""float8 on all devices: which products are made in it, and the scales that they agree on (models/float8.py has the products).

The largest magnitudes of a step are put together over all devices by one maximum, a few numbers for each product, and every
device derives the same scales for the next step. Maxima do not depend on the order in which they are taken, nor on who has which
tokens: so a layout computes with the scales of one device, and can be proven against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.config import Train
from shardwise.models import Head, Transformer
from shardwise.models.float8 import LARGEST, ROOM, Float8, Scale, scale_for
from shardwise.models.layers import Linear
from shardwise.plan import RANK_AXES
from shardwise.plan.float8 import in_float8, products


def use_float8(model: Transformer, train: Train) -> None:
    """Make the products of a plain model in float8 that the job makes so (plan/float8.py)."""
    sources: dict[str, Scale] = {}
    chosen = in_float8(model.config, train)
    for name, source, _ in products(model.config):
        if name in chosen:
            module = model.get_submodule(name)
            assert isinstance(module, Linear | Head)
            module.float8 = Float8(sources.get(source))
            sources.setdefault(source, module.float8.input)


@dataclass(frozen=True)
class Seen:
    """What a step saw of every scaled tensor of the model, on all devices."""

    numbers: Tensor
    """(tensors, 3): largest magnitude, share of numbers lost below the range, and the magnitude relative to the range's end:
    infinite where no scale was known."""

    @property
    def outgrown(self) -> Tensor:
        """Whether any of them went beyond its range, so that the step has to be made again."""
        return (self.numbers[:, 2] > 1).any()

    @property
    def finite(self) -> Tensor:
        """Whether all of them were finite, which a cast to 8 bits would hide."""
        return self.numbers[:, 0].isfinite().all()


class Scales:
    """All scales of the model, of which this rank's part of it has some.

    Delayed ones are not known in a run's first step, which is therefore made twice, first to look at the magnitudes: with dynamic
    scales, which take no more memory than later steps. In a proof (`exact`), without any rounding: dynamic scales depend on who
    has which tokens.
    """

    def __init__(self, models: Sequence[nn.Module], names: Sequence[str], comm: Comm, delayed: bool, exact: bool) -> None:
        self.comm, self.delayed, self.names, self.exact = comm, delayed, names, exact
        self.products = [module for model in models for module in model.modules() if isinstance(module, Float8)]
        for product in self.products:
            product.note_on(comm.device)
        own = {name: module for model in models for name, module in model.named_modules() if isinstance(module, Scale)}
        self.own = list(own.values())
        self.places = torch.tensor([names.index(name) for name in own], dtype=torch.int64, device=comm.device)
        self.ends, self.rooms = (
            torch.tensor([of[scale.dtype] for scale in self.own], device=comm.device) for of in (LARGEST, ROOM)
        )
        self._wheres: dict[tuple[int, ...], Tensor] = {}
        self.known = not delayed
        """Whether there are scales from former steps, where they are needed."""

    def begin(self) -> None:
        """A step: take its scales from those before."""
        if not self.delayed or not self.own:
            return
        largest = torch.stack([scale.maxima for scale in self.own]).amax(1)
        values = scale_for(largest, self.ends / self.rooms)
        torch._foreach_copy_([scale.value for scale in self.own], list(values.unbind()))
        if not self.known:
            self.known = bool((largest > 0).any())
        for product in self.products:
            product.dynamic = not self.known
            product.plain = not self.known and self.exact

    def see(self) -> Seen:
        """What the step saw, on all devices."""
        numbers = torch.zeros(len(self.names), 3, device=self.comm.device)
        noted = [seen for product in self.products for seen in product.noted]
        if noted:
            times = tuple(len(product.noted) for product in self.products)
            where = self._where(times).unsqueeze(1).expand(-1, 2)
            numbers[:, :2].scatter_reduce_(0, where, torch.cat(noted), "amax")
        if self.own and self.delayed:
            values = torch.stack([scale.value for scale in self.own])
            relative = numbers[self.places, 0] * values / self.ends
            numbers[self.places, 2] = relative if self.known else torch.full_like(relative, math.inf)
        for axis in RANK_AXES:
            self.comm.all_reduce(numbers, axis, op=torch.distributed.ReduceOp.MAX)
        return Seen(numbers)

    def _where(self, times: tuple[int, ...]) -> Tensor:
        """To which scales the rows belong that products noted, one after the other, so many times each."""
        if times not in self._wheres:
            place = {id(scale): place for scale, place in zip(self.own, self.places.tolist(), strict=True)}
            rows = [place[id(scale)] for product, n in zip(self.products, times, strict=True) for scale in n * product.scales()]
            self._wheres = {times: torch.tensor(rows, device=self.comm.device)}
        return self._wheres[times]

    def remember(self, seen: Seen) -> None:
        """The step's maxima; of one that is to be made again, together with those of the step before."""
        if not self.own:
            return
        largest, before = seen.numbers[self.places, :1], torch.stack([scale.maxima for scale in self.own])
        merged = torch.cat((torch.maximum(before[:, :1], largest), before[:, 1:]), 1)
        moved = torch.cat((largest, before[:, :-1]), 1)
        after = torch.where(seen.outgrown, merged, moved)
        torch._foreach_copy_([scale.maxima for scale in self.own], list(after.unbind()))
        for product in self.products:
            product.noted.clear()
            product.probe.grad = None
