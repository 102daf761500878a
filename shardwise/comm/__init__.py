"""Collectives that count their bytes."""

from shardwise.comm.comm import EXPOSED, Comm, Exchange
from shardwise.comm.hooks import CountedAllGather, CountedReduceScatter, GradientSum

__all__ = ["EXPOSED", "Comm", "CountedAllGather", "CountedReduceScatter", "Exchange", "GradientSum"]
