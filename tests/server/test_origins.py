"""Addresses that only this machine reaches, and names in the one spelling that they are compared in."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from everloop.errors import ConfigError
from everloop.server.origins import check_bind, configured_origins, host_name, normalize_host

LAN = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))
HERE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
RESOLVED = {"lan.test": [LAN], "both.test": [HERE, LAN], "here.test": [HERE]}


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the machine's resolver does not know; others are not looked for in the network."""
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        if host in RESOLVED:
            return RESOLVED[host]
        return real(host, port, family, type, proto, flags if host == "localhost" else flags | socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.0.0.2", "127.1", "::1", "::ffff:127.0.0.1", "here.test"]
)
async def test_loopback_needs_no_token_however_it_is_written(host):
    binding = await check_bind(host, tokens_exist=False)
    assert binding.loopback
    assert binding.addresses


BEYOND = ["0.0.0.0", "::", "", "0", "0x0", "192.0.2.7", "::ffff:0.0.0.0", "::ffff:192.0.2.7", "lan.test", "both.test"]


@pytest.mark.parametrize("host", BEYOND)
async def test_listening_beyond_loopback_is_refused_in_one_line_without_a_token_and_allowed_with_one(host):
    with pytest.raises(ConfigError) as refused:
        await check_bind(host, tokens_exist=False)
    assert "\n" not in str(refused.value)
    assert "everloop token add" in str(refused.value)
    assert not (await check_bind(host, tokens_exist=True)).loopback


async def test_a_name_is_resolved_once():
    assert (await check_bind("both.test", tokens_exist=True)).addresses == ("127.0.0.1", "192.0.2.7")


@pytest.mark.parametrize(
    "host", ["no such host", "a" * 300, "\udcff", "127.0.0.1\0", "http://127.0.0.1", "127.0.0.1:80"]
)
async def test_an_invalid_host_is_an_error_in_one_line(host):
    with pytest.raises(ConfigError) as refused:
        await check_bind(host, tokens_exist=True)
    assert "\n" not in str(refused.value)


def test_names_have_one_spelling():
    assert [host_name(host) for host in ("LOCALHOST:80", "[::FFFF:7f00:1]", "[0::1]:9", "a_b.test")] == [
        "localhost", "127.0.0.1", "::1", "a_b.test"
    ]  # fmt: skip
    assert normalize_host("fe80::1%eth0") == "fe80::1"
    assert [host_name(host) for host in ("", "a b", "a@b", "a:b", "[x]", "a/", "::1", ".", "a.")] == [None] * 9


def test_an_origin_in_the_settings_that_could_never_match_is_an_error():
    assert configured_origins(["https://A.test/", "app://vscode"]) == {"https://a.test", "app://vscode"}
    for wrong in ("a.test", "*", "https://a.test/path", "", "https://", "null", "https://a.test?x"):
        with pytest.raises(ConfigError):
            configured_origins([wrong])
