"""Our training against plain torch: every family agrees, and a fault that all layouts share is seen there and
nowhere else."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks.jobs import ALONE
from torch import Tensor

from shardwise.config import Config, from_tables
from shardwise.errors import UserError
from shardwise.models import experts, transformer
from shardwise.models import rotary as our_rotary
from shardwise.optim import make_optimizer
from shardwise.proof import compare_layout, plain_torch
from shardwise.proof.diagnose import SHARED, Diagnosis, diagnose_shared
from shardwise.proof.proof_job import prepare_proof
from shardwise.proof.prove import prove
from shardwise.proof.verdict import Verdict, judge
from shardwise.train import build as building
from shardwise.train import evaluate, sources
from shardwise.train import steps as stepping

LLAMA = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 50, "vocabulary": 259,
"rope_theta": 100.0,
         "rope_scale": 4.0, "rope_original": 12}  # fmt: skip
QWEN = {**LLAMA, "rope_scale": 1.0, "qk_norm": True, "tied": True, "norm_epsilon": 1e-6}
GPT = {**LLAMA, "kv_heads": 4, "rope_scale": 1.0, "norm": "layer", "positions": "learned",
"activation": "gelu", "bias": True,
       "tied": True, "max_positions": 37}  # fmt: skip
MIXTRAL = {
    **LLAMA,
    "rope_scale": 1.0,
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 20,
    "balance_loss": 0.01,
}
SHARED_EXPERTS = {**MIXTRAL, "qk_norm": True, "shared_experts": 2, "router": "sigmoid", "routing_scale": 2.5,
                  "balance_bias": 0.001, "router_z_loss": 0.001}  # fmt: skip
QWEN2 = {**LLAMA, "rope_scale": 1.0, "bias": "qkv"}
MISTRAL = {**LLAMA, "rope_scale": 1.0, "window": 7}
GEMMA2 = {**LLAMA, "layers": 3, "rope_scale": 1.0, "norm": "rms+1", "post_norms": True, "activation": "geglu",
"tied": True,
          "scaled_embedding": True, "query_scalar": 5.0, "attention_softcap": 2.0, "logit_softcap": 3.0,
          "window": 7,
          "window_layers": "even"}  # fmt: skip
FAMILIES = {
    "gemma2": GEMMA2,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "llama": LLAMA,
    "qwen3": QWEN,
    "gpt2": GPT,
    "mixtral": MIXTRAL,
    "shared experts": SHARED_EXPERTS,
}
CLIPPED = {"clip": 0.1, "schedule": "cosine"}


def job(
    source: str, model: dict[str, Any], layout: dict[str, Any] | None = None, reset: bool = True, **train: Any
) -> Config:
    return from_tables(
        {
            "model": model,
            "data": {"source": source, "sequence_length": 24, "reset_attention": reset},
            "train": {"global_batch": 4, "micro_batch": 2, "learning_rate": 0.01, "warmup": 50, **train},
            "layout": layout or {"data": 1},
        }
    )


@dataclass(frozen=True)
class Compared:
    """One device of ours, in micro-batches, against one of two references."""

    verdict: Verdict
    shared: Diagnosis


def compared(config: Config, folder: Path, refer: Callable[..., Any], steps: int = 3) -> Compared:
    torch.set_num_threads(1)
    proof = prepare_proof(config, steps, "float64")[0]
    reference = refer(ALONE, proof.on_one_device("float64"), folder / "reference.pt")
    report = compare_layout.compare_with_reference(ALONE, proof, folder / "reference.pt", reference)
    verdict = judge([report], reference, None, "float64")
    return Compared(verdict, diagnose_shared(verdict, [report], reference.data))


@pytest.mark.parametrize(
    ("family", "train", "reset"),
    [
        ("llama", CLIPPED, True),
        ("llama", {"clip": False, "schedule": "wsd", "decay": 20}, False),
        ("qwen3", {"schedule": "linear", "final_learning_rate": 0.0}, True),
        ("qwen2", CLIPPED, True),
        ("mistral", CLIPPED, False),
        ("gemma2", CLIPPED, True),
        ("gemma2", {"schedule": "constant"}, False),
        ("gpt2", {"schedule": "wsd", "warmup": 0}, True),
        ("mixtral", {"schedule": "constant"}, False),
        ("shared experts", CLIPPED, True),
    ],
)
def test_every_family_trains_as_plain_torch_does(
    corpus: str, tmp_path: Path, family: str, train: dict[str, Any], reset: bool
) -> None:
    found = compared(
        job(corpus, FAMILIES[family], reset=reset, **train), tmp_path, compare_layout.write_plain_reference
    )
    assert found.verdict.passes, found.verdict.errors[0]
    assert found.verdict.errors[0].relative_error < 1e-11


@pytest.mark.parametrize("family", ["gpt2", "shared experts"])
def test_answers_are_learnt_as_in_plain_torch(conversations: str, tmp_path: Path, family: str) -> None:
    found = compared(
        job(conversations, FAMILIES[family], reset=False, **CLIPPED),
        tmp_path,
        compare_layout.write_plain_reference,
    )
    assert found.verdict.passes, found.verdict.errors[0]
    assert found.verdict.errors[0].relative_error < 1e-11


def test_plain_torch_reads_several_sources_in_the_order_of_training(corpus: str, tmp_path: Path) -> None:
    from shardwise.data import Dataset
    from shardwise.data.prepare import prepare

    (tmp_path / "more.txt").write_text("another source, " * 400)
    prompts = [{"prompt": "a" * (1 + 7 * n % 11), "completion": "b" * (1 + 5 * n % 30)} for n in range(300)]
    (tmp_path / "answers.jsonl").write_text(
        "\n".join(map(json.dumps, [*prompts, {"prompt": "a" * 50, "completion": "cut off"}]))
    )
    for name, source in (("more", "more.txt"), ("answers", "answers.jsonl")):
        prepare(tmp_path / source, "bytes", tmp_path / name, shard_tokens=1 << 10)
    weights = [2.0, 1.0, 1.5]
    paths = [corpus, str(tmp_path / "more"), str(tmp_path / "answers")]
    sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    data = {"sources": sources, "sequence_length": 40, "reset_attention": True}
    config = from_tables({"model": LLAMA, "data": data, "train": {"global_batch": 50, "seed": 7}})
    dataset = Dataset.open(config.data, config.train.seed)
    reader = plain_torch.Reader(
        config, [plain_torch.Text(stream.tokens.folder) for stream in dataset.streams], weights
    )
    for step in (1, 9):
        ours, own = dataset.sequences((step - 1) * 50, 50), reader.batch(step)
        for theirs, mine in zip(
            (ours.inputs, ours.targets, _same(ours.documents)), (*own[:2], _same(own[2])), strict=True
        ):
            assert np.array_equal(theirs, mine)
    held_out, own = dataset.held_out_rows(0, 20), reader.held_out(20)
    assert torch.equal(torch.from_numpy(held_out.inputs), own[0])
    assert torch.equal(torch.from_numpy(held_out.targets), own[1])


def _same(documents: Any) -> Any:
    """Which tokens of a row are of one document, however documents are told apart."""
    return np.asarray(documents[:, :, None] == documents[:, None, :])


# -- faults that all layouts share ---------------------------------------------------------------------------


def swapped_betas() -> AbstractContextManager[Any]:
    def make(named: Any, settings: Any, *more: Any) -> Any:
        return make_optimizer(named, settings.model_copy(update={"betas": settings.betas[::-1]}), *more)

    return patch.object(building, "make_optimizer", make)


def rotary_turned_the_other_way() -> AbstractContextManager[Any]:
    honest = our_rotary.Rotary.forward
    return patch.object(
        our_rotary.Rotary, "forward", lambda *arguments: (lambda cos, sin: (cos, -sin))(*honest(*arguments))
    )


def ignored_targets_in_the_divisor() -> AbstractContextManager[Any]:
    whole = lambda training, batch: torch.tensor(float(sum(part.targets.numel() for part in batch)))  # noqa: E731
    return patch.object(sources, "count_tokens", whole)


def decayed_norms() -> AbstractContextManager[Any]:
    def make(named: Any, settings: Any, *more: Any) -> Any:
        optimizer = make_optimizer(named, settings, *more)
        for group in optimizer.param_groups:
            group["weight_decay"] = settings.weight_decay
        return optimizer

    return patch.object(building, "make_optimizer", make)


def schedule_off_by_one() -> AbstractContextManager[Any]:
    honest = stepping.learning_rate
    return patch.object(stepping, "learning_rate", lambda train, step: honest(train, step - 1 or 1))


def epsilon_inside_the_root() -> AbstractContextManager[Any]:
    """sqrt(v + eps), which for a small gradient is another number than sqrt(v) + eps."""

    def update(optimizer: Any, lr: float, divide_by: Tensor, skip: Tensor) -> None:
        for group in optimizer.param_groups:
            beta1, beta2 = optimizer.settings.betas
            for weight in group["params"]:
                state = optimizer.state[weight]
                gradient = weight.grad / divide_by
                step = state["step"] = state.get("step", 0) + 1
                first = state["first"] = beta1 * state.get("first", 0.0) + (1 - beta1) * gradient
                second = state["second"] = beta2 * state.get("second", 0.0) + (1 - beta2) * gradient**2
                root = (second / (1 - beta2**step) + optimizer.settings.epsilon).sqrt()
                weight.data.mul_(1 - lr * group["weight_decay"]).sub_(lr * first / (1 - beta1**step) / root)

    return patch.object(stepping, "update", update)


def positions_from_one() -> AbstractContextManager[Any]:
    honest = transformer.Transformer._embed
    return patch.object(
        transformer.Transformer, "_embed", lambda self, inputs, positions: honest(self, inputs, positions + 1)
    )


def balance_over_tokens_of_the_batch() -> AbstractContextManager[Any]:
    """f and P as means over all sequences at once, which depends on what is in a batch."""

    def loss(shares: Tensor, counts: Tensor, sum_sequence: Any) -> Tensor:
        f = counts.sum(0) / counts.sum()
        return counts.shape[1] * (f * shares.sum(0)).sum()

    return patch.object(experts, "balance_loss", loss)


def targets_of_the_next_token_but_one() -> AbstractContextManager[Any]:
    from shardwise.data.dataset import Dataset, Rows

    honest = Dataset._rows

    def rows(self: Dataset, sources: Any, samples: Any) -> Rows:
        own = honest(self, sources, samples)
        own.targets[:, :-1] = own.targets[:, 1:].copy()
        return own

    return patch.object(Dataset, "_rows", rows)


def samples_in_file_order() -> AbstractContextManager[Any]:
    from shardwise.data import order

    return patch.object(order, "permute", lambda index, size, keys: index)


def an_evaluation_over_ignored_targets() -> AbstractContextManager[Any]:
    honest = evaluate.to_batch
    counted = lambda rows, device: replace(batch := honest(rows, device), valid=batch.targets.numel())  # noqa: E731
    return patch.object(evaluate, "to_batch", counted)


def loads_without_the_last_expert() -> AbstractContextManager[Any]:
    honest = experts.MixtureOfExperts._add_load
    return patch.object(
        experts.MixtureOfExperts,
        "_add_load",
        lambda self, counts: honest(self, counts * (torch.arange(4) < 3)),
    )


FORWARD, UPDATE = "the forward pass or the loss", "the update (learning rate, clipping, AdamW, decay)"
AFTER_STEP_1, AFTER_STEP_2 = (
    f"{UPDATE} of step {step}; --steps {step} shows of which weights" for step in (1, 2)
)
"""In the first step AdamW divides a gradient by itself, whatever the betas, and the schedule has no step
before it."""


@pytest.mark.parametrize(
    ("fault", "family", "named"),
    [
        (swapped_betas, "llama", AFTER_STEP_2),
        (rotary_turned_the_other_way, "llama", FORWARD),
        (ignored_targets_in_the_divisor, "llama", FORWARD),
        (decayed_norms, "llama", AFTER_STEP_1),
        (schedule_off_by_one, "llama", AFTER_STEP_2),
        (epsilon_inside_the_root, "llama", AFTER_STEP_1),
        (positions_from_one, "gpt2", FORWARD),
        (balance_over_tokens_of_the_batch, "mixtral", "the backward pass, or the losses of routers"),
        (targets_of_the_next_token_but_one, "qwen3", FORWARD),
        (an_evaluation_over_ignored_targets, "llama", "the evaluation"),
        (loads_without_the_last_expert, "shared experts", "the loads of experts"),
        (samples_in_file_order, "llama", "the rows of data that a step reads"),
    ],
)
def test_a_fault_that_all_layouts_share_is_seen_against_plain_torch_alone(
    corpus: str, tmp_path: Path, fault: Callable[[], AbstractContextManager[Any]], family: str, named: str
) -> None:
    config = job(corpus, FAMILIES[family], warmup=0, micro_batch=4)
    with fault():
        assert compared(config, tmp_path, compare_layout.write_reference).verdict.passes, (
            "the usual proof cannot see it"
        )
        found = compared(config, tmp_path, compare_layout.write_plain_reference)
    assert not found.verdict.passes
    (cause,) = found.shared.causes
    assert cause.what == f"{SHARED} {named}"


def test_the_weights_of_a_wrong_update_are_named(corpus: str, tmp_path: Path) -> None:
    with decayed_norms():
        found = compared(job(corpus, LLAMA), tmp_path, compare_layout.write_plain_reference, steps=1)
    (cause,) = found.shared.causes
    assert set(cause.parameters) == {"embedding.weight", "norm.weight"} | {
        f"blocks.{layer}.{norm}_norm.weight" for layer in range(2) for norm in ("attention", "feed_forward")
    }


@pytest.mark.full
def test_a_layout_is_proven_against_plain_torch(corpus: str) -> None:
    result = prove(job(corpus, SHARED_EXPERTS, {"tensor": 2, "data": 1}), steps=2, against="plain")
    assert result.verdict.passes, result.verdict.errors[0]
    assert result.to_json()["against"] == "plain"


def test_a_fault_of_the_layout_is_told_from_one_that_all_share(corpus: str) -> None:
    result = prove(
        job(corpus, LLAMA, {"tensor": 2, "data": 1}), steps=1, sabotage="drop-all-reduce", against="plain"
    )
    assert result.diagnosis is not None
    assert {cause.what for cause in result.diagnosis.causes} == {"missing reduction over tensor"}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{"data": 2, "zero": 3}, {"tensor": 2, "context": 2}, {"pipeline": 2, "data": 2}], ids=str
)
@pytest.mark.parametrize("preset", ["llama3-8b", "qwen3-0.6b", "gpt2", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_presets_on_layouts_agree_with_plain_torch(corpus: str, preset: str, layout: dict[str, Any]) -> None:
    result = prove(job(corpus, {"preset": preset}, layout, global_batch=8), against="plain")
    assert result.shrunk
    assert result.verdict.passes, result.verdict.errors[0]


@pytest.mark.parametrize(
    ("model", "dtype", "says"),
    [
        ({"module": "own.py:Own"}, "float64", "model.module"),
        (LLAMA, "bfloat16", "leave out --dtype bfloat16"),
    ],
)
def test_what_plain_torch_does_not_know_is_refused(
    corpus: str, model: dict[str, Any], dtype: Any, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        prove(job(corpus, model), dtype=dtype, against="plain")


def test_a_setting_that_is_new_to_plain_torch_is_refused(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_torch, "NUMBERS", plain_torch.NUMBERS - {"qk_norm"})
    plain_torch.check_known(job(corpus, LLAMA))
    with pytest.raises(UserError, match=r"does not know model.qk_norm = True"):
        plain_torch.check_known(job(corpus, QWEN))


def test_plain_torch_shares_no_code_with_what_it_is_held_against() -> None:
    tree = ast.parse(Path(plain_torch.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in imported if name.startswith("shardwise")} == {
        "shardwise.config",
        "shardwise.errors",
    }
