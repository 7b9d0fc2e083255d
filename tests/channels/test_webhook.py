"""The webhook channel: signed in both directions, each message once."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.channels.webhook import SIGNATURE, TIME, signature
from everloop.testing.channels import conform, running

from .hooks import SECRET, HookNetwork
from .says import Says, until


@pytest.fixture
async def network() -> AsyncIterator[HookNetwork]:
    async with HookNetwork().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: HookNetwork().running(), tmp_path, step=2)
    assert report.problems == []
    assert report.kills >= 5
    assert report.marked == 0  # the network accepts a key


async def test_a_message_with_an_invalid_or_old_signature_is_refused(network: HookNetwork, tmp_path: Path) -> None:
    message = {"id": "x", "chat": "1", "sender": "anna", "text": "forged"}
    async with running(network.settings, tmp_path) as store:
        await network.say("1", "hello")
        assert await network.post(message, secret="another secret, of the same length") == 401
        assert await network.post(message, at=time.time() - 3600) == 401
        assert await network.post(message, at=time.time() + 3600) == 401
        assert await network.post_headers({}) == 401
        for header in (TIME, SIGNATURE):
            assert await network.post_bytes(f"{header}: \udcff".encode("utf-8", "surrogateescape")) == 401  # no text
        assert await network.post_headers({TIME: "\u0664\u0662", SIGNATURE: "sha256="}) == 401
        await until(lambda: network.heard("1") == ["re: hello"])
        assert await store.find("me", "hook:x") is None


async def test_a_repeated_request_does_nothing_and_a_modified_one_is_refused(
    network: HookNetwork, tmp_path: Path
) -> None:
    message = {"id": "m1", "chat": "1", "sender": "anna", "text": "water the beans"}
    now = str(int(time.time()))
    body = json.dumps(message).encode()
    headers = {TIME: now, SIGNATURE: signature(SECRET, now, body)}
    says = Says("ok")
    async with running(network.settings, tmp_path, says):
        for _ in range(3):
            while await network.post_headers(headers, body) == 0:
                await asyncio.sleep(0.02)
        assert await network.post_headers({**headers, TIME: str(int(now) + 1)}, body) == 401
        assert await network.post_headers(headers, body.replace(b"water", b"steal")) == 401
        await network.say("1", "last", id="m2")
        await until(lambda: len(network.heard("1")) == 2)
    assert says.asked == ["water the beans", "last"]


async def test_a_message_may_have_files_up_to_the_limits(network: HookNetwork, tmp_path: Path) -> None:
    network.settings |= {"media_mb": 1, "body_mb": 2}
    says = Says("ok")
    files = [
        {"name": "../beans.txt", "data": base64.b64encode(b"ripe").decode()},
        {"name": "huge.bin", "data": base64.b64encode(bytes(1_000_001)).decode()},
    ]
    async with running(network.settings, tmp_path, says):
        await network.say("1", "", files=files)
        await until(lambda: network.heard("1"))
        much = [{"name": "huger.bin", "data": base64.b64encode(bytes(1_600_000)).decode()}]
        assert await network.post({"id": "x", "chat": "1", "sender": "anna", "files": much}) == 413
    (kept,) = await asyncio.to_thread(lambda: list((tmp_path / "uploads").iterdir()))
    assert await asyncio.to_thread(kept.read_bytes) == b"ripe"
    assert says.asked == [f"[huge.bin is larger than 1 MB, and was not taken.]\n[attachment: {kept}]"]
