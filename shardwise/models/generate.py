"""Sampling: continue a text by one token at a time.

This shows what a model has learnt; it is not made for serving. A `step` function hides the model, how it is
spread over devices, and what it caches: while a run trains, each new token costs a forward over the whole
text; on one device keys and values are cached (`CachedLogits`), and a token costs one forward of its own. The
random numbers come from a separate generator on the CPU, so that processes which run the same model sample
the same text, and sampling changes no other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.models.attention import CausalAttention, masked_attention
from shardwise.models.transformer import Transformer

NextLogits = Callable[[Tensor], Tensor]
"""A function from tokens (1, T), on the CPU, to the logits (vocabulary) after the last token."""


def generate(
    step: NextLogits,
    prompt: Sequence[int],
    count: int,
    *,
    max_positions: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Return the prompt and `count` more token ids."""
    new = continuation(step, prompt, count, max_positions=max_positions, temperature=temperature, seed=seed)
    return [*prompt, *new]


def continuation(
    step: NextLogits,
    prompt: Sequence[int],
    count: int,
    *,
    max_positions: int,
    temperature: float = 1.0,
    seed: int = 0,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Yield `count` token ids after the prompt, one by one, or fewer: those before the first of `ends`.

    `step` gets at most the last `max_positions` tokens. Temperature 0 takes the likeliest token.
    """
    if not prompt:
        raise UserError("the prompt is empty: give at least one token to continue from")
    tokens = list(prompt)
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(count):
        with torch.no_grad():  # not around `yield`, which would disable gradients in the caller too
            logits = step(torch.tensor([tokens[-max_positions:]]))
        tokens.append(_sample(logits.detach().to("cpu", torch.float32).flatten(), temperature, generator))
        if tokens[-1] in ends:
            return
        yield tokens[-1]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    best = logits.max()
    if not bool(best.isfinite()):
        raise UserError(
            "the model's logits are not finite: its weights are not finite, or a sum is too large for their "
            "dtype"
        )
    if temperature == 0:
        return int(logits.argmax())
    below = (logits - best).double() / temperature  # the best stays 0, however low the temperature
    return int(torch.multinomial(torch.softmax(below, dim=0).float(), 1, generator=generator))


class CachedAttention(nn.Module):
    """Attention that caches keys and values, so that new tokens see the tokens of earlier forwards too."""

    def __init__(self, attention: CausalAttention) -> None:
        super().__init__()
        self.window, self.softcap = attention.window, attention.softcap
        self.cached: tuple[Tensor, Tensor] | None = None

    def truncate(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens from the cache."""
        if self.cached is not None:
            key, value = self.cached
            self.cached = (key[:, :, :tokens], value[:, :, :tokens]) if tokens else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention of new tokens to all tokens; each input is (batch, heads, new tokens, head_dim).

        The given mask covers the new tokens alone, so it is not used.
        """
        if self.cached is not None:
            key, value = torch.cat((self.cached[0], key), 2), torch.cat((self.cached[1], value), 2)
        self.cached = (key, value)
        positions = torch.arange(key.shape[2], device=key.device)
        distance = positions[-query.shape[2] :, None] - positions[None, :]  # (new tokens, all tokens)
        seen = (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)
        return masked_attention(query, key, value, seen[None, None], self.softcap)


class CachedLogits:
    """A transformer on one device as a `NextLogits` that computes only the tokens it has not computed before.

    Its memory is that of the keys and values of every token in every block.
    """

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self.model, self.device = model, device
        self._cached_ids: list[int] = []
        self._caches: list[CachedAttention] = []
        for module in model.modules():
            for name, part in module.named_children():
                if isinstance(part, CausalAttention):
                    self._caches.append(CachedAttention(part))
                    setattr(module, name, self._caches[-1])

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits after the last token."""
        ids: list[int] = tokens[0].tolist()
        pairs = zip(self._cached_ids, ids[:-1], strict=False)
        differences = (index for index, (old, new) in enumerate(pairs) if old != new)
        same = next(differences, min(len(self._cached_ids), len(ids) - 1))
        for cache in self._caches:
            cache.truncate(same)
        self._cached_ids = ids
        positions = torch.arange(same, len(ids), device=self.device)
        logits: Tensor = self.model(
            tokens[:, same:].to(self.device), positions=positions, logits_at=len(ids) - same - 1
        )
        return logits
