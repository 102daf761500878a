"""Parameter groups: factors on the learning rate and weight decays by pattern, as parameter groups of torch,
on every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers.cases import ONE, ZERO, check_sparse_rows
from ranks.jobs import ALONE, LLAMA, Tables, on_one_device, start, worst_difference
from ranks.layouts import EXACT, LAYOUTS, SOME_LAYOUTS, tables_of
from ranks.pool import Pool
from ranks.trained import Runs, check_held, check_sent
from torch import Tensor, nn

import shardwise as sw
from shardwise.config import Model, from_tables, read, to_toml
from shardwise.errors import ConfigError
from shardwise.files import parse_toml
from shardwise.mesh import Worker
from shardwise.models import Transformer, initialise
from shardwise.optim import make_optimizer, update
from shardwise.optimizers import Optimizer, from_table
from shardwise.plans import Plan, choose
from shardwise.proof.plain_torch import reference_optimizer
from shardwise.proof.prove import prove
from shardwise.train.build import restore, save
from shardwise.train.changes import changes
from shardwise.train.describe import describe_run
from shardwise.train.steps import steps

TABLES = ("embedding.weight", "positions.weight")
RATES = ((0.1, 1.0), (0.05, 3.7), (0.2, 1234.5))
GROUPS: dict[str, dict[str, float]] = {
    "*norm.weight": {"weight_decay": 0.4},
    "blocks.1.*": {"lr_factor": 0.3},
    "blocks.1.attention.*": {"lr_factor": 0.5, "weight_decay": 0.0},
    "embedding.weight": {"lr_factor": 0.0},
}
"""A norm of block 1 has the decay of the first pattern, and the factor of the second or third."""
TABLE: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.2},
    "sgd": {"momentum": 0.8, "weight_decay": 0.2},
    "lion": {"betas": (0.8, 0.9), "weight_decay": 0.2},
    "torch.optim.NAdam": {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2},
}
every_optimizer = pytest.mark.parametrize("name", TABLE)


def settings_of(name: str) -> Optimizer:
    return from_table({"name": name, "groups": GROUPS, **TABLE[name]})


def written_out(path: str, weight: Tensor) -> tuple[float, float]:
    """The decay and the factor of a weight, by hand."""
    decay = 0.2 if weight.ndim >= 2 and path not in TABLES else 0.0
    decay = 0.4 if path.endswith("norm.weight") else decay
    factor = 0.3 if path.startswith("blocks.1.") else 0.0 if path == "embedding.weight" else 1.0
    return (0.0, 0.5) if path.startswith("blocks.1.attention.") else (decay, factor)


def model_with_gradients() -> Transformer:
    model = Transformer(Model(**LLAMA)).double()
    initialise(model, 5)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


# -- one device ----------------------------------------------------------------------------------------------


@every_optimizer
def test_updates_are_those_of_parameter_groups_of_torch(name: str) -> None:
    """torch.optim.AdamW, SGD and NAdam, and for Lion the paper's algorithm."""
    ours, theirs = model_with_gradients(), model_with_gradients()
    gradients = {path: parameter.grad.clone() for path, parameter in theirs.named_parameters()}
    optimizer = make_optimizer(ours.named_parameters(), settings_of(name), embeddings=TABLES)
    groups = []
    for path, weight in theirs.named_parameters():
        decay, factor = written_out(path, weight)
        groups.append({"params": [weight], "weight_decay": decay, "factor": factor})
    reference = settings_of(name).reference(groups)
    assert reference is not None
    for lr, divisor in RATES:
        for path, parameter in ours.named_parameters():
            parameter.grad = gradients[path].clone()
        for path, parameter in theirs.named_parameters():
            parameter.grad = gradients[path] / divisor
        for group in reference.param_groups:
            group["lr"] = lr * group["factor"]
        reference.step()
        update(optimizer, lr, torch.tensor(divisor, dtype=torch.float64), ZERO)
    for (path, mine), truth in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        difference = float((mine.detach() - truth.detach()).abs().max() / truth.detach().abs().max())
        assert difference < 1e-14, path


