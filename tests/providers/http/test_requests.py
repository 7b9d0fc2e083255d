"""Requests as they are sent, and those that are refused before."""

from __future__ import annotations

import base64
import socket

import pytest

from everloop.errors import ConfigError
from everloop.providers.openai import OpenAIProvider

from .servers import Server, client, keeping, say


@pytest.mark.parametrize("letter", ["\r", "\n", "\0", "\r\nX-Evil: 1", "\x7f", "€"])
async def test_characters_that_no_header_may_have_are_refused_at_once(letter):
    with pytest.raises(ConfigError, match="the header X-Tenant has a line end or another character"):
        OpenAIProvider("http://127.0.0.1/v1", None, "m", headers={"X-Tenant": f"sec{letter}ret"})
    with pytest.raises(ConfigError, match="cannot be a header"):
        OpenAIProvider("http://127.0.0.1/v1", None, "m", headers={f"X{letter}": "1"})


@pytest.mark.parametrize("name", ["", "X Y", "X:", "Content-Length", "transfer-encoding", "HOST"])
def test_a_header_that_would_make_another_request_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be a header"):
        OpenAIProvider("http://127.0.0.1/v1", None, "m", headers={name: "1"})


@pytest.mark.parametrize("key", ["sk-123\n", "sk-123\r\nX-Evil: 1", "sk\0", "sk-„123”", "sk 123", " "])
def test_a_badly_pasted_api_key_is_a_clear_error_that_does_not_show_it(key):
    with pytest.raises(ConfigError, match="set EVERLOOP_API_KEY to the key alone") as caught:
        OpenAIProvider("http://127.0.0.1/v1", key, "m")
    assert "sk" not in str(caught.value)


@pytest.mark.parametrize("part", ["\r\n", "\n", "\0", "\t", " ", "é"])
def test_characters_that_no_url_may_have_are_refused_at_once(part):
    with pytest.raises(ConfigError, match="is not a URL"):
        OpenAIProvider(f"http://127.0.0.1/a{part}b/v1", None, "m")


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'a' * 64}.de", "http://[::1", "http://h:99999", "http://h:x"])
def test_an_impossible_host_is_refused_at_once(url):
    with pytest.raises(ConfigError, match="is not a URL"):
        OpenAIProvider(url, None, "m")


async def test_each_header_is_sent_once_and_the_callers_wins():
    heads: list[str] = []
    headers = {"content-type": "application/x", "user-agent": "me"}
    async with Server(keeping(heads)) as server, client(server.url, headers=headers) as provider:
        await say(provider)
    names = [line.partition(":")[0].lower() for line in heads[0].split("\r\n")[1:-2]]
    assert sorted(names) == ["accept-encoding", "authorization", "content-length", "content-type", "host", "user-agent"]
    assert "content-type: application/x\r\n" in heads[0]


@pytest.mark.platform("IPv6 may be off")
async def test_an_ipv6_address_is_reached():
    heads: list[str] = []
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with Server(keeping(heads), host="::1") as server, client(server.url) as provider:
        assert await say(provider) == "from the origin"
    assert f"Host: [::1]:{server.port}\r\n" in heads[0]


async def test_a_host_is_sent_in_lower_case_with_the_urls_query_and_password():
    heads: list[str] = []
    async with Server(keeping(heads)) as server:
        url = f"http://us%40er:pass@LOCALHOST:{server.port}/Path?api-version=1&x=%20"
        async with client(url, api_key=None) as provider:
            assert await say(provider) == "from the origin"
    assert heads[0].startswith("POST /Path/chat/completions?api-version=1&x=%20 HTTP/1.1\r\n")
    assert f"Host: localhost:{server.port}\r\n" in heads[0]
    assert f"Authorization: Basic {base64.b64encode(b'us@er:pass').decode()}\r\n" in heads[0]


def test_an_invalid_base_url_is_shown_without_its_password():
    with pytest.raises(ConfigError) as refused:
        OpenAIProvider("ftp://me:hunter2@host/v1", model="m")
    assert "hunter2" not in str(refused.value)
    assert "host/v1" in str(refused.value)
