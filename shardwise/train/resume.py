"""Where the checkpoints of a job are, and which of them it starts from."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint import Resume
from shardwise.config import Config


def checkpoint_folder(config: Config) -> str:
    """Return where the checkpoints of a job are."""
    return config.checkpoint.folder or str(Path(config.run.folder) / "checkpoints")


def resume_of(config: Config) -> Resume:
    """Return which checkpoint the job starts from."""
    return Resume(checkpoint_folder(config), config.checkpoint.resume, config.model)
