"""States in bfloat16: small updates are not lost, on average nothing is, and who holds which part does not
matter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.optim import make_optimizer, rounding, update
from shardwise.optimizers import AdamW

ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)
LR = 1e-3


def trained(
    dtype: torch.dtype, steps: int, size: int = 512, seed: int = 1, betas: tuple[float, float] = (0.9, 0.95)
) -> nn.Parameter:
    """The weight of a norm under a gradient that halves pull up and halves pull down."""
    weight = nn.Parameter(torch.ones(size, dtype=dtype))
    optimizer = make_optimizer([("norm.weight", weight)], AdamW(betas=betas), seed)
    for _ in range(steps):
        weight.grad = torch.where(torch.arange(size) % 2 == 0, 0.5, -0.5).to(dtype)
        update(optimizer, LR, ONE, ZERO)
    return weight


def test_a_norm_moves_as_far_as_in_float32() -> None:
    """An update of 1e-3 is less than half the distance from 1 to its neighbours, 2^-8 below and 2^-7
    above."""
    exact, stored = (trained(dtype, 60).detach().double() for dtype in (torch.float32, torch.bfloat16))
    assert (stored != 1).double().mean() > 0.99
    for pulled in (0, 1):
        moved, truth = (float(weight[pulled::2].mean() - 1) for weight in (stored, exact))
        assert moved == pytest.approx(truth, rel=0.05)


def test_rounding_goes_to_one_of_the_two_neighbours_and_is_right_on_average() -> None:
    numbers = torch.tensor([1.001, -1.001, 3.14159e-5, 65000.7, 0.0, -2.0])
    chance = torch.arange(1 << 16).unsqueeze(1)  # every one of them
    rounded = rounding.round_stochastically(numbers.expand(1 << 16, -1).contiguous(), chance)
    assert [len(column.unique()) for column in rounded.T] == [2, 2, 2, 2, 1, 1]
    spacing = (rounded.double().amax(0) - rounded.double().amin(0)).clamp(min=1e-30)
    assert ((rounded.double().mean(0) - numbers.double()).abs() / spacing).max() < 1e-4


def test_steps_elements_names_and_seeds_draw_apart() -> None:
    one, again, other = (trained(torch.bfloat16, 3, seed=seed).detach() for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert 50 < int((one[::2] != 1).sum()) < 206  # of 256 elements with equal gradients, some have moved


def test_a_second_moment_falls_when_gradients_do() -> None:
    """With beta2 = 0.999 it falls by a thousandth a step, which the nearest of 8 bits cannot show."""
    weight = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    optimizer = make_optimizer([("w", weight)], AdamW(betas=(0.9, 0.999)))
    for step in range(101):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        update(optimizer, LR, ONE, ZERO)
    assert float(optimizer.state[weight]["exp_avg_sq"].double().mean()) == pytest.approx(
        1e-3 * 0.999**100, rel=0.02
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("columns", [slice(0, 300), slice(100, 200)], ids=["whole rows", "parts of rows"])
def test_a_gpu_updates_and_rounds_as_a_cpu_does(columns: slice) -> None:
    """But where the last bit of a float32 decides, which compilers of either are free to make otherwise."""

    def after_three_steps(device: str) -> list[torch.Tensor]:
        whole = torch.linspace(-2, 2, 700 * 300).reshape(700, 300).bfloat16()
        weight = nn.Parameter(whole[:, columns].contiguous().to(device))
        optimizer = make_optimizer([("w", weight)], AdamW(), slices_of=lambda _: (slice(0, 700), columns))
        for step in range(3):
            gradient = torch.linspace(1, -1, weight.numel(), device=device).reshape(weight.shape)
            weight.grad = (gradient * (step + 1)).to(torch.bfloat16)
            update(optimizer, LR * (step + 1), ONE.to(device), (ZERO + (step == 1)).to(device))
        moments = (optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))
        return [tensor.detach().cpu() for tensor in (weight, *moments)]

    for own, other in zip(after_three_steps("cuda"), after_three_steps("cpu"), strict=True):
        assert (own != other).float().mean() < 1e-3
        assert torch.allclose(own.float(), other.float(), rtol=2**-7)  # neighbours


@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (3, 4, 5), (0, 4)], ids=str)
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    def after_two_steps(chunk: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(rounding, "CHUNK", chunk)
        weight = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).bfloat16())
        optimizer = make_optimizer([("w", weight)], AdamW())
        for _ in range(2):
            weight.grad = torch.full_like(weight, 0.1)
            update(optimizer, LR, ONE, ZERO)
        state = optimizer.state[weight]
        return weight.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]

    small, large = after_two_steps(6), after_two_steps(1 << 20)
    assert all(torch.equal(one, other) for one, other in zip(small, large, strict=True))
    assert small[-1] == 2
