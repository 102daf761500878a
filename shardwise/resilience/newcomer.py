"""What a host says of itself when it calls the leader, before its first report, and why the leader may refuse
it.

Hosts of one run must run the same software on the same job and the same data. The leader compares before a
newcomer can be put into a team: a team with a wrong host in it would fail on every host. A refused host ends
with the reason, and the run goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter

from shardwise.plurals import counted

MOST_DIFFERENCES = 10
"""Settings that a refusal lists; it counts the rest."""
_SAME_VERSION = "install the same version on every host"
_FOLLOWS_FROM = {
    "server.portions": " (where the job does not set it, it follows from --max-workers or --workers)"
}


@dataclass(frozen=True)
class Newcomer:
    """One host of a run: its software, its job and its data."""

    host: str
    version: str
    """The version of shardwise."""
    torch: str = ""
    workers: NonNegativeInt = 0
    job: dict[str, str] = field(default_factory=dict)
    """Each setting of the job, as text, by its name."""
    data: str = ""
    """What the prepared data hold, with a checksum."""

    def to_json(self) -> dict[str, Any]:
        """As sent to the leader. The key tells it from a report, which is the first word of hosts before
        version 0.1.0."""
        return {"newcomer": asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> Newcomer:
        """As received; a ValueError where it is something else."""
        said = value.get("newcomer") if isinstance(value, dict) else None
        return _NEWCOMER.validate_json(json.dumps(said), strict=True)


_NEWCOMER = TypeAdapter(Newcomer)


def refusal(run: Newcomer, newcomer: Newcomer) -> str | None:
    """Why a host cannot take part in the run that the host `run` leads; None if it can. The number of workers
    may differ.

    Another release of torch is refused too: its processes need not understand each other, and sums may differ
    in their last bits. A build for another device (`+cpu`, `+cu128`) is let in.
    """
    host = newcomer.host
    if newcomer.version != run.version:
        return different_version(host, newcomer.version, run.version)
    if newcomer.torch.partition("+")[0] != run.torch.partition("+")[0]:
        return f"host {host} has torch {newcomer.torch}, and the run has torch {run.torch}: {_SAME_VERSION}"
    if differences := _differences(run.job, newcomer.job, host):
        return (
            f"host {host} was started with another job than the run: {differences}. "
            "Give every host the same job file and overrides; --workers may differ"
        )
    if newcomer.data != run.data:
        return (
            f"host {host} has other data than the run: {newcomer.data} there, {run.data} in the run. "
            f"Give every host the same files at {run.job.get('data.source', 'data.sources')}"
        )
    return None


def different_version(host: str, its_version: str, version_of_run: str) -> str:
    """Why a host with another shardwise is refused."""
    return (
        f"host {host} has shardwise {its_version}, and the run has shardwise {version_of_run}: "
        f"{_SAME_VERSION}"
    )


def _differences(run: dict[str, str], newcomer: dict[str, str], host: str) -> str:
    names = sorted(name for name in run.keys() | newcomer.keys() if run.get(name) != newcomer.get(name))
    listed = [
        f"{name} is {newcomer.get(name, 'not set')} on {host} and {run.get(name, 'not set')} in the run"
        f"{_FOLLOWS_FROM.get(name, '')}"
        for name in names[:MOST_DIFFERENCES]
    ]
    more = (
        [f"{counted(len(names) - MOST_DIFFERENCES, 'setting')} more"] if len(names) > MOST_DIFFERENCES else []
    )
    return "; ".join([*listed, *more])
