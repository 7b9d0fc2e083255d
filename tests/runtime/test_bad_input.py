"""Failures of models, tools, disks and files: a clear message, nothing lost, nothing left hanging."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, Config, InboundMessage, MessageBus, tool
from everloop.errors import StoreError
from everloop.log import CallEnded, ModelAnswered, TurnEnded, UserSaid
from everloop.providers.base import LLMProvider, LLMResponse, ToolCallRequest
from everloop.providers.openai import OpenAIProvider
from everloop.providers.retry import Resilient
from everloop.runtime import dispatcher as local
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import FakeOpenAI, ScriptedProvider, call, check_conversation
from tests.support.model_servers import server as server

APOLOGY = "Sorry, I encountered an error: "


@tool(replay="safe")
async def echo(text: str = "") -> str:
    """Say it again."""
    return text


@pytest.fixture
async def begin(tmp_path, caplog) -> AsyncIterator[Callable[..., AgentLoop]]:
    """Create loops, close them, and check for leftover tasks and unhandled errors."""
    before = asyncio.all_tasks()
    forgotten: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context["message"]))
    loops: list[AgentLoop] = []

    def make(provider: LLMProvider, store: Any = None, **options: Any) -> AgentLoop:
        agent = AgentLoop(MessageBus(), provider, tmp_path, store=store or tmp_path / "store.db", **options)
        agent.tools.register(echo)
        loops.append(agent)
        return agent

    yield make
    for agent in loops:
        await asyncio.wait_for(agent.close(), 30)
    loops.clear()
    gc.collect()
    await asyncio.sleep(0)
    assert not asyncio.all_tasks() - before - {asyncio.current_task()}
    assert forgotten == []


def over_http(server: FakeOpenAI, **options: Any) -> OpenAIProvider:
    return OpenAIProvider(server.base_url, model="tools-0x0", **options)


def raw_answer(calls: str, content: str = "null") -> bytes:
    message = f'{{"role":"assistant","content":{content},"tool_calls":{calls}}}'
    return f'{{"choices":[{{"index":0,"message":{message},"finish_reason":"tool_calls"}}]}}'.encode()


def raw_call(id: str, name: str, arguments: str) -> str:
    return json.dumps([{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}])


def say_raw(server: FakeOpenAI, data: bytes) -> None:
    server.raw(data, content_type="application/json")


def results(server: FakeOpenAI) -> list[str]:
    body = server.requests[-1].body
    assert body is not None
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


# ---------------------------------------------------------------------------------------------- what models do


@pytest.mark.parametrize("arguments", ["{not json", "[1, 2]", '"text"', "7", '{"text": "a"', '{"text": "\\ud800"}'])
async def test_arguments_that_are_not_an_object_are_returned_to_the_model_as_an_error(begin, server, arguments):
    say_raw(server, raw_answer(raw_call("c1", "echo", arguments)))
    server.reply("I will do better.")
    assert await begin(over_http(server)).process_direct("go") == "I will do better."
    assert server.invalid == 0
    assert len(results(server)) == 1


@pytest.mark.parametrize("name", ["rm_rf", "no such tool", "", "x" * 200, "a\u0000b", "functions.echo"])
async def test_an_unknown_tool_is_returned_to_the_model_as_an_error(begin, server, name):
    say_raw(server, raw_answer(raw_call("c1", name, "{}")))
    server.reply("I see.")
    assert await begin(over_http(server)).process_direct("go") == "I see."
    assert server.invalid == 0
    assert '"status":"error"' in results(server)[0]


async def test_empty_answers_are_retried_a_limited_number_of_times(begin, server):
    agent = begin(over_http(server))
    say_raw(server, raw_answer("null"))
    server.reply("now")
    assert await agent.process_direct("go") == "now"
    for content in ("null", '""'):
        say_raw(server, raw_answer("[]", content))
    assert "empty answer" in await agent.process_direct("go")
    server.reply("fine")
    assert await agent.process_direct("go") == "fine"
    assert server.invalid == 0


async def test_an_endless_tool_loop_ends_at_the_limit(begin, server):
    provider = OpenAIProvider(server.base_url, model="tools-1000x1")
    answer = await begin(provider, max_iterations=7).process_direct("mark:a go")
    assert "7 rounds" in answer
    assert len(server.requests) == 7
    assert server.invalid == 0


async def test_an_interrupted_stream_is_retried(begin, server):
    server.cut(3, "one two three four")
    server.reply("one two three four five")
    agent = begin(Resilient([(over_http(server), None)], retries=1, base_delay=0.01))
    assert await agent.process_direct("go", on_event=lambda event: None) == "one two three four five"


async def test_a_repeatedly_interrupted_stream_is_an_error_in_the_chat_and_the_next_message_works(begin, server):
    server.cut(3)
    agent = begin(over_http(server))
    answer = await agent.process_direct("go", on_event=lambda event: None)
    assert answer.startswith(APOLOGY)
    assert "\n" not in answer
    server.reply("better")
    assert await agent.process_direct("go") == "better"
    assert server.invalid == 0


async def test_ten_megabytes_go_in_and_out(begin, server):
    big = "x" * 10_000_000
    server.reply(big, tokens=[big])
    server.reply("short")
    agent = begin(over_http(server, answer_limit=20_000_000), config=Config(window=100_000_000))
    assert await agent.process_direct(big) == big
    assert await agent.process_direct("and?") == "short"
    body = server.requests[-1].body
    assert body is not None
    assert [len(message["content"]) for message in body["messages"][1:]] == [len(big), len(big), 4]


@pytest.mark.parametrize("across", ["answer", "rounds", "turns"])
async def test_duplicate_call_ids_are_distinguished(begin, server, across):
    agent = begin(over_http(server))
    same = ToolCallRequest("call_0", "echo", {"text": "a"})
    if across == "answer":
        server.calls(same, same, same)
        server.reply("done")
    elif across == "rounds":
        server.calls(same)
        server.calls(same)
        server.reply("done")
    else:
        server.calls(same)
        server.reply("done")
        await agent.process_direct("first")
        server.calls(same)
        server.reply("done")
    assert await agent.process_direct("go") == "done"
    assert server.invalid == 0
    assert set(results(server)) == {"a"}


async def test_lone_surrogates_are_replaced_on_their_way(begin, tmp_path):
    @tool
    async def odd() -> str:
        """Give what no encoder takes."""
        return "half \ud83d"

    provider = ScriptedProvider(
        [
            LLMResponse("say \ud83d", [ToolCallRequest("\ud83d", "odd"), call("echo", text="\ud83d")]),
            lambda messages, _: RuntimeError("broken \ud83d"),
            "fine",
        ]
    )
    agent = begin(provider)
    agent.tools.register(odd)
    assert await agent.process_direct("what \ud83d") == f"{APOLOGY}broken ?"
    assert await agent.process_direct("again") == "fine"
    for request in provider.requests:
        assert "\ud83d" not in str(request.messages)


async def test_a_thousand_calls_in_one_answer_all_get_a_result(begin):
    provider = ScriptedProvider([[call("echo", text=str(n)) for n in range(1000)], "many"])
    assert await begin(provider).process_direct("go") == "many"
    said = [message["content"] for message in provider.requests[1].messages if message["role"] == "tool"]
    assert said[:64] == [str(n) for n in range(64)]
    assert len(said) == 1000
    assert all("at most 64 calls" in result for result in said[64:])


async def test_a_thousand_calls_from_a_server_are_refused_in_one_line(begin, server):
    server.calls(*(ToolCallRequest(f"c{n}", "echo", {"text": str(n)}) for n in range(1000)))
    server.reply("better")
    agent = begin(over_http(server))
    assert "more than 512 tool calls" in await agent.process_direct("go")
    assert await agent.process_direct("again") == "better"


# ---------------------------------------------------------------------------------------------- what tools do


async def test_a_tool_that_raises_or_returns_megabytes_does_no_harm(begin):
    @tool
    async def breaks() -> str:
        """Break."""
        raise ZeroDivisionError("by zero")

    @tool
    async def floods() -> str:
        """Flood."""
        return "y" * 5_000_000

    provider = ScriptedProvider([[call("breaks"), call("floods"), call("echo", text="ok")], "done"])
    agent = begin(provider)
    agent.tools.register(breaks)
    agent.tools.register(floods)
    assert await agent.process_direct("go") == "done"
    broken, flood, fine = (message["content"] for message in provider.requests[1].messages[-3:])
    assert "by zero" in broken
    assert len(flood) <= 100_000
    assert "left out" in flood
    assert fine == "ok"


async def test_a_tool_that_never_returns_times_out(begin):
    @tool(timeout=0.05)
    async def sleeps() -> str:
        """Sleep."""
        await asyncio.sleep(3600)
        return ""

    provider = ScriptedProvider([[call("sleeps"), call("echo", text="ok")], "done"])
    agent = begin(provider)
    agent.tools.register(sleeps)
    assert await agent.process_direct("go") == "done"
    assert "timed out after 0.05 seconds" in provider.requests[1].messages[-2]["content"]


# ---------------------------------------------------------------------------------------------- what disks do


def fill_disk(store: SQLiteStore) -> Callable[[], None]:
    """Prevent the database from growing; the returned function frees space again."""

    def limit(pages: int | None) -> None:
        def work(db: sqlite3.Connection) -> None:
            now = db.execute("PRAGMA page_count").fetchone()[0]
            db.execute(f"PRAGMA max_page_count = {now if pages is None else pages}")

        store.writer.call(work)

    limit(None)
    return lambda: limit(1_000_000)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(local, "RETRY_SECONDS", 0.05)


async def test_a_turn_continues_once_there_is_space_again_and_nothing_is_lost(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "RETRY_SECONDS", 0.5)
    store = SQLiteStore(tmp_path / "store.db")
    ran: list[str] = []
    free: list[Callable[[], None]] = []
    freed = asyncio.Event()

    @tool
    async def work(n: int) -> str:
        """Work once."""
        ran.append(str(n))
        if n == 2 and not free:
            free.append(await asyncio.to_thread(fill_disk, store))
        return f"{n} " * 10_000

    async def last(messages: Any, _: Any) -> str:
        assert check_conversation(messages) == []
        await freed.wait()  # a small write may fit on a full disk if the turn is retried earlier
        return "all done"

    agent = begin(ScriptedProvider([call("work", n=1), call("work", n=2), last]), store)
    agent.tools.register(work)
    task = asyncio.create_task(agent.run())
    await agent.bus.publish_inbound(InboundMessage("test", "u", "1", "go"))
    said = (await asyncio.wait_for(agent.bus.consume_outbound(), 30)).content
    assert said.startswith(APOLOGY)
    assert "is full: free some space" in said
    assert "\n" not in said
    await agent.bus.publish_inbound(InboundMessage("test", "u", "2", "z" * 50_000))
    assert "is full" in (await asyncio.wait_for(agent.bus.consume_outbound(), 30)).content
    await asyncio.to_thread(free[0])
    freed.set()
    assert (await asyncio.wait_for(agent.bus.consume_outbound(), 30)).content == "all done"
    assert ran == ["1", "2"]
    agent.stop()
    await task
    log = [one.entry for one in await store.read_log(1)]
    assert [entry.status for entry in log if isinstance(entry, CallEnded)] == ["ok", "interrupted"]
    assert isinstance(log[-1], TurnEnded)


async def test_a_message_that_waits_on_disk_is_taken_up_when_the_store_can_be_written_again(begin, tmp_path, soon):
    store = SQLiteStore(tmp_path / "store.db", lock_seconds=0.02)
    await store.accept(InboundMessage("test", "u", "1", "hi").addressed())
    other = await asyncio.to_thread(sqlite3.connect, tmp_path / "store.db", check_same_thread=False)
    agent = begin(ScriptedProvider(["hello"]), store)
    await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
    task = asyncio.create_task(agent.resume("test:1"))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(other.execute, "ROLLBACK")
    await asyncio.to_thread(other.close)
    message = await asyncio.wait_for(agent.bus.consume_outbound(), 30)
    assert message.content == "hello"
    await task


async def test_a_locked_store_is_reported_in_one_line_and_works_again_once_unlocked(begin, tmp_path):
    store = SQLiteStore(tmp_path / "store.db", lock_seconds=0.05)
    agent = begin(ScriptedProvider(["one", "two"]), store)
    assert await agent.process_direct("hi") == "one"
    other = await asyncio.to_thread(sqlite3.connect, tmp_path / "store.db", check_same_thread=False)
    await asyncio.to_thread(other.execute, "BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked by another program: close it and try again") as raised:
        await asyncio.wait_for(agent.process_direct("hi"), 30)
    assert "\n" not in str(raised.value)
    await asyncio.to_thread(other.execute, "ROLLBACK")
    await asyncio.to_thread(other.close)
    assert await agent.process_direct("hi") == "two"


async def test_a_turn_that_met_a_lock_in_its_middle_is_finished_later(begin, tmp_path, soon):
    # stays open, since creating the file takes locks too, and more time than this
    made = SQLiteStore(tmp_path / "store.db")
    await made.workers()
    store = SQLiteStore(tmp_path / "store.db", lock_seconds=0.02)
    other = await asyncio.to_thread(sqlite3.connect, tmp_path / "store.db", check_same_thread=False)

    @tool
    async def lock() -> str:
        """Lock the store."""
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        return "locked"

    agent = begin(ScriptedProvider([call("lock"), "finished"]), store)
    agent.tools.register(lock)
    task = asyncio.create_task(agent.run())
    await agent.bus.publish_inbound(InboundMessage("test", "u", "1", "go"))
    assert "locked by another program" in (await asyncio.wait_for(agent.bus.consume_outbound(), 30)).content
    await asyncio.to_thread(other.execute, "ROLLBACK")
    await asyncio.to_thread(other.close)
    assert (await asyncio.wait_for(agent.bus.consume_outbound(), 30)).content == "finished"
    agent.stop()
    await task
    await made.close()


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 8000])
async def test_a_damaged_store_is_reported_in_one_line_and_left_as_it_is(begin, tmp_path, content):
    (tmp_path / "store.db").write_bytes(content)
    agent = begin(ScriptedProvider([]))
    with pytest.raises(StoreError, match="damaged or not a database") as raised:
        await agent.process_direct("hi")
    assert "\n" not in str(raised.value)
    with pytest.raises(StoreError, match="damaged or not a database"):
        await agent.run()
    assert (tmp_path / "store.db").read_bytes() == content


async def test_a_damaged_message_does_not_block_the_others(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    for chat, text in (("1", "torn"), ("1", "one"), ("2", "two")):
        await store.accept(InboundMessage("test", "u", chat, text).addressed())
    for text in ("/stop torn", "/status"):
        await store.accept(InboundMessage("test", "u", "3", text).addressed(), "urgent")
    await store.writer.submit(lambda db: db.execute("UPDATE inbox SET data = '{' WHERE data LIKE '%torn%'").rowcount)
    bus = DurableBus(store)
    async with AgentLoop(bus, ScriptedProvider(["hello"], repeat_last=True), tmp_path, store=store) as agent:
        task = asyncio.create_task(agent.run())
        answers = [await asyncio.wait_for(bus.consume_outbound(), 30) for _ in range(3)]
        assert {answer.chat_id for answer in answers} == {"1", "2", "3"}
        assert [answer.content for answer in answers].count("hello") == 2
        assert (await store.overview()).damaged_incoming == 2
        agent.stop()
        await task


async def test_a_store_that_is_damaged_in_its_middle_is_an_error_in_the_chat(begin, tmp_path):
    agent = begin(ScriptedProvider(["x" * 3000], repeat_last=True))
    for n in range(20):
        await agent.process_direct("y" * 3000, f"cli:{n % 3}")
    await agent.close()
    data = bytearray((tmp_path / "store.db").read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 : page * 4096 + 200] = b"\xff" * 200
    (tmp_path / "store.db").write_bytes(data)
    again = begin(ScriptedProvider(["x"], repeat_last=True))
    with pytest.raises(StoreError, match="damaged"):
        await asyncio.wait_for(again.process_direct("hi", "cli:1"), 30)


async def test_a_store_path_that_is_a_folder_is_reported_in_one_line(begin, tmp_path):
    (tmp_path / "folder").mkdir()
    agent = begin(ScriptedProvider([]), tmp_path / "folder")
    with pytest.raises(StoreError, match="is a folder") as raised:
        await agent.process_direct("hi")
    assert "\n" not in str(raised.value)


async def test_a_store_path_below_a_file_is_reported_in_one_line(begin, tmp_path):
    (tmp_path / "file").write_text("")
    agent = begin(ScriptedProvider([]), tmp_path / "file" / "store.db")
    with pytest.raises(StoreError, match="cannot open the store") as raised:
        await agent.process_direct("hi")
    assert "\n" not in str(raised.value)


async def test_an_unwritable_store_path_is_reported_in_one_line(begin):
    agent = begin(ScriptedProvider([]), Path("/proc/everloop/store.db"))
    with pytest.raises(StoreError, match="cannot open the store") as raised:
        await agent.process_direct("hi")
    assert "\n" not in str(raised.value)
    task = asyncio.create_task(agent.run())
    with pytest.raises(StoreError, match="cannot open the store"):
        await asyncio.wait_for(task, 30)


async def test_unreadable_bootstrap_files_are_left_out(begin, tmp_path):
    (tmp_path / "AGENTS.md").mkdir()
    (tmp_path / "SOUL.md").symlink_to("SOUL.md")
    (tmp_path / "USER.md").write_bytes(b"\xff\xfe broken \x00 bytes")
    provider = ScriptedProvider(["hi"])
    assert await begin(provider).process_direct("hi") == "hi"
    assert "broken" in provider.requests[0].messages[0]["content"]


async def test_a_missing_attachment_is_only_named(begin, tmp_path):
    (tmp_path / "folder.png").mkdir()
    provider = ScriptedProvider(["hi"])
    media = [str(tmp_path / "gone.png"), str(tmp_path / "folder.png"), "", "x" * 5000 + ".png", "a\x00b.png"]
    assert await begin(provider).process_direct("look", media=media) == "hi"
    assert "[attachment: " in provider.requests[0].messages[-1]["content"]


async def test_an_invalid_provider_response_is_an_error_in_the_chat(begin):
    class Nonsense(LLMProvider):
        async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            return {"content": "not a response"}

    agent = begin(Nonsense())
    assert (await agent.process_direct("hi")).startswith(APOLOGY)
    log = [one.entry for one in await agent.store.read_log(1)]
    assert [type(entry) for entry in log] == [UserSaid, TurnEnded]
    assert not [entry for entry in log if isinstance(entry, ModelAnswered)]
