"""The axes of the device mesh, and groups of axes that several packages use.

Ranks are laid out with `pipeline` outermost and `tensor` innermost, so that devices that communicate much are
neighbours. `expert` adds no devices: it borrows them from the axes inside it (config/layout_rules.py).
"""

from __future__ import annotations

RANK_AXES = ("pipeline", "replica", "data", "context", "tensor")
"""Axes whose degrees multiply to the number of devices, outermost first."""
AXES = (*RANK_AXES, "expert")
"""Every axis that a layout can name."""
MODEL_AXES = ("pipeline", "context", "tensor", "expert")
"""Axes along which devices share one copy of the model; along the others they read different data."""
SEQUENCE_AXES = ("context", "tensor")
"""Axes whose devices share the tokens of one sequence."""
LOSS_AXES = ("context", "pipeline")
"""Axes whose devices read the same rows and each have a part of their loss, or none."""
TOKEN_AXES = ("replica", "data", *SEQUENCE_AXES)
"""Axes along which the devices of one stage route different tokens to the experts."""
