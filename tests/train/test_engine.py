"""Programs of users: they train what a loop in plain torch trains, on every layout, and survive; and what is
wrong in one gets a message."""

from __future__ import annotations

import io
import json
import math
import random
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks.jobs import ALONE, Tables, put_together
from ranks.pool import Pool
from safetensors.torch import load_file
from torch import Tensor, nn
from train.programs import BATCH, GROUPS, OPTIMIZERS, STEPS, Net, Points, Tied, loss

import shardwise as sw
from shardwise.checkpoint.state_key import StateKey
from shardwise.checkpoint.tensor_files import Contents
from shardwise.config import Config
from shardwise.config.read import from_tables
from shardwise.data.samples import Samples
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.models import build_program_module, use_factory, weights_without_memory
from shardwise.optimizers import from_table
from shardwise.plans import choose
from shardwise.train.build import Training, build
from shardwise.train.describe import describe_run
from shardwise.train.engine import Engine
from shardwise.train.evaluate import held_out_loss
from shardwise.train.program import Program
from shardwise.train.program_outputs import state_dict
from shardwise.train.program_source import described, load_program, make_program
from shardwise.train.program_state import check_can_be_saved, from_bytes, to_bytes
from shardwise.train.program_values import check_names_of_losses
from shardwise.train.steps import StepRecord, steps

PROGRAMS = Path(__file__).parent / "programs.py"
TRAIN = {"precision": "float64", "schedule": "constant", "warmup": 0, "seed": 3}


def tables_of(program: str, **sections: Any) -> Tables:
    tables: Tables = {
        "run": {"program": f"{PROGRAMS}:{program}", "device": "cpu"},
        "train": TRAIN,
        "layout": {},
    }
    return {**tables, **{name: {**tables.get(name, {}), **table} for name, table in sections.items()}}


def begin(worker: Worker, tables: Tables) -> tuple[Training, Program]:
    """The training of a program on this rank, before its first step."""
    config: Config = described(from_tables(tables))
    program = make_program(config)
    samples = program.begin().samples
    plan = choose(config, worker.world)
    return build(config, plan, worker, samples, program=program), program


def trained(worker: Worker, tables: Tables) -> tuple[list[StepRecord], dict[str, Tensor]]:
    """Train a program to its end; the records, and whole weights."""
    training, _ = begin(worker, tables)
    source = training.rank_driver.source(training)
    done = list(steps(training, source=source))
    source.finish()
    source.close()
    return done, put_together(dict(training.parallel.named_parameters()), worker.world)


def adamw_of_torch(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, foreach=False
    )


def in_plain_torch(
    function: Any = loss, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw_of_torch
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same training by hand: no engine, the whole batch at once. Only the order of the data is ours."""
    torch.set_num_threads(1)
    data, order = Points(), Samples(Points(), seed=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TRAIN["seed"])
        model = Net().double()
    optimizer = make(model)
    losses, norms = [], []
    for step in range(STEPS):
        chosen = [data[index] for index in order.indices(step * BATCH, BATCH)]
        batch = {key: torch.stack([each[key] for each in chosen]) for key in ("x", "y", "weight")}
        batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        total, items = function(model, batch)
        mean = total / items
        optimizer.zero_grad()
        mean.backward()
        norm = nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        for weight in model.parameters():
            weight.grad /= (norm / 0.5).clamp(min=1.0)  # torch's clipping adds 1e-6 to the norm
        optimizer.step()
        losses.append(mean.item())
        norms.append(norm.item())
    return losses, norms, {name: weight.detach() for name, weight in model.named_parameters()}


LAYOUTS: list[dict[str, int]] = [
    {"data": 1},
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 3},
    {"data": 4, "zero": 1},
    {"replica": 2, "data": 2, "zero": 2},
    {"tensor": 2, "data": 1},
    {"tensor": 2, "data": 2, "zero": 3},
    {"tensor": 4, "data": 1},
]


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    [
        pytest.param(
            layout, size, marks=[] if (index + (size or 0)) % 2 else pytest.mark.full, id=f"{layout}-{size}"
        )
        for index, layout in enumerate(LAYOUTS)
        for size in (None, 1)
    ],
)
def test_a_program_trains_what_a_loop_in_plain_torch_trains(
    ranks: Any, layout: dict[str, int], micro_batch: int | None
) -> None:
    """A weight of three counts three times, so micro-batches and devices have different numbers of items."""
    world = math.prod(layout.get(axis, 1) for axis in ("replica", "data", "tensor"))
    tables = tables_of("trains", layout=layout, train={"micro_batch": micro_batch} if micro_batch else {})
    losses, norms, weights = in_plain_torch()
    pool: Pool = ranks(world)
    for done, found in pool.run(trained, tables):
        assert [step.loss for step in done] == pytest.approx(losses, rel=1e-12)
        assert [step.gradient_norm for step in done] == pytest.approx(norms, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-11, atol=1e-13, msg=name)


def with_groups(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The class of torch, with the groups of the programs written out weight by weight."""
    kind, settings = OPTIMIZERS[name]
    groups = []
    for path, weight in model.named_parameters():
        decay = settings.get("weight_decay", 0.0) if weight.ndim == 2 else 0.0
        lr = 1e-3 if path.startswith("second") else 1e-2
        decay = 0.3 if path.endswith("bias") else 0.2 if path == "second.weight" else decay
        groups.append({"params": [weight], "lr": lr, "weight_decay": decay})
    if kind == "adamw":
        kind, settings = torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}
    return kind(groups, lr=1.0, **settings)


