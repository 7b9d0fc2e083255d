"""Which addresses may be reached."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everloop.tools.web.urls import kind_of

from ...support.cases import each

PUBLIC = "1.1.1.1 8.8.8.8 93.184.215.14 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 "
PUBLIC += "169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.167.255.255 192.169.0.0 198.17.255.255 "
PUBLIC += "198.20.0.0 223.255.255.255 168.63.129.15 168.63.129.17 "
PUBLIC += "2606:4700:4700::1111 2a00:1450:4001:80b::200e 2001:4860:4860::8888 2001:200::1 2620:fe::fe 3ffe:ffff::1"

PRIVATE = "127.0.0.1 127.255.255.254 127.1.2.3 10.0.0.0 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 "
PRIVATE += "192.168.255.255 100.64.0.0 100.127.255.255 198.18.0.1 198.19.255.255 ::1 fc00::1 fd12:3456::1 fdff:ffff::1 "
PRIVATE += "::ffff:127.0.0.1 ::127.0.0.1 64:ff9b::127.0.0.1 2002:7f00:1:: 2002:a00:1::5 ::ffff:192.168.1.1 "
PRIVATE += "fd00:ec1:ffff::1 fd00:ec3::1 fd00:42::41 fd20:ce::253"

NEVER = "0.0.0.0 0.1.2.3 169.254.0.1 169.254.169.254 169.254.170.2 168.63.129.16 100.100.100.200 192.0.0.192 192.0.0.8 "
NEVER += "192.0.2.1 198.51.100.7 203.0.113.9 192.88.99.1 192.31.196.1 192.52.193.1 192.175.48.1 224.0.0.1 "
NEVER += "239.255.255.250 240.0.0.1 255.255.255.255 :: ::2 fe80::1 fe80::1%1 febf::1 fec0::1 ff02::1 ff0e::1 100::1 "
NEVER += "fd00:ec2::254 fd00:ec2::23 fd00:ec2::253 fd00:ec2:ffff::1 fd20:ce::254 fd00:c1::a9fe:a9fe fd00:42::42 "
NEVER += "fd00:a9fe:a9fe::1 fd00:100::100:200 169.254.42.42 169.254.0.23 169.254.170.23 fe80::a9fe:a9fe "
NEVER += "64:ff9b:1::1.1.1.1 64:ff9b:1:ffff::7f00:1 2001:db8::1 3fff::1 3fff:fff::1 5f00::1 "
NEVER += "2001:2::1 2001:10::1 2001:20::1 2001:1::1 2001:1ff::1 2620:4f:8000::1 ::ffff:0:1.1.1.1 4000::1 1::1 "
NEVER += "2606:4700:4700::1111%1 ::ffff:169.254.169.254 64:ff9b::169.254.169.254 2002:a9fe:a9fe:: ::169.254.169.254"


@each("address", PUBLIC.split())
def test_public_addresses_may_be_reached(address):
    assert kind_of(ip_address(address)) == "public"


@each("address", PRIVATE.split())
def test_listed_private_addresses_may_be_reached(address):
    assert kind_of(ip_address(address)) == "private"


@each("address", NEVER.split())
def test_addresses_that_cannot_be_web_servers_may_never_be_reached(address):
    assert kind_of(ip_address(address)) == "never"


def mapped(inner: int) -> int:
    return 0xFFFF << 32 | inner


def compatible(inner: int) -> int:
    return inner


def translated(inner: int) -> int:
    return 0x64FF9B << 96 | inner


def six_to_four(inner: int, rest: int = 0x1234) -> int:
    return 0x2002 << 112 | inner << 80 | rest


def teredo_client(inner: int) -> int:
    return 0x20010000 << 96 | 0x08080808 << 64 | 0x8000FFFF << 32 | inner ^ 0xFFFFFFFF


def teredo_server(inner: int) -> int:
    return 0x20010000 << 96 | inner << 64 | 0x8000FFFF << 32 | 0x08080808 ^ 0xFFFFFFFF


def isatap(inner: int) -> int:
    return 0x20014860_48600000 << 64 | 0x00005EFE << 32 | inner


def isatap_global(inner: int) -> int:
    return 0x20014860_48600000 << 64 | 0x02005EFE << 32 | inner


FORMS = [mapped, compatible, translated, six_to_four, teredo_client, teredo_server, isatap, isatap_global]


@pytest.mark.parametrize("form", FORMS)
@given(
    inner=st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([int(IPv4Address(a)) for a in (*PRIVATE.split()[:13],)]))
)
@example(int(IPv4Address("127.0.0.1")))
@example(int(IPv4Address("169.254.169.254")))
@example(int(IPv4Address("8.8.8.8")))
def test_an_embedded_address_is_judged_like_a_plain_one(form, inner):
    if form is compatible and inner == 1:
        return  # ::1 is loopback, not 0.0.0.1
    assert kind_of(IPv6Address(form(inner))) == kind_of(IPv4Address(inner))


@given(value=st.integers(0, 2**128 - 1))
def test_no_ipv6_address_outside_global_unicast_is_public(value):
    address = IPv6Address(value)
    wrapped = address.ipv4_mapped or value >> 32 in (0, 0x64FF9B << 64)
    if value >> 125 != 1 and not wrapped:
        assert kind_of(address) != "public"


@given(value=st.integers(0, 2**32 - 1))
def test_addresses_special_to_the_standard_library_are_not_public(value):
    address = IPv4Address(value)
    special = address.is_private or address.is_multicast or address.is_reserved or address.is_link_local
    if special or address.is_unspecified or address.is_loopback:
        assert kind_of(address) != "public"
