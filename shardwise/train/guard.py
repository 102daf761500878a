"""A cheap check while training (`train.check_every`): what must be equal is equal, and nothing trains that
gets no gradient.

Every rank sums up the bits of each of its slices, of weights and of optimizer states, and all ranks compare:
two that hold the same slice of the same parameter, be it as replicas or as the two ends of a tied weight,
must have the same sum. Equal copies are an invariant, not an approximation, so a single flipped bit shows,
at the step where it first matters and with a name. It costs a read of the states and 16 bytes a slice and
rank.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import RunFailed
from shardwise.optim import local
from shardwise.parallel.placement import local_slices
from shardwise.plan.learning_rate import learning_rate
from shardwise.train.build import Training

CHUNK = 1 << 24
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check_gradients(training: Training) -> None:
    """Before the update: every parameter that is trained has a gradient, on every rank."""
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
        raise RunFailed(
            f"step {training.step + 1}: {name} got no gradient on rank {_listed(ranks)}{others}. "
            "Is it used in the model's forward?"
        )


def check_copies(training: Training) -> None:
    """After the update: ranks that hold the same slice hold the same bits."""
    mine = _sums(training)
    everyone = _from_all(training, [(key, sums) for key, (_, sums) in mine.items()])
    values: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums_by_key in enumerate(everyone):
        for key, value in sums_by_key:
            values[key][value].append(rank)
    wrong = {key for key, ranks in values.items() if len(ranks) > 1}
    if wrong:
        named = _from_all(training, [(key, mine[key][0]) for key in wrong & mine.keys()])
        names = {key: name for part in named for key, name in part}
        first = min(wrong, key=lambda key: names[key])
        groups = sorted(values[first].values(), key=len)
        others = f" ({len(wrong) - 1} other slices differ too)" if len(wrong) > 1 else ""
        raise RunFailed(
            f"step {training.step + 1}: copies of {names[first]} differ: rank {_listed(groups[0])} holds "
            f"other bits than "
            f"rank {_listed(groups[-1])}{others}. Nothing was saved since. Prove the layout with `shardwise "
            f"verify`; if "
            "the proof passes, suspect the devices of those ranks."
        )


def check_joined(training: Training) -> None:
    """Before the first step of a team: every rank is at the same step, in the same data, with the same
    weights.

    A worker that came new or came back counts only once this holds. Random numbers are drawn from seed, step
    and name, also those that a module of the user's draws (parallel/seeds.py).
    """
    if training.mesh.worker.world == 1:
        return
    step = training.step
    row = training.dataset.sequences(training.sequences, 1)
    mine = {
        "step": step,
        "seed": training.config.train.seed,
        "learning rate": learning_rate(training.config.train, step + 1),
        "loss scale": (training.scale.value, training.scale.clean_steps),
        "data": zlib.crc32(np.ascontiguousarray(row.inputs).tobytes()),
    }
    everyone = _from_all(training, mine)
    for what, usual in everyone[0].items():
        others = [rank for rank, other in enumerate(everyone) if other[what] != usual]
        if others:
            raise RunFailed(
                f"rank {_listed(others)} would go on with another {what} than rank 0 "
                f"({everyone[others[0]][what]}, not {usual}) "
                f"after step {step}, so no step was done. Do all hosts see the same data and checkpoint "
                f"folders?"
            )
    check_copies(training)


def _from_all(training: Training, mine: Any) -> list[Any]:
    """This value of every rank, in rank order."""
    return training.peers.all_gather(mine)


def _sums(training: Training) -> dict[int, tuple[str, int]]:
    """Of each slice of this rank: a key that ranks with the same slice share, its name, and the sum of its
    bits. The two copies of a tied weight that one rank may hold are compared here.
    """
    labels: list[str] = []
    sums: list[Tensor] = []
    group = f"group {training.mesh.coordinate('group')}: " if training.plan.groups > 1 else ""
    for name, parameter in training.parallel.named_parameters():
        where = ",".join(f"{part.start}:{part.stop}" for part in local_slices(parameter))
        states = training.optimizer.state.get(parameter, {})
        slots = [slot for slot in training.config.optimizer.slots if slot in states]
        for suffix, tensor in {"": parameter, **{f" ({slot})": states[slot] for slot in slots}}.items():
            labels.append(f"{group}{name}[{where}]{suffix}")
            sums.append(bit_sum(local(tensor.detach())))
    for name, buffer in training.parallel.named_buffers():
        labels.append(f"{group}{name}")
        sums.append(bit_sum(buffer))
    values = torch.stack(sums).tolist() if sums else []
    sums_by_key: dict[int, tuple[str, int]] = {}
    for label, value in zip(labels, values, strict=True):
        key = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")
        if key in sums_by_key and sums_by_key[key][1] != value:
            raise RunFailed(
                f"step {training.step + 1}: the two copies of {label} on rank {training.mesh.worker.rank} "
                f"differ"
            )
        sums_by_key[key] = (label, value)
    return sums_by_key


def bit_sum(tensor: Tensor) -> Tensor:
    """A sum over the bits of a tensor that depends on every one of them and on its position."""
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        total += (part * (2 * positions + 1)).sum()  # odd factors: no bit is lost to the wrap-around
    return total


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
