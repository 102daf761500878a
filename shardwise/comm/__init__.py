"""Collectives that count their bytes."""

from shardwise.comm.comm import EXPOSED, Comm, CountedAllGather, CountedReduceScatter, GradientSum

__all__ = ["EXPOSED", "Comm", "CountedAllGather", "CountedReduceScatter", "GradientSum"]
