"""A checkpoint fits any mesh: each of ten layouts, all axes among them, goes on from its own, and from those
of others.

A layout goes on from its own checkpoint as if it had never stopped: state, numbers and weights to the last
bit. From the checkpoint of another layout, state and weights are the saved ones to the last bit after the
load, and the losses of the next steps, for which the moments must be right too, are those of one device that
was never interrupted, in float64, to 1e-9.

Each layout is written once and read by some others, one device by all and from several; `full` has all pairs,
and more steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import ALONE, FAMILIES, Tables, job, on_one_device, put_together, start
from ranks.pool import Pool
from torch import Tensor

from shardwise.checkpoint.save import Saved, state_of
from shardwise.config import Layout
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.train.build import Training, restore, save
from shardwise.train.steps import StepRecord, steps

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "data, zero 0": {"data": 2, "zero": 0},
    "data, zero 1, experts": {"data": 2, "zero": 1, "expert": 2},
    "pipeline in a V": {"pipeline": 2, "data": 1, "schedule": "zbv"},
    "data, zero 3": {"data": 4, "zero": 3},
    "replica, zero 2": {"replica": 2, "data": 2, "zero": 2},
    "tensor, zero 3": {"tensor": 2, "data": 2, "zero": 3},
    "pipeline, zero 1": {"pipeline": 2, "data": 2, "zero": 1},
    "context, experts, zero 2": {"context": 2, "data": 2, "expert": 2, "zero": 2},
    "pipeline, tensor, experts": {"pipeline": 2, "tensor": 2, "data": 1, "expert": 2},
}
NAMES = list(LAYOUTS)
USUAL = ("one device", "tensor, zero 3")
"""Of those that read, what is tried each time."""
ON_ONE_DEVICE = [*USUAL, "pipeline, zero 1", "data, zero 1, experts"]
"""Whose checkpoints one device reads."""
SAVED_AT = 1

Digests = dict[str, str]
Numbers = list[tuple[float, float]]


@dataclass(frozen=True)
class Went:
    """How a run went on from a checkpoint: the whole state there, the losses and norms of the steps after it,
    and then what this rank holds."""

    state: Digests
    numbers: Numbers
    after: Digests


def whole_state(training: Training) -> Digests:
    """A hash of every weight, buffer and moment, whole."""
    return digests(put_together(state(training), training.mesh.worker.world))


def own_state(training: Training) -> Digests:
    """A hash of what this rank holds of them."""
    return digests({name: local(tensor) for name, tensor in state(training).items()})


def state(training: Training) -> dict[str, Tensor]:
    parallel = training.parallel
    own = state_of(parallel.named_parameters(), training.optimizer, parallel.named_buffers())
    return {str(key): tensor for key, tensor in own.items()}


def digests(tensors: dict[str, Tensor]) -> Digests:
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
        for name, tensor in sorted(tensors.items())
    }


def numbers(done: list[StepRecord]) -> Numbers:
    return [(step.loss, step.gradient_norm) for step in done]


def train_and_save(worker: Worker, tables: Tables) -> Went:
    """Train to the last step, saving once on the way, in the background."""
    training, done, saved = start(worker, tables), [], {}
    for step in steps(training):
        done.append(step)
        if step.step == SAVED_AT:
            save(training, wait=False)
            saved = whole_state(training)
    training.checkpointer.finish()
    assert all(isinstance(outcome, Saved) for outcome in training.checkpointer.outcomes())
    return Went(saved, numbers(done[SAVED_AT:]), own_state(training))


def load_each(worker: Worker, tables: Tables, folders: list[str]) -> list[Went]:
    """Load one checkpoint after the other into the same model."""
    training, found = start(worker, tables), []
    for folder in folders:
        restore(training, folder)
        loaded = whole_state(training)
        found.append(Went(loaded, numbers(list(steps(training))), own_state(training)))
    return found


def run(ranks: Callable[[int], Pool], tables: Tables, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    world = Layout(**{"data": 1, **tables["layout"]}).world
    return (
        [case(ALONE, tables, *arguments)]
        if world == 1
        else ranks(world).run(case, tables, *arguments, seconds=600)
    )


def tables_of(corpus: str, layout: str, folder: Path, more: int, optimizer: str = "adamw") -> Tables:
    micro_batch = (2 if LAYOUTS[layout]["data"] == 1 else 1) if "pipeline" in LAYOUTS[layout] else None
    train = {"steps": SAVED_AT + more, "global_batch": 4, "micro_batch": micro_batch}
    return job(
        corpus,
        model=FAMILIES["experts"],
        train=train,
        optimizer={"name": optimizer},
        layout=LAYOUTS[layout],
        run={"folder": str(folder)},
    )


class Written:
    """A checkpoint of each layout, and how its own run went on from there."""

    def __init__(
        self, ranks: Callable[[int], Pool], corpus: str, folder: Path, more: int, optimizer: str = "adamw"
    ) -> None:
        self.ranks, self.corpus, self.folder, self.more = ranks, corpus, folder, more
        self.optimizer = optimizer
        self._found: dict[str, list[Went]] = {}

    def address(self, layout: str) -> str:
        return str(self.folder / layout / "checkpoints" / f"step-{SAVED_AT}")

    def went(self, layout: str) -> list[Went]:
        if layout not in self._found:
            tables = tables_of(self.corpus, layout, self.folder / layout, self.more, self.optimizer)
            first, *others = self._found[layout] = run(self.ranks, tables, train_and_save)
            assert all((other.state, other.numbers) == (first.state, first.numbers) for other in others), (
                "ranks differ"
            )
        return self._found[layout]

    def check_read_by(self, target: str, sources: list[str]) -> None:
        own = [self.went(source) for source in sources]
        tables = tables_of(self.corpus, target, self.folder / target, self.more, self.optimizer)
        truth = on_one_device({**tables, "run": {}}).losses[SAVED_AT:]
        assert len(truth) == self.more
        for rank, answers in enumerate(
            run(self.ranks, tables, load_each, [self.address(source) for source in sources])
        ):
            for source, wrote, found in zip(sources, own, answers, strict=True):
                assert found.state == wrote[0].state, f"from {source}"
                assert [loss for loss, _ in found.numbers] == pytest.approx(truth, rel=1e-9, abs=0), (
                    f"from {source}"
                )
                if source == target:
                    assert found == wrote[rank], "it went on in another way than it did before"


@pytest.fixture(scope="module")
def written(ranks: Callable[[int], Pool], corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(ranks, corpus, tmp_path_factory.mktemp("layouts"), more=2)


@pytest.fixture(scope="module")
def written_for_long(
    ranks: Callable[[int], Pool], corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Written:
    return Written(ranks, corpus, tmp_path_factory.mktemp("layouts-for-long"), more=5)


def sources_of(layout: str) -> list[str]:
    """Its own first, into a model without moments; then one device's and that of another; for one device
    several."""
    if layout == "one device":
        return ON_ONE_DEVICE
    several = NAMES[1:]
    return [layout, "one device", several[several.index(layout) - 4]]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.full) for name in LAYOUTS]
)
def test_a_layout_goes_on_to_the_bit_from_its_own_checkpoint_and_as_one_device_from_others(
    written: Written, layout: str
) -> None:
    written.check_read_by(layout, sources_of(layout))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_all_layouts_load_to_the_bit_and_go_on_as_one_device(
    written_for_long: Written, layout: str
) -> None:
    written_for_long.check_read_by(layout, NAMES)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "lion"])
@pytest.mark.parametrize(
    ("layout", "sources"),
    [
        ("tensor, zero 3", ["tensor, zero 3", "data, zero 0"]),
        ("pipeline, zero 1", ["pipeline, zero 1", "tensor, zero 3"]),
        ("context, experts, zero 2", ["pipeline in a V", "one device"]),
    ],
)
def test_so_it_does_with_other_optimizers(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, optimizer: str, layout: str, sources: list[str]
) -> None:
    Written(ranks, corpus, tmp_path, 2, optimizer).check_read_by(layout, sources)


def test_the_state_of_another_optimizer_is_refused_unless_it_is_the_same_state(
    corpus: str, tmp_path: Path
) -> None:
    tables = tables_of(corpus, "one device", tmp_path, more=1)
    train_and_save(ALONE, tables)
    folder = str(tmp_path / "checkpoints" / f"step-{SAVED_AT}")
    for name, slots in (("lion", "exp_avg"), ("sgd", "momentum_buffer")):
        other = start(ALONE, {**tables, "optimizer": {"name": name}})
        with pytest.raises(UserError, match=rf"another optimizer \(adamw\).*this job's keeps {slots}\."):
            restore(other, folder)
    compressed = {"compression": "sign", "compression_warmup": 1}
    restore(start(ALONE, {**tables, "layout": compressed, "optimizer": {"name": "1bit-adam"}}), folder)
