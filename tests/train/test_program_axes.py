"""Programs on the axes that split a model in depth or along its sequences: they train what a loop in plain
torch trains."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import Tables, put_together
from safetensors.torch import load_file
from torch import Tensor, nn
from train.sequence_programs import BATCH, STEPS, Language, Sums, loss

import shardwise as sw
from shardwise.config.read import from_tables
from shardwise.data.samples import Samples
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.train.build import build
from shardwise.train.program_source import described, make_program
from shardwise.train.steps import steps

PROGRAMS = Path(__file__).parent / "sequence_programs.py"
SEED = 3
LAYOUTS: list[dict[str, Any]] = [
    {"pipeline": 2, "data": 1},
    {"pipeline": 2, "data": 1, "schedule": "interleaved"},
    {"pipeline": 2, "data": 1, "schedule": "zbv"},
    {"pipeline": 2, "data": 2, "zero": 3},
    {"pipeline": 2, "tensor": 2, "data": 1, "zero": 1},
    {"context": 2, "data": 1},
    {"context": 2, "data": 2, "zero": 3},
    {"context": 2, "attention": "ulysses", "tensor": 2, "data": 1},
    {"pipeline": 2, "context": 2, "data": 1, "schedule": "1f1b"},
]
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"data": 1},
    {"data": 2, "expert": 2},
    {"data": 4, "expert": 2, "zero": 3},
    {"tensor": 2, "data": 1, "expert": 2},
    {"context": 2, "data": 2, "expert": 4, "zero": 2},
    {"pipeline": 2, "data": 2, "expert": 2},
]


@functools.cache
def in_plain_torch(experts: int) -> tuple[list[float], list[float], dict[str, Tensor], float]:
    """The same training by hand, the whole batch at once; only the order of the data is ours."""
    torch.set_num_threads(1)
    data, order = Sums(), Samples(Sums(), seed=SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Language(experts=experts).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        parts, items = loss(model, stacked([data[index] for index in order.indices(step * BATCH, BATCH)]))
        mean = sum(parts.values()) / items
        optimizer.zero_grad()
        mean.backward()
        norm = nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        for weight in model.parameters():
            weight.grad /= (norm / 0.5).clamp(min=1.0)
        optimizer.step()
        losses.append(mean.item())
        norms.append(norm.item())
    parts, items = loss(model, stacked([Sums(7)[index] for index in range(7)]))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return losses, norms, weights, (parts["fit"] / items).item()


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batch that the collate function makes, with positions."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}
    return {**batch, "positions": torch.arange(batch["x"].shape[1])}


def trained(
    worker: Worker, tables: Tables, path: str
) -> tuple[list[tuple[float, float]], dict[str, Tensor], float]:
    """Train on this rank: loss and norm of each step, whole weights, and the last evaluation."""
    config = described(from_tables(tables))
    program = make_program(config)
    samples = program.begin().samples
    training = build(config, choose(config, worker.world), worker, samples, program=program)
    source = training.rank_driver.source(training)
    done = [(step.loss, step.gradient_norm) for step in steps(training, source=source)]
    program.export(path)
    source.finish()
    source.close()
    weights = put_together(dict(training.parallel.named_parameters()), worker.world)
    return done, weights, program.state["evaluated"]


@pytest.mark.parametrize(
    ("program", "experts", "layout"),
    [
        pytest.param(program, experts, layout, id=f"{program}-{layout}", marks=marks)
        for program, experts, layouts in (("trains", 0, LAYOUTS), ("trains_experts", 4, EXPERT_LAYOUTS))
        for index, layout in enumerate(layouts)
        for marks in [[] if index % 2 else [pytest.mark.full]]
    ],
)
def test_a_program_on_this_layout_trains_what_a_loop_in_plain_torch_trains(
    ranks: Any, tmp_path: Path, program: str, experts: int, layout: dict[str, Any]
) -> None:
    train = {"precision": "float64", "schedule": "constant", "warmup": 0, "seed": SEED, "micro_batch": 2}
    run = {"program": f"{PROGRAMS}:{program}", "device": "cpu"}
    path = tmp_path / "weights.safetensors"
    world = math.prod(layout.get(axis, 1) for axis in ("data", "tensor", "pipeline", "context"))
    losses, norms, weights, evaluated = in_plain_torch(experts)
    for done, found, mean in ranks(world).run(
        trained, {"run": run, "train": train, "layout": layout}, str(path)
    ):
        assert [loss for loss, _ in done] == pytest.approx(losses, rel=1e-12)
        assert [norm for _, norm in done] == pytest.approx(norms, rel=1e-12)
        assert mean == pytest.approx(evaluated, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12, msg=name)
    exported = load_file(path)
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(exported[name], weight, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("program", [pytest.param("trains", marks=pytest.mark.full), "trains_experts"])
def test_all_axes_of_a_program_are_proven_in_one_product(program: str) -> None:
    layout = {"pipeline": 2, "context": 2, "tensor": 2, "data": 1}
    if program == "trains_experts":
        layout["expert"] = 4
    proof = sw.verify(f"{PROGRAMS}:{program}", steps=2, layout=layout, train={"micro_batch": 2})
    assert proof.passes, proof
    assert proof.to_json()["world"] == 8


@pytest.mark.full
def test_a_program_on_stages_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    drill = sw.drill(
        f"{PROGRAMS}:trains",
        faults="kill",
        count=1,
        workers=2,
        layout={"pipeline": 2, "data": 1},
        train={"steps": 80},
        checkpoint={"every": 7},
        run={"folder": str(tmp_path / "run"), "device": "cpu"},
    )
    assert drill.passes, drill


MISTAKES = [
    ("calls_twice", {"pipeline": 2}, "called the model twice; with layout.pipeline a loss function calls"),
    ("calls_no_model", {"pipeline": 2}, "did not call the model; with layout.pipeline"),
    ("names_no_blocks", {"pipeline": 2}, "the sharding table of Language names no `blocks`"),
    ("names_no_blocks", {"context": 2}, "names no modules as `mixing`"),
    ("leaves_a_weight_empty", {"data": 2}, "Language: the weight norm.weight begins with NaN, or its"),
    ("trains", {"data": 2, "expert": 2}, "layout.expert = 2: the model has no experts"),
    ("trains_experts", {"data": 8, "expert": 8}, "does not divide model.experts = 4"),
    ("has_no_sequence_parallel_experts", {"tensor": 2}, "needs sequence_parallel=True"),
    ("hides_weights_of_experts", {"data": 2, "expert": 2}, "layers has weights in modules of its own"),
    ("trains", {"pipeline": 8}, "model.layers = 4 makes at most 4 stages"),
    ("names_no_sequences", {"context": 2}, "name them, as in engine.batches(..., sequences="),
    ("names_other_sequences", {"context": 2}, "the batch's entry 'z' is missing; it has x, y"),
    ("has_positions_already", {"context": 2}, "the batch has an entry 'positions'"),
    ("has_odd_sequences", {"context": 2}, "a sequence of 15 tokens cannot be shared"),
    ("has_other_lengths", {"pipeline": 2}, "With layout.pipeline all micro-batches have one shape"),
]


@pytest.mark.parametrize(("program", "layout", "message"), MISTAKES, ids=lambda each: str(each)[:30])
def test_a_mistake_gets_a_message(tmp_path: Path, program: str, layout: dict[str, int], message: str) -> None:
    run = {"folder": str(tmp_path / "run"), "device": "cpu"}
    with pytest.raises(UserError, match=re.escape(message)):
        sw.launch(
            f"{PROGRAMS}:{program}",
            workers=math.prod(layout.values()) // layout.get("expert", 1),
            layout={"data": 1, **layout},
            train={"micro_batch": 2},
            run=run,
        )
