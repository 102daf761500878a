"""Blocks that run through torch.compile, each by itself.

torch has two ways to compile a module, and neither fits here. `torch.compile(module)` returns a wrapper,
which adds `_orig_mod` to the names of the parameters. `module.compile()` compiles hooks too, and the hooks of
FSDP2 and of tensor parallelism must stay outside of the compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement


class Compiled(Replacement):
    """A block whose forward is compiled."""

    compiled_forward: Callable[..., Tensor]

    def __init__(self, module: nn.Module, fullgraph: bool, dynamic: bool) -> None:
        Replacement.__init__(self, module)
        vars(self)["compiled_forward"] = torch.compile(super().forward, fullgraph=fullgraph, dynamic=dynamic)

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Run the block's forward, which is compiled at the first call."""
        return self.compiled_forward(*inputs, **named)

    def extra_repr(self) -> str:
        """Return the block's description, and that it is compiled."""
        return join_texts(super().extra_repr(), "compiled")


def compile_blocks(model: nn.Module, blocks: Iterable[nn.Module], fullgraph: bool, dynamic: bool) -> None:
    """Replace these blocks of the model by compiled ones."""
    compiled = {block: replacement(block, Compiled, fullgraph=fullgraph, dynamic=dynamic) for block in blocks}
    put_in_place(model, compiled)
