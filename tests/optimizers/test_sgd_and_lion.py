"""SGD and Lion: the textbook's numbers on one device, the same on every layout, and the bytes that were
predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers.cases import ONE, ZERO, check_bfloat16_states, check_sparse_rows, check_uneven_pieces
from ranks.jobs import LLAMA, on_one_device, worst_difference
from ranks.layouts import EXACT, LAYOUTS, SOME_LAYOUTS, tables_of
from ranks.pool import Pool
from ranks.trained import Runs, check_held, check_sent
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.config import Model, from_tables
from shardwise.errors import ConfigError, UserError
from shardwise.models import Transformer, initialise
from shardwise.optim import make_optimizer, update
from shardwise.optimizers import SGD, AdamW, Lion, Optimizer
from shardwise.optimizers.base import NORM_NUMBERS
from shardwise.plans import choose
from shardwise.proof.plain_torch import check_known
from shardwise.proof.prove import prove
from shardwise.search.interval import plan_checkpoints
from shardwise.search.search import workload_of

TABLES = ("embedding.weight", "positions.weight")
RATES = ((0.1, 1.0), (0.05, 3.7), (0.2, 1234.5))
"""The learning rate of each step, and what its gradients are divided by."""
SETTINGS: dict[str, Optimizer] = {
    "sgd": SGD(weight_decay=0.2),
    "nesterov": SGD(momentum=0.8, nesterov=True, weight_decay=0.2),
    "no momentum": SGD(momentum=0.0, weight_decay=0.2),
    "lion": Lion(betas=(0.8, 0.9), weight_decay=0.2),
}
every_optimizer = pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))


# -- one device ----------------------------------------------------------------------------------------------


def model_with_gradients(dtype: torch.dtype) -> Transformer:
    model = Transformer(Model(**{**LLAMA, "layers": 1})).to(dtype)
    initialise(model, 5)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def torch_sgd(settings: SGD, model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Train by torch.optim.SGD."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2 and name not in TABLES].append(parameter)
    optimizer = torch.optim.SGD(
        [{"params": groups[True], "weight_decay": settings.weight_decay}, {"params": groups[False]}],
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        foreach=False,
    )
    for lr, divisor in RATES:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name] / divisor
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


@torch.no_grad()
def written_out_lion(settings: Lion, model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Train by algorithm 2 of Chen et al. (2023)."""
    beta1, beta2 = settings.betas
    for name, parameter in model.named_parameters():
        decay = settings.weight_decay if parameter.ndim >= 2 and name not in TABLES else 0.0
        momentum = torch.zeros_like(parameter)
        for lr, divisor in RATES:
            gradient = gradients[name] / divisor
            direction = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
            parameter.copy_(parameter - lr * (direction + decay * parameter))
            momentum = beta2 * momentum + (1 - beta2) * gradient


@every_optimizer
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
def test_updates_are_those_of_torch_or_of_the_paper(
    settings: Optimizer, dtype: torch.dtype, bound: float
) -> None:
    ours, theirs = model_with_gradients(dtype), model_with_gradients(torch.float64)
    gradients = {name: parameter.grad.clone() for name, parameter in theirs.named_parameters()}
    optimizer = make_optimizer(ours.named_parameters(), settings, embeddings=TABLES)
    for lr, divisor in RATES:
        for name, parameter in ours.named_parameters():
            parameter.grad = gradients[name].to(dtype, copy=True)
        update(optimizer, lr, torch.tensor(divisor, dtype=dtype), ZERO)
    if isinstance(settings, SGD):
        torch_sgd(settings, theirs, gradients)
    else:
        assert isinstance(settings, Lion)
        written_out_lion(settings, theirs, gradients)
    for mine, truth in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float((mine.detach() - truth.detach()).abs().max() / truth.detach().abs().max()) < bound


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_update_changes_no_bit(settings: Optimizer, dtype: torch.dtype) -> None:
    model = model_with_gradients(dtype)
    optimizer = make_optimizer(model.named_parameters(), settings, embeddings=TABLES)
    update(optimizer, 0.1, ONE.to(dtype), ZERO)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    next(model.parameters()).grad[0, 0] = torch.nan
    update(optimizer, 0.1, torch.tensor(torch.nan, dtype=dtype), ONE)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert all(
        torch.equal(states[index][slot], value) for index in states for slot, value in found[index].items()
    )
    assert {slot for state in found.values() for slot in state} == {"step", *settings.slots}


@every_optimizer
def test_states_in_bfloat16_move_as_far_as_in_float32(settings: Optimizer) -> None:
    check_bfloat16_states(settings)


