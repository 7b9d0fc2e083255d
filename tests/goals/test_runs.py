"""A goal from its inputs to its result, with a scripted model, the real engine and real tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from everloop.goals.activities import ActivityError, ToolEnded
from everloop.goals.executor import OutputObject
from everloop.goals.templates import InputError
from everloop.log import CallEnded, ModelAnswered
from everloop.providers.base import LLMResponse, ProviderError
from everloop.testing import ChatOnlyProvider, ScriptedProvider, call
from everloop.tools.base import tool
from everloop.tools.context import current_call

from .goals import NUMBER, executor, results

TOPIC = {"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}


async def test_a_goal_uses_tools_and_its_result_is_requested_at_the_end(folder):
    (folder / "notes.txt").write_text("the beans are dry\n")
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    provider = ScriptedProvider(
        [
            call("read_file", path="notes.txt"),
            LLMResponse("I have read it.", usage=usage),
            LLMResponse('{"n": 1}', usage=usage),
        ]
    )
    agent = await executor(
        folder, provider, tools=["read_file"], query="How many in ${topic}?", inputs=TOPIC,
        system_prompt="You count ${topic}.", output_description="The number for ${topic}.", output_schema=NUMBER,
    )  # fmt: skip
    output = await agent.run({"topic": "notes"})
    assert (output.result, output.terminate_reason, output.turns) == ({"n": 1}, "goal", 2)
    assert (output.recovered, output.recovered_from, output.error) == (False, None, None)
    assert output.usage == {"prompt_tokens": 20, "completion_tokens": 4}
    assert output.duration > 0
    work, again, last = provider.requests
    assert work.messages[0]["content"].startswith("You count notes.")
    assert work.messages[1] == {"role": "user", "content": "How many in notes?"}
    assert [one["function"]["name"] for one in work.tools or ()] == ["read_file"]
    assert "the beans are dry" in results(again.messages)[0][1]
    assert last.tools is None
    assert "The number for notes." in last.messages[-1]["content"]


async def test_a_first_answer_without_calls_ends_the_work_and_the_result_is_still_requested(folder):
    provider = ScriptedProvider(["I know that.", "It is four."])
    output = await (await executor(folder, provider, tools=["grep"])).run({})
    assert (output.result, output.terminate_reason, output.turns) == ("It is four.", "goal", 1)
    assert provider.requests[1].tools is None


async def test_an_agent_without_tools_is_offered_none(folder):
    provider = ScriptedProvider(["ok", "ok"])
    await (await executor(folder, provider)).run()
    assert [request.tools for request in provider.requests] == [None, None]


async def test_missing_inputs_are_an_error_before_any_model_call(folder):
    provider = ScriptedProvider([])
    seen: list[Any] = []
    agent = await executor(folder, provider, inputs=TOPIC, query="${topic}", seen=seen)
    with pytest.raises(InputError, match="missing inputs: topic; given: other"):
        await agent.run({"other": 1})
    assert provider.requests == []
    assert [activity.context for activity in seen] == ["inputs"]


async def test_placeholders_of_undeclared_inputs_stay_in_the_prompts(folder):
    provider = ScriptedProvider(["ok", "ok"])
    agent = await executor(folder, provider, inputs=TOPIC, query="${topic} ${secret} ${HOME}")
    await agent.run({"topic": "${secret}", "secret": "canary-1"})
    assert provider.requests[0].messages[1]["content"] == "${secret} ${secret} ${HOME}"
    assert "canary-1" not in json.dumps(provider.requests[1].messages)


async def test_calls_of_one_answer_start_together_and_their_results_come_back_in_order(folder):
    arrived = 0
    everyone = asyncio.Event()
    seen: list[Any] = []

    @tool
    async def meet(number: int) -> str:
        """Wait until all three are there."""
        nonlocal arrived
        arrived += 1
        if arrived == 3:
            everyone.set()
        await everyone.wait()
        while sum(isinstance(activity, ToolEnded) for activity in seen) < 3 - number:  # the last one ends first
            await asyncio.sleep(0)
        return f"met {number}"

    calls = [call("meet", number=number) for number in (1, 2, 3)]
    provider = ScriptedProvider([calls, "ok", "done"])
    agent = await executor(folder, provider, meet, seen=seen, max_time_minutes=0.5)
    output = await agent.run({})
    assert output.terminate_reason == "goal"
    expected = [(one.id, f"met {number}") for number, one in enumerate(calls, 1)]
    assert results(provider.requests[1].messages) == expected
    assert [message["role"] for message in provider.requests[1].messages] == [
        "system",
        "user",
        "assistant",
        *["tool"] * 3,
    ]
    ended = [activity.call for activity in seen if isinstance(activity, ToolEnded)]
    assert ended == [one.id for one in reversed(calls)]  # reported as each one ends


async def test_a_tool_that_is_not_parallel_runs_alone_and_every_call_has_its_result(folder):
    at_once: list[int] = []
    running = 0

    async def work() -> str:
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        return "ok"

    @tool(parallel=False)
    async def alone() -> str:
        """Alone."""
        return await work()

    @tool
    async def beside() -> str:
        """Not alone."""
        return await work()

    calls = [call("beside"), call("beside"), call("alone"), call("beside")]
    provider = ScriptedProvider([calls, "ok", "done"])
    await (await executor(folder, provider, alone, beside)).run({})
    assert at_once == [1, 2, 1, 1]
    assert [id for id, _ in results(provider.requests[1].messages)] == [one.id for one in calls]


async def test_an_unlisted_tool_gets_an_error_result_is_reported_and_never_runs(folder):
    ran = []

    @tool
    async def listed() -> str:
        """Fine."""
        return "fine"

    @tool
    async def unlisted() -> str:
        """Must not run."""
        ran.append(1)
        return "canary"

    calls = [call("unlisted"), call("exec", command="touch canary"), call("listed"), call("no_such_tool")]
    provider = ScriptedProvider([calls, "ok", "done"])
    seen: list[Any] = []
    agent = await executor(folder, provider, listed, unlisted, tools=["listed"], seen=seen)
    output = await agent.run({})
    assert output.terminate_reason == "goal"
    assert ran == []
    assert list(folder.iterdir()) == []
    statuses = [entry.status for entry in output.log if isinstance(entry, CallEnded)]
    assert sorted(statuses) == ["error", "error", "error", "ok"]
    assert [text == "fine" for _, text in results(provider.requests[1].messages)] == [False, False, True, False]
    reported = [activity for activity in seen if isinstance(activity, ActivityError)]
    assert [activity.context for activity in reported] == ["unlisted_tool"] * 3
    assert [one["function"]["name"] for one in provider.requests[0].tools or ()] == ["listed"]


async def test_after_a_tool_error_the_model_can_try_another_way(folder):
    (folder / "there.txt").write_text("found\n")
    provider = ScriptedProvider(
        [call("read_file", path="gone.txt"), call("read_file", path="there.txt"), "ok", "found"]
    )
    output = await (await executor(folder, provider, tools=["read_file"])).run({})
    assert (output.result, output.terminate_reason, output.turns) == ("found", "goal", 3)
    first, second = [entry.status for entry in output.log if isinstance(entry, CallEnded)]
    assert (first, second) == ("error", "ok")


async def test_a_tool_that_raises_does_not_end_the_run(folder):
    @tool
    async def broken() -> str:
        """Raises."""
        raise RuntimeError("out of beans")

    provider = ScriptedProvider([call("broken"), "ok", "done"])
    output = await (await executor(folder, provider, broken)).run({})
    assert output.terminate_reason == "goal"
    assert "out of beans" in results(provider.requests[1].messages)[0][1]


async def test_a_model_that_repeats_the_same_failing_call_ends_in_an_error(folder):
    provider = ScriptedProvider([call("read_file", path="gone.txt")], repeat_last=True)
    seen: list[Any] = []
    output = await (await executor(folder, provider, tools=["read_file"], seen=seen)).run({})
    assert (output.result, output.terminate_reason, output.recovered) == (None, "error", False)
    assert output.turns == 3
    assert "read_file" in (output.error or "")
    assert isinstance(seen[-1], ActivityError)


# ---------------------------------------------------------------------------------------------- the result


async def test_an_invalid_result_goes_back_to_the_model_until_it_is_valid(folder):
    provider = ScriptedProvider(["ok", "about four", '{"n": "four"}', '{"n": 4}'])
    seen: list[Any] = []
    output = await (await executor(folder, provider, output_schema=NUMBER, seen=seen)).run({})
    assert (output.result, output.terminate_reason, output.turns) == ({"n": 4}, "goal", 1)
    assert "n: must be an integer" in provider.requests[3].messages[-1]["content"]
    assert all(request.tools is None for request in provider.requests[1:])
    assert [activity.context for activity in seen] == ["output", "output"]


async def test_a_result_that_stays_invalid_is_an_error_after_three_retries(folder):
    provider = ScriptedProvider(["ok", '{"n": "four"}'], repeat_last=True)
    output = await (await executor(folder, provider, output_schema=NUMBER)).run({})
    assert (output.result, output.terminate_reason) == (None, "error")
    assert "n: must be an integer" in (output.error or "")
    assert len(provider.requests) == 5


async def test_of_two_offered_results_the_first_wins(folder):
    provider = ScriptedProvider(["ok", '{"n": 1}\n\nor\n\n{"n": 2}'])
    output = await (await executor(folder, provider, output_schema=NUMBER)).run({})
    assert (output.result, output.terminate_reason) == ({"n": 1}, "goal")
    assert len(provider.requests) == 2


async def test_a_call_instead_of_a_result_gets_an_error_and_never_runs(folder):
    provider = ScriptedProvider(["ok", call("write_file", path="canary", content="x"), "the result"])
    output = await (await executor(folder, provider, tools=["write_file"])).run({})
    assert (output.result, output.terminate_reason) == ("the result", "goal")
    assert not (folder / "canary").exists()


async def test_a_model_that_only_ever_calls_tools_has_no_result(folder):
    provider = ScriptedProvider(["ok", call("write_file", path="canary", content="x")], repeat_last=True)
    output = await (await executor(folder, provider, tools=["write_file"])).run({})
    assert (output.result, output.terminate_reason) == (None, "error")
    assert not (folder / "canary").exists()


async def test_an_empty_result_is_requested_again(folder):
    provider = ScriptedProvider(["ok", "", "", "there it is"])
    output = await (await executor(folder, provider)).run({})
    assert (output.result, output.terminate_reason) == ("there it is", "goal")


async def test_work_that_ends_with_empty_answers_still_reaches_the_extraction(folder):
    provider = ScriptedProvider([call("list_dir", path="."), "", "", "nothing there"])
    output = await (await executor(folder, provider, tools=["list_dir"])).run({})
    assert (output.result, output.terminate_reason) == ("nothing there", "goal")


# ---------------------------------------------------------------------------------------------- errors and concurrent
# runs


@pytest.mark.parametrize(
    "failure", [ProviderError("HTTP 401: wrong key"), ZeroDivisionError("beans")], ids=["api", "bug"]
)
@pytest.mark.parametrize("steps", [[], ["ok"]], ids=["work", "extraction"])
async def test_a_failing_model_ends_the_run_with_a_reported_error(folder, failure, steps):
    provider = ScriptedProvider([*steps, failure])
    seen: list[Any] = []
    output = await (await executor(folder, provider, seen=seen)).run({})
    assert (output.result, output.terminate_reason, output.recovered) == (None, "error", False)
    assert str(failure) in (output.error or "")
    assert seen == [ActivityError(output.error or "", "model")]
    assert len(provider.requests) == len(steps) + 1


async def test_a_provider_without_a_stream_works_the_same(folder):
    seen: list[Any] = []
    provider = ChatOnlyProvider([call("list_dir", path="."), LLMResponse("ok", reasoning="hm"), "done"])
    output = await (await executor(folder, provider, tools=["list_dir"], seen=seen)).run({})
    assert (output.result, output.terminate_reason) == ("done", "goal")
    assert [type(activity).__name__ for activity in seen] == ["ToolStarted", "ToolEnded", "ThoughtChunk"]


async def test_the_model_of_the_definition_is_used(folder):
    provider = ScriptedProvider(["ok", "done"])
    await (await executor(folder, provider, model="small")).run({})
    assert [request.model for request in provider.requests] == ["small", "small"]


async def test_two_executors_at_once_do_not_see_each_other(tmp_path):
    barrier = asyncio.Barrier(2)
    contexts = []

    @tool
    async def pause() -> str:
        """Wait for the other one."""
        contexts.append(current_call())
        await asyncio.wait_for(barrier.wait(), 30)
        return "ok"

    async def one(name: str) -> tuple[OutputObject, ScriptedProvider, list[object]]:
        folder = tmp_path / name
        folder.mkdir()
        seen: list[Any] = []
        provider = ScriptedProvider(
            [
                [call("pause"), call("write_file", path="note.txt", content=name)],
                call("read_file", path="note.txt"),
                "ok",
                name,
            ]
        )
        agent = await executor(
            folder, provider, pause, tools=["pause", "write_file", "read_file"], seen=seen, name=name,
            inputs=TOPIC, query="${topic}",
        )  # fmt: skip
        return await agent.run({"topic": f"secret of {name}"}), provider, seen

    pairs = await asyncio.gather(one("red"), one("blue"))
    for (output, provider, seen), name, other in zip(pairs, ("red", "blue"), ("blue", "red"), strict=True):
        assert (output.result, output.terminate_reason) == (name, "goal")
        assert (tmp_path / name / "note.txt").read_text() == name
        assert other not in json.dumps(provider.requests[-1].messages)
        assert other not in repr(seen)
    assert len({context.session for context in contexts}) == 2
    assert len({context.workspace for context in contexts}) == 2


async def test_concurrent_runs_of_one_executor_are_isolated(folder):
    async def echo(messages, tools):
        await asyncio.sleep(0.02)
        return messages[1]["content"]

    provider = ScriptedProvider([echo], repeat_last=True)
    agent = await executor(folder, provider, inputs=TOPIC, query="${topic}", output_description="About ${topic}.")
    outputs = await asyncio.gather(*(agent.run({"topic": f"topic {number}"}) for number in range(5)))
    assert [output.result for output in outputs] == [f"topic {number}" for number in range(5)]
    for request in provider.requests:
        topics = {f"topic {number}" for number in range(5) if f"topic {number}" in json.dumps(request.messages)}
        assert len(topics) == 1


async def test_background_processes_of_a_command_end_with_the_run(folder):
    beat = "while :; do date +%s%N > beat; sleep 0.05; done"
    started = call("exec", command=beat, background=True, keep=True)
    waited = call("exec", command="while [ ! -s beat ]; do sleep 0.05; done")
    provider = ScriptedProvider([started, waited, "ok", "done"])
    output = await (await executor(folder, provider, tools=["exec"])).run({})
    assert output.terminate_reason == "goal"
    last = (folder / "beat").read_text()
    await asyncio.sleep(0.4)
    assert (folder / "beat").read_text() == last


async def test_the_log_of_a_run_is_complete(folder):
    provider = ScriptedProvider([call("list_dir", path="."), LLMResponse("<think>hm</think>ok"), "done"])
    output = await (await executor(folder, provider, tools=["list_dir"])).run({})
    answers = [entry for entry in output.log if isinstance(entry, ModelAnswered)]
    assert [answer.content for answer in answers] == [None, "ok", "done"]
    assert answers[1].reasoning == "hm"
    assert "log" not in repr(output)
