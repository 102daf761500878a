"""A printed model says which of its layers are split, over which axis and how, and what this rank has of
each."""

from __future__ import annotations

import re
from collections.abc import Callable

from own_modules import Tied
from ranks.jobs import FAMILIES, LLAMA, Tables, job, start
from ranks.pool import Pool

from shardwise.mesh import Worker

SMALL = {"global_batch": 4, "steps": 1}


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
    assert "Experts(expert 1 of 2: experts 2:4 of 4, rows sent" in second["blocks.0.feed_forward.experts"]
    ring = {"data": 1, "context": 2, "attention": "ring"}
    first, _ = on_two(ranks, job(corpus, model={**LLAMA, "layers": 1}, train=SMALL, layout=ring))
    assert (
        "RingCausalAttention(context 0 of 2: keys and values passed around"
        in first["blocks.0.attention.mixing"]
    )
    assert "UnusedAttentionMask(context 0 of 2" in first["mask"]


def test_a_users_own_module_is_printed_so_too(ranks: Callable[[int], Pool], corpus: str) -> None:
    model = {
        **FAMILIES["llama"],
        "layers": 1,
        "module": f"{__file__.replace('test_printed_models', 'own_modules')}:{Tied.__name__}",
    }
    first, _ = on_two(ranks, job(corpus, model=model, train=SMALL, layout={"data": 1, "tensor": 2}))
    assert first["body.layers.0.mix.out"].startswith(
        "RowLinear(in_features=24, out_features=24, bias=False, tensor 0 of 2"
    )
    assert first["body.layers.0.mix"].startswith(
        "RegatheredModule(tensor 0 of 2"
    )  # whose forward is set on the instance
    assert first["head"].startswith("VocabularyLossHead(tensor 0 of 2: ids 0:130 of 259")
