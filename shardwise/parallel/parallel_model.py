"""A model on its devices, as the training loop sees it: a batch goes in, gradients and a loss come out, on
any layout.

The loop never uses an axis. What depends on the layout is here, and in `Pipelined` for pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from shardwise.checkpoint.state_key import StateKey
from shardwise.comm import Comm
from shardwise.config.axes import TOKEN_AXES
from shardwise.data.batches import Batch
from shardwise.models import LossCall, MixtureOfExperts, Sharding, count_items, counts_items
from shardwise.parallel.data import DataParallel
from shardwise.parallel.float8_scales import Scales
from shardwise.parallel.residuals import residual_state
from shardwise.parallel.seeds import Seeds
from shardwise.parallel.stage_modules import Stages
from shardwise.parallel.tensor import split_like, sum_whole
from shardwise.plans.sharding import copies_parts

MicroBatches = Sequence[Batch | LossCall]
"""The micro-batches of a step on one device: of tokens, or of a program's loss function."""


@dataclass
class ParallelModel:
    """The model of a layout without pipeline stages: one part, whole in depth."""

    comm: Comm
    parts: Sequence[DataParallel]
    table: Sharding
    positions: Callable[[int], Tensor] | None = None
    """Returns the positions of this device's tokens in a sequence of a length; None: it has all tokens."""
    multiple: int = 1
    """Number that the length of a sequence must be a multiple of, so that devices can share it."""
    embeddings: frozenset[str] = frozenset()
    """Names of the weights that are looked up, not multiplied by: they do not decay."""
    seeds: Seeds | None = None
    """Seeds of a user's module, which may draw random numbers; None: the model draws none."""
    scales: Scales | None = None
    """Scales of products in float8; None: there are no such products."""
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
        """The model, if it is not cut into stages."""
        (part,) = self.parts
        return part.model

    @property
    def pipeline(self) -> Stages | None:
        """How the model is cut into stages; None: it is not."""
        return None

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are set to zero in place after a step, rather than freed."""
        return any(part.keeps_gradients for part in self.parts)

    def named_parameters(self, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, with the names of the plain model. A tied weight whose two uses are
        on different stages comes with each of them, under one name, unless `once` is set.
        """
        for part in self.parts:
            for name, parameter in part.model.named_parameters():
                yield self.table.tied_name(name), parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that are saved in checkpoints."""
        for part in self.parts:
            trained = {name for name, _ in part.model.named_parameters(remove_duplicate=False)}
            yield from (
                (name, value) for name, value in part.model.state_dict().items() if name not in trained
            )

    def residuals(self) -> Iterator[tuple[StateKey, Tensor]]:
        """Yield the residuals of this rank's compressed gradients: what was left out of them so far."""
        for part in self.parts:
            yield from residual_state(part, self.comm.mesh)

    def forward_backward(self, batch: MicroBatches, factor: Tensor) -> Tensor:
        """Add the gradients of `factor` times the summed loss, and return this rank's share of that sum,
        without the factor."""
        for mixture in self.mixtures:
            mixture.gradient_scale = factor
        total = self._run(batch, factor)
        self.complete_gradients()
        return total

    def complete_gradients(self) -> None:
        """Make the sums that must wait for the last micro-batch, coalesce sparse gradients, and split each
        gradient as its weight is split."""
        for _, parameter in self.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            split_like(parameter)
        dense = (parameter for name, parameter in self.named_parameters() if self._sums_over_tensor(name))
        sum_whole(dense, self.comm)

    def _sums_over_tensor(self, name: str) -> bool:
        """Return whether each device of the tensor axis has a part of the gradient of this weight, if all of
        them have the whole weight."""
        role = self.table.role(name.rpartition(".")[0])
        if role is None or role.kind == "experts":
            return role is None and self.table.sequence_parallel
        return self.table.sequence_parallel or copies_parts(role, self.comm.mesh.size("tensor"))

    def take_loads(self) -> Tensor:
        """Return how often the global batch chose each expert, for each mixture of this rank, and reset the
        counts: (mixtures, experts)."""
        if not self.mixtures:  # a stage may have none
            return torch.zeros(0, 1, dtype=torch.int64, device=self.comm.device)
        loads = torch.stack([mixture.take_load() for mixture in self.mixtures])
        for axis in TOKEN_AXES:  # their devices have different tokens
            self.comm.all_reduce(loads, axis)
        return loads

    def balance(self, loads: Tensor) -> None:
        """Move the routers' biases against these loads; loads of zero move nothing."""
        for mixture, load in zip(self.mixtures, loads, strict=True):
            if mixture.config.balance_bias:
                mixture.update_bias(load)

    def _run(self, batch: MicroBatches, factor: Tensor) -> Tensor:
        (part,) = self.parts
        total = torch.zeros_like(factor)
        for index, micro_batch in enumerate(batch):
            self.begin(micro_batch)
            with part.micro_batch(last=index == len(batch) - 1):
                loss = part(**self.arguments(micro_batch))
                (loss * factor).backward()
                total += loss.detach()
        return total

    @property
    def counts_items(self) -> bool:
        """Whether a user's module counts the items that its loss is divided by; otherwise these are
        tokens."""
        return counts_items(self.parts[0].model)

    def items(self, batch: Batch) -> Tensor:
        """Return the number of items (tokens, unless the module counts others) in the loss of a batch of
        whole sequences."""
        if self.counts_items:
            return count_items(self.parts[0].model, batch.inputs, batch.targets)
        return torch.tensor(float(batch.valid), dtype=torch.float64, device=batch.inputs.device)

    def begin(self, batch: Batch | LossCall) -> None:
        """Seed the random numbers of a micro-batch; call this before its forward."""
        if self.seeds is not None:
            self.seeds.begin(batch.first)

    def arguments(self, batch: Batch | LossCall) -> dict[str, Tensor | LossCall | None]:
        """Return the arguments of the model's forward, for this device's part of the sequences."""
        if isinstance(batch, LossCall):
            return {"call": batch}
        part = self.local_batch(batch)
        arguments: dict[str, Tensor | LossCall | None] = {
            "inputs": part.inputs,
            "targets": part.targets,
            "documents": part.documents,
        }
        if self.positions is not None:
            arguments["positions"] = self.positions(batch.inputs.shape[1])
        return arguments

    def local_batch(self, batch: Batch) -> Batch:
        """Return this device's tokens of a batch."""
        if self.positions is None:
            return batch
        positions = self.positions(batch.inputs.shape[1])
        documents = None if batch.documents is None else batch.documents[:, positions]
        return replace(
            batch, inputs=batch.inputs[:, positions], targets=batch.targets[:, positions], documents=documents
        )

    def loss(self, batch: Batch | LossCall) -> Tensor:
        """Return this rank's share of the summed loss, without gradients."""
        (part,) = self.parts
        self.begin(batch)
        loss: Tensor = part.model(**self.arguments(batch))
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (vocabulary) after the last of tokens (1, length), equal on all ranks."""
        last = tokens.shape[1] - 1
        padded = nn.functional.pad(tokens, (0, -tokens.shape[1] % self.multiple))
        if self.positions is None:
            return self._logits(padded, last, None).reshape(-1)
        positions = self.positions(padded.shape[1])
        # empty where another device has the last token
        index = (positions == last).nonzero().flatten().tolist()
        logits = self._logits(padded[:, positions], index[0] if index else 0, positions).reshape(-1)
        return self.comm.all_reduce(logits if index else torch.zeros_like(logits), "context")

    def _logits(self, tokens: Tensor, at: int, positions: Tensor | None) -> Tensor:
        (part,) = self.parts
        more = {} if positions is None else {"positions": positions}
        logits: Tensor = part.model(tokens, logits_at=at, **more)
        return logits

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which modules are in eval mode, without dropout. Afterwards their former modes are
        restored, and the memory of forwards without backward is freed."""
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
            part.free_forward()
