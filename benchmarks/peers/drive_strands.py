"""strands-agents: one agent object for each session. Sessions: `FileSessionManager`; the whole history is sent."""

from __future__ import annotations

import os
from typing import Any

from common import INSTRUCTIONS, Peer, echo, main, pair


class Strands(Peer):
    packages = ("strands-agents", "openai")
    keeps = True

    async def start(self) -> None:
        from openai import AsyncOpenAI
        from strands import Agent, tool
        from strands.models.openai import OpenAIModel

        self.agent_type, self.tool = Agent, tool(echo)
        client = AsyncOpenAI(base_url=self.base_url, api_key="none")
        self.llm = OpenAIModel(client=client, model_id=self.model)
        self.agents: dict[str, Any] = {}

    def _agent(self, session: str) -> Any:
        if session in self.agents:
            return self.agents[session]
        kept: dict[str, Any] = {}
        if self.stored:
            from strands.agent.conversation_manager import NullConversationManager
            from strands.session.file_session_manager import FileSessionManager

            files = FileSessionManager(session_id=session, storage_dir=os.path.join(self.folder, "sessions"))
            kept = {"session_manager": files, "agent_id": "bench", "conversation_manager": NullConversationManager()}
        agent = self.agent_type(
            model=self.llm, tools=[self.tool], system_prompt=INSTRUCTIONS, callback_handler=None, **kept
        )
        if self.stored:
            self.agents[session] = agent
        return agent

    async def turn(self, session: str, text: str) -> str:
        result = await self._agent(session).invoke_async(text)
        return "".join(block.get("text", "") for block in result.message["content"])

    async def seed(self, session: str, messages: int) -> None:
        agent = self._agent(session)
        manager = agent._session_manager
        for number in range(messages // 2):
            for role, text in zip(("user", "assistant"), pair(number), strict=True):
                manager.append_message({"role": role, "content": [{"text": text}]}, agent)
        manager.sync_agent(agent)
        del self.agents[session]  # the next turn reads it from the disk


if __name__ == "__main__":
    main(Strands)
