"""Interrupted streams of APIs other than chat completions resume after their last event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.testing.openai_server import FakeOpenAI

from .serving import Serving, process

KEYS = {"X-Session": "kept", "Idempotency-Key": "once"}
WORDS = ["one ", "two ", "three ", "four ", "five"]
SAID = [{"role": "user", "content": "Count."}]
# The path, the body, and where a text stands in an event.
STREAMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ({"messages": SAID, "stream": True}, ("choices", "0", "delta", "content")),
    "/v1/messages": ({"model": "m", "max_tokens": 100, "messages": SAID, "stream": True}, ("delta", "text")),
    "/v1/responses": ({"input": "Count.", "stream": True, "store": False}, ("delta",)),
}


def text_in(event: Any, place: tuple[str, ...]) -> str:
    for name in place:
        event = event.get(name) if isinstance(event, dict) else event[int(name)] if event else None
        if event is None:
            return ""
    return str(event) if isinstance(event, str) else ""


async def read(response: aiohttp.ClientResponse, place: tuple[str, ...], until: str = "") -> tuple[str, str]:
    """(the text, the last id) as a client has them that takes an id into account when its event is complete."""
    text = id = last = ""
    async for data in response.content:
        line = data.decode().removesuffix("\n")
        if line.startswith("id: "):
            id = line[4:]
        elif line.startswith("data: ") and line != "data: [DONE]":
            text += text_in(json.loads(line[6:]), place)
        elif not line:
            last = id or last
            if until and until in text:
                break
    return text, last


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_resumes_at_the_clients_position_after_a_kill(tmp_path: Path, path: str):
    body, place = STREAMS[path]
    async with FakeOpenAI() as fake, aiohttp.ClientSession(headers=KEYS) as session:
        fake.hang(50, after_chunks=3, text="".join(WORDS), tokens=WORDS)
        async with process(fake, tmp_path) as (made, url):
            async with session.post(url + path, json=body) as response:
                text, last = await read(response, place, "three")
                made.kill()
            await made.wait()
        assert text == "one two three "
        fake.reply("".join(WORDS), tokens=WORDS)
        back = {"Last-Event-ID": last}
        async with process(fake, tmp_path) as (_, url), session.post(url + path, json=body, headers=back) as response:
            assert response.status == 200, await response.text()
            rest, _ = await read(response, place)
    assert rest == "four five"
    assert len(fake.requests) == 2


async def test_an_id_comes_with_the_text_and_not_before_it(server: Serving):
    """A client that loses its connection between two events would otherwise skip the text of the second."""
    for path, (body, place) in STREAMS.items():
        server.fake.reply("one two")
        keys = {"X-Session": path.replace("/", "-"), "Idempotency-Key": "once"}
        async with server.http.post(server.url + path, json=body, headers=keys) as response:
            events = (await response.text()).split("\n\n")
        marked = [event for event in events if event.startswith("id: ") or "\nid: " in event]
        assert marked, path
        for event in marked:
            (data,) = [line for line in event.split("\n") if line.startswith("data: ")]
            assert text_in(json.loads(data[6:]), place), event


async def test_an_ollama_stream_is_only_json_even_in_a_session(server: Serving):
    server.fake.reply("one two")
    body = {"model": "m", "messages": SAID}
    async with server.http.post(f"{server.url}/api/chat", json=body, headers=KEYS) as response:
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "one two"
    assert lines[-1]["done"]
