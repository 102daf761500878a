"""The description that a host sends to the leader before its first report, and the reasons to refuse a host.

The hosts of one run must use the same software, job and data. The leader compares them before a host can join
a team, because a team with a wrong host would fail on every host. A refused host ends with the reason, and
the run continues.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from pydantic import NonNegativeInt, TypeAdapter

from shardwise.files import Json
from shardwise.plurals import counted

MAX_DIFFERENCES = 10
"""Maximum number of settings that a refusal lists. The others are only counted."""
_SAME_VERSION = "install the same version on every host"
_FOLLOWS_FROM = {
    "server.portions": " (where the job does not set it, it follows from --max-workers or --workers)"
}


@dataclass(frozen=True)
class HostDescription:
    """The software, the job and the data of one host."""

    host: str
    version: str
    """Version of shardwise on the host."""
    torch: str = ""
    """Version of torch on the host."""
    workers: NonNegativeInt = 0
    """Number of workers on the host."""
    job: dict[str, str] = field(default_factory=dict)
    """Settings of the job as text, by name."""
    data: str = ""
    """Size of the prepared data, with a checksum."""

    def to_json(self) -> Json:
        """Return the message to the leader.

        The key distinguishes it from a report, which is the first message of hosts of older versions.
        """
        return {"newcomer": asdict(self)}

    @classmethod
    def from_json(cls, value: object) -> HostDescription:
        """Return the description in a received message. Raise a ValueError if the message has none."""
        description = value.get("newcomer") if isinstance(value, dict) else None
        return _DESCRIPTION.validate_json(json.dumps(description), strict=True)


_DESCRIPTION = TypeAdapter(HostDescription)


def refusal_reason(run: HostDescription, newcomer: HostDescription) -> str | None:
    """Return why a host cannot take part in the run that the host `run` leads; None if it can.

    The number of workers may differ. Another release of torch is refused, because its processes may not
    understand each other, and sums may differ in their last bits. A build for another device (`+cpu`,
    `+cu128`) is accepted.
    """
    host = newcomer.host
    if newcomer.version != run.version:
        versions = f"host {host} has shardwise {newcomer.version}, and the run has shardwise {run.version}"
        return f"{versions}: {_SAME_VERSION}"
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


def _differences(run: dict[str, str], newcomer: dict[str, str], host: str) -> str:
    """Return a list of the settings that differ, as text; empty if none does."""
    names = sorted(name for name in run.keys() | newcomer.keys() if run.get(name) != newcomer.get(name))
    listed = [
        f"{name} is {newcomer.get(name, 'not set')} on {host} and {run.get(name, 'not set')} in the run"
        f"{_FOLLOWS_FROM.get(name, '')}"
        for name in names[:MAX_DIFFERENCES]
    ]
    rest = len(names) - MAX_DIFFERENCES
    return "; ".join([*listed, *([f"{counted(rest, 'setting')} more"] if rest > 0 else [])])
