"""Pipeline parallelism: the model is cut in depth, and micro-batches flow through the stages.

Which device does what when is a list of actions made in plan/schedule.py, the same that is drawn and costed;
torch's pipelining runtime executes it and adds the sends and receives. What crosses between two stages,
forward and back, is one micro-batch's hidden states: batch x sequence x hidden / (context x tensor) values,
since each device of a tensor group sends only its own part of the sequence.

The loss of a micro-batch is the sum over its tokens times one factor for the whole step, so gradients simply
add up: nothing is averaged over micro-batches or stages, and the result is that of one device whatever the
schedule.

FSDP2 inside a stage gathers and reduces as it does without a pipeline (parallel/data.py), micro-batch by
micro-batch. The zero-bubble schedules split backward in two, and the second half runs outside of the hooks
that FSDP2 reduces from. There, weights stay gathered and gradients whole until the step's last action,
whatever the ZeRO stage: the price of no bubble.

A tied embedding has a copy on the first and on the last stage. Both begin equal, both get the sum of the two
gradients, so both stay equal; the sum is one exchange between the two devices a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shardwise._torch import pipeline_runtime
from shardwise.comm import Comm
from shardwise.data.batches import Batch
from shardwise.models import Head
from shardwise.models.torch_dtypes import wide
from shardwise.optim import local
from shardwise.parallel.data import DataParallel
from shardwise.parallel.parallel_model import ParallelModel
from shardwise.parallel.stage_modules import AXIS, Stages


class _StageModule(nn.Module):
    """A stage's module as torch's runtime calls it: hidden states in, the rest by name. Not an FSDP2 module
    itself, so that the runtime leaves gathering and reducing to parallel/data.py."""

    def __init__(self, part: nn.Module, last: bool) -> None:
        super().__init__()
        self.part, self.last = part, last
        self.positions: Tensor | None = None

    def forward(self, x: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        more = {"targets": targets} if self.last else {}
        result: Tensor = self.part(x, documents=documents, positions=self.positions, **more)
        # What is sent is let go after backward, so it must be nobody else's.
        result = (
            result.clone()
            if result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            else result
        )
        # Where all weights so far are frozen there is nothing to go back through, but torch's runtime does go
        # back.
        return result.requires_grad_() if torch.is_grad_enabled() and not result.requires_grad else result


class _Stage(PipelineStage):
    """torch's stage, whose backward reduces gradients as the part's data parallelism says."""

    part: DataParallel
    comm: Comm
    split: bool
    sent: dict[int, list[Tensor]]
    begin: Callable[[int], None]
    """Called before the forward of each micro-batch."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Nothing to warm up: torch 2.11 would send to itself where two neighbouring stages are on one
        device."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of a micro-batch's output, which is remembered until its backward is done."""
        operations = self._counted(super().get_fwd_send_ops(fwd_chunk_id))
        self.sent[fwd_chunk_id] = [operation.tensor for operation in operations]
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the gradients of a micro-batch's input."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations:
            self.comm.begin(
                "send", AXIS, operation.tensor
            )  # torch's runtime issues it, and keeps its end to itself
        return operations

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.begin(fwd_chunk_id)
        with self.comm.working():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        with self.comm.working():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._let_go(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        with self.comm.working():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.part.add_up()
        self._let_go(bwd_chunk_id)

    def _let_go(self, micro_batch: int) -> None:
        """torch holds every output that was sent until the step ends. Its gradient has come back, so it has
        arrived."""
        for tensor in self.sent.pop(micro_batch, []):
            tensor.untyped_storage().resize_(0)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        if self.split:
            self.part.hold()
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        with self.part.micro_batch(last_backward):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)


