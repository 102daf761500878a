"""Collectives that count their bytes, and what ranks say to each other beside training."""

from shardwise.comm.comm import EXPOSED, Comm, Exchange
from shardwise.comm.deferred_sums import SumsBehind, UnitBehind
from shardwise.comm.gradient_compression import CompressionSettings, Compressor, Momentum
from shardwise.comm.hooks import CompressedCopies, CountedAllGather, CountedReduceScatter, GradientSum
from shardwise.comm.peers import Peers
from shardwise.comm.weight_gathers import EncodedGather, Float8Gather, GatherSettings, NearbyCopy

__all__ = [
    "EXPOSED",
    "Comm",
    "CompressedCopies",
    "CompressionSettings",
    "Compressor",
    "CountedAllGather",
    "CountedReduceScatter",
    "EncodedGather",
    "Exchange",
    "Float8Gather",
    "GatherSettings",
    "GradientSum",
    "Momentum",
    "NearbyCopy",
    "Peers",
    "SumsBehind",
    "UnitBehind",
]
