"""Which network addresses may be reached: those of the public internet, whatever they are wrapped in.

The tables are our own. `is_global` of the standard library differs from one Python to the next, knows nothing of
addresses inside of addresses, and takes clouds' metadata services for ordinary hosts.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Literal

Address = IPv4Address | IPv6Address
# "private": out of reach unless the person has listed the host. "never": not even then; it is no web server's address.
Kind = Literal["public", "private", "never"]

_V4: dict[str, Kind] = {  # the first that fits counts
    "168.63.129.16/32": "never",  # Azure's metadata and agent service
    "169.254.0.0/16": "never",  # link-local: where nearly all clouds have their metadata service
    "100.100.100.200/32": "never",  # Alibaba's metadata service
    "192.0.0.0/24": "never",  # protocol assignments, and Oracle's metadata service 192.0.0.192
    "0.0.0.0/8": "never",  # "this host": Linux takes 0.0.0.0 for loopback
    "224.0.0.0/4": "never",  # multicast
    "240.0.0.0/4": "never",  # reserved, and broadcast
    "192.0.2.0/24": "never",  # documentation
    "198.51.100.0/24": "never",
    "203.0.113.0/24": "never",
    "192.31.196.0/24": "never",  # sinks for DNS, relays for multicast and 6to4: no web server is there
    "192.175.48.0/24": "never",
    "192.52.193.0/24": "never",
    "192.88.99.0/24": "never",
    "127.0.0.0/8": "private",
    "10.0.0.0/8": "private",
    "172.16.0.0/12": "private",
    "192.168.0.0/16": "private",
    "100.64.0.0/10": "private",  # shared by carriers; also used for private networks (Tailscale, clouds)
    "198.18.0.0/15": "private",  # benchmarks; also used for private networks
}

# What is in none of these is "never": only 2000::/3 has been given out for the internet.
_V6: dict[str, Kind] = {
    "fd00:ec2::/32": "never",  # Amazon's services inside an instance: metadata, pod identity, DNS, time
    "fd20:ce::254/128": "never",  # the metadata services of Google,
    "fd00:c1::a9fe:a9fe/128": "never",  # Oracle,
    "fd00:42::42/128": "never",  # Scaleway,
    "fd00:a9fe:a9fe::/64": "never",  # Akamai (Linode)
    "fd00:100::100:200/128": "never",  # and Alibaba
    "::1/128": "private",
    "fc00::/7": "private",
    "::/96": "public",  # these carry an IPv4 address, which decides
    "::ffff:0:0/96": "public",
    "64:ff9b::/96": "public",  # its sister 64:ff9b:1::/48 is made to lead into private networks: never
    "2001::/32": "public",
    "2001::/23": "never",  # protocol assignments: benchmarks, ORCHID and others
    "2001:db8::/32": "never",  # documentation
    "3fff::/20": "never",
    "2620:4f:8000::/48": "never",  # a sink for DNS
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
    """Whether an address is public. One that carries others inside is as good as the worst of them."""
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _V4_NETWORKS if address in network), "public")
    if address.scope_id is not None:
        return "never"
    own: Kind = next((kind for network, kind in _V6_NETWORKS if address in network), "never")
    return min([own, *map(kind_of, carried(address))], key=_WORST_FIRST.index)


def carried(address: IPv6Address) -> list[IPv4Address]:
    """The IPv4 addresses that packets to this one may end up at."""
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
