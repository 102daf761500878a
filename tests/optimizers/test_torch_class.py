"""Classes of torch.optim, of packages and of files as optimizers: the numbers of the plain class on whole
weights, on every layout; the bytes that were predicted; and classes that cannot be sharded are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers.cases import ONE, ZERO, check_bfloat16_states, check_sparse_rows, check_uneven_pieces
from ranks.jobs import ALONE, LLAMA, Tables, on_one_device, put_together, start, worst_difference
from ranks.layouts import EXACT, LAYOUTS, SOME_LAYOUTS, tables_of
from ranks.pool import Pool
from ranks.trained import Runs, check_held, check_sent
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.checkpoint.save import state_of
from shardwise.config import Layout, Model, from_tables, to_toml
from shardwise.errors import ConfigError, UserError
from shardwise.files import parse_toml
from shardwise.mesh import Worker, join
from shardwise.models import Transformer, initialise
from shardwise.optim import make_optimizer, update
from shardwise.optimizers import Optimizer, TorchClass, class_step, from_table
from shardwise.parallel.placement import local_slices
from shardwise.plans import Plan, choose
from shardwise.proof.prove import prove
from shardwise.train.build import restore, save
from shardwise.train.describe import describe_run
from shardwise.train.steps import steps

TABLES = ("embedding.weight", "positions.weight")
RATES = ((0.1, 1.0), (0.05, 3.7), (0.2, 1234.5), (0.02, 2.0))
"""The learning rate of each step, and what its gradients are divided by."""
CLASSES: dict[str, dict[str, Any]] = {
    "NAdam": {"betas": (0.8, 0.9), "weight_decay": 0.2},
    "RAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "Adamax": {},
    "RMSprop": {"momentum": 0.7, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.3},
    "Adadelta": {"weight_decay": 0.1},
    "ASGD": {"t0": 2.0, "lambd": 0.01},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "Adam": {"amsgrad": True, "foreach": True, "maximize": True},
    "AdamW": {"fused": True},
}
every_class = pytest.mark.parametrize("name", CLASSES)


def settings_of(name: str) -> Optimizer:
    return from_table({"name": f"torch.optim.{name}", **CLASSES[name]})


# -- one device ----------------------------------------------------------------------------------------------


def model_with_gradients(dtype: torch.dtype) -> Transformer:
    model = Transformer(Model(**{**LLAMA, "layers": 1})).to(dtype)
    initialise(model, 5)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def train_plainly(name: str, model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Train by the class itself: one optimizer, whole weights. Only matrices decay."""
    kind, settings = getattr(torch.optim, name), dict(CLASSES[name])
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for path, parameter in model.named_parameters():
        decays[parameter.ndim >= 2 and path not in TABLES].append(parameter)
    groups: list[dict[str, Any]] = [{"params": decays[True]}, {"params": decays[False]}]
    if name != "Rprop":
        groups[1]["weight_decay"] = 0.0
    optimizer = kind(groups, lr=1.0, **settings)
    for lr, divisor in RATES:
        for path, parameter in model.named_parameters():
            parameter.grad = gradients[path] / divisor
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


@every_class
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("chunk", [1 << 24, 1000])
def test_updates_are_those_of_the_class(
    name: str, dtype: torch.dtype, bound: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_step, "CHUNK", chunk)
    ours, theirs = model_with_gradients(dtype), model_with_gradients(dtype)
    gradients = {path: parameter.grad.clone() for path, parameter in theirs.named_parameters()}
    optimizer = make_optimizer(ours.named_parameters(), settings_of(name), embeddings=TABLES)
    for lr, divisor in RATES:
        for path, parameter in ours.named_parameters():
            parameter.grad = gradients[path].clone()
        update(optimizer, lr, torch.tensor(divisor, dtype=dtype), ZERO)
    train_plainly(name, theirs, gradients)
    for mine, truth in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float((mine.detach() - truth.detach()).abs().max() / truth.detach().abs().max()) < bound


