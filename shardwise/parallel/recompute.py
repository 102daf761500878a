"""Recomputation: save fewer activations, and compute the others again in backward (Chen et al., 2016;
Korthikanti et al., 2022).

| mode              | saved per block                       | extra work                        |
| ----------------- | ------------------------------------- | --------------------------------- |
| none              | everything backward needs             | none                              |
| selective         | outputs of matmuls and attention      | norms, rotary, activations        |
|                   | and all of experts                    |                                   |
| all-but-attention | the block's input, the output of      | all but attention, which is most  |
|                   | attention and all of experts          | of it where sequences are long    |
| full              | the block's input                     | one more forward, about a third   |
| 0 … 1             | that share of what `none` saves       | as little as the share allows     |

For a share, the compiler chooses what to recompute where blocks are compiled; otherwise whole blocks are
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise._torch import set_activation_memory_budget
from shardwise.models import MixtureOfExperts
from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement
from shardwise.parallel.ring import RING

_DROPOUT: dict[object, int] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
}
"""Operators of attention, and the position of their argument for dropout."""
_ATTENTION = {*_DROPOUT, RING}
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
}


Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Contexts of forward and of recomputation."""


class Recomputed(Replacement):
    """A module whose activations are recomputed in backward."""

    recompute_mode: str
    """One of the modes above that recompute something."""
    recompute_options: dict[str, Any]
    """Keyword arguments of torch's `checkpoint`."""

    def forward(self, *inputs: object, **named: Any) -> Tensor:
        """Run the module's forward, and save fewer activations."""
        output: Tensor = checkpoint(super().forward, *inputs, **self.recompute_options, **named)
        return output

    def extra_repr(self) -> str:
        """Return the module's description, and how much is recomputed."""
        return join_texts(super().extra_repr(), f"recomputed: {self.recompute_mode}")


def recompute(
    model: nn.Module, blocks: Sequence[nn.Module], mode: str | float, compiled: bool, draws: bool = False
) -> None:
    """Replace these blocks of the model, or modules in them, by ones whose activations are recomputed in
    backward. With `draws`, blocks may draw random numbers, and recomputation draws the same ones; saving the
    state of the generators takes some microseconds per block."""
    if isinstance(mode, float | int):
        if compiled:
            set_activation_memory_budget(float(mode))
            return
        chosen, mode = list(blocks[: math.ceil((1 - mode) * len(blocks))]), "full"
    elif mode in ("none", "full"):
        chosen = list(blocks) if mode == "full" else []
    else:
        chosen = [module for block in blocks for module in _selected(block)]
    put_in_place(model, {module: _recomputed(module, mode, draws) for module in chosen})


def _selected(block: nn.Module) -> list[nn.Module]:
    """Return the modules to recompute selectively: the block, or in a block with experts its other modules.
    FSDP2 gathers experts separately, which torch's selective recomputation must not see, and sending tokens
    to experts twice would cost more than saving their activations.
    """
    mixtures = [module for module in block.children() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        return [block]
    shared = [mixture.shared for mixture in mixtures if mixture.shared is not None]
    return [*(module for module in block.children() if module not in mixtures), *shared]


def _recomputed(module: nn.Module, mode: str, draws: bool) -> nn.Module:
    """Return the module that takes the place of this one."""
    options: dict[str, object] = {"use_reentrant": False, "preserve_rng_state": draws}
    if contexts := _CONTEXTS[mode]:
        options["context_fn"] = contexts
    return replacement(module, Recomputed, recompute_mode=mode, recompute_options=options)


def _save_products() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_products)
    return contexts


def _save_attention() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(_attention)
    return contexts


_CONTEXTS: dict[str, Callable[[], Contexts] | None] = {
    "selective": _save_products,
    "all-but-attention": _save_attention,
    "full": None,
}


def _products(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the outputs of matrix products and of attention."""
    if operation in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return _attention(context, operation, *args, **kwargs)


def _attention(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the outputs of attention."""
    saved = operation in _ATTENTION and not _drops(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether attention uses dropout. It must then be recomputed, because otherwise the next operator
    would draw its random numbers."""
    index = _DROPOUT.get(operation, len(args))
    return bool(kwargs.get("dropout_p", args[index] if index < len(args) else 0.0))
