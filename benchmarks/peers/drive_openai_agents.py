"""openai-agents with its chat completions model, tracing off. Sessions: `SQLiteSession` on a file."""

from __future__ import annotations

import os
from typing import Any

from common import INSTRUCTIONS, Peer, echo, main, pair


class OpenAIAgents(Peer):
    packages = ("openai-agents", "openai")
    keeps = True

    async def start(self) -> None:
        from agents import (
            Agent,
            OpenAIChatCompletionsModel,
            RunConfig,
            Runner,
            SQLiteSession,
            function_tool,
            set_tracing_disabled,
        )
        from openai import AsyncOpenAI

        set_tracing_disabled(True)
        model = OpenAIChatCompletionsModel(
            model=self.model, openai_client=AsyncOpenAI(base_url=self.base_url, api_key="none")
        )
        self.agent = Agent(name="bench", instructions=INSTRUCTIONS, tools=[function_tool(echo)], model=model)
        self.runner, self.session_type = Runner, SQLiteSession
        self.config = RunConfig(tracing_disabled=True)

    def _session(self, session: str) -> Any:
        return self.session_type(session, os.path.join(self.folder, "sessions.db")) if self.stored else None

    async def turn(self, session: str, text: str) -> str:
        result = await self.runner.run(
            self.agent, text, session=self._session(session), run_config=self.config, max_turns=50
        )
        return str(result.final_output)

    async def seed(self, session: str, messages: int) -> None:
        items = []
        for number in range(messages // 2):
            user, assistant = pair(number)
            items += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        await self._session(session).add_items(items)


if __name__ == "__main__":
    main(OpenAIAgents)
