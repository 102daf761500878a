"""A printed model says which of its layers are split, over which axis and how, and what this rank has of
each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from own_modules import Tied
from ranks.jobs import ALONE, FAMILIES, LLAMA, Tables, job, start
from ranks.pool import Pool
from torch import nn

import shardwise
from shardwise.mesh import Worker

SMALL = {"global_batch": 4, "steps": 1}
OWN = {"module": f"{Path(__file__).with_name('own_modules.py')}:{Tied.__name__}"}


def printed(worker: Worker, tables: Tables) -> dict[str, str]:
    """By path, how each module of this rank's model prints itself, without the modules inside of it."""
    training = start(worker, tables)
    (part,) = training.parallel.parts
    text = repr(part.model)
    for module in part.model.modules():  # what a module says of itself stands in the text of the whole model
        assert type(module).__name__ in text
        assert module.extra_repr() in text
    return {
        path: f"{type(module).__name__}({module.extra_repr()})" for path, module in part.model.named_modules()
    }


def on_two(ranks: Callable[[int], Pool], tables: Tables) -> list[dict[str, str]]:
    return ranks(2).run(printed, tables)


def test_matrices_are_printed_with_the_part_that_each_tensor_device_has(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    model = {**FAMILIES["llama"], "layers": 1, "kv_heads": 1}
    first, second = on_two(ranks, job(corpus, model=model, train=SMALL, layout={"data": 1, "tensor": 2}))
    assert first["embedding"] == (
        "VocabularyEmbedding(259, 24, tensor 0 of 2: ids 0:130 of 259, summed and scattered along the "
        "sequence)"
    )
    assert "tensor 1 of 2: ids 130:259 of 259" in second["embedding"]
    assert "tensor 1 of 2: ids 130:259 of 259" in second["head"]
    block = "blocks.0."
    assert first[block + "attention"].startswith(
        "RegatheredAttention(tensor 0 of 2: sequence gathered before"
    )
    assert first[block + "attention.query"].startswith(
        "ColumnLinear(in_features=24, out_features=24, bias=False, tensor 0 of 2: "
    )
    assert first[block + "attention.query"].endswith("outputs 0:12 of 24)")
    assert second[block + "attention.query"].endswith("tensor 1 of 2: outputs 12:24 of 24)")
    for rank in (first, second):  # one key head, which both use
        assert "outputs 0:6 of 6, all of which it holds" in rank[block + "attention.key"]
    assert re.match(
        r"RowLinear\(.*tensor 1 of 2: inputs 25:50 of 50, outputs summed", second[block + "feed_forward.down"]
    )
    assert re.match(r"WholeRMSNorm\(.*tensor 0 of 2: whole, gradients summed\)", first["norm"])


def test_experts_and_attention_over_devices_are_printed(ranks: Callable[[int], Pool], corpus: str) -> None:
    model = {**FAMILIES["experts"], "layers": 1}
    _, second = on_two(ranks, job(corpus, model=model, train=SMALL, layout={"data": 2, "expert": 2}))
    assert "Experts(expert 1 of 2: experts 2:4 of 4)" in second["blocks.0.feed_forward.experts"]
    ring = {"data": 1, "context": 2, "attention": "ring"}
    first, _ = on_two(ranks, job(corpus, model={**LLAMA, "layers": 1}, train=SMALL, layout=ring))
    assert (
        "RingCausalAttention(context 0 of 2: keys and values passed around"
        in first["blocks.0.attention.mixing"]
    )
    assert "UnusedAttentionMask(context 0 of 2" in first["mask"]


def test_a_users_own_module_is_printed_so_too(ranks: Callable[[int], Pool], corpus: str) -> None:
    model = {**FAMILIES["llama"], "layers": 1, **OWN}
    first, _ = on_two(ranks, job(corpus, model=model, train=SMALL, layout={"data": 1, "tensor": 2}))
    assert first["body.layers.0.mix.out"].startswith(
        "RowLinear(in_features=24, out_features=24, bias=False, tensor 0 of 2"
    )
    # Its forward is set on the object, by its author.
    assert first["body.layers.0.mix"].startswith("RegatheredModule(forward: Layer._mix, tensor 0 of 2")
    assert first["head"].startswith("VocabularyLossHead(tensor 0 of 2: ids 0:130 of 259")
    assert first[""] == "AdaptedTied(run as it is, logits in float64)"


@dataclass(frozen=True)
class Built:
    """What one rank's model consists of, and how its modules came to be what they are."""

    text: str
    """The model as it is printed, all of its parts."""
    names: list[str]
    """Those of its parameters."""
    unnamed: list[str]
    """Modules whose printed text does not name the class that has the `forward` which runs."""
    own_forwards: list[str]
    """Paths of modules with a `forward` that is an attribute of the object."""
    changed_classes: list[str]
    """The classes that objects were given after they were made."""


def built(worker: Worker, tables: Tables) -> Built:
    with class_changes() as changed:
        training = start(worker, tables)
    models = [part.model for part in training.parallel.parts]
    modules = {path: module for model in models for path, module in model.named_modules()}
    return Built(
        text="\n".join(map(repr, models)),
        names=sorted(name for name, _ in training.parallel.named_parameters()),
        unnamed=[path for path, module in modules.items() if not names_what_runs(module)],
        own_forwards=[path for path, module in modules.items() if "forward" in vars(module)],
        changed_classes=changed,
    )


@contextmanager
def class_changes() -> Iterator[list[str]]:
    """Inside, note the classes that modules are given by `module.__class__ = ...`."""
    changed: list[str] = []
    honest = nn.Module.__setattr__

    def noting(self: nn.Module, name: str, value: object) -> None:
        if name == "__class__":
            assert isinstance(value, type)
            changed.append(value.__name__)
        honest(self, name, value)

    with mock.patch.object(nn.Module, "__setattr__", noting):
        yield changed


def names_what_runs(module: nn.Module) -> bool:
    """Whether the first class with a `forward`, which is the one that runs, is in the module's printed
    name."""
    runs = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    by_object = "forward: " in module.extra_repr()  # the module's author set it on the object
    return runs in (nn.Module, nn.ModuleList) or by_object or runs.__name__ in type(module).__name__


LAYOUTS = {
    "tensor": ("llama", {}, {"data": 1, "tensor": 2}, "RegatheredAttention RowLinear WholeRMSNorm"),
    "tensor, compiled": (
        "llama",
        {"compile": True, "recompute": "full"},
        {"data": 1, "tensor": 2},
        "RecomputedCompiledBlock GatheredAttention",
    ),
    "context": ("llama", {}, {"data": 1, "context": 2}, "UlyssesCausalAttention UnusedAttentionMask"),
    "experts": (
        "experts",
        {"recompute": "selective"},
        {"data": 2, "expert": 2},
        "DispatchedExperts RecomputedAttention RecomputedGatedFeedForward",
    ),
    "pipeline": ("llama", {"recompute": "full"}, {"data": 1, "pipeline": 2}, "RecomputedBlock"),
    "data": ("llama", {"compile": True}, {"data": 2, "zero": 0}, "CompiledBlock"),
    "shards": (
        "llama",
        {"compile": True, "recompute": "selective"},
        {"data": 2, "zero": 3},
        "FSDPCompiledRecomputedBlock",
    ),
    "own, shards": (
        "own",
        {"recompute": "full", "precision": "bfloat16"},
        {"data": 2, "zero": 3},
        "FSDPAdaptedTied SeededRecomputedLayer autocast",
    ),
    "own, tensor": (
        "own",
        {"compile": True, "recompute": "selective"},
        {"data": 1, "tensor": 2},
        "SeededCompiledRecomputedLayer GatheredModule",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_module_is_printed_as_what_it_was_made_as(
    ranks: Callable[[int], Pool], corpus: str, name: str
) -> None:
    kind, train, layout, words = LAYOUTS[name]
    model = {**FAMILIES["llama" if kind == "own" else kind], "layers": 2, **(OWN if kind == "own" else {})}
    tables = job(corpus, model=model, train={**SMALL, **train}, layout=layout)
    found = ranks(2).run(built, tables)
    for rank in found:
        assert not rank.unnamed
        assert all(changed.startswith("FSDP") for changed in rank.changed_classes)  # by torch's fully_shard
        # Where nothing takes the place of a module, a forward that its author set on the object stays.
        assert not [path for path in rank.own_forwards if kind != "own" or not path.endswith("mix")]
        assert all(word in rank.text for word in words.split())
    alone = start(ALONE, {**tables, "layout": {}, "train": {**tables["train"], "compile": False}})
    names = {name for name, _ in alone.parallel.named_parameters()}
    assert {name for rank in found for name in rank.names} == names


def test_no_line_of_ours_gives_an_object_another_class_or_forward() -> None:
    change = re.compile(r"\.__class__ = |\.forward = |setattr\([^)]*\"(forward|__class__)\"")
    for file in Path(shardwise.__file__).parent.rglob("*.py"):
        assert not change.search(file.read_text()), file
