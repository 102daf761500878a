"""Names of dtypes, as jobs, plans, cluster files and codecs write them, and their sizes.

The names are torch's where torch has one dtype of that size; `float8` and `float4` are formats of products.
Which number of a run has which dtype is decided in plan/dtypes.py.
"""

from __future__ import annotations

from typing import Literal

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes that weights, states and activations may have, and the bytes of one number."""
Precision = Literal["float32", "bfloat16", "float16", "float8", "float64"]
"""Precisions that a job may train in (`train.precision`)."""
PeakPrecision = Literal[Precision, "float4"]
"""Precisions in which a device has a peak (`device.peak` of a cluster file)."""
