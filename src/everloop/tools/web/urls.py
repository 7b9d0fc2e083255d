"""Strict parsing of web addresses: the address that is checked, shown and requested is one and the same text.

Attacks exploit programs that parse an address differently. So anything ambiguous is refused, and the rest is rebuilt
from its parts, in ASCII, before any other code sees it.

Which network addresses may be reached is decided by our own tables: `is_global` of the standard library differs between
versions of Python, does not look into embedded addresses, and counts cloud metadata services as public.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Literal
from urllib.parse import quote, urljoin

import msgspec

MAX_URL = 8_000
DEFAULT_PORTS = {"http": 80, "https": 443}

_parts = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.I | re.S).fullmatch
_scheme = re.compile(r"([a-z][a-z0-9+.-]{0,30}):", re.I).match
_authority = re.compile(r"(\[[0-9a-f:.]*\]|[^\[\]:@%\\]+)(?::([0-9]{1,5}))?", re.I).fullmatch
_is_label = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?").fullmatch
_is_number = re.compile(r"[0-9]+|0x[0-9a-f]*").fullmatch
_odd = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]").search
_stray_percent = re.compile(r"%(?![0-9a-fA-F]{2})")


class BadURL(ValueError):
    """An address that is refused; the text says why and what to do."""


class URL(msgspec.Struct, frozen=True):
    """A parsed http(s) address; `str()` of it is exactly what is requested."""

    scheme: str
    host: str  # lower case, ASCII; an IPv6 address without its brackets
    port: int
    target: str  # path and query
    address: Address | None  # set if the host is an address, not a name

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def join(self, location: str) -> URL:
        """Return the target of a redirect from here."""
        if _odd(location):
            raise BadURL("it has newlines or other characters that are not allowed in an address")
        try:
            return parse_url(urljoin(str(self), location))
        except BadURL:
            raise
        except ValueError as error:
            raise BadURL(f"it is not an address ({error})") from None


def parse_url(text: str) -> URL:
    """Parse an address; raise a BadURL unless it is unambiguous."""
    text = text.strip(" \t\r\n")
    if len(text) > MAX_URL:
        raise BadURL(f"it has {len(text)} characters; the maximum is {MAX_URL}")
    if _odd(text):
        raise BadURL("it has newlines, control or invisible characters: write it without them")
    parts = _parts(text)
    if parts is None or parts[1].lower() not in DEFAULT_PORTS:
        named = _scheme(text)
        other = f", not {named[1]}:" if named and named[1].lower() not in DEFAULT_PORTS else ""
        raise BadURL(f"it must begin with http:// or https://{other}")
    scheme, path = parts[1].lower(), parts[3] or "/"
    if "\\" in path:
        raise BadURL("it has a backslash: write / or %5C")
    host, port = _split_authority(parts[2])
    host, address = _read_host(host)
    query = "" if parts[4] is None else "?" + _quoted(parts[4])
    return URL(scheme, host, port or DEFAULT_PORTS[scheme], _quoted(path) + query, address)


def _split_authority(authority: str) -> tuple[str, int | None]:
    if "@" in authority:
        raise BadURL("it has a user name or password before the host: leave that out")
    if not authority or authority.startswith(":"):
        raise BadURL("it has no host")
    parts = _authority(authority)
    if parts is None:
        raise BadURL("its host and port cannot be read: write host or host:port, without %, \\ or zones")
    if parts[2] is not None and not 0 < int(parts[2]) < 65_536:
        raise BadURL("its port must be from 1 to 65535")
    return parts[1], int(parts[2]) if parts[2] else None


def _read_host(host: str) -> tuple[str, Address | None]:
    """Return the canonical host, and its address if it is one."""
    if host.startswith("["):
        try:
            address = IPv6Address(host[1:-1])
        except ValueError:
            raise BadURL(f"{host} is not an IPv6 address") from None
        return str(address), address
    if not host.isascii():
        host = _to_ascii(host)
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if _is_number(labels[-1]):
        # Systems accept 127.1, 0x7f.1, 017700000001 and the like as addresses, each in its own way.
        try:
            four = IPv4Address(host)
        except ValueError:
            raise BadURL(
                f"{host[:100]} is not an IPv4 address: write four decimal numbers, without leading zeros"
            ) from None
        return host, four
    if len(host) > 253 or not all(map(_is_label, labels)):
        raise BadURL("its host is not a valid name")
    return host, None


def _to_ascii(host: str) -> str:
    """Return an internationalised host name as used in the DNS."""
    import idna  # comes with aiohttp; rarely needed

    try:
        return idna.encode(host, uts46=True, std3_rules=True).decode()
    except (idna.IDNAError, UnicodeError):
        raise BadURL("its host is not a valid name") from None


def _quoted(text: str) -> str:
    return quote(_stray_percent.sub("%25", text), safe="/?:@!$&'()*+,;=-._~%")


Address = IPv4Address | IPv6Address
# "private": unreachable unless the person has listed the host. "never": not even then; no web server has such an
# address.
Kind = Literal["public", "private", "never"]

_V4: dict[str, Kind] = {  # the first match applies
    "168.63.129.16/32": "never",  # Azure's metadata and agent service
    "169.254.0.0/16": "never",  # link-local: the metadata services of nearly all clouds
    "100.100.100.200/32": "never",  # Alibaba's metadata service
    "192.0.0.0/24": "never",  # protocol assignments, and Oracle's metadata service 192.0.0.192
    "0.0.0.0/8": "never",  # "this host": Linux treats 0.0.0.0 as loopback
    "224.0.0.0/4": "never",  # multicast
    "240.0.0.0/4": "never",  # reserved, and broadcast
    "192.0.2.0/24": "never",  # documentation
    "198.51.100.0/24": "never",
    "203.0.113.0/24": "never",
    "192.31.196.0/24": "never",  # DNS sinks, and relays for multicast and 6to4: no web servers
    "192.175.48.0/24": "never",
    "192.52.193.0/24": "never",
    "192.88.99.0/24": "never",
    "127.0.0.0/8": "private",
    "10.0.0.0/8": "private",
    "172.16.0.0/12": "private",
    "192.168.0.0/16": "private",
    "100.64.0.0/10": "private",  # shared address space of carriers; also used for private networks (Tailscale, clouds)
    "198.18.0.0/15": "private",  # benchmarks; also used for private networks
}

# Anything in none of these is "never": only 2000::/3 has been allocated for the internet.
_V6: dict[str, Kind] = {
    "fd00:ec2::/32": "never",  # Amazon's services inside an instance: metadata, pod identity, DNS, time
    "fd20:ce::254/128": "never",  # the metadata services of Google,
    "fd00:c1::a9fe:a9fe/128": "never",  # Oracle,
    "fd00:42::42/128": "never",  # Scaleway,
    "fd00:a9fe:a9fe::/64": "never",  # Akamai (Linode)
    "fd00:100::100:200/128": "never",  # and Alibaba
    "::1/128": "private",
    "fc00::/7": "private",
    "::/96": "public",  # these embed an IPv4 address, which decides
    "::ffff:0:0/96": "public",
    "64:ff9b::/96": "public",  # its sibling 64:ff9b:1::/48 is meant for private networks: never
    "2001::/32": "public",
    "2001::/23": "never",  # protocol assignments: benchmarks, ORCHID and others
    "2001:db8::/32": "never",  # documentation
    "3fff::/20": "never",
    "2620:4f:8000::/48": "never",  # a DNS sink
    "2000::/3": "public",
}

_V4_NETWORKS = [(IPv4Network(network), kind) for network, kind in _V4.items()]
_V6_NETWORKS = [(IPv6Network(network), kind) for network, kind in _V6.items()]
_WRAPPED = tuple(map(IPv6Network, ("::/96", "::ffff:0:0/96", "64:ff9b::/96")))  # compatible, mapped, NAT64
_LOOPBACK = IPv6Address("::1")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_ISATAP = (0x00005EFE, 0x02005EFE)
_WORST_FIRST: tuple[Kind, ...] = ("never", "private", "public")


def kind_of(address: Address) -> Kind:
    """Return whether an address is public. One with embedded addresses gets the worst of their kinds."""
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _V4_NETWORKS if address in network), "public")
    if address.scope_id is not None:
        return "never"
    own: Kind = next((kind for network, kind in _V6_NETWORKS if address in network), "never")
    return min([own, *map(kind_of, carried(address))], key=_WORST_FIRST.index)


def carried(address: IPv6Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that packets to this address may be delivered to."""
    value = int(address)
    second, third, last = (value >> shift & 0xFFFFFFFF for shift in (64, 32, 0))
    found: list[int] = []
    if address in _SIX_TO_FOUR:
        found.append((value >> 80) & 0xFFFFFFFF)
    elif address in _TEREDO:
        found += [second, last ^ 0xFFFFFFFF]  # the server and, inverted, the client
    elif address != _LOOPBACK and any(address in network for network in _WRAPPED):
        found.append(last)
    if third in _ISATAP:
        found.append(last)
    return [IPv4Address(part) for part in found]
