"""Building a model without memory for its weights, whatever its size, and with buffers that have their values.

Under torch's meta device a constructor has no values at all: a table of angles is as empty as a matrix of weights, and code that
looks at a number (`torch.linspace(0, 0.1, layers)[i].item()`, as many models have it) fails. So a constructor runs on the CPU as
its author wrote it, and each parameter goes to the meta device in the moment in which a module gets it. What a parameter is made
from is gone right after: of a model of any size at most one weight is in memory, and nothing is drawn for weights that are
allocated first and filled later, as those of torch's own modules are. Buffers stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def weights_without_memory(seed: int = 0) -> Iterator[None]:
    """Inside, parameters of modules that are built are on the meta device. What constructors draw, for a buffer say, is the same
    each time; the generator of this process is left as it was."""
    made = WeakTensorKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        if parameter not in made:  # two modules may be given the same weight
            made[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        return made[parameter]  # type: ignore[no-any-return]

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        handle.remove()


class ExactBuffers(nn.Module):
    """A module whose buffers stay what they are, in the dtype that they have, whatever cast or `to_empty` the model goes through;
    they follow it from device to device."""

    def _apply(self, fn: Any, recurse: bool = True) -> ExactBuffers:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self
