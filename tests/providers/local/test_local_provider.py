"""The `local` provider: our messages in, our answers out, with a real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus, ToolCallRequest
from everloop.config import Config
from everloop.providers.base import Delta, LLMResponse, ProviderError
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider, Plain, local_provider
from everloop.threads import in_thread

from .real import SMALL, TINY, weights
from .real import found_tiny as found_tiny

pytestmark = pytest.mark.timeout(300)

HELLO: list[dict[str, Any]] = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello!"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "list_dir",
        "description": "List a folder.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
CALLED: list[dict[str, Any]] = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "list_dir", "arguments": '{"path":"."}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "list_dir", "content": "a.txt"},
]


@contextlib.asynccontextmanager
async def provider(shaping: Any = None, **settings: Any) -> AsyncIterator[LocalProvider]:
    made = LocalProvider(
        Engine(Settings(weights(TINY), **{"window": 1024, "threads": 1, **settings})), shaping, model=TINY
    )
    try:
        yield made
    finally:
        await made.close()


async def test_an_answer_streams_and_ends_with_the_whole():
    async with provider() as made:
        pieces = [piece async for piece in made.stream(HELLO, options={"max_tokens": 12})]
        *deltas, answer = pieces
        assert isinstance(answer, LLMResponse)
        assert len(deltas) > 1
        assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == answer.content
        assert answer.usage["completion_tokens"] <= 12
        assert answer.usage["prompt_tokens"] > 5


async def test_a_conversation_with_calls_and_their_results_is_accepted():
    async with provider() as made:
        answer = await made.chat(CALLED, [TOOL], options={"max_tokens": 8})
        assert answer.content is not None or answer.tool_calls


async def test_the_options_of_a_request_are_honoured():
    async with provider() as made:
        short = await made.chat(HELLO, options={"max_tokens": 3})
        assert short.finish_reason == "length"
        assert short.usage["completion_tokens"] == 3
        options = {"max_tokens": 12, "temperature": 1.5, "seed": 7}
        assert (await made.chat(HELLO, options=options)).content == (await made.chat(HELLO, options=options)).content
        whole = await made.chat(HELLO, options={"max_tokens": 12, "temperature": 0})
        assert whole.content
        stop = whole.content.split()[1]
        assert stop not in ((await made.chat(HELLO, options={"temperature": 0, "stop": [stop]})).content or "")


async def test_an_answer_follows_the_requested_schema():
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with provider() as made:
        answer = await made.chat(HELLO, options={"response_format": form, "max_tokens": 40})
        assert json.loads(answer.content or "")["colour"] in ("red", "green")


async def test_an_unknown_option_is_refused():
    async with provider() as made:
        with pytest.raises(ProviderError) as caught:
            await made.chat(HELLO, options={"service_tier": "priority"})
        assert caught.value.status == 400
        assert made.engine.pid is None


async def test_a_model_other_than_the_loaded_one_is_refused():
    async with provider() as made:
        with pytest.raises(ProviderError) as caught:
            await made.chat(HELLO, model="other")
        assert not caught.value.retryable


async def test_pictures_are_omitted_and_the_text_is_kept():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [picture, {"type": "text", "text": "Hello!"}]
    async with provider() as made:
        answer = await made.chat([{"role": "user", "content": content}], options={"max_tokens": 4})
        assert answer.content


async def test_a_subscriber_that_leaves_stops_the_model():
    async with provider(slots=1) as made:
        stream = made.stream(HELLO, options={"max_tokens": 1900, "stop": None, "logit_bias": {"2": -100}})
        async for _ in stream:
            break
        await stream.aclose()
        answer = await asyncio.wait_for(made.chat(HELLO, options={"max_tokens": 1}), 20)
        assert answer.usage["completion_tokens"] == 1


KEPT = object()  # cannot be sent


class Shouting:
    """Asks once more unless the request was already repeated, and shows the answer in capitals."""

    prompt_tokens = 0

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def prepare(self, messages: Any, tools: Any) -> dict[str, Any]:
        return {**Plain().prepare(messages, tools), "max_tokens": 5, "_mine": KEPT, "temperature": 0}

    def for_json(self, form: Any) -> Plain:
        return Plain()

    def visible(self, text: str) -> str:
        return text.upper()

    def read(self, answer: dict[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        self.requests.append(request)
        if len(self.requests) == 1:
            return {**request, "max_tokens": 7}
        whole = Plain().read(answer, request)
        return LLMResponse((whole.content or "").upper(), usage=whole.usage)


async def test_a_shaping_decides_what_is_sent_and_shown_and_may_retry():
    shaping = Shouting()
    async with provider(shaping) as made:
        pieces = [piece async for piece in made.stream(HELLO)]
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    assert not any(delta.restart for delta in deltas)  # the second answer continues the first
    shown = "".join(delta.text for delta in deltas)
    assert isinstance(pieces[-1], LLMResponse)
    assert shown == pieces[-1].content
    assert shown == shown.upper()
    assert [request["max_tokens"] for request in shaping.requests] == [5, 7]
    assert shaping.requests[1]["_mine"] is KEPT
    assert pieces[-1].usage["completion_tokens"] == 7


async def test_a_schema_set_by_the_caller_is_not_shaped():
    shaping = Shouting()
    async with provider(shaping) as made:
        answer = await made.chat(HELLO, options={"response_format": {"type": "json_object"}, "max_tokens": 30})
        assert (answer.content or "").lstrip().startswith("{")
        assert shaping.requests == []


async def test_tools_that_may_not_be_called_are_not_offered():
    offered: list[Any] = []

    class Noting(Plain):
        def prepare(self, messages: Any, tools: Any) -> dict[str, Any]:
            offered.append(tools)
            return super().prepare(messages, tools)

    async with provider(Noting()) as made:
        await made.chat(HELLO, [TOOL], options={"tool_choice": "none", "max_tokens": 2})
        await made.chat(HELLO, options={"tool_choice": "auto", "parallel_tool_calls": False, "max_tokens": 2})
    assert offered == [None, None]


async def test_missing_weights_are_reported_with_the_one_command_that_gets_them():
    made = local_provider(await in_thread(Config.load))
    with pytest.raises(ProviderError) as caught:
        await made.chat(HELLO)
    assert "everloop model pull qwen2.5-coder-0.5b" in str(caught.value)
    assert not caught.value.retryable
    await made.close()


async def test_a_persons_settings_apply_to_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLOOP_WEIGHTS", str(weights(TINY).parent))
    made = local_provider(await in_thread(Config.load, {"model": TINY}))
    answer = await made.chat(HELLO, options={"max_tokens": 2})
    assert answer.content
    await made.close()


@pytest.mark.may_block
async def test_a_real_small_model_completes_a_turn_of_two_rounds_with_a_real_tool(tmp_path):
    """The model answers with a call because its grammar allows nothing else; the tool and the loop are real."""
    model = await asyncio.to_thread(weights, SMALL)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "beans.txt").write_text("Water them twice a week.\n")
    seen: list[Any] = []

    class OneCall:
        prompt_tokens = 0

        def prepare(self, messages: Any, tools: Any) -> dict[str, Any]:
            asked = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] == "user"][-1:]
            results = [m["content"] for m in messages if m["role"] == "tool"]
            rule = 'root ::= "read_file beans.txt" | "list_dir ."'
            system = {"role": "system", "content": "To see a file, write read_file and its name."}
            if results:
                asked.append({"role": "user", "content": f"beans.txt says: {results[-1]}\nAnswer in one sentence."})
            return {"messages": [system, *asked], "temperature": 0, **({} if results else {"grammar": rule})}

        def for_json(self, form: Any) -> OneCall:
            return self

        def visible(self, text: str) -> str:
            return ""

        def read(self, answer: dict[str, Any], request: dict[str, Any]) -> LLMResponse:
            seen.append(answer["timings"])
            text = answer["choices"][0]["message"]["content"]
            if "grammar" not in request:
                return LLMResponse(text)
            name, path = text.split(" ", 1)
            return LLMResponse(None, [ToolCallRequest("c1", name, {"path": path})])

    made = LocalProvider(Engine(Settings(model, window=2048, threads=1)), OneCall(), model=SMALL)
    agent = AgentLoop(MessageBus(), made, workspace, model=SMALL)
    try:
        answer = await agent.process_direct("What is in beans.txt?")
        assert len(seen) == 2
        assert "week" in answer.lower()
    finally:
        await agent.close()
        await made.close()


def test_the_engine_is_not_loaded_with_the_package():
    code = "import sys, everloop.providers.local.provider; print('xllamacpp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