@pytest.mark.parametrize("layout", [{"data": 1}, {"data": 4, "zero": 3}, {"tensor": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_or_of_a_file_and_groups_train_what_plain_torch_trains(
    ranks: Any, name: str, layout: dict[str, int]
) -> None:
    losses, norms, weights = in_plain_torch(make=lambda model: with_groups(name, model))
    for done, found in ranks(math.prod(layout.values()) if "zero" not in layout else 4).run(
        trained, tables_of(name, layout=layout)
    ):
        assert [step.loss for step in done] == pytest.approx(losses, rel=1e-12)
        assert [step.gradient_norm for step in done] == pytest.approx(norms, rel=1e-12)
        for path, weight in weights.items():
            torch.testing.assert_close(found[path], weight, rtol=1e-11, atol=1e-13, msg=path)


@pytest.mark.parametrize("name", ["nadam", "own_sgd"])
def test_a_class_of_a_program_is_proven_and_survives_a_launch(tmp_path: Path, name: str) -> None:
    """Workers and the process that plans each find it by its name."""
    assert sw.verify(f"{PROGRAMS}:{name}", steps=2, layout={"tensor": 2, "data": 2, "zero": 3}).passes
    run = {"folder": str(tmp_path / "run"), "device": "cpu"}
    done = sw.launch(f"{PROGRAMS}:{name}", workers=2, layout={"data": 2, "zero": 2}, run=run)
    assert done.status == 0
    assert [step["step"] for step in done.metrics] == list(range(1, STEPS + 1))


NADAM = {"name": "torch.optim.NAdam", "groups": GROUPS, **OPTIMIZERS["nadam"][1]}


@pytest.mark.parametrize(
    ("job", "trained"),
    [
        ({}, NADAM),
        ({"weight_decay": 0.05}, {**NADAM, "weight_decay": 0.05}),
        ({"groups": {"last.*": {"lr_factor": 2.0}}}, {**NADAM, "groups": {"last.*": {"lr_factor": 2.0}}}),
        ({"name": "torch.optim.NAdam", "eps": 1e-5}, {**NADAM, "eps": 1e-5}),
        ({"name": "torch.optim.NAdam", "weight_decay": 0.0}, {**NADAM, "weight_decay": 0.0}),
        ({"name": "sgd", "momentum": 0.5}, {"name": "sgd", "momentum": 0.5}),
    ],
)
def test_the_optimizer_is_that_of_the_program_with_the_keys_of_the_job(
    job: dict[str, Any], trained: dict[str, Any]
) -> None:
    config = described(from_tables(tables_of("nadam", optimizer=job)))
    assert config.optimizer == from_table(trained)


def test_a_key_that_the_optimizer_of_the_program_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.epsilon: NAdam has no keyword 'epsilon'"):
        described(from_tables(tables_of("nadam", optimizer={"epsilon": 1e-5})))
    with pytest.raises(UserError, match=r"with the job's \[optimizer\], has 1 problem.*\n.*betas: Extra"):
        described(from_tables(tables_of("sgd", optimizer={"betas": (0.9, 0.9)})))


def test_processes_that_read_ahead_change_nothing(tmp_path: Path) -> None:
    losses = []
    for name in ("trains", "reads_ahead"):
        run = {"folder": str(tmp_path / name), "device": "cpu"}
        done = sw.launch(f"{PROGRAMS}:{name}", workers=2, layout={"data": 2}, run=run)
        losses.append([(step["loss"], step["data"]) for step in done.metrics])
    assert losses[0] == losses[1]


def test_losses_by_name_are_added_and_recorded_as_means(ranks: Any) -> None:
    for done, _ in ranks(2).run(trained, tables_of("named_losses", layout={"data": 2})):
        for step in done:
            assert set(step.losses) == {"items", "fit", "small"}
            assert step.losses["items"] == BATCH
            assert step.loss == pytest.approx(step.losses["fit"] + step.losses["small"], rel=1e-12)


def test_the_table_of_a_program_is_proven_on_the_tensor_axis() -> None:
    proof = sw.verify(f"{PROGRAMS}:trains", steps=2, layout={"tensor": 2, "data": 2, "zero": 2})
    assert proof.passes, proof
    assert proof.to_json()["worst"]["relative_error"] < 1e-12


@pytest.mark.parametrize("layout", [{"data": 2, "zero": 3}, {"tensor": 2, "data": 1}, {"data": 2}], ids=str)
def test_a_loss_may_use_methods_parts_and_weights_of_a_model_in_any_way(layout: dict[str, int]) -> None:
    """The proof also makes a step in bfloat16, in which a norm gets float inputs."""
    proof = sw.verify(f"{PROGRAMS}:has_a_token", steps=2, layout=layout)
    assert proof.passes, proof


def test_our_transformer_can_be_the_module_of_a_program() -> None:
    layout = {"tensor": 2, "data": 2, "zero": 3}
    assert sw.verify(f"{PROGRAMS}:makes_our_transformer", steps=2, layout=layout).passes


def test_a_table_that_names_no_module_is_refused(tmp_path: Path) -> None:
    text = PROGRAMS.read_text().replace('"norm": sw.whole()', '"none": sw.whole()')
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(UserError, match="'none', which is no module"):
        sw.verify(f"{tmp_path / 'wrong.py'}:trains", steps=2, layout={"tensor": 2, "data": 1})


def test_a_callback_of_a_program_is_called_on_the_main_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = sw.launch(f"{PROGRAMS}:has_a_callback", workers=2, layout={"data": 2}, run=folder_in(tmp_path))
    steps = [f"step {step['step']} {step['loss']}" for step in run.metrics]
    assert (tmp_path / "notes.txt").read_text().splitlines() == [*steps, "end"]


def small_job(**train: Any) -> Tables:
    return {
        "model": {"preset": "bytes-400k"},
        "data": {"source": str(PROGRAMS.parents[2] / "examples/shakespeare.txt"), "sequence_length": 32},
        "train": {"steps": 5, "global_batch": 4, **train},
        "run": {"device": "cpu"},
    }


def without_program(worker: Worker, tables: Tables) -> list[tuple[float, float]]:
    training = build(from_tables(tables), choose(from_tables(tables), worker.world), worker)
    return [(step.loss, step.gradient_norm) for step in steps(training)]


def with_program(worker: Worker, tables: Tables) -> list[tuple[float, float]]:
    return [(step.loss, step.gradient_norm) for step in trained(worker, tables)[0]]


@pytest.mark.parametrize("precision", ["float32", "float8"])
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "zero": 2},
        pytest.param({"tensor": 2, "data": 1}, marks=pytest.mark.full),
        {"pipeline": 2, "data": 1},
        pytest.param({"context": 2, "data": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_jobs_model_trains_through_the_engine_to_the_bit(
    ranks: Any, layout: dict[str, int], precision: str
) -> None:
    tables = {**small_job(precision=precision), "layout": layout}
    program = {**tables, "run": {**tables["run"], "program": f"{PROGRAMS}:of_the_job"}}
    assert ranks(2).run(with_program, program) == ranks(2).run(without_program, tables)


# Mistakes. Each is found before or at the first step, on one device.


def folder_in(tmp_path: Path) -> dict[str, str]:
    return {"folder": str(tmp_path / "run"), "device": "cpu"}


MISTAKES = {
    "adds_a_callback_late": "engine.add_callback comes before the loop over engine.batches",
    "returns_no_scalar": r"<lambda> returned a tensor of shape \(1,\) as loss. Return the loss summed over "
    "the items",
    "returns_a_mean": "the loss looks like a mean: .* Return the loss summed over the items of the batch, "
    "and their number",
    "returns_no_count": r"<lambda> returned a tensor of shape \(\). Return the loss summed",
    "counts_in_text": "<lambda> returned a str as the number of items",
    "uses_no_weight": "depends on no trained weight of the model",
    "has_few_samples": "the dataset has 5 samples, fewer than a global batch of 12",
    "calls_twice": "step 1: engine.forward_backward was called twice",
    "skips_a_batch": "step 3: the program asked for another batch before it used this one",
    "steps_without_gradients": r"step 1: engine.optim_step\(\) without gradients",
    "builds_outside": "last.bias got no gradient|got no gradient on rank 0.* Does the loss function use it",
    "leaves_a_weight_out": "norm2.weight got no gradient on rank 0.* Does the loss function use it",
    "ends_before_its_loop": r"the program ended before its first batch; call engine.prepare",
    "prepares_nothing": "the program has no model; call engine.prepare",
    "prepares_no_module": r"engine.prepare: the function returned a dict; it must return a torch.nn.Module",
    "has_samples_in_a_generator": "generator is no dataset; give one with __len__ and __getitem__, or one",
    "prepares_an_instance": "engine.prepare: got a Net; give the function that makes the model",
    "has_a_complex_weight": "the weight phase is complex, and weights are real numbers",
    "misspells_a_setting": "what the program asks for has 1 problem.*wd: Extra inputs are not permitted",
    "makes_an_optimizer": r"engine.optimizer: got an optimizer that is made already \(SGD\); give the name",
    "gives_a_class_that_is_nowhere": "Inner is at the top of no file, so workers cannot find it",
    "needs_a_closure": r"torch.optim.LBFGS': its step\(\) needs a closure",
    "gives_a_tensor": r"optimizer.eps = tensor\(.*: a Tensor cannot be a setting of a job",
    "misspells_a_group": "'lost.\\*' matches the name of no weight.*near it are last.",
    "groups_a_frozen_weight": "'teacher.\\*' matches frozen weights only",
    "fails_at_once": "the program failed before its first batch:.*KeyError: 'data'",
    "evaluates_nothing": "engine.evaluate: the dataset is empty",
    "returns_what_is_outside": "engine.prepare: the Net that the function returned is that of an earlier "
    "call.*build it inside of the function, or return copy.deepcopy",
    "returns_what_it_has_built": "the Net that the function returned is that of an earlier call",
    "returns_from_a_cache": "the Net that the function returned is that of an earlier call",
    "wraps_what_is_outside": r"engine.prepare: base \(Net\) of the WithHead that the function returned is "
    "that of an earlier call.*or put copy.deepcopy",
    "shares_a_weight": "the weight 0.weight of the Sequential that the function returned is that of an",
    "keeps_a_module_in_state": r"engine.state\['net'\] is a Net, which a checkpoint cannot hold; keep what "
    r"its state_dict\(\) returns",
    "keeps_a_date_in_state": r"engine.state\['best'\]\[1\]\['when'\] is a date, which a checkpoint cannot "
    "hold; keep numbers, texts, tensors",
    "goes_on_after_the_end": "engine.forward_backward got a batch of another step",
    "prepares_twice": "engine.prepare was called twice; several models are one module with several parts",
    "chooses_two_optimizers": "engine.optimizer was called twice; .*groups={'encoder",
    "loops_over_two_datasets": "engine.batches was called twice.*put several datasets into one",
    "asks_for_a_second_dataset_in_its_loop": "engine.batches was called twice.*put several datasets into one",
    "loops_over_epochs": r"has made all steps of the run. For several epochs say .*epochs=3\)",
    "names_a_loss_items": "step 1: the loss function named a loss 'items', .* for example 'items_term'",
    "names_a_loss_seconds": "step 1: the loss function named a loss 'seconds'",
    "names_a_loss_loss_beside_another": "step 1: the loss function named a loss 'loss'",
    "logs_a_step": r"engine.log\(step=…\): each event has something of this name already",
    "is_async": "the program is async, so nothing of it has run; write def",
    "is_a_generator": "the program is a generator, so nothing of it has run; write it without yield",
    "takes_no_argument": r"takes_no_argument\(\) takes 0 positional arguments .* as in def program\(engine\)",
    "takes_two_arguments": "missing 1 required positional argument: 'lr'; a program is called with the",
    "prepares_a_class_with_arguments": "engine.prepare: Linear is called without arguments, and missing a "
    r"required argument: 'in_features'; .*engine.prepare\(lambda: Linear\(",
}


@pytest.mark.parametrize("program", MISTAKES)
def test_a_mistake_in_a_program_gets_one_message(program: str) -> None:
    with pytest.raises(UserError, match=f"(?s){MISTAKES[program]}"):
        trained(ALONE, tables_of(program, train={"precision": "float32"}))


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        (Points(), {"epochs": 0}, "engine.batches: epochs=0: give how often to read the dataset"),
        (Points(), {"epochs": -1}, "engine.batches: epochs=-1: give how often"),
        (Points(), {"epochs": "2"}, "engine.batches: epochs='2': give how often"),
        (Points(), {"steps": 3, "epochs": 2}, "steps=3 and epochs=2 both say how long to train; leave one"),
        (Points(), {"workers": -1}, "engine.batches: workers=-1: give the number of processes"),
        (Points(), {"workers": "2"}, "engine.batches: workers='2': give the number of processes"),
        (Points(0), {"steps": 5}, "engine.batches: the dataset is empty: Points has no samples"),
        ([], {}, "engine.batches: the dataset is empty: list has no samples"),
    ],
)
def test_data_that_cannot_be_read_as_a_program_asks_are_refused(
    dataset: object, settings: dict[str, Any], message: str
) -> None:
    def function(engine: sw.Engine) -> None:
        engine.prepare(Net)
        next(engine.batches(dataset, global_batch=BATCH, **settings))

    program = Program(from_tables(tables_of("trains")), lambda program: function(Engine(program)))
    with pytest.raises(UserError, match=re.escape(message)):
        program.begin()


@pytest.mark.parametrize("given", [{"epochs": 2}, {"collate": list}, {"workers": 2}, {"sequences": ("x",)}])
def test_settings_of_a_dataset_are_refused_without_one(given: dict[str, Any]) -> None:
    tables = {**small_job(), "run": {"program": f"{PROGRAMS}:of_the_job"}}

    def function(engine: sw.Engine) -> None:
        engine.batches(**given)

    program = Program(from_tables(tables), lambda program: function(Engine(program)))
    with pytest.raises(UserError, match=f"engine.batches: {next(iter(given))}= is for a dataset of the"):
        program.begin()


def test_a_single_loss_may_be_named_loss() -> None:
    check_names_of_losses(("loss",), 1)
    check_names_of_losses(("fit", "small"), 1)


@pytest.mark.parametrize("driver", ["by-speed", "server", "hogwild"])
def test_drivers_that_cannot_run_programs_are_refused_with_other_problems(driver: str) -> None:
    refused = (
        rf"(?s)problems:.*train.driver = '{driver}': cannot run a program \(run.program\); leave "
        "train.driver out, or use one of 'synchronous', 'local'"
    )
    with pytest.raises(UserError, match=refused):
        from_tables(tables_of("trains", train={"driver": driver, "clip": -1.0}))
    assert from_tables(tables_of("trains", train={"driver": "local"}, layout={"data": 1})).train.clip == 1.0


def test_a_sample_of_text_is_refused_where_the_program_brings_model_or_data() -> None:
    sample = {"observe": {"sample": "To be"}}
    run = {"program": f"{PROGRAMS}:of_the_job"}
    with pytest.raises(UserError, match=r"observe.sample: has no effect with the model or the dataset of a"):
        from_tables({**tables_of("trains"), **sample})
    with pytest.raises(UserError, match=r"observe\.sample"):
        from_tables({"model": small_job()["model"], "run": run, **sample})
    with pytest.raises(UserError, match=r"observe\.sample"):
        from_tables({"data": small_job()["data"], "run": run, **sample})
    assert from_tables({**small_job(), "run": run, **sample}).observe.sample == "To be"


def test_settings_that_a_program_replaces_are_named_in_the_header() -> None:
    train = {"clip": 0.1, "evaluate_every": 2, "evaluate_sequences": 8}
    training, program = begin(ALONE, tables_of("trains", train=train))
    program.leave()
    named = describe_run(training)["no effect"]
    assert "train.clip: a program limits gradients with engine.clip_grad_norm" in named
    assert "train.evaluate_every: the program evaluates with engine.evaluate" in named
    assert "train.evaluate_sequences: the program evaluates with engine.evaluate" in named
    assert "held_out" not in named
    training, program = begin(ALONE, tables_of("trains"))
    program.leave()
    assert "engine." not in describe_run(training).get("no effect", "")


def test_a_model_of_a_program_on_the_jobs_data_is_not_evaluated_as_the_jobs() -> None:
    job = small_job()
    tables = {**job, "run": {"device": "cpu", "program": f"{PROGRAMS}:reads_the_data_of_the_job"}}
    del tables["model"], tables["train"]
    training, _ = begin(ALONE, tables)
    source = training.rank_driver.source(training)
    assert len(list(steps(training, source=source))) == 2
    source.finish()
    source.close()
    assert training.text.held_out_count > 0
    assert held_out_loss(training) is None


def test_a_buffer_of_the_samples_of_one_device_is_refused(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="the buffer mean differs between rank 0 and rank 1"):
        ranks(2).run(trained, tables_of("has_a_buffer_of_its_samples", layout={"data": 2}))


def test_a_weight_that_rests_in_a_step_is_refused_where_gradients_wait_for_it(ranks: Any) -> None:
    """DDP would sum no gradient of that step, and say so in the next one only."""
    alone, weights = trained(ALONE, tables_of("rests_a_head"))
    for zero in (1, 3):
        layout = {"data": 2, "zero": zero}
        for done, found in ranks(2).run(trained, tables_of("rests_a_head", layout=layout)):
            assert [step.loss for step in done] == pytest.approx([step.loss for step in alone], rel=1e-12)
            torch.testing.assert_close(found, weights, rtol=1e-11, atol=1e-13)
    message = "step 2: other.* got no gradient in the last micro-batch. With layout.zero"
    with pytest.raises(AssertionError, match=message):
        ranks(2).run(trained, tables_of("rests_a_head", layout={"data": 2, "zero": 0}))


def test_a_scalar_weight_is_refused_with_zero_alone(ranks: Any) -> None:
    with pytest.raises(UserError, match="scale is a parameter without a dim, which cannot be sharded"):
        sw.verify(f"{PROGRAMS}:has_a_scalar", steps=1, layout={"data": 2, "zero": 3})
    ranks(2).run(trained, tables_of("has_a_scalar", layout={"data": 2, "zero": 0}))


def test_losses_are_summed_by_name_in_whatever_order_a_rank_has_them(ranks: Any) -> None:
    right, swapped = (
        ranks(2).run(trained, tables_of(name, layout={"data": 2}))
        for name in ("named_losses", "returns_names_in_another_order")
    )
    for done, found in zip(right[0][0], swapped[0][0], strict=True):
        assert found.losses == pytest.approx(done.losses, rel=1e-12)


@pytest.mark.full  # it waits for half a minute
def test_other_names_of_losses_on_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss function returned fit(, small)? on worker [01], and"):
        sw.launch(
            f"{PROGRAMS}:returns_other_names_on_one_rank",
            workers=2,
            layout={"data": 2},
            run=folder_in(tmp_path),
        )


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "zero": 3}], ids=str)
def test_a_loss_may_use_gradients(layout: dict[str, int]) -> None:
    proof = sw.verify(f"{PROGRAMS}:needs_gradients_in_its_loss", steps=2, layout=layout)
    assert proof.passes, proof


