"""Atomic save and load. Importing this package needs no torch: `checkpoint.save` does."""

from shardwise.checkpoint.folder import Manifest, checkpoints, read_manifest, set_aside, to_resume

__all__ = ["Manifest", "checkpoints", "read_manifest", "set_aside", "to_resume"]
