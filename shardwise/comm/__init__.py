"""Collectives that count their bytes, and what ranks say to each other beside training."""

from shardwise.comm.comm import EXPOSED, Comm, Exchange
from shardwise.comm.hooks import CountedAllGather, CountedReduceScatter, GradientSum
from shardwise.comm.peers import Peers

__all__ = ["EXPOSED", "Comm", "CountedAllGather", "CountedReduceScatter", "Exchange", "GradientSum", "Peers"]
