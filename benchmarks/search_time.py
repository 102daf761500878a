"""Processor seconds to search all layouts of a job, to predict them only, and of plain arithmetic on the same
number of rows.

    python benchmarks/search_time.py [repeats]

The baseline is NumPy's `exp` of one number for each candidate, a hundred times. If the ratio to it changes,
the search has changed, not the machine.
"""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from shardwise.config import Config, from_tables
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.cost.predict import predict
from shardwise.cost.space import Space
from shardwise.search.candidates import candidates
from shardwise.search.search import search, workload_of

ROOT = Path(__file__).parents[1]
MIXTURE = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336,
    "vocabulary": 32000,
    "experts": 8, "experts_per_token": 2, "expert_ffn": 14336, "max_positions": 8192,
}  # fmt: skip


def main(repeats: int) -> None:
    tables = tomllib.loads((ROOT / "examples" / "llama3-70b-64xh100.toml").read_text())
    dense = from_tables({name: table for name, table in tables.items() if name not in ("cluster", "layout")})
    data, train = {"source": "x", "sequence_length": 8192}, {"global_batch": 1024, "precision": "bfloat16"}
    mixture = from_tables({"model": MIXTURE, "data": data, "train": train})
    print(f"{'':24}{'candidates':>12}{'numpy':>8}{'predict':>9}{'search':>8}{'search / numpy':>16}")
    for name, config, devices in (
        ("70B on 64", dense, 64),
        ("70B on 512", dense, 512),
        ("mixture on 64", mixture, 64),
    ):
        cluster, space = named(f"h100x{devices}"), candidates(config, devices, {}).space
        plain = _least(repeats, partial(_exponentials, len(space)))
        predicted = _least(repeats, partial(_predict, config, space, cluster))
        searched = _least(repeats, partial(search, config, cluster, devices))
        print(
            f"{name:24}{len(space):>12,}{plain:>8.2f}{predicted:>9.2f}{searched:>8.2f}"
            f"{searched / plain:>16.2f}"
        )


def _exponentials(rows: int) -> None:
    numbers = np.linspace(0.0, 1.0, rows)
    for _ in range(100):
        np.exp(numbers)


def _predict(config: Config, space: Space, cluster: Cluster) -> None:
    for part in space.parts():  # as a search does it
        predict(workload_of(config), part, cluster)


def _least(repeats: int, action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        action()
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
