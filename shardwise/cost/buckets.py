"""Bytes of gradients that DistributedDataParallel sums at once, for a link whose speed is known.

Every all-reduce costs a latency, so buckets are large enough that latency is a small share of their time. The
last bucket is full only when backward has ended, and then nothing hides its sum; so there are several
buckets. If the two goals conflict, because latency is high and the model small, the number of buckets
decides. Without a known link, torch's default sizes are used.

A compressed sum waits for its peers twice and sends few bytes, so it has as few buckets as possible.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, rates

LATENCY_SHARE = 0.05
"""Largest share of a bucket's time that its latency may take."""
LEAST_BUCKETS = 8
"""Smallest number of buckets of a model."""
SMALLEST = 2**20
"""Smallest size of a bucket in bytes."""


def bucket_bytes(cluster: Cluster, devices: int, gradients: float, compressed: bool = False) -> int:
    """Return the bytes of a bucket, if `gradients` bytes are summed over this many devices of the cluster."""
    if compressed:
        return int(max(SMALLEST, gradients / LEAST_BUCKETS))
    inside = gcd(min(devices, cluster.devices_per_node), devices)
    latency, seconds_a_byte = rates(
        "all_reduce", Group(np.array([float(devices)]), np.array([float(inside)])), cluster
    )
    cheap = float(latency[0]) / (LATENCY_SHARE * float(seconds_a_byte[0]))
    return int(max(SMALLEST, min(cheap, gradients / LEAST_BUCKETS)))
