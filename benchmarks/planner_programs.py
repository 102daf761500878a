"""Properties of other training programs on which the planner's model of a step depends.

Which kernels are fused, what overlaps, and how many bytes gradients have, is taken from the programs and
their documentation. The work of the host for a block (`kernels`) and the bytes that elementwise kernels move
(`elementwise`) are not published. These two numbers are the same for all models and layouts of a program, and
were chosen so that the predictions for its published runs are right on average.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.software import SHARDWISE, Software

MEGATRON = Software(
    "megatron",  # Megatron-LM of 2020 to 2022
    elementwise=1.4,
    kernels=35,
    flash=False,
    overlap_data=0.0,
    overlap_sends=0.0,
    selective_attention=1.0,
    balanced=False,
    one_copy=False,
    keeps_gradients=True,
    cast_bytes=0.0,  # it computes with stored weights of 2 bytes, which the optimizer writes
    cast_held=0.0,
)
MEGATRON_CORE = replace(
    MEGATRON,
    name="megatron-core",  # with Transformer Engine: fused kernels
    elementwise=1.3,
    expert_kernels=550,  # what micro-batches of one sequence show: 9 ms and more for a block with experts
    flash=True,
    overlap_data=1.0,
    overlap_sends=0.5,
    once_to_node=True,
    logit_bytes=4.0,  # its fused cross-entropy writes the gradient over the logits
)

PROGRAMS: dict[str, Software] = {
    "llm-foundry": Software(
        "llm-foundry",  # FSDP 1, eager, portable flash attention
        elementwise=1.8,
        kernels=55,
        native_attention=False,
        reduce_each=True,
        recompute_all=True,
        loss_traffic=30,
        logit_bytes=4.0,  # flash attention's cross-entropy, which writes the gradient over the logits
    ),
    "torchtitan": Software(
        # FSDP 2, compiled blocks, attention by torch's portable kernel, every second product kept
        "torchtitan",
        elementwise=1.3,
        kernels=30,
        native_attention=False,
        reduce_each=True,
        selective_matmul=0.5,
        selective_kept=0.5,
        recompute_all=True,
        balanced=False,
        logit_bytes=11.0,
        whole_inputs=4.0,
        fragmentation=1.09,
    ),
    "megatron": MEGATRON,
    "megatron-2023": replace(MEGATRON_CORE, name="megatron-2023"),
    "megatron-core": MEGATRON_CORE,
    # its recipes: collectives beside products (tp_comm_overlap), and grad_reduce_in_fp32 = False
    "nemo": replace(MEGATRON_CORE, name="nemo", overlap_tensor=0.9, gradient_bytes=2.0, reduce_bytes=2.0),
    "nanotron": Software(
        "nanotron",  # eager; weights gathered one by one after the update
        elementwise=3.2,
        kernels=180,
        collective_kernels=25,
        micro_batch_kernels=200,
        pipeline_jitter=4e-4,
        native_attention=False,
        overlap_data=0.0,
        overlap_sends=0.0,
        gathers_after=8,
        balanced=False,
        one_copy=False,
        keeps_gradients=True,
        activation=1.95,
        inputs_kept=0.25,
        cast_held=0.0,
    ),
    "vtrain": replace(
        MEGATRON,
        name="vtrain",  # small models, so that the host sets the pace
        elementwise=4.7,
        kernels=205,
        collective_kernels=8,
        micro_batch_kernels=350,
        step_kernels=70,
    ),
    "shardwise": SHARDWISE,
    "other": Software("other", elementwise=1.5, kernels=50, native_attention=False, recompute_all=True),
}
