"""One trained run of each job, for every test that asserts something of it.

A run brings home, from every rank, all that tests ask of a layout: what each step said (losses, norms, the
ledger of its collectives), the weights it ended with, and the most bytes of state that the rank held. The
same job asked for again is not trained again: tests of weights, of traffic and of memory are a few lines
each, and share the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ranks.jobs import ALONE, Tables, Trained, start, weights
from ranks.pool import Pool
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shardwise.config import Layout, from_tables, splits_backward
from shardwise.cost.clusters import CLUSTERS
from shardwise.cost.predict import predict
from shardwise.cost.space import space_of_layout
from shardwise.cost.traffic import flows, totals
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.plans import choose
from shardwise.search.search import workload_of
from shardwise.train.build import Training
from shardwise.train.steps import steps

Bytes = dict[str, int]
Ledger = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Ran(Trained):
    """A run on one rank, and the most bytes it held of each kind of state."""

    held: Bytes


class Runs:
    """Trains a job when it is first asked for; `runs(tables)` is what each rank came to, in rank order."""

    def __init__(self, ranks: Callable[[int], Pool]) -> None:
        self._ranks = ranks
        self._kept: dict[str, list[Ran]] = {}

    def __call__(self, tables: Tables) -> list[Ran]:
        key = json.dumps(tables, sort_keys=True)
        if key not in self._kept:
            world = Layout(**{"data": 1, **tables["layout"]}).world
            self._kept[key] = (
                [train_watched(ALONE, tables)]
                if world == 1
                else self._ranks(world).run(train_watched, tables)
            )
        return self._kept[key]


def train_watched(worker: Worker, tables: Tables) -> Ran:
    """Train to the last step, looking at what is held from the second on: the first one makes the optimizer's
    state."""
    return watch(start(worker, tables))


def watch(training: Training, after_first: Callable[[], None] = lambda: None) -> Ran:
    held = Held(training)
    done = []
    for step in steps(training):
        if not done:
            after_first()
        done.append(step)
        held.watching = True
    return Ran(done, weights(training), held.most)


class Held:
    """The most that a rank holds of each kind of state, at the moments when a step holds most.

    What is held is read from the objects that hold it: parameters and what torch's FSDP2 gathered of them,
    gradients in parameters or waiting whole in FSDP2, the optimizer's moments. Beside these a rank holds what
    is no model state and small: a step counter of 4 bytes for each weight, the buffer of the unit that was
    reduced last (test_state_memory.py measures both), and of a backward in halves the head's newest gradient
    before it is added to the others.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.watching = training, False
        self.most: Bytes = dict.fromkeys(
            ("shards", "gathered", "nearby", "gradients", "optimizer", "counters", "residuals"), 0
        )
        layout = training.plan.layout
        self.gathers_for_a_while = layout.zero in (0, 3) and not splits_backward(layout)
        for part in training.parallel.parts:
            part.model.register_forward_hook(lambda *_: self.look(gathered=not self.gathers_for_a_while))
            for name in ("micro_batch", "free_forward"):
                setattr(part, name, self._before(getattr(part, name), gathered=not self.gathers_for_a_while))
        training.optimizer.pieces = self._before(  # type: ignore[method-assign] # asked for before an update
            self._before_update(training.optimizer.pieces), gathered=self.gathers_for_a_while
        )

    def _before(self, inner: Callable[..., Any], gathered: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.look(gathered)
            return inner(*args, **kwargs)

        return call

    def _before_update(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """What compression left out is looked at when no sum is under way."""

        def call(*args: Any, **kwargs: Any) -> Any:
            compressors = [
                compressor for part in self.training.parallel.parts for compressor in part.compressors
            ]
            residuals = [
                residual for compressor in compressors for residual in compressor.residuals().values()
            ]
            self.most["residuals"] = max(self.most["residuals"], _stored(residuals))
            return inner(*args, **kwargs)

        return call

    def look(self, gathered: bool) -> None:
        if not self.watching:
            return
        for kind, tensors in self.tensors().items():
            if kind != "gathered" or gathered:
                self.most[kind] = max(self.most[kind], _stored(tensors))

    def tensors(self) -> dict[str, list[Tensor]]:
        training = self.training
        parameters = [parameter for _, parameter in training.parallel.named_parameters()]
        sharded = [one for part in training.parallel.parts for one in _fsdp_parameters(part.model)]
        waiting = [
            group._partial_reduce_output
            for part in training.parallel.parts
            for group in _fsdp_groups(part.model)
        ]
        owners = [one.sharded_param for one in sharded] or parameters
        whole = [_waiting(one) for one in sharded]
        gathers = [
            group._all_gather_comm for part in training.parallel.parts for group in _fsdp_groups(part.model)
        ]
        copies = [
            secondary._shard
            for gather in gathers
            if (secondary := getattr(gather, "secondary", None)) is not None
        ]
        slots, states = training.config.optimizer.slots, training.optimizer.state.values()
        state = [entry[name] for entry in states for name in slots if name in entry]
        return {
            "shards": [one._sharded_param_data for one in sharded] or [*parameters],
            "gathered": [tensor for one in sharded for tensor in one.all_gather_outputs],
            "nearby": [kept for kept in copies if kept is not None],
            "gradients": [
                *(_split(one.grad, one) for one in owners if one.grad is not None),
                *(grad for grad in (*whole, *waiting) if grad is not None),
            ],
            "optimizer": state,
            "counters": [entry["step"] for entry in states],
        }


def _waiting(one: Any) -> Tensor | None:
    """The whole gradient of a weight: a sum in the dtype of sums, or in the parameter's own where that is the
    same."""
    newest = one._unsharded_param.grad if hasattr(one, "_unsharded_param") else None
    gradient = newest if one.unsharded_accumulated_grad is None else one.unsharded_accumulated_grad
    return _split(gradient, one._unsharded_param) if gradient is not None else None


def _split(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient as later releases hold it: torch 2.11 makes the sum of an unevenly split weight whole on
    every rank, and the prediction is of later releases."""
    whole, piece = local(gradient), local(parameter)
    return whole.new_empty(piece.shape) if whole.numel() > piece.numel() else whole


def _fsdp_groups(model: Any) -> list[Any]:
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]


def _fsdp_parameters(model: Any) -> list[Any]:
    return [one for group in _fsdp_groups(model) for one in group.fsdp_params]


def _stored(tensors: Iterable[Tensor]) -> int:
    storages = {
        local(tensor).untyped_storage()._cdata: local(tensor).untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def check_sent(found: list[Ran], tables: Tables) -> None:
    """The first rank's collectives of every step are those predicted, in calls and bytes, and those that the
    prediction of its time has priced. Where tokens choose experts, how many go to another device is not known
    before: of that exchange only the calls are."""
    expected, priced = predicted(tables, len(found))
    assert priced == sum(entry["bytes"] for entry in expected.values())
    routed = tables["model"].get("experts", 0) > tables["model"].get("experts_per_token", 0)
    once = (
        found[0].steps[1:] if tables["train"].get("precision") == "float8" else found[0].steps
    )  # the first is made twice there
    for step in once:
        sent = {
            name: {"count": entry["count"], "bytes": entry["bytes"]}
            for name, entry in step.collectives.items()
        }
        if routed and "all_to_all/expert" in expected:
            sent["all_to_all/expert"]["bytes"] = expected["all_to_all/expert"]["bytes"]
        assert sent == expected, {name: (sent.get(name), expected.get(name)) for name in sent | expected}


def predicted(tables: Tables, world: int) -> tuple[Ledger, float]:
    """The ledger from the flows, and all bytes that are in the price."""
    config = from_tables(tables)
    plan = choose(config, world)
    space = space_of_layout(
        config.model, config.train.recompute, plan.layout, plan.micro_batch, plan.accumulation
    )
    work = workload_of(config)
    priced = predict(work, space, CLUSTERS["cpu"]).sent
    return totals(flows(work, space, device="cpu"), space, 0), sum(float(sent[0]) for sent in priced.values())


def check_held(found: list[Ran], tables: Tables) -> None:
    """The rank that holds most holds what was predicted of it, kind by kind."""
    fullest = max((rank.held for rank in found), key=lambda held: sum(held.values()))
    held = {
        "weights": fullest["shards"] + fullest["gathered"] + fullest["nearby"],
        "gradients": fullest["gradients"],
        "optimizer": fullest["optimizer"],
        "residuals": fullest["residuals"],
    }
    expected = asdict(choose(from_tables(tables), len(found)).state_bytes)
    assert held == expected, (held, expected)
