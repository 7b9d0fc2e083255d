"""XMPP, against a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.channels.access import tell
from everloop.channels.base import Options
from everloop.channels.xmpp import Xmpp
from everloop.channels.xmpp_stream import Stanzas, element, serialized, within
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import conform, running, shown_file
from tests.support.web_servers import answer, serving

from .says import Says, found, until
from .xmppd import PASSWORD, ROOM, XmppNetwork

CHATS = ("anna@localhost", "bert@localhost")


async def is_ready(store: SQLiteStore) -> bool:
    return '"error":""' in (await store.channel_state("xmpp")).get("status", "")


@pytest.fixture
async def xmpp() -> AsyncIterator[XmppNetwork]:
    async with XmppNetwork().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: XmppNetwork().running(), tmp_path, chats=CHATS, step=6)
    assert report.problems == []
    assert report.kills >= 2
    assert report.marked == 0  # sent messages are found in the archive


async def test_messages_from_offline_periods_are_answered_but_none_from_before_the_first_start(
    xmpp: XmppNetwork, tmp_path: Path
) -> None:
    xmpp.settings["start"] = "new"
    says = Says("hi")
    await xmpp.say("anna@localhost", "long ago")
    async with running(xmpp.settings, tmp_path, says) as store:
        await found(lambda: is_ready(store))
        await xmpp.say("anna@localhost", "one")
        await until(lambda: len(xmpp.heard("anna@localhost")) == 1)
    await xmpp.say("anna@localhost", "two")
    async with running(xmpp.settings, tmp_path, says):
        await until(lambda: len(xmpp.heard("anna@localhost")) == 2)
    assert says.asked == ["one", "two"]


async def test_a_room_is_a_group_and_its_people_are_identified_by_their_own_addresses(
    xmpp: XmppNetwork, tmp_path: Path
) -> None:
    xmpp.settings["rooms"] = [ROOM]
    says = Says("**all** of them")
    anna, eve = await xmpp.person("anna"), await xmpp.person("eve")
    await anna.join(ROOM)
    await eve.join(ROOM)
    async with running(xmpp.settings, tmp_path, says):
        await until(lambda: f"{ROOM}/ever" in anna.presences)
        await eve.tell(ROOM, "ever: what grows?", "groupchat")
        await anna.tell(ROOM, "nobody is meant", "groupchat")
        await anna.tell(ROOM, "ever: what is ripe?", "groupchat")
        await until(lambda: xmpp.heard(ROOM))
    await anna.tell(ROOM, "ever: and now?", "groupchat")
    async with running(xmpp.settings, tmp_path, says):
        await until(lambda: len(says.asked) == 2)
    assert says.asked == ["anna: what is ripe?", "anna: and now?"]
    assert set(xmpp.heard(ROOM)) == {"all of them"}


async def test_a_stranger_gets_nothing(xmpp: XmppNetwork, tmp_path: Path) -> None:
    says = Says("hi")
    async with running(xmpp.settings, tmp_path, says):
        await xmpp.say("eve@localhost", "hello")
        await xmpp.say("anna@localhost", "hello")
        await until(lambda: xmpp.heard("anna@localhost"))
        anna = await xmpp.person("anna")
        await until(lambda: "ever@localhost" in anna.states)
    assert (says.asked, xmpp.heard("eve@localhost")) == (["hello"], [])


async def test_a_message_to_a_missing_address_becomes_a_dead_letter(xmpp: XmppNetwork, tmp_path: Path) -> None:
    async with running(xmpp.settings, tmp_path) as store:
        await tell(store, "xmpp", "me", "nobody@localhost", "hello", "1")
        (dead,) = await found(lambda: store.dead_letters("xmpp"))
    assert "service-unavailable" in dead.reason


async def test_it_uses_tls_checks_the_certificate_and_shows_the_password_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    here = Path(__file__).parents[1] / "certificates"
    async with XmppNetwork(tls=(here / "localhost.pem", here / "localhost.key")).running() as xmpp:
        async with running(xmpp.settings, tmp_path) as store:
            state = await found(lambda: store.channel_state("xmpp"))
            assert "certificate verify failed" in state["status"]
        xmpp.settings["ca_file"] = str(here / "ca.pem")
        (tmp_path / "trusted").mkdir()
        async with running(xmpp.settings, tmp_path / "trusted") as store:
            await found(lambda: is_ready(store))
        xmpp.settings["password"] = wrong = "not-the-password"
        (tmp_path / "wrong").mkdir()
        async with running(xmpp.settings, tmp_path / "wrong") as store:
            state = await found(lambda: store.channel_state("xmpp"))
            assert "refuses the account or its password" in state["status"]
    assert PASSWORD not in caplog.text
    assert wrong not in caplog.text


def test_a_sent_message_is_one_element_whatever_its_text() -> None:
    body = element("{jabber:client}body", "a</body><presence/>\x00\ud800 & <b>")
    text = serialized(within(element("{jabber:client}message", to="x'\"<y"), body))
    stanzas = Stanzas()
    head = b"<stream:stream xmlns='jabber:client' xmlns:stream='http://etherx.jabber.org/streams'>"
    (read,) = list(stanzas.feed(head + text.encode()))
    assert (read.tag, read.get("to")) == ("{jabber:client}message", "x'\"<y")
    assert read.findtext("{jabber:client}body") == "a</body><presence/> & <b>"
    with pytest.raises(OSError, match="not allowed in a stream"):
        list(Stanzas().feed(b"<!DOCTYPE x [<!ENTITY a 'b'>]>"))


async def test_a_file_is_uploaded_and_its_address_sent(xmpp: XmppNetwork, tmp_path: Path) -> None:
    (tmp_path / "a list.txt").write_text("beans")
    (tmp_path / "huge.bin").write_bytes(bytes(1_000_001))
    model = ScriptedProvider([call("message", content="Here.", media=["a list.txt", "huge.bin"]), "Done."])
    async with running(xmpp.settings, tmp_path, model):
        await xmpp.say("anna@localhost", "go")
        await until(lambda: "Done." in xmpp.heard("anna@localhost"))
        (url,) = (await xmpp.person("anna")).files
        async with aiohttp.ClientSession() as http, http.get(url) as reply:
            assert await reply.read() == b"beans"
    text, file, refused, done = xmpp.heard("anna@localhost")
    assert (text, file, done) == ("Here.", shown_file("a list.txt"), "Done.")
    assert refused.startswith("[huge.bin cannot be sent here (the server refuses it: ")


async def test_without_an_upload_service_a_file_becomes_a_line_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("beans")
    model = ScriptedProvider([call("message", content="Here.", media=["a.txt"]), "Done."])
    async with XmppNetwork(uploads=False).running() as xmpp, running(xmpp.settings, tmp_path, model):
        await xmpp.say("anna@localhost", "go")
        await until(lambda: "Done." in xmpp.heard("anna@localhost"))
    assert xmpp.heard("anna@localhost")[1] == "[a.txt cannot be sent here (the server takes no files).]"


@pytest.mark.parametrize(("tls", "safe"), [("starttls", False), ("implicit", False), ("none", True)])
def test_a_file_is_sent_only_over_tls_unless_the_account_has_none(tls: str, safe: bool) -> None:
    made = Xmpp(Options("xmpp", {"jid": "ever@localhost", "password": "x", "tls": tls}))
    assert made._is_safe("https://upload.example.org/a")
    assert made._is_safe("http://upload.example.org/a") is safe
    assert not made._is_safe("file:///etc/passwd")


async def test_a_nick_in_a_room_is_never_mistaken_for_a_person_who_has_it_later(
    xmpp: XmppNetwork, tmp_path: Path
) -> None:
    """Neither in the archive, where the note of the sender's address may be forged by the sender, nor in waiting
    messages.
    """
    hidden = "hidden@rooms.localhost"
    xmpp.settings["rooms"] = [ROOM, hidden]
    says = Says("ok")
    eve, anna, bert = [await xmpp.person(name) for name in ("eve", "anna", "bert")]
    await bert.join(ROOM)  # they stay there
    await bert.join(hidden, form={"muc#roomconfig_whois": "moderators"})
    async with running(xmpp.settings, tmp_path, says):  # reads the archives from now on
        await until(lambda: {f"{ROOM}/ever", f"{hidden}/ever"} <= {*bert.presences})
    for room in (ROOM, hidden):
        await eve.join(room, "anna")
        await eve.tell(room, "ever: canary", "groupchat", note="anna@localhost")
        await eve.leave(room, "anna")
        await anna.join(room)
    await anna.tell(ROOM, "ever: what is ripe?", "groupchat")
    async with running(xmpp.settings, tmp_path, says):
        await until(lambda: says.asked)
        await anna.tell(ROOM, "ever: and now?", "groupchat")
        await until(lambda: len(says.asked) == 2)
    assert says.asked == ["anna: what is ripe?", "anna: and now?"]


async def test_a_waiting_message_stays_with_the_person_who_wrote_it(xmpp: XmppNetwork, tmp_path: Path) -> None:
    xmpp.settings["rooms"] = [ROOM]
    says, opened, held = Says("ok"), asyncio.Event(), asyncio.Event()
    eve, anna, bert = [await xmpp.person(name) for name in ("eve", "anna", "bert")]
    await bert.join(ROOM)
    await eve.join(ROOM, "anna")
    async with running(xmpp.settings, tmp_path, says) as store:
        await until(lambda: f"{ROOM}/ever" in bert.presences)
        accept = store.accept

        async def slowly(*args: Any) -> Any:
            held.set()
            await opened.wait()
            return await accept(*args)

        store.accept = slowly  # type: ignore[method-assign, assignment]
        await xmpp.say("anna@localhost", "hello")
        await held.wait()
        await eve.tell(ROOM, "ever: canary", "groupchat")  # it waits behind the other one
        await eve.leave(ROOM, "anna")
        await anna.join(ROOM)
        await anna.tell(ROOM, "ever: it is me", "groupchat")
        opened.set()
        await until(lambda: len(says.asked) == 2)
    assert sorted(says.asked) == ["anna: it is me", "hello"]


async def test_a_file_is_fetched_from_the_persons_address_but_not_from_the_private_network(
    xmpp: XmppNetwork, tmp_path: Path
) -> None:
    says, anna = Says("thanks"), await xmpp.person("anna")
    async with serving({"/my%20notes.txt": answer(b"the beans are ripe")}) as files:
        there = f"http://127.0.0.1:{files.port}/my%20notes.txt"
        async with running(xmpp.settings, tmp_path, says):
            for number, url in enumerate((there, "http://169.254.169.254/x"), 1):
                await anna.tell("ever@localhost", url, file=url)
                await until(lambda number=number: len(says.asked) == number)  # type: ignore[misc]
            await anna.tell("ever@localhost", "see", file="file:///etc/passwd")
            await until(lambda: len(says.asked) == 3)
        assert files.connections == 0
        xmpp.settings["private_hosts"] = [f"127.0.0.1:{files.port}"]
        async with running(xmpp.settings, tmp_path, says):
            await anna.tell("ever@localhost", "these", file=there)
            await until(lambda: len(says.asked) == 4)
    (kept,) = await asyncio.to_thread(lambda: list((tmp_path / "uploads").iterdir()))
    assert says.asked[:3] == ["[my notes.txt could not be fetched.]", "[x could not be fetched.]", "see"]
    assert says.asked[3] == f"these\n[attachment: {kept}]"
    assert await asyncio.to_thread(kept.read_bytes) == b"the beans are ripe"
