"""The axes of the device mesh, and the groups of them that several rooms ask for.

Ranks are laid out with `pipeline` outermost and `tensor` innermost, so that the devices that talk most are
neighbours. `expert` adds no devices: it borrows them from the axes inside it (config/layout_rules.py).
"""

from __future__ import annotations

RANK_AXES = ("pipeline", "replica", "data", "context", "tensor")
"""Axes whose degrees multiply to the number of devices, outermost first."""
AXES = (*RANK_AXES, "expert")
"""Every axis that a layout can name."""
MODEL_AXES = ("pipeline", "context", "tensor", "expert")
"""Axes along which the devices work on one copy of the model. `replica` and `data` copy it, or its work."""
TOKEN_AXES = ("replica", "data", "context", "tensor")
"""Axes along which the devices of one stage route different tokens to the experts."""
