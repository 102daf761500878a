"""Predict each measured run, on its cluster and with the properties of its program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from planner_cases import Case
from planner_cells import MEGATRON_LIKE, NotModelled
from planner_programs import PROGRAMS
from planner_published import published_flops

from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import CLUSTERS
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.software import Software
from shardwise.cost.space import RECOMPUTE, Workload, space_of
from shardwise.plans.flops import flops_per_token

MARGIN = 0.05
"""Share of a device's memory that a layout must leave free to be said to fit."""
_STATES = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Judged:
    """A case and what the planner says of it."""

    case: Case
    seconds: float
    peak: float
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    fits: bool

    @property
    def error(self) -> float:
        """Signed error of the step time: above 0 where the planner is too slow."""
        assert self.case.seconds is not None
        return self.seconds / self.case.seconds - 1

    @property
    def flops(self) -> float:
        """FLOPs of a step on one device, by our own count."""
        work = self.case.work
        return flops_per_token(work.model, work.sequence_length) * work.tokens / self.case.devices

    @property
    def flops_of_whole_attention(self) -> float:
        """The same with attention counted whole, as several sources do."""
        work = self.case.work
        return published_flops(work.model, work.sequence_length, "full") * work.tokens / self.case.devices

    @property
    def measurable(self) -> float:
        """Bytes of what the case measured: paper knows states and activations, torch's counters nothing of
        the runtime, and `allocated` nothing of what lies free between tensors."""
        kind = self.case.memory_kind
        if kind == "theory":
            return sum(self.memory.get(name, 0.0) for name in (*_STATES, "activations"))
        if kind == "device":
            return self.peak
        loose = stack_of(self.case).fragmentation if kind == "allocated" else 1.0
        return sum(
            value / (1.0 if name in _STATES else loose)
            for name, value in self.memory.items()
            if name != "overhead"
        )


def stack_of(case: Case) -> Software:
    """The program's facts, with the options the run was started with."""
    stack = PROGRAMS[case.stack]
    if "no_sequence_parallel" in case.traits:
        stack = replace(stack, sequence_parallel=False)
    if (
        "uneven_stages" in case.traits
    ):  # then a program counts the embedding and the head as layers, or lets the user cut
        stack = replace(stack, balanced=True)
    if "async_tensor" in case.traits:
        stack = replace(stack, overlap_tensor=0.8)
    if "overlaps_tensor" in case.traits:
        stack = replace(stack, overlap_tensor=0.9)
    if "native_attention" in case.traits:
        stack = replace(stack, native_attention=True)
    if "keeps_attention" in case.traits:
        stack = replace(stack, selective_attention=0.0)
    if "recomputes_mlp" in case.traits:  # the larger part of a block's products
        stack = replace(stack, selective_matmul=2 / 3)
    if (
        case.stack in MEGATRON_LIKE and case.layout["zero"] == 3
    ):  # Megatron-FSDP sums gradients in the dtype of weights
        stack = replace(stack, reduce_bytes=2.0)
    if case.stack == "nemo":
        stack = _recipes(stack, case)
    if case.stack == "torchtitan" and "eager" in case.traits:
        stack = replace(stack, elementwise=2.0, kernels=60)
    if "fused_loss" in case.traits:  # chunk by chunk, so that logits are never whole
        stack = replace(stack, logit_bytes=0.0)
    if case.work.reduce_dtype == "bfloat16":
        stack = replace(stack, reduce_bytes=2.0)
    return stack


def _recipes(stack: Software, case: Case) -> Software:
    """What NVIDIA's recipes do on which device since which release, as far as one is named."""
    if case.device.startswith("gb"):  # CUDA graphs are replayed around the experts
        stack = replace(stack, expert_kernels=150)
    if case.release and case.release < (25, 9) and "b" in case.device:  # no buffers for it on Blackwell yet
        stack = replace(stack, overlap_tensor=0.0)
    if case.release and case.release >= (26, 6):  # exchanges beside another micro-batch's computing
        stack = replace(stack, overlap_expert=0.9)
    return stack


def cluster_of(case: Case) -> Cluster:
    """The preset of the row's device, with the row's own nodes and network where it names them."""
    name = case.device.removesuffix("-pcie")
    same = {"a800-80": "a100-80", "h800": "h100"}.get(name, name)
    if same not in CLUSTERS:
        raise NotModelled(f"no preset for device {case.device}")
    cluster = CLUSTERS[same]
    if same != name:  # the same chip with NVLink at 200 GB/s a direction
        cluster = replace(cluster, inside=replace(cluster.inside, bandwidth=0.8 * 200e9))
    if name != case.device:
        cluster = replace(cluster, inside=replace(cluster.inside, bandwidth=20e9))
    if case.work.precision not in cluster.device.peak:
        raise NotModelled(f"device {case.device} does not compute in {case.work.precision}")
    if case.devices_per_node:
        cluster = replace(cluster, devices_per_node=case.devices_per_node)
    if case.network:
        cluster = replace(cluster, between=replace(cluster.between, bandwidth=0.9 * case.network))
    per_node = max(size for size in range(1, cluster.devices_per_node + 1) if case.devices % size == 0)
    return replace(cluster, devices_per_node=per_node, nodes=case.devices // per_node)


def judge(cases: Sequence[Case]) -> tuple[list[Judged], Counter[str]]:
    """All cases, predicted in batches that share program, cluster and model; and why some have no
    prediction."""
    batches: dict[tuple[Software, str, Workload], list[Case]] = defaultdict(list)
    clusters: dict[str, Cluster] = {}
    found, reasons = list[Judged](), Counter[str]()
    for case in cases:
        try:
            cluster = cluster_of(case)
        except NotModelled as reason:
            reasons[str(reason)] += 1
            continue
        clusters[repr(cluster)] = cluster
        batches[stack_of(case), repr(cluster), case.work].append(case)
    for (stack, key, work), batch in batches.items():
        try:
            said = _judge_batch(batch, work, clusters[key], stack)
            sound = [one for one in said if isfinite(one.seconds) and isfinite(one.peak)]
            found += sound
            if len(sound) < len(said):
                reasons["the planner failed: figures beyond floating point"] += len(said) - len(sound)
        except (ValueError, ArithmeticError, LookupError, AssertionError) as error:
            reasons[f"the planner failed: {type(error).__name__} {error}"] += len(batch)
    order = {id(case): place for place, case in enumerate(cases)}
    return sorted(found, key=lambda one: order[id(one.case)]), reasons


def _judge_batch(batch: Sequence[Case], work: Workload, cluster: Cluster, stack: Software) -> list[Judged]:
    """Where only a share of the layers is recomputed, the answer lies so far between that for all and that
    for none."""
    whole = predict(work, space_of([dict(case.layout) for case in batch]), cluster, stack)
    none = whole
    if any(case.recompute_share < 1 for case in batch):
        none = predict(
            work,
            space_of([{**case.layout, "recompute": RECOMPUTE.index("none")} for case in batch]),
            cluster,
            stack,
        )
    return [_judged(case, place, whole, none, cluster) for place, case in enumerate(batch)]


def _judged(case: Case, place: int, whole: Prediction, none: Prediction, cluster: Cluster) -> Judged:
    def mixed(parts: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, float]:
        share = case.recompute_share
        return {name: float(share * parts[name][place] + (1 - share) * others[name][place]) for name in parts}

    terms, memory = mixed(whole.seconds, none.seconds), mixed(whole.memory, none.memory)
    peak = sum(memory.values())
    return Judged(
        case, sum(terms.values()), peak, terms, memory, peak <= (1 - MARGIN) * cluster.device.memory
    )
