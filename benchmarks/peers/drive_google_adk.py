"""google-adk; its model goes through LiteLLM. Sessions: in memory, or `SqliteSessionService` on a file."""

from __future__ import annotations

import os
from typing import Any

from common import INSTRUCTIONS, Peer, echo, main, pair


class GoogleADK(Peer):
    packages = ("google-adk", "litellm")
    keeps = True

    async def start(self) -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        os.environ["OTEL_SDK_DISABLED"] = "true"
        from google.adk.agents import LlmAgent
        from google.adk.models.lite_llm import LiteLlm
        from google.adk.runners import Runner
        from google.genai import types

        self.types = types
        if self.stored:
            from google.adk.sessions.sqlite_session_service import SqliteSessionService

            self.service: Any = SqliteSessionService(os.path.join(self.folder, "adk.db"))
        else:
            from google.adk.sessions import InMemorySessionService

            self.service = InMemorySessionService()
        model = LiteLlm(model=f"openai/{self.model}", api_base=self.base_url, api_key="none")
        agent = LlmAgent(name="bench", model=model, instruction=INSTRUCTIONS, tools=[echo])
        self.runner = Runner(app_name="bench", agent=agent, session_service=self.service)
        self.known: set[str] = set()

    async def _open(self, session: str) -> dict[str, str]:
        key = {"app_name": "bench", "user_id": "u", "session_id": session}
        if session not in self.known:
            if not self.stored or await self.service.get_session(**key) is None:
                await self.service.create_session(**key)
            self.known.add(session)
        return key

    async def turn(self, session: str, text: str) -> str:
        await self._open(session)
        message = self.types.Content(role="user", parts=[self.types.Part(text=text)])
        answer = ""
        async for event in self.runner.run_async(user_id="u", session_id=session, new_message=message):
            if event.is_final_response() and event.content and event.content.parts:
                answer = "".join(part.text or "" for part in event.content.parts)
        return answer

    async def seed(self, session: str, messages: int) -> None:
        from google.adk.events import Event

        stored = await self.service.get_session(**await self._open(session))
        for number in range(messages // 2):
            for author, role, text in zip(("user", "bench"), ("user", "model"), pair(number), strict=True):
                content = self.types.Content(role=role, parts=[self.types.Part(text=text)])
                event = Event(author=author, invocation_id=f"seed{number}", content=content)
                await self.service.append_event(stored, event)


if __name__ == "__main__":
    main(GoogleADK)