def test_a_model_that_was_built_outside_is_refused_before_anything_happens_to_it() -> None:
    net = Net()
    before = {name: weight.clone() for name, weight in net.state_dict().items()}
    use_factory(lambda: net)
    with weights_without_memory():
        build_program_module()
    with weights_without_memory(), pytest.raises(UserError, match="is that of an earlier call"):
        build_program_module()
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_a_model_may_be_a_copy_and_share_what_has_no_weights() -> None:
    done, _ = trained(ALONE, tables_of("copies_a_model", train={"precision": "float32"}))
    assert len(done) == STEPS


def test_what_a_program_draws_before_its_loop_is_the_same_each_time_it_is_entered() -> None:
    """A worker that survived a fault has drawn more than a new one."""
    config, drawn = from_tables(tables_of("splits_at_random")), []
    for _ in range(2):
        random.random()
        np.random.rand()
        torch.rand(1)
        program = make_program(config)
        program.begin()
        drawn.append(program.state["drawn"])
        program.leave()
    assert drawn[0] == drawn[1]


def test_a_program_that_is_described_leaves_the_random_numbers_of_its_process_alone() -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    described(from_tables(tables_of("splits_at_random")))
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_random_augmentation_is_the_same_on_every_layout(ranks: Any) -> None:
    expected, _ = trained(ALONE, tables_of("adds_noise", train={"micro_batch": 2}))
    for layout in ({"data": 2, "zero": 3}, {"tensor": 2, "data": 1}):
        done, _ = ranks(2).run(trained, tables_of("adds_noise", layout=layout))[0]
        assert [step.loss for step in done] == pytest.approx([step.loss for step in expected], rel=1e-11)


