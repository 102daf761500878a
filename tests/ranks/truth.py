"""What every row of the layout tables must hold: the ranks train as one device does, and agree among
themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ranks.jobs import Tables, Trained, on_one_device, worst_difference

EXACT = 1e-9
"""A correct layout differs from one device by rounding in float64, here about 1e-13; a wrong one by far
more."""


def check_as_one_device(found: Sequence[Trained], tables: Tables) -> None:
    """Losses, norms, weights and sequences of the ranks against one device, and against each other to the
    bit."""
    truth = on_one_device(tables)
    assert worst_difference(found[0], truth) < EXACT
    assert [step.data for step in found[0].steps] == [step.data for step in truth.steps], (
        "other sequences were read"
    )
    for rank in found[1:]:
        assert (rank.losses, rank.norms) == (found[0].losses, found[0].norms), "ranks tell different numbers"
        assert all(torch.equal(rank.weights[name], found[0].weights[name]) for name in rank.weights), (
            "copies drifted apart"
        )
