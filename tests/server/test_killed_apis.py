"""A request of any API in a session is finished after a kill, and its answer given when it is repeated."""

from __future__ import annotations

import contextlib
from typing import Any

import aiohttp
import pytest

from everloop.testing.openai_server import FakeOpenAI

from .serving import process

SAID = [{"role": "user", "content": "Work."}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 100, "messages": SAID},
    "/api/chat": {"model": "m", "messages": SAID},
    "/api/generate": {"model": "m", "prompt": "Work."},
}
KEYS = {"X-Session": "kept", "Idempotency-Key": "once"}


@pytest.mark.parametrize("path", APIS)
async def test_a_request_in_a_session_is_answered_after_a_kill(tmp_path, path):
    async with FakeOpenAI() as fake, aiohttp.ClientSession(headers=KEYS) as session:
        fake.hang(50, after_chunks=1, text="lost words")
        async with process(fake, tmp_path) as (made, url):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url + path, json={**APIS[path], "stream": True}) as response:
                    await response.content.readuntil(b"lost")
                    made.kill()
        fake.reply("Done.")
        async with process(fake, tmp_path) as (_, url):
            for _ in range(2):
                async with session.post(url + path, json={**APIS[path], "stream": False}) as response:
                    assert response.status == 200, await response.text()
                    assert "Done." in await response.text()
        assert len(fake.requests) == 2
