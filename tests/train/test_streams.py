"""Programs that iterate over a dataset: the samples of a step do not depend on the devices, and a run goes on
where it stood."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train.programs import BATCH, Net, Points, StatefulWalk, Walk, loss

import shardwise as sw
from shardwise.data.samples import Reading
from shardwise.data.streams import Stream
from shardwise.errors import UserError

PROGRAMS = Path(__file__).parent / "programs.py"
CPU = torch.device("cpu")


def read(
    stream: Stream, steps: int, seen: int = 0, state: object = None, rows: range = range(4)
) -> list[list[float]]:
    """The sums of the samples of each step that a device with these rows reads, in two micro-batches."""
    reader = stream.reader(Reading(4, rows, 2, CPU, torch.float32, seen, state))
    return [[float(part.values["x"].sum()) for part in next(reader)] for _ in range(steps)]


def by_hand(count: int, steps: int) -> list[list[float]]:
    """The same by the definition: the stream begins again when it ends."""
    points = Points(90)
    sums = [points[7 * (place % count + 1) % 90]["x"].sum() for place in range(4 * steps)]
    return [
        [float(sum(sums[place : place + 2])) for place in (4 * step, 4 * step + 2)] for step in range(steps)
    ]


def test_a_stream_that_ends_begins_again_and_devices_share_each_batch() -> None:
    expected = by_hand(count=10, steps=6)
    whole = read(Stream(Walk(10)), 6)
    for found, wanted in zip(whole, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    first, second = (read(Stream(Walk(10)), 6, rows=rows) for rows in (range(2), range(2, 4)))
    for step, wanted in enumerate(expected):
        assert sum(first[step]) + sum(second[step]) == pytest.approx(sum(wanted), rel=1e-5)


@pytest.mark.parametrize("dataset", [Walk, StatefulWalk])
def test_a_reader_goes_on_where_another_one_stood(dataset: type[Walk]) -> None:
    """One batch ahead of the step that was saved."""
    expected = read(Stream(dataset(10)), 7)
    reader = Stream(dataset(10)).reader(Reading(4, range(4), 2, CPU, torch.float32))
    for _ in islice(iter(reader.__next__, None), 4):
        pass
    state = reader.state_at(12)
    assert (state is None) == (dataset is Walk)
    assert read(Stream(dataset(10)), 4, seen=12, state=state) == expected[3:]


class BeginsWhereItWasLoaded(StatefulWalk):
    """Begins every pass from the state that it has loaded, as Hugging Face's iterable datasets do."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.loaded = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.place = self.loaded
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["place"]


@pytest.mark.parametrize("dataset", [StatefulWalk, BeginsWhereItWasLoaded])
@pytest.mark.parametrize("seen", [4, 8, 12])
def test_a_state_inside_and_at_the_end_of_a_pass(dataset: type[StatefulWalk], seen: int) -> None:
    """A pass has 8 samples."""
    expected = read(Stream(Walk(8)), 8)
    assert read(Stream(dataset(8)), 5, seen=seen, state={"place": seen % 8 or 8}) == expected[seen // 4 :][:5]


def test_a_state_is_used_instead_of_reading_again() -> None:
    dataset = StatefulWalk()
    expected = read(Stream(StatefulWalk()), 9)[8:]
    assert read(Stream(dataset), 1, seen=32, state={"place": 32}) == expected
    assert dataset.place == 36


def test_a_program_on_a_stream_trains_the_same_on_any_number_of_devices(tmp_path: Path) -> None:
    losses = []
    for workers in (1, 2):
        done = sw.launch(
            f"{PROGRAMS}:streams",
            workers=workers,
            layout={"data": workers},
            train={"precision": "float64", "steps": 8},
            run={"folder": str(tmp_path / str(workers)), "device": "cpu"},
        )
        losses.append([step["loss"] for step in done.metrics])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    points = Points(90)
    samples = [points[7 * place % 90] for place in range(1, BATCH + 1)]
    torch.manual_seed(0)
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in ("x", "y", "weight")}
    total, items = loss(
        Net().double(), {**batch, "x": batch["x"].double(), "weight": batch["weight"].double()}
    )
    assert losses[0][0] == pytest.approx((total / items).item(), rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("program", ["streams", "streams_with_state"])
def test_a_program_on_a_stream_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, program: str) -> None:
    drill = sw.drill(
        f"{PROGRAMS}:{program}",
        faults="kill",
        count=1,
        workers=2,
        layout={"data": 2, "zero": 2},
        train={"steps": 160},
        checkpoint={"every": 7},
        run={"folder": str(tmp_path / "run"), "device": "cpu"},
    )
    assert drill.passes, drill


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("streams_without_steps", "Walk is only iterated over; say how long to train with steps="),
        ("streams_with_workers", "workers=2 read by number, and Walk is only iterated over"),
        ("streams_an_iterator", "generator is no dataset; give one with __len__ and __getitem__"),
        ("streams_batches", "this is a DataLoader, which makes batches already; give its dataset"),
        ("evaluates_an_empty_stream", "engine.evaluate: the dataset is empty"),
        ("streams_nothing", "Walk yields no samples"),
    ],
)
def test_a_mistake_gets_a_message(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        sw.launch(f"{PROGRAMS}:{program}", run={"folder": str(tmp_path / "run"), "device": "cpu"})
