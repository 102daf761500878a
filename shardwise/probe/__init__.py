"""Measure the devices and links of this machine, and return them as the cluster that the planner reads.

Importing this package does not import torch.
"""

from shardwise.probe.probe_workers import measure_this_machine, worker_count
from shardwise.probe.quick_probe import quick_cluster

__all__ = ["measure_this_machine", "quick_cluster", "worker_count"]
