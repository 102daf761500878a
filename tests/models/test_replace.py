"""A module that takes the place of another is found wherever the other was, and has all that it had."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shardwise.models.replace import Replacement, put_in_place, replacement


class Doubled(Replacement):
    factor: float

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.factor * super().forward(*inputs)


class Holder(nn.Module):
    """Holds one layer in every way in which authors of models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.again = nn.ModuleList([self.layer])
        self.steps = [self.layer]
        self.pair = (self.layer, "name")
        self.by_name = {"deep": [{"layer": self.layer}]}
        self.call = self.layer.__call__
        self.__dict__["unregistered"] = self.layer
        self.hidden = [nn.Sequential(self.layer)]

    def held(self) -> list[nn.Module]:
        nested = self.by_name["deep"][0]["layer"]
        hidden = self.hidden[0][0]
        called = self.call.__self__
        return [
            self.layer,
            self.again[0],
            self.steps[0],
            self.pair[0],
            nested,
            called,
            self.unregistered,
            hidden,
        ]


def doubled(module: nn.Module) -> nn.Module:
    return replacement(module, Doubled, factor=2.0)


def test_a_replacement_is_found_wherever_the_original_was() -> None:
    model = Holder()
    layer, steps = model.layer, model.steps
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    new = doubled(layer)
    assert put_in_place(model, {layer: new}) is model
    assert all(module is new for module in model.held())
    assert model.steps is steps  # whoever else has the list sees the replacement too
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names


def test_a_model_itself_is_replaced_with_all_that_it_has() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    x, weight, calls = torch.ones(2, 3), model[0].weight, []
    model.register_forward_hook(lambda *call: calls.append(1))
    wanted = 2 * model.eval()(x)
    new = put_in_place(model, {model: doubled(model)})
    assert type(new).__name__ == "DoubledSequential"
    assert new[0].weight is weight
    assert torch.equal(new(x), wanted)
    assert len(calls) == 2


class Closing(nn.Module):
    """Has a forward, and a function, that know the object by which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.mode = lambda: self.training
        self.forward = partial(self._compute, self.inner.bias)

    def _compute(self, bias: Tensor, x: Tensor) -> Tensor:
        return self.inner(x) - bias


def test_code_that_knows_the_original_finds_what_the_replacement_has() -> None:
    model = Closing()
    x = torch.ones(2, 3)
    wanted = model(x) + model.inner.bias
    new = doubled(model)
    new = put_in_place(new, {model.inner: doubled(model.inner)})
    assert torch.equal(new(x), 2 * (2 * wanted - new.inner.bias))
    new.eval()
    assert new.mode() is False
    assert "forward" not in vars(new)


def test_modules_of_one_class_are_replaced_by_modules_of_one_class() -> None:
    first, second = (doubled(nn.Linear(3, 3)) for _ in range(2))
    assert type(first) is type(second)
    assert type(first).__mro__[:3] == (type(first), Doubled, Replacement)
