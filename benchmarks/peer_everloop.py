"""Everloop as a peer of the framework-overhead benchmark: every turn durable in SQLite, every step fsynced.

A driver in the form of that benchmark's `peers/` (copy it there, or put that folder on PYTHONPATH); run.py beside this
file needs nothing from outside.
"""

import asyncio
import os

from _common import Peer, block_tool, echo, main, prompt_for, seed_pair, sleep_tool  # type: ignore[import-not-found]


class EverloopPeer(Peer):  # type: ignore[misc]
    name = "everloop"
    dists = ("everloop", "aiohttp", "msgspec")
    imports = "from everloop import AgentLoop, MessageBus, tool; from everloop.providers.openai import OpenAIProvider"
    cli = "everloop"
    can_stream = True
    can_persist = True
    has_bus = True

    async def start(self):
        from everloop import AgentLoop, MessageBus, tool
        from everloop.providers.openai import OpenAIProvider

        provider = OpenAIProvider(self.base_url, "sk-fake", self.model)
        self.messages = MessageBus()
        self.agent = AgentLoop(
            self.messages,
            provider,
            os.path.join(self.workdir, "workspace"),
            store=os.path.join(self.workdir, "bench.db"),
        )
        for name in list(self.agent.tools.names):
            self.agent.tools.unregister(name)
        self.agent.tools.register(tool({"echo": echo, "sleep": sleep_tool, "block": block_tool}[self.ctx.tool]))

    async def open(self, sid):
        return f"bench:{sid}"

    async def turn(self, key, prompt):
        return await self.agent.process_direct(prompt, session_key=key)

    async def stream(self, key, prompt, on_text):
        from everloop.events import Text

        return await self.agent.process_direct(
            prompt, session_key=key, on_event=lambda event: on_text() if isinstance(event, Text) else None
        )

    async def seed(self, sid, n):
        sessions = self.agent.sessions
        session = sessions.get_or_create(f"bench:{sid}")
        for i in range(n // 2):
            user, assistant = seed_pair(i)
            session.add_message("user", user)
            session.add_message("assistant", assistant)
        await asyncio.to_thread(sessions.save, session)

    async def bus(self, n):
        from everloop import InboundMessage

        running = asyncio.create_task(self.agent.run())
        for i in range(n):
            await self.messages.publish_inbound(InboundMessage("bench", "user", f"b{i}", prompt_for(f"b{i}")))
        replies = {}
        for _ in range(n):
            message = await self.messages.consume_outbound()
            replies[message.chat_id] = message.content
        self.agent.stop()
        await running
        return {"replies": replies}

    async def close(self):
        await self.agent.close()


if __name__ == "__main__":
    main(EverloopPeer)
