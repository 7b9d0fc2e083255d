"""LangChain's `create_agent` on LangGraph. Sessions: `AsyncSqliteSaver`, its checkpointer, on a file."""

from __future__ import annotations

import os
from typing import Any

from common import INSTRUCTIONS, Peer, echo, main, pair


class LangGraph(Peer):
    packages = ("langgraph", "langchain", "langchain-openai", "langgraph-checkpoint-sqlite")
    keeps = True

    async def start(self) -> None:
        os.environ["LANGSMITH_TRACING"] = "false"
        from langchain.agents import create_agent
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI

        saver = None
        if self.stored:
            from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

            self.saver = AsyncSqliteSaver.from_conn_string(os.path.join(self.folder, "checkpoints.db"))
            saver = await self.saver.__aenter__()
        model = ChatOpenAI(model=self.model, base_url=self.base_url, api_key="none")
        self.agent = create_agent(model, tools=[tool(echo)], system_prompt=INSTRUCTIONS, checkpointer=saver)

    def _config(self, session: str) -> dict[str, Any]:
        return {"configurable": {"thread_id": session}, "recursion_limit": 100}

    async def turn(self, session: str, text: str) -> str:
        given = {"messages": [{"role": "user", "content": text}]}
        return str((await self.agent.ainvoke(given, self._config(session)))["messages"][-1].content)

    async def resume(self, session: str) -> None:
        await self.agent.ainvoke(None, self._config(session))

    async def seed(self, session: str, messages: int) -> None:
        from langchain_core.messages import AIMessage, HumanMessage

        history: list[Any] = []
        for number in range(messages // 2):
            user, assistant = pair(number)
            history += [HumanMessage(user), AIMessage(assistant)]
        await self.agent.aupdate_state(self._config(session), {"messages": history}, as_node="model")

    async def close(self) -> None:
        if self.stored:
            await self.saver.__aexit__(None, None, None)


if __name__ == "__main__":
    main(LangGraph)
