"""How many bytes of gradients DistributedDataParallel sums at once, on a link that is known.

Every sum costs a latency, whatever its size: buckets are so large that it is a small share of their time on the wire. And the
last bucket is full only when backward has ended, with nothing left to hide behind: so there are several. Where the two conflict,
because the link is far and the model small, the second goes first. Without a link to go by, torch's own sizes hold.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, rates

LATENCY_SHARE = 0.05
"""Of a bucket's time on the wire."""
LEAST_BUCKETS = 8
SMALLEST = 2**20


def bucket_bytes(cluster: Cluster, devices: int, gradients: float) -> int:
    """Of so many bytes of gradients, those in a bucket, where so many devices of the cluster sum them."""
    inside = gcd(min(devices, cluster.devices_per_node), devices)
    latency, seconds_a_byte = rates("all_reduce", Group(np.array([float(devices)]), np.array([float(inside)])), cluster)
    cheap = float(latency[0]) / (LATENCY_SHARE * float(seconds_a_byte[0]))
    return int(max(SMALLEST, min(cheap, gradients / LEAST_BUCKETS)))
