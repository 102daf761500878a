"""How many bytes of gradients DistributedDataParallel sums at once, on a link that is known.

Every sum costs a latency, whatever its size: buckets are so large that it is a small share of their time on
the wire. And the last bucket is full only when backward has ended, with nothing left to hide behind: so there
are several. Where the two conflict, because the link is far and the model small, the second goes first.
Without a link to go by, torch's own sizes hold.

A compressed sum waits for its peers twice and works in between, which costs more than the link's latency, and
has few bytes to set against it: there are as few buckets as will do.
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


def bucket_bytes(cluster: Cluster, devices: int, gradients: float, compressed: bool = False) -> int:
    """Of so many bytes of gradients, those in a bucket, where so many devices of the cluster sum them."""
    if compressed:
        return int(max(SMALLEST, gradients / LEAST_BUCKETS))
    inside = gcd(min(devices, cluster.devices_per_node), devices)
    latency, seconds_a_byte = rates(
        "all_reduce", Group(np.array([float(devices)]), np.array([float(inside)])), cluster
    )
    cheap = float(latency[0]) / (LATENCY_SHARE * float(seconds_a_byte[0]))
    return int(max(SMALLEST, min(cheap, gradients / LEAST_BUCKETS)))
