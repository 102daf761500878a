"""Continuing a text, one sampled token at a time.

For showing what a model has learnt, not for serving it: there is no key/value cache, so each new token costs a forward over
the whole text. For the few hundred tokens of a sample that is the shortest code and fast enough. What the model is, and how
it is spread over devices, is hidden in `step`; the random numbers come from a generator of their own on the CPU, so that
processes which run the same model sample the same text, and sampling disturbs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.errors import UserError


@torch.no_grad()
def generate(
    step: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    count: int,
    *,
    max_positions: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """The prompt and `count` more token ids.

    `step` takes tokens (1, T), on the CPU, T at most `max_positions`, and returns the logits (vocabulary) after the last;
    the text slides through that window once it is longer. Temperature 0 takes the likeliest token.
    """
    if not prompt:
        raise UserError("the prompt is empty: give at least one token to continue from")
    tokens = list(prompt)
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(count):
        logits = step(torch.tensor([tokens[-max_positions:]]))
        tokens.append(_sample(logits.detach().to("cpu", torch.float32).flatten(), temperature, generator))
    return tokens


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator))
