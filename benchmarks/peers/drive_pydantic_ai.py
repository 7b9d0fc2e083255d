"""pydantic-ai. It has no store: the caller keeps the messages, here in memory."""

from __future__ import annotations

from typing import Any

from common import INSTRUCTIONS, Peer, echo, main, pair


class PydanticAI(Peer):
    packages = ("pydantic-ai-slim", "openai")

    async def start(self) -> None:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel(self.model, provider=OpenAIProvider(base_url=self.base_url, api_key="none"))
        self.agent = Agent(model, instructions=INSTRUCTIONS, tools=[echo])
        self.sessions: dict[str, list[Any]] = {}

    async def turn(self, session: str, text: str) -> str:
        result = await self.agent.run(text, message_history=self.sessions.get(session))
        if self.stored:
            self.sessions[session] = result.all_messages()
        return str(result.output)

    async def seed(self, session: str, messages: int) -> None:
        from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart

        history: list[Any] = []
        for number in range(messages // 2):
            user, assistant = pair(number)
            history.append(ModelRequest(parts=[UserPromptPart(content=user)]))
            history.append(ModelResponse(parts=[TextPart(content=assistant)]))
        self.sessions[session] = history


if __name__ == "__main__":
    main(PydanticAI)
