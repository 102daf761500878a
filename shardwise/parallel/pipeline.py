"""Pipeline parallelism: the model is cut in depth, and micro-batches pass through the stages.

plans/schedule.py makes the list of actions of each device, which is also drawn and priced; torch's pipelining
runtime executes it and adds the sends and receives. Two stages exchange one micro-batch's hidden states,
forward and backward: batch x sequence x hidden / (context x tensor) values, because each device of a tensor
group sends only its part of the sequence.

The loss of a micro-batch is the sum over its tokens times one factor for the whole step, so gradients simply
add up: nothing is averaged over micro-batches or stages, and any schedule gives the result of one device.

FSDP2 inside a stage gathers and reduces as it does without a pipeline (parallel/data.py), micro-batch by
micro-batch. The zero-bubble schedules split backward in two, and the second half runs outside of the hooks
in which FSDP2 reduces. With these schedules weights therefore stay gathered and gradients whole until the
step's last action, in every ZeRO stage.

A tied embedding has a copy on the first and on the last stage. Both begin equal and get the sum of the two
gradients, so both stay equal; the sum is one exchange per step between the two devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shardwise._torch import graph_owners, pipeline_runtime
from shardwise.comm import Comm
from shardwise.data.batches import Batch
from shardwise.errors import UserError
from shardwise.models import Head, LossCall, LossSums, OfProgram, StageCall
from shardwise.models.float8_products import ScaledProduct
from shardwise.models.program_module import LARGEST_NDIM
from shardwise.models.torch_dtypes import wide
from shardwise.optim import local
from shardwise.parallel.data import DataParallel
from shardwise.parallel.parallel_model import MicroBatches, ParallelModel
from shardwise.parallel.stage_modules import AXIS, Stages


class _StageModule(nn.Module):
    """A stage's module as torch's runtime calls it: hidden states first, the rest by name. It is not an FSDP2
    module itself, so that the runtime leaves gathering and reducing to parallel/data.py."""

    def __init__(self, part: nn.Module, number: int, last: int) -> None:
        super().__init__()
        self.part, self.number, self.last = part, number, last
        self.positions: Tensor | None = None
        self.call: LossCall | None = None
        """In a program, the micro-batch that is computed next."""
        self.returns: Tensor | None = None
        """In a program, what the stage returns in each step, without values."""

    def forward(self, x: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.call is not None:
            result: Tensor = self.part(call=replace(self.call, stage=StageCall(self.number, self.last, x)))
            self._check(result)
        else:
            more = {"targets": targets} if self.number == self.last else {}
            result = self.part(x, documents=documents, positions=self.positions, **more)
        result = result.contiguous()  # torch's runtime sends it as it is
        # The sent tensor is freed after backward, so it must not share memory with the input.
        if result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            result = result.clone()
        # Where all weights so far are frozen there is no backward, but torch's runtime runs one.
        return result.requires_grad_() if torch.is_grad_enabled() and not result.requires_grad else result

    def _check(self, result: Tensor) -> None:
        """Refuse hidden states that the next stage does not expect: torch's runtime receives into memory that
        was allocated once."""
        expected = self.returns
        if expected is not None and (result.shape, result.dtype) != (expected.shape, expected.dtype):
            raise UserError(
                f"pipeline stage {self.number} returned hidden states of shape {tuple(result.shape)}, and "
                f"{tuple(expected.shape)} in the first step. With layout.pipeline all micro-batches have one "
                "shape; pad samples to one length in the collate function"
            )


class _Stage(PipelineStage):
    """torch's stage, whose backward reduces gradients in the way of the part's data parallelism."""

    part: DataParallel
    comm: Comm
    split: bool
    sent: dict[int, list[Tensor]]
    float8: bool
    """Whether the stage multiplies in float8, by autograd functions of ours."""
    owners: dict[int, list[object]]
    """Objects that keep each micro-batch's graph alive between the halves of a split backward."""
    begin: Callable[[int], None]
    """Function that is called before the forward of each micro-batch."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no warm-up sends: torch 2.11 would send to itself where two neighbouring stages are on one
        device."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's output, which is freed after its backward."""
        operations = self._counted(super().get_fwd_send_ops(fwd_chunk_id))
        self.sent[fwd_chunk_id] = [operation.tensor for operation in operations]
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradients of a micro-batch's input."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations:  # torch's runtime issues them, and does not tell when they end
            self.comm.begin("send", AXIS, operation.tensor)
        return operations

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> object:
        self.begin(fwd_chunk_id)
        try:
            with self.comm.working():
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raised = error.__cause__ or error  # torch's runtime wraps what the model raised
        # Outside of the handler: there the wrapper would become its context, and it is the wrapper's cause.
        raise raised

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward and self.float8:
            outputs = [loss] if isinstance(loss, Tensor) else self.fwd_cache[bwd_chunk_id][0]
            self.owners[bwd_chunk_id] = graph_owners(outputs)
        with self.comm.working():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._free_sent(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.comm.working():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self.owners.pop(bwd_chunk_id, None)
            self.part.accumulate()
        self._free_sent(bwd_chunk_id)

    def _free_sent(self, micro_batch: int) -> None:
        """Free a micro-batch's sent outputs, which torch would hold until the step ends. Its gradient has
        come back, so they have arrived."""
        for tensor in self.sent.pop(micro_batch, []):
            tensor.untyped_storage().resize_(0)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, object], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, object]] | None]:
        if self.split:
            self.part.hold_gradients()
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
        self._batch: MicroBatches = ()
        self._modules = [
            _StageModule(part.model, stage, self.stages.last)
            for part, (stage, _) in zip(self.parts, self.stages.local_stages, strict=True)
        ]
        if self.stages.splits_backward:
            for part in self.parts:
                part.stay_gathered()
                for module in part.model.modules():
                    if isinstance(module, Head):
                        module.split_backward = True
        self._boundaries: dict[int, Tensor] = {}
        """In a program: what each stage of this rank gets and returns, by the number of the stage that gets
        it, without values."""

    @cached_property
    def _runtime(self) -> Any:
        """torch's runtime. It is made in the first step, when the shapes of a program's hidden states are
        known."""
        schedule, group = self.stages.schedule, self.comm.mesh.group(AXIS)
        modules = zip(self._modules, self.parts, strict=True)
        runners = [self._stage(module, part, group) for module, part in modules]
        actions = {rank: [str(action) for action in row] for rank, row in enumerate(schedule.actions)}
        return pipeline_runtime(runners, schedule.micro_batches, self._loss, actions)

    @property
    def pipeline(self) -> Stages:
        """How the model is cut into stages."""
        return self.stages

    def _stage(self, module: _StageModule, part: DataParallel, group: dist.ProcessGroup | None) -> _Stage:
        stages, stage = self.stages, module.number
        if self._is_of_program and stage < stages.last:
            module.returns = self._boundary(stage + 1)
        loss = torch.empty((), dtype=wide(stages.dtype), device="meta", requires_grad=True)
        runner = _Stage(
            module,
            stage,
            stages.schedule.stages,
            self.comm.device,
            input_args=self._boundary(stage),
            output_args=loss if stage == stages.last else self._boundary(stage + 1),
            group=group,
        )
        runner.part, runner.comm, runner.split, runner.sent = part, self.comm, stages.splits_backward, {}
        runner.float8 = any(isinstance(module, ScaledProduct) for module in part.model.modules())
        runner.owners = {}
        runner.begin = partial(self._begin, module)
        return runner

    def _boundary(self, stage: int) -> Tensor:
        """Return what enters a stage in a step, without values: ids, then hidden states. The stages of a
        program get their part of the batch themselves, and the first one only a number for each micro-batch.
        """
        stages, layout = self.stages, self.comm.mesh.layout
        if self._is_of_program:
            return torch.empty(1, device="meta") if stage == 0 else self._boundaries[stage].requires_grad_()
        if stage == 0:
            return torch.empty(stages.micro_batch, stages.length, dtype=torch.int64, device="meta")
        shape = (stages.micro_batch, stages.length // layout.tensor, stages.hidden)
        return torch.empty(shape, dtype=stages.dtype, device="meta", requires_grad=True)

    @property
    def _is_of_program(self) -> bool:
        return isinstance(self.parts[0].model, OfProgram)

    def _begin(self, module: _StageModule, index: int) -> None:
        """Prepare the forward of a micro-batch."""
        batch = self._batch[index]
        module.call = batch if isinstance(batch, LossCall) else None
        self.begin(batch)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._total = self._total + output.detach()
        return output * self._factor

    def named_parameters(self, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, with the names of the plain model; with `once`, a tied weight comes
        with the first stage only."""
        for part, (stage, _) in zip(self.parts, self.stages.local_stages, strict=True):
            for name, parameter in part.model.named_parameters():
                if not (once and stage > 0 and name in self.table.tied):
                    yield self.table.tied_name(name), parameter

    def _run(self, batch: MicroBatches, factor: Tensor) -> Tensor:
        self._batch, self._factor, self._total = batch, factor, torch.zeros_like(factor)
        inputs, named = self._tensors_of(batch)
        with self.comm.waiting():  # beside the stages' work, torch's runtime waits for sends and receives
            self._runtime.step(
                *([inputs] if self._has(0) else []),
                target=named["targets"],
                losses=[],
                return_outputs=False,
                **named,
            )
        for part in self.parts:
            # FSDP2 frees weights when a backward ends, and a stage whose weights are all frozen has none.
            if self.stages.splits_backward or not _is_trained(part.model):
                part.reduce_gradients()
        return self._total

    def _tensors_of(self, batch: MicroBatches) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the input of the first stage and the arguments of all stages, which torch's runtime divides
        into micro-batches."""
        if self._is_of_program:
            if "_runtime" not in vars(self):
                self._learn_boundaries(batch[0])
            numbers = torch.arange(len(batch), dtype=torch.float32, device=self.comm.device)
            return numbers, {"targets": numbers}
        tokens = [micro_batch for micro_batch in batch if isinstance(micro_batch, Batch)]
        self._set_positions(tokens[0].inputs.shape[1])
        micro_batches = [self.local_batch(micro_batch) for micro_batch in tokens]
        named = {"targets": torch.cat([micro_batch.targets for micro_batch in micro_batches])}
        documents = [micro.documents for micro in micro_batches if micro.documents is not None]
        if documents:
            named["documents"] = torch.cat(documents)
        return torch.cat([micro_batch.inputs for micro_batch in micro_batches]), named

    @torch.no_grad()
    def _learn_boundaries(self, batch: Batch | LossCall) -> None:
        """Find the shapes of a program's hidden states by a forward of one micro-batch."""
        assert isinstance(batch, LossCall), "the micro-batches of a program are calls"
        with self.evaluating():
            self.loss(replace(batch, sums=LossSums()))

    def _set_positions(self, length: int) -> None:
        whole = torch.arange(length, device=self.comm.device)
        positions = whole if self.positions is None else self.positions(length)
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
        numbers = (number for number, _ in self.stages.local_stages)
        models = {number: part.model for number, part in zip(numbers, self.parts, strict=True)}
        return dict(models[stage].named_parameters())[name] if stage in models else None

    def _add_from_other_end(self, gradient: Tensor) -> None:
        first, last = self.stages.schedule.rank_of_stage[0], self.stages.schedule.rank_of_stage[-1]
        peer = last if self.stages.rank == first else first
        (received,) = self.comm.start_exchange([gradient], AXIS, peer, peer).arrived()
        gradient += received

    def loss(self, batch: Batch | LossCall) -> Tensor:
        """Return the summed loss on the rank of the last stage and zero elsewhere, without gradients."""
        self.begin(batch)
        if isinstance(batch, LossCall):
            result = self._forward_call(batch)
        else:
            part = self.local_batch(batch)
            result = self._forward(part.inputs, batch.inputs.shape[1], part.documents, targets=part.targets)
        zero = torch.zeros((), dtype=wide(self.stages.dtype), device=self.comm.device)
        return zero if result is None else result

    def _forward_call(self, call: LossCall) -> Tensor | None:
        """Run a micro-batch of a program forward through all stages, and return the loss on the rank of the
        last one. Shapes are sent before hidden states, because only the program knows them."""
        schedule, last = self.stages.schedule, self.stages.last
        x = torch.empty(1, device=self.comm.device)
        for module in self._modules:
            stage = module.number
            if stage > 0 and not self._has(stage - 1):
                before = schedule.rank_of_stage[stage - 1]
                header = torch.zeros(2 + LARGEST_NDIM, dtype=torch.int64, device=self.comm.device)
                self.comm.receive(header, AXIS, before)
                x = torch.empty_like(_described_by(header), device=self.comm.device)
                self.comm.receive(x, AXIS, before)
            self._boundaries[stage] = torch.empty_like(x, device="meta")
            x = module.part(call=replace(call, stage=StageCall(stage, last, x))).contiguous()
            self._boundaries[stage + 1] = torch.empty_like(x, device="meta")
            if stage < last and not self._has(stage + 1):
                after = schedule.rank_of_stage[stage + 1]
                self.comm.send(_header(x), AXIS, after)
                self.comm.send(x, AXIS, after)
        return x if self._has(last) else None

    def _logits(self, tokens: Tensor, at: int, positions: Tensor | None) -> Tensor:
        length = tokens.shape[1] * self.comm.mesh.size("context")
        result = self._forward(tokens, length, None, logits_at=at)
        vocabulary = torch.zeros(1, dtype=torch.int64, device=self.comm.device)
        if result is not None:
            vocabulary += result.shape[-1]
        self.comm.all_reduce(vocabulary, AXIS)
        if result is None:
            shape = (tokens.shape[0], int(vocabulary))
            result = torch.zeros(shape, dtype=self.stages.dtype, device=self.comm.device)
        return self.comm.all_reduce(result, AXIS)

    def _forward(
        self, inputs: Tensor, length: int, documents: Tensor | None, **head: Tensor | int
    ) -> Tensor | None:
        """Run one micro-batch forward through all stages, and return the result on the rank of the last one;
        `head` are arguments of the last stage."""
        self._set_positions(length)
        schedule = self.stages.schedule
        x = inputs
        for stage, part in zip(schedule.stages_of(self.stages.rank), self.parts, strict=True):
            if stage > 0 and not self._has(stage - 1):
                tokens = inputs.shape[1] // self.comm.mesh.size("tensor")
                shape = (inputs.shape[0], tokens, self.stages.hidden)
                x = torch.empty(shape, dtype=self.stages.dtype, device=self.comm.device)
                self.comm.receive(x, AXIS, schedule.rank_of_stage[stage - 1])
            more = head if stage == self.stages.last else {}
            x = part.model(x, documents=documents, positions=self._modules[0].positions, **more)
            if stage < self.stages.last and not self._has(stage + 1):
                self.comm.send(x, AXIS, schedule.rank_of_stage[stage + 1])
        return x if self._has(self.stages.last) else None


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _header(hidden: Tensor) -> Tensor:
    """Return the shape and the dtype of hidden states as numbers, to be sent before them."""
    sizes = [*hidden.shape, *([0] * (LARGEST_NDIM - hidden.ndim))]
    numbers = [_DTYPES.index(hidden.dtype), hidden.ndim, *sizes]
    return torch.tensor(numbers, dtype=torch.int64, device=hidden.device)


def _described_by(header: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype in a header, without values."""
    dtype, ndim, *sizes = header.tolist()
    return torch.empty(sizes[:ndim], dtype=_DTYPES[dtype], device="meta")


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())
