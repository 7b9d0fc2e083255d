"""agno, telemetry off. Sessions: `AsyncSqliteDb` on a file; the whole history is sent, as the others do."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

from common import INSTRUCTIONS, Peer, echo, main, pair


class Agno(Peer):
    packages = ("agno", "openai")
    keeps = True

    async def start(self) -> None:
        os.environ["AGNO_TELEMETRY"] = "false"
        from agno.agent import Agent
        from agno.models.openai import OpenAIChat

        kept: dict[str, Any] = {}
        if self.stored:
            from agno.db.sqlite import AsyncSqliteDb

            self.db = AsyncSqliteDb(db_file=os.path.join(self.folder, "agno.db"))
            kept = {"db": self.db, "add_history_to_context": True, "num_history_runs": 10**9}
        model = OpenAIChat(id=self.model, base_url=self.base_url, api_key="none")
        self.agent = Agent(id="bench", model=model, instructions=INSTRUCTIONS, tools=[echo], telemetry=False, **kept)

    async def turn(self, session: str, text: str) -> str:
        return str((await self.agent.arun(text, session_id=session)).content)

    async def seed(self, session: str, messages: int) -> None:
        from agno.models.message import Message
        from agno.run.agent import RunOutput
        from agno.run.base import RunStatus
        from agno.session.agent import AgentSession

        began, runs = int(time.time()) - messages, []
        for number in range(messages // 2):
            user, assistant = pair(number)
            said = [Message(role="user", content=user), Message(role="assistant", content=assistant)]
            runs.append(
                RunOutput(
                    run_id=str(uuid.uuid4()), agent_id="bench", session_id=session, content=assistant,
                    status=RunStatus.completed, created_at=began + number, messages=said,
                )
            )  # fmt: skip
        await self.db.upsert_session(
            AgentSession(
                session_id=session, agent_id="bench", runs=runs, created_at=began, session_data={},
                agent_data={"agent_id": "bench"},
            )
        )  # fmt: skip
        for number, run in enumerate(runs):
            await self.db.upsert_run(run, session_id=session, run_index=number)


if __name__ == "__main__":
    main(Agno)