@every_optimizer
def test_states_in_bfloat16_move_by_their_factor(name: str) -> None:
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = {path: nn.Parameter(torch.ones(512, dtype=dtype)) for path in ("a.bias", "b.bias")}
        table = {"name": name, "groups": {"b.*": {"lr_factor": 0.5}}}
        optimizer = make_optimizer(weights.items(), from_table(table))
        for _ in range(30):
            for weight in weights.values():
                weight.grad = torch.full((512,), 0.25, dtype=dtype)
            update(optimizer, 1e-3, ONE, ZERO)
        moved[dtype] = [float((weight.detach().double() - 1).mean()) for weight in weights.values()]
    assert moved[torch.bfloat16] == pytest.approx(moved[torch.float32], rel=0.1)
    assert moved[torch.float32][1] == pytest.approx(moved[torch.float32][0] / 2, rel=1e-3)


@every_optimizer
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_rows_of_a_sparse_gradient_are_updated_as_those_of_a_dense_one(name: str, shared: bool) -> None:
    if shared and not from_table({"name": name}).lock_free:
        pytest.skip("refused without a lock")
    groups = {"w*": {"lr_factor": 0.3, "weight_decay": 0.1}}
    check_sparse_rows(from_table({"name": name, "groups": groups}), shared)


def test_the_last_pattern_that_gives_a_setting_decides() -> None:
    settings = from_table(
        {"groups": {"a.*": {"lr_factor": 0.1}, "*.b": {"weight_decay": 0.0}, "a.b": {"lr_factor": 2}}}
    )
    assert settings.group_of("a.b", decays=True) == (0.0, 2)
    assert settings.group_of("a.c", decays=True) == (0.1, 0.1)
    assert settings.group_of("a.c", decays=False) == (0.0, 0.1)
    assert settings.group_of("x", decays=True) == (0.1, 1.0)


# -- every layout --------------------------------------------------------------------------------------------


def tables(corpus: str, name: str, layout: str, **train: Any) -> Tables:
    table = {key: list(value) if isinstance(value, tuple) else value for key, value in TABLE[name].items()}
    return tables_of(corpus, {"name": name, "groups": GROUPS, **table}, layout, **train)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_every_axis_trains_as_one_device_and_holds_and_sends_what_was_predicted(
    trained: Runs, corpus: str, layout: str
) -> None:
    job = tables(corpus, "adamw", layout)
    found = trained(job)
    assert worst_difference(found[0], on_one_device(job)) < EXACT
    check_held(found, job)
    check_sent(found, job)


@pytest.mark.parametrize(
    ("name", "layout", "against"),
    [
        ("adamw", "tensor, zero 3", "plain"),
        ("torch.optim.NAdam", "pipeline", "plain"),
        ("lion", "expert", "plain"),
        *(
            pytest.param("adamw", layout, against, marks=pytest.mark.full)
            for layout in LAYOUTS
            for against in ("one-device", "plain")
        ),
    ],
)
def test_verify_proves_it(corpus: str, name: str, layout: str, against: Any) -> None:
    found = prove(from_tables(tables(corpus, name, layout)), steps=2, against=against).to_json()
    assert found["pass"], found["faults"]
    assert found["worst"]["relative_error"] < EXACT


def test_the_reference_of_a_proof_has_the_groups_too(corpus: str) -> None:
    """It matches names by code of its own."""
    config = from_tables({**tables(corpus, "adamw", "zero 0"), "layout": {}})
    model = Transformer(config.model)
    weights = {path: weight.detach() for path, weight in model.named_parameters()}
    groups = reference_optimizer(config, weights).param_groups
    found = {id(group["params"][0]): (group["weight_decay"], group["factor"]) for group in groups}
    assert found == {id(weight): written_out(path, weight) for path, weight in weights.items()}


