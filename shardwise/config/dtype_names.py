"""Names of dtypes, as jobs, plans, cluster files and codecs write them, and their sizes.

The names are torch's where torch has one dtype of that size; `float8` and `float4` are formats of products.
plans/dtypes.py decides which tensor of a run has which dtype.
"""

from __future__ import annotations

from typing import Literal

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of each dtype that weights, states and activations may have."""
Precision = Literal["float32", "bfloat16", "float16", "float8", "float64"]
"""Values that `train.precision` may have."""
PeakPrecision = Literal[Precision, "float4"]
"""Precisions for which a cluster file may give a peak speed (`device.peak`)."""
