"""`shardwise train` with workers in which a drill can raise exceptions.

    python -m shardwise.proof.drilled_train train JOB …

This is the command itself. The only difference is one more module that the fork server imports
(proof/drilled_worker.py). A drill starts its runs in this way if the fault `error` is among its faults.
"""

from __future__ import annotations

import runpy

from shardwise.resilience.fork_server import also_preload

PRELOAD = "shardwise.proof.drilled_worker"
"""Module that lets workers raise an exception when the drill sends them a signal."""


def main() -> None:
    """Run the command of this process's arguments."""
    also_preload(PRELOAD)
    runpy.run_module("shardwise", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
