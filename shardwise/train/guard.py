"""Cheap checks while training (`train.check_every`): copies are equal, and every trained weight has a
gradient.

Every rank sums the bits of each of its slices of weights and optimizer states, and all ranks compare the
sums. Two ranks that hold the same slice of the same parameter, as replicas or as the two copies of a tied
weight, must have the same sum. Copies must be exactly equal, so a single flipped bit is found by the next
check, with the name of the slice. A check reads the states once, and sends 16 bytes per slice and rank.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise.errors import RunFailed
from shardwise.optim import local
from shardwise.parallel.placement import local_slices
from shardwise.plans.learning_rate import learning_rate
from shardwise.train.build import Training

CHUNK = 1 << 24
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check_gradients(training: Training) -> None:
    """Raise if a trained parameter has no gradient on some rank. Called before the update."""
    named = training.parallel.named_parameters()
    without = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
    everyone = _from_all(training, without)
    lacking = {
        name: [rank for rank, names in enumerate(everyone) if name in names]
        for names in everyone
        for name in names
    }
    if lacking:
        name, ranks = next(iter(lacking.items()))
        others = f", and {len(lacking) - 1} other parameters neither" if len(lacking) > 1 else ""
        used = "Is it used in the model's forward?"
        if training.program is not None:
            used = "Does the loss function use it, in the model that the function is called with?"
        raise RunFailed(
            f"step {training.step + 1}: {name} got no gradient on rank {_listed(ranks)}{others}. {used}"
        )


def check_sums(training: Training) -> None:
    """Raise if gradients of this rank were not summed, because a weight got none. Called in each step, before
    the ranks exchange anything else."""
    names = [name for part in training.parallel.parts for name in part.unsummed]
    if names:
        raise RunFailed(
            f"step {training.step + 1}: {names[0]} got no gradient in the last micro-batch. With "
            "layout.zero = 0 each trained weight needs one there on each device, because all gradients are "
            "summed together; write layout.zero=1, where a weight may go without, on all devices alike"
        )


def check_copies(training: Training) -> None:
    """Raise if ranks that hold the same slice hold different bits. Called after the update."""
    local_sums = _sums(training)
    everyone = _from_all(training, [(key, sums) for key, (_, sums) in local_sums.items()])
    values: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums_by_key in enumerate(everyone):
        for key, value in sums_by_key:
            values[key][value].append(rank)
    wrong = {key: list(ranks.values()) for key, ranks in values.items() if len(ranks) > 1}
    if wrong:
        known = [(key, local_sums[key][0]) for key in wrong.keys() & local_sums.keys()]
        names = dict(pair for part in _from_all(training, known) for pair in part)
        _report_difference(training, wrong, names)


def _report_difference(
    training: Training, wrong: dict[int, list[list[int]]], names: dict[int, str]
) -> NoReturn:
    """Raise an error with the name of the first slice that differs. `wrong` has for each slice the groups of
    ranks that hold the same bits."""
    first = min(wrong, key=lambda key: names[key])
    groups = sorted(wrong[first], key=len)
    others = f" ({len(wrong) - 1} other slices differ too)" if len(wrong) > 1 else ""
    if not names[first].endswith(("]", ")")):
        raise RunFailed(
            f"step {training.step + 1}: the buffer {names[first]} differs between rank {_listed(groups[0])} "
            f"and "
            f"rank {_listed(groups[-1])}: it is computed from the samples of one device, so each layout "
            f"would "
            "train something else. Leave it out, or keep such numbers in engine.state"
        )
    raise RunFailed(
        f"step {training.step + 1}: copies of {names[first]} differ: rank {_listed(groups[0])} holds other "
        f"bits than rank {_listed(groups[-1])}{others}. Nothing was saved since. Prove the layout with "
        "`shardwise verify`; if the proof passes, suspect the devices of those ranks."
    )


def check_joined(training: Training) -> None:
    """Raise unless every rank is at the same step, in the same data, with the same weights. Called before the
    first step of a team.

    Random numbers need no check: they follow from seed, step and name, in a user's module too
    (parallel/seeds.py).
    """
    if training.mesh.worker.world == 1:
        return
    step = training.step
    mine = {
        "step": step,
        "seed": training.config.train.seed,
        "learning rate": learning_rate(training.config.train, step + 1),
        "loss scale": (training.scale.value, training.scale.clean_steps),
        "data": training.dataset.fingerprint(training.sequences),
    }
    everyone = _from_all(training, mine)
    for what, usual in everyone[0].items():
        others = [rank for rank, other in enumerate(everyone) if other[what] != usual]
        if others:
            raise RunFailed(
                f"rank {_listed(others)} would go on with another {what} than rank 0 "
                f"({everyone[others[0]][what]}, not {usual}) after step {step}, so no step was done. Do all "
                "hosts see the same data and checkpoint folders?"
            )
    check_copies(training)


def _from_all(training: Training, local_value: object) -> list[Any]:
    """Return this value of every rank, in rank order."""
    return training.peers.all_gather(local_value)


def _sums(training: Training) -> dict[int, tuple[str, int]]:
    """Return the name and the sum of bits of each slice of this rank, by a key that ranks with the same slice
    share. If a rank holds both copies of a tied weight, they are compared here.
    """
    labels, sums = [], []
    for label, tensor in _labelled_slices(training):
        labels.append(label)
        sums.append(bit_sum(tensor))
    values = torch.stack(sums).tolist() if sums else []
    sums_by_key: dict[int, tuple[str, int]] = {}
    for label, value in zip(labels, values, strict=True):
        key = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")
        if key in sums_by_key and sums_by_key[key][1] != value:
            rank = training.mesh.worker.rank
            raise RunFailed(f"step {training.step + 1}: the two copies of {label} on rank {rank} differ")
        sums_by_key[key] = (label, value)
    return sums_by_key


def _labelled_slices(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's slices of weights, optimizer states and buffers, each with its name."""
    group = f"group {training.mesh.coordinate('group')}: " if training.plan.groups > 1 else ""
    for name, parameter in training.parallel.named_parameters():
        label = f"{group}{name}[{','.join(f'{part.start}:{part.stop}' for part in local_slices(parameter))}]"
        yield label, local(parameter.detach())
        states = training.optimizer.state.get(parameter, {})
        for slot in training.config.optimizer.slots:
            if slot in states:
                yield f"{label} ({slot})", local(states[slot].detach())
    for name, buffer in training.parallel.named_buffers():
        yield f"{group}{name}", buffer


def bit_sum(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of a tensor that depends on every bit and its position."""
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        total += (part * (2 * positions + 1)).sum()  # odd factors, so that no bit is lost to overflow
    return total


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
