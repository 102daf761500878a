"""What this machine does: its devices and links measured, as the cluster that the planner reads. Needs no
torch to import."""

from shardwise.probe.local import local_workers, measure_here
from shardwise.probe.quick import quick_cluster

__all__ = ["local_workers", "measure_here", "quick_cluster"]
