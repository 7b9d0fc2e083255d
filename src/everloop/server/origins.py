"""Which names a server answers to, which pages may speak to it, and which addresses are this machine's own."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import ConfigError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?))(?::[0-9]{1,5})?")


@dataclass(slots=True, frozen=True)
class Binding:
    """The addresses to listen on, found once: a name that is looked up again could lead elsewhere."""

    addresses: tuple[str, ...]
    loopback: bool  # nobody but this machine can reach any of them


def name_of(authority: str) -> str | None:
    """The name in a Host header, in the one spelling that it is compared in; None when it is no name at all."""
    found = AUTHORITY.fullmatch(authority)
    return None if found is None else plain(found[1] or found[2])


def plain(name: str) -> str:
    """A host's name or address without port, brackets, capitals or a zone; IPv4 in IPv6 as IPv4."""
    if found := AUTHORITY.fullmatch(name):
        name = found[1] or found[2]
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.lower()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(plain(address)).is_loopback
    except ValueError:
        return False


def is_own_origin(origin: str, host: str) -> bool:
    """Whether a page from this origin was served under this Host; also by a proxy that does TLS for us."""
    parts = _split(origin)
    return parts is not None and parts[0] in ("http", "https") and parts[1] == host.lower()


def configured_origins(origins: Iterable[str]) -> frozenset[str]:
    """Origins as browsers write them."""
    found = set()
    for origin in origins:
        parts = _split(origin.rstrip("/"))
        if parts is None:
            raise ConfigError(f'the origin "{origin}" must look like https://chat.example.org, without a path')
        found.add(f"{parts[0]}://{parts[1]}")
    return frozenset(found)


def _split(origin: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    if not parts.scheme or not parts.netloc or f"{parts.scheme}://{parts.netloc}".lower() != origin.lower():
        return None
    return parts.scheme.lower(), parts.netloc.lower()


async def check_bind(host: str, tokens_exist: bool) -> Binding:
    """Find what a host stands for; refused when others could reach it and nobody has a token to show."""
    loop = asyncio.get_running_loop()
    try:
        if not host.isprintable():  # the system would stop reading at a zero byte
            raise UnicodeError
        found = await loop.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a name"
        raise ConfigError(
            f'the host "{host[:100]}" cannot be listened on ({why}): name an address of this machine'
        ) from None
    addresses = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    loopback = all(is_loopback(address) for address in addresses)
    if not loopback and not tokens_exist:
        raise ConfigError(
            f'listening on "{host[:100]}" lets in whoever reaches this machine, and there is no token to ask them for: '
            "`everloop token add NAME` makes one, or listen on 127.0.0.1"
        )
    return Binding(addresses, loopback)
