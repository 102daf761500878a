"""Workers that only pretend to train: they keep their link to the host, count steps, and fail when they are
told to."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from shardwise.config import from_tables
from shardwise.errors import RunFailed
from shardwise.plans import Plan, choose
from shardwise.resilience.stopping import RESUME_ME
from shardwise.resilience.team import Team
from shardwise.resilience.worker_link import HostLink

STEPS = 12


def plan_for(devices: int) -> Plan:
    """A plan on so many devices; nobody trains by it."""
    return choose(from_tables({"data": {"source": "text.txt"}, "train": {"global_batch": 840}}), devices)


def work(folder: str, deeds: dict[str, int], slot: int, pipe: Connection) -> NoReturn:
    """Count to STEPS, telling of each. `deeds`: what happens to the worker in slot 1 at which step, once (a
    file remembers)."""
    link = HostLink(pipe, lambda: "a pretended sum", lambda worker: None)
    while (joined := link.next_team()) is not None:
        _, team = joined
        status = _count(Path(folder), deeds, slot, link, team)
        if status is not None:
            link.done(status)
            os._exit(status)
        link.peer_gone("it hung up")
    os._exit(0)


def _count(folder: Path, deeds: dict[str, int], slot: int, link: HostLink, team: Team) -> int | None:
    step = team.reached
    link.progress("build", 0)
    link.progress("step", step)
    while step < STEPS:
        if link.wish() == "stop" or (folder / "stop").exists():
            (folder / "stop").touch()
            if slot == 1 and "die while stopping" in deeds:
                os._exit(9)
            return RESUME_ME
        if link.wish() == "regroup":
            return None
        if slot == 1:
            _misbehave(folder, deeds, step + 1, link)
        elif (folder / f"gone-{step + 1}").exists():
            (folder / f"gone-{step + 1}").unlink()
            return None  # as one that lost its peer
        elif (folder / f"wait-{step + 1}").exists():
            (folder / f"wait-{step + 1}").unlink()
            time.sleep(600)  # as one that waits for its peer
        time.sleep(0.05)
        step += 1
        _meet(folder, slot, f"{team.generation}-{step}", len(team.members))
        link.progress("step", step)
        (folder / "log").open("a").write(f"{slot} {step}\n")
    return 0


def _meet(folder: Path, slot: int, where: str, world: int) -> None:
    """Wait for the others, as a collective does: forever, should one be gone."""
    (folder / f"at-{where}-{slot}").touch()
    while len(list(folder.glob(f"at-{where}-*"))) < world and not (folder / "stop").exists():
        time.sleep(0.005)


def _misbehave(folder: Path, deeds: dict[str, int], step: int, link: HostLink) -> None:
    for deed, when in deeds.items():
        if when != step or (deed != "always fail" and (folder / deed).exists()):
            continue
        (folder / deed).touch()
        if deed == "die":
            os._exit(9)
        if deed == "hang":
            time.sleep(600)
        if deed == "stop answering":
            os.kill(os.getpid(), 19)
        link.failed(RunFailed("a bad loss") if deed == "hopeless" else ValueError("bad row"))
        os._exit(1)
