"""Whether the blocks of a model go through torch.compile, and why not where they do not.

Compiled blocks keep other activations and move fewer bytes than blocks that run operator by operator. So the
runtime and the cost model both ask here, for a Layout (a bool) and for a Space of candidates (an array).
"""

from __future__ import annotations

from shardwise.config.schedules import Numbers, Pipeline, splits_backward


def reasons_not_to_compile(
    setting: bool | str, device: str, float8: bool, layout: Pipeline
) -> dict[str, Numbers]:
    """Every reason not to compile blocks, and whether it holds, by `train.compile`, the kind of device
    ("cuda", "cpu") and whether products are made in float8."""
    return {
        "train.compile = false": setting is False,
        "auto compiles on GPUs": setting == "auto" and device != "cuda",
        # Compiled code hands on what it has seen of a tensor as a gradient of a probe
        # (models/float8_products.py), and neither half of a backward asks for that gradient.
        "float8 in a schedule that splits backward": splits_backward(layout) & float8,
    }


def compiles_blocks(setting: bool | str, device: str, float8: bool, layout: Pipeline) -> Numbers:
    """Whether blocks go through torch.compile."""
    return sum(reasons_not_to_compile(setting, device, float8, layout).values()) == 0


def why_not_compiled(setting: bool | str, device: str, float8: bool, layout: Pipeline) -> str | None:
    """The first reason not to compile the blocks of one layout; None where they are compiled."""
    reasons = reasons_not_to_compile(setting, device, float8, layout)
    return next((why for why, holds in reasons.items() if holds), None)
