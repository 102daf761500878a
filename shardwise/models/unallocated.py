"""Build a model of any size without memory for its weights, but with the values of its buffers.

On torch's meta device a constructor has no values at all: a table of angles is as empty as a matrix of
weights, and code that reads a number (`torch.linspace(0, 0.1, layers)[i].item()`, as many models do) fails.
A constructor therefore runs on the CPU as its author wrote it. As soon as a module gets a parameter, the
parameter moves to the meta device and its memory is freed. So at most one weight is in memory, and no random
numbers are drawn for weights that are allocated first and filled later, as in torch's own modules. Buffers
stay.

Values that a constructor gives its weights are lost here. The model gets them when training begins, from a
module that is built as its author wrote it (parallel/apply.py, `first_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def weights_without_memory(seed: int = 0) -> Iterator[None]:
    """Inside this context, parameters of new modules are on the meta device.

    Random numbers of constructors, for buffers say, follow from the seed; the state of torch's generator is
    restored at the end.
    """
    made = WeakTensorKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        if parameter not in made:  # two modules may be given the same weight
            made[parameter] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), parameter.requires_grad
            )
        return made[parameter]  # type: ignore[no-any-return]

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        handle.remove()


@contextmanager
def empty_memory_is_nan() -> Iterator[None]:
    """Inside this context, `torch.empty` fills its memory with NaN, so that a weight which its constructor
    leaves without values is found."""
    setting: Any = torch.utils.deterministic  # torch declares no types in it
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = setting.fill_uninitialized_memory
    setting.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        setting.fill_uninitialized_memory = fills


class ExactBuffers(nn.Module):
    """A module whose buffers keep their values and dtypes whatever cast or `to_empty` is applied to the
    model; they move between devices with it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactBuffers:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self
