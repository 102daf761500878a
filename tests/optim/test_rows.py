"""Updates of the rows that a sparse gradient has, against torch's AdamW and SparseAdam."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim import make_optimizer, update
from shardwise.optimizers import AdamW
from shardwise.optimizers.adamw import largest_quotient

ONE, ZERO = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0)
SETTINGS = AdamW(weight_decay=0.3)


def tables() -> tuple[nn.Embedding, nn.Embedding]:
    """One with sparse gradients, and the same with dense ones."""
    sparse, dense = (nn.Embedding(9, 5, sparse=flag, dtype=torch.float64) for flag in (True, False))
    dense.load_state_dict(sparse.state_dict())
    return sparse, dense


def look_up(table: nn.Embedding, rows: Tensor, scale: float) -> None:
    table.zero_grad()
    (table(rows).sin().sum() * scale).backward()
    if table.weight.grad.is_sparse:
        table.weight.grad = table.weight.grad.coalesce()


@pytest.mark.parametrize("embeddings", [[], ["weight"]], ids=["decayed", "not decayed"])
@pytest.mark.parametrize(("sparse", "shared"), [(True, False), (True, True), (False, True)])
def test_where_every_row_is_looked_up_it_is_adamw(embeddings: list[str], sparse: bool, shared: bool) -> None:
    ours, theirs = tables() if sparse else (tables()[1],) * 2
    theirs = copy.deepcopy(theirs)
    optimizers = [
        make_optimizer(table.named_parameters(), SETTINGS, embeddings=embeddings) for table in (ours, theirs)
    ]
    for step in range(4):
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            look_up(table, torch.tensor([*range(9), step]), step + 1)
            update(optimizer, 0.1, 3 * ONE, ZERO, shared=shared and table is ours)
    torch.testing.assert_close(
        ours.weight, theirs.weight, rtol=1e-6, atol=1e-9
    )  # torch counts steps in float32


def test_of_some_rows_it_is_sparse_adam_and_leaves_the_others_alone() -> None:
    ours, _ = tables()
    theirs = nn.Embedding(9, 5, sparse=True, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    optimizer = make_optimizer(ours.named_parameters(), SETTINGS, embeddings=["weight"])
    reference = torch.optim.SparseAdam(
        theirs.parameters(), lr=0.1, betas=SETTINGS.betas, eps=SETTINGS.epsilon
    )
    for rows in ([1, 2, 2], [2, 7], [7, 7, 1], [2]):
        for table in (ours, theirs):
            look_up(table, torch.tensor(rows), 1.0)
        update(optimizer, 0.1, ONE, ZERO)
        assert ours.weight.grad.is_sparse, "it is there for whoever looks at it after the step"
        reference.step()
    torch.testing.assert_close(
        ours.weight, theirs.weight, rtol=1e-5, atol=1e-7
    )  # which adds epsilon at another place
    others = [0, 3, 4, 5, 6, 8]
    assert torch.equal(ours.weight[others], before[others])
    assert not optimizer.state[ours.weight]["exp_avg"][others].any()


def test_a_step_that_is_skipped_touches_nothing() -> None:
    ours, _ = tables()
    before = ours.weight.detach().clone()
    optimizer = make_optimizer(ours.named_parameters(), SETTINGS)
    look_up(ours, torch.tensor([1, 2]), float("nan"))
    update(optimizer, 0.1, ONE, torch.tensor(1.0))
    assert torch.equal(ours.weight, before)


def test_no_gradients_make_the_quotient_of_moments_larger_than_its_bound() -> None:
    """The worst are those whose squares have the weights of the first moment; others stay below."""
    draw = random.Random(0)
    for beta1, beta2 in ((0.9, 0.95), (0.9, 0.999), (0.0, 0.5)):
        bound = largest_quotient(beta1, beta2)
        worst = [(beta1 / beta2) ** (200 - step) for step in range(200)]
        others = [[draw.gauss(0, 10 ** draw.uniform(-6, 2)) for _ in range(200)] for _ in range(20)]
        quotients = []
        for gradients in (worst, *others):
            first = second = 0.0
            for gradient in gradients:
                first, second = (
                    first + (1 - beta1) * (gradient - first),
                    second + (1 - beta2) * (gradient**2 - second),
                )
                quotients.append(abs(first) / second**0.5 if second else 0.0)
        assert max(quotients) <= bound * (1 + 1e-9)
        assert max(quotients) >= bound * 0.99


@pytest.mark.parametrize("sparse", [True, False])
def test_moments_that_do_not_belong_together_make_no_large_step(sparse: bool) -> None:
    """As where one process wrote the first moment of a row and another, at the same time, the second."""
    table = tables()[not sparse]
    optimizer = make_optimizer(table.named_parameters(), SETTINGS, embeddings=["weight"])
    look_up(table, torch.arange(9), 1.0)
    update(optimizer, 0.1, ONE, ZERO, shared=True)
    optimizer.state[table.weight]["exp_avg"].fill_(1.0)
    optimizer.state[table.weight]["exp_avg_sq"].zero_()
    before = table.weight.detach().clone()
    look_up(table, torch.arange(9), 1e-6)
    update(optimizer, 0.1, ONE, ZERO, shared=True)
    assert float((table.weight.detach() - before).abs().max()) < 0.1 * 2
