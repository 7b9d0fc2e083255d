"""While a model loads, the user is told so."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider
from everloop.providers.retry import Resilient
from tests.support.commands import terminal, until

from .real import TINY, weights
from .real import found_tiny as found_tiny


async def test_the_provider_reports_that_the_model_is_loading() -> None:
    found = threading.Event()

    def slowly() -> Path:
        assert found.wait(30)
        raise ProviderError("there is none")

    provider = Resilient([(LocalProvider(Engine(Settings(slowly))), None)], retries=0)
    assert provider.doing == ""
    asked = asyncio.create_task(provider.chat([{"role": "user", "content": "hello"}]))
    async with asyncio.timeout(20):
        while not provider.doing:
            await asyncio.sleep(0.01)
    found.set()
    with pytest.raises(ProviderError):
        await asked
    assert provider.doing == ""
    await provider.close()


async def test_a_users_truncated_file_is_a_one_line_error_with_advice(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(lambda: cut.write_bytes(weights(TINY).read_bytes()[:20_000_000]))
    engine = Engine(Settings(cut, window=512, slots=1))
    with pytest.raises(ProviderError) as caught:
        await engine.start()
    await engine.close()
    assert "\n" not in str(caught.value)
    assert "get it again" in str(caught.value)


async def test_the_spinner_of_a_terminal_shows_that_the_model_is_loading() -> None:
    async with terminal("chat", "--provider", "local", "--model", str(weights(TINY))) as screen:
        await screen.sees("/help shows")
        screen.type("hello\r")
        await screen.sees("loading")  # the screen draws only changes
        await until(lambda: screen.takes_keys)
        screen.type("\x04")
        assert await screen.ends() == 0
