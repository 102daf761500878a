"""What is taken from private parts of torch does what it is taken for."""

from __future__ import annotations

import pytest
import torch

from shardwise._torch import lock_progress_bars_among_threads


def test_a_workers_progress_bars_have_no_lock_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    std = pytest.importorskip("tqdm.std")
    assert torch.hub.tqdm is std.tqdm, "the bar that the compiler walks its graphs behind"
    monkeypatch.setattr(std.tqdm, "_lock", None, raising=False)  # put back, or gone, at the end
    lock_progress_bars_among_threads()
    std.tqdm(total=1, disable=True).close()
    assert not isinstance(std.tqdm.get_lock(), std.TqdmDefaultWriteLock)
