"""Residuals are made on one stream of a GPU and used on another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.codecs import parse_codec
from shardwise.comm.gradient_compression import CompressedAxisSum, CompressionSettings
from shardwise.config.compression import SumCompression


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_residual_is_read_before_its_memory_is_used_again() -> None:
    device, numbers = torch.device("cuda"), 1 << 20
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    mesh: Any = SimpleNamespace(group=lambda axis: group, label=lambda axis: axis)
    comm: Any = SimpleNamespace(mesh=mesh, device=device, step=1)
    how = SumCompression(parse_codec("sign"), axes="all", warmup=0, feedback=True)
    settings = CompressionSettings(how, 0, torch.float32, frozenset({"weight"}))
    compressor = CompressedAxisSum(comm, "data", settings)
    torch.cuda.empty_cache()
    compressor.register("weight", (2, numbers))
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)  # the copy of the residual waits behind this
        rows = compressor._residual_rows(["weight"], scattered=True)
    again = torch.full((2, numbers), 7.0, device=device)  # takes the memory of the freed residual
    torch.cuda.synchronize()
    assert again[0, 0] == 7
    assert not rows.numbers.any()
