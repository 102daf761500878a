"""The sharding table: how a model can be split over devices, as data beside the model.

A model file knows nothing of ranks. The table gives each module with weights its role, which says how the
devices of the `tensor` axis share its work. It also says where the model can be cut into pipeline stages, and
which modules hold experts or mix the tokens of a sequence. `parallel/` reads the table and splits the model.
Any `nn.Module` can have one: give it an attribute `sharding` (docs/sharding.md has an example,
examples/own_model.py runs it).

Activations are (batch, sequence, hidden). Between the modules named `gathered` or `loss`, each device of the
tensor axis has its own part of the sequence (sequence parallelism, Korthikanti et al. 2022), so norms and
residuals are never held twice; inside them it has the whole sequence and its own part of the heads, the inner
features or the vocabulary (tensor parallelism, Shoeybi et al. 2019).

| role         | weights                      | input                  | output                             |
| ------------ | ---------------------------- | ---------------------- | ---------------------------------- |
| `vocabulary` | rows of an embedding         | all tokens             | summed; this device's part of the  |
|              |                              |                        | sequence                           |
| `positions`  | a whole embedding            | all positions          | this device's part of the sequence |
| `whole`      | whole                        | whatever is there      | the same                           |
| `gathered`   | none of its own              | gathered sequence      | as its modules make it             |
| `columns`    | rows of a matrix (outputs)   | whole sequence         | this device's features             |
| `rows`       | columns of a matrix (inputs) | this device's features | summed; this device's part of the  |
|              |                              |                        | sequence                           |
| `loss`       | rows, by vocabulary          | gathered sequence      | the loss; no device has all logits |
| `experts`    | whole experts, first dim     | tokens of any expert   | the same tokens                    |

A table with `sequence_parallel=False` is simpler, and fits any activations whose last dim are the features:
all devices have the same activations outside of the split matrices, `rows` returns the whole sum, and
`gathered` is not needed. It costs memory for the activations that every device holds.

With `columns(parts)` and `rows(parts)` the split dim consists of this many parts, such as heads, that must
stay whole. With fewer parts than devices, every device keeps all of them and uses the one that it needs (key
and value heads of grouped-query attention). `columns(gather=True)` gathers the features afterwards, for a
head whose logits the model itself needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from shardwise.config import Model

Kind = Literal["vocabulary", "positions", "whole", "gathered", "columns", "rows", "loss", "experts"]


@dataclass(frozen=True)
class Role:
    """How a module is split in a tensor-parallel group."""

    kind: Kind
    parts: int | None = None
    gather: bool = False


def vocabulary() -> Role:
    """Return the role of an embedding split by tokens."""
    return Role("vocabulary")


def positions() -> Role:
    """Return the role of an embedding of positions, whole on every device, for its part of the sequence."""
    return Role("positions")


def whole() -> Role:
    """Return the role of weights that every device has, for its own tokens or heads. Their gradients are
    summed."""
    return Role("whole")


def gathered() -> Role:
    """Return the role of a module that needs the whole sequence."""
    return Role("gathered")


def columns(parts: int | None = None, gather: bool = False) -> Role:
    """Return the role of a linear layer split by outputs."""
    return Role("columns", parts, gather)


def rows(parts: int | None = None) -> Role:
    """Return the role of a linear layer split by inputs. It follows a layer split by outputs."""
    return Role("rows", parts)


def loss() -> Role:
    """Return the role of the output head that computes the loss, `models.Head`."""
    return Role("loss")


def experts() -> Role:
    """Return the role of experts, stacked in the first dim of every weight.

    The module is called with (rows sorted by expert, number of rows of each expert).
    """
    return Role("experts")


@dataclass(frozen=True)
class Sharding:
    """A model's sharding table. In the names of modules a `*` stands for one part between dots."""

    modules: Mapping[str, Role]
    blocks: str | None = None
    """Name of the list of blocks, which pipeline stages share; None: the model cannot be cut."""
    first: tuple[str, ...] = ()
    """Modules before the blocks. They are on the first stage, and None on the others."""
    last: tuple[str, ...] = ()
    """Modules after the blocks. They are on the last stage, and None on the others."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """For each parameter that is tied to another, the name of the other. The two may be on different
    stages."""
    sequence_parallel: bool = True
    """Whether each device of the tensor axis has its own part of the sequence between the modules that share
    a matrix. Without it all have the same activations there, which need not be sequences."""
    mixing: str | None = None
    """Modules that are called with (query, key, value, mask) and in which `context` devices communicate.
    Queries, keys and values are (batch, heads, sequence, head_dim)."""
    mask: str | None = None
    """Module that turns document numbers into the mask for `mixing`."""

    def role(self, path: str) -> Role | None:
        """Return the role of the module at a path, if it has one."""
        return next((role for pattern, role in self.modules.items() if matches(pattern, path)), None)

    def tied_name(self, name: str) -> str:
        """Return the name under which a parameter is initialised, saved and compared."""
        return self.tied.get(name, name)


def matches(pattern: str | None, path: str) -> bool:
    """Return whether a module's path matches a pattern."""
    return pattern is not None and _compiled(pattern).fullmatch(path) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def split_dim(role: Role, parameter: str, tensor: int) -> int | None:
    """Return the dim in which tensor devices split a module's parameter ("weight", "bias"), or None.

    Experts are not split over the tensor axis.
    """
    if role.kind in ("vocabulary", "loss") or (role.kind == "columns" and not copies_parts(role, tensor)):
        return 0
    return 1 if role.kind == "rows" and parameter == "weight" else None


def copies_parts(role: Role, tensor: int) -> bool:
    """Return whether there are fewer parts (heads) than devices, so that every device keeps all and uses
    one."""
    return role.parts is not None and role.parts < tensor


@lru_cache(maxsize=64)
def transformer_sharding(config: Model) -> Sharding:
    """Return the table of our own transformer (models/transformer.py)."""
    return Sharding(
        modules={
            "embedding": vocabulary(),
            "positions": positions(),
            "blocks.*.attention_norm": whole(),
            "blocks.*.attention": gathered(),
            "blocks.*.attention.query": columns(config.heads),
            "blocks.*.attention.key": columns(config.kv_heads),
            "blocks.*.attention.value": columns(config.kv_heads),
            "blocks.*.attention.query_norm": whole(),
            "blocks.*.attention.key_norm": whole(),
            "blocks.*.attention.output": rows(config.heads),
            "blocks.*.attention_post_norm": whole(),
            "blocks.*.feed_forward_norm": whole(),
            "blocks.*.feed_forward_post_norm": whole(),
            "norm": whole(),
            "head": loss(),
            **(_EXPERTS if config.experts else _DENSE),
        },
        blocks="blocks",
        first=("embedding", "positions"),
        last=("norm", "head"),
        tied={"head.weight": "embedding.weight"} if config.tied else {},
        mixing="blocks.*.attention.mixing",
        mask="mask",
    )


_DENSE = {
    "blocks.*.feed_forward": gathered(),
    "blocks.*.feed_forward.gate": columns(),
    "blocks.*.feed_forward.up": columns(),
    "blocks.*.feed_forward.down": rows(),
}
# Experts take the tokens of this device's part of the sequence as they are: each token goes to its experts,
# not to all devices.
_EXPERTS = {
    "blocks.*.feed_forward.router": whole(),
    "blocks.*.feed_forward.experts": experts(),
    "blocks.*.feed_forward.shared": gathered(),
    "blocks.*.feed_forward.shared.gate": columns(),
    "blocks.*.feed_forward.shared.up": columns(),
    "blocks.*.feed_forward.shared.down": rows(),
}
