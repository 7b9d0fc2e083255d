"""What a chat shows before the answer: typing, and a draft that is edited and then removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everloop import LLMProvider, LLMResponse
from everloop.channels import preview
from everloop.channels.access import tell
from everloop.channels.discord import Discord
from everloop.channels.links import ALONE, LEFT
from everloop.channels.slack import Slack
from everloop.channels.telegram import Telegram
from everloop.providers.base import Delta
from everloop.testing.channels import running

from .fake_discord import FakeDiscord
from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .says import Says, found, until
from .test_promises import ALLOWED, CHATS, WHO

FIRST, SECOND = "The beans are nearly ", "ripe, and the peas as well."


class Writes(LLMProvider):
    """A model that continues writing when told to."""

    default_model = "writes"

    def __init__(self) -> None:
        self.starts, self.goes_on, self.ends = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.starts.set()
        self.begun = 0

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        return LLMResponse(FIRST + SECOND)

    async def stream(
        self, messages: Any, tools: Any = None, model: str | None = None
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        self.begun += 1
        await self.starts.wait()
        yield Delta(text=FIRST)
        await self.goes_on.wait()
        yield Delta(text=SECOND)
        await self.ends.wait()
        yield LLMResponse(FIRST + SECOND)


@pytest.fixture(params=["telegram", "slack", "discord"])
async def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    for kind in (Telegram, Slack, Discord):
        monkeypatch.setattr(kind, "can", replace(kind.can, pace=0.02))
    async with _network(request.param) as made:
        yield made


@asynccontextmanager
async def _network(name: str) -> AsyncIterator[Any]:
    kind = {"telegram": FakeTelegram, "slack": FakeSlack, "discord": FakeDiscord}[name]
    async with kind().running() as made:
        yield made


def chat_of(network: Any) -> str:
    return "D7" if isinstance(network, FakeSlack) else "7"


def changes(network: Any) -> list[str]:
    """Return the texts that a message was changed to."""
    changed = network.updated if isinstance(network, FakeSlack) else network.edited
    return [one.get("text") or one["content"] for one in changed]


async def test_text_is_shown_as_it_arrives_and_the_answer_replaces_it(network: Any, tmp_path: Path) -> None:
    model, chat = Writes(), chat_of(network)
    async with running(network.settings, tmp_path, model) as store:
        await network.say(chat, "are the beans ripe?")
        await until(lambda: network.heard(chat))
        assert network.heard(chat) == [FIRST + "…"]
        name = network.settings["name"]
        await found(lambda: _has_draft(store, name))
        model.goes_on.set()
        await until(lambda: changes(network))
        assert changes(network)[-1].endswith(SECOND + " …")
        model.ends.set()
        await until(lambda: network.heard(chat) == [FIRST + SECOND])
        assert len(network.deleted) == 1
        await found(lambda: _is_clean(store, name))


async def test_a_notice_in_the_chat_does_not_end_the_preview_of_its_turn(network: Any, tmp_path: Path) -> None:
    model, chat, name = Writes(), chat_of(network), network.settings["name"]
    async with running(network.settings, tmp_path, model) as store:
        await network.say(chat, "are the beans ripe?")
        await until(lambda: network.heard(chat) == [FIRST + "…"])
        await tell(store, name, "me", chat, "Person 8 is paired.", "notice")
        await until(lambda: "Person 8 is paired." in network.heard(chat))
        model.goes_on.set()
        await until(lambda: changes(network) and changes(network)[-1].endswith(SECOND + " …"))
        model.ends.set()
        await until(lambda: network.heard(chat)[-1] == FIRST + SECOND)
        await found(lambda: _is_clean(store, name))


async def test_the_next_message_of_a_chat_has_a_preview_too(network: Any, tmp_path: Path) -> None:
    model, chat, name = Writes(), chat_of(network), network.settings["name"]
    async with running(network.settings, tmp_path, model) as store:
        await network.say(chat, "are the beans ripe?")
        await until(lambda: network.heard(chat) == [FIRST + "…"])
        await network.say(chat, "and the peas?")
        await found(lambda: _waits(store, f"{name}:{chat}"))
        model.goes_on.set()
        await until(lambda: changes(network))
        model.goes_on.clear()
        model.ends.set()
        await until(lambda: network.heard(chat) == [FIRST + SECOND, FIRST + "…"])
        model.goes_on.set()
        await until(lambda: network.heard(chat) == [FIRST + SECOND, FIRST + SECOND])
        await found(lambda: _is_clean(store, name))


async def test_the_draft_of_a_stopped_turn_is_removed_at_once(network: Any, tmp_path: Path) -> None:
    model, chat, name = Writes(), chat_of(network), network.settings["name"]
    async with running(network.settings, tmp_path, model) as store:
        await network.say(chat, "are the beans ripe?")
        await found(lambda: _has_draft(store, name))
        began = asyncio.get_running_loop().time()
        await network.say(chat, "/stop" if name != "slack" else " /stop")
        await found(lambda: _is_clean(store, name))
        assert asyncio.get_running_loop().time() - began < preview.ANSWER_SECONDS / 2
        await until(lambda: FIRST + "…" not in network.heard(chat))


async def test_the_draft_of_a_process_that_died_is_removed(network: Any, tmp_path: Path) -> None:
    chat, name = chat_of(network), network.settings["name"]
    async with running(network.settings, tmp_path, Writes()) as store:
        await network.say(chat, "are the beans ripe?")
        await found(lambda: _has_draft(store, name))
    assert network.deleted == []
    async with running(network.settings, tmp_path, Says("Yes.")) as store:
        await until(lambda: network.heard(chat) == ["Yes."])
        await found(lambda: _is_clean(store, name))


async def test_nothing_is_shown_before_the_answer_if_the_settings_disable_it(network: Any, tmp_path: Path) -> None:
    network.settings["stream"] = False
    model, chat = Writes(), chat_of(network)
    model.goes_on.set()
    model.ends.set()
    async with running(network.settings, tmp_path, model):
        await network.say(chat, "are the beans ripe?")
        await until(lambda: network.heard(chat))
    assert network.heard(chat) == [FIRST + SECOND]
    assert (changes(network), network.deleted) == ([], [])


async def test_typing_is_shown_while_the_turn_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "TYPING_SECONDS", 0.05)
    async with FakeDiscord().running() as discord:
        discord.settings["stream"] = False
        model = Writes()
        async with running(discord.settings, tmp_path, model):
            await discord.say("1", "hello")
            await until(lambda: len(discord.typing) >= 3)
            model.goes_on.set()
            model.ends.set()
            await until(lambda: discord.heard("1") == [FIRST + SECOND])


async def test_a_chat_that_left_a_session_is_shown_no_more_of_it(network: Any, tmp_path: Path) -> None:
    model, kind = Writes(), network.settings["name"]
    network.settings["allow"] = ALLOWED[kind]
    home, other = CHATS[kind]

    async def say(chat: str, text: str) -> None:
        await network.say(chat, text, **WHO[kind](chat))

    async with running(network.settings, tmp_path, model) as store:
        await link_chats(network, say, home, other)
        model.starts.clear()
        await say(home, "write it")
        await until(lambda: model.begun)
        await say(other, "and for me?")  # waits behind the first
        await found(lambda: _waits(store, f"{kind}:{home}"))
        model.starts.set()
        await until(lambda: network.heard(other)[-1] == FIRST + "…")
        await say(home, " /unlink")
        await until(lambda: ALONE in network.heard(home))
        model.goes_on.set()
        await asyncio.sleep(0.5)  # 25 times as long as between two changes of a draft
        assert [text for text in network.heard(other) if SECOND in text] == []
        model.ends.set()
        await until(lambda: network.heard(other)[-1] == LEFT)  # nor is it sent the answer to its own message
        await found(lambda: _is_clean(store, kind))


async def link_chats(network: Any, say: Callable[[str, str], Awaitable[None]], home: str, other: str) -> None:
    """Let another chat join the session of the first."""
    await say(home, " /link")
    await until(lambda: network.heard(home))
    await say(other, f" /link {network.heard(home)[0].split()[4][:8]}")
    await until(lambda: len(network.heard(home)) == 2 and network.heard(other))


@pytest.mark.parametrize("busy", ["queue", "steer"])
async def test_a_draft_is_removed_even_if_the_turn_is_answered_in_another_chat(
    network: Any, busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because it was stopped from there, or because the message was steered into the turn of that chat."""
    monkeypatch.setattr(preview, "ANSWER_SECONDS", 0.2, raising=False)
    model, kind = Writes(), network.settings["name"]
    network.settings["allow"] = ALLOWED[kind]
    home, other = CHATS[kind]

    async def say(chat: str, text: str) -> None:
        await network.say(chat, text, **WHO[kind](chat))

    async with running(network.settings, tmp_path, model, busy=busy) as store:
        await link_chats(network, say, home, other)
        model.starts.clear()
        await say(home, "write it")
        await until(lambda: model.begun)
        if busy == "steer":
            await say(other, "and more")
            await found(lambda: _waits(store, f"{kind}:{home}"))
        model.starts.set()
        await until(lambda: network.heard(other if busy == "steer" else home)[-1] == FIRST + "…")
        await found(lambda: _has_draft(store, kind))
        model.goes_on.set()
        if busy == "queue":
            await say(other, " /stop")
        model.ends.set()
        await found(lambda: _is_clean(store, kind))
    assert FIRST + "…" not in network.heard(other) + network.heard(home)


