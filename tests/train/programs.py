"""Programs that the tests train: right ones, and one for each mistake."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

import shardwise as sw
from shardwise.config import Model
from shardwise.models import Transformer

TABLE = sw.Sharding(
    modules={"first": sw.columns(24), "second": sw.rows(24), "norm": sw.whole(), "last": sw.whole()},
    sequence_parallel=False,
)
STEPS, BATCH = 6, 12


class Points:
    """A map-style dataset of dictionaries. One sample in five counts three times in the loss."""

    def __init__(self, count: int = 100) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long() + (self.x[:, 0] > 1).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "x": self.x[index],
            "y": self.y[index],
            "weight": torch.tensor(3.0 if index % 5 == 0 else 1.0),
        }


class Net(nn.Module):
    """A few layers with initial values of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)
        nn.init.trunc_normal_(self.last.weight, std=0.3)
        nn.init.constant_(self.last.bias, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(F.gelu(self.first(x)))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The weighted cross-entropy, and the sum of weights."""
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def two_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Two losses by name."""
    logits = model(batch["x"])
    fit = F.cross_entropy(logits, batch["y"], reduction="sum")
    return {"fit": fit, "small": 0.1 * logits.square().sum()}, len(batch["y"])


def trains(engine: sw.Engine, function: Any = loss, make: Callable[[], nn.Module] = Net, **more: Any) -> None:
    """The loop of most programs here."""
    engine.prepare(make, sharding=TABLE)
    engine.optimizer("adamw", lr=1e-2, weight_decay=0.0)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS, **more):
        engine.forward_backward(function, batch)
        engine.clip_grad_norm(0.5)
        engine.optim_step()


def reads_ahead(engine: sw.Engine) -> None:
    """Two processes read the samples."""
    trains(engine, workers=2)


def named_losses(engine: sw.Engine) -> None:
    trains(engine, two_losses)


class WithToken(nn.Module):
    """Has a weight of its own beside its layers, and a norm on its float inputs. Its loss calls a part of
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((8,), 0.5))
        self.body = nn.Sequential(nn.LayerNorm(8), Net())
        self.teacher = Net().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.token)

    def twice(self, x: Tensor) -> Tensor:
        """Calls the model itself."""
        return self(x) + self(-x)


def distils(model: WithToken, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Uses a method, a part, and a frozen part of the model."""
    soft = F.softmax(model.teacher(batch["x"]), -1)
    fit = F.cross_entropy(model.twice(batch["x"]), batch["y"], reduction="sum")
    near = -(F.log_softmax(model(batch["x"]), -1) * soft).sum()
    return {"fit": fit, "near": near}, len(batch["y"])


def has_a_token(engine: sw.Engine) -> None:
    nets = {f"{part}.{name}": role for part in ("body.1", "teacher") for name, role in TABLE.modules.items()}
    table = sw.Sharding({"": sw.whole(), "body.0": sw.whole(), **nets}, sequence_parallel=False)
    engine.prepare(WithToken, sharding=table)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(distils, batch)
        engine.optim_step()


def counts_in_state(engine: sw.Engine) -> None:
    """Keeps values of its own, evaluates and records."""
    engine.prepare(Net)
    engine.state.update(sum=0.0, seen=[])
    for batch in engine.batches(Points(), global_batch=BATCH, steps=40):
        engine.forward_backward(loss, batch)
        metrics = engine.optim_step()
        engine.state["sum"] += metrics["loss"]
        engine.state["seen"].append(engine.step)
        engine.log(mean=engine.state["sum"] / engine.step)
    engine.log(final=engine.evaluate(loss, Points(31))["loss"])


def of_the_job(engine: sw.Engine) -> None:
    """Trains the model and the data of the job."""
    engine.prepare()
    for batch in engine.batches():
        engine.forward_backward(sw.next_token_loss, batch)
        engine.clip_grad_norm(1.0)
        engine.optim_step()


