"""An agent hears what others have done, also where the store was away when it first wanted to."""

from __future__ import annotations

import pytest

from everloop import AgentLoop, MessageBus
from everloop.errors import StoreError
from everloop.runtime.peers import wake_all
from everloop.store.news import News
from everloop.testing import ScriptedProvider

from ..commands import until
from .steps import away_once


async def test_who_could_not_join_the_others_can_do_so_later(store, tmp_path, monkeypatch):
    away_once(store, "join", monkeypatch)
    heard: list[News] = []
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=store) as agent:
        with pytest.raises(StoreError):
            await agent._listening.join(heard.append)
        await agent._listening.join(heard.append)
        await until(lambda: heard)
        heard.clear()
        await wake_all(store)
        await until(lambda: heard)
