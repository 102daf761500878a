"""A model on its devices, as the training loop sees it: a batch goes in, gradients and a loss come out, on
any layout.

The loop never asks for an axis. What depends on the layout is here and in `Pipelined`, which does the same
with stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.state_key import StateKey
from shardwise.comm import Comm
from shardwise.config.axes import TOKEN_AXES
from shardwise.data.batches import Batch
from shardwise.models import MixtureOfExperts, Sharding, count_items, counts_items
from shardwise.parallel.data import DataParallel
from shardwise.parallel.float8_scales import Scales
from shardwise.parallel.residuals import residual_state
from shardwise.parallel.seeds import Seeds
from shardwise.parallel.stage_modules import Stages
from shardwise.parallel.tensor import sum_whole


@dataclass
class ParallelModel:
    """The model of a layout without pipeline stages: one part, whole in depth."""

    comm: Comm
    parts: Sequence[DataParallel]
    table: Sharding
    positions: Callable[[int], Tensor] | None = None
    """The positions of this device's tokens in a sequence of that length; None: all of them."""
    multiple: int = 1
    """What the length of a sequence must be a multiple of, so that devices can share it."""
    embeddings: frozenset[str] = frozenset()
    """Names of the weights that are looked up, not multiplied by: they are not decayed."""
    seeds: Seeds | None = None
    """Of what a user's module draws; None: nothing is drawn."""
    scales: Scales | None = None
    """Of products in float8; None: there are none."""
    mixtures: list[MixtureOfExperts] = field(init=False)

    def __post_init__(self) -> None:
        self.mixtures = [
            module
            for part in self.parts
            for module in part.model.modules()
            if isinstance(module, MixtureOfExperts)
        ]

    @property
    def model(self) -> nn.Module:
        """The model, where it is not cut into stages."""
        (part,) = self.parts
        return part.model

    @property
    def pipeline(self) -> Stages | None:
        """How the model is cut, if it is."""
        return None

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are set to zero in place after a step, rather than given back."""
        return any(part.keeps_gradients for part in self.parts)

    @property
    def waits_are_timed(self) -> bool:
        """Whether exposed communication can be told apart from computation."""
        return all(part.waits_are_timed for part in self.parts)

    def named_parameters(self, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by the names of the plain model. A tied weight whose two uses are on
        different stages comes with each of them, under one name, unless it is asked for once.
        """
        for part in self.parts:
            for name, parameter in part.model.named_parameters():
                yield self.table.tied_name(name), parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are part of the state: those that are saved."""
        for part in self.parts:
            trained = {name for name, _ in part.model.named_parameters(remove_duplicate=False)}
            yield from (
                (name, value) for name, value in part.model.state_dict().items() if name not in trained
            )

    def residuals(self) -> Iterator[tuple[StateKey, Tensor]]:
        """What compression left out of this rank's gradients so far; nothing where gradients are not
        compressed."""
        for part in self.parts:
            yield from residual_state(part, self.comm.mesh)

    def forward_backward(self, batch: Sequence[Batch], factor: Tensor) -> Tensor:
        """Add the gradients of `factor` times the summed loss; returns this rank's share of that sum, without
        the factor."""
        for mixture in self.mixtures:
            mixture.gradient_scale = factor
        total = self._run(batch, factor)
        self.complete_gradients()
        return total

    def complete_gradients(self) -> None:
        """Sum what only the last micro-batch leaves whole; sparse gradients have each row once, in order."""
        for _, parameter in self.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        sum_whole(
            (parameter for name, parameter in self.named_parameters() if not self._is_expert(name)), self.comm
        )

    def _is_expert(self, name: str) -> bool:
        role = self.table.role(name.rpartition(".")[0])
        return role is not None and role.kind == "experts"

    def take_loads(self) -> Tensor:
        """Of each mixture of this rank, how many choices fell on each expert in the whole global batch:
        (mixtures, experts)."""
        if not self.mixtures:  # a stage may have none
            return torch.zeros(0, 1, dtype=torch.int64, device=self.comm.device)
        loads = torch.stack([mixture.take_load() for mixture in self.mixtures])
        for axis in TOKEN_AXES:  # each of them had other tokens
            self.comm.all_reduce(loads, axis)
        return loads

    def balance(self, loads: Tensor) -> None:
        """Move the routers' biases against these loads; loads of zero move nothing."""
        for mixture, load in zip(self.mixtures, loads, strict=True):
            if mixture.config.balance_bias:
                mixture.update_bias(load)

    def _run(self, batch: Sequence[Batch], factor: Tensor) -> Tensor:
        (part,) = self.parts
        total = torch.zeros_like(factor)
        for index, micro_batch in enumerate(batch):
            self.begin(micro_batch)
            with part.micro_batch(last=index == len(batch) - 1):
                loss = part(**self.arguments(micro_batch))
                (loss * factor).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total

    @property
    def counts_items(self) -> bool:
        """Whether a user's module says itself what its loss is divided by; else it is tokens."""
        return counts_items(self.parts[0].model)

    def items(self, batch: Batch) -> Tensor:
        """What the loss of a batch of whole sequences, summed over all devices that share them, is a sum
        over."""
        if self.counts_items:
            return count_items(self.parts[0].model, batch.inputs, batch.targets)
        return torch.tensor(float(batch.valid), dtype=torch.float64, device=batch.inputs.device)

    def begin(self, batch: Batch) -> None:
        """Before the forward of a micro-batch."""
        if self.seeds is not None:
            self.seeds.begin(batch.first)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """What the model is called with: this device's part of the sequences."""
        own = self.own(batch)
        given = {"inputs": own.inputs, "targets": own.targets, "documents": own.documents}
        return (
            given if self.positions is None else {**given, "positions": self.positions(batch.inputs.shape[1])}
        )

    def own(self, batch: Batch) -> Batch:
        """The tokens of a batch that are this device's."""
        if self.positions is None:
            return batch
        positions = self.positions(batch.inputs.shape[1])
        documents = None if batch.documents is None else batch.documents[:, positions]
        return replace(
            batch, inputs=batch.inputs[:, positions], targets=batch.targets[:, positions], documents=documents
        )

    def loss(self, batch: Batch) -> Tensor:
        """This rank's share of the summed loss, without gradients."""
        (part,) = self.parts
        self.begin(batch)
        loss: Tensor = part.model(**self.arguments(batch))
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (vocabulary) after the last of tokens (1, length), the same on every rank that computes
        alike."""
        last = tokens.shape[1] - 1
        padded = nn.functional.pad(tokens, (0, -tokens.shape[1] % self.multiple))
        if self.positions is None:
            return self._logits(padded, last, None).reshape(-1)
        positions = self.positions(padded.shape[1])
        mine = (
            (positions == last).nonzero().flatten().tolist()
        )  # the index of the last token, on the device that has it
        logits = self._logits(padded[:, positions], mine[0] if mine else 0, positions).reshape(-1)
        return self.comm.all_reduce(logits if mine else torch.zeros_like(logits), "context")

    def _logits(self, tokens: Tensor, at: int, positions: Tensor | None) -> Tensor:
        (part,) = self.parts
        more = {} if positions is None else {"positions": positions}
        logits: Tensor = part.model(tokens, logits_at=at, **more)
        return logits

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, modules are in eval mode, without dropout. Afterwards each is in the mode it was in before,
        and whatever forwards without backward left in memory is given back."""
        modes = {module: module.training for part in self.parts for module in part.model.modules()}
        for part in self.parts:
            part.model.eval()
        if self.scales is not None:  # the last update may have changed weights
            self.scales.begin()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
        for part in self.parts:
            part.settle()