@dataclass
class Batch:
    """A batch as an object of its own."""

    x: Tensor
    y: Tensor
    names: list[str]


class Tied(nn.Module):
    """Two layers with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(x)))


def ties_weights(engine: sw.Engine) -> None:
    """Its batches are dataclasses."""

    def collate(samples: list[dict[str, Tensor]]) -> Batch:
        x, y = (torch.stack([sample[key] for sample in samples]) for key in ("x", "y"))
        return Batch(x, y, ["point"] * len(samples))

    def fit(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch.names)

    engine.prepare(Tied)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS, collate=collate):
        engine.forward_backward(fit, batch)
        engine.optim_step()


class Tokens:
    """Random sequences of tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randint(257, (17,), generator=torch.Generator().manual_seed(index))
        return {"inputs": drawn[:-1], "targets": drawn[1:]}


def reads_the_data_of_the_job(engine: sw.Engine) -> None:
    """A model of its own on the text of the job."""
    engine.prepare(lambda: Transformer(Model(layers=1)))
    for batch in engine.batches(steps=2, global_batch=4):
        engine.forward_backward(sw.next_token_loss, batch)
        engine.optim_step()


def makes_our_transformer(engine: sw.Engine) -> None:
    """The built-in model as a module of the program."""
    engine.prepare(lambda: Transformer(Model()))
    for batch in engine.batches(Tokens(), global_batch=4, steps=STEPS):
        engine.forward_backward(sw.next_token_loss, batch)
        engine.optim_step()


def splits_at_random(engine: sw.Engine) -> None:
    """Draws its data before its loop."""
    engine.prepare(Net)
    train, _ = random_split(Points(), [80, 20])  # type: ignore[arg-type,var-annotated]
    engine.state["drawn"] = [*train.indices, random.random(), np.random.rand()]
    for batch in engine.batches(train, global_batch=BATCH, steps=160):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        engine.log(mean=float(np.mean(train.indices)))


class Noisy(Points):
    """Adds noise to its samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = super().__getitem__(index)
        noise = torch.randn(8) * random.random() + float(np.random.rand())
        return {**point, "x": point["x"] + noise}


def adds_noise(engine: sw.Engine) -> None:
    engine.prepare(Net, sharding=TABLE)
    for batch in engine.batches(Noisy(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()
    engine.log(evaluated=engine.evaluate(loss, Noisy(31))["loss"])


ACTIVATION = nn.GELU()


def copies_a_model(engine: sw.Engine) -> None:
    """Its model is a copy of one that exists, with an activation that all copies share."""
    net = Net()
    plainly(engine, lambda: nn.Sequential(copy.deepcopy(net), ACTIVATION))


# Mistakes


def returns_no_scalar(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"), 3))


def returns_a_mean(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: (F.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])))


def returns_no_count(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"))


def counts_in_text(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: (model(batch["x"]).sum(), "12"))


def uses_no_weight(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: (torch.tensor(1.0), 3))


def prepares_an_instance(engine: sw.Engine) -> None:
    trains(engine, make=Net())


class Complex(Net):
    """Has a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))


def has_a_complex_weight(engine: sw.Engine) -> None:
    trains(engine, make=Complex)


class Drifting(Net):
    """Counts the mean of its inputs while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return super().forward(x)


def plainly(engine: sw.Engine, make: Callable[[], nn.Module], function: Any = loss) -> None:
    """A loop without a table."""
    engine.prepare(make)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(function, batch)
        engine.optim_step()


def has_a_buffer_of_its_samples(engine: sw.Engine) -> None:
    plainly(engine, Drifting)


class Scaled(Net):
    """Has a scalar weight, as CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def has_a_scalar(engine: sw.Engine) -> None:
    plainly(engine, Scaled)


def misspells_a_setting(engine: sw.Engine) -> None:
    engine.optimizer("adamw", lr=1e-3, wd=0.1)
    plainly(engine, Net)


