"""A cluster as the planner sees it: the speed of its devices, of their memory and of the links between them.

Devices sit in nodes. Inside a node, devices communicate over the node's links (NVLink, shared memory);
between nodes, each device has its own share of the network. All figures come from a data sheet or from
`shardwise probe`. Here they are in FLOP/s, bytes/s and seconds; a cluster file (cost/cluster_file.py) has
TFLOP/s, GB/s and microseconds.

A product of matrices (M x K) by (K x N) takes

    2 M N K / (peak x matmul) x (1 + knee (1/M + 1/N + 1/K))

`matmul` is the share of the peak that large products reach in a running training step (power limits
included). `knee` is the length at which a short side costs as much as the work itself. Flash attention has a
share and a knee of its own, over the sequence length.

`cost/collectives.py` has the cost of collectives. If a link was measured, `measured` holds a latency and a
bandwidth for each kind of collective and each number of devices (inside) or nodes (between). They are used
in place of the link's own figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from shardwise.units import GIB

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Device:
    """One device: a GPU, or a CPU worker."""

    name: str
    memory: float
    """Bytes that a training process may use."""
    peak: Mapping[str, float]
    """Dense FLOP/s by precision: float32, bfloat16, float16, float8; float64 where it was measured."""
    bandwidth: float
    """Bytes/s of device memory, by the data sheet."""
    matmul: float = 0.75
    matmul_float8: float = 0.65
    """Share of the peak for products of 8 or 4 bits, which power limits more."""
    matmul_knee: float = 64.0
    attention: float = 0.5
    """Share of the peak that the forward pass of attention reaches on long sequences; backward reaches
    less."""
    attention_portable: float = 0.5
    """Share of the peak for kernels that were not written for this device (FlashAttention-2 on a Hopper)."""
    attention_knee: float = 400.0
    stream: float = 0.85
    """Share of the memory's bandwidth that elementwise kernels reach."""
    launch: float = 5e-6
    """Seconds the host needs to start one kernel."""
    overhead: float = 1.5 * GIB
    """Bytes that each worker's runtime, libraries and communication buffers take, whatever is trained."""
    host_bandwidth: float = 50e9
    """Bytes/s of its link to the host's memory."""
    overlap: float = 1.0
    """Share of the communication that can run beside computing: 1 on a GPU, 0 where the same cores do both.
    Cores that wait for a network between nodes can compute in any case (cost/price.py)."""
    watts: float | None = None
    """Rated power of the device."""

    def matmul_share(self, precision: str) -> float:
        """Return the share of the peak in this precision that matrix products reach."""
        return self.matmul_float8 if precision in ("float8", "float4") else self.matmul


@dataclass(frozen=True)
class Measured:
    """The measured speed of a kind of collective on a number of devices of a node, or of nodes."""

    kind: str
    members: int
    latency: float
    bandwidth: float
    """Bus bandwidth of one device in bytes/s: the formula of a ring gives the measured time with it."""


@dataclass(frozen=True)
class Link:
    """The link of one device, which sends and receives at the same time."""

    bandwidth: float
    latency: float
    """Seconds that one hop takes."""
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, and the links between them."""

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    inside: Link
    between: Link
    shared: bool = False
    """Whether the device's figures are those of a whole node, whose workers share them, as CPU workers share
    cores and memory."""
    host_memory: float = 1024 * GIB
    """Bytes of a node's own memory, which its devices share if states are offloaded. The default is that of a
    usual server."""
    host_memory_bandwidth: float = 300e9
    """Bytes/s that this memory moves, for all devices of the node together."""
    price: float | None = None
    """Price of one device for an hour, in any currency."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Factors on predicted terms, which `shardwise report --calibrate` learns from runs."""

    @property
    def devices(self) -> int:
        """Total number of devices in the cluster."""
        return self.devices_per_node * self.nodes

    @property
    def device_type(self) -> str:
        """Type of the device in torch: "cuda" or "cpu"."""
        return "cpu" if self.shared else "cuda"

    def with_devices(self, devices: int) -> Cluster:
        """Return this cluster with another number of devices: whole nodes, or a part of one."""
        per_node = min(self.devices_per_node, devices)
        return replace(self, nodes=-(-devices // per_node), devices_per_node=per_node)
