"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read as torch is imported: threads that wait for each other keep both cores busy

import pytest
import torch
from dispositions import forget_inherited_signals
from effort import ALL
from hypothesis import HealthCheck, settings
from ranks.pool import Pool
from ranks.trained import Runs
from warm import Server

forget_inherited_signals()

settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=ALL,
    derandomize=False,  # hypothesis draws the same examples every time where the variable CI is set
)
settings.register_profile("quick", settings.get_profile("patient"), max_examples=ALL // 2, derandomize=True)
settings.load_profile("patient")  # no deadline: how long an example takes says how busy the machine is

LONGEST = ("docs", "cli", "parallel", "checkpoint", "resilience", "proof")
"""Folders whose files take longest, to be given out first: the two test processes then end together."""


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries the same examples every time, and `make test-full` others every time."""
    if config.getoption("markexpr") == "not full":
        settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {folder: rank for rank, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Let a test that draws numbers without a seed of its own draw the same ones, whichever tests came before
    in this process."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """`ranks(world).run(case, *arguments)`: the pool of that many ranks, alive for the whole session."""
    pools: dict[int, Pool] = {}
    yield lambda world: pools.setdefault(world, Pool(world))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[Server]:
    """A process that has torch imported, from which commands are forked."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def trained(ranks: Callable[[int], Pool]) -> Runs:
    """`trained(tables)`: what every rank of a job came to. A job is trained once, whoever asks."""
    return Runs(ranks)


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """For what leaves the signals that ask to stop otherwise than it found them."""
    from shardwise.resilience.stopping import STOP_SIGNALS

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepared shards of short documents, so that sequences hold different numbers of document ends."""
    from shardwise.data.prepare import prepare

    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    documents = ["".join(draw.choices("abcdefgh ijkl mnop", k=draw.randint(3, 60))) for _ in range(400)]
    Path(folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    prepare(folder / "text.jsonl", "bytes", folder / "shards")
    return str(folder / "shards")


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepared shards of short conversations and prompts, and of prompts that are longer than a test's
    sequence: such a sequence is without a token that counts."""
    from shardwise.data.prepare import prepare

    folder, draw, records = tmp_path_factory.mktemp("conversations"), random.Random(1), []
    for number in range(240):
        asked, answered = (
            "".join(draw.choices("abcdefgh ijkl mnop", k=draw.randint(1, 9))) + "." for _ in range(2)
        )
        told = [{"role": "user", "content": asked[:2]}, {"role": "assistant", "content": answered[-3:]}]
        prompt = {"prompt": asked * (9 if number % 4 == 0 else 1), "completion": answered}
        records.append({"messages": told * draw.randint(1, 2)} if number % 3 == 0 else prompt)
    Path(folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    prepare(folder / "chat.jsonl", "bytes", folder / "shards")
    return str(folder / "shards")
