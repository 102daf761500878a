"""Several "hosts" on one machine: network namespaces joined by a switch, each with an address, its link
limited to 1 Gbit/s."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POSSIBLE = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
ADDRESSES = {"a": "10.91.0.1", "b": "10.91.0.2", "c": "10.91.0.3"}
OURS = f"sw{os.getpid()}"
"""Others may run these tests on the same machine at the same time."""
SWITCH = f"{OURS}-switch"


def ip(*words: str, check: bool = True) -> None:
    """Run an `ip` command."""
    subprocess.run(["ip", *words], check=check, capture_output=True)


def inside(host: str, *words: str) -> list[str]:
    """A command as it is run on a host."""
    return ["ip", "netns", "exec", f"{OURS}-{host}", *words]


@contextmanager
def hosts() -> Iterator[None]:
    """Set up the hosts and the cables to their switch."""
    _tear_down()
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for host, address in ADDRESSES.items():
            ip("netns", "add", f"{OURS}-{host}")
            _own_files(host).mkdir(parents=True, exist_ok=True)
            (_own_files(host) / "resolv.conf").write_text("")  # no name server to wait for in vain
            ip(
                "link",
                "add",
                f"sw-e{host}",
                "netns",
                f"{OURS}-{host}",
                "type",
                "veth",
                "peer",
                "name",
                f"to-{host}",
                "netns",
                SWITCH,
            )
            ip("-n", SWITCH, "link", "set", f"to-{host}", "master", "br0", "up")
            for words in (
                ["link", "set", "lo", "up"],
                ["addr", "add", f"{address}/24", "dev", f"sw-e{host}"],
            ):
                ip("-n", f"{OURS}-{host}", *words)
            plug(host)
            limit = f"tc qdisc add dev sw-e{host} root tbf rate 1gbit burst 256kb latency 50ms"
            subprocess.run(inside(host, *limit.split()), check=True, capture_output=True)
        yield
    finally:
        _tear_down()


def kill(host: str) -> None:
    """End a host as a power cut does: its cable first, so that nobody is told, then every process."""
    pull(host)
    pids = subprocess.run(
        ["ip", "netns", "pids", f"{OURS}-{host}"], check=True, capture_output=True, text=True
    ).stdout
    for pid in pids.split():
        os.kill(int(pid), signal.SIGKILL)


def plug(host: str) -> None:
    """Put the cable of a host in."""
    ip("-n", f"{OURS}-{host}", "link", "set", f"sw-e{host}", "up")


def pull(host: str) -> None:
    """Pull the cable of a host: packets are lost, nobody is told."""
    ip("-n", f"{OURS}-{host}", "link", "set", f"sw-e{host}", "down")


def _own_files(host: str) -> Path:
    """What `ip netns exec` puts in the place of files in /etc."""
    return Path("/etc/netns") / f"{OURS}-{host}"


def _tear_down() -> None:
    for host in ADDRESSES:
        shutil.rmtree(_own_files(host), ignore_errors=True)
        ip("netns", "del", f"{OURS}-{host}", check=False)
    ip("netns", "del", SWITCH, check=False)
