"""Collectives that count their bytes."""

from shardwise.comm.traffic import EXPOSED, CountedAllGather, CountedReduceScatter, GradientSum, Traffic

__all__ = ["EXPOSED", "CountedAllGather", "CountedReduceScatter", "GradientSum", "Traffic"]