def test_a_checkpoint_goes_on_on_another_layout(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    first = {**tables(corpus, "adamw", "zero 3", steps=4), "checkpoint": {"folder": str(tmp_path)}}
    address = ranks(2).run(train_and_save, first)[0]
    for numbers in ranks(2).run(load_and_train, {**first, "layout": {"data": 1, "pipeline": 2}}, address):
        assert numbers == pytest.approx(on_one_device(first).losses[2:], rel=EXACT)


def train_and_save(worker: Worker, job: Tables) -> str:
    training = start(worker, job)
    addresses = [save(training) for step in steps(training) if step.step == 2]
    return addresses[0]


def load_and_train(worker: Worker, job: Tables, address: str) -> list[float]:
    training = start(worker, job)
    restore(training, address)
    return [step.loss for step in steps(training)]


def test_other_groups_after_a_resume_are_reported(corpus: str, tmp_path: Path) -> None:
    from shardwise.checkpoint import read_manifest

    job = {**tables(corpus, "adamw", "zero 0"), "layout": {}, "checkpoint": {"folder": str(tmp_path)}}
    training = start(ALONE, job)
    manifest = read_manifest(save(training))
    assert list(changes(manifest, training.config)) == []
    other = from_tables({**job, "optimizer": {**job["optimizer"], "groups": {"head.*": {"lr_factor": 0.5}}}})
    assert any("is now {'head.*': {'lr_factor': 0.5}}" in line for line in changes(manifest, other))


# -- the job -------------------------------------------------------------------------------------------------


def test_the_header_counts_the_weights_of_each_group(corpus: str) -> None:
    """The model has 5 blocks of 11 weights, an embedding, a norm and a head."""
    line = describe_run(start(ALONE, {**tables(corpus, "adamw", "zero 0"), "layout": {}}))["groups"]
    assert line == (
        "*norm.weight (21 weights): weight_decay 0.4; blocks.1.* (11 weights): lr_factor 0.3; "
        "blocks.1.attention.* (6 weights): lr_factor 0.5, weight_decay 0; embedding.weight (1 weight): "
        "lr_factor 0; 29 in no group"
    )


def test_groups_are_written_and_read_again_in_their_order(tmp_path: Path) -> None:
    optimizer = {"groups": GROUPS}
    config = from_tables({"data": {"source": "x"}, "optimizer": optimizer})
    again = from_tables(parse_toml(to_toml(config).encode(), "job"))
    assert list(again.optimizer.groups.items()) == list(GROUPS.items())
    plan = choose(config, 1)
    assert Plan.from_json(plan.to_json()) == plan
    path = tmp_path / "job.toml"
    path.write_text(
        '[data]\nsource = "x"\n[optimizer.groups]\n"head.*" = { lr_factor = 0.1 }\n'
        '[optimizer.groups."*.weight"]\nweight_decay = 0.0\n'
    )
    assert read(path).optimizer.groups == {"head.*": {"lr_factor": 0.1}, "*.weight": {"weight_decay": 0.0}}
    override = 'optimizer.groups={"norm.*" = {lr_factor = 2.0}}'
    assert read(path, [override]).optimizer.groups == {"norm.*": {"lr_factor": 2.0}}
    job = sw.Job.read(path, optimizer={"groups": {"norm.*": {"lr_factor": 2.0}}})
    assert job.config.optimizer.groups == {"norm.*": {"lr_factor": 2.0}}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"hed.*": {"lr_factor": 0.1}}, "'hed.*' matches the name of no weight, and * stands for any text"),
        ({"hed.*": {"lr_factor": 0.1}}, "near it are head.weight"),
        (
            {"head.*": {"rate": 0.1}},
            "'head.*' has the unknown key 'rate'; known are: lr_factor, weight_decay",
        ),
        ({"head.*": {}}, "'head.*' needs lr_factor or weight_decay, such as"),
        ({"head.*": 0.1}, "'head.*' needs lr_factor or weight_decay, such as"),
        (
            {"head.*": {"lr_factor": -1.0}},
            "'head.*', lr_factor = -1.0: input should be greater than or equal",
        ),
        ({"head.*": {"weight_decay": "no"}}, "'head.*', weight_decay = 'no': input should be a valid number"),
        (["head.*"], "give a table of patterns"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(groups: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"data": {"source": "x"}, "optimizer": {"groups": groups}})
    assert said in str(refusal.value)