def makes_an_optimizer(engine: sw.Engine) -> None:
    engine.optimizer(torch.optim.SGD(Net().parameters()))  # type: ignore[arg-type]


def gives_a_class_that_is_nowhere(engine: sw.Engine) -> None:
    class Inner(torch.optim.SGD):
        """A class inside of a function."""

    engine.optimizer(Inner)


def _begins(engine: sw.Engine, make: Callable[[], nn.Module] = Net) -> None:
    engine.prepare(make)
    next(engine.batches(Points(), global_batch=BATCH, steps=STEPS))


def needs_a_closure(engine: sw.Engine) -> None:
    engine.optimizer(torch.optim.LBFGS, lr=1.0)
    _begins(engine)


def gives_a_tensor(engine: sw.Engine) -> None:
    engine.optimizer(torch.optim.NAdam, lr=1.0, eps=torch.tensor(1e-8))
    _begins(engine)


def misspells_a_group(engine: sw.Engine) -> None:
    engine.optimizer("adamw", groups={"lost.*": {"lr_factor": 0.1}})
    _begins(engine)


def groups_a_frozen_weight(engine: sw.Engine) -> None:
    engine.optimizer("adamw", groups={"teacher.*": {"lr_factor": 0.1}})
    _begins(engine, WithToken)


class OwnSGD(torch.optim.Optimizer):
    """SGD with a momentum that is replaced in each step."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                gradient = weight.grad + group["weight_decay"] * weight
                state["sum"] = group["momentum"] * state.get("sum", 0.0) + gradient
                weight -= group["lr"] * state["sum"]


GROUPS = {"*.bias": {"weight_decay": 0.3}, "second.*": {"lr_factor": 0.1}, "second.w*": {"weight_decay": 0.2}}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nadam": (torch.optim.NAdam, {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
    "own_sgd": (OwnSGD, {"momentum": 0.8}),
    "adamw": ("adamw", {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.1}),
}


def _with_optimizer(engine: sw.Engine, name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    engine.prepare(Net, sharding=TABLE)
    engine.optimizer(kind, lr=1e-2, groups=GROUPS, **settings)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.clip_grad_norm(0.5)
        engine.optim_step()


def nadam(engine: sw.Engine) -> None:
    _with_optimizer(engine, "nadam")


def own_sgd(engine: sw.Engine) -> None:
    _with_optimizer(engine, "own_sgd")


def adamw(engine: sw.Engine) -> None:
    _with_optimizer(engine, "adamw")


def sgd(engine: sw.Engine) -> None:
    engine.optimizer("sgd", lr=1e-2, momentum=0.5)
    _begins(engine)


def fails_at_once(engine: sw.Engine) -> None:
    raise KeyError("data")


def evaluates_nothing(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        engine.evaluate(loss, [])


def returns_names_in_another_order(engine: sw.Engine) -> None:
    """Each rank names its losses in an order of its own."""

    def named(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        losses, items = two_losses(model, batch)
        return (losses if engine.rank else dict(reversed(losses.items()))), items

    trains(engine, named)


def returns_other_names_on_one_rank(engine: sw.Engine) -> None:
    def named(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        losses, items = two_losses(model, batch)
        return (losses if engine.rank else {"fit": losses["fit"]}), items

    trains(engine, named)


def needs_gradients_in_its_loss(engine: sw.Engine) -> None:
    """A penalty on the gradient of the inputs."""

    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        x = batch["x"].clone().requires_grad_()
        logits = model(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        fit = F.cross_entropy(logits, batch["y"], reduction="sum")
        return fit + gradient.square().sum(), len(batch["y"])

    trains(engine, penalised)


def has_few_samples(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for _ in engine.batches(Points(5), global_batch=BATCH):
        pass


def calls_twice(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.forward_backward(loss, batch)


def skips_a_batch(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        if engine.step != 2:
            engine.forward_backward(loss, batch)
            engine.optim_step()


def steps_without_gradients(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for _ in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.optim_step()


OUTSIDE = Net()


def builds_outside(engine: sw.Engine) -> None:
    trains(engine, lambda model, batch: loss(OUTSIDE, batch))


class Unused(Net):
    """Has a weight that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.LayerNorm(3)


