"""Continuing a text, one sampled token at a time.

For showing what a model has learnt, not for serving it. What the model is, how it is spread over devices, and
what it remembers of the text so far is hidden in `step`: while a run trains, each new token costs a forward
over the whole text; on one device keys and values are kept (`Remembering`), so that it costs one over the new
token. The random numbers come from a generator of their own on the CPU, so that processes which run the same
model sample the same text, and sampling disturbs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.models.attention import CausalAttention, attend_to
from shardwise.models.transformer import Transformer

Step = Callable[[Tensor], Tensor]
"""From tokens (1, T), on the CPU, to the logits (vocabulary) after the last."""


def generate(
    step: Step,
    prompt: Sequence[int],
    count: int,
    *,
    max_positions: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """The prompt and `count` more token ids."""
    return [
        *prompt,
        *continuation(step, prompt, count, max_positions=max_positions, temperature=temperature, seed=seed),
    ]


def continuation(
    step: Step,
    prompt: Sequence[int],
    count: int,
    *,
    max_positions: int,
    temperature: float = 1.0,
    seed: int = 0,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Token ids after the prompt as they come, `count` of them, or fewer: those before the first of `ends`.

    `step` is given at most `max_positions` tokens; the text slides through that window once it is longer.
    Temperature 0 takes the likeliest token.
    """
    if not prompt:
        raise UserError("the prompt is empty: give at least one token to continue from")
    tokens = list(prompt)
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(count):
        with torch.no_grad():  # not around the loop, where whoever takes the tokens would be inside of it too
            logits = step(torch.tensor([tokens[-max_positions:]]))
        tokens.append(_sample(logits.detach().to("cpu", torch.float32).flatten(), temperature, generator))
        if tokens[-1] in ends:
            return
        yield tokens[-1]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    best = logits.max()
    if not bool(best.isfinite()):
        raise UserError(
            "the model gives no finite numbers: its weights are not, or a sum is too large for the dtype "
            "they are in"
        )
    if temperature == 0:
        return int(logits.argmax())
    below = (logits - best).double() / temperature  # the best stays 0, however low the temperature
    return int(torch.multinomial(torch.softmax(below, dim=0).float(), 1, generator=generator))


class CachedAttention(nn.Module):
    """In place of attention among the tokens of one forward: keys and values of the tokens before are kept,
    and seen too."""

    def __init__(self, attention: CausalAttention) -> None:
        super().__init__()
        self.window, self.softcap = attention.window, attention.softcap
        self.kept: tuple[Tensor, Tensor] | None = None

    def keep(self, tokens: int) -> None:
        """Forget all but the first so many tokens."""
        self.kept = (
            None
            if self.kept is None or not tokens
            else (self.kept[0][:, :, :tokens], self.kept[1][:, :, :tokens])
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Each (batch, heads, new tokens, head_dim). The mask is for the new tokens alone, so one for all is
        made here."""
        if self.kept is not None:
            key, value = torch.cat((self.kept[0], key), 2), torch.cat((self.kept[1], value), 2)
        self.kept = (key, value)
        places = torch.arange(key.shape[2], device=key.device)
        back = places[-query.shape[2] :, None] - places[None, :]  # how far, (new tokens, all tokens)
        seen = (back >= 0) if self.window is None else (back >= 0) & (back < self.window)
        return attend_to(query, key, value, seen[None, None], self.softcap)


class Remembering:
    """A transformer on one device as a `Step` that computes only what it has not seen: the new token of a
    text that goes on, the new question of a conversation. Memory: keys and values of every token in every
    block."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        self.model, self.device = model, device
        self._known: list[int] = []
        self._caches: list[CachedAttention] = []
        for module in model.modules():
            for name, part in module.named_children():
                if isinstance(part, CausalAttention):
                    self._caches.append(CachedAttention(part))
                    setattr(module, name, self._caches[-1])

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits after the last token."""
        ids: list[int] = tokens[0].tolist()
        pairs = zip(self._known, ids[:-1], strict=False)
        same = next(
            (place for place, (old, new) in enumerate(pairs) if old != new),
            min(len(self._known), len(ids) - 1),
        )
        for cache in self._caches:
            cache.keep(same)
        self._known = ids
        positions = torch.arange(same, len(ids), device=self.device)
        logits: Tensor = self.model(
            tokens[:, same:].to(self.device), positions=positions, logits_at=len(ids) - same - 1
        )
        return logits