@every_class
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("before", [0, 1])
def test_a_skipped_update_changes_no_bit(name: str, dtype: torch.dtype, before: int) -> None:
    model = model_with_gradients(dtype)
    settings = settings_of(name)
    optimizer = make_optimizer(model.named_parameters(), settings, embeddings=TABLES)
    for parameter in model.parameters():
        optimizer.state_of(parameter)
    for _ in range(before):
        update(optimizer, 0.1, ONE.to(dtype), ZERO)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    next(model.parameters()).grad[0, 0] = torch.nan
    update(optimizer, 0.1, torch.tensor(torch.nan, dtype=dtype), ONE)
    assert all(torch.equal(weights[path], value) for path, value in model.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert all(
        torch.equal(states[index][slot], value) for index in states for slot, value in found[index].items()
    )
    names = {slot for state in found.values() for slot in state}
    assert names == {"step", *settings.slots, *settings.scalars}


@pytest.mark.parametrize("name", ["NAdam", "RMSprop", "SGD", "Adagrad"])
def test_states_in_bfloat16_move_as_far_as_in_float32(name: str) -> None:
    check_bfloat16_states(settings_of(name))


@pytest.mark.parametrize("name", ["NAdam", "Rprop", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_uneven_pieces_are_updated_as_the_whole_is(
    ranks: Callable[[int], Pool], name: str, dtype: torch.dtype
) -> None:
    check_uneven_pieces(ranks(2), settings_of(name), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_an_empty_shard_counts_its_single_numbers_too(
    ranks: Callable[[int], Pool], dtype: torch.dtype
) -> None:
    """A checkpoint may take the number from any rank."""
    for count, product in ranks(2).run(numbers_of_one_row, dtype):
        alone = nn.Parameter(torch.ones(1, 3, dtype=dtype))
        alone.grad = torch.ones_like(alone)
        optimizer = make_optimizer([("w", alone)], settings_of("NAdam"))
        update(optimizer, 0.01, ONE.double(), ZERO)
        assert (count, product) == (1.0, float(optimizer.state[alone]["mu_product"]))


def numbers_of_one_row(worker: Worker, dtype: torch.dtype) -> tuple[float, float]:
    device_mesh = join(worker, Layout(data=1, tensor=2)).sub("tensor")
    row = distribute_tensor(torch.ones(1, 3, dtype=dtype), device_mesh, [Shard(0)])
    parameter = nn.Parameter(row)
    parameter.grad = torch.ones_like(row)
    optimizer = make_optimizer([("w", parameter)], settings_of("NAdam"), slices_of=local_slices)
    update(optimizer, 0.01, ONE.double(), ZERO)
    return float(optimizer.state[parameter]["step"]), float(optimizer.state[parameter]["mu_product"])


@every_class
def test_rows_of_a_sparse_gradient_are_updated_as_those_of_a_dense_one(name: str) -> None:
    settings = settings_of(name)
    if not settings.from_zeros:
        pytest.skip("refused for sparse gradients")
    check_sparse_rows(settings)


def test_classes_whose_states_do_not_begin_as_zeros_are_known() -> None:
    assert [name for name in CLASSES if not settings_of(name).from_zeros] == ["Adagrad", "Rprop"]


# -- every layout --------------------------------------------------------------------------------------------

NADAM = {"name": "torch.optim.NAdam", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2}


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_every_axis_trains_as_one_device_and_holds_and_sends_what_was_predicted(
    trained: Runs, corpus: str, layout: str
) -> None:
    tables = tables_of(corpus, NADAM, layout)
    found = trained(tables)
    assert worst_difference(found[0], on_one_device(tables)) < EXACT
    check_held(found, tables)
    check_sent(found, tables)


@pytest.mark.parametrize("layout", ["zero 2", "expert"])
def test_bfloat16_states_take_the_bytes_that_were_predicted(trained: Runs, corpus: str, layout: str) -> None:
    tables = tables_of(corpus, NADAM, layout, precision="bfloat16", state_dtype="bfloat16")
    check_held(trained(tables), tables)


@pytest.mark.parametrize(
    ("layout", "against"),
    [
        ("tensor, zero 3", "plain"),
        ("expert", "plain"),
        *(
            pytest.param(layout, against, marks=pytest.mark.full)
            for layout in LAYOUTS
            for against in ("one-device", "plain")
        ),
    ],
)
def test_verify_proves_it(corpus: str, layout: str, against: Any) -> None:
    found = prove(from_tables(tables_of(corpus, NADAM, layout)), steps=2, against=against).to_json()
    assert found["pass"], found["faults"]
    assert found["worst"]["relative_error"] < EXACT


@pytest.mark.parametrize("other", ["tensor", "pipeline"])
def test_a_checkpoint_goes_on_on_another_layout(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, other: str
) -> None:
    """State and weights to the last bit, and the next steps as on one device that never stopped."""
    degrees = {"tensor": {"data": 1, "tensor": 2}, "pipeline": {"data": 1, "pipeline": 2}}[other]
    first = tables_of(corpus, NADAM, "zero 3", steps=4)
    first["checkpoint"] = {"folder": str(tmp_path)}
    second = {**first, "layout": degrees}
    saved = ranks(2).run(train_and_save, first)[0]
    for loaded, numbers in ranks(2).run(load_and_train, second, saved[1]):
        assert loaded.keys() == saved[0].keys()
        assert any(name.endswith(".mu_product") for name in loaded)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved[0].items())
        assert numbers == pytest.approx(on_one_device(first).losses[2:], rel=EXACT)


def whole_state(training: Any) -> dict[str, Tensor]:
    state = state_of(training.parallel.named_parameters(), training.optimizer)
    return put_together({str(key): tensor for key, tensor in state.items()}, training.mesh.worker.world)


def train_and_save(worker: Worker, tables: Tables) -> tuple[dict[str, Tensor], str]:
    training = start(worker, tables)
    for step in steps(training):
        if step.step == 2:
            address = save(training)
            state = whole_state(training)
    return state, address


def load_and_train(worker: Worker, tables: Tables, address: str) -> tuple[dict[str, Tensor], list[float]]:
    training = start(worker, tables)
    restore(training, address)
    return whole_state(training), [step.loss for step in steps(training)]


def test_a_checkpoint_of_adamw_goes_on_with_the_class_of_torch(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    """They keep the same states."""
    ours: dict[str, Any] = {"name": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1}
    first = tables_of(corpus, ours, "zero 2", steps=4)
    first["checkpoint"] = {"folder": str(tmp_path)}
    second = {**first, "optimizer": {**ours, "name": "torch.optim.AdamW"}}
    _, address = ranks(2).run(train_and_save, first)[0]
    for _, numbers in ranks(2).run(load_and_train, second, address):
        assert numbers == pytest.approx(on_one_device(first).losses[2:], rel=EXACT)


def test_the_header_names_the_class_its_settings_and_its_states(corpus: str) -> None:
    tables = {**tables_of(corpus, NADAM, "zero 0"), "layout": {}}
    assert describe_run(start(ALONE, tables))["optimizer"] == (
        "torch.optim.NAdam(betas=(0.8, 0.9), eps=1e-06, weight_decay=0.2), keeps exp_avg, exp_avg_sq, "
        "mu_product"
    )


# -- what is planned -----------------------------------------------------------------------------------------

OWN = '''
import torch


class Sign(torch.optim.Optimizer):
    """Signs of a momentum, which is kept in float16 and replaced in each step."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.get("momentum", torch.zeros_like(weight)).to(weight.dtype)
                momentum = group["beta"] * momentum + (1 - group["beta"]) * weight.grad
                state["momentum"], state["count"] = momentum.half(), state.get("count", 0) + 1
                weight -= group["lr"] * momentum.sign()


class Normed(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = weight.grad / weight.grad.norm()
        super().step()


class Remembers(torch.optim.SGD):
    def step(self):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.count
        super().step()


class Noisy(torch.optim.SGD):
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight.grad = weight.grad + torch.randn_like(weight)
        super().step()


class FixedRate(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.rate = lr

    def step(self):
        for group in self.param_groups:
            group["lr"] = self.rate
        super().step()


class Fails(torch.optim.SGD):
    def step(self):
        raise RuntimeError("not today")


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {})


def function():
    pass
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_optimizers.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(("name", "states"), [("NAdam", 2), ("SGD", 1), ("RMSprop", 3), ("Adam", 3)])
def test_plans_count_the_states_that_a_class_keeps(name: str, states: int) -> None:
    config = from_tables({"data": {"source": "x"}, "train": {"global_batch": 2}, "layout": {"data": 1}})
    plan = choose(config.model_copy(update={"optimizer": settings_of(name)}), 1)
    assert plan.state_bytes.optimizer == 4 * states * plan.parameters
    assert plan.state_numbers == (1 + states) * plan.parameters
    assert Plan.from_json(plan.to_json()) == plan


def test_a_state_of_another_dtype_is_kept_in_it_and_counted(own: Path, corpus: str, trained: Runs) -> None:
    settings = from_table({"name": f"{own}:Sign", "beta": 0.5})
    assert (settings.slots, settings.slot_dtype("momentum")) == (("momentum",), "float16")
    assert settings.scalars == ("count",)
    assert settings.state_bytes(8) == 2
    tables = tables_of(corpus, {"name": f"{own}:Sign"}, "zero 2")
    check_held(trained(tables), tables)


def test_the_numbers_that_an_update_moves_are_counted() -> None:
    """SGD reads weight and gradient, and writes the weight."""
    moved = [from_table({"name": "torch.optim.SGD", "foreach": foreach}) for foreach in (False, True)]
    assert [settings.numbers_moved for settings in moved] == [6.0, 6.0]


def test_a_table_is_written_and_read_again(own: Path) -> None:
    for optimizer in (NADAM, {"name": f"{own}:Sign", "beta": 0.5}, {"name": "torch.optim.Rprop"}):
        config = from_tables({"data": {"source": "x"}, "optimizer": optimizer})
        written = to_toml(config)
        again = from_tables(parse_toml(written.encode(), "job"))
        assert again.optimizer == config.optimizer
        assert isinstance(again.optimizer, TorchClass)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"name": "torch.optim.LBFGS"}, "its step() needs a closure that computes the loss again"),
        (
            {"name": "torch.optim.Adafactor"},
            "it keeps row_var, of shape (96, 1), for a weight of shape (96, 64)",
        ),
        ({"name": "torch.optim.Muon"}, "does not treat each number independently"),
        ({"name": "torch.optim.SparseAdam"}, "SparseAdam says: SparseAdam does not support dense gradients"),
        ({"name": "torch.optim.NAdan"}, "torch.optim has no optimizer class NAdan. Did you mean NAdam?"),
        ({"name": "torch.optim.Optimizer"}, "Optimizer says:"),
        ({"name": "no_such.Class"}, "no_such could not be run: ModuleNotFoundError: No module named"),
        ({"name": "no_such.py:Class"}, "no such file"),
        (
            {"name": "torch.optim.NAdam", "bets": [0.1, 0.2]},
            "optimizer.bets: NAdam has no keyword 'bets'. Did you",
        ),
        (
            {"name": "torch.optim.NAdam", "betas": [0.1, 2.0]},
            "NAdam says: Invalid beta parameter at index 1: 2.0",
        ),
        (
            {"name": "torch.optim.NAdam", "lr": 0.1},
            "the learning rate of the schedule is train.learning_rate",
        ),
        ({"name": "torch.optim.Rprop", "weight_decay": 0.1}, "unexpected keyword argument 'weight_decay'"),
        ({"name": "torch.optim.NAdam", "weight_decay": -1.0}, "input should be greater than or equal to 0"),
        (
            {"name": "nadam"},
            "'nadam': unknown optimizer. Did you mean 'torch.optim.NAdam' or 'adamw'?",
        ),
        ({"name": "zzz"}, "known are: adamw, 1bit-adam, sgd, lion, and classes such as torch.optim.NAdam"),
        (
            {"name": "torch.optim.Rprop", "groups": {"*": {"weight_decay": 0.1}}},
            "torch.optim.Rprop has no weight decay",
        ),
    ],
)
def test_mistakes_are_answered_with_what_to_write(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"data": {"source": "x"}, "optimizer": table})
    assert said in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Normed", "the halves of a weight do not become what the whole weight becomes"),
        ("Remembers", "keeps numbers outside of `state`"),
        ("Noisy", "The class draws random numbers"),
        ("FixedRate", "ignores the learning rate of its group"),
        ("Fails", "Fails says: not today"),
        ("NoRate", "its groups have no `lr`"),
        ("function", "has no optimizer class function; it has Fails"),
    ],
)
def test_a_class_of_a_file_that_cannot_be_sharded_is_refused(own: Path, name: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        from_table({"name": f"{own}:{name}"})
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"driver": "hogwild"}, "cannot update weights without a lock; use one of adamw, sgd, lion"),
        ({"driver": "server"}, "has no momentum by which weights could be predicted"),
    ],
)
def test_drivers_that_need_more_than_a_class_says_refuse_it(train: dict[str, Any], said: str) -> None:
    tables = {"data": {"source": "x"}, "optimizer": NADAM, "train": train}
    with pytest.raises(ConfigError) as refusal:
        from_tables({**tables, **({"server": {"max_staleness": 2}} if train["driver"] == "server" else {})})
    assert said in str(refusal.value)
