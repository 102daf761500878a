"""Codecs: how gradients and weights are written in fewer bytes, one file for each."""

from shardwise.codecs.base import Codec, MatrixCodec, RowCodec
from shardwise.codecs.registry import codecs, parse_codec, parse_row_codec, weight_codecs

__all__ = ["Codec", "MatrixCodec", "RowCodec", "codecs", "parse_codec", "parse_row_codec", "weight_codecs"]
