"""What the tests of every optimizer check: bfloat16 states, uneven pieces, and rows of sparse gradients."""

from __future__ import annotations

import pytest
import torch
from ranks.pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.config import Layout
from shardwise.mesh import Worker, join
from shardwise.optim import make_optimizer, update
from shardwise.optimizers import Optimizer
from shardwise.parallel.placement import local_slices

ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def check_bfloat16_states(settings: Optimizer) -> None:
    """States in bfloat16 move as far as in float32, by updates that are smaller than the distance of 1 to its
    neighbours."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(512, dtype=dtype))
        optimizer = make_optimizer([("norm.weight", weight)], settings)
        for _ in range(30):
            weight.grad = torch.where(torch.arange(512) % 2 == 0, 0.25, -0.25).to(dtype)
            update(optimizer, 1e-3, ONE, ZERO)
        moved[dtype] = weight.detach().double() - 1
    for pulled in (0, 1):
        exact, rounded = (float(distance[pulled::2].mean()) for distance in moved.values())
        assert rounded == pytest.approx(exact, rel=0.1)


def check_uneven_pieces(pool: Pool, settings: Optimizer, dtype: torch.dtype) -> None:
    """Two ranks that share five columns update them as one rank updates the whole."""
    weight, gradient = _matrices(dtype)
    alone = nn.Parameter(weight)
    alone.grad = gradient
    optimizer = make_optimizer([("w", alone)], settings)
    for _ in range(3):
        update(optimizer, 0.01, ONE.to(dtype), ZERO)
    for found in pool.run(_step_of_pieces, settings, dtype):
        assert torch.equal(found, alone.detach())


def _matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator).to(dtype)
    return weight.clone(), gradient.clone()


def _step_of_pieces(worker: Worker, settings: Optimizer, dtype: torch.dtype) -> Tensor:
    device_mesh = join(worker, Layout(data=1, tensor=2)).sub("tensor")
    weight, gradient = (distribute_tensor(part, device_mesh, [Shard(1)]) for part in _matrices(dtype))
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = make_optimizer([("w", parameter)], settings, slices_of=local_slices)
    for _ in range(3):
        update(optimizer, 0.01, ONE.to(dtype), ZERO)
    return parameter.detach().full_tensor()


def check_sparse_rows(settings: Optimizer, shared: bool = False) -> None:
    """Rows of a sparse gradient are updated as those of a dense one, and other rows stay as they are."""
    sparse, dense = (nn.Embedding(9, 5, sparse=flag, dtype=torch.float64) for flag in (True, False))
    dense.load_state_dict(sparse.state_dict())
    before = sparse.weight.detach().clone()
    optimizers = [make_optimizer(table.named_parameters(), settings) for table in (sparse, dense)]
    for factor in (1.0, -2.0, 3.0):
        for table, optimizer in zip((sparse, dense), optimizers, strict=True):
            table.zero_grad()
            (table(torch.tensor([1, 4, 4, 7])).sin().sum() * factor).backward()
            if table.sparse:
                table.weight.grad = table.weight.grad.coalesce()
            update(optimizer, 0.1, 3 * ONE.double(), ZERO, shared=shared and table.sparse)
    looked_up, others = [1, 4, 7], [0, 2, 3, 5, 6, 8]
    torch.testing.assert_close(sparse.weight[looked_up], dense.weight[looked_up], rtol=1e-12, atol=1e-12)
    assert torch.equal(sparse.weight[others], before[others])
