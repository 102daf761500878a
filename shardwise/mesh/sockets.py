"""Addresses of this machine: at which one to listen, and which one others see.

A port that only workers of one machine use is opened at the loopback address, any other at the one address that the peers use: a
machine has more networks than the one that a run is meant for.
"""

from __future__ import annotations

import errno
import os
import socket

import psutil

from shardwise.mesh.launched import GIVEN_INTERFACES

LOOPBACK = "127.0.0.1"


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at this address alone; at all addresses where the name leads to none of this machine's (a
    cluster may translate the address of a service).
    """
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


def address_towards(address: str, port: int) -> str:
    """This machine's address, as seen on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((address, port))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def use_network_towards(address: str, port: int) -> None:
    """Let gloo, and NCCL where all workers are on this machine, use the network that leads to this address and no other."""
    own = address_towards(address, port)
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, addresses in interfaces if any(entry.address == own for entry in addresses)), None)
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface if own == LOOPBACK else None}
    os.environ.update({name: value for name, value in wanted.items() if value is not None and name not in GIVEN_INTERFACES})
