"""A run that stops and goes on is the run that never stopped: to the last bit on the same layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, FAMILIES, LLAMA, Tables, Trained, difference, job, put_together, start, weights
from ranks.pool import Pool
from torch import Tensor

from shardwise.checkpoint import checkpoints, read_manifest, step_of
from shardwise.checkpoint.save import Saved, state_of
from shardwise.checkpoint.state_key import StateKey
from shardwise.config import Layout
from shardwise.data.batches import checksum
from shardwise.mesh import Worker
from shardwise.train.build import Training, restore, save
from shardwise.train.steps import steps

State = dict[str, Tensor]


def state(training: Training) -> State:
    """Every weight and moment, whole."""
    parallel = training.parallel
    own = state_of(parallel.named_parameters(), training.optimizer, parallel.named_buffers())
    by_text = {str(key): tensor for key, tensor in own.items()}
    return put_together(by_text, training.mesh.worker.world)


def train_and_save(worker: Worker, tables: Tables, at: int | None) -> tuple[Trained, State]:
    """Train to the end, saving once on the way, in the background; what was trained, and the state as it was
    saved."""
    training, done, saved = start(worker, tables), [], {}
    for step in steps(training):
        done.append(step)
        if step.step == at:
            save(training, wait=False)
            saved = state(training)
    training.checkpointer.finish()
    assert all(isinstance(outcome, Saved) for outcome in training.checkpointer.outcomes())
    return Trained(done, weights(training)), saved


def resume(worker: Worker, tables: Tables) -> tuple[Trained, State]:
    """Start again from the newest checkpoint; what was trained after it, and the state as it was loaded."""
    training = start(worker, tables)
    restore(training, checkpoints(Path(tables["run"]["folder"]) / "checkpoints")[-1])
    loaded = state(training)
    return Trained(list(steps(training)), weights(training)), loaded


def run(ranks: Callable[[int], Pool], tables: Tables, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    world = Layout(**{"data": 1, **tables["layout"]}).world
    return [case(ALONE, tables, *arguments)] if world == 1 else ranks(world).run(case, tables, *arguments)


def equal(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def numbers(trained: Trained) -> list[tuple[float, ...]]:
    return [
        (one.step, one.loss, one.gradient_norm, one.learning_rate, one.loss_scale) for one in trained.steps
    ]


LAYOUTS = [
    ({}, "float32"),
    ({"data": 4, "zero": 0}, "float32"),
    *(pytest.param({"data": 4, "zero": zero}, "float32", marks=pytest.mark.full) for zero in (1, 2, 3)),
    ({"replica": 2, "data": 2, "zero": 2}, "bfloat16"),
    ({"data": 2, "zero": 3}, "float16"),
    ({}, "float16"),
    ({"data": 2, "zero": 3}, "float8"),
    pytest.param({"tensor": 2}, "float8", marks=pytest.mark.full),
]
FITTING = {
    **{"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocabulary": 259},
    **{"experts": 4, "experts_per_token": 2, "expert_ffn": 32, "shared_experts": 1},
}
"""A model whose products fit into float8."""


@pytest.mark.parametrize(("layout", "precision"), LAYOUTS, ids=str)
def test_three_steps_and_three_more_are_six_to_the_last_bit(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, layout: dict[str, Any], precision: str
) -> None:
    # The scale doubles after two clean steps: at the third, one is counted and must not be forgotten.
    train = {"steps": 6, "precision": precision, "micro_batch": 2, "scale_every": 2, "initial_scale": 256.0}
    model = {"model": FITTING} if precision == "float8" else {}
    tables = job(corpus, train=train, layout=layout, run={"folder": str(tmp_path)}, **model)
    whole_run = run(ranks, tables, train_and_save, 3)
    resumed = run(ranks, tables, resume)
    for (uninterrupted, saved), (continued, loaded) in zip(whole_run, resumed, strict=True):
        assert equal(saved, loaded)
        assert numbers(continued) == numbers(uninterrupted)[3:]
        assert equal(continued.weights, uninterrupted.weights)


AXES = [  # beside those of test_any_layout.py: weights that two stages share, and fewer heads than features
    pytest.param({**FAMILIES["gpt"], "layers": 2}, {"tensor": 4, "data": 1}, marks=pytest.mark.full),
    (FAMILIES["tied"], {"pipeline": 2, "data": 1, "schedule": "zbv"}),
    pytest.param(
        {**FAMILIES["tied"], "layers": 3}, {"pipeline": 2, "data": 2, "zero": 1}, marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize(("model", "layout"), AXES, ids=["gpt-tensor", "tied-zbv", "tied-pipeline-data"])
def test_a_run_on_any_axis_goes_on_to_the_last_bit_there_and_on_one_device(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    tables = job(
        corpus,
        model=model,
        train={"steps": 4, "micro_batch": 2},
        layout=layout,
        run={"folder": str(tmp_path)},
    )
    whole_run = run(ranks, tables, train_and_save, 2)
    for (uninterrupted, saved), (continued, loaded) in zip(
        whole_run, run(ranks, tables, resume), strict=True
    ):
        assert equal(saved, loaded)
        assert numbers(continued) == numbers(uninterrupted)[2:]
        assert equal(continued.weights, uninterrupted.weights)
    before, saved = whole_run[0]
    after, loaded = resume(ALONE, {**tables, "layout": {}})
    assert equal(saved, loaded)
    assert max(difference(after.weights[name], before.weights[name]) for name in before.weights) < 1e-9


def test_a_run_may_go_on_in_float8(corpus: str, tmp_path: Path) -> None:
    """It then looks at the magnitudes first, as a new run does."""
    tables = job(
        corpus, model=FITTING, train={"precision": "float32", "steps": 6}, run={"folder": str(tmp_path)}
    )
    truth, _ = train_and_save(ALONE, tables, 3)
    in_float8, _ = resume(ALONE, {**tables, "train": {**tables["train"], "precision": "float8"}})
    assert [one.loss for one in in_float8.steps] == pytest.approx(
        [one.loss for one in truth.steps[3:]], rel=0.01
    )
    assert [one.again for one in in_float8.steps] == [0, 0, 0]


def test_saving_does_not_change_the_run(corpus: str, tmp_path: Path) -> None:
    tables = job(corpus, train={"precision": "float32", "steps": 6}, run={"folder": str(tmp_path)})
    (with_save, _), (without, _) = train_and_save(ALONE, tables, 3), train_and_save(ALONE, tables, None)
    assert numbers(with_save) == numbers(without)
    assert equal(with_save.weights, without.weights)


def test_random_states_come_back(corpus: str, tmp_path: Path) -> None:
    tables = job(corpus, run={"folder": str(tmp_path)})
    torch.manual_seed(5)
    folder = save(start(ALONE, tables))
    drawn = torch.rand(3)
    torch.manual_seed(6)
    restore(start(ALONE, tables), folder)
    assert torch.equal(torch.rand(3), drawn)


def test_a_run_may_move_to_a_device_with_generators_of_its_own(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = job(corpus, run={"folder": str(tmp_path)})
    folder = save(start(ALONE, tables))
    on_gpu = {
        StateKey.random(0, "cpu"): torch.get_rng_state(),
        StateKey.random(0, "cuda"): torch.zeros(16, dtype=torch.uint8),
    }
    monkeypatch.setattr("shardwise.checkpoint.save.random_state", lambda rank, device: on_gpu)
    restore(start(ALONE, tables), folder)


def test_a_tied_model_saves_its_shared_matrix_once(corpus: str, tmp_path: Path) -> None:
    tables = job(corpus, model={**LLAMA, "tied": True}, run={"folder": str(tmp_path)})
    _, saved = train_and_save(ALONE, tables, 3)
    assert "model.embedding.weight" in saved
    assert not any("head" in name for name in saved)


def test_only_the_newest_are_kept_and_each_tells_what_it_is(corpus: str, tmp_path: Path) -> None:
    tables = job(corpus, train={"steps": 4}, checkpoint={"keep": 2}, run={"folder": str(tmp_path)})
    training = start(ALONE, tables)
    for _ in steps(training):
        save(training)
    assert [step_of(address) for address in checkpoints(tmp_path / "checkpoints")] == [3, 4]
    manifest = read_manifest(tmp_path / "checkpoints" / "step-4")
    assert (manifest.step, manifest.world, manifest.model["vocabulary"]) == (4, 1, 259)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-3", "step-4"]


def test_the_same_step_can_be_saved_again(corpus: str, tmp_path: Path) -> None:
    training = start(ALONE, job(corpus, run={"folder": str(tmp_path)}))
    assert save(training) == save(training)
    restore(training, str(tmp_path / "checkpoints" / "step-0"))


def test_a_batch_that_grows_and_shrinks_on_the_way_skips_and_repeats_no_sequence(
    corpus: str, tmp_path: Path
) -> None:
    sizes, seen, found = [4, 8, 2], 0, []
    for number, size in enumerate(sizes):
        train = {"steps": 2 * number + 2, "global_batch": size, "schedule": "constant"}
        training = start(ALONE, job(corpus, train=train, run={"folder": str(tmp_path)}))
        if number:
            restore(training, checkpoints(tmp_path / "checkpoints")[-1])
        found += [step.data for step in steps(training)]
        save(training)
    stream = training.dataset
    for data, size in zip(found, (size for size in sizes for _ in range(2)), strict=True):
        assert data == f"{checksum(stream.sequences(seen, size).inputs):014x}"
        seen += size
