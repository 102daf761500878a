"""Train with an independent implementation in plain torch, for `shardwise verify JOB --against plain`.

A layout that agrees with our own code on one device may share its mistakes: swapped betas, a rotation in the
wrong direction, a divisor that counts ignored targets. So this file follows the papers, uses none of our
model, loss, update, schedule or data code, and computes each part in another way: a rotation is a complex
product, attention has its whole matrix of scores, every expert computes every token, all logits are
materialised, gradients come from autograd, and the optimizer is that of torch or of its paper
(`Optimizer.reference`). It is slow, and computes in float64 only.

The settings of the job, the initial weights and the prepared data are given, so neither the initialisation of
weights nor tokenising is proven. The rows that a proof generates are given too. What the papers leave open is
defined by us and repeated here: which sample comes when; that losses, including the balancing losses, are
sums over the tokens of the global batch divided by the number of its valid targets; that the bias of a router
is kept in float32; and that embeddings, norms and biases have no weight decay.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.config import Config, Model, Train
from shardwise.errors import UserError

Array = NDArray[np.int64 | np.bool_]
State = dict[str, Tensor]
Rows = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets (-100 means none) and document numbers, each of shape (sequences, length)."""

KNOWN = {
    "norm": ("rms", "layer", "rms+1"),
    "positions": ("rotary", "learned"),
    "activation": ("swiglu", "gelu", "geglu"),
    "router": ("softmax", "sigmoid"),
    "window_layers": ("all", "even"),
}
NUMBERS = {
    "preset", "pretrained", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary",
    "norm_epsilon",
    "max_positions", "window", "query_scalar", "attention_softcap", "logit_softcap", "post_norms",
    "scaled_embedding",
    "rope_theta", "rope_scale", "rope_original", "qk_norm", "bias", "tied", "experts", "experts_per_token",
    "expert_ffn", "shared_experts", "normalise_routing", "routing_scale", "balance_loss", "balance_bias",
    "router_z_loss",
}  # fmt: skip
"""Settings of the model that may have any value."""
_TABLES = ("embedding.weight", "positions.weight")
"""Names of the matrices that have no weight decay."""


def check_known(config: Config) -> None:
    """Refuse a job with a setting that this file does not implement, rather than prove something else."""
    for name, field in Model.model_fields.items():
        value = getattr(config.model, name)
        if value not in KNOWN.get(name, (value,) if name in NUMBERS else (field.default,)):
            raise UserError(
                f"--against plain: does not know model.{name} = {value!r}; leave out --against plain"
            )
    if config.train.schedule not in ("cosine", "linear", "wsd", "constant"):
        raise UserError(
            f"--against plain: does not know train.schedule = {config.train.schedule!r}; leave out "
            f"--against plain"
        )
    if config.optimizer.without_compression().reference([{"params": [], "weight_decay": 0.0}]) is None:
        raise UserError(
            f"--against plain: optimizer.name = {config.optimizer.name!r} gives no reference to step with; "
            "leave out --against plain"
        )


# -- data: which tokens a step reads -------------------------------------------------------------------------


class _Shard(TypedDict):
    file: str


class _Index(TypedDict):
    """The fields of index.json that are read here."""

    dtype: str
    shards: list[_Shard]
    end: int
    holds_answers: NotRequired[bool]


