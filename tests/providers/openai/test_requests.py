"""What is sent, and over which connections."""

from __future__ import annotations

import asyncio
import socket

import pytest

from everloop.errors import ConfigError
from everloop.messages import Conversation
from everloop.providers.base import ProviderError
from everloop.providers.openai import OpenAIProvider
from everloop.testing import FakeOpenAI

from .streams import ASK, ECHO, until, watch


async def test_connections_are_reused(server, provider):
    for _ in range(5):
        server.reply("ok")
        await provider.chat(ASK)
    for _ in range(5):
        server.reply("ok")
        await watch(provider)
        await until(lambda: provider._endpoint._pool._idle)  # its last bytes are read after the answer
    assert server.connections == 1


def test_a_provider_can_be_used_by_one_event_loop_after_another():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    provider = OpenAIProvider(f"http://127.0.0.1:{port}/v1", model="tools-0x0")

    async def ask(*, close: bool) -> str | None:
        async with FakeOpenAI(port=port):
            answer = await provider.chat(ASK)
            if close:
                await provider.close()
            return answer.content

    assert [asyncio.run(ask(close=close)) for close in (True, False, True)] == ["done:?"] * 3


async def test_a_conversation_is_sent_as_its_cached_bytes(server, provider):
    conversation = Conversation([{"role": "user", "content": "é 😀"}])
    conversation.json()
    kept = conversation[0]
    conversation[0] = {"role": "user", "content": "not encoded again"}
    for _ in range(2):
        server.reply("ok")
        await provider.chat(conversation, ECHO)
    conversation[0] = kept
    assert server.requests[1].body["messages"] == [{"role": "user", "content": "é 😀"}]
    assert server.requests[1].body["tools"] == ECHO


async def test_a_stream_requests_its_token_counts(server, provider):
    server.reply("ok")
    await watch(provider)
    assert server.requests[0].body["stream_options"] == {"include_usage": True}


async def test_tools_are_encoded_once_while_the_list_stays_the_same(server, provider):
    tools = list(ECHO)
    for _ in range(3):
        server.reply("ok")
    await provider.chat(ASK, tools)
    tools.append({"type": "function", "function": {"name": "later"}})
    await provider.chat(ASK, tools)
    await provider.chat(ASK, [])
    assert [len(request.body.get("tools", [])) for request in server.requests] == [1, 2, 0]
    assert "tools" not in server.requests[2].body


async def test_messages_with_lone_surrogates_are_sent_with_replacements(server, provider):
    server.reply("ok")
    server.reply("ok")
    await provider.chat([{"role": "user", "content": "a\ud800b"}])
    await provider.chat(Conversation([{"role": "user", "content": "a\ud800b"}]))
    assert [request.body["messages"][0]["content"] for request in server.requests] == ["a?b", "a?b"]


async def test_a_body_of_megabytes_is_sent(server, provider):
    server.reply("ok")
    await provider.chat([{"role": "user", "content": "x" * 3_000_000}])
    assert len(server.requests[0].body["messages"][0]["content"]) == 3_000_000


async def test_a_public_host_is_reached_through_the_environments_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.base_url.removesuffix("/v1"))
    server.reply("through the proxy")
    provider = OpenAIProvider("http://models.example.com/v1", model="m")
    assert (await provider.chat(ASK)).content == "through the proxy"
    assert server.requests[0].headers["Host"] == "models.example.com"
    await provider.close()


async def test_loopback_is_reached_without_the_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    provider = OpenAIProvider(server.base_url, model="tools-0x0")
    assert (await provider.chat(ASK)).content == "done:?"
    await provider.close()


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x/v1", "http://", "http://[", "not a url"])
def test_an_invalid_base_url_is_refused(url):
    with pytest.raises(ConfigError, match="EVERLOOP_BASE_URL"):
        OpenAIProvider(url)


@pytest.mark.parametrize("suffix", ["", "/", "/chat/completions"])
async def test_a_base_url_may_end_as_people_write_it(server, suffix):
    provider = OpenAIProvider(server.base_url + suffix, model="tools-0x0")
    assert (await provider.chat(ASK)).content == "done:?"
    await provider.close()


async def test_a_password_in_the_base_url_is_not_shown(server):
    server.fail(500)
    for base_url in (server.base_url, "http://127.0.0.1:1/v1"):
        provider = OpenAIProvider(base_url.replace("://", "://me:hidden@"))
        with pytest.raises(ProviderError) as error:
            await provider.chat(ASK)
        assert "127.0.0.1" in str(error.value)
        assert "hidden" not in str(error.value)
        await provider.close()


async def test_a_long_conversation_is_sent_whole_and_grows_at_its_end(server, provider):
    conversation = Conversation({"role": "user", "content": f"{n}: " + "long " * 500} for n in range(200))
    for n in range(3):
        conversation.append({"role": "assistant", "content": f"answer {n}"})
        conversation.append({"role": "user", "content": f"question {n}"})
        server.reply("ok")
        await provider.chat(conversation, ECHO)
        assert server.requests[-1].body["messages"] == list(conversation)
        assert server.requests[-1].body["tools"] == ECHO
