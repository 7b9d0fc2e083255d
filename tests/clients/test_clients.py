"""Real OpenAI clients use the running server like any other."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import pytest

from everloop.testing import call
from tests.support.drawing import drawn

from .processes import Client, Served, until

# The time to make an environment does not count as the test's.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(200, func_only=True)]
PICTURE = "data:image/png;base64," + base64.b64encode(drawn()).decode()
# What a client raises where the others raise OpenAI's exceptions: the AI SDK has one for all, and litellm uses the
# type that the error's body names before it looks at the status.
BAD_REQUEST = {"ai-sdk": "APICallError"}
UNAUTHORIZED = {"ai-sdk": "APICallError"}
# A model server that fails in the middle of its answer, in a way that a retry does not cure.
BROKEN = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "half "}}]}\n\n'
    b'data: {"error": {"message": "a canary of the model\'s", "type": "invalid_request_error", "code": 400}}\n\n'
)


async def reason(server: Served, body: dict[str, Any], token: str | None = None) -> tuple[int, str]:
    """The status and the message of the server's refusal."""
    head = {"Authorization": f"Bearer {token or server.token}"}
    body = {"model": server.model, "messages": [{"role": "user", "content": "hi"}], **body}
    async with (
        aiohttp.ClientSession(headers=head) as http,
        http.post(f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        return response.status, (await response.json())["error"]["message"]


async def test_a_chat_is_answered(client: Client, server: Served):
    server.behind.reply("Water the beans.")
    said = await client.does("chat", server, prompt="What is to do?", streamed=False)
    assert (said["text"], said["finish"], said["calls"]) == ("Water the beans.", "stop", [])
    assert said["tokens"] > 0
    assert "What is to do?" in server.asked[-1]["content"]


async def test_a_streamed_chat_comes_in_pieces(client: Client, server: Served):
    server.behind.reply("Water the beans, then rest.", token_delay=0.05)
    said = await client.does("stream", server, prompt="What is to do?")
    assert "".join(said["pieces"]) == "Water the beans, then rest."
    assert len(said["pieces"]) >= 3
    assert said["finish"] == "stop"
    assert said["tokens"] > 0


async def test_the_agents_own_tools_run_and_the_client_sees_only_the_answer(client: Client, server: Served):
    server.behind.calls(call("list_dir", path="."), text="I look first.")
    server.behind.reply("Nothing is there.")
    said = await client.does("stream", server, prompt="What is there?")
    assert "".join(said["pieces"]).endswith("Nothing is there.")
    assert said["finish"] == "stop"
    assert not said.get("calls")
    assert server.asked[-1]["role"] == "tool"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_the_clients_own_tool_is_called_by_the_client(client: Client, server: Served, streamed: bool):
    server.behind.calls(call("forecast", city="Łódź"))
    server.behind.reply("Take an umbrella.")
    said = await client.does("tools", server, prompt="Rain?", result="heavy rain", streamed=streamed)
    (made,) = said["calls"]
    assert (made["name"], made["arguments"], said["finish"]) == ("forecast", {"city": "Łódź"}, "tool_calls")
    assert said["text"] == "Take an umbrella."
    *_, made_before, result = server.asked
    assert made_before["tool_calls"][0]["id"] == result["tool_call_id"] == made["id"]
    assert "heavy rain" in result["content"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_two_calls_at_once_keep_their_names_and_arguments_apart(client: Client, server: Served, streamed: bool):
    server.behind.calls(call("forecast", city="Oslo"), call("forecast", city="Rome"))
    server.behind.reply("Go to Rome.")
    said = await client.does("tools", server, prompt="Where?", result="fine", streamed=streamed)
    assert [made["arguments"]["city"] for made in said["calls"]] == ["Oslo", "Rome"]
    assert len({made["id"] for made in said["calls"]}) == 2
    assert said["text"] == "Go to Rome."


async def test_a_picture_reaches_the_model(client: Client, server: Served):
    server.behind.reply("Red and blue.")
    said = await client.does("image", server, prompt="Which colours?", image=PICTURE, streamed=False)
    assert said["text"] == "Red and blue."
    parts = server.asked[-1]["content"]
    assert [part["image_url"]["url"] for part in parts if part["type"] == "image_url"] == [PICTURE]
    assert [part["text"] for part in parts if part["type"] == "text"] == ["Which colours?"]


async def test_a_refused_parameter_raises_the_clients_own_exception(client: Client, server: Served):
    wrong = {"max_tokens": 0} if client.name == "llm" else {"n": 2}  # llm has no other that is refused
    status, words = await reason(server, wrong)
    said = await client.does("refused", server, prompt="hi", streamed=False)
    assert status == 400
    assert next(iter(wrong)) in words
    assert BAD_REQUEST.get(client.name, "BadRequestError") in said["raised"]
    assert words in said["message"]
    assert said["status"] == 400
    assert server.behind.requests == []


@pytest.mark.parametrize("action", ["chat", "stream"])
async def test_a_wrong_token_raises_the_clients_own_exception(client: Client, server: Served, action: str):
    status, words = await reason(server, {}, token="wrong")
    said = await client.does(action, server, prompt="hi", key="wrong", streamed=False)
    assert status == 401
    assert UNAUTHORIZED.get(client.name, "AuthenticationError") in said["raised"]
    assert words in said["message"]
    assert said["status"] == 401
    assert server.behind.requests == []


async def test_an_interrupted_answer_is_an_error_and_not_a_short_answer(client: Client, server: Served):
    server.behind.raw(BROKEN)
    said = await client.does("stream", server, prompt="Go on.")
    assert said["raised"]
    assert "the server's model call failed" in said["message"]
    assert "a canary of the model's" not in said["message"]  # internals stay private


@pytest.mark.parametrize("client", ["openai", "openai-node", "ai-sdk", "litellm", "langchain"], indirect=True)
async def test_a_client_that_disconnects_stops_the_model(client: Client, server: Served):
    server.behind.hang(50, after_chunks=2, text="one two three four")
    said = await client.does("cancel", server, prompt="Count.")
    assert said["first"].startswith("one")
    await until(lambda: server.behind.requests[-1].gone)
    assert len(server.behind.requests) == 1


@pytest.mark.parametrize("client", ["openai"], indirect=True)
async def test_a_client_that_times_out_stops_the_model(client: Client, server: Served):
    server.behind.hang(50)
    assert await client.does("timeout", server, prompt="Think.") == {"timeout": True}
    await until(lambda: server.behind.requests[-1].gone)


@pytest.mark.parametrize("client", ["openai", "openai-node"], indirect=True)
async def test_the_models_can_be_listed(client: Client, server: Served):
    said = await client.does("models", server)
    assert server.model in said["models"]
    assert said["first"] == said["models"][0]


@pytest.mark.parametrize("client", ["openai"], indirect=True)
async def test_a_session_is_kept_under_the_clients_header(client: Client, server: Served):
    for prompt, answer in (("My name is Ida.", "Hello."), ("Who am I?", "Ida.")):
        server.behind.reply(answer)
        said = await client.does("chat", server, prompt=prompt, session="kept")
        assert said["text"] == answer
    assert [message["role"] for message in server.asked] == ["system", "user", "assistant", "user"]
    assert "My name is Ida." in server.asked[1]["content"]


@pytest.mark.parametrize("client", ["ai-sdk"], indirect=True)
@pytest.mark.parametrize("action", ["chat", "stream"])
async def test_thoughts_are_kept_apart_from_the_answer(client: Client, server: Served, action: str):
    server.behind.reply("Four.", reasoning="Two and two.")
    said = await client.does(action, server, prompt="2 + 2?")
    assert (said["text"], said["reasoning"]) == ("Four.", "Two and two.")


# ---------------------------------------------------------------------------------------------- Void's rule


@pytest.mark.parametrize("client", ["openai-node"], indirect=True)
async def test_void_reads_the_call_of_its_tool(client: Client, server: Served):
    server.behind.calls(call("forecast", city="Oslo"))
    said = await client.does("void", server, prompt="Rain?", tools=True)
    assert (said["name"], said["arguments"]) == ("forecast", {"city": "Oslo"})
    assert said["id"]


@pytest.mark.parametrize("client", ["openai-node"], indirect=True)
async def test_void_reads_an_answer_that_follows_agent_tools(client: Client, server: Served):
    server.behind.calls(call("list_dir", path="."))
    server.behind.reply("Nothing is there.")
    said = await client.does("void", server, prompt="What is there?", tools=False)
    assert said == {"text": "Nothing is there.", "name": "", "id": "", "arguments": None}


@pytest.mark.parametrize("client", ["openai-node"], indirect=True)
async def test_void_never_gets_an_empty_answer(client: Client, server: Served):
    server.behind.reply("")
    said = await client.does("void", server, prompt="Say nothing.", tools=False)
    assert said["text"]
