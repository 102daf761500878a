"""What every row of the layout tables must hold: the ranks train as one device does, and agree among themselves."""

from __future__ import annotations

import torch
from ranks.jobs import Tables, on_one_device, train, worst_difference
from ranks.pool import Pool

EXACT = 1e-9
"""A correct layout differs from one device by rounding in float64, here about 1e-13; a wrong one by far more."""


def check_trains_as_one_device(pool: Pool, tables: Tables) -> None:
    """Losses, norms and weights of the job on the pool's ranks against one device, and against each other to the bit."""
    found = pool.run(train, tables)
    assert worst_difference(found[0], on_one_device(tables)) < EXACT
    for rank in found[1:]:
        assert (rank.losses, rank.norms) == (found[0].losses, found[0].norms), "ranks tell different numbers"
        assert all(torch.equal(rank.weights[name], found[0].weights[name]) for name in rank.weights), "copies drifted apart"
