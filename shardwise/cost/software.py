"""How a training program does its work, as far as time and memory depend on it.

The planner predicts shardwise; held against other people's measurements it must know what their programs do
differently: kernels fused or not, gradients held in 2 or 4 bytes, what overlaps with what. These are facts
about software, read from its source or documentation; there is one Software for a program, and no figure in
it depends on a model, a row or a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """Facts about a training program that decide its time and memory."""

    name: str
    elementwise: float = 1.0
    """Traffic of the memory-bound kernels of a block, relative to a compiled block (norms, activation,
    rotary, residuals fused)."""
    kernels: float = 30.0
    """Kernels started for the forward pass of a block; backward starts twice as many."""
    starts: float = 1.0
    """Host time of one of them, in launches: autograd and the compiler's guards run beside the launch
    itself."""
    kernel_gap: float = 0.0
    """Seconds that a GPU rests between two kernels; where it is 0, the other figures have it in them."""
    expert_kernels: float = 150.0
    """Kernels that experts add to a block: routing, sorting, and waiting for the counts."""
    collective_kernels: float = 3.0
    """Time to start a collective, in kernels."""
    pipeline_jitter: float = 0.0
    """Seconds by which each member of a tensor group delays its collectives, where a pipeline's messages keep
    hosts from running ahead."""
    micro_batch_kernels: float = 100.0
    """Kernels started for a micro-batch outside of the blocks."""
    step_kernels: float = 0.0
    """Kernels that the optimizer starts per block."""
    flash: bool = True
    """Attention without a matrix of scores in memory."""
    native_attention: bool = True
    """Attention by kernels written for the device."""
    sequence_parallel: bool = True
    """Tensor devices also share the tokens outside of the matrices."""
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
    """A token goes to each node that has experts for it once, and is copied there (DeepEP); else once to each
    expert."""
    gathers_after: int = 0
    """Weights of a block gathered one by one after the optimizer's step under zero 1 and 2; 0: together,
    behind the next forward."""
    reduce_each: bool = False
    """Gradients are reduced in every micro-batch under zero 1 and 2 also."""
    buckets: bool = False
    """Unsharded gradients are summed in the buckets of torch's DistributedDataParallel; else block by
    block."""
    whole_experts: bool = False
    """Shards of experts are whole experts, padded until they divide (FSDP2); else equal parts of all."""
    wide_routers: bool = False
    """Routers of experts are computed with in the dtype of sums, and gathered by themselves; else as the rest
    of their block."""
    fragmentation: float = 1.0
    """Memory reserved over memory allocated."""
    overlap_sends: float = 1.0
    """Share of the messages between pipeline stages that the program does not wait for."""
    gathers_again: bool = True
    """Backward gathers the inputs of a block's products again over the tensor axis, instead of keeping
    them."""
    selective_repeats: float = 0.0
    """Share of forward's tensor collectives that selective recomputation repeats."""
    selective_matmul: float = 0.0
    """Share of the products that selective recomputation does again."""
    selective_attention: float = 0.0
    selective_kept: float = 1.0
    """Share of the products' outputs that selective recomputation keeps."""
    inputs_kept: float = 0.0
    """Number of a block's two gathered inputs that are kept for backward instead of gathered again."""
    whole_inputs: float = 2.0
    """Number of gathered inputs of a block that exist at once."""
    recompute_all: bool = False
    """Full recomputation also does a block's last product again, whose output backward does not need."""
    loss_traffic: float = 14.0
    """Bytes moved for each logit."""
    cast_bytes: float = 6.0
    """Bytes moved for each weight and micro-batch to have it in the computing dtype, where it is not
    gathered."""
    cast_held: float = 2.0
    """Bytes of those copies that backward still needs, where weights are not gathered."""
    balanced: bool = True
    """Pipeline stages are cut by cost, the last one having the head; else into equal numbers of blocks."""
    one_copy: bool = True
    """An unsharded weight is stored once, in the state's dtype; else also in the computing dtype."""
    keeps_gradients: bool = False
    """Whole gradients stay allocated under zero = 1 whatever the number of micro-batches."""
    shard_inputs: bool = False
    """Recomputed blocks keep their input cut over the tensor axis."""


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
)
"""Kernels as a profile of one step counts them (benchmarks/planner_gpu.py): 240 for a block, forward and
backward. Starts and gaps from steps of gpt2, which the host holds up, and of qwen3-0.6b and 4b, which take
1.5 to 2.5 us a kernel longer than their kernels."""
