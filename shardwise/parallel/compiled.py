"""Blocks that run through torch.compile, each the whole of what is compiled at once.

torch has two ways to compile a module, and neither fits here. `torch.compile(module)` is a wrapper, which
adds `_orig_mod` to the names of the parameters. `module.compile()` compiles hooks too, and the hooks of FSDP2
and of tensor parallelism have to stay outside of the compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement


class Compiled(Replacement):
    """A block whose forward is compiled."""

    compiled_forward: Callable[..., Any]

    def __init__(self, module: nn.Module, fullgraph: bool, dynamic: bool) -> None:
        Replacement.__init__(self, module)
        vars(self)["compiled_forward"] = torch.compile(super().forward, fullgraph=fullgraph, dynamic=dynamic)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The block's own, compiled when it is first called."""
        return self.compiled_forward(*inputs, **named)

    def extra_repr(self) -> str:
        """What the block says of itself, and that it is compiled."""
        return join_texts(super().extra_repr(), "compiled")


def compile_blocks(model: nn.Module, blocks: Iterable[nn.Module], fullgraph: bool, dynamic: bool) -> None:
    """Replace these blocks of the model by compiled ones."""
    put_in_place(
        model,
        {block: replacement(block, Compiled, fullgraph=fullgraph, dynamic=dynamic) for block in blocks},
    )
