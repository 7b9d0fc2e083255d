"""Everloop: `AgentLoop` with its SQLite store. Every turn is durable, in all scenarios."""

from __future__ import annotations

import asyncio
import os

from common import Peer, echo, main, pair


class Everloop(Peer):
    packages = ("everloop",)
    keeps = True
    read_only = True  # what the calls are: they change nothing

    async def start(self) -> None:
        from everloop import AgentLoop, Config, MessageBus, tool
        from everloop.providers.openai import OpenAIProvider

        provider = OpenAIProvider(self.base_url, None, self.model)
        config = Config(window=100_000_000)  # a long history is sent whole, as the others do
        store = os.path.join(self.folder, "everloop.db")
        self.agent = AgentLoop(MessageBus(), provider, self.folder, config=config, store=store)
        for name in list(self.agent.tools.names):
            self.agent.tools.unregister(name)
        self.agent.tools.register(tool(read_only=self.read_only)(echo))

    async def turn(self, session: str, text: str) -> str:
        return await self.agent.process_direct(text, session_key=f"bench:{session}")

    async def resume(self, session: str) -> None:
        await self.agent.resume(f"bench:{session}")

    async def seed(self, session: str, messages: int) -> None:
        sessions = self.agent.sessions
        stored = sessions.get_or_create(f"bench:{session}")
        for number in range(messages // 2):
            user, assistant = pair(number)
            stored.add_message("user", user)
            stored.add_message("assistant", assistant)
        await asyncio.to_thread(sessions.save, stored)

    async def close(self) -> None:
        await self.agent.close()


if __name__ == "__main__":
    main(Everloop)
