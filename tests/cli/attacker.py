"""A stranger on the network of a run: sends what a curious, careless or hostile program might, drawn from a
seed.

Run on a host of its own as `python attacker.py SEED COUNT MEETING ADDRESS:PORT …`: to all ports at once COUNT
messages each, and 200 connections that say nothing. MEETING is the run's meeting.json: with its secret one
real conversation is held, whose lines are then sent again. Prints how many messages went out, and which
answers came.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardwise.resilience.channel import Credentials, answer
from shardwise.resilience.team import Report

HALF_OPEN = 200
FORGED = [
    {"run": "shardwise", "report": {"host": "evil", "address": "10.91.0.3", "slots": [0, 1], "done": 0}},
    {"run": "shardwise", "report": {"host": "evil", "slots": [0], "leaving": True}},
    {
        "host": "evil",
        "address": "10.91.0.3",
        "slots": [0],
        "generation": 1,
        "idle": True,
        "step": "x",
        "faults": [],
        "done": 0,
    },
    {"wish": "end", "team": None, "status": 0, "message": ""},
    {
        "host": "evil",
        "faults": [
            {"kind": "died", "rank": 0, "step": 3, "cause": "", "at": 0, "generation": 1, "status": 2}
        ],
    },
]


def overheard(meeting: dict[str, Any]) -> list[bytes]:
    """What a host of the run says to its leader: lines that were right once."""
    report = Report("overheard", "10.91.0.3", (), done=0, leaving=True)
    with socket.create_connection((meeting["address"], meeting["port"]), timeout=5) as connection:
        run = os.environ["RUN_NAME"]
        hello, channel = answer(
            Credentials(run, meeting["secret"].encode()), connection.makefile("rb").readline()
        )
        line = channel.line(report.to_json())
        connection.sendall(hello + line)
        assert b"refused" not in connection.recv(1 << 16)
    return [hello, line, hello + line]


def message(draw: random.Random, recorded: list[bytes]) -> bytes:
    """Garbage, a forged report in the clear or with a made-up code, what was heard before, or far too
    much."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 200))
    if kind == 1:
        return b"\0" * draw.randrange(1, 64) + b"\n"
    if kind == 2:
        return json.dumps(draw.choice(FORGED)).encode() + b"\n"
    if kind == 3:
        return (
            draw.randbytes(16).hex().encode() + b" " + draw.randbytes(32).hex().encode() + b"\n" + b"e30=\n"
        )
    if kind == 4:
        return b"".join(draw.choices(recorded, k=2))
    return draw.randbytes(1) * draw.choice([1 << 10, 1 << 16, 1 << 20])


def attack(address: str, port: int, count: int, draw: random.Random, recorded: list[bytes]) -> Counter[str]:
    """All of it at one port."""
    seen: Counter[str] = Counter()
    waiting = []
    for _ in range(HALF_OPEN):
        with contextlib.suppress(OSError):
            waiting.append(socket.create_connection((address, port), timeout=2))
    for _ in range(count):
        try:
            with socket.create_connection((address, port), timeout=2) as connection:
                connection.settimeout(0.02)
                connection.sendall(message(draw, recorded))
                with contextlib.suppress(TimeoutError):
                    seen["refused"] += b"refused" in connection.recv(1000) + connection.recv(1000)
                seen["sent"] += 1
        except OSError as error:
            seen[type(error).__name__] += 1
    for connection in waiting:
        connection.close()
    seen["half-open"] += len(waiting)
    return seen


if __name__ == "__main__":
    seed, count, meeting, *places = sys.argv[1:]
    lines = overheard(json.loads(Path(meeting).read_text()))

    def attack_place(place: str) -> Counter[str]:
        address, _, port = place.rpartition(":")
        return attack(address, int(port), int(count), random.Random(f"{seed} {place}"), lines)

    with ThreadPoolExecutor(len(places)) as pool:
        for place, seen in zip(places, pool.map(attack_place, places), strict=True):
            print(place, dict(seen), flush=True)
