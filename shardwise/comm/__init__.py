"""Collectives that count their bytes, and messages between ranks beside training."""

from shardwise.comm.comm import Comm, PeerExchange
from shardwise.comm.deferred_sums import DeferredSums, DeferredUnitSum
from shardwise.comm.gradient_compression import CompressedAxisSum, CompressionSettings, Momentum
from shardwise.comm.hooks import CompressedReplicaSum, CountedAllGather, CountedReduceScatter, GradientSum
from shardwise.comm.peers import Peers
from shardwise.comm.weight_gathers import EncodedGather, Float8Gather, GatherSettings, SecondaryShard

__all__ = [
    "Comm",
    "CompressedAxisSum",
    "CompressedReplicaSum",
    "CompressionSettings",
    "CountedAllGather",
    "CountedReduceScatter",
    "DeferredSums",
    "DeferredUnitSum",
    "EncodedGather",
    "Float8Gather",
    "GatherSettings",
    "GradientSum",
    "Momentum",
    "PeerExchange",
    "Peers",
    "SecondaryShard",
]
