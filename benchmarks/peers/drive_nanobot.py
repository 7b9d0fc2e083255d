"""nanobot, by its library. Sessions are always kept in its own files; its shipped tools stay registered."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from common import SCHEMA, Peer, echo, main, pair


class NanobotPeer(Peer):
    packages = ("nanobot-ai",)
    keeps = True

    async def start(self) -> None:
        workspace = os.path.join(self.folder, "workspace")
        os.makedirs(workspace, exist_ok=True)
        defaults = {"workspace": workspace, "model": self.model, "provider": "custom"}
        if self.stored:
            defaults |= {"contextWindowTokens": 10_000_000}  # a long history is sent whole, as the others do
        custom = {"apiKey": "none", "apiBase": self.base_url}
        path = os.path.join(self.folder, "config.json")
        settings = {"agents": {"defaults": defaults}, "providers": {"custom": custom}}
        await asyncio.to_thread(Path(path).write_text, json.dumps(settings))
        from loguru import logger

        logger.remove()  # it would print every step
        from nanobot import Nanobot
        from nanobot.agent.tools.base import Tool

        class Echo(Tool):
            name = "echo"
            description = "Echo the text."
            parameters = SCHEMA
            read_only = True

            async def execute(self, text: str, **_: Any) -> str:
                return await echo(text)

        self.bot = Nanobot.from_config(path)
        self.loop = self.bot._loop
        self.loop.tools.register(Echo())

    async def turn(self, session: str, text: str) -> str:
        key = f"bench:{session}"
        return str((await self.bot.run(text, session_key=key, channel="bench", chat_id=key)).content)

    async def seed(self, session: str, messages: int) -> None:
        stored = self.loop.sessions.get_or_create(f"bench:{session}")
        for number in range(messages // 2):
            user, assistant = pair(number)
            stored.add_message("user", user)
            stored.add_message("assistant", assistant)
        self.loop.sessions.save(stored)

    async def close(self) -> None:
        await self.bot.aclose()


if __name__ == "__main__":
    main(NanobotPeer)
