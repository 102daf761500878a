"""Facts about a training program on which time and memory depend.

The planner predicts shardwise. To compare it with published measurements of other programs, it must know what
those do differently: whether kernels are fused, whether gradients have 2 or 4 bytes, what overlaps with what.
Each program has one `Software`, read from its source or documentation. No figure in it depends on a model, a
measurement or a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """Facts about a training program that decide its time and memory."""

    name: str
    elementwise: float = 1.0
    """Traffic of the memory-bound kernels of a block, relative to a compiled block, in which norms,
    activation, rotary embeddings and residuals are fused."""
    kernels: float = 30.0
    """Kernels started for the forward pass of a block; backward starts twice as many."""
    starts: float = 1.0
    """Host time of one of these kernels, in launches: autograd and the guards of compiled code take time
    too."""
    kernel_gap: float = 0.0
    """Seconds that a GPU rests between two kernels; 0 if the other figures contain it."""
    expert_kernels: float = 150.0
    """Kernels that experts add to a block: routing, sorting, and waiting for the counts."""
    collective_kernels: float = 3.0
    """Host time to start a collective, in kernels."""
    pipeline_jitter: float = 0.0
    """Seconds by which each member of a tensor group delays its collectives, if the messages of a pipeline
    keep hosts from running ahead."""
    micro_batch_kernels: float = 100.0
    """Kernels started for a micro-batch outside of the blocks."""
    step_kernels: float = 0.0
    """Kernels that the optimizer starts per block."""
    flash: bool = True
    """Whether attention keeps no matrix of scores in memory."""
    native_attention: bool = True
    """Whether the kernels of attention were written for the device."""
    sequence_parallel: bool = True
    """Whether tensor devices also share the tokens outside of the matrices."""
    gradient_bytes: float = 4.0
    """Bytes of one element of a gradient between micro-batches."""
    reduce_bytes: float = 4.0
    """Bytes of one element of a gradient that is sent."""
    weight_bytes: float = 2.0
    """Bytes of one element of a weight in computation and in gathers."""
    logit_bytes: float = 10.0
    """Bytes that exist at once for each logit; 0 if the loss is computed in chunks."""
    activation: float = 1.0
    """Bytes of activations kept, relative to the count in cost/footprint.py."""
    overlap_data: float = 1.0
    """Share of gathers and gradient sums that may hide behind computing."""
    overlap_tensor: float = 0.0
    """Share of the tensor axis' collectives that may hide behind the products beside them."""
    overlap_expert: float = 0.0
    """Share of the experts' exchanges that may hide behind computing for another micro-batch."""
    once_to_node: bool = False
    """Whether a token goes once to each node that has experts for it, and is copied there (DeepEP)."""
    once_to_device: bool = False
    """Whether a token goes once to each device that has experts for it, with the weights of its choices, and
    the weighted sum of their outputs comes back. If neither holds, it goes once to each expert."""
    gathers_after: int = 0
    """Number of gathers per block, one for each weight, after the optimizer's step under zero 1 and 2. 0: the
    weights of a block are gathered together, behind the next forward."""
    reduce_each: bool = False
    """Whether gradients are reduced in every micro-batch under zero 1 too."""
    buckets: bool = False
    """Whether unsharded gradients are summed in the buckets of torch's DistributedDataParallel; otherwise
    block by block."""
    whole_experts: bool = False
    """Whether shards of experts are whole experts, padded until they divide (FSDP2); otherwise equal parts of
    all experts."""
    wide_routers: bool = False
    """Whether routers of experts are used in the dtype of sums and gathered separately; otherwise like the
    rest of their block."""
    fragmentation: float = 1.0
    """Memory reserved over memory allocated."""
    overlap_sends: float = 1.0
    """Share of the messages between pipeline stages that the program does not wait for."""
    gathers_again: bool = True
    """Whether backward gathers the inputs of a block's products over the tensor axis again, instead of
    keeping them."""
    selective_repeats: float = 0.0
    """Share of forward's tensor collectives that selective recomputation repeats."""
    selective_matmul: float = 0.0
    """Share of the products that selective recomputation repeats."""
    selective_attention: float = 0.0
    """Share of attention that selective recomputation repeats."""
    selective_kept: float = 1.0
    """Share of the products' outputs that selective recomputation keeps."""
    inputs_kept: float = 0.0
    """Number of a block's two gathered inputs that are kept for backward instead of gathered again."""
    whole_inputs: float = 2.0
    """Number of gathered inputs of a block that exist at once."""
    recompute_all: bool = False
    """Whether full recomputation repeats a block's last product too, although backward does not need its
    output."""
    loss_traffic: float = 14.0
    """Bytes moved for each logit."""
    cast_bytes: float = 6.0
    """Bytes moved in each micro-batch to cast an element of a weight that is not gathered."""
    cast_held: float = 2.0
    """Bytes of that copy which backward still needs."""
    balanced: bool = True
    """Whether pipeline stages are cut by cost, including that of the head; otherwise into equal numbers of
    blocks."""
    one_copy: bool = True
    """Whether an unsharded weight is stored once, in the dtype of states; otherwise also in that of
    computation."""
    keeps_gradients: bool = False
    """Whether whole gradients stay allocated under zero = 1 for any number of micro-batches."""
    shard_inputs: bool = False
    """Whether recomputed blocks keep their input split over the tensor axis."""


SHARDWISE = Software(
    "shardwise",
    kernels=80.0,
    starts=2.2,
    kernel_gap=1.5e-6,
    micro_batch_kernels=500.0,
    step_kernels=35.0,
    logit_bytes=0.0,
    gathers_again=False,
    selective_repeats=1.0,
    buckets=True,
    whole_experts=True,
    wide_routers=True,
    once_to_device=True,
)
"""The number of kernels is from a profile of one step (benchmarks/planner_gpu.py): 240 for both passes of a
block. Starts and gaps are fitted to steps of gpt2, whose time the host decides, and of qwen3-0.6b and 4b,
which take 1.5 to 2.5 us more per kernel than the kernels themselves."""
