"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks.pool import Pool
from ranks.trained import Runs
from warm import Server


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
