"""What the agent says in chats without being asked: in other chats under the policy, and results of jobs and
sub-agents.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from everloop import LLMProvider, LLMResponse
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import running

from .hooks import HookNetwork
from .says import until


async def test_another_chat_is_written_to_only_if_the_settings_name_it(tmp_path: Path) -> None:
    steps = [call("message", content=f"to {chat}", channel="hook", chat_id=chat) for chat in ("garden", "canary")]
    async with (
        HookNetwork().running() as network,
        running(network.settings, tmp_path, ScriptedProvider([*steps, "Done."]), message_to=("hook:garden",)),
    ):
        await network.say("1", "tell them")
        await until(lambda: network.heard("1") == ["Done."])
        await until(lambda: network.heard("garden"))
    assert network.heard("garden") == ["to garden"]
    assert network.heard("canary") == []


class Delegates(LLMProvider):
    """Schedules a job, or starts a sub-agent, and reports the result."""

    default_model = "delegates"

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        if messages[-1]["role"] == "tool":
            return LLMResponse("Begun.")
        said = str(messages[-1]["content"])
        if "There are seven." in said:
            return LLMResponse("Seven beans.")
        if said.startswith("remind me"):
            soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
            return LLMResponse(None, [call("cron", action="add", message="water them", at=soon.isoformat())])
        if said.startswith("count"):
            return LLMResponse(None, [call("spawn", task="How many beans are there?")])
        return LLMResponse("It is time." if "water them" in said else "There are seven.")


async def test_a_job_and_a_sub_agent_answer_in_the_chat_and_the_thread_that_they_came_from(tmp_path: Path) -> None:
    async with HookNetwork().running() as network, running(network.settings, tmp_path, Delegates()):
        await network.say("job", "remind me", thread="t1")
        await network.say("sub", "count the beans")
        await until(lambda: network.heard("job") == ["Begun.", "It is time."])
        await until(lambda: network.heard("sub") == ["Begun.", "Seven beans."])
    assert [one["thread"] for one in network.got if one["chat"] == "job"] == ["t1", "t1"]