async def _waits(store: Any, session: str) -> bool:
    return bool(await store.waiting("me", session))


async def _has_draft(store: Any, name: str) -> bool:
    return any(key.startswith("draft:") for key in await store.channel_state(name))


async def _is_clean(store: Any, name: str) -> bool:
    return not await _has_draft(store, name)


async def test_a_draft_is_edited_no_faster_than_the_network_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Telegram, "can", replace(Telegram.can, pace=0.3))
    changed: list[float] = []
    show = Telegram.show

    async def noted(self: Telegram, chat: str, key: str, text: str) -> str | None:
        if text:
            changed.append(time.monotonic())
        return await show(self, chat, key, text)

    monkeypatch.setattr(Telegram, "show", noted)

    class Slowly(LLMProvider):
        default_model = "slowly"

        async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
            raise AssertionError("it streams")

        async def stream(
            self, messages: Any, tools: Any = None, model: str | None = None
        ) -> AsyncGenerator[Delta | LLMResponse, None]:
            for _ in range(60):
                yield Delta(text="a word, and another one. ")
                await asyncio.sleep(0.025)
            yield LLMResponse("done")

    async with FakeTelegram().running() as telegram, running(telegram.settings, tmp_path, Slowly()):
        await telegram.say("7", "tell me")
        await until(lambda: telegram.heard("7") == ["done"])
    assert len(changed) >= 2
    assert min(after - before for before, after in pairwise(changed)) >= 0.29