@dataclass(frozen=True)
class Text:
    """A folder of prepared data (data/shards.py defines the format), read as one sequence of tokens."""

    folder: Path

    @cached_property
    def index(self) -> _Index:
        """The contents of the folder's index file."""
        index: _Index = json.loads((self.folder / "index.json").read_text())
        return index

    @cached_property
    def shards(self) -> list[tuple[Array, Array]]:
        """The tokens of each file, and the offset after the last token of each document."""
        names = [self.folder / shard["file"] for shard in self.index["shards"]]
        return [
            (np.memmap(name, self.index["dtype"], "r"), np.fromfile(name.with_suffix(".ends"), "<i8"))
            for name in names
        ]

    @cached_property
    def conversations(self) -> list[tuple[Array, Array]]:
        """The tokens of each conversation, and whether each token has a loss. Empty where the folder holds
        plain text."""
        conversations = []
        for shard, (tokens, ends) in zip(self.index["shards"], self.shards, strict=True):
            if self.index.get("holds_answers"):
                learnt = np.zeros(len(tokens), dtype=bool)
                path = self.folder / shard["file"].replace(".bin", ".answers")
                for first, after in np.fromfile(path, "<i8").reshape(-1, 2):
                    learnt[first:after] = True
                parts = np.split(tokens, ends[:-1]), np.split(learnt, ends[:-1])
                conversations += list(zip(*parts, strict=True))
        return conversations

    def packed(self, length: int) -> list[list[int]]:
        """Return the numbers of the conversations in each sequence.

        Conversations are taken in order, as many as `length` inputs and a last target have room for.
        """
        rows: list[list[int]] = []
        room = 0
        for number, (tokens, _) in enumerate(self.conversations):
            if not rows or len(tokens) > room:
                rows.append([])
                room = length + 1
            rows[-1].append(number)
            room -= len(tokens)
        return rows

    def __len__(self) -> int:
        return sum(len(tokens) for tokens, _ in self.shards)

    def read(self, start: int, length: int) -> tuple[Array, Array]:
        """Return `length` tokens from `start`, and whether each is the last of its document."""
        tokens, last, base = [], [], 0
        for shard, ends in self.shards:
            window = range(*slice(max(0, start - base), max(0, start + length - base)).indices(len(shard)))
            tokens.append(shard[window.start : window.stop].astype(np.int64))
            last.append(
                np.isin(
                    np.asarray(window) + 1,
                    ends[slice(*np.searchsorted(ends, (window.start, window.stop + 1)))],
                )
            )
            base += len(shard)
        return np.concatenate(tokens), np.concatenate(last)


def _scramble(value: int) -> int:
    """Return the next output of the splitmix64 generator."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def _key(*parts: int) -> int:
    state = 0
    for part in parts:
        state = _scramble(state ^ part)
    return state


def _shuffled(index: int, size: int, key: int) -> int:
    """Return the shuffled place of an index below `size`.

    A keyed Feistel network of six rounds is applied again and again, until the result is below `size`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index % 2**half
        for number in range(6):
            left, right = right, left ^ _scramble(right ^ _scramble(key ^ number)) % 2**half
        index = left << half | right
        if index < size:
            return index


