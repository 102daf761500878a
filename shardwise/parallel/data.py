"""Data parallelism: every device computes on its own sequences, and gradients are summed.

What differs between the ZeRO stages (Rajbhandari et al., 2020) is who keeps what between uses, and so when
bytes move. With P parameters of s bytes stored, c bytes to compute with and r bytes a summed gradient (4, 2,
4 in bfloat16), R of them in the root unit, and m micro-batches a step:

| zero | engine | kept sharded                 | moves a step                                                |
| ---- | ------ | ---------------------------- | ----------------------------------------------------------- |
| 0    | DDP    | nothing                      | all-reduce sP, in buckets while the last backward runs      |
| 1    | FSDP2  | master weights, moments      | all-gather cP once, reduce-scatter rP once                  |
| 2    | FSDP2  | and gradients                | all-gather cP once, reduce-scatter rP each micro-batch      |
| 3    | FSDP2  | and computed weights         | all-gather c(2P - R), reduce-scatter rP, each micro-batch   |

A unit is what moves at once: a block, the embedding, and the root with all that remains (head, last norm,
learned positions; in a tied model the embedding, which is the head). Of a block with experts, these are a
unit of their own, and so is the router, which is computed with in r bytes and not in c: FSDP2 has one dtype
for all of a unit. The root is used last in forward and first in backward, so it stays gathered between them
and moves once. Rows that do not divide over `data` are padded until they do. tests/comm holds the ledger of
real steps to this table, to the byte.

Beside tensor, pipeline or expert axes, `zero = 0` is FSDP2 too, on shards of one device: nothing is gathered
over the wire, and gradients are summed over the copies unit by unit in the last backward. With `context`
above 1 its devices count as data devices.

With `replica` above 1 the shards live inside each replica, and an all-reduce of the summed shards (rP / data)
joins the replicas once a step.

plan/memory.py states what each stage costs in bytes held. On CPU workers up to four units' gradients more are
on their way, with room for as many that come (comm/deferred_sums.py).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from shardwise._torch import add_to_gradients, end_backward, forget_forwards, reduce_gathered, unit_pieces
from shardwise.comm import (
    EXPOSED,
    Comm,
    CompressedCopies,
    CompressionSettings,
    Compressor,
    CountedAllGather,
    CountedReduceScatter,
    EncodedGather,
    Float8Gather,
    GatherSettings,
    GradientSum,
    NearbyCopy,
    SumsBehind,
    UnitBehind,
)
from shardwise.models.float8_products import ScaledProduct
from shardwise.parallel.overlap import gather_ahead, reduce_root_first
from shardwise.plan.engine import CONCURRENT_SUMS, Engine
from shardwise.plan.grid import COPIES, EXPERT_SHARDS, SHARDS, within


@dataclass
class DataParallel:
    """One part of the model (all of it, or a pipeline stage) and how its weights are kept equal on the
    devices that hold them.

    What may be called when, in the course of a step:

        micro_batch(last=False): forward, backward   any number of times, then once with last=True;
                                                     after it gradients are complete
        hold(), half a backward, hold(), ...         instead, where a schedule splits backward;
        release()                                    after it gradients are complete
        settle()                                     between steps only, after forwards without backward

    Where a schedule splits backward, `stay_gathered()` is called once before the first step.

    Between `release` or the last micro-batch and the next step the optimizer may change weights, and
    parameters are what this rank stores of them. The methods here do nothing, which is right for one
    device.
    """

    model: nn.Module
    keeps_gradients: bool = field(default=False, init=False)
    """Whether gradients are set to zero in place after a step, rather than given back."""
    compressors: list[Compressor] = field(default_factory=list, init=False)
    """Of the sums of gradients, where they are compressed."""

    @property
    def waits_are_timed(self) -> bool:
        """Whether exposed communication can be told apart from computation."""
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.model(*args, **kwargs)
        return output

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Forward and backward of one micro-batch happen inside; `last` says that gradients must be complete
        after."""
        yield

    def stay_gathered(self) -> None:
        """Keep weights gathered from their first use in a step to its end: for backward passes in two
        halves."""

    def hold(self) -> None:
        """Before half a backward: gradients stay whole, until `release`."""

    def add_up(self) -> None:
        """After half a backward that gave gradients of weights: add them to those that are held."""

    def release(self) -> None:
        """After the last half: reduce the gradients that were held, and let go of the gathered weights."""

    def settle(self) -> None:
        """Give back whatever a forward without backward left in memory."""


