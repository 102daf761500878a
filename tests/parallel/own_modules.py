"""Modules as a user may write them: one that is different from ours in all it may be, and some that are wrong
in one thing."""

from __future__ import annotations

import sys
import zlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import Model
from shardwise.models import Head
from shardwise.models.sharding import Role, Sharding, columns, gathered, loss, rows, vocabulary, whole


class Layer(nn.Module):
    """Attention alone, with one key head for all queries."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm = nn.RMSNorm(config.hidden)
        self.mix = nn.Module()
        self.mix.q = nn.Linear(config.hidden, config.heads * config.head_dim)
        self.mix.kv = nn.Linear(config.hidden, 2 * config.head_dim)
        self.mix.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.mix.share = 0.5  # a user's names are the user's
        self.mix.forward = self._mix

    def _mix(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query = self.mix.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key, value = (part.unsqueeze(1).expand_as(query) for part in self.mix.kv(x).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.mix.out(self.mix.share * mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.mix(mask=mask, x=self.norm(x))  # by name, as a user may


class Tied(nn.Module):
    """Nested, tied, with a buffer, first values of its own (zeros among them), documents, and neither
    positions nor logits_at."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.words = nn.Embedding(config.vocabulary, config.hidden)
        self.body.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = Head(self.body.words.weight)
        self.register_buffer("scale", torch.linspace(1, 2, config.hidden), persistent=False)
        self.sharding = Sharding(
            modules={
                "body.words": vocabulary(),
                "body.layers.*.norm": whole(),
                "body.layers.*.mix": gathered(),
                "body.layers.*.mix.q": columns(config.heads),
                "body.layers.*.mix.kv": columns(1),
                "body.layers.*.mix.out": rows(config.heads),
                "head": loss(),
            },
            blocks="body.layers",
            first=("body.words",),
            last=("head",),
            tied={"head.weight": "body.words.weight"},
        )

    def initial_value(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if name.endswith(("out.weight", "bias")):
            return torch.zeros(shape)
        return (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed + zlib.crc32(name.encode())))
            * 0.1
        )

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = inputs if self.body.words is None else self.body.words(inputs) * self.scale
        mask = None if documents is None else (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        for layer in self.body.layers:
            x = layer(x, mask)
        return x if self.head is None else self.head(x, targets)


class DroppingLayer(Layer):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + F.dropout(self.mix(F.dropout(self.norm(x), 0.2, self.training), mask), 0.1, self.training)


class Dropping(Tied):
    """Drops before, inside and behind its blocks; one module has been put into eval mode by its author."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.body.layers = nn.ModuleList(DroppingLayer(config) for _ in range(config.layers))
        self.drop = nn.Dropout(0.3)
        self.idle = nn.Dropout(0.5).eval()

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = inputs if self.body.words is None else self.idle(self.drop(self.body.words(inputs)) * self.scale)
        for layer in self.body.layers:
            x = layer(x, None)
        return x if self.head is None else self.head(self.drop(x), targets)


class NoTable(nn.Module):
    """The smallest that trains: the next byte from this one."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocabulary, config.hidden)
        self.scores = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.scores(self.table(inputs))
        return (
            logits
            if targets is None
            else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        )


class NoLoss(NoTable):
    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.scores(self.table(inputs))


class Pair(NoTable):
    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(inputs, targets), inputs


class MissingEntry(NoTable):
    sharding = Sharding({"table": vocabulary()})


class MisspeltEntry(NoTable):
    sharding = Sharding({"table": vocabulary(), "score": columns(gather=True)})


class WrongRole(NoTable):
    sharding = Sharding({"table": vocabulary(), "scores": vocabulary()})


class NotATable(NoTable):
    sharding = ("table", "vocabulary")


class Homeless(Tied):
    """A weight in no stage."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.spare = nn.Linear(2, 2)


class UntoldTie(Tied):
    def __init__(self, config: Model) -> None:
        super().__init__(config)
        table = self.sharding
        self.sharding = Sharding(table.modules, table.blocks, table.first, table.last)


class ThreeLayers(Tied):
    """Whatever was asked for."""

    def __init__(self, config: Model) -> None:
        super().__init__(config.model_copy(update={"layers": 3}))


class Unfilled(NoTable):
    """A buffer made from a weight."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.register_buffer("average", self.scores.weight.detach().mean(0))


class Loading(NoTable):
    """Loads weights while it is built, as of a pretrained model: one is frozen, and one is trained."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        vectors = torch.arange(float(config.vocabulary * config.hidden)).view(config.vocabulary, -1).sin()
        self.table = nn.Embedding.from_pretrained(vectors)
        self.scores.load_state_dict({"weight": vectors.cos() / 10, "bias": torch.ones(config.vocabulary)})


class Leaving(NoTable):
    """Ends the process where it should raise."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        sys.exit(3)


class AllFrozen(NoTable):
    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.requires_grad_(False)


class Buffers(NoTable):
    """Buffers of all kinds, made as their author would on one device: computed, drawn, shared, persistent or
    not."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        rates = [
            rate.item() for rate in torch.linspace(0.5, 1, 3)
        ]  # a value is looked at, which no meta tensor has
        self.register_buffer(
            "angles", torch.outer(torch.arange(24).float(), torch.arange(config.hidden).float()).cos()
        )
        made = torch.randn(config.hidden, generator=torch.Generator().manual_seed(7)) * rates[0]
        self.register_buffer("made", made, persistent=False)
        self.register_buffer("again", self.made, persistent=False)
        self.register_buffer("drawn", torch.randn(5))
        self.register_buffer("exact", torch.full((), 1 / 3, dtype=torch.float64), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.table(inputs) * self.angles[: inputs.shape[1]] + self.made
        logits = self.scores(x * self.again) * self.exact.to(x.dtype)
        return (
            logits
            if targets is None
            else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        )


class Headed(Tied):
    """A new head on a body that came from elsewhere and stays as it is."""

    trained = ("head",)

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.head = nn.Sequential(nn.Linear(config.hidden, config.vocabulary))
        roles = {**self.sharding.modules, "head": gathered(), "head.0": columns(gather=True)}
        self.sharding = Sharding(roles, "body.layers", ("body.words",), ("head",))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in self.trained))

    def initial_value(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
        if name.startswith("head"):
            return None  # drawn as any weight
        return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.3

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = inputs if self.body.words is None else self.body.words(inputs) * self.scale
        for layer in self.body.layers:
            x = layer(x, None)
        if self.head is None:
            return x
        logits = self.head(x)
        return (
            logits
            if targets is None
            else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        )


class Tuned(Headed):
    """Beside the head, the norm and one matrix of each block are trained: frozen and trained weights side by
    side."""

    trained = ("head", "norm", "mix.q")


class Convolving(nn.Module):
    """Features of near tokens, mixed by two convolutions that see no later token."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.up = nn.Conv1d(config.hidden, config.ffn, 3)
        self.down = nn.Conv1d(config.ffn, config.hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(F.pad(x.transpose(1, 2), (2, 0))))  # (batch, features, sequence)
        return self.down(F.pad(inner, (1, 0))).transpose(1, 2)


class Convolved(nn.Module):
    """Splits of all that can be split: an embedding with padding, convolutions, and one whose features are
    put together."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.hidden, padding_idx=ord("e"))
        self.layers = nn.ModuleList(Convolving(config) for _ in range(config.layers))
        self.head = nn.Sequential(Channels(), nn.Conv1d(config.hidden, config.vocabulary, 1))
        self.sharding = Sharding(
            {
                "words": vocabulary(),
                "layers.*": gathered(),
                "layers.*.up": columns(),
                "layers.*.down": rows(),
                "head": gathered(),
                "head.1": columns(gather=True),
            }
        )

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.words(inputs)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)  # (batch, vocabulary, sequence)
        return (
            logits.transpose(1, 2) if targets is None else F.cross_entropy(logits, targets, reduction="sum")
        )


class Channels(nn.Module):
    """(batch, sequence, features) to (batch, features, sequence)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Grouped(NoTable):
    """Convolves each channel by itself, which no role here splits."""

    roles: ClassVar[dict[str, Role]] = {"depth": columns()}

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.depth = nn.Conv1d(config.hidden, config.hidden, 3, groups=config.hidden)
        self.sharding = Sharding({"table": vocabulary(), "scores": columns(gather=True), **self.roles})


class Attending(Grouped):
    roles: ClassVar[dict[str, Role]] = {"depth": whole(), "attention": whole(), "attention.out_proj": rows()}

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.attention = nn.MultiheadAttention(config.hidden, config.heads)


class Looked(Grouped):
    roles: ClassVar[dict[str, Role]] = {"depth": whole(), "table": columns()}


class Pooled(nn.Module):
    """A whole sequence to the scores of classes."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.scores = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x.mean(1))


class Classes(Tied):
    """One class for each sequence: that of its last target, where there is one."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.head = Pooled(config)
        roles = {**self.sharding.modules, "head": gathered(), "head.scores": columns(gather=True)}
        self.sharding = Sharding(roles, "body.layers", ("body.words",), ("head",))

    def count_items(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (targets[:, -1] != -100).sum()

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = inputs if self.body.words is None else self.body.words(inputs) * self.scale
        mask = None if documents is None else (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        for layer in self.body.layers:
            x = layer(x, mask)
        if self.head is None:
            return x
        scores = self.head(x)  # (batch, classes)
        if targets is None:
            return scores.unsqueeze(1).expand(-1, inputs.shape[1], -1)
        return F.cross_entropy(scores, targets[:, -1], reduction="sum")


class Sequences(NoTable):
    """Counts sequences, in a plain number."""

    def count_items(self, inputs: Tensor, targets: Tensor) -> int:
        return len(inputs)


class CountsEach(NoTable):
    def count_items(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (targets != -100).sum(1)


class CountsAlone(NoTable):
    def count_items(self, inputs: Tensor) -> int:
        return len(inputs)


class CountsNothingSound(NoTable):
    def count_items(self, inputs: Tensor, targets: Tensor) -> float:
        return float("nan")


class Whole(NoTable):
    """A weight of whole numbers."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.order = nn.Parameter(torch.arange(config.hidden), requires_grad=False)


class Stateful(NoTable):
    """State that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}


class OnInstance(NoTable):
    """Its forward is chosen while it is built, as by torch.compile(self.forward)."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.forward = self.chosen

    def chosen(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return NoTable.forward(self, inputs, targets)


class OneAnswer(NoTable):
    """Scores of the last token alone."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(inputs, targets) if targets is not None else super().forward(inputs[:, -1:])


class Turning(NoTable):
    """A persistent buffer of complex numbers, as models that rotate queries and keys have it."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.register_buffer("turns", torch.polar(torch.ones(config.hidden), torch.arange(config.hidden) / 7))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.scores((self.table(inputs) * self.turns).real)
        return (
            logits
            if targets is None
            else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        )


class Averaged(NoTable):
    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.hidden)


class Broken(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.wrong = nn.Linear(config.hidden, "wide")  # type: ignore[arg-type]


class TooLarge(nn.Module):
    """A weight for which no machine has memory: 2**56 bytes, where addresses have 47 or 48 bits."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.wide = nn.Linear(2**14, 2**40)


class Countless(nn.Module):
    """A weight whose bytes no 64-bit number counts."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.wide = nn.Linear(2**31, 2**31)


def number(config: Model) -> int:
    return 3


class MeanOfTokens(Tied):
    """Returns torch's default, the mean, where a sum is asked for."""

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        result = super().forward(inputs, targets, documents)
        return result if targets is None or self.head is None else result / (targets != -100).sum()


class MeanOfRows(NoTable):
    """Sums over tokens, and takes the mean over the batch."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        result = super().forward(inputs, targets)
        return result if targets is None else result / len(inputs)


class MeanOfEachRow(Tied):
    """Takes the mean over the tokens of each row, and sums over rows."""

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        result = super().forward(inputs, targets, documents)
        return result if targets is None or self.head is None else result / targets.shape[1]


class MeanOfTargets(NoTable):
    """Takes the mean over the targets of each row that are not -100, and sums over rows."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.scores(self.table(inputs))
        if targets is None:
            return logits
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
        return (each / (targets != -100).sum(1).clamp(min=1)).sum()


class OneLength(NoTable):
    """Takes sequences of one length only."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        if inputs.shape[1] != 24:
            raise ValueError("a sequence has 24 tokens")
        return super().forward(inputs, targets)


class OtherMark(NoTable):
    """Does not know targets of -100."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.scores(self.table(inputs))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


class NoTargets(NoTable):
    """Sums means of sequences, of which one without a target has none."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.scores(self.table(inputs))
        if targets is None:
            return logits
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
        return (each / (targets != -100).sum(1)).sum()

    def count_items(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (targets != -100).any(1).sum()


class Noting(Dropping):
    """Draws random numbers and changes a buffer in every forward, in eval mode too."""

    def __init__(self, config: Model) -> None:
        super().__init__(config)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        self.forwards += 1
        torch.rand(3)
        return super().forward(inputs, targets, documents)
