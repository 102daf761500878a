"""Data parallelism: every device computes on different sequences, and gradients are summed.

The ZeRO stages (Rajbhandari et al., 2020) differ in what is sharded between uses, and so in when bytes are
sent. Let a parameter take s bytes where it is stored, c bytes in the dtype of computations, and its summed
gradient r bytes (4, 2 and 4 with `precision = "bfloat16"`). With P parameters, R of them in the root unit,
the collectives of one step are:

| zero | engine | sharded                             | collectives of one step                            |
| ---- | ------ | ----------------------------------- | -------------------------------------------------- |
| 0    | DDP    | nothing                             | all-reduce of sP bytes, in buckets, while the last |
|      |        |                                     | backward runs                                      |
| 1    | FSDP2  | master weights and optimizer states | all-gather of cP and reduce-scatter of rP bytes,   |
|      |        |                                     | once                                               |
| 2    | FSDP2  | these, and gradients                | all-gather of cP bytes once, reduce-scatter of rP  |
|      |        |                                     | bytes in each micro-batch                          |
| 3    | FSDP2  | these, and the weights that compute | all-gather of c(2P - R) and reduce-scatter of rP   |
|      |        |                                     | bytes in each micro-batch                          |

FSDP2 sends one unit at a time: a block, the embedding, or the root with everything else (head, last norm,
learned positions; in a tied model the embedding, which is the head). The experts of a block are a separate
unit, and so is the router, which computes in r bytes and not in c: FSDP2 has one dtype per unit. The root is
used last in forward and first in backward, so it stays gathered between them and is sent once. Rows that do
not divide over `data` are padded. tests/comm compares the ledger of real steps with this table, to the byte.

With tensor or pipeline axes, and for every model with experts, `zero = 0` is FSDP2 too, on shards of one
device: nothing is gathered over the network, and gradients are summed over the copies unit by unit in the
last backward. With `context` above 1 its devices count as data devices. With `replica` above 1 each replica
is sharded by itself, and an all-reduce of the summed shards (rP / data) over the replicas follows once per
step.

plans/memory.py has the memory of each stage. CPU workers also hold the gradients of up to four units whose
sums are running, and buffers of the same size for what arrives (comm/deferred_sums.py).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

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
    Comm,
    CompressedAxisSum,
    CompressedReplicaSum,
    CompressionSettings,
    CountedAllGather,
    CountedReduceScatter,
    DeferredSums,
    DeferredUnitSum,
    EncodedGather,
    Float8Gather,
    GatherSettings,
    GradientSum,
    SecondaryShard,
)
from shardwise.models.float8_products import ScaledProduct
from shardwise.observe import EXPOSED
from shardwise.parallel.overlap import gather_ahead, reduce_root_first
from shardwise.plans.engine import MAX_DEFERRED_SUMS, Engine
from shardwise.plans.grid import COPIES, EXPERT_SHARDS, SHARDS, within


@dataclass
class DataParallel:
    """One part of the model (all of it, or a pipeline stage), and how its gradients are summed over the
    devices that hold it.

    Order of calls in a step:

        micro_batch(last=False): forward, backward   any number of times, then once with last=True;
                                                     after it gradients are complete
        hold_gradients(), half a backward, ...       instead, where a schedule splits backward;
        reduce_gradients()                           after it gradients are complete
        free_forward()                               between steps only, after forwards without backward

    Where a schedule splits backward, `stay_gathered()` is called once before the first step.

    Between `reduce_gradients` or the last micro-batch and the next step, the optimizer may change weights,
    and parameters are this rank's shards. The methods here do nothing, which is right for one device.
    """

    model: nn.Module
    keeps_gradients: bool = field(default=False, init=False)
    """Whether gradients are set to zero in place after a step, rather than freed."""
    compressors: list[CompressedAxisSum] = field(default_factory=list, init=False)
    """Objects that sum compressed gradients, one per axis."""
    unsummed: list[str] = field(default_factory=list, init=False)
    """Weights without a gradient in the last backward of the step, if gradients were not summed for this
    reason."""

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        output: Tensor = self.model(*args, **kwargs)
        return output

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for forward and backward of one micro-batch; after the `last` one gradients are
        complete."""
        yield

    def stay_gathered(self) -> None:
        """Keep weights gathered from their first use in a step to its end, for backward passes in two
        halves."""

    def hold_gradients(self) -> None:
        """Keep gradients whole until `reduce_gradients`; call this before each half of a backward."""

    def accumulate(self) -> None:
        """Add the gradients of half a backward to those held; call this after a half that computed weight
        gradients."""

    def reduce_gradients(self) -> None:
        """Reduce the held gradients and free the gathered weights; call this after the last half."""

    def free_forward(self) -> None:
        """Free the memory that a forward without backward left."""


