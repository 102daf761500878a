"""The folder of a job's checkpoints, and the checkpoint that it starts from."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint import Resume
from shardwise.config import Config


def checkpoint_folder(config: Config) -> str:
    """Return the folder of a job's checkpoints."""
    return config.checkpoint.folder or str(Path(config.run.folder) / "checkpoints")


def resume_of(config: Config) -> Resume:
    """Return which checkpoint the job starts from."""
    return Resume(checkpoint_folder(config), config.checkpoint.resume, config.model)
