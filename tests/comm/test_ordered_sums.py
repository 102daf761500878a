"""Sums that are made one after the other."""

from __future__ import annotations

import gc
import threading
import weakref

import torch
from torch import Tensor

from shardwise.comm.ordered_sums import OrderedSums


class Model:
    """Stands for what a sum holds on to."""

    def total(self) -> Tensor:
        return torch.ones(2)


def test_nothing_of_a_team_that_is_gone_is_held_and_its_thread_ends() -> None:
    sums, model = OrderedSums(torch.device("cpu")), Model()
    assert sums.run(model.total).wait().sum() == 2
    threads = [thread for thread in threading.enumerate() if thread.name == "compressed sums"]
    held = weakref.ref(model)
    del model
    sums.run(lambda: torch.zeros(1)).wait()
    gc.collect()
    assert held() is None
    del sums
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
