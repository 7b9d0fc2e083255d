"""The webhook channel: signed in both directions, each message once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.testing.channels import conform, running

from .hooks import HookNetwork
from .says import until


@pytest.fixture
async def network() -> AsyncIterator[HookNetwork]:
    async with HookNetwork().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: HookNetwork().running(), tmp_path, step=2)
    assert report.problems == []
    assert report.kills >= 5
    assert report.marked == 0  # the network takes a key


async def test_a_message_with_a_wrong_or_old_signature_is_not_taken(network: HookNetwork, tmp_path: Path) -> None:
    message = {"id": "x", "chat": "1", "sender": "anna", "text": "forged"}
    async with running(network.settings, tmp_path) as store:
        await network.say("1", "hello")
        assert await network.post(message, secret="another secret, of the same length") == 401
        assert await network.post(message, at=time.time() - 3600) == 401
        await until(lambda: network.heard("1") == ["re: hello"])
        assert await store.find("me", "hook:x") is None
