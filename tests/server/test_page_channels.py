"""Chat networks over the page's API: for the operator alone."""

from __future__ import annotations

import time
from pathlib import Path

from everloop.channels.access import Pairings
from everloop.config import ChannelConfig

from .feeds import PageClient
from .serving import serving

CHANNEL = ChannelConfig(name="telegram", options={"token": "1:secret-never-shown"})


async def test_the_operator_sees_channels_and_pairs_people_and_others_do_not(tmp_path: Path) -> None:
    async with serving(tmp_path, channels=(CHANNEL,)) as server:
        pending = f'{{"code":"K7PXW2QD","sender":"9","chat":"9","name":"Nina","at":{time.time()}}}'
        await server.store.set_channel_state("telegram", "code:K7PXW2QD", pending)
        pairings = Pairings(server.store, "telegram")
        user, operator = PageClient(server.url, server.http), PageClient(server.url, server.http)
        user.headers = (await server.client("ada", rights="use")).headers
        operator.headers = (await server.client("ops", rights="use,admin")).headers
        assert (await user.api("GET", "channels"))[0] == 403
        assert (await user.api("POST", "channels/pair", {"code": "K7PXW2QD"}))[0] == 403
        assert await pairings.peers() == {}
        status, body = await operator.api("GET", "channels")
        assert (status, body["channels"][0]["pending"][0]["code"]) == (200, "K7PXW2QD")
        assert "never-shown" not in str(body)
        status, body = await operator.api("POST", "channels/pair", {"code": "k7px-w2qd"})
        assert (status, body["said"]) == (200, "Paired Nina (telegram:9).")
        assert set(await pairings.peers()) == {"9"}
        status, body = await operator.api("POST", "channels/pair", {"code": "K7PXW2QD"})
        assert (status, "no valid code" in str(body)) == (400, True)
