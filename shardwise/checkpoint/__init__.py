"""Save and load checkpoints atomically. Importing this package needs no torch; its modules `tensor_files` and
`save` do."""

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
