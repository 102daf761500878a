"""Overlap of FSDP2's collectives with computation on CPU workers: weights are gathered early, and gradients
summed early.

comm/hooks.py runs the collectives in the background, which helps only if computation is left when they begin.
The cost is the memory of one more unit of gathered weights.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch import reduce_gathered


def gather_ahead(root: nn.Module, units: list[nn.Module]) -> None:
    """Let FSDP2 gather the next unit while a unit computes in forward. A GPU gathers ahead on a stream; on a
    CPU FSDP2 must be told, in forward only: in backward it prefetches by itself. A block also prefetches the
    units inside it. Those prefetch nothing, because recomputation runs them again during backward.
    """
    for unit, following in zip([root, *units], [*units, None], strict=True):
        assert isinstance(unit, FSDPModule)
        inside = () if unit is root else unit.modules()
        ahead = [
            module for module in (*inside, following) if isinstance(module, FSDPModule) and module is not unit
        ]
        unit.set_modules_to_forward_prefetch(ahead)


def reduce_root_first(root: nn.Module, units: list[nn.Module]) -> None:
    """Sum the gradients of the root unit, such as the head, as soon as they exist. FSDP2 sees the end of a
    unit's backward by the gradients of its inputs. The root's inputs are token ids, which have none, so the
    head, often the largest unit, would be summed when nothing is left to compute. Its backward has ended when
    that of the last block begins.

    From then on the root's weights are not gathered. In backward, the first unit would prefetch the root,
    which was used before it in the previous micro-batch. So it prefetches itself, which changes nothing.
    """
    first = units[0]
    assert isinstance(first, FSDPModule)
    assert isinstance(root, FSDPModule)
    first.set_modules_to_backward_prefetch([first])

    def reduce_in_backward(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: reduce_gathered(root))

    units[-1].register_forward_hook(reduce_in_backward)
