"""Host names, origins and addresses: the names a server answers to, the pages that may use it, loopback detection."""

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
    """The addresses to listen on, resolved once: a second lookup could return others."""

    addresses: tuple[str, ...]
    loopback: bool  # only this machine can reach them


def host_name(authority: str) -> str | None:
    """Return the normalised name in a Host header; None if it is invalid."""
    found = AUTHORITY.fullmatch(authority)
    return None if found is None else normalize_host(found[1] or found[2])


def normalize_host(name: str) -> str:
    """Normalise a host name or address: no port, brackets, capitals or zone; IPv4-mapped IPv6 as IPv4."""
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
        return ipaddress.ip_address(normalize_host(address)).is_loopback
    except ValueError:
        return False


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether a page of this origin was served under this Host, possibly through a proxy that terminates TLS."""
    parts = _split(origin)
    return parts is not None and parts[0] in ("http", "https") and parts[1] == host.lower()


def configured_origins(origins: Iterable[str]) -> frozenset[str]:
    """Normalise the configured origins to the form that browsers send."""
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
    """Resolve the host to listen on. Refuse if other machines could reach it and there is no valid token."""
    loop = asyncio.get_running_loop()
    try:
        if not host.isprintable():  # the resolver would stop at a NUL byte
            raise UnicodeError
        found = await loop.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "not a valid name"
        raise ConfigError(f'the host "{host[:100]}" is not usable ({why}): name an address of this machine') from None
    addresses = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    loopback = all(is_loopback(address) for address in addresses)
    if not loopback and not tokens_exist:
        raise ConfigError(
            f'listening on "{host[:100]}" opens the server to other machines, and there is no valid token: '
            "make one with `everloop token add NAME`, or listen on 127.0.0.1"
        )
    return Binding(addresses, loopback)
