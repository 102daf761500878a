"""A program whose model every axis can split: a small language model with a sharding table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

STEPS, BATCH, LENGTH, HEADS = 5, 8, 16, 4


class Sums:
    """Sequences of digits, and after each digit the sum so far modulo 16. Every third sequence ends early."""

    def __init__(self, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randint(16, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        targets = self.x[index].cumsum(0) % 16
        if index % 3 == 0:
            targets[LENGTH // 2 :] = -100
        return {"x": self.x[index], "y": targets}


class Mixing(nn.Module):
    """Causal attention: each tensor is (batch, heads, sequence, head_dim)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        # No bias: that of keys has no gradient but rounding errors.
        self.qkv, self.mixing = nn.Linear(size, 3 * size, bias=False), Mixing()
        self.output = nn.Linear(size, size)
        self.head_dim = size // HEADS

    def forward(self, x: Tensor) -> Tensor:
        per_head = self.qkv(x).unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2)
        query, key, value = per_head.chunk(3, -1)
        return self.output(self.mixing(query, key, value, None).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """As many layers as experts, stacked; a device may have some of them."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, size, 2 * size) / size**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * size, size) / size**0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = zip(rows.split(counts.tolist()), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


class Mixture(nn.Module):
    """Sends each token to the best two of some experts."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(size, count, bias=False), Experts(count, size)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        outputs = self.experts(tokens[order // 2], counts) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // 2, outputs).view_as(x)


class Block(nn.Module):
    def __init__(self, size: int, experts: int) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(size), Attention(size)
        self.before_layers = nn.LayerNorm(size)
        layers = nn.Sequential(nn.Linear(size, 3 * size), nn.GELU(), nn.Linear(3 * size, size))
        self.layers = Mixture(experts, size) if experts else layers

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.layers(self.before_layers(x))


class Language(nn.Module):
    """Maps digits and their positions to logits. A pipeline stage has only some of its modules."""

    def __init__(self, size: int = 16, experts: int = 0) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, size), nn.Embedding(LENGTH, size)
        self.blocks = nn.ModuleList(Block(size, experts) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(size), nn.Sequential(nn.Linear(size, 16))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


ROLES = {
    "embedding": sw.vocabulary(),
    "places": sw.positions(),
    "blocks.*.before_*": sw.whole(),
    "blocks.*.attention": sw.gathered(),
    "blocks.*.attention.qkv": sw.columns(HEADS),
    "blocks.*.attention.output": sw.rows(HEADS),
    "norm": sw.whole(),
    "head": sw.gathered(),
    "head.0": sw.columns(gather=True),
}
LAYERS = {"blocks.*.layers": sw.gathered(), "blocks.*.layers.0": sw.columns(), "blocks.*.layers.2": sw.rows()}
MIXTURES = {"blocks.*.layers.router": sw.whole(), "blocks.*.layers.experts": sw.experts()}
REST = {
    "blocks": "blocks",
    "first": ("embedding", "places"),
    "last": ("norm", "head"),
    "mixing": "blocks.*.attention.mixing",
}
TABLE = sw.Sharding({**ROLES, **LAYERS}, **REST)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The cross-entropy and a penalty on large logits, summed over the tokens with a target."""
    logits, taught = model(batch["x"], batch["positions"]), batch["y"] != -100
    fit = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return {"fit": fit, "large": 1e-3 * (logits.logsumexp(-1).square() * taught).sum()}, taught.sum()


def trains(
    engine: sw.Engine, function: object = loss, table: sw.Sharding | None = TABLE, experts: int = 0
) -> None:
    engine.prepare(lambda: Language(experts=experts), sharding=table)
    engine.optimizer("adamw", lr=1e-2, weight_decay=0.0)
    for batch in engine.batches(Sums(), global_batch=BATCH, steps=STEPS, sequences=("x", "y")):
        engine.forward_backward(function, batch)
        engine.clip_grad_norm(0.5)
        engine.optim_step()
        engine.state["evaluated"] = engine.evaluate(loss, Sums(7))["fit"]


def trains_experts(engine: sw.Engine, **changes: object) -> None:
    trains(engine, table=sw.Sharding({**ROLES, **MIXTURES}, **{**REST, **changes}), experts=4)


# Mistakes


def has_no_sequence_parallel_experts(engine: sw.Engine) -> None:
    trains_experts(engine, sequence_parallel=False)


def leaves_a_weight_empty(engine: sw.Engine) -> None:
    def make() -> nn.Module:
        model = Language()
        model.norm.weight = nn.Parameter(torch.empty(16))
        return model

    engine.prepare(make)
    for batch in engine.batches(Sums(), global_batch=BATCH):
        engine.forward_backward(loss, batch)


def hides_weights_of_experts(engine: sw.Engine) -> None:
    table = sw.Sharding({**ROLES, **MIXTURES, "blocks.*.layers": sw.experts()}, **REST)
    trains(engine, table=table, experts=4)


def calls_twice(engine: sw.Engine) -> None:
    def function(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        total = model(batch["x"], batch["positions"]).sum() + model(batch["x"], batch["positions"]).sum()
        return total, batch["x"].numel()

    trains(engine, function)


def calls_no_model(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: (model.norm(torch.ones(16)).sum(), 1) if model.norm else (None, 1))


def names_no_sequences(engine: sw.Engine) -> None:
    engine.prepare(Language, sharding=TABLE)
    for _ in engine.batches(Sums(), global_batch=BATCH):
        pass


def names_other_sequences(engine: sw.Engine) -> None:
    engine.prepare(Language, sharding=TABLE)
    for batch in engine.batches(Sums(), global_batch=BATCH, sequences=("x", "z")):
        engine.forward_backward(loss, batch)


def has_odd_sequences(engine: sw.Engine) -> None:
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([sample[name][:15] for sample in samples]) for name in ("x", "y")}

    engine.prepare(Language, sharding=TABLE)
    for batch in engine.batches(Sums(), global_batch=BATCH, sequences=("x", "y"), collate=collate):
        engine.forward_backward(loss, batch)


def has_positions_already(engine: sw.Engine) -> None:
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}
        return {**batch, "positions": torch.arange(LENGTH)}

    engine.prepare(Language, sharding=TABLE)
    for batch in engine.batches(Sums(), global_batch=BATCH, sequences=("x", "y"), collate=collate):
        engine.forward_backward(loss, batch)


def has_other_lengths(engine: sw.Engine) -> None:
    """The second step has shorter sequences."""
    engine.prepare(Language, sharding=TABLE)
    for batch in engine.batches(Sums(), global_batch=BATCH, steps=3, sequences=("x", "y")):
        length = LENGTH if engine.step == 0 else LENGTH // 2

        def shorter(
            model: nn.Module, batch: dict[str, Tensor], length: int = length
        ) -> tuple[dict[str, Tensor], Tensor]:
            return loss(model, {name: value[..., :length] for name, value in batch.items()})

        engine.forward_backward(shorter, batch)
        engine.optim_step()


def names_no_blocks(engine: sw.Engine) -> None:
    trains(engine, table=sw.Sharding({}))
