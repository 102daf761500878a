"""The first thing that the server imports: from then on it collects no garbage, and whoever is forked from it does.

Importing torch makes hundreds of thousands of objects and hardly any garbage, and looking for it took a sixth of the server's
time. In a worker what was imported counts as permanent: its collections look at what the worker made, and leave the pages that
all workers share untouched.
"""

from __future__ import annotations

import gc
import os


def _collect_in_worker() -> None:
    gc.freeze()
    gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_collect_in_worker)
