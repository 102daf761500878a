"""Addresses of this machine: at which one to listen, and which one others see.

A port that only workers of one machine use is opened at the loopback address, any other at the one address
that the peers use: a machine has more networks than the one that a run is meant for.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import psutil

from shardwise.errors import UserError
from shardwise.mesh.launched import GIVEN_INTERFACES

LOOPBACK = "127.0.0.1"


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at this address alone; at all addresses where the name leads to none of this
    machine's (a cluster may translate the address of a service).
    """
    check_resolves(address)
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def check_resolves(name: str) -> None:
    """Raise a UserError if the name of the first node cannot be resolved on this machine."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        own = _address_outside()
        raise UserError(
            f"the name {name}, by which the launcher names the first node, cannot be resolved on "
            f"{socket.gethostname()} "
            f"({error.strerror}). Give every node the first node's address instead: MASTER_ADDR=ADDRESS "
            f"under Slurm (export it "
            "before srun), PET_RDZV_ENDPOINT=ADDRESS:PORT elsewhere; or let all nodes resolve the name (DNS, "
            "/etc/hosts)" + (f". The address of {socket.gethostname()} is {own}" if own else "")
        ) from None


def address_towards(address: str, port: int) -> str:
    """This machine's address, as seen on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((address, port))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def address_for_other_machines(name: str) -> str:
    """The name of the first node, unless it leads to nowhere but this machine, as Debian has it for a
    machine's own name (127.0.1.1): then the address of this machine that leads outside. What is a loopback
    address by its own words stays one.
    """
    if "localhost" in name or _is_address(name):
        return name
    try:
        answers = [
            str(answer[4][0]) for answer in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        ]
    except OSError:  # the names of the network may come later
        return name
    if not _is_loopback(answers[0]):
        return name
    outside = next((answer for answer in answers if not _is_loopback(answer)), None) or _address_outside()
    if outside is None:
        raise UserError(
            f"{name} leads to {answers[0]} here, where other machines cannot call: name the first node by "
            f"its address on their "
            "network (PET_RDZV_ENDPOINT, MASTER_ADDR), or by localhost if all nodes are on this machine"
        )
    return outside


def _address_outside() -> str | None:
    """This machine's address on the way to anywhere; without such a way, its only one that is not a loopback
    address."""
    own = address_towards("192.0.2.1", 9)  # nobody's (RFC 5737), so the default route leads there
    if not _is_loopback(own):
        return own
    entries = [
        entry
        for interface in psutil.net_if_addrs().values()
        for entry in interface
        if entry.family == socket.AF_INET
    ]
    outside = [str(entry.address) for entry in entries if not _is_loopback(entry.address)]
    return outside[0] if len(outside) == 1 else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def use_network_towards(address: str, port: int) -> None:
    """Let gloo, and NCCL where all workers are on this machine, use the network that leads to this address
    and no other."""
    own = address_towards(address, port)
    interfaces = psutil.net_if_addrs().items()
    interface = next(
        (name for name, addresses in interfaces if any(entry.address == own for entry in addresses)), None
    )
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface if own == LOOPBACK else None}
    os.environ.update(
        {name: value for name, value in wanted.items() if value is not None and name not in GIVEN_INTERFACES}
    )