def returns_what_is_outside(engine: sw.Engine) -> None:
    plainly(engine, lambda: OUTSIDE)


def returns_what_it_has_built(engine: sw.Engine) -> None:
    net = Net()
    plainly(engine, lambda: net)


def returns_from_a_cache(engine: sw.Engine) -> None:
    plainly(engine, cache(Net))


class WithHead(nn.Module):
    """A head on a base that it is given."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def wraps_what_is_outside(engine: sw.Engine) -> None:
    base = Net().requires_grad_(False)
    plainly(engine, lambda: WithHead(base))


def shares_a_weight(engine: sw.Engine) -> None:
    """A shallow copy has the weights of its original."""
    layer = nn.Linear(8, 3)
    plainly(engine, lambda: nn.Sequential(copy.copy(layer)))


def leaves_a_weight_out(engine: sw.Engine) -> None:
    engine.prepare(Unused)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()


class TwoHeads(Net):
    """Has a second head, which adds to the logits if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        logits = super().forward(x)
        return logits + self.other(x) if both else logits


def rests_a_head(engine: sw.Engine) -> None:
    """Uses the second head in every second step."""

    def alternating(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        logits = model(batch["x"], both=engine.step % 2 == 0)
        return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])

    engine.prepare(TwoHeads)
    engine.optimizer("adamw", lr=1e-2, weight_decay=0.0)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(alternating, batch)
        engine.optim_step()


def prepares_twice(engine: sw.Engine) -> None:
    engine.prepare(Net)
    _begins(engine)


def chooses_two_optimizers(engine: sw.Engine) -> None:
    engine.optimizer("adamw", lr=1e-2)
    engine.optimizer("sgd", lr=1e-1)
    _begins(engine)


def loops_over_two_datasets(engine: sw.Engine) -> None:
    engine.prepare(Net)
    length: dict[str, Any] = {"global_batch": BATCH, "steps": STEPS}
    first, second = engine.batches(Points(), **length), engine.batches(Points(48), **length)
    for batch, _ in zip(first, second, strict=True):
        engine.forward_backward(loss, batch)
        engine.optim_step()


