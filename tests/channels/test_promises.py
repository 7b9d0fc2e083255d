"""What every network promises: two workers share an account, a flood from one sender delays no other, and order."""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from everloop import LLMProvider, LLMResponse
from everloop.channels.access import tell
from everloop.channels.base import SHIPPED
from everloop.store.base import Store
from everloop.testing import call
from everloop.testing.channels import Forker, Report, running, take_over

from .flood import check_flood
from .ircd import IrcNetwork
from .networks import NETWORKS
from .says import Says, found, until

# The chats of two people, and how they write there, if the network's own person is always the same one.
CHATS = {
    "webhook": ("anna", "bert"),
    "telegram": ("7", "8"),
    "slack": ("D7", "D8"),
    "discord": ("7", "8"),
    "xmpp": ("anna@localhost", "bert@localhost"),
    "irc": ("anna", "bert"),
    "email": ("anna@example.org", "bert@example.org"),
}
WHO: dict[str, Callable[[str], dict[str, Any]]] = {
    "webhook": lambda chat: {"sender": chat},
    "telegram": lambda chat: {"sender": int(chat)},
    "slack": lambda chat: {"user": f"U{chat[1:]}"},
    "discord": lambda chat: {"user": chat},
}


def _oneself(chat: str) -> dict[str, Any]:
    return {}


ALLOWED = {"webhook": ["anna", "bert"], "telegram": ["7", "8"], "slack": ["U7", "U8"], "discord": ["7", "8"]}


@pytest.mark.timeout(300)
async def test_one_of_two_workers_polls_and_the_other_takes_over(tmp_path: Path) -> None:
    made = {kind: new() for kind, new in NETWORKS.items()}
    report = Report()
    async with Forker() as forker:
        for kind, network in made.items():
            report.add(await take_over(network.running, tmp_path / kind, chats=CHATS[kind], forker=forker))
    assert report.problems == []
    assert report.kills == len(NETWORKS)
    assert made["telegram"].conflicts == 0


@pytest.mark.parametrize("kind", NETWORKS)
async def test_a_flood_from_one_person_delays_no_other_and_is_answered_in_order(kind: str, tmp_path: Path) -> None:
    loud, quiet = CHATS[kind]
    async with NETWORKS[kind]().running() as network:
        if kind in ALLOWED:
            network.settings["allow"] = ALLOWED[kind]
        await check_flood(network, tmp_path, loud, quiet, WHO.get(kind, _oneself))


class Works(LLMProvider):
    """Looks into the workspace until it is told something else, and then says what it was told."""

    default_model = "works"

    def __init__(self) -> None:
        self.asked = 0

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        self.asked += 1
        told = [str(one["content"]) for one in messages if one["role"] == "user"]
        if len(told) == 1:
            await asyncio.sleep(0.1)
            return LLMResponse(None, [call("list_dir")])
        return LLMResponse(" and ".join(told))


@pytest.mark.parametrize("kind", NETWORKS)
async def test_a_running_turn_is_steered_and_stopped_from_its_chat(kind: str, tmp_path: Path) -> None:
    chat, works = CHATS[kind][0], Works()

    async def heard(number: int) -> list[str]:
        texts: list[str] = await asyncio.to_thread(network.heard, chat)
        return texts if len(texts) >= number else []

    async with NETWORKS[kind]().running() as network:
        network.settings["stream"] = False
        say = partial(network.say, chat, **WHO.get(kind, _oneself)(chat))
        async with running(network.settings, tmp_path, works, busy="steer"):
            await say("dig")
            await until(lambda: works.asked)
            await say("here")
            assert await found(lambda: heard(1)) == ["dig and here"]
            await say(" /new")
            await found(lambda: heard(2))
            asked = works.asked
            await say("dig again")
            await until(lambda: works.asked > asked)
            await say(" /stop")
            assert "Stopped. The work so far is kept." in await found(lambda: heard(3))


FRIENDS = {**ALLOWED, "irc": ["anna!~anna@127.0.0.1"]}
STRANGERS: dict[str, tuple[str, dict[str, Any]]] = {
    "webhook": ("eve", {"sender": "eve"}),
    "telegram": ("66", {"sender": 66}),
    "slack": ("D66", {"user": "U66"}),
    "discord": ("66", {"user": "66"}),
    "xmpp": ("eve@localhost", {}),
    "irc": ("eve", {}),
    "email": ("eve@example.net", {"Authentication_Results": "mx.home.test; dkim=pass header.d=example.net"}),
}


@pytest.mark.timeout(300)
async def test_a_stranger_gets_nothing_on_any_network(tmp_path: Path) -> None:
    for kind, new in NETWORKS.items():
        says, folder = Says("ok"), tmp_path / kind
        folder.mkdir()
        (chat, who), friend = STRANGERS[kind], CHATS[kind][0]
        async with new().running() as network:
            network.settings["allow"] = FRIENDS.get(kind, network.settings["allow"])
            async with running(network.settings, folder, says) as store:
                for text in ("canary", "/status", "/pair ABCDEFGH", "yes"):
                    await network.say(chat, text, **who)
                await network.say(friend, "hello", **WHO.get(kind, _oneself)(friend))
                await until(lambda: network.heard(friend))  # noqa: B023
                assert len(await store.sessions("me")) == 1, kind
        assert says.asked == ["hello"], kind
        assert network.heard(chat) == [], kind


SECRETS = ("token", "secret", "password", "bot_token", "app_token", "signing_secret")


@pytest.mark.parametrize("kind", NETWORKS)
async def test_no_secret_is_in_a_log_of_any_library_or_in_the_store(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the network answers, and when it no longer does, with everything that can be logged."""
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)
    chat, network = CHATS[kind][0], IrcNetwork(password="never-shown-here") if kind == "irc" else NETWORKS[kind]()
    async with network.running():
        if kind == "irc":
            network.settings["password"] = "never-shown-here"
        async with running(network.settings, tmp_path, Says("ok")):
            await network.say(chat, "hello", **WHO.get(kind, _oneself)(chat))
            await until(lambda: network.heard(chat))
    async with running(network.settings, tmp_path, Says("ok")) as store:
        if kind != "webhook":  # which waits for requests
            await found(partial(_fails, store, network.settings["name"]))
        await tell(store, network.settings["name"], "me", chat, "hello?", "1")
        await asyncio.sleep(0.5)
    held = b"".join(path.read_bytes() for path in tmp_path.glob("store.db*"))
    told = f"{caplog.text}{''.join(capfd.readouterr())}{held!r}"
    secrets = [network.settings[key] for key in SECRETS if key in network.settings]
    assert secrets
    for secret in secrets:
        forms = {secret, quote(secret, safe=""), b64encode(secret.encode()).decode().rstrip("=")[:-1]}
        assert [form for form in forms if form in told] == []


async def _fails(store: Store, name: str) -> bool:
    status = (await store.channel_state(name)).get("status", "")
    return bool(status) and '"error":""' not in status


def test_the_documented_promises_of_each_network_are_its_own() -> None:
    """Its class of repeats, and whether it has ids by which a message is taken once."""
    words = {"marked": "none", "marked; invisible for": "window", "invisible": "key", "marked, with the same": "none"}
    page = (Path(__file__).parents[2] / "docs" / "channels.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert {network for network, _, _ in rows} == set(SHIPPED)
    for network, told, taken in rows:
        module, _, name = SHIPPED[network].partition(":")
        can = getattr(import_module(f"everloop.channels.{module}"), name).can
        assert can.repeats == words[max((start for start in words if told.startswith(start)), key=len)], network
        assert can.ids == taken.startswith("once"), network
