"""What lets FSDP2's collectives go on behind computing on CPU workers: asking for weights early, and summing
gradients early.

comm/hooks.py makes the collectives go on by themselves; that is of use only where something is left to
compute when they begin. Of gathered weights one unit more is held than without.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch import reduce_gathered


def gather_ahead(root: nn.Module, units: list[nn.Module]) -> None:
    """While a unit computes, let the next be gathered. A GPU gathers on a stream, ahead of what computes; on
    a CPU FSDP2 has to be told, in forward: in backward it asks by itself for the unit that was used before. A
    block asks for what is gathered by itself inside it, too, and nothing in there asks for more:
    recomputation goes through it again, in the midst of backward.
    """
    for unit, following in zip([root, *units], [*units, None], strict=True):
        assert isinstance(unit, FSDPModule)
        inside = () if unit is root else unit.modules()
        ahead = [
            module for module in (*inside, following) if isinstance(module, FSDPModule) and module is not unit
        ]
        unit.set_modules_to_forward_prefetch(ahead)


def reduce_root_first(root: nn.Module, units: list[nn.Module]) -> None:
    """Sum the gradients of what is used last as soon as they are made. FSDP2 tells that a unit's backward has
    ended by the gradients of its inputs, and the root's are token ids, which have none: the head, often the
    largest of all, would be summed when nothing is left to compute. Its backward has ended when that of the
    last block begins.

    From then on its weights are not gathered. The first unit would ask for them: what was used before it is
    the root, in the micro-batch before. So it asks for itself, which changes nothing.
    """
    first = units[0]
    assert isinstance(first, FSDPModule)
    assert isinstance(root, FSDPModule)
    first.set_modules_to_backward_prefetch([first])

    def when_backward_begins(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: reduce_gathered(root))  # type: ignore[no-untyped-call]

    units[-1].register_forward_hook(when_backward_begins)