@pytest.mark.parametrize("name", ["sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_uneven_pieces_are_updated_as_the_whole_is(
    ranks: Callable[[int], Pool], name: str, dtype: torch.dtype
) -> None:
    check_uneven_pieces(ranks(2), SETTINGS[name], dtype)


@every_optimizer
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_rows_of_a_sparse_gradient_are_updated_as_those_of_a_dense_one(
    settings: Optimizer, shared: bool
) -> None:
    check_sparse_rows(settings, shared)


# -- every layout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "lion"])
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_every_axis_trains_as_one_device_and_holds_and_sends_what_was_predicted(
    trained: Runs, corpus: str, name: str, layout: str
) -> None:
    tables = tables_of(corpus, {"name": name}, layout)
    found = trained(tables)
    assert worst_difference(found[0], on_one_device(tables)) < EXACT
    check_held(found, tables)
    check_sent(found, tables)


@pytest.mark.parametrize("name", ["sgd", "lion"])
@pytest.mark.parametrize("layout", ["zero 2", "expert"])
def test_bfloat16_states_take_the_bytes_that_were_predicted(
    trained: Runs, corpus: str, name: str, layout: str
) -> None:
    tables = tables_of(corpus, {"name": name}, layout, precision="bfloat16", state_dtype="bfloat16")
    check_held(trained(tables), tables)


@pytest.mark.parametrize("name", ["lion", pytest.param("sgd", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("layout", "against"),
    [
        ("tensor, zero 3", "plain"),
        *(
            pytest.param(layout, against, marks=pytest.mark.full)
            for layout in LAYOUTS
            for against in ("one-device", "plain")
        ),
    ],
)
def test_verify_proves_it(corpus: str, name: str, layout: str, against: Any) -> None:
    found = prove(from_tables(tables_of(corpus, {"name": name}, layout)), steps=2, against=against).to_json()
    assert found["pass"], found["faults"]
    assert found["worst"]["relative_error"] < EXACT


# -- what is planned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "states"), [(AdamW(), 2), (Lion(), 1), (SGD(), 1), (SGD(momentum=0), 0)]
)
def test_plans_count_the_states_that_an_optimizer_keeps(settings: Optimizer, states: int) -> None:
    config = from_tables({"data": {"source": "x"}, "train": {"global_batch": 2}, "layout": {"data": 1}})
    config = config.model_copy(update={"optimizer": settings})
    plan, work = choose(config, 1), workload_of(config)
    assert plan.state_bytes.optimizer == 4 * states * plan.parameters
    assert plan.state_numbers == (1 + states) * plan.parameters
    assert work.optimizer is settings
    assert plan_checkpoints(1e9, 1, 1e9, 1.0, bytes_per_parameter=4 * (1 + states)).bytes == 4e9 * (
        1 + states
    )


class Moved(TorchDispatchMode):
    """Counts the numbers that operators read and write, of tensors of one size; views move none."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.numbers = size, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator not in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            tensors = [part for part in (*args, result) if isinstance(part, Tensor)]
            self.numbers += sum(tensor.numel() for tensor in tensors if tensor.numel() == self.size)
        return result


def test_the_numbers_that_an_update_by_operators_moves_are_those_that_are_planned() -> None:
    weight = nn.Parameter(torch.ones(50, 20))
    weight.grad = torch.ones(50, 20)
    optimizer = make_optimizer([("w", weight)], Lion())
    optimizer.state_of(weight)
    with Moved(1000) as moved:
        update(optimizer, 0.1, ONE, ZERO)
    assert moved.numbers / 1000 + NORM_NUMBERS == Lion().numbers_moved


# -- what is refused -----------------------------------------------------------------------------------------


def problems(**tables: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"data": {"source": "x"}, **tables})
    return "\n".join(refusal.value.problems)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"optimizer": {"name": "lyon"}}, "optimizer.name = 'lyon': unknown optimizer. Did you mean 'lion'?"),
        ({"optimizer": {"name": "zzz"}}, "known are: adamw, 1bit-adam, sgd, lion"),
        (
            {"optimizer": {"name": "lion", "epsilon": 1.0}},
            "unknown key; known are: name, weight_decay, groups, betas",
        ),
        ({"optimizer": {"name": "sgd", "momentun": 0.5}}, "Did you mean optimizer.momentum?"),
        (
            {"optimizer": {"name": "sgd", "momentum": 0.0, "nesterov": True}},
            "no effect with optimizer.momentum",
        ),
        (
            {"optimizer": {"name": "lion", "betas": [0.9, 1.0]}},
            "[0.9, 1.0]: both must be at least 0 and below",
        ),
        (
            {"optimizer": {"name": "1bit-adam"}, "train": {"driver": "local"}},
            "train.driver = 'local': leave optimizer.name = '1bit-adam' out",
        ),
        (
            {
                "optimizer": {"name": "lion"},
                "train": {"driver": "server"},
                "server": {"max_staleness": 2},
            },
            "set server.prediction = false, or server.max_staleness = 0",
        ),
    ],
)
def test_mistakes_are_answered_with_what_to_write(tables: dict[str, Any], said: str) -> None:
    assert said in problems(**tables)


def test_an_optimizer_that_cannot_do_without_a_lock_is_refused() -> None:
    class Locked(Lion):
        lock_free = False

    config = from_tables({"data": {"source": "x"}, "train": {"driver": "hogwild"}})
    from shardwise.config.check import problems_across

    found = problems_across({**dict(config), "optimizer": Locked()})
    assert found == [
        "train.driver = 'hogwild': optimizer.name = 'lion' cannot update weights without a lock; use one of "
        "adamw, sgd, lion"
    ]


def test_a_proof_in_plain_torch_needs_a_reference() -> None:
    class Unproven(Lion):
        def reference(self, groups: list[dict[str, Any]]) -> None:
            return None

    config = from_tables({"data": {"source": "x"}}).model_copy(update={"optimizer": Unproven()})
    with pytest.raises(UserError, match="gives no reference to step with"):
        check_known(config)
