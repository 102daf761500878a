"""Addresses of this machine: at which one to listen, and which one other machines see.

A port that only workers of one machine use is opened at the loopback address. Any other port is opened at the
one address that the peers use, because a machine may have more networks than the one meant for a run.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

import psutil

from shardwise.errors import UserError
from shardwise.mesh.environment import GIVEN_INTERFACES

LOOPBACK = "127.0.0.1"


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address only.

    If the name does not belong to this machine, listen at all addresses: a cluster may translate the address
    of a service.
    """
    check_resolves(address)
    family, _, _, _, bind_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(bind_address)
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
    """Raise a UserError if this machine cannot resolve the name of the first node."""
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        host, address = socket.gethostname(), _address_outside()
        more = f". The address of {host} is {address}" if address else ""
        raise UserError(
            f"the name {name}, which the launcher gives the first node, cannot be resolved on {host} "
            f"({error.strerror}). Give every node the first node's address instead: MASTER_ADDR=ADDRESS "
            "under Slurm (export it before srun), PET_RDZV_ENDPOINT=ADDRESS:PORT elsewhere; or let all nodes "
            f"resolve the name (DNS, /etc/hosts){more}"
        ) from None


def address_towards(address: str, port: int) -> str:
    """Return the address of this machine on the route to another address."""
    # Connecting a datagram socket sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def address_for_other_machines(name: str) -> str:
    """Return an address of the first node that other machines can use.

    That is its name, unless the name resolves to a loopback address, as a Debian machine resolves its own
    name (127.0.1.1). Then it is this machine's address on the network. A name that is a loopback address
    itself, such as localhost, is returned as it is.
    """
    if "localhost" in name or _is_address(name):
        return name
    try:
        answers = [
            str(answer[4][0]) for answer in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        ]
    except OSError:  # the network's names may become known later
        return name
    if not _is_loopback(answers[0]):
        return name
    outside = next((answer for answer in answers if not _is_loopback(answer)), None) or _address_outside()
    if outside is None:
        raise UserError(
            f"{name} leads to {answers[0]} here, where other machines cannot call: name the first node by "
            "its address on their network (PET_RDZV_ENDPOINT, MASTER_ADDR), or by localhost if all nodes are "
            "on this machine"
        )
    return outside


def _address_outside() -> str | None:
    """Return this machine's address on the default route; without one, its only address that is not
    loopback.
    """
    # Nobody owns this address (RFC 5737), so the default route leads there.
    address = address_towards("192.0.2.1", 9)
    if not _is_loopback(address):
        return address
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
    """Let gloo use the network that leads to this address and no other.

    The same holds for NCCL if all workers are on this machine.
    """
    local = address_towards(address, port)
    interfaces = psutil.net_if_addrs().items()
    interface = next(
        (name for name, addresses in interfaces if any(entry.address == local for entry in addresses)), None
    )
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface if local == LOOPBACK else None}
    os.environ.update(
        {name: value for name, value in wanted.items() if value is not None and name not in GIVEN_INTERFACES}
    )
