"""Codecs: how gradients and weights are written in fewer bytes, one file for each."""

from shardwise.codecs.base import Codec, MatrixCodec, RowCodec
from shardwise.codecs.registry import parse_codec, parse_row_codec, weight_codecs

__all__ = ["Codec", "MatrixCodec", "RowCodec", "parse_codec", "parse_row_codec", "weight_codecs"]