def asks_for_a_second_dataset_in_its_loop(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        next(engine.batches(Points(48), global_batch=BATCH))


def loops_over_epochs(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for _ in range(2):
        for batch in engine.batches(Points(24), global_batch=BATCH):
            engine.forward_backward(loss, batch)
            engine.optim_step()


def _names_losses(engine: sw.Engine, *names: str) -> None:
    def named(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        losses, items = two_losses(model, batch)
        return dict(zip(names, losses.values(), strict=True)), items

    trains(engine, named)


def names_a_loss_items(engine: sw.Engine) -> None:
    _names_losses(engine, "items", "small")


def names_a_loss_seconds(engine: sw.Engine) -> None:
    _names_losses(engine, "fit", "seconds")


def names_a_loss_loss_beside_another(engine: sw.Engine) -> None:
    _names_losses(engine, "loss", "small")


def logs_a_step(engine: sw.Engine) -> None:
    trains(engine)
    engine.log(step=3.0)


async def is_async(engine: sw.Engine) -> None:
    trains(engine)


def is_a_generator(engine: sw.Engine) -> Iterator[int]:
    trains(engine)
    yield 1


def takes_no_argument() -> None:
    pass


def takes_two_arguments(engine: sw.Engine, lr: float) -> None:
    trains(engine)


def prepares_a_class_with_arguments(engine: sw.Engine) -> None:
    engine.prepare(nn.Linear)  # type: ignore[arg-type]


def ends_before_its_loop(engine: sw.Engine) -> None:
    engine.prepare(Net)


def prepares_nothing(engine: sw.Engine) -> None:
    for _ in engine.batches(Points(), global_batch=BATCH):
        pass


def prepares_no_module(engine: sw.Engine) -> None:
    trains(engine, make=lambda: {"weight": 1})  # type: ignore[arg-type,return-value]


def has_samples_in_a_generator(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for _ in engine.batches((point for point in Points()), global_batch=BATCH):  # type: ignore[attr-defined]
        pass


def keeps_a_module_in_state(engine: sw.Engine) -> None:
    engine.state["net"] = Net()
    trains(engine)


def keeps_a_date_in_state(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        engine.state["best"] = [np.mean([0.5]), {"when": date(2026, 1, 1)}]


def goes_on_after_the_end(engine: sw.Engine) -> None:
    engine.prepare(Net)
    batches = engine.batches(Points(), global_batch=BATCH, steps=STEPS)
    batch = None
    while True:
        batch = next(batches, batch)
        assert batch is not None
        engine.forward_backward(loss, batch)
        engine.optim_step()


def returns_early_on_one_rank(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        if engine.rank == 1 and engine.step == 2:
            return


def evaluates_on_one_rank(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        if engine.rank == 1:
            engine.evaluate(loss, Points())


def raises_on_one_rank(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        if engine.rank == 1 and engine.step == 2:
            raise KeyError("lost sample")
        engine.forward_backward(loss, batch)
        engine.optim_step()


def stops_on_one_rank(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Points(), global_batch=BATCH, steps=STEPS):
        if engine.rank == 1 and engine.step == 2:
            engine.stop()
        engine.forward_backward(loss, batch)
        engine.optim_step()
    engine.log(ended_after=engine.step)


class Walk:
    """An iterable dataset without an end: points of a random walk, in an order of its own."""

    def __init__(self, count: int | None = None) -> None:
        self.count, self.place = count, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        points = Points(90)
        while self.count is None or self.place < self.count:
            self.place += 1
            yield points[7 * self.place % 90]
        self.place = 0


class StatefulWalk(Walk):
    """Can go on from a state."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def streams(engine: sw.Engine, dataset: object = None, steps: int | None = 60, **more: Any) -> None:
    engine.prepare(Net, sharding=TABLE)
    for batch in engine.batches(dataset or Walk(50), global_batch=BATCH, steps=steps, **more):
        engine.forward_backward(loss, batch)
        engine.clip_grad_norm(0.5)
        engine.optim_step()
    engine.state["evaluated"] = engine.evaluate(loss, Walk(31))["loss"]


def streams_with_state(engine: sw.Engine) -> None:
    streams(engine, StatefulWalk())


def streams_without_steps(engine: sw.Engine) -> None:
    streams(engine, steps=None)


def streams_with_workers(engine: sw.Engine) -> None:
    streams(engine, workers=2)


def streams_an_iterator(engine: sw.Engine) -> None:
    streams(engine, iter(Walk()))


def streams_nothing(engine: sw.Engine) -> None:
    streams(engine, Walk(0))


class Notes:
    """A callback that writes down what it is called with."""

    def on_step(self, record: dict[str, Any]) -> None:
        with Path("notes.txt").open("a") as file:
            print("step", record["step"], record["loss"], file=file)

    def on_end(self, event: dict[str, Any]) -> None:
        with Path("notes.txt").open("a") as file:
            print("end", file=file)


def has_a_callback(engine: sw.Engine) -> None:
    engine.add_callback(Notes())
    trains(engine)


def adds_a_callback_late(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for _ in engine.batches(Points(), global_batch=BATCH):
        engine.add_callback(Notes())


def streams_batches(engine: sw.Engine) -> None:
    streams(engine, DataLoader(Points()))


def evaluates_an_empty_stream(engine: sw.Engine) -> None:
    engine.prepare(Net)
    for batch in engine.batches(Walk(), global_batch=BATCH, steps=2):
        engine.forward_backward(loss, batch)
        engine.optim_step()
        engine.evaluate(loss, Walk(0))