@dataclass
class SingleDevice(DataParallel):
    """No other device holds the same weights: nothing to exchange."""


class _ModelOrSum(nn.Module):
    """What DDP calls: the model, or without any input a sum of one number of each trained weight, whose
    backward asks for nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if inputs or named:
            return self.model(*inputs, **named)
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return torch.stack([parameter.flatten()[0] for parameter in trained]).sum()


@dataclass
class Replicated(DataParallel):
    """zero = 0: torch's DistributedDataParallel, with our sum in its buckets."""

    comm: Comm
    settings: CompressionSettings | None
    bucket_bytes: int | None
    """Of gradients that are summed at once; None: as torch does."""
    hook: GradientSum = field(init=False)
    ddp: DistributedDataParallel = field(init=False)

    def __post_init__(self) -> None:
        group = self.comm.mesh.group(COPIES)
        assert group is not None, "there are devices to exchange with"
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers, but its new name is unknown to 2.11.
            warnings.simplefilter("ignore", FutureWarning)
            self.ddp = DistributedDataParallel(
                _ModelOrSum(self.model),
                process_group=group,
                bucket_cap_mb=None if self.bucket_bytes is None else self.bucket_bytes / 2**20,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        self._settle_buckets()
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        if self.settings is not None:
            apart = (
                self.comm.device.type == "cpu"
            )  # where a thread makes the sums, and attention may use the same axis meanwhile
            self.compressors = [Compressor(self.comm, COPIES, self.settings, apart)]
            for parameter, name in names.items():
                self.compressors[0].follow(name, parameter.shape)
        compressor = self.compressors[0] if self.compressors else None
        self.hook = hook = GradientSum(self.comm, self.comm.mesh.label(COPIES), group, compressor, names)
        self.ddp.register_comm_hook(None, lambda state, bucket: hook.reduce(bucket))

    def _settle_buckets(self) -> None:
        """DDP lays its buckets out anew after its first backward, and the bits of a sum depend on the place
        in a bucket. So the first step of a resumed run would differ from the same step of a run that never
        stopped. A backward that asks nothing of the weights, in the order DDP expects (last parameter first),
        gets that over with before the first step.
        """
        self.ddp().backward()
        self.model.zero_grad()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.ddp(*args, **kwargs)
        return output

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Sum over devices only in the last backward."""
        if not last:
            # Gradients live in DDP's buckets. Given back after a step, they would next be summed beside the
            # buckets: 4P more.
            self.keeps_gradients = True
            with self.ddp.no_sync():
                yield
        else:
            yield
            self.hook.backward_ended()


@dataclass
class Sharded(DataParallel):
    """zero = 1, 2, 3, and zero = 0 beside other axes: torch's FSDP2, told when to gather and when to
    reduce."""

    engine: Engine
    units: list[FSDPModule]
    device: torch.device
    collectives: _Collectives
    """How units gather weights and sum gradients."""

    @property
    def waits_are_timed(self) -> bool:
        """On a GPU, FSDP2 waits on streams of its own, where no public hook reaches."""
        return self.device.type == "cpu"

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See the table above for what each stage does in each micro-batch."""
        for unit in self.units:
            unit.set_requires_gradient_sync(self.engine.reduces_each or last, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            # Below zero = 3 weights stay gathered through the step. They must not outlive it: the optimizer
            # changes the shards, and a copy gathered before would be used, silently, in the next forward.
            unit.set_reshard_after_backward(not self.engine.keeps_gathered or last, recurse=False)
            unit.set_is_last_backward(last)
        self._complete(last)
        yield
        self.collectives.behind.complete(but=0 if last else 1)

    def stay_gathered(self) -> None:
        """The second half of a backward asks a module for its weights, and would be given shards."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)

    def hold(self) -> None:
        """Neither reduce nor let go."""
        for unit in self.units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_is_last_backward(False)

    def add_up(self) -> None:
        """In the dtype of sums. The next half would be added in that of the weights, which may have 16
        bits."""
        for unit in self.units:
            reduce_gathered(unit)

    def release(self) -> None:
        """Reduce every unit, and let go."""
        self._complete(True)
        assert isinstance(self.model, FSDPModule)
        for unit in self.units:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_requires_all_reduce(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.set_is_last_backward(True)
            reduce_gathered(unit)
        end_backward(self.model)
        self.collectives.behind.complete()

    def _complete(self, last: bool) -> None:
        for copies in self.collectives.copies:
            copies.last = last

    def settle(self) -> None:
        """Drop the weights that an evaluation leaves gathered below zero = 3, so that parameters are shards
        again, and FSDP2's record of its forwards."""
        for unit in self.units:
            unit.reshard()
            forget_forwards(unit)


def replicate(
    model: nn.Module, comm: Comm, settings: CompressionSettings | None, bucket_bytes: int | None
) -> Replicated:
    """Copy the model on every data-parallel device."""
    return Replicated(model, comm, settings, bucket_bytes)


def shard(
    model: nn.Module,
    units: list[nn.Module],
    wide_units: list[nn.Module],
    experts: list[nn.Module],
    comm: Comm,
    compute: torch.dtype,
    reduce: torch.dtype,
    engine: Engine,
    settings: CompressionSettings | None,
    gathers: GatherSettings | None,
    root_is_last: bool,
) -> Sharded:
    """Shard the model over `data x context`, one FSDP2 unit for each module given and one for what remains.
    Units come in the order of their use. Wide units are computed with in the dtype of sums. Experts are units
    too, sharded over the devices that hold the same experts. `root_is_last`: what remains is used after the
    last unit, and nowhere else.
    """
    layout = comm.mesh.layout
    collectives = _Collectives(model, comm, engine, settings, gathers)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
        ),
        # On a CPU the states are in host memory already, and there is no device to pin it for.
        "offload_policy": CPUOffloadPolicy()
        if layout.offload and comm.device.type != "cpu"
        else OffloadPolicy(),
        "reshard_after_forward": not engine.keeps_gathered,
    }
    for unit in experts:
        fully_shard(unit, mesh=collectives.mesh(EXPERT_SHARDS), **options)
        collectives.attach(unit, EXPERT_SHARDS)
    dense = collectives.mesh(SHARDS)
    for unit in wide_units:
        policy = MixedPrecisionPolicy(param_dtype=reduce, reduce_dtype=reduce, cast_forward_inputs=False)
        fully_shard(unit, mesh=dense, **{**options, "mp_policy": policy})
    for unit in units:
        fully_shard(unit, mesh=dense, **options)
    # None: torch keeps the root gathered from forward to backward.
    fully_shard(model, mesh=dense, **{**options, "reshard_after_forward": None})
    for unit in (*wide_units, *units, model):
        collectives.attach(unit, SHARDS)
    sharded_units: list[FSDPModule] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    if comm.device.type == "cpu":
        gather_ahead(model, units)
        if root_is_last:
            reduce_root_first(model, units)
    sharded = Sharded(model, engine, sharded_units, comm.device, collectives)
    sharded.compressors = list(collectives.compressors.values())
    return sharded


