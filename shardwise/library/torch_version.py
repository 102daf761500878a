"""Which releases of torch are supported, and whether one is installed.

Nothing here imports torch. Its version is read from the metadata of the installed package, so the answer
comes at once, even if torch is broken.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

TORCH_OLDEST, TORCH_BELOW, TORCH_TESTED = (2, 11), (2, 14), "2.13.0"


def torch_problem() -> str | None:
    """Return what is wrong with the installed torch, and the command that corrects it; None if it is
    supported."""
    installed = installed_version("torch")
    supported = f"{_dotted(TORCH_OLDEST)} up to, not including, {_dotted(TORCH_BELOW)}"
    if installed is None:
        return f"torch is not installed; shardwise needs {supported}. {_install_lines()}"
    version = re.match(r"(\d+)\.(\d+)", installed)
    if not version or not TORCH_OLDEST <= (int(version[1]), int(version[2])) < TORCH_BELOW:
        return f"torch {installed} is not supported; shardwise needs {supported}. {_install_lines()}"
    return None


def need_torch() -> None:
    """Raise an error unless a supported torch is installed."""
    from shardwise.errors import UserError

    if problem := torch_problem():
        raise UserError(problem)


def _install_lines() -> str:
    with_gpu = f"pip install torch=={TORCH_TESTED}"
    if not sys.platform.startswith("linux"):
        return f"Install it with: {with_gpu}"
    return f"Install it with: {with_gpu}  (for a smaller, CPU-only build see the install page of pytorch.org)"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
