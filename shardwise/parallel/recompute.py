"""Recomputation: keep fewer activations, compute some again in backward (Chen et al., 2016; Korthikanti et
al., 2022).

| mode              | kept per block                        | extra work                        |
| ----------------- | ------------------------------------- | --------------------------------- |
| none              | everything backward needs             | none                              |
| selective         | outputs of matmuls and attention      | norms, rotary, activations        |
|                   | and all of experts                    |                                   |
| all-but-attention | the block's input, the output of      | all but attention, which is most  |
|                   | attention and all of experts          | of it where sequences are long    |
| full              | the block's input                     | one more forward, about a third   |
| 0 … 1             | that share of what `none` keeps       | as little as the share allows     |

A share is handed to the compiler's own trade-off where blocks are compiled, and otherwise met by recomputing
whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise._torch import set_activation_memory_budget
from shardwise.models import MixtureOfExperts
from shardwise.models.replace import Replacement, join_texts, put_in_place, replacement
from shardwise.parallel.ring import RING

_DROPOUT = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
}
"""Attention, and which of its arguments is the share of scores that it drops."""
_ATTENTION = {*_DROPOUT, RING}
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
}


class Recomputed(Replacement):
    """A module whose activations are recomputed in backward."""

    recompute_mode: str
    """One of the modes above that recompute something."""
    recompute_options: dict[str, Any]
    """What torch's checkpoint is told."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own, of which less is kept."""
        return checkpoint(super().forward, *inputs, **self.recompute_options, **named)

    def extra_repr(self) -> str:
        """What the module says of itself, and how much is recomputed."""
        return join_texts(super().extra_repr(), f"recomputed: {self.recompute_mode}")


def recompute(
    model: nn.Module, blocks: Sequence[nn.Module], mode: str | float, compiled: bool, draws: bool = False
) -> None:
    """Replace these blocks of the model, or modules in them, by ones whose activations are recomputed in
    backward as `mode` says. Where blocks may draw random numbers (`draws`), they draw the same ones again; to
    keep the state of the generators takes some microseconds a block."""
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
    """What is recomputed by operators: the block; of one with experts, its parts without them. FSDP2 gathers
    experts by themselves, which torch's selective recomputation must not see, and sending tokens to experts
    twice would cost more than keeping their activations.
    """
    mixtures = [module for module in block.children() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        return [block]
    shared = [mixture.shared for mixture in mixtures if mixture.shared is not None]
    return [*(module for module in block.children() if module not in mixtures), *shared]


def _recomputed(module: nn.Module, mode: str, draws: bool) -> nn.Module:
    """Return the module that takes the place of this one."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if contexts := _CONTEXTS[mode]:
        options["context_fn"] = contexts
    return replacement(module, Recomputed, recompute_mode=mode, recompute_options=options)


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_products)  # type: ignore[no-untyped-call]


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(_attention)  # type: ignore[no-untyped-call]


_CONTEXTS: dict[str, Callable[[], Any] | None] = {
    "selective": _keep_products,
    "all-but-attention": _keep_attention,
    "full": None,
}


def _products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operation in _PRODUCTS
        else _attention(context, operation, *args, **kwargs)
    )


def _attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _ATTENTION and not _drops(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention drops scores. It is then computed again: were it left out, whatever draws after it
    would draw its numbers."""
    place = _DROPOUT.get(operation, len(args))
    return bool(kwargs.get("dropout_p", args[place] if place < len(args) else 0.0))
