"""A request without `tools` acts only where the settings, its token, its header or its model's name let it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from everloop.config import Rule
from everloop.server.agent_choice import is_side_request
from everloop.server.requests import ChatRequest
from everloop.store.tokens import hash_of, new_token

from .fixtures import shared_server
from .serving import Client, Serving, call, function, serving, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = shared_server
# The prompts with which clients ask on the side, shortened.
SIDE = {
    "openwebui title": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat.",
    "openwebui tags": "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history",
    "openwebui follow-ups": "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might ask",
    "openwebui queries": "### Task:\nAnalyze the chat history to determine the necessity of generating search queries",
    "openwebui completion": "### Task:\nYou are an autocompletion system. Continue the text in `<text>` based on the …",
    "librechat": "Provide a concise, 5-word-or-less title for the conversation, using title case conventions.",
    "continue": "please reply with a title for the chat that is 3-4 words in length, all words used should be …",
    "zed": "Generate a concise 3-7 word title for this conversation, omitting punctuation.",
    "chatbox": "Based on the chat history, give this conversation a name. Keep it short - 10 characters max.",
    "goose": "Based on the conversation so far, provide a concise description of this session in 4 words or less.",
    "aider": "*Briefly* summarize this partial conversation about programming. Include less detail about older parts",
    "claude code": "Your task is to create a detailed summary of the conversation so far, paying close attention to …",
    "claude code title": "Please write a 5-10 word title for the following conversation:",
    "fim": "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n<|fim_middle|>",
    "codellama": "<PRE> def add(a, b): <SUF> return c <MID>",
    "openwebui title, whole": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat "
    "history.\n"
    "### Guidelines:\n- The title should clearly represent the main theme of the conversation.\n### Output:\n"
    'JSON format: { "title": "your concise title here" }\n### Chat History:\n<chat_history>\nUSER: Save notes.md.\n'
    "ASSISTANT: Done.\n</chat_history>",
    "continue, whole": "Given the following... please reply with a title for the chat that is 3-4 words in length, all "
    "words used should be directly related to the content of the chat, avoid using verbs unless they are directly "
    "related to the content of the chat, no additional text or explanation, you don't need ending punctuation.\n\n"
    "I saved it to notes.md.",
    "continue hole": "You are a HOLE FILLER. You are provided with a file containing holes.",
    "codestral": "[SUFFIX]return c[PREFIX]def add(a, b):",
    "deepseek": "<｜fim▁begin｜>def add(a, b):<｜fim▁hole｜>return c<｜fim▁end｜>",
    "short": "Generate a title for this chat:\nSave notes.md.",
    "one line": "Write a title for this conversation: Fix the login page in app.py and push it.",
    "quoted": 'Summarize this conversation "Save notes.md" in one line.',
    "the end": f"<messages>{'words ' * 2000}</messages>\nGenerate a title for this chat.",
}
SIDE_SYSTEM = {
    "opencode": "You are a title generator. You output ONLY a thread title. Nothing else.",
    "opencode summary": "You are a helpful AI assistant tasked with summarizing conversations.",
    "copilot": "You are an expert in crafting pithy titles for chatbot conversations.",
    "lobe": "You are a professional conversation summarizer. Generate a concise title that captures the essence.",
}
WORK = [
    "Write a title page for the report in notes.md.",
    "Summarize notes.md into summary.md.",
    "Complete the function in a.py and run its tests.",
    "Tag the release as v1.2 and push it.",
    "Rename the file chat.py to talk.py.",
    "Add a description to the pyproject of this package.",
    "Create a file named title.txt.",
    # Near misses: the words of a side request, and something to do.
    "Summarize this conversation. Save it in notes.md.",
    "Summarize this conversation into notes.md",
    "Summarize the discussion in issue 42 and close it.",
    "Summarize the thread in the Slack channel #garden.",
    "Summarize the messages in the inbox of today.",
    "Write a title for each chat in sessions.json.",
    "Write a function that generates a title for the conversation.",
    "Give every session a name in the database.",
    "Make a 5-word title for the blog post and put it at the top of post.md.",
    "Make a headline of at most 5 words for the garden show.",
    "Add tags to the chat page so that messages can be categorized.",
    "Generate tags for all my bookmarks.",
    "Suggest follow-up questions for the interview with Ida, and look up her book first.",
    "Add follow-up questions to the form.",
    "Generate search queries for the logs of last night and run them.",
    "Add auto-completion to the shell of this project.",
    "Why does code completion not work in my editor? Look at its log.",
    "Fill in the blank fields of form.pdf.",
    "What does <|fim_prefix|> mean? Look it up.",
    "<html><pre>a listing</pre></html> Turn this into Markdown and store it.",
    "Find [PREFIX] in all templates and replace it.",
    "The chat title is wrong in the header. Fix it.",
    "Our conversation about beans: go on with it and plant them.",
    f"Fix the parser.\n{'words ' * 300}\nSomeone once said: generate a title for this chat.\n{'words ' * 300}",
]
SYSTEM_OF_WORK = [
    "You are a helpful assistant that can summarize conversations, write code and search the web.",
    "You are Ida's gardener. Be brief. If the user asks for it, generate a title for this chat.",
    "You help in a team chat. When asked, summarize the conversation for the others.",
    "You are an expert in code completion engines and other tools of editors.",
    "Work on the tasks of the user. Use the chat's tools. Give every file a title.",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reserved(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """A server that is a model by default."""
    async with serving(tmp_path_factory.mktemp("reserved"), server_agent="client") as server:
        yield server


def chat(said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}]}


async def acts(server: Serving, said: Any = "Go.", client: Client | None = None, **asked: Any) -> bool:
    """Whether a request could write a file: a model that wants to tries it, whether or not a tool was offered."""
    server.fake.requests.clear()
    server.fake.calls(call("write_file", path="canary.txt", content="acted"))
    server.fake.reply("done")
    asked = {"headers": {}, **asked}
    assert text_of(await (client or server).ask(said, **asked)) == "done"
    places = [server.owners.config.workspace, *server.owners.config.home.glob("owners/*/workspace")]
    found = [place / "canary.txt" for place in places if (place / "canary.txt").exists()]
    for file in found:
        file.unlink()
    offered = bool((server.fake.requests[0].body or {}).get("tools"))
    assert offered == bool(found)
    return bool(found)


async def with_token(server: Serving, name: str, agent: str, owner: str = "anna") -> Client:
    await server.client(f"other-{name}")  # and with it a token for the person of the machine
    token = new_token()
    await server.store.add_token(name, owner, hash_of(token), ["use"], agent)
    return Client(server.url, server.http, token)


async def test_the_agent_acts_by_default(running):
    assert await acts(running)


@pytest.mark.parametrize("name", SIDE)
async def test_a_side_request_never_acts(running, name):
    assert not await acts(running, SIDE[name])
    assert not await acts(running, SIDE[name], model="everloop/agent", headers={"X-Agent": "own"})


@pytest.mark.parametrize("name", SIDE_SYSTEM)
async def test_a_side_request_is_recognised_by_its_system_message_too(running, name):
    assert not await acts(
        running, [{"role": "system", "content": SIDE_SYSTEM[name]}, {"role": "user", "content": "Go."}]
    )


async def test_a_side_request_in_a_session_does_not_act_either(running):
    assert not await acts(running, SIDE["zed"], headers={"X-Session": "editor"})
    assert await acts(running, "Go.", headers={"X-Session": "editor"})


@pytest.mark.parametrize("said", WORK)
async def test_work_is_not_a_side_request(said):
    assert not is_side_request(ChatRequest([{"role": "user", "content": said}]))


@pytest.mark.parametrize("system", SYSTEM_OF_WORK)
async def test_an_agents_own_rules_are_not_a_side_request(system):
    assert not is_side_request(ChatRequest([{"role": "user", "content": "Go."}], system))


async def test_a_side_request_gets_neither_the_agents_prompt_nor_loses_its_own_tools(running):
    running.fake.calls(call("forecast", city="Oslo"))
    body = await running.ask(SIDE["zed"], tools=[function("forecast")])
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert not await acts(running, SIDE["zed"])
    assert running.seen()[0] == {"role": "system", "content": "You are a helpful assistant."}


async def test_the_models_name_and_the_header_choose(running):
    assert await acts(running, model="everloop/agent")
    assert not await acts(running, model="everloop/chat")
    assert (running.fake.requests[-1].body or {})["model"] == "scripted"
    assert not await acts(running, headers={"X-Agent": "client"})
    assert not await acts(running, headers={"X-Agent": "client"}, model="everloop/agent")
    assert not await acts(running, headers={"X-Agent": "own"}, model="everloop/chat")
    status, error = await running.fails("Go.", {"X-Agent": "mine"})
    assert (status, error["param"]) == (400, "X-Agent")


async def test_both_names_are_listed(running):
    _, listed = await running.get("/v1/models")
    assert [model["id"] for model in listed["data"]] == ["scripted", "everloop/agent", "everloop/chat"]
    assert (await running.get("/v1/models/everloop/chat"))[0] == 200


async def test_the_name_of_a_mode_is_never_sent_as_a_models(tmp_path):
    async with serving(tmp_path, server_models=("*",)) as server:
        assert not await acts(server, model="everloop/chat")
        assert {(seen.body or {})["model"] for seen in server.fake.requests} == {"scripted"}


async def test_a_server_can_be_a_model_by_default(reserved):
    assert not await acts(reserved)
    assert await acts(reserved, model="everloop/agent")
    assert await acts(reserved, headers={"X-Agent": "own"})


async def test_no_request_lifts_the_limit_of_a_token_for_clients_only(running):
    client = await with_token(running, "editor", "client")
    assert not await acts(running, client=client)
    assert not await acts(running, client=client, model="everloop/agent", headers={"X-Agent": "own"})


async def test_a_token_for_clients_only_cannot_answer_the_agents_question(tmp_path):
    async with serving(tmp_path, policy=(Rule(do="ask", tool="write_file"),)) as server:
        client = await with_token(server, "approver", "client", "me")
        agent = await server.owners.agent("me")
        server.fake.calls(call("write_file", path="canary.txt", content="acted"))
        asked = await agent.ask("Write.", "desk", attended=True)
        assert "canary.txt" in asked.text
        for word in ("y", "/approve", "/approve always"):
            with contextlib.suppress(TimeoutError):  # it waits behind the question
                async with asyncio.timeout(0.5), client.post(chat(word), {"X-Session": "desk"}) as response:
                    await response.read()
            assert await agent.question("desk") is not None
        assert not (server.owners.config.workspace / "canary.txt").exists()


@pytest.mark.parametrize("word", ["y", "/approve"])
async def test_a_question_is_answered_over_the_api_with_a_token_only(tmp_path, word):
    async with serving(tmp_path, policy=(Rule(do="ask", tool="write_file"),)) as server:
        agent, canary = await server.owners.agent("me"), server.owners.config.workspace / "canary.txt"
        server.fake.calls(call("write_file", path="canary.txt", content="acted"))
        server.fake.reply("done")
        await agent.ask("Write.", "desk", attended=True)
        with contextlib.suppress(TimeoutError):  # a "y" without a token is a message, which waits behind the question
            async with asyncio.timeout(0.5), server.post(chat(word), {"X-Session": "desk"}) as response:
                await response.read()
        assert await agent.question("desk") is not None
        assert not canary.exists()
        client = await with_token(server, "desk", "", "me")
        async with client.post(chat(word), {"X-Session": "desk"}) as response:
            assert "done" in await response.text()
        assert canary.read_text() == "acted"


async def test_a_token_can_enable_the_agent_of_a_server_that_is_a_model(reserved):
    assert await acts(reserved, client=await with_token(reserved, "own", "own"))
    assert not await acts(reserved, client=await with_token(reserved, "plain", ""))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tool_choice_none_keeps_the_agents_tools_out(running, stream):
    assert not await acts(running, tool_choice="none")
    running.fake.calls(call("write_file", path="canary.txt", content="acted"))
    running.fake.reply("done")
    streamed = await running.stream("Go.", tool_choice="none")
    assert streamed.text == "done"
    assert not (running.owners.config.workspace / "canary.txt").exists()
