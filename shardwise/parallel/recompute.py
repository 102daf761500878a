"""Recomputation: keep fewer activations, compute some again in backward (Chen et al., 2016; Korthikanti et al., 2022).

| mode      | kept per block                        | extra work                        |
| --------- | ------------------------------------- | --------------------------------- |
| none      | everything backward needs             | none                              |
| selective | outputs of matmuls and attention      | norms, rotary, activations        |
|           | and all of experts                    |                                   |
| full      | the block's input                     | one more forward, about a third   |
| 0 … 1     | that share of what `none` keeps       | as little as the share allows     |

A share is handed to the compiler's own trade-off where blocks are compiled, and otherwise met by recomputing whole blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise._torch import set_activation_memory_budget
from shardwise.models import MixtureOfExperts
from shardwise.parallel.ring import RING

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._grouped_mm.default,
    RING,
}


def recompute(blocks: Sequence[nn.Module], mode: str | float, compiled: bool) -> None:
    """Arrange the blocks' forward so that activations are recomputed in backward as `mode` says."""
    if isinstance(mode, float | int):
        if compiled:
            set_activation_memory_budget(float(mode))
            return
        for block in blocks[: math.ceil((1 - mode) * len(blocks))]:
            _wrap(block, None)
    elif mode != "none":
        for block in blocks:
            for module in _selected(block) if mode == "selective" else [block]:
                _wrap(module, _keep_products if mode == "selective" else None)


def _selected(block: nn.Module) -> list[nn.Module]:
    """What is recomputed selectively: the block; of one with experts, its parts without them. FSDP2 gathers experts by
    themselves, which torch's selective recomputation must not see, and sending tokens to experts twice would cost more than
    keeping their activations.
    """
    mixtures = [module for module in block.children() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        return [block]
    shared = [mixture.shared for mixture in mixtures if mixture.shared is not None]
    return [*(module for module in block.children() if module not in mixtures), *shared]


def _wrap(block: nn.Module, contexts: Callable[[], Any] | None) -> None:
    more: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    # Replacing forward, rather than wrapping the module, keeps the parameters' names.
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
