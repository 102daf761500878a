"""Whether the blocks of a model are compiled with torch.compile, and if not, why.

Compiled blocks keep other activations and move fewer bytes than blocks in eager mode. The runtime and the
cost model both use these functions, for a Layout (a bool) and for a Space of candidates (an array).
"""

from __future__ import annotations

from shardwise.config.schedules import Numbers, Pipeline, splits_backward


def reasons_not_to_compile(
    setting: bool | str, device: str, float8: bool, layout: Pipeline
) -> dict[str, Numbers]:
    """Return every reason not to compile blocks, and whether it holds.

    `setting` is `train.compile`, `device` is "cuda" or "cpu", and `float8` is whether products are in float8.
    """
    return {
        "train.compile = false": setting is False,
        "auto compiles on GPUs": setting == "auto" and device != "cuda",
        # Compiled code returns the maximum of a tensor as the gradient of a probe
        # (models/float8_products.py), which neither half of a split backward computes.
        "float8 in a schedule that splits backward": splits_backward(layout) & float8,
    }


def compiles_blocks(setting: bool | str, device: str, float8: bool, layout: Pipeline) -> Numbers:
    """Return whether blocks go through torch.compile."""
    return sum(reasons_not_to_compile(setting, device, float8, layout).values()) == 0


def why_not_compiled(setting: bool | str, device: str, float8: bool, layout: Pipeline) -> str | None:
    """Return the first reason not to compile the blocks of a layout; None if they are compiled."""
    reasons = reasons_not_to_compile(setting, device, float8, layout)
    return next((why for why, holds in reasons.items() if holds), None)
