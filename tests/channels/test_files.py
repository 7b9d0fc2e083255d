"""Files that people send: they go into the workspace, up to a limit, and only from people who are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.files import name_of
from everloop.channels.http import HttpClient
from everloop.testing.channels import running
from tests.support.web_servers import serving

from .fake_discord import FakeDiscord
from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .says import Says, until

KINDS: dict[str, Any] = {"telegram": FakeTelegram, "slack": FakeSlack, "discord": FakeDiscord}


@pytest.fixture(params=list(KINDS))
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with KINDS[request.param]().running() as made:
        yield made


def chat_of(network: Any, number: int = 7) -> str:
    return f"D{number}" if isinstance(network, FakeSlack) else str(number)


async def test_a_file_goes_into_the_workspace_if_its_sender_is_answered(network: Any, tmp_path: Path) -> None:
    network.settings["media_mb"] = 1
    says, chat = Says("thanks"), chat_of(network)
    async with running(network.settings, tmp_path, says):
        await network.attach(chat_of(network, 9), "canary.txt", b"of a stranger", sender=9)
        await network.attach(chat, "notes.txt", b"the beans are ripe")
        await until(lambda: len(says.asked) == 1)
        await network.attach(chat, "huge.bin", b"x", size=2_000_000)
        await until(lambda: len(says.asked) == 2)
        await network.attach(chat, "liar.bin", b"x" * 1_200_000, size=10)
        await until(lambda: len(says.asked) == 3)
    saved = await asyncio.to_thread(lambda: sorted((tmp_path / "uploads").iterdir()))
    assert [one.name.rpartition("-")[2] for one in saved] == ["notes.txt"]
    assert await asyncio.to_thread(saved[0].read_bytes) == b"the beans are ripe"
    assert says.asked[0] == f"[attachment: {saved[0]}]"
    assert says.asked[1:] == [f"[{name} is larger than 1 MB, and was not taken.]" for name in ("huge.bin", "liar.bin")]
    assert network.downloads == ["notes.txt", "liar.bin"]


@pytest.mark.parametrize("kind", ["slack", "discord"])
async def test_a_file_on_another_server_is_not_fetched(kind: str, tmp_path: Path) -> None:
    async with KINDS[kind]().running() as network, serving() as canary:
        says = Says("ok")
        async with running(network.settings, tmp_path, says):
            await network.attach(chat_of(network), "x", b"", url=f"http://127.0.0.1:{canary.port}/x")
            await until(lambda: says.asked)
    assert says.asked == ["[x could not be fetched.]"]
    assert canary.connections == 0


async def test_a_link_in_the_workspace_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "uploads").symlink_to(tmp_path / "outside")
    async with FakeTelegram().running() as telegram:
        says = Says("ok")
        async with running(telegram.settings, tmp_path / "work", says):
            await telegram.attach("7", "canary.txt", b"x")
            await until(lambda: says.asked)
    assert says.asked == ["[canary.txt could not be kept.]"]
    assert await asyncio.to_thread(lambda: list((tmp_path / "outside").iterdir())) == []


def test_a_name_stays_in_its_folder() -> None:
    for given in ("../../etc/passwd", "/etc/passwd", "..", "", "a\0b/.c", "x" * 500, "\ud800"):
        made = name_of("telegram", "7:1", 0, given)
        assert made.startswith("telegram-")
        assert "/" not in made
        assert "\0" not in made
        assert len(made) < 120
    first, again, second = (name_of("telegram", "7:1", number, "a") for number in (0, 0, 1))
    assert first == again != second


@pytest.mark.parametrize("value", ["a\nX: canary", "a\rX: canary", "a\r\nX: canary", "a\0"])
async def test_no_request_header_can_contain_another_one(value: str) -> None:
    async with FakeTelegram().running() as telegram:
        client = HttpClient(telegram.settings["base_url"])
        for target, headers in (("/", {"X-Name": value}), (f"/{value}", {}), ("/", {value: "x"})):
            with pytest.raises(ValueError, match="line end"):
                await client.request("GET", target, headers, b"", 5)
        await client.close()
    assert telegram.calls == []
