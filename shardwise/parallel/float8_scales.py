"""float8 on all devices: which products are made in it, and the scales that all devices share
(models/float8_products.py has the products).

The largest magnitudes of a step are combined over all devices by a maximum, a few numbers for each product,
and every device computes the same scales for the next step. A maximum does not depend on the order, nor on
which device has which tokens: so a layout computes with the scales of one device, and can be proven against
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    Float8Product,
    ScaledProduct,
    scale_for,
)
from shardwise.models.layers import Linear
from shardwise.optim import local
from shardwise.plans.float8_choice import products


def use_float8(model: Transformer, names: Iterable[str]) -> None:
    """Make a plain model compute the products of these names in float8 (plans/float8_choice.py)."""
    sources: dict[str, DelayedScale] = {}
    chosen = set(names)
    modules = dict(model.named_modules())
    for product in products(model.config):
        module = modules.get(product.name)  # experts' products are named by their weights, see below
        if product.name in chosen and module is not None:
            assert isinstance(module, Linear | Head)
            module.float8 = Float8Product(sources.get(product.source))
            sources.setdefault(product.source, module.float8.input)
            module.float8.has_weight_alone = not (product.name == "head" and model.config.tied)
    for path, module in modules.items():
        if isinstance(module, Experts):
            weights = [name for name, _ in module.named_parameters() if f"{path}.{name}" in chosen]
            module.float8 = GroupedProducts(weights) if weights else None


@dataclass(frozen=True)
class Observation:
    """Statistics of every scaled tensor of the model in one step, over all devices."""

    numbers: Tensor
    """(tensors, 3): largest magnitude, share of numbers lost below the range, and the magnitude relative to
    the range's end, which is infinite where no scale was known because earlier steps had nothing but
    zeros."""

    @property
    def outgrown(self) -> Tensor:
        """Whether a tensor went beyond its range, or had none, so that the step must be repeated."""
        return (self.numbers[:, 2] > 1).any()

    @property
    def finite(self) -> Tensor:
        """Whether all tensors were finite, which a cast to 8 bits would hide."""
        return self.numbers[:, 0].isfinite().all()


class Scales:
    """All scales of the model, of which this rank holds those of its part.

    Delayed scales are not known in a run's first step. That step is therefore made twice. The first time
    measures the magnitudes with dynamic scales, which take no more memory than later steps. A proof (`exact`)
    measures them without any rounding, because dynamic scales depend on which device has which tokens.

    With `cast_once`, weights of blocks are cast once for all micro-batches of a step; those of a head are
    cast with its chunks.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        names: Sequence[str],
        comm: Comm,
        delayed: bool,
        dtype: torch.dtype,
        cast_once: bool = False,
        compiled: bool = False,
    ) -> None:
        self.comm, self.delayed, self.names, self.dtype, self.compiled = comm, delayed, names, dtype, compiled
        self.exact = dtype == torch.float64
        self.known = not delayed
        """Whether there are scales from earlier steps, or none are needed."""
        modules = {name: module for model in models for name, module in model.named_modules()}
        self._find_delayed_scales(modules)
        products = {name: module for name, module in modules.items() if isinstance(module, ScaledProduct)}
        self.products = list(products.values())
        for product in self.products:
            product.move_probe(comm.device)
        self.weight_scales = [product.weight for product in self.products]
        self.weight_scale_indices = self._indices(f"{name}.weight" for name in products)
        self._find_weights(models, products, cast_once)
        self.weight_maxima = torch.zeros(len(names), device=comm.device)
        """Largest magnitude of each weight in this step, by the index of its scale."""
        self._row_indices: dict[tuple[int, ...], Tensor] = {}

    def _find_delayed_scales(self, modules: Mapping[str, nn.Module]) -> None:
        scales = {name: module for name, module in modules.items() if isinstance(module, DelayedScale)}
        self.delayed_scales, self.delayed_indices = list(scales.values()), self._indices(scales)
        self.limits, self.margins = (
            torch.tensor([of[scale.dtype] for scale in self.delayed_scales], device=self.comm.device)
            for of in (LARGEST, HEADROOM)
        )
        self.all_zeros = torch.zeros(len(scales), dtype=torch.bool, device=self.comm.device)
        """Whether earlier steps saw nothing but zeros of a tensor, so that no scale is known."""

    def _find_weights(
        self, models: Sequence[nn.Module], products: Mapping[str, ScaledProduct], cast_once: bool
    ) -> None:
        parameters = {
            name: weight
            for model in models
            for name, weight in model.named_parameters(remove_duplicate=False)
        }
        weights = {
            name: [parameters[f"{_owner(name)}.{weight}"] for weight in product.weights]
            for name, product in products.items()
        }
        self.weights = [weight for each in weights.values() for weight in each]
        self.weight_indices = self._indices(f"{name}.weight" for name, each in weights.items() for _ in each)
        self.cast_once = [
            (product, weights[name])
            for name, product in products.items()
            if cast_once and _owner(name) != "head"
        ]
        """Products whose weights are cast once per step, and these weights."""

    def _indices(self, names: Iterable[str]) -> Tensor:
        indices = [self.names.index(name) for name in names]
        return torch.tensor(indices, dtype=torch.int64, device=self.comm.device)

    def begin(self) -> None:
        """Set the scales of a step, or of an evaluation, from the weights and from the steps before."""
        self._measure_weights()
        for product, weights in self.cast_once:
            product.cache_weights([local(weight) for weight in weights], self.dtype, self.compiled)
        if not self.delayed:
            return
        largest = self.maxima.amax(1)
        self.all_zeros = largest == 0
        if self.delayed_scales:
            values = scale_for(largest, self.limits / self.margins)
            torch._foreach_copy_([scale.value for scale in self.delayed_scales], list(values.unbind()))
        if not self.known:
            self.known = self._anywhere(bool((largest > 0).any()))
        for product in self.products:
            product.dynamic = not self.known
            product.plain = not self.known and self.exact

    @property
    def maxima(self) -> Tensor:
        """Largest magnitudes of earlier steps: (scales, steps)."""
        none = torch.zeros(0, HISTORY, device=self.comm.device)
        return torch.stack([scale.maxima for scale in self.delayed_scales]) if self.delayed_scales else none

    def _anywhere(self, here: bool) -> bool:
        """Return whether this is true on any device: a stage may have no product in float8."""
        flag = torch.tensor(float(here), device=self.comm.device)
        self._maximum_over_ranks(flag)
        return bool(flag)

    def _maximum_over_ranks(self, numbers: Tensor) -> None:
        for axis in RANK_AXES:
            self.comm.all_reduce(numbers, axis, op=torch.distributed.ReduceOp.MAX)

    @torch.no_grad()
    def _measure_weights(self) -> None:
        """Set the scales of weights from their largest magnitudes over all devices, in the dtype they are
        computed with."""
        self.weight_maxima.zero_()
        parts = [local(weight).detach() for weight in self.weights]
        if parts:
            filled = [part if part.numel() else part.new_zeros(1) for part in parts]
            peaks = torch.stack([*torch._foreach_norm(filled, math.inf)])
            peaks = peaks.to(self.comm.device).to(self.dtype).float()
            # Several weights may have one scale.
            self.weight_maxima.scatter_reduce_(0, self.weight_indices, peaks, "amax")
        self._maximum_over_ranks(self.weight_maxima)
        if parts:
            values = scale_for(self.weight_maxima[self.weight_scale_indices], LARGEST[E4M3])
            torch._foreach_copy_([scale.value for scale in self.weight_scales], list(values.unbind()))

    def observe(self) -> Observation:
        """Return the statistics of the step, over all devices."""
        numbers = torch.zeros(len(self.names), 3, device=self.comm.device)
        observations = [seen for product in self.products for seen in product.observations]
        if observations:
            times = tuple(len(product.observations) for product in self.products)
            indices = self._indices_of_rows(times).unsqueeze(1).expand(-1, 2)
            numbers[:, :2].scatter_reduce_(0, indices, torch.cat(observations), "amax")
        numbers[:, 0] += self.weight_maxima
        if self.delayed_scales and self.delayed:
            values = torch.stack([scale.value for scale in self.delayed_scales])
            largest = numbers[self.delayed_indices, 0]
            relative = (largest * values / self.limits).masked_fill(self.all_zeros & (largest > 0), math.inf)
            numbers[self.delayed_indices, 2] = relative if self.known else torch.full_like(relative, math.inf)
        self._maximum_over_ranks(numbers)
        return Observation(numbers)

    def _indices_of_rows(self, times: tuple[int, ...]) -> Tensor:
        """Return the index of the scale of each row that products noted, where times[i] is how often product
        i ran."""
        if times not in self._row_indices:
            scales = zip(self.delayed_scales, self.delayed_indices.tolist(), strict=True)
            index_of = {id(scale): index for scale, index in scales}
            rows = [
                index_of[id(scale)]
                for product, n in zip(self.products, times, strict=True)
                for scale in n * product.delayed()
            ]
            self._row_indices = {times: torch.tensor(rows, device=self.comm.device)}
        return self._row_indices[times]

    def record(self, seen: Observation) -> None:
        """Add the step's maxima to the history; a step that is repeated is merged with the step before."""
        for product in self.products:
            product.observations.clear()
            product.probe.grad = None
        if not self.delayed_scales:
            return
        largest, before = seen.numbers[self.delayed_indices, :1], self.maxima
        merged = torch.cat((torch.maximum(before[:, :1], largest), before[:, 1:]), 1)
        moved = torch.cat((largest, before[:, :-1]), 1)
        after = torch.where(seen.outgrown, merged, moved)
        torch._foreach_copy_([scale.maxima for scale in self.delayed_scales], list(after.unbind()))


def _owner(product: str) -> str:
    """Return the name of the module that holds a product and its weights."""
    return split_scale_name(f"{product}.weight")[0]