def test_numbers_and_arrays_of_numpy_are_saved_and_come_back_as_such() -> None:
    shared = [1, 2]
    state = {
        "mean": np.mean([0.25, 0.5]),
        "flag": np.bool_(True),
        "counts": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        "nested": OrderedDict(a=(np.float32(0.5), None, b"x", {1, 2}), b=shared, c=shared),
        "weights": torch.arange(3.0),
        "complex": 1j,
    }
    found = from_bytes(to_bytes(state))
    for name in ("mean", "flag"):
        assert type(found[name]) is type(state[name])
        assert found[name] == state[name]
    assert found["counts"].dtype == np.int32
    np.testing.assert_array_equal(found["counts"], state["counts"])
    found["counts"] += 1  # it can be written to
    assert type(found["nested"]["a"][0]) is np.float32
    assert found["nested"] == state["nested"]
    assert found["nested"]["b"] is found["nested"]["c"]
    assert torch.equal(found["weights"], state["weights"])  # type: ignore[arg-type]
    check_can_be_saved("engine.state", state)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"names": np.array(["a"])}, r"s\['names'\] is a numpy ndarray.* of the dtype <U1; keep a list"),
        ([np.str_("a")], r"s\[0\] is a numpy str_, .*keep the number or text of Python that its item\(\)"),
        ({(1, Path("x")): 1}, r"the key \(1, .*\) of s\[1\] is a P\w+Path, which a checkpoint cannot hold"),
        (len, "s is a builtin_function_or_method, which a checkpoint cannot hold; keep numbers, texts"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        check_can_be_saved("s", value)
    assert "Weights only" not in str(raised.value)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "returns_early_on_one_rank",
            "returned on worker 1 after step 2 of 6. Every worker has to",
        ),
        ("raises_on_one_rank", "programs.py, line [0-9]+, in raises_on_one_rank: KeyError: 'lost sample'"),
        pytest.param(
            "evaluates_on_one_rank",
            "worker 1 called engine.evaluate after step 1, and 1 worker did not",
            marks=pytest.mark.full,  # it waits for half a minute
        ),
    ],
)
def test_what_one_rank_does_alone_ends_all(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        sw.launch(
            f"{PROGRAMS}:{program}",
            workers=2,
            layout={"data": 2},
            run=folder_in(tmp_path),
        )
    if program == "raises_on_one_rank":
        assert str(raised.value).count('raise KeyError("lost sample")') == 1, "the traceback is shown once"


def test_any_rank_may_end_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = sw.launch(
        f"{PROGRAMS}:stops_on_one_rank",
        workers=2,
        layout={"data": 2},
        run={"folder": str(folder), "device": "cpu"},
    )
    assert run.status == 0
    assert [step["step"] for step in run.metrics] == [1, 2, 3]
    assert [event["ended_after"] for event in run.events if event["event"] == "log"] == [3]
    assert (tmp_path / "run/checkpoints/step-3").is_dir()


def state_of(folder: Path) -> Any:
    """The program's own values in the newest checkpoint."""
    newest = max(folder.glob("checkpoints/step-*"), key=lambda path: int(path.name.partition("-")[2]))
    saved = Contents.open(newest).read(StateKey.program())
    return torch.load(io.BytesIO(bytes(saved.numpy())), weights_only=True)["state"]


STEPS_OF_DRILL = 160
"""On a fast machine, half a second of steps must follow the fault."""


@pytest.mark.full
def test_a_killed_program_goes_on_to_the_same_bits_its_own_values_too(tmp_path: Path) -> None:
    drill = sw.drill(
        f"{PROGRAMS}:counts_in_state",
        faults="kill",
        count=1,
        workers=2,
        layout={"data": 2, "zero": 2},
        train={"steps": STEPS_OF_DRILL},
        checkpoint={"every": 7},
        run=folder_in(tmp_path),
    )
    assert drill.passes, drill
    undisturbed, drilled = (state_of(tmp_path / "run" / name) for name in ("undisturbed", "drilled"))
    assert undisturbed == drilled
    assert drilled["seen"] == list(range(1, STEPS_OF_DRILL + 1))
    metrics = [json.loads(line) for line in (tmp_path / "run/drilled/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["logged"]["mean"] == pytest.approx(fmean(step["loss"] for step in metrics))


def leaves(worker: Worker, tables: Tables, path: str) -> dict[str, Any]:
    """What a program can take with it."""
    training, program = begin(worker, tables)
    source = training.rank_driver.source(training)
    done = list(steps(training, source=source))
    whole = put_together(dict(training.parallel.named_parameters()), worker.world)
    program.export(path)
    means = program.evaluate(loss, Samples(Points(31)))
    state = state_dict(training)
    source.close()
    return {
        "weights": whole,
        "evaluated": means["loss"],
        "names": sorted(state["optimizer"]),
        "steps": len(done),
    }


def test_weights_leave_as_a_file_and_evaluation_is_that_of_the_whole_dataset(
    ranks: Any, tmp_path: Path
) -> None:
    """31 samples do not divide over the devices."""
    path = str(tmp_path / "weights.safetensors")
    layout = {"data": 2, "tensor": 2, "zero": 3}
    found = ranks(4).run(leaves, tables_of("trains", layout=layout, train={"micro_batch": 2}), path)
    model = Net().double()
    model.load_state_dict(load_file(path))
    data = Points(31)
    total = sum(
        F.cross_entropy(model(data.x[i : i + 1].double()), data.y[i : i + 1]) * float(data[i]["weight"])
        for i in range(31)
    )
    mean = total.item() / sum(float(data[i]["weight"]) for i in range(31))
    for rank in found:
        assert rank["evaluated"] == pytest.approx(mean, rel=1e-12)
        assert rank["names"] == sorted(name for name, _ in model.named_parameters())
        for name, weight in model.named_parameters():
            torch.testing.assert_close(rank["weights"][name], weight.detach(), rtol=0, atol=0)


def exported(worker: Worker, tables: Tables, path: str) -> None:
    training, program = begin(worker, tables)
    source = training.rank_driver.source(training)
    list(steps(training, source=source))
    program.export(path)
    source.close()


def test_a_tied_weight_leaves_under_each_of_its_names(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "weights.safetensors")
    ranks(2).run(exported, tables_of("ties_weights", layout={"data": 2, "zero": 3}), path)
    model = Tied().double()
    model.load_state_dict(load_file(path))
    assert model.outer.weight is model.inner.weight


def names_taken(worker: Worker, tables: Tables) -> tuple[set[str], bool]:
    """The names that a program takes from its model, and whether the tied ones are the same tensor."""
    training, _ = begin(worker, tables)
    taken = state_dict(training)["model"]
    return set(taken), taken["outer.weight"] is taken["inner.weight"]


def test_a_tied_weight_is_in_the_state_dict_under_each_of_its_names(ranks: Any) -> None:
    """A plain model can therefore load what `torch.distributed.checkpoint` has saved."""
    for names, are_one in ranks(2).run(names_taken, tables_of("ties_weights", layout={"data": 2, "zero": 3})):
        assert names == set(Tied().state_dict())
        assert are_one


def test_a_program_in_a_package_may_import_relatively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    inner = tmp_path / "pkg_of_programs" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "rate.py").write_text("RATE = 0.5")
    (inner / "beside.py").write_text("BESIDE = 2")
    (inner / "train.py").write_text(
        "from ..rate import RATE\nfrom beside import BESIDE\n\n\n"
        "def program(engine):\n    return RATE, BESIDE\n"
    )
    function = load_program(f"{inner / 'train.py'}:program")
    assert function(None) == (0.5, 2)  # type: ignore[arg-type]
    assert function.__module__ == "pkg_of_programs.inner.train"


def test_a_program_in_a_folder_with_the_name_of_a_package_of_python_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "json"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError")
    (folder / "train.py").write_text("def program(engine):\n    return 1\n")
    assert load_program(f"{folder / 'train.py'}:program")(None) == 1  # type: ignore[arg-type]


def test_axes_that_a_program_cannot_use_are_refused(tmp_path: Path) -> None:
    for axis, why in (
        ("pipeline", "names no `blocks` to cut into stages"),
        ("context", "it is not known which parts of a batch are sequences"),
    ):
        with pytest.raises(UserError, match=re.escape(f"layout.{axis} = 2") + f".*{why}"):
            sw.verify(f"{PROGRAMS}:trains", layout={axis: 2, "data": 1})


def test_a_file_without_its_function_is_told_how_to_name_a_program() -> None:
    with pytest.raises(UserError, match=r"programs.py: a program is named with its function, for example"):
        sw.verify(PROGRAMS)


def test_the_planner_says_that_it_cannot_count_a_program() -> None:
    with pytest.raises(UserError, match=r"run.program: the planner .* cannot count the model of a program"):
        sw.plan(f"{PROGRAMS}:trains", cluster="h100x8")


def test_a_function_inside_of_another_is_sent_to_the_workers(tmp_path: Path) -> None:
    rate = 0.5

    def program(engine: sw.Engine) -> None:
        engine.prepare(Net)
        engine.optimizer("sgd", lr=rate)
        for batch in engine.batches(Points(), global_batch=BATCH, steps=2):
            engine.forward_backward(loss, batch)
            engine.optim_step()

    run = sw.launch(
        program, workers=2, layout={"data": 2}, run={"folder": str(tmp_path / "run"), "device": "cpu"}
    )
    assert run.metrics[-1]["step"] == 2


@pytest.mark.full
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:

    script = tmp_path / "script.py"
    script.write_text(
        "import shardwise as sw\ndef program(engine):\n    pass\nsw.launch(program, workers=2)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "script.py calls shardwise when it is imported" in last
    assert 'if __name__ == "__main__":' in last
