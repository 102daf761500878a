"""float8 on all devices: which products are made in it, and the scales that they agree on
(models/float8_products.py has the products).

The largest magnitudes of a step are put together over all devices by a maximum, a few numbers for each
product, and every device derives the same scales for the next step. Maxima do not depend on the order in
which they are taken, nor on who has which tokens: so a layout computes with the scales of one device, and can
be proven against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.checkpoint.state_key import split_scale_name
from shardwise.comm import Comm
from shardwise.config.axes import RANK_AXES
from shardwise.models import Head, Transformer
from shardwise.models.experts import Experts
from shardwise.models.float8_grouped import GroupedProducts
from shardwise.models.float8_products import (
    E4M3,
    HEADROOM,
    HISTORY,
    LARGEST,
    DelayedScale,
    Float8,
    ScaledProduct,
    scale_for,
)
from shardwise.models.layers import Linear
from shardwise.optim import local
from shardwise.plan.float8_choice import products


def use_float8(model: Transformer, names: Iterable[str]) -> None:
    """Let a plain model make the products of these names in float8 (plan/float8_choice.py)."""
    sources: dict[str, DelayedScale] = {}
    chosen = set(names)
    modules = dict(model.named_modules())
    for product in products(model.config):
        module = modules.get(product.name)  # experts' products are named by their weights, see below
        if product.name in chosen and module is not None:
            assert isinstance(module, Linear | Head)
            module.float8 = Float8(sources.get(product.source))
            sources.setdefault(product.source, module.float8.input)
            module.float8.has_weight_alone = not (product.name == "head" and model.config.tied)
    for path, module in modules.items():
        if isinstance(module, Experts):
            own = [name for name, _ in module.named_parameters() if f"{path}.{name}" in chosen]
            module.float8 = GroupedProducts(own) if own else None


@dataclass(frozen=True)
class Seen:
    """What a step saw of every scaled tensor of the model, on all devices."""

    numbers: Tensor
    """(tensors, 3): largest magnitude, share of numbers lost below the range, and the magnitude relative to
    the range's end: infinite where no scale was known, as where nothing but zeros was seen before."""

    @property
    def outgrown(self) -> Tensor:
        """Whether any of them went beyond its range, or had none, so that the step has to be made again."""
        return (self.numbers[:, 2] > 1).any()

    @property
    def finite(self) -> Tensor:
        """Whether all of them were finite, which a cast to 8 bits would hide."""
        return self.numbers[:, 0].isfinite().all()


