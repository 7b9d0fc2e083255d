"""Sockets for one exchange: they lead to addresses that were checked, and take only so much."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from .addresses import Address


@dataclass(slots=True)
class Pinned:
    """Answers aiohttp's question for the addresses of the host with those that were checked."""

    addresses: list[Address]

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        return [
            {
                "hostname": host,
                "host": str(address),
                "port": port,
                "proto": socket.IPPROTO_TCP,
                "family": _family(address),
                "flags": socket.AI_NUMERICHOST,
            }
            for address in self.addresses
        ]

    async def close(self) -> None:
        pass


class Metered(socket.socket):
    """A socket that breaks when more has come than is wanted.

    Much that a server may send without end never reaches the code that counts the bytes of a body: hints that come
    before an answer, headers, what stands around chunks.
    """

    left: int

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0, /) -> int:
        count = super().recv_into(buffer, size, flags)
        self._count(count)
        return count

    def _count(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ConnectionAbortedError("more was sent than is taken")


def sockets_to(addresses: Sequence[Address], most: int) -> Callable[[Any], socket.socket]:
    """Makes sockets for these addresses alone: whatever happened above, no other is connected to."""

    def make(info: Any) -> socket.socket:
        family, kind, protocol, _, place = info
        if ip_address(place[0]) not in addresses:
            raise OSError(f"{place[0]} was not checked")
        made = Metered(family, kind, protocol)
        made.left = most
        return made

    return make


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def is_this_machine(address: Address) -> bool:
    """Whether a public address is one of our own: behind it are services that a firewall may hide from others."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            probe.connect((str(address), 9))  # sends nothing; the system only picks the way out
            return bool(ip_address(probe.getsockname()[0]) == address)
    except OSError:
        return False


def certificates() -> ssl.SSLContext:
    """The authorities that this machine trusts, or certifi's where it has none."""
    context = ssl.create_default_context()
    known = ssl.get_default_verify_paths()
    if not known.cafile and not (known.capath and os.listdir(known.capath)):
        try:
            import certifi
        except ImportError:
            return context
        context.load_verify_locations(certifi.where())
    return context
