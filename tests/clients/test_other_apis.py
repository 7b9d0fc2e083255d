"""Real clients of the Responses API, of Anthropic's and of Ollama's use the running server, with their defaults."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from everloop.testing import call
from tests.support.drawing import drawn

from .processes import OTHER_CLIENTS, Client, Served, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(200, func_only=True)]
# What each client raises for a request that the server refuses. litellm omits such parameters itself.
REFUSED = {
    "responses": "BadRequestError",
    "responses-node": "BadRequestError",
    "anthropic": "BadRequestError",
    "ollama": "ResponseError",
    "openai-agents": "BadRequestError",
    "pydantic-ai": "ModelHTTPError",
    "ai-sdk-openai": "APICallError",
}
PICTURE = "data:image/png;base64," + base64.b64encode(drawn()).decode()


@pytest.fixture(scope="module", params=OTHER_CLIENTS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    running = Client(request.param, tmp_path_factory.mktemp(request.param))
    yield running
    running.close()


async def test_a_chat_is_answered(other: Client, server: Served):
    server.behind.reply("Water the beans.")
    said = await other.does("chat", server, prompt="What needs doing?", streamed=False)
    assert (said["text"], said["finish"], said["calls"]) == ("Water the beans.", "stop", [])
    assert said["tokens"] > 0


async def test_a_streamed_chat_comes_in_pieces(other: Client, server: Served):
    server.behind.calls(call("list_dir", path="."))
    server.behind.reply("Water the beans, then rest.", token_delay=0.05)
    said = await other.does("stream", server, prompt="What needs doing?")
    assert "".join(said["pieces"]) == "Water the beans, then rest."
    assert len(said["pieces"]) >= 3
    assert said["finish"] == "stop"
    assert server.asked[-1]["role"] == "tool"  # the agent's own ran too


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_the_clients_own_tools_are_called_by_the_client(other: Client, server: Served, streamed: bool):
    server.behind.calls(call("forecast", city="Oslo"), call("forecast", city="Łódź"))
    server.behind.reply("Take an umbrella.")
    said = await other.does("tools", server, prompt="Rain?", result="heavy rain", streamed=streamed)
    assert [made["arguments"]["city"] for made in said["calls"]] == ["Oslo", "Łódź"]
    assert said["finish"] == "tool_calls"
    assert said["text"] == "Take an umbrella."
    assert "heavy rain" in str(server.asked[-2:])


async def test_a_picture_reaches_the_model(other: Client, server: Served):
    server.behind.reply("Red and blue.")
    said = await other.does("image", server, prompt="Which colours?", image=PICTURE, streamed=False)
    assert said["text"] == "Red and blue."
    urls = [part["image_url"]["url"] for part in server.asked[-1]["content"] if part["type"] == "image_url"]
    assert urls == [PICTURE]


async def test_a_wrong_token_raises_the_clients_own_exception(other: Client, server: Served):
    said = await other.does("chat", server, prompt="hi", key="wrong", streamed=False)
    assert said["status"] == 401 or "AuthenticationError" in said["raised"] or "unknown or revoked" in said["message"]
    assert server.behind.requests == []


@pytest.mark.parametrize("other", sorted(REFUSED), indirect=True)
async def test_a_refused_parameter_raises_the_clients_own_exception(other: Client, server: Served):
    said = await other.does("refused", server, prompt="hi", streamed=False)
    assert REFUSED[other.name] in said["raised"]
    assert said["status"] == 400
    assert server.behind.requests == []


@pytest.mark.parametrize("other", sorted({*OTHER_CLIENTS} - {"litellm-ollama"}), indirect=True)
async def test_a_client_that_disconnects_stops_the_model(other: Client, server: Served):
    server.behind.hang(50, after_chunks=2, text="one two three four")
    said = await other.does("cancel", server, prompt="Count.")
    assert said["first"].startswith("one")
    await until(lambda: server.behind.requests[-1].gone)


@pytest.mark.parametrize("other", ["responses"], indirect=True)
async def test_responses_are_read_again_continued_and_deleted(other: Client, server: Served):
    for text in ("First.", "Second."):
        server.behind.reply(text)
    said = await other.does("kept", server, prompt="What needs doing?")
    assert said == {"texts": ["First.", "Second."], "gone": "NotFoundError"}
    assert "What needs doing?" in str(server.asked)


@pytest.mark.parametrize("other", ["anthropic"], indirect=True)
async def test_the_anthropic_sdk_counts_tokens_and_lists_models(other: Client, server: Served):
    said = await other.does("count", server, prompt="What needs doing?")
    assert said["tokens"] > 0
    assert said["models"] == [server.model, "everloop/agent", "everloop/chat"]


@pytest.mark.parametrize("other", ["ollama"], indirect=True)
async def test_the_ollama_library_generates_and_inspects_models(other: Client, server: Served):
    server.behind.reply("Water the beans.")
    said = await other.does("beside", server, prompt="What needs doing?")
    assert said["generated"] == "Water the beans."
    assert f"{server.model}:latest" in said["models"]
    assert "tools" in said["capabilities"]
    assert said["loaded"] == [f"{server.model}:latest"]