def _quotas(weights: Sequence[float]) -> list[int]:
    """Return how many of 65,536 positions each source gets: by largest remainder, and at least one each."""
    exact = [weight / sum(weights) * 65536 for weight in weights]
    shares = [max(1, math.floor(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: max(0, 65536 - sum(shares))]:
        shares[index] += 1
    while sum(shares) > 65536:
        shares[shares.index(max(shares))] -= 1
    return shares


@dataclass(frozen=True)
class Reader:
    """Reads the sequences of a job in the order in which the job trains on them."""

    config: Config
    texts: Sequence[Text]
    weights: Sequence[float]

    def sizes(self, text: Text) -> tuple[int, int]:
        """Return the number of samples to train on, and the number of held-out samples, which come after
        them."""
        length, share = self.config.data.sequence_length, self.config.data.held_out
        samples = len(text.packed(length)) if text.conversations else (len(text) - 1) // length
        held_out = min(max(1, round(samples * share)), samples - 1) if share else 0
        return samples - held_out, held_out

    def batch(self, step: int) -> Rows:
        """Return the global batch of a step, counted from 1."""
        size = self.config.train.global_batch
        return self._rows([self._sample(position) for position in range((step - 1) * size, step * size)])

    def held_out(self, count: int) -> Rows:
        """Return the first `count` held-out sequences."""
        samples = [
            (text, first + number)
            for text in self.texts
            for first, held_out in [self.sizes(text)]
            for number in range(held_out)
        ]
        return self._rows(
            [samples[_shuffled(index, len(samples), _key(3))] for index in range(min(count, len(samples)))]
        )

    def _sample(self, position: int) -> tuple[Text, int]:
        source, index, seed = 0, position, self.config.train.seed
        if len(self.texts) > 1:
            cycle, within = divmod(position, 65536)
            shares = _quotas(self.weights)
            ends = np.cumsum(shares)
            key = _key(seed, 2, cycle)
            sources = [
                int(np.searchsorted(ends, _shuffled(place, 65536, key), "right"))
                for place in range(within + 1)
            ]
            source = sources[-1]
            index = cycle * shares[source] + sources[:-1].count(source)
        size, _ = self.sizes(self.texts[source])
        return self.texts[source], _shuffled(index % size, size, _key(seed, 1, source, index // size))

    def _rows(self, samples: Sequence[tuple[Text, int]]) -> Rows:
        read = [
            self._conversations(*sample) if sample[0].conversations else self._window(*sample)
            for sample in samples
        ]
        inputs, targets, documents = (torch.from_numpy(np.stack(part)) for part in zip(*read, strict=True))
        return inputs, targets, documents

    def _window(self, text: Text, sample: int) -> tuple[Array, Array, Array]:
        length = self.config.data.sequence_length
        tokens, last = text.read(sample * length, length + 1)
        if not self.config.data.reset_attention:
            return tokens[:-1], tokens[1:], np.zeros(length, dtype=np.int64)
        ends = last[:-1].astype(np.int64)
        return tokens[:-1], np.where(ends, -100, tokens[1:]), ends.cumsum() - ends

    def _conversations(self, text: Text, sample: int) -> tuple[Array, Array, Array]:
        """Return the inputs, targets and document numbers of a sequence of whole conversations.

        No token predicts the first token of the next conversation. The rest of the sequence is filled with
        the end-of-document token.
        """
        length, end = self.config.data.sequence_length, text.index["end"]
        inputs, targets, documents = (np.full(length, fill, dtype=np.int64) for fill in (end, -100, -1))
        place = 0
        for number in text.packed(length)[sample]:
            tokens, learnt = (part[: length + 1 - place] for part in text.conversations[number])
            for offset, token in enumerate(tokens[: length - place]):
                inputs[place + offset], documents[place + offset] = token, number
                if offset + 1 < len(tokens) and learnt[offset + 1]:
                    targets[place + offset] = tokens[offset + 1]
            place += len(tokens)
        return inputs, targets, documents


def checksum(inputs: Tensor) -> str:
    """Return the checksum of the sequences of a step, as in metrics.jsonl."""
    return f"{sum(zlib.crc32(row.numpy().astype('<i8').tobytes()) for row in inputs):014x}"


# -- model and loss ------------------------------------------------------------------------------------------


@dataclass
class Forward:
    """One forward pass over a batch, which returns sums over its tokens."""

    model: Model
    state: State
    balancing: Tensor | float = 0.0
    """Sum of the balancing losses of all routers."""

    def __post_init__(self) -> None:
        self.loads: dict[str, Tensor] = {}

    def __call__(self, rows: Rows) -> Tensor:
        """Return the cross-entropy, summed over all targets."""
        inputs, targets, documents = rows
        model, state, length = self.model, self.state, inputs.shape[1]
        x = self._embed(inputs, documents)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        seen = causal & (documents[:, :, None] == documents[:, None, :])  # (sequences, from, to)
        near = seen if model.window is None else seen & ~causal.tril(-model.window)
        for layer in range(model.layers):
            name, attended = f"blocks.{layer}", seen if model.window_layers == "even" and layer % 2 else near
            y = self._attention(f"{name}.attention", self._norm(f"{name}.attention_norm", x), attended)
            x = x + (self._norm(f"{name}.attention_post_norm", y) if model.post_norms else y)
            feed_forward = self._experts if model.experts else self._feed_forward
            y = feed_forward(f"{name}.feed_forward", self._norm(f"{name}.feed_forward_norm", x))
            x = x + (self._norm(f"{name}.feed_forward_post_norm", y) if model.post_norms else y)
        logits = self._norm("norm", x) @ state["embedding.weight" if model.tied else "head.weight"].T
        logits = _softcapped(logits, model.logit_softcap)
        chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return ((logits.logsumexp(-1) - chosen) * (targets != -100)).sum()

    def _embed(self, inputs: Tensor, documents: Tensor) -> Tensor:
        """Return the embeddings of the tokens, with those of their positions where positions are learned."""
        x = self.state["embedding.weight"][inputs]
        if self.model.scaled_embedding:
            x = x * self.model.hidden**0.5
        if self.model.positions == "learned":  # counted from the first token of a document
            firsts = (documents[:, :, None] == documents[:, None, :]).int().argmax(-1)
            x = x + self.state["positions.weight"][torch.arange(inputs.shape[1]) - firsts]
        return x

    def _norm(self, name: str, x: Tensor, kind: str | None = None) -> Tensor:
        """Apply RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016), or RMSNorm with one added to
        the weight (Gemma)."""
        kind = kind or self.model.norm
        centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        weight = self.state[f"{name}.weight"] + (1 if kind == "rms+1" else 0)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + self.model.norm_epsilon).sqrt() * weight
        return scaled + self.state[f"{name}.bias"] if kind == "layer" else scaled

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.state[f"{name}.weight"].T
        biased = self.model.bias is True or (
            self.model.bias == "qkv" and name.endswith((".query", ".key", ".value"))
        )
        return y + self.state[f"{name}.bias"] if biased else y

    def _attention(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        """Apply attention (Vaswani et al. 2017), with grouped keys and values (Ainslie et al. 2023), windows
        (Jiang et al. 2023) and soft caps (Gemma 2, 2024)."""
        model = self.model
        parts = (self._linear(f"{name}.{part}", x) for part in ("query", "key", "value"))
        query, key, value = (part.reshape(*x.shape[:2], -1, model.head_dim) for part in parts)
        if model.qk_norm:
            query = self._norm(f"{name}.query_norm", query, "rms")
            key = self._norm(f"{name}.key_norm", key, "rms")
        if model.positions == "rotary":
            query, key = self._rotate(query), self._rotate(key)
        shared = torch.arange(model.heads) // (model.heads // model.kv_heads)
        scores = torch.einsum("sihd,sjhd->shij", query, key[:, :, shared])
        scores = scores / math.sqrt(model.query_scalar or model.head_dim)
        scores = _softcapped(scores, model.attention_softcap)
        shares = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        mixed = torch.einsum("shij,sjhd->sihd", shares, value[:, :, shared])
        return self._linear(f"{name}.output", mixed.flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        """Apply rotary positions (Su et al. 2021): channels i and i + head_dim / 2 form a complex number,
        which is multiplied by exp(i position frequency)."""
        model, half = self.model, self.model.head_dim // 2
        frequencies = torch.tensor(
            [model.rope_theta ** (-pair / half) for pair in range(half)], dtype=torch.float64
        )
        if model.rope_scale != 1:  # Llama 3.1
            # Number of periods of each frequency in the sequence length of the first training.
            waves = model.rope_original / (2 * math.pi / frequencies)
            smooth = (waves - 1) / (4 - 1)
            blended = (1 - smooth) * frequencies / model.rope_scale + smooth * frequencies
            frequencies = torch.where(
                waves < 1, frequencies / model.rope_scale, torch.where(waves > 4, frequencies, blended)
            )
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequencies
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angles.cos(), angles.sin())
        return torch.cat((turned.real, turned.imag), -1)

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        """Apply the feed-forward layer (Shazeer 2020, or GPT-2's approximation of Hendrycks and Gimpel
        2016)."""
        up = self._linear(f"{name}.up", x)
        if self.model.activation == "gelu":
            return self._linear(f"{name}.down", _gelu(up))
        gate = self._linear(f"{name}.gate", x)
        gate = gate * gate.sigmoid() if self.model.activation == "swiglu" else _gelu(gate)
        return self._linear(f"{name}.down", gate * up)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        """Apply a mixture of experts (Shazeer et al. 2017). The balancing losses are those of Fedus et al.
        2021, DeepSeek-V3 2024 and Wang et al. 2024; the z-loss is that of Zoph et al. 2022."""
        model, state = self.model, self.state
        logits = x @ state[f"{name}.router.weight"].T  # (sequences, tokens, experts)
        scores = logits.softmax(-1) if model.router == "softmax" else logits.sigmoid()
        preferred = scores.detach() + state.get(f"{name}.router.bias", 0.0)
        best = preferred.sort(-1, descending=True).indices[..., : model.experts_per_token]
        chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
        weights = scores * chosen
        weights = model.routing_scale * (
            weights / weights.sum(-1, keepdim=True) if model.normalise_routing else weights
        )
        gate, up, down = (state[f"{name}.experts.{part}"] for part in ("gate", "up", "down"))
        gated = torch.einsum("sth,efh->stef", x, gate)
        inner = gated * gated.sigmoid() * torch.einsum("sth,efh->stef", x, up)
        y = torch.einsum("stef,ehf,ste->sth", inner, down, weights)
        self.loads[name] = chosen.sum((0, 1))
        share = chosen.mean(1) / model.experts_per_token
        mean = (scores / scores.sum(-1, keepdim=True)).mean(1)
        balance = model.balance_loss * x.shape[1] * model.experts * (share * mean).sum()
        self.balancing = self.balancing + balance
        self.balancing = self.balancing + model.router_z_loss * logits.logsumexp(-1).square().sum()
        return y + self._feed_forward(f"{name}.shared", x) if model.shared_experts else y


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def _softcapped(numbers: Tensor, cap: float | None) -> Tensor:
    return numbers if cap is None else cap * (numbers / cap).tanh()


# -- optimizer -----------------------------------------------------------------------------------------------


def learning_rate(train: Train, step: int) -> float:
    """Return the learning rate of a step, counted from 1.

    It rises linearly to the peak over `warmup` steps. From there (wsd: from `decay` steps before the end) it
    falls, along half a cosine or a line, to `final_learning_rate` times the peak at the last step.
    """
    peak, final, begin = train.learning_rate, train.learning_rate * train.final_learning_rate, train.warmup
    if step <= train.warmup:
        return peak * step / train.warmup
    if train.schedule == "wsd":
        begin = max(begin, train.steps - (train.decay or -(-train.steps // 5)))
    if train.schedule == "constant" or step <= begin:
        return peak
    gone = min(1.0, (step - begin) / (train.steps - begin))
    left = (1 + math.cos(math.pi * gone)) / 2 if train.schedule == "cosine" else 1 - gone
    return final + (peak - final) * left


def reference_optimizer(config: Config, weights: State) -> torch.optim.Optimizer:
    """Return an optimizer over these weights that shares no code with ours, with one group for each weight.
    Only matrices have weight decay, unless a pattern of the job's groups says otherwise; the last pattern
    decides. Each group has the factor on its learning rate as `factor`."""
    groups: list[dict[str, object]] = []
    for name, weight in weights.items():
        decay = config.optimizer.weight_decay if weight.ndim >= 2 and name not in _TABLES else 0.0
        factor = 1.0
        for pattern, settings in config.optimizer.groups.items():
            if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name):
                decay, factor = settings.get("weight_decay", decay), settings.get("lr_factor", factor)
        groups.append({"params": [weight], "weight_decay": decay, "factor": factor})
    optimizer = config.optimizer.reference(groups)
    assert optimizer is not None, "check_known refuses optimizers without a reference"
    return optimizer


@dataclass(frozen=True)
class PlainStep:
    """The numbers and the gradients of one training step."""

    step: int
    loss: float
    norm: float
    learning_rate: float
    gradients: State
    """The gradient of each parameter before clipping."""
    loads: dict[str, Tensor]
    """Number of tokens that chose each expert, by mixture of experts."""

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert of any layer, relative to an even load."""
        return max(float(load.max() / load.mean()) for load in self.loads.values())


def train_plainly(
    config: Config, weights: State, biases: State, batch: Callable[[int], Rows], steps: int
) -> Iterator[PlainStep]:
    """Train from these weights and router biases, which are changed in place, and yield each step.
    `batch(step)` returns the rows of a step."""
    model, train = config.model, config.train
    optimizer = reference_optimizer(config, weights)
    for step in range(1, steps + 1):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        forward, rows = Forward(model, {**leaves, **biases}), batch(step)
        valid = (rows[1] != -100).sum()
        loss = forward(rows)
        derivatives = torch.autograd.grad((loss + forward.balancing) / valid, list(leaves.values()))
        gradients = dict(zip(leaves, derivatives, strict=True))
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in derivatives))
        clipped = 1.0 if train.clip is None else min(1.0, train.clip / norm)
        lr = learning_rate(train, step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        for name, weight in weights.items():
            weight.grad = gradients[name] * clipped
        optimizer.step()
        optimizer.zero_grad()
        for name, load in forward.loads.items():
            if model.balance_bias:
                biases[f"{name}.router.bias"] += model.balance_bias * (load.mean() - load).sign().float()
        yield PlainStep(step, float(loss.detach() / valid), norm, lr, gradients, forward.loads)


def held_out_loss(config: Config, weights: State, biases: State, rows: Rows) -> float:
    """Return the mean cross-entropy over the targets of held-out rows."""
    with torch.no_grad():
        return float(Forward(config.model, {**weights, **biases})(rows) / (rows[1] != -100).sum())
