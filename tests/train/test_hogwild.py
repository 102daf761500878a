"""Updates without a lock, against one device, against plain torch in a fixed order of events, and against a
history of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, FAMILIES, Tables, job, start
from ranks.pool import Pool
from torch import Tensor

from shardwise.asynchronous.shared_memory import SharedMemory, Stamps
from shardwise.comm import Peers
from shardwise.config import from_tables
from shardwise.drivers.hogwild import HogwildRank
from shardwise.drivers.lock_free import LockFree
from shardwise.errors import ConfigError, UserError
from shardwise.mesh import Worker, join
from shardwise.optim import update
from shardwise.train.build import Training, restore, save
from shardwise.train.check_module import check_module
from shardwise.train.sources import forward_backward
from shardwise.train.step_gradients import divisor, gradient_norm
from shardwise.train.steps import StepRecord, steps

ROOT = Path(__file__).parents[2]
NGRAMS = {"module": str(ROOT / "examples" / "ngrams.py:NGrams"), "hidden": 512, "vocabulary": 259}
Weights = dict[str, Tensor]


def hogwild_job(corpus: str, workers: int, model: dict[str, Any] | None = None, **train: Any) -> Tables:
    table = {"driver": "hogwild", "micro_batch": 2, **train}
    return {
        **job(corpus, model=model or FAMILIES["llama"], train=table, layout={"data": workers}),
        "hogwild": {},
    }


def source_of(training: Training) -> LockFree:
    assert isinstance(training.rank_driver, HogwildRank)
    return LockFree(training, training.rank_driver.shared, training.config.hogwild.locked)


def weights_of(training: Training) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in training.parallel.named_parameters()}


def train_without_locks(worker: Worker, tables: Tables) -> tuple[list[StepRecord], Weights, Weights]:
    """The steps, the weights, and how many updates each parameter has had."""
    training = start(worker, tables)
    done = list(steps(training, source=source_of(training)))
    counts = {
        name: training.optimizer.state[weight]["step"].clone()
        for name, weight in training.parallel.named_parameters()
    }
    return done, weights_of(training), counts


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


# -- one worker ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [FAMILIES["llama"], FAMILIES["tied"], NGRAMS], ids=["dense", "tied", "sparse"]
)
def test_one_worker_is_one_device_to_the_last_bit(corpus: str, model: dict[str, Any]) -> None:
    """A step of one update; and one of four, which are four steps."""
    constant = {"schedule": "constant", "warmup": 0, "precision": "float32"}
    for rows, each, count in ((8, 8, 3), (8, 2, 12)):
        settings = {"precision": "float32"} if rows == each else constant
        tables = hogwild_job(corpus, 1, model, global_batch=rows, micro_batch=each, steps=3, **settings)
        done, weights, _ = train_without_locks(ALONE, tables)
        alone = job(corpus, model=model, train={**settings, "global_batch": each, "steps": count})
        training = start(ALONE, alone)
        serial = list(steps(training))
        assert same(weights, weights_of(training))
        if rows == each:
            assert [(step.loss, step.gradient_norm, step.data) for step in done] == [
                (step.loss, step.gradient_norm, step.data) for step in serial
            ]
        assert sum(step.tokens for step in done) == sum(step.tokens for step in serial)
        assert all(step.updates and step.updates.conflicting == 0 for step in done)


def test_one_worker_goes_on_to_the_last_bit(corpus: str, tmp_path: Path) -> None:
    tables = {**hogwild_job(corpus, 1, NGRAMS, steps=4), "run": {"folder": str(tmp_path)}}
    _, whole, _ = train_without_locks(ALONE, tables)
    training = start(ALONE, tables)
    next(done for done in steps(training, source=source_of(training)) if done.step == 2)
    saved, again = save(training), start(ALONE, tables)
    restore(again, saved)
    assert len(list(steps(again, source=source_of(again)))) == 2
    assert same(weights_of(again), whole)


# -- two workers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(FAMILIES["llama"], "adamw"), (NGRAMS, "adamw"), (NGRAMS, "sgd"), (FAMILIES["llama"], "lion")],
    ids=["dense", "sparse", "sparse sgd", "dense lion"],
)
def test_two_workers_train_every_sample_once(
    ranks: Callable[[int], Pool], corpus: str, model: dict[str, Any], optimizer: str, locked: bool
) -> None:
    tables = hogwild_job(corpus, 2, model, steps=5, precision="float32")
    tables |= {"hogwild": {"locked": locked}, "optimizer": {"name": optimizer}}
    found = ranks(2).run(train_without_locks, tables)
    (done, weights, counts), (_, others, _) = found
    assert same(weights, others), "there is one copy"
    alone = start(ALONE, job(corpus, model=model, train={"steps": 5, "precision": "float32"}))
    assert [(step.data, step.tokens) for step in done] == [(step.data, step.tokens) for step in steps(alone)]
    assert all(step.updates and step.updates.made == 4 for step in done)
    assert all(float(count) <= 20 for count in counts.values())
    if locked:
        assert all(float(count) == 20 for count in counts.values()), "no update is lost under a lock"


class InTurn(LockFree):
    """Both workers read the same weights; then the first one writes, then the other."""

    @contextmanager
    def _lock(self) -> Iterator[None]:
        everyone, rank = self.training.peers.all_gather, self.training.mesh.worker.rank
        everyone("has read")
        if rank == 1:
            everyone("the first has written")
        yield
        if rank == 0:
            everyone("the first has written")
        everyone("the second has written")


def write_in_turn(worker: Worker, tables: Tables) -> tuple[list[StepRecord], Weights]:
    training = start(worker, tables)
    assert isinstance(training.rank_driver, HogwildRank)
    done = list(steps(training, source=InTurn(training, training.rank_driver.shared, takes_lock=False)))
    return done, weights_of(training)


@pytest.mark.parametrize("model", [FAMILIES["llama"], NGRAMS], ids=["dense", "sparse"])
def test_in_a_fixed_order_of_events_it_is_plain_torch_and_conflicts_are_exact(
    ranks: Callable[[int], Pool], corpus: str, model: dict[str, Any]
) -> None:
    tables = hogwild_job(corpus, 2, model, steps=3, global_batch=4)
    done, found = ranks(2).run(write_in_turn, tables)[0]
    alone = start(ALONE, job(corpus, model=model, train={"global_batch": 2, "steps": 6}))
    parameters = dict(alone.parallel.named_parameters())
    batches = torch_batches(alone, 6)
    for step, updates in zip(done, (step.updates for step in done), strict=True):
        both = [gradients(alone, batches.pop(0)) for _ in range(2)]
        touched = [rows_of(parameters, each) for each, _ in both]
        assert updates is not None
        assert (updates.made, updates.conflicting) == (2, 1), (
            "the second wrote what the first had written since it read"
        )
        assert updates.rows == len(touched[0]) + len(touched[1])
        assert updates.conflicting_rows == len(touched[0] & touched[1])
        for each, norm in both:
            for name, parameter in parameters.items():
                parameter.grad = each[name]
            divide_by = divisor(alone, norm, alone.config.train.clip)
            update(alone.optimizer, step.learning_rate, divide_by, torch.tensor(0.0))
    for name, weight in weights_of(alone).items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12, msg=name)


def torch_batches(training: Training, count: int) -> list[Any]:
    """Of two rows each, in the order of the data."""
    from shardwise.data.batches import to_batch

    return [to_batch(training.dataset.sequences(2 * index, 2), torch.device("cpu")) for index in range(count)]


def gradients(training: Training, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
    training.optimizer.zero_grad()
    forward_backward(training, [batch], torch.tensor(float(batch.valid)))
    norm = gradient_norm(training)
    return {name: parameter.grad.clone() for name, parameter in training.parallel.named_parameters()}, norm


def rows_of(parameters: dict[str, Any], each: dict[str, Tensor]) -> set[tuple[str, int]]:
    return {
        (name, row)
        for name in parameters
        for row in (each[name].coalesce().indices()[0].tolist() if each[name].is_sparse else [0])
    }


def test_conflicts_are_those_of_the_history() -> None:
    """Three workers, reads and writes in any order, against a list of all that happened."""
    draw = random.Random(1)
    last, finished = torch.zeros(12, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    workers = [Stamps(last, finished, worker) for worker in range(3)]
    history: list[tuple[int, set[int]]] = []
    began = [0] * 3
    reading = [False] * 3
    seen = 0
    for _ in range(400):
        worker = draw.randrange(3)
        if not reading[worker]:
            workers[worker].read()
            began[worker], reading[worker] = len(history), True
            continue
        rows = set(draw.sample(range(12), draw.randint(1, 3)))
        since = set[int]().union(*(each for writer, each in history[began[worker] :] if writer != worker))
        found = workers[worker].write(torch.tensor(sorted(rows)))
        workers[worker].written()
        assert found == len(rows & since)
        history.append((worker, rows))
        reading[worker] = False
        seen += found
    assert seen > 50


def count_under_a_lock(worker: Worker, tables: Tables) -> int:
    """Read, wait for the other process to have its turn, and write."""
    config = from_tables(tables)
    peers = Peers.create(join(worker, config.layout))
    memory = SharedMemory(peers, {"count": torch.zeros((), dtype=torch.int64)})
    for _ in range(200):
        with memory.locked():
            before = int(memory.tensors["count"])
            torch.ones(50).sum()
            memory.tensors["count"].fill_(before + 1)
    peers.all_gather("done")
    return int(memory.tensors["count"])


def test_a_lock_keeps_the_others_out(ranks: Callable[[int], Pool], corpus: str) -> None:
    assert ranks(2).run(count_under_a_lock, hogwild_job(corpus, 2)) == [400, 400]


def save_and_go_on(worker: Worker, tables: Tables) -> tuple[str, Weights]:
    """Where the checkpoint of step 2 is, and the weights then, while the other worker would go on."""
    training = start(worker, tables)
    saved, kept = "", Weights()
    for done in steps(training, source=source_of(training)):
        if done.step == 2:
            kept = weights_of(training)
            saved = save(training, wait=False)
    training.checkpointer.finish()
    return saved, kept


def continue_from(worker: Worker, tables: Tables, folder: str) -> tuple[Weights, list[str]]:
    """The weights as they are loaded, and the data of the steps that follow."""
    training = start(worker, tables)
    restore(training, folder)
    training.peers.all_gather("loaded")
    loaded = weights_of(training)
    training.peers.all_gather("looked at")
    source = source_of(training) if isinstance(training.rank_driver, HogwildRank) else None
    return loaded, [done.data for done in steps(training, source=source)]


def test_a_checkpoint_has_no_half_update_and_goes_on_under_any_driver(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = {**hogwild_job(corpus, 2, steps=6), "run": {"folder": str(tmp_path)}}
    (saved, kept), (_, others) = ranks(2).run(save_and_go_on, tables)
    assert same(kept, others)
    alone = job(corpus, model=FAMILIES["llama"], train={"steps": 6})
    data = [step.data for step in steps(start(ALONE, alone))]
    for loaded, rest in (ranks(2).run(continue_from, tables, saved)[1], continue_from(ALONE, alone, saved)):
        assert same(loaded, kept)
        assert rest == data[2:]


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("layout", {"tensor": 2}, "leave layout.tensor out"),
        ("layout", {"zero": 1}, "leave layout.zero out"),
        ("layout", {"compression": "int8"}, "leave layout.compression out"),
        ("train", {"precision": "float16"}, "use bfloat16 or float32"),
        ("train", {"precision": "bfloat16", "state_dtype": "bfloat16"}, "leave train.state_dtype out"),
        ("recovery", {"copies": 5}, "recovery.copies: not with train.driver = 'hogwild'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(corpus: str, section: str, values: dict[str, Any], message: str) -> None:
    tables = hogwild_job(corpus, 2)
    with pytest.raises(ConfigError, match=message):
        from_tables({**tables, section: {**tables.get(section, {}), **values}})


def test_sparse_gradients_are_refused_where_devices_would_sum_them(corpus: str) -> None:
    config = from_tables(job(corpus, model=NGRAMS, layout={"data": 2}))
    with pytest.raises(UserError, match="table has sparse=True, and devices sum dense gradients only"):
        check_module(config, config.layout)


def test_sparse_gradients_of_bfloat16_weights_are_refused(corpus: str) -> None:
    """An update of 0.001 is less than half of what bfloat16 tells apart at 1, so none would ever arrive."""
    train = {"precision": "bfloat16", "state_dtype": "bfloat16"}
    config = from_tables(job(corpus, model=NGRAMS, train=train, layout={"data": 1}))
    with pytest.raises(
        UserError, match="has sparse=True, and updates of single rows are not rounded at random"
    ):
        check_module(config, config.layout)
    check_module(from_tables(job(corpus, model=NGRAMS, layout={"data": 1})), config.layout)
