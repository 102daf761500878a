"""Atomic save and load. Importing this package needs no torch: `checkpoint.contents` and `checkpoint.save`
do."""

from shardwise.checkpoint.folder import (
    Manifest,
    Resume,
    checkpoints,
    hold,
    read_manifest,
    set_aside,
    step_of,
    to_resume,
)

__all__ = [
    "Manifest",
    "Resume",
    "checkpoints",
    "hold",
    "read_manifest",
    "set_aside",
    "step_of",
    "to_resume",
]