@dataclass
class SingleDevice(DataParallel):
    """A model whose gradients are not summed: no other device has it, or all workers share one copy in memory
    (Hogwild)."""


class _ModelOrSum(nn.Module):
    """The module that DDP wraps: runs the model or, without any input, returns a sum of one number of each
    trained weight, whose backward needs no data."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: object, **named: object) -> Tensor:
        if inputs or named:
            output: Tensor = self.model(*inputs, **named)
            return output
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return torch.stack([parameter.flatten()[0] for parameter in trained]).sum()


@dataclass
class Replicated(DataParallel):
    """zero = 0: torch's DistributedDataParallel, whose buckets are summed by our hook."""

    comm: Comm
    settings: CompressionSettings | None
    bucket_bytes: int | None
    """Bytes of gradients that are summed at once; None: torch's default."""
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
            # On a CPU a thread makes the sums, and attention may use the same axis meanwhile.
            in_thread = self.comm.device.type == "cpu"
            self.compressors = [CompressedAxisSum(self.comm, COPIES, self.settings, in_thread)]
            for parameter, name in names.items():
                self.compressors[0].register(name, parameter.shape)
        compressor = self.compressors[0] if self.compressors else None
        self.hook = hook = GradientSum(self.comm, self.comm.mesh.label(COPIES), group, compressor, names)
        self.ddp.register_comm_hook(None, lambda state, bucket: hook.reduce(bucket))

    def _settle_buckets(self) -> None:
        """Make DDP arrange its buckets before the first step. DDP arranges them anew after its first
        backward, and the bits of a sum depend on the place in a bucket. So the first step of a resumed run
        would differ from the same step of a run that never stopped. This runs a trivial backward in the order
        that DDP expects: last parameter first.
        """
        self.ddp().backward()
        self.model.zero_grad()

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        output: Tensor = self.ddp(*args, **kwargs)
        return output

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for one micro-batch; only the last backward sums over devices."""
        if not last:
            # Gradients live in DDP's buckets. If they were freed after a step, the next ones would be stored
            # beside the buckets: 4P bytes more.
            self.keeps_gradients = True
            with self.ddp.no_sync():
                yield
        else:
            yield
            self.unsummed = self.hook.backward_ended()


@dataclass
class Sharded(DataParallel):
    """zero = 1, 2, 3, and zero = 0 beside other axes: torch's FSDP2."""

    engine: Engine
    units: list[FSDPModule]
    device: torch.device
    collectives: _Collectives
    """How units gather weights and sum gradients."""

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context for one micro-batch; the table above says what each stage gathers and reduces in it."""
        for unit in self.units:
            unit.set_requires_gradient_sync(self.engine.reduces_each or last, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            # Below zero = 3 weights stay gathered through the step, and no longer: the optimizer changes the
            # shards, and the next forward would silently use the old gathered weights.
            unit.set_reshard_after_backward(not self.engine.keeps_gathered or last, recurse=False)
            unit.set_is_last_backward(last)
        self._complete(last)
        yield
        # On a CPU sums run in the background. The newest one may run on beside the next micro-batch; after
        # the last micro-batch the gradients must be complete.
        self.collectives.deferred.complete(leave=0 if last else 1)

    def stay_gathered(self) -> None:
        """Keep weights gathered after forward: the second half of a backward reads a module's weights, and
        would read shards."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)

    def hold_gradients(self) -> None:
        """Make the next backward neither reduce gradients nor free weights."""
        for unit in self.units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_is_last_backward(False)

    def accumulate(self) -> None:
        """Add the gradients in the dtype of sums; otherwise the next half would add to them in the dtype of
        the weights, which may have 16 bits."""
        for unit in self.units:
            reduce_gathered(unit)

    def reduce_gradients(self) -> None:
        """Reduce the gradients of every unit, and free its gathered weights."""
        self._complete(True)
        assert isinstance(self.model, FSDPModule)
        for unit in self.units:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_requires_all_reduce(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.set_is_last_backward(True)
            reduce_gathered(unit)
        end_backward(self.model)
        self.collectives.deferred.complete()

    def _complete(self, last: bool) -> None:
        for replica_sum in self.collectives.replica_sums:
            replica_sum.last = last

    def free_forward(self) -> None:
        """Free the weights that an evaluation leaves gathered below zero = 3, so that parameters are shards
        again, and FSDP2's record of its forwards."""
        for unit in self.units:
            unit.reshard()
            forget_forwards(unit)


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
    """Shard the model over `data x context`, with one FSDP2 unit for each module given and one, the root, for
    the rest. `units` are in the order of use. `wide_units` compute in the dtype of sums. `experts` are units
    too, sharded over the devices that hold the same experts. `root_is_last` says that the root is used after
    the last unit only.
    """
    collectives = _Collectives(model, comm, engine, settings, gathers)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    wide_policy = MixedPrecisionPolicy(param_dtype=reduce, reduce_dtype=reduce, cast_forward_inputs=False)
    # On a CPU the states are in host memory already, and there is no device to pin it for.
    offload = (
        CPUOffloadPolicy() if comm.mesh.layout.offload and comm.device.type != "cpu" else OffloadPolicy()
    )
    reshard = not engine.keeps_gathered
    apply = partial(fully_shard, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    for unit in experts:
        apply(unit, mesh=collectives.mesh(EXPERT_SHARDS))
        collectives.attach(unit, EXPERT_SHARDS)
    dense = collectives.mesh(SHARDS)
    for unit in wide_units:
        apply(unit, mesh=dense, mp_policy=wide_policy)
    for unit in units:
        apply(unit, mesh=dense)
    # None: torch keeps the root gathered from forward to backward.
    apply(model, mesh=dense, reshard_after_forward=None)
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
    """The collectives of a model's units: all are counted, and gradients are summed, never averaged."""

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
        self.compressors: dict[str, CompressedAxisSum] = {}
        """Objects that sum compressed gradients, by axis."""
        self.replica_sums: list[CompressedReplicaSum] = []
        """Objects that sum each unit's gradients over its copies, where these sums are compressed."""
        self.deferred = DeferredSums(comm, MAX_DEFERRED_SUMS)
        """Sums over shards that a CPU makes in the background of backward."""

    def mesh(self, axis: str) -> DeviceMesh:
        """Return the mesh of a unit: (copies, shards), or shards alone. Without ZeRO each device has a whole
        copy. Copies whose sums are compressed are left out of FSDP2's mesh: its hook can add a sum over
        copies, but not replace one."""
        mesh, copies = self.comm.mesh, self.engine.copies(axis)
        # "solo" is the grid's axis of one device (plans/grid.py): with zero = 0 FSDP2 shards over it, so that
        # each shard is a whole weight.
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
        deferred = None
        if self._defers_sums(axis):
            deferred = DeferredUnitSum(self.deferred, partial(add_to_gradients, unit))
        scatter = CountedReduceScatter(comm, mesh.label(axis), summed, shards, deferred)
        products = [_product_of(piece.module, piece.name) for piece in pieces]
        unit.set_custom_all_gather(self._gather(axis, gathered, products))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        if mesh.size(copies) > 1:
            compressor = self._compressor(copies, summed, None)
            if compressor is None:
                unit.set_all_reduce_hook(_count_all_reduce(comm, scatter, mesh.label(copies)))
            else:
                self.replica_sums.append(CompressedReplicaSum(comm, compressor, summed))
                unit.set_all_reduce_hook(self.replica_sums[-1])

    def _gather(
        self, axis: str, pieces: Mapping[str, torch.Size], products: Sequence[ScaledProduct | None]
    ) -> CountedAllGather:
        comm, label = self.comm, self.comm.mesh.label(axis)
        encoded: EncodedGather | Float8Gather | None = None
        secondary = None
        if self.engine.zero and comm.mesh.size(axis) > 1 and any(products):
            encoded = Float8Gather(comm, label, list(pieces.values()), products)
        if self.gathers is not None and self.engine.zero and comm.mesh.size(axis) > 1:
            codec, shards = self.gathers.how.codec, self.gathers.how.backward_shards
            if codec is not None and not self.gathers.names.isdisjoint(pieces):
                encoded = EncodedGather(comm, label, codec, self.gathers.names, pieces)
            if shards is not None:
                secondary = SecondaryShard(comm, within(label, shards), comm.mesh.neighbours(axis, shards))
        return CountedAllGather(comm, label, encoded, secondary)

    def _defers_sums(self, axis: str) -> bool:
        """Return whether sums over this axis run in the background. With copies they cannot: FSDP2 sums over
        copies right after it has summed over shards."""
        return self.comm.device.type == "cpu" and self.comm.mesh.size(self.engine.copies(axis)) == 1

    def _name(self, module: nn.Module, name: str) -> str:
        return ".".join(part for part in (self.paths[module], name) if part)

    def _compresses(self, axis: str) -> bool:
        if self.settings is None or self.comm.mesh.size(axis) == 1:
            return False
        return self.settings.how.compresses(axis)

    def _compressor(
        self, axis: str, pieces: Mapping[str, torch.Size], rows: int | None
    ) -> CompressedAxisSum | None:
        """Return the compressor of sums over this axis, with these parameters registered; None where the sums
        are not compressed."""
        if not self._compresses(axis):
            return None
        assert self.settings is not None, "it compresses"
        if axis not in self.compressors:
            in_thread = rows is not None and self._defers_sums(axis)
            self.compressors[axis] = CompressedAxisSum(self.comm, axis, self.settings, in_thread)
        compressor = self.compressors[axis]
        for name, shape in pieces.items():
            compressor.register(name, shape if rows is None else (rows, *shape))
        return compressor


def _product_of(module: nn.Module, name: str) -> ScaledProduct | None:
    """Return the float8 product that computes with this weight of a module, if no other code uses the weight;
    else None. Such a weight may be gathered in 8 bits."""
    float8 = getattr(module, "float8", None)
    modules = float8.modules() if isinstance(float8, nn.Module) else ()
    products = (product for product in modules if isinstance(product, ScaledProduct))
    return next(
        (product for product in products if name in product.weights and product.has_weight_alone), None
    )


def _count_all_reduce(comm: Comm, scatter: CountedReduceScatter, axis: str) -> Callable[[Tensor], None]:
    """Return a hook that counts FSDP2's sum over copies. FSDP2 calls it right after that sum, which on a CPU
    began when the reduce-scatter ended."""

    def after(gradients: Tensor) -> None:
        begun = comm.begin("all_reduce", axis, gradients)
        if comm.device.type == "cpu" and scatter.ended:
            begun.start = scatter.ended
            begun.end()
            comm.clock.add(EXPOSED, scatter.ended, time.perf_counter())

    return after