class _Collectives:
    """How the units of a model gather weights and sum gradients: every collective is counted, and summed,
    never averaged."""

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        engine: Engine,
        settings: CompressionSettings | None,
        gathers: GatherSettings | None,
    ) -> None:
        self.comm, self.engine, self.settings, self.gathers = comm, engine, settings, gathers
        self.paths = {module: path for path, module in model.named_modules()}
        self.compressors: dict[str, Compressor] = {}
        """By axis."""
        self.copies: list[CompressedCopies] = []
        """What sums each unit's gradients over its copies, where they are compressed."""
        self.behind = SumsBehind(comm, CONCURRENT_SUMS)
        """On a CPU, sums over shards that go on behind backward."""

    def mesh(self, axis: str) -> DeviceMesh:
        """Where a unit lives: (copies, shards), or shards alone. Without ZeRO every device is a copy, of
        shards of one device. FSDP2 is not told of copies whose sums are compressed: it has no way to replace
        that sum, only one to add another."""
        mesh, copies = self.comm.mesh, self.engine.copies(axis)
        shards = axis if self.engine.zero else "solo"
        joined = mesh.size(copies) > 1 and not self._compresses(copies)
        return mesh.sub(copies, shards) if joined else mesh.sub(shards)

    def attach(self, unit: nn.Module, axis: str) -> None:
        """Give a unit, sharded over this axis, its collectives."""
        assert isinstance(unit, FSDPModule)
        comm, mesh, copies = self.comm, self.comm.mesh, self.engine.copies(axis)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        pieces = list(unit_pieces(unit))
        gathered = {self._name(piece.module, piece.name): piece.shape for piece in pieces}
        summed = {self._name(piece.module, piece.name): piece.shape for piece in pieces if piece.trained}
        shards = self._compressor(axis, summed, mesh.size(axis)) if self.engine.zero else None
        behind = (
            UnitBehind(self.behind, partial(add_to_gradients, unit)) if self._goes_on_behind(axis) else None
        )
        scatter = CountedReduceScatter(comm, mesh.label(axis), summed, shards, behind)
        products = [_product_of(piece.module, piece.name) for piece in pieces]
        unit.set_custom_all_gather(self._gather(axis, gathered, products))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        if mesh.size(copies) > 1:
            compressor = self._compressor(copies, summed, None)
            if compressor is None:
                unit.set_all_reduce_hook(_count_all_reduce(comm, scatter, mesh.label(copies)))
            else:
                self.copies.append(CompressedCopies(comm, compressor, summed))
                unit.set_all_reduce_hook(self.copies[-1])

    def _gather(
        self, axis: str, pieces: Mapping[str, torch.Size], products: Sequence[ScaledProduct | None]
    ) -> CountedAllGather:
        comm, label = self.comm, self.comm.mesh.label(axis)
        encoded: EncodedGather | Float8Gather | None = None
        nearby = None
        if self.engine.zero and comm.mesh.size(axis) > 1 and any(products):
            encoded = Float8Gather(comm, label, list(pieces.values()), products)
        if self.gathers is not None and self.engine.zero and comm.mesh.size(axis) > 1:
            codec, near = self.gathers.how.codec, self.gathers.how.backward_shards
            if codec is not None and not self.gathers.names.isdisjoint(pieces):
                encoded = EncodedGather(comm, label, codec, self.gathers.names, pieces)
            if near is not None:
                nearby = NearbyCopy(comm, within(label, near), comm.mesh.neighbours(axis, near))
        return CountedAllGather(comm, label, encoded, nearby)

    def _goes_on_behind(self, axis: str) -> bool:
        """FSDP2 sums over copies right after it summed over shards, so that with copies it must have the sum
        at once."""
        return self.comm.device.type == "cpu" and self.comm.mesh.size(self.engine.copies(axis)) == 1

    def _name(self, module: nn.Module, name: str) -> str:
        return ".".join(part for part in (self.paths[module], name) if part)

    def _compresses(self, axis: str) -> bool:
        if self.settings is None or self.comm.mesh.size(axis) == 1:
            return False
        return self.settings.how.compresses(axis)

    def _compressor(self, axis: str, pieces: Mapping[str, torch.Size], rows: int | None) -> Compressor | None:
        """Of sums over this axis, which follows these parameters from now on; None: they are not
        compressed."""
        if not self._compresses(axis):
            return None
        assert self.settings is not None, "it compresses"
        if axis not in self.compressors:
            apart = rows is not None and self._goes_on_behind(axis)
            self.compressors[axis] = Compressor(self.comm, axis, self.settings, apart)
        compressor = self.compressors[axis]
        for name, shape in pieces.items():
            compressor.follow(name, shape if rows is None else (rows, *shape))
        return compressor


def _product_of(module: nn.Module, name: str) -> ScaledProduct | None:
    """The product in float8 that alone uses this weight of a module, if there is one."""
    own = getattr(module, "float8", None)
    products = own.modules() if isinstance(own, nn.Module) else ()
    return next(
        (one for one in products if isinstance(one, ScaledProduct) and name in one.weights and one.alone),
        None,
    )


def _count_all_reduce(comm: Comm, scatter: CountedReduceScatter, axis: str) -> Callable[[Tensor], None]:
    """FSDP2 calls this right after it joined the copies, which on CPU began when the reduce-scatter ended."""

    def after(gradients: Tensor) -> None:
        begun = comm.begin("all_reduce", axis, gradients)
        if comm.device.type == "cpu" and scatter.ended:
            begun.start = scatter.ended
            begun.end()
            comm.clock.add(EXPOSED, scatter.ended, time.perf_counter())

    return after
