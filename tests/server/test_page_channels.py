"""Chat networks over the page's API: owners see their own, and an operator all of them."""

from __future__ import annotations

import time
from pathlib import Path

from everloop.bus import InboundMessage, OutboundMessage
from everloop.channels.access import Pairings
from everloop.config import ChannelConfig
from everloop.store.base import Store

from .feeds import PageClient
from .serving import Serving, serving

MINE = ChannelConfig(name="telegram", options={"token": "1:secret-never-shown"})
ADAS = ChannelConfig(name="slack", owner="ada", options={"token": "xoxb-never-shown"})
CODES = {"telegram": "K7PXW2QD", "slack": "M9RTY3HF"}


async def visitor(server: Serving, name: str, rights: str = "use") -> PageClient:
    made = PageClient(server.url, server.http)
    made.headers = (await server.client(name, rights=rights)).headers
    return made


async def code_in(store: Store, channel: str) -> None:
    code = CODES[channel]
    pending = f'{{"code":"{code}","sender":"9","chat":"9","name":"Nina","at":{time.time()}}}'
    await store.set_channel_state(channel, f"code:{code}", pending)


async def bury(store: Store, channel: str, owner: str, text: str) -> int:
    """A message that its channel could not deliver."""
    about = InboundMessage(channel, "9", "9", "hello", id=f"{channel}:{text}", owner=owner)
    await store.answer(about, [OutboundMessage(channel, "9", text)])
    (row,) = await store.take_outgoing("worker", 1, None, [channel])
    assert await store.bury(row.id, "worker", "HTTP 403")
    return row.id


async def test_owners_see_and_pair_their_own_channels_and_the_operator_all(tmp_path: Path) -> None:
    async with serving(tmp_path, channels=(MINE, ADAS)) as server:
        for channel in CODES:
            await code_in(server.store, channel)
        ada, eve, operator = [await visitor(server, *one) for one in (("ada",), ("eve",), ("ops", "use,admin"))]
        seen = {}
        for who, name in ((ada, "ada"), (eve, "eve"), (operator, "ops")):
            status, body = await who.api("GET", "channels")
            assert (status, body["operator"]) == (200, name == "ops")
            assert "never-shown" not in str(body)
            seen[name] = {one["name"]: [two["code"] for two in one["pending"]] for one in body["channels"]}
        assert seen == {
            "ada": {"slack": ["M9RTY3HF"]},
            "eve": {},
            "ops": {"telegram": ["K7PXW2QD"], "slack": ["M9RTY3HF"]},
        }
        for code in CODES.values():
            assert (await eve.api("POST", "channels/pair", {"code": code}))[0] == 400
        assert (await ada.api("POST", "channels/pair", {"code": CODES["telegram"]}))[0] == 400
        assert (await ada.api("POST", "channels/pair", {"code": CODES["slack"], "admin": True}))[0] == 403
        pairings = {channel: Pairings(server.store, channel) for channel in CODES}
        assert [await one.peers() for one in pairings.values()] == [{}, {}]
        assert (await ada.api("POST", "channels/pair", {"code": CODES["slack"]}))[0] == 200
        status, body = await operator.api("POST", "channels/pair", {"code": "k7px-w2qd", "admin": True})
        assert (status, body["said"]) == (200, "Paired Nina (telegram:9).")
        assert [{one.sender: one.admin for one in (await found.peers()).values()} for found in pairings.values()] == [
            {"9": True},
            {"9": False},
        ]
        status, body = await operator.api("POST", "channels/pair", {"code": "K7PXW2QD"})
        assert (status, "no valid code" in str(body)) == (400, True)


async def test_undelivered_messages_are_shown_and_sent_again_by_their_owner_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, channels=(MINE, ADAS)) as server:
        mine = await bury(server.store, "telegram", "me", "for the operator")
        adas = await bury(server.store, "slack", "ada", "for Ada")
        ada, operator = await visitor(server, "ada"), await visitor(server, "ops", "use,admin")
        (shown,) = (await ada.api("GET", "channels"))[1]["channels"]
        assert [(one["id"], one["reason"], one["text"]) for one in shown["dead"]] == [(adas, "HTTP 403", "for Ada")]
        assert (await ada.api("POST", "channels/telegram/resend", {"ids": [mine]}))[0] == 404
        assert (await ada.api("POST", "channels/slack/resend", {"ids": [mine]})) == (200, {"ids": []})
        assert [one.id for one in await server.store.dead_letters()] == [mine, adas]
        assert (await ada.api("POST", "channels/slack/resend", {"ids": [adas]})) == (200, {"ids": [adas]})
        assert [one.id for one in await server.store.dead_letters()] == [mine]
        (row,) = await server.store.take_outgoing("worker", 9, None, ["slack"])
        assert (row.id, row.message.content) == (adas, "for Ada")
        assert (await operator.api("POST", "channels/telegram/resend", {"ids": [mine]}))[1] == {"ids": [mine]}