class Scales:
    """All scales of the model, of which this rank's part of it has some.

    Delayed ones are not known in a run's first step, which is therefore made twice, first to look at the
    magnitudes: with dynamic scales, which take no more memory than later steps. In a proof (`exact`), without
    any rounding: dynamic scales depend on who has which tokens.

    With `keep`, weights of blocks are cast once for all micro-batches of a step: those of a head are cast
    with its chunks.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        names: Sequence[str],
        comm: Comm,
        delayed: bool,
        dtype: torch.dtype,
        keep: bool = False,
        compiled: bool = False,
    ) -> None:
        self.comm, self.delayed, self.names, self.dtype, self.compiled = comm, delayed, names, dtype, compiled
        self.exact = dtype == torch.float64
        modules = {name: module for model in models for name, module in model.named_modules()}
        products = {name: module for name, module in modules.items() if isinstance(module, ScaledProduct)}
        self.products = list(products.values())
        for product in self.products:
            product.move_probe(comm.device)
        own = {name: module for name, module in modules.items() if isinstance(module, DelayedScale)}
        self.own, self.places = list(own.values()), self._places_of(own)
        self.of_weights = [product.weight for product in self.products]
        self.scale_places = self._places_of(f"{name}.weight" for name in products)
        held = {
            name: weight
            for model in models
            for name, weight in model.named_parameters(remove_duplicate=False)
        }
        used = [
            (f"{name}.weight", f"{_owner(name)}.{weight}")
            for name, one in products.items()
            for weight in one.weights
        ]
        self.weights, self.weight_places = (
            [held[weight] for _, weight in used],
            self._places_of(scale for scale, _ in used),
        )
        in_blocks = {name: one for name, one in products.items() if keep and _owner(name) != "head"}
        self.kept = [
            (one, [held[f"{_owner(name)}.{weight}"] for weight in one.weights])
            for name, one in in_blocks.items()
        ]
        self.ends, self.rooms = (
            torch.tensor([of[scale.dtype] for scale in self.own], device=comm.device)
            for of in (LARGEST, HEADROOM)
        )
        self.maxima_of_weights = torch.zeros(len(names), device=comm.device)
        self._wheres: dict[tuple[int, ...], Tensor] = {}
        self.known = not delayed
        """Whether there are scales from former steps, where they are needed."""
        self.unseen = torch.zeros(len(self.own), dtype=torch.bool, device=comm.device)
        """Of which tensors former steps saw nothing but zeros, so that there is no scale that fits."""

    def _places_of(self, names: Iterable[str]) -> Tensor:
        return torch.tensor(
            [self.names.index(name) for name in names], dtype=torch.int64, device=self.comm.device
        )

    def begin(self) -> None:
        """A step, or an evaluation: take its scales from the weights, and from the steps before."""
        self._look_at_weights()
        for product, weights in self.kept:
            product.cache_weights([local(weight) for weight in weights], self.dtype, self.compiled)
        if not self.delayed:
            return
        largest = self.maxima.amax(1)
        self.unseen = largest == 0
        if self.own:
            values = scale_for(largest, self.ends / self.rooms)
            torch._foreach_copy_([scale.value for scale in self.own], list(values.unbind()))
        if not self.known:
            self.known = self._anywhere(bool((largest > 0).any()))
        for product in self.products:
            product.dynamic = not self.known
            product.plain = not self.known and self.exact

    @property
    def maxima(self) -> Tensor:
        """Of former steps, (scales, steps)."""
        none = torch.zeros(0, HISTORY, device=self.comm.device)
        return torch.stack([scale.maxima for scale in self.own]) if self.own else none

    def _anywhere(self, here: bool) -> bool:
        """Whether it is so on any device: a stage may have no product in float8."""
        found = torch.tensor(float(here), device=self.comm.device)
        for axis in RANK_AXES:
            self.comm.all_reduce(found, axis, op=torch.distributed.ReduceOp.MAX)
        return bool(found)

    @torch.no_grad()
    def _look_at_weights(self) -> None:
        """Their largest magnitudes, over all devices that have a part of them, as they are when they are
        computed with."""
        self.maxima_of_weights.zero_()
        parts = [local(weight).detach() for weight in self.weights]
        if parts:
            peaks = torch.stack(
                [
                    *torch._foreach_norm(
                        [part if part.numel() else part.new_zeros(1) for part in parts], math.inf
                    )
                ]
            )
            peaks = peaks.to(self.comm.device).to(self.dtype).float()
            self.maxima_of_weights.scatter_reduce_(
                0, self.weight_places, peaks, "amax"
            )  # several weights may have one scale
        for axis in RANK_AXES:
            self.comm.all_reduce(self.maxima_of_weights, axis, op=torch.distributed.ReduceOp.MAX)
        if parts:
            values = scale_for(self.maxima_of_weights[self.scale_places], LARGEST[E4M3])
            torch._foreach_copy_([scale.value for scale in self.of_weights], list(values.unbind()))

    def see(self) -> Seen:
        """What the step saw, on all devices."""
        numbers = torch.zeros(len(self.names), 3, device=self.comm.device)
        noted = [seen for product in self.products for seen in product.observations]
        if noted:
            times = tuple(len(product.observations) for product in self.products)
            where = self._where(times).unsqueeze(1).expand(-1, 2)
            numbers[:, :2].scatter_reduce_(0, where, torch.cat(noted), "amax")
        numbers[:, 0] += self.maxima_of_weights
        if self.own and self.delayed:
            values = torch.stack([scale.value for scale in self.own])
            largest = numbers[self.places, 0]
            relative = (largest * values / self.ends).masked_fill(self.unseen & (largest > 0), math.inf)
            numbers[self.places, 2] = relative if self.known else torch.full_like(relative, math.inf)
        for axis in RANK_AXES:
            self.comm.all_reduce(numbers, axis, op=torch.distributed.ReduceOp.MAX)
        return Seen(numbers)

    def _where(self, times: tuple[int, ...]) -> Tensor:
        """To which scales the rows belong that products noted, one after the other, so many times each."""
        if times not in self._wheres:
            place = {id(scale): place for scale, place in zip(self.own, self.places.tolist(), strict=True)}
            rows = [
                place[id(scale)]
                for product, n in zip(self.products, times, strict=True)
                for scale in n * product.delayed()
            ]
            self._wheres = {times: torch.tensor(rows, device=self.comm.device)}
        return self._wheres[times]

    def remember(self, seen: Seen) -> None:
        """The step's maxima; of one that is to be made again, together with those of the step before."""
        for product in self.products:
            product.observations.clear()
            product.probe.grad = None
        if not self.own:
            return
        largest, before = seen.numbers[self.places, :1], self.maxima
        merged = torch.cat((torch.maximum(before[:, :1], largest), before[:, 1:]), 1)
        moved = torch.cat((largest, before[:, :-1]), 1)
        after = torch.where(seen.outgrown, merged, moved)
        torch._foreach_copy_([scale.maxima for scale in self.own], list(after.unbind()))


def _owner(product: str) -> str:
    """Return the name of the module that holds a product and its weights."""
    return split_scale_name(f"{product}.weight")[0]
