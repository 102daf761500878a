"""Bytes of weights, gradients and optimizer state that ranks really hold are those the planner predicts, to the byte.

What is held is read from the objects that hold it, kind by kind: parameters and what torch's FSDP2 gathered of them, gradients
in parameters or waiting whole in FSDP2, the optimizer's moments. Beside these a rank holds what is no model state and small: a
step counter of 4 bytes for each weight, the buffer of the unit that was reduced last (test_state_memory.py measures both),
and of a backward in halves the head's newest gradient before it is added to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job, start
from ranks.pool import Pool
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwise.config import SPLIT_BACKWARD, from_tables
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.plan import choose
from shardwise.train.build import Training
from shardwise.train.steps import steps

Bytes = dict[str, int]
MIXED = {"precision": "bfloat16", "micro_batch": 1, "steps": 2}
Row = tuple[str, dict[str, Any], dict[str, Any]]


def row(model: str = "llama", train: dict[str, Any] | None = None, **layout: Any) -> Row:
    return model, {**MIXED, **(train or {})}, {"data": 1, **layout}


ROWS: list[Row] = [
    *(row(data=4, zero=zero) for zero in range(4)),
    row("gpt", data=4, zero=2),
    row(data=4, zero=1, train={"micro_batch": 2}),  # one micro-batch: gradients are never whole
    row("gpt", data=2, tensor=2, zero=0, train={"state_dtype": "bfloat16"}),
    row(tensor=4),  # fewer key heads than devices
    *(row(data=2, tensor=2, zero=zero) for zero in (1, 3)),
    row(replica=2, data=2, zero=3),
    *(row("experts", data=2, tensor=2, expert=expert, zero=zero) for expert, zero in ((2, 3), (4, 1))),
    row("tied", pipeline=2, data=2, zero=1),
    *(row("tied", pipeline=2, data=2, zero=3, schedule=schedule) for schedule in ("interleaved", "zbv")),
]
MORE: list[Row] = [
    *(row("gpt", data=4, zero=zero) for zero in (1, 3)),
    row("tied", data=2, context=2, zero=2),
    *(row(data=4, zero=zero, train={"micro_batch": 2}) for zero in (0, 2)),
    row(data=4, zero=1, train={"precision": "float32"}),
    *(row(data=4, zero=zero, train={"state_dtype": "bfloat16"}) for zero in (0, 1, 2)),
    row("gpt", tensor=2),
    *(row(data=2, tensor=2, zero=zero) for zero in (0, 2)),
    *(row(replica=2, data=2, zero=zero) for zero in (1, 2)),
    *(row("experts", data=4, expert=2, zero=zero) for zero in range(4)),
    *(row("experts", tensor=2, zero=zero) for zero in (1, 3)),  # only experts have somebody to share with
    *(row("tied", pipeline=2, data=2, zero=zero) for zero in (0, 2, 3)),
    *(row("tied", pipeline=2, data=2, zero=3, schedule=schedule) for schedule in ("gpipe", "zb1p", "dualpipev")),
    *(row(pipeline=2, data=2, zero=zero, schedule="zbv") for zero in (0, 1)),
    row("gpt", pipeline=2, tensor=2, schedule="zb1p"),
]


def named(one: Row) -> str:
    model, train, layout = one
    changes = {name: value for name, value in {**train, **layout}.items() if MIXED.get(name) != value}
    return "-".join([model, *(f"{name}{value}" for name, value in changes.items())])


class Held:
    """The most that a rank holds of each kind, at the moments looked at."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.most: Bytes = dict.fromkeys(("shards", "gathered", "gradients", "optimizer", "counters"), 0)
        layout = training.plan.layout
        self.gathers_for_a_while = layout.zero in (0, 3) and not (layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD)

    def look(self, gathered: bool) -> None:
        for kind, tensors in self.tensors().items():
            if kind != "gathered" or gathered:
                self.most[kind] = max(self.most[kind], _stored(tensors))

    def tensors(self) -> dict[str, list[Tensor]]:
        training = self.training
        parameters = [parameter for _, parameter in training.parallel.named_parameters()]
        sharded = [one for part in training.parallel.parts for one in _fsdp_parameters(part.model)]
        waiting = [group._partial_reduce_output for part in training.parallel.parts for group in _fsdp_groups(part.model)]
        owners = [one.sharded_param for one in sharded] or parameters
        whole = [_waiting(one) for one in sharded]
        state = [value for entry in training.optimizer.state.values() for name, value in entry.items() if name != "step"]
        return {
            "shards": [one._sharded_param_data for one in sharded] or [*parameters],
            "gathered": [tensor for one in sharded for tensor in one.all_gather_outputs],
            "gradients": [grad for grad in (*(one.grad for one in owners), *whole, *waiting) if grad is not None],
            "optimizer": state,
            "counters": [entry["step"] for entry in training.optimizer.state.values()],
        }


def _waiting(one: Any) -> Tensor | None:
    """The whole gradient of a weight: a sum in the dtype of sums, or in the parameter's own where that is the same."""
    newest = one._unsharded_param.grad if hasattr(one, "_unsharded_param") else None
    return newest if one.unsharded_accumulated_grad is None else one.unsharded_accumulated_grad


def _fsdp_groups(model: Any) -> list[Any]:
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]


def _fsdp_parameters(model: Any) -> list[Any]:
    return [one for group in _fsdp_groups(model) for one in group.fsdp_params]


def _stored(tensors: Iterable[Tensor]) -> int:
    storages = {local(tensor).untyped_storage()._cdata: local(tensor).untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def states_of_a_step(worker: Worker, tables: Tables) -> Bytes:
    """What this rank holds in its second step: the first one made the optimizer's state."""
    training = start(worker, tables)
    held = Held(training)
    for part in training.parallel.parts:
        part.model.register_forward_hook(lambda *_: held.look(gathered=not held.gathers_for_a_while))
        for name in ("micro_batch", "release"):
            setattr(part, name, _looking(getattr(part, name), held))
    original = training.optimizer.step

    def update(*args: Any, **kwargs: Any) -> Any:
        held.look(gathered=held.gathers_for_a_while)
        return original(*args, **kwargs)

    training.optimizer.step = update
    for _ in steps(training):
        pass
    return held.most


def _looking(inner: Callable[..., Any], held: Held) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        held.look(gathered=not held.gathers_for_a_while)
        return inner(*args, **kwargs)

    return call


def check(ranks: Callable[[int], Pool], folder: Path, case: Row) -> None:
    """The rank that holds most holds what was predicted of it, kind by kind."""
    model, train, layout = case
    source = folder / "text.txt"
    source.write_text("to be, or not to be: that is the question\n" * 100)
    tables = job(str(source), model=FAMILIES[model], train=train, layout=layout)
    tables["data"]["cache"] = str(folder / "cache")
    config = from_tables(tables)
    fullest = max(ranks(config.layout.world).run(states_of_a_step, tables), key=lambda held: sum(held.values()))
    found = {
        "weights": fullest["shards"] + fullest["gathered"],
        "gradients": fullest["gradients"],
        "optimizer": fullest["optimizer"],
    }
    assert found == asdict(choose(config, config.layout.world).state_bytes)


@pytest.mark.parametrize("case", ROWS, ids=named)
def test_states_held_are_those_predicted_to_the_byte(ranks: Callable[[int], Pool], tmp_path: Path, case: Row) -> None:
    check(ranks, tmp_path, case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=named)
def test_states_held_are_those_predicted_on_more_layouts(ranks: Callable[[int], Pool], tmp_path: Path, case: Row) -> None:
    check(ranks, tmp_path, case)