@dataclass
class Pipelined(ParallelModel):
    """A model cut into stages, of which this rank has some."""

    stages: Stages = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._factor = torch.zeros(())
        self._total = torch.zeros(())
        self._batch: Sequence[Batch] = ()
        self._modules = [
            _StageModule(part.model, stage == self.stages.last)
            for part, (stage, _) in zip(self.parts, self.stages.own, strict=True)
        ]
        if self.stages.splits_backward:
            for part in self.parts:
                part.stay_gathered()
                for module in part.model.modules():
                    if isinstance(module, Head):
                        module.split_backward = True
        schedule, group = self.stages.schedule, self.comm.mesh.group(AXIS)
        mine = zip(self._modules, self.parts, self.stages.own, strict=True)
        runners = [self._stage(module, part, stage, group) for module, part, (stage, _) in mine]
        actions = {rank: [str(action) for action in own] for rank, own in enumerate(schedule.actions)}
        self._runtime = pipeline_runtime(runners, schedule.micro_batches, self._loss, actions)

    @property
    def pipeline(self) -> Stages:
        return self.stages

    def _stage(self, module: _StageModule, part: DataParallel, stage: int, group: Any) -> _Stage:
        stages, layout = self.stages, self.comm.mesh.layout
        ids = torch.empty(stages.micro_batch, stages.length, dtype=torch.int64, device="meta")
        shape = (stages.micro_batch, stages.length // layout.tensor, stages.hidden)
        hidden = torch.empty(shape, dtype=stages.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=wide(stages.dtype), device="meta", requires_grad=True)
        runner = _Stage(
            module,
            stage,
            stages.schedule.stages,
            self.comm.device,
            input_args=ids if stage == 0 else hidden,
            output_args=loss if stage == stages.last else hidden,
            group=group,
        )
        runner.part, runner.comm, runner.split, runner.sent = part, self.comm, stages.splits_backward, {}
        runner.begin = lambda index: self.begin(self._batch[index])
        return runner

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._total = self._total + output.detach()
        return output * self._factor

    def named_parameters(self, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """As the plain model names them; `once`: a tied weight only where the first stage is."""
        for part, (stage, _) in zip(self.parts, self.stages.own, strict=True):
            for name, parameter in part.model.named_parameters():
                if not (once and stage > 0 and name in self.table.tied):
                    yield self.table.tied_name(name), parameter

    def _run(self, batch: Sequence[Batch], factor: Tensor) -> Tensor:
        own = [self.own(micro_batch) for micro_batch in batch]
        self._batch, self._factor, self._total = batch, factor, torch.zeros_like(factor)
        self._tell_positions(batch[0].inputs.shape[1])
        targets = torch.cat([micro_batch.targets for micro_batch in own])
        more: dict[str, Any] = {"targets": targets}
        if own[0].documents is not None:
            more["documents"] = torch.cat(
                [micro_batch.documents for micro_batch in own if micro_batch.documents is not None]
            )
        inputs = (torch.cat([micro_batch.inputs for micro_batch in own]),) if self._has(0) else ()
        with (
            self.comm.waiting()
        ):  # what torch's runtime does beside the stages' work is wait for sends and receives
            self._runtime.step(*inputs, target=targets, losses=[], return_outputs=False, **more)
        for part in self.parts:
            # FSDP2 lets go of weights when a backward ends, which never begins where all of a stage's weights
            # are frozen.
            if self.stages.splits_backward or not any(
                parameter.requires_grad for parameter in part.model.parameters()
            ):
                part.release()
        return self._total

    def _tell_positions(self, length: int) -> None:
        positions = (
            torch.arange(length, device=self.comm.device)
            if self.positions is None
            else self.positions(length)
        )
        for module in self._modules:
            module.positions = positions

    def _has(self, stage: int) -> bool:
        return self.stages.schedule.rank_of_stage[stage] == self.stages.rank

    def complete_gradients(self) -> None:
        """Sum over the tensor axis, then over the two copies of a tied weight."""
        super().complete_gradients()
        for copy, original in self.table.tied.items():
            ends = [self._parameter(0, original), self._parameter(self.stages.last, copy)]
            gradients = [local(end.grad) for end in ends if end is not None and end.grad is not None]
            if len(gradients) == 2:
                gradients[0] += gradients[1]
                gradients[1].copy_(gradients[0])
            elif gradients:
                self._add_from_other_end(gradients[0])

    def _parameter(self, stage: int, name: str) -> nn.Parameter | None:
        own = {number: part.model for part, (number, _) in zip(self.parts, self.stages.own, strict=True)}
        return dict(own[stage].named_parameters())[name] if stage in own else None

    def _add_from_other_end(self, gradient: Tensor) -> None:
        first, last = self.stages.schedule.rank_of_stage[0], self.stages.schedule.rank_of_stage[-1]
        peer = last if self.stages.rank == first else first
        (theirs,) = self.comm.start_exchange([gradient], AXIS, peer, peer).arrived()
        gradient += theirs

    def loss(self, batch: Batch) -> Tensor:
        """The summed loss where the last stage is, zero elsewhere; without gradients."""
        own = self.own(batch)
        self.begin(batch)
        result = self._through(own.inputs, batch.inputs.shape[1], own.documents, targets=own.targets)
        return (
            torch.zeros((), dtype=wide(self.stages.dtype), device=self.comm.device)
            if result is None
            else result
        )

    def _logits(self, tokens: Tensor, at: int, positions: Tensor | None) -> Tensor:
        length = tokens.shape[1] * self.comm.mesh.size("context")
        result = self._through(tokens, length, None, logits_at=at)
        vocabulary = torch.zeros(1, dtype=torch.int64, device=self.comm.device)
        if result is not None:
            vocabulary += result.shape[-1]
        self.comm.all_reduce(vocabulary, AXIS)
        if result is None:
            result = torch.zeros(
                tokens.shape[0], int(vocabulary), dtype=self.stages.dtype, device=self.comm.device
            )
        return self.comm.all_reduce(result, AXIS)

    def _through(self, inputs: Tensor, length: int, documents: Tensor | None, **head: Any) -> Tensor | None:
        """One micro-batch forward through all stages; the result where the last stage is."""
        self._tell_positions(length)
        schedule = self.stages.schedule
        x = inputs
        for stage, part in zip(schedule.stages_of(self.stages.rank), self.parts, strict=True):
            if stage > 0 and not self._has(stage - 1):
                shape = (
                    inputs.shape[0],
                    inputs.shape[1] // self.comm.mesh.size("tensor"),
                    self.stages.hidden,
                )
                x = torch.empty(shape, dtype=self.stages.dtype, device=self.comm.device)
                self.comm.receive(x, AXIS, schedule.rank_of_stage[stage - 1])
            more = head if stage == self.stages.last else {}
            x = part.model(x, documents=documents, positions=self._modules[0].positions, **more)
            if stage < self.stages.last and not self._has(stage + 1):
                self.comm.send(x, AXIS, schedule.rank_of_stage[stage + 1])
        return x if self._has(self.stages.last) else None
