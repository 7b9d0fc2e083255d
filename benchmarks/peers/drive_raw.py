"""The lower bound: a hand-written loop on aiohttp. It keeps sessions in memory and nothing on disk."""

from __future__ import annotations

import json
from typing import Any

from common import INSTRUCTIONS, SCHEMA, Peer, echo, main, pair

SYSTEM = {"role": "system", "content": INSTRUCTIONS}
TOOL = {"type": "function", "function": {"name": "echo", "description": "Echo the text.", "parameters": SCHEMA}}


class Raw(Peer):
    packages = ("aiohttp",)

    async def start(self) -> None:
        import aiohttp

        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.sessions: dict[str, list[dict[str, Any]]] = {}

    async def turn(self, session: str, text: str) -> str:
        messages = self.sessions.setdefault(session, [SYSTEM])
        messages.append({"role": "user", "content": text})
        while True:
            body = {"model": self.model, "messages": messages, "tools": [TOOL]}
            async with self.http.post(f"{self.base_url}/chat/completions", json=body) as response:
                message = (await response.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for call in message["tool_calls"]:
                result = await echo(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def seed(self, session: str, messages: int) -> None:
        history = self.sessions.setdefault(session, [SYSTEM])
        for number in range(messages // 2):
            user, assistant = pair(number)
            history += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    async def close(self) -> None:
        await self.http.close()


if __name__ == "__main__":
    main(Raw)
