"""The agent loop: what a chat may rely on, in order and all at once, while it is stopped, steered and watched."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, LLMProvider, LLMResponse, MessageBus, Tool, tool
from everloop import events as ev
from everloop.log import CallEnded, ModelAnswered, TurnEnded, UserSaid
from everloop.messages import encode_json
from everloop.providers.base import Delta
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ChatOnlyProvider, ScriptedProvider, call, check_conversation
from everloop.tools.context import current_call


class Gate:
    """A step of a script that waits until it is opened."""

    def __init__(self, then: Any = "opened") -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        self.then = then

    async def __call__(self, messages: Any, tools: Any) -> Any:
        self.reached.set()
        await self.open.wait()
        return self.then


class Held(Tool):
    """A tool that runs until it is let go."""

    name = "held"
    description = "Waits."
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self, parallel: bool = True) -> None:
        self.parallel = parallel
        self.started: list[int] = []
        self.cancelled = 0
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.together = self.most = 0

    async def execute(self, n: int = 0) -> str:
        self.started.append(n)
        self.together += 1
        self.most = max(self.most, self.together)
        self.begun.set()
        try:
            await self.go.wait()
            for _ in range(5 - n):  # the last to start is the first to end
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.together -= 1
        return f"held {n}"


class Chat:
    """A running loop and somebody at the other end of its bus."""

    def __init__(self, agent: AgentLoop, bus: MessageBus) -> None:
        self.agent = agent
        self.bus = bus
        self.task = asyncio.create_task(agent.run())

    async def say(self, text: str, chat: str = "1", **options: Any) -> None:
        await self.bus.publish_inbound(InboundMessage("test", "user", chat, text, **options))

    async def hear(self) -> str:
        return (await asyncio.wait_for(self.bus.consume_outbound(), 10)).content

    async def ask(self, text: str, chat: str = "1", **options: Any) -> str:
        await self.say(text, chat, **options)
        return await self.hear()

    async def stop(self) -> None:
        self.agent.stop()
        await asyncio.wait_for(self.task, 5)


@pytest.fixture
async def start(tmp_path) -> AsyncIterator[Callable[..., Chat]]:
    """Starts loops on one store; all are closed in the end, and no task may be left."""
    before = asyncio.all_tasks()
    chats: list[Chat] = []

    def begin(provider: LLMProvider, bus: MessageBus | None = None, **options: Any) -> Chat:
        bus = bus or MessageBus()
        options.setdefault("store", tmp_path / "store.db")
        chats.append(Chat(AgentLoop(bus, provider, tmp_path, **options), bus))
        return chats[-1]

    yield begin
    for chat in chats:
        if not chat.task.done():
            await chat.stop()
        await chat.agent.close()
    await asyncio.sleep(0)
    assert not asyncio.all_tasks() - before - {asyncio.current_task()}


async def entries(tmp_path: Any, key: str = "test:1") -> list[Any]:
    store = SQLiteStore(tmp_path / "store.db")
    info = await store.session("me", key)
    logged = await store.read_log(info.id) if info else []
    await store.close()
    return [one.entry for one in logged]


# ---------------------------------------------------------------------------------------------- order


async def test_messages_of_one_session_are_answered_in_order(start):
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True))
    for n in range(20):
        await chat.say(str(n))
    assert [await chat.hear() for _ in range(20)] == [str(n) for n in range(20)]


async def test_a_slow_session_delays_no_other(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate, "quick"]))
    await chat.say("slow", "1")
    await gate.reached.wait()
    assert await chat.ask("hi", "2") == "quick"
    gate.open.set()
    assert await chat.hear() == "opened"


async def test_two_hundred_sessions_at_once(start):
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True))
    for n in range(200):
        await chat.say(f"from {n}", str(n))
    assert {await chat.hear() for _ in range(200)} == {f"from {n}" for n in range(200)}


async def test_direct_calls_at_once_in_one_session_keep_their_order(start):
    seen: list[str] = []

    def echo(messages: Any, _: Any) -> str:
        seen.append(messages[-1]["content"])
        return messages[-1]["content"]

    chat = start(ScriptedProvider([echo], repeat_last=True))
    texts = [str(n) for n in range(15)]
    answers = await asyncio.gather(*(chat.agent.process_direct(text) for text in texts))
    assert seen == texts
    assert list(answers) == texts


async def test_a_message_with_a_known_id_is_taken_once(start, tmp_path):
    chat = start(ScriptedProvider(["one", "two"]))
    await chat.say("hi", id="m1")
    await chat.say("hi", id="m1")
    assert await chat.hear() == "one"
    await chat.say("hi", id="m1")
    assert await chat.ask("again", id="m2") == "two"
    assert [entry.content for entry in await entries(tmp_path) if isinstance(entry, UserSaid)] == ["hi", "again"]


async def test_whoever_hands_in_a_known_id_gets_the_same_answer(start):
    gate = Gate("the answer")
    chat = start(ScriptedProvider([gate]))
    message = InboundMessage("test", "user", "1", "hi", id="m1", reply=False).addressed()
    first = await chat.agent._dispatcher.submit(message)
    await gate.reached.wait()
    second = await chat.agent._dispatcher.submit(message)
    third = await chat.agent._dispatcher.submit(message)
    gate.open.set()
    assert set(await asyncio.wait_for(asyncio.gather(first, second, third), 5)) == {"the answer"}
    late = await chat.agent._dispatcher.submit(message)
    assert await asyncio.wait_for(late, 5) == "the answer"


# ---------------------------------------------------------------------------------------------- errors and limits


async def test_an_error_is_a_readable_reply_and_the_loop_goes_on(start):
    chat = start(ScriptedProvider([RuntimeError("no such model"), "fine"]))
    assert await chat.ask("hi") == "Sorry, I encountered an error: no such model"
    assert await chat.ask("hi") == "fine"


async def test_a_message_that_cannot_be_written_is_answered_too(start):
    chat = start(ScriptedProvider(["fine"]))
    assert (await chat.ask("hi", metadata={"odd": object()})).startswith("Sorry, I encountered an error: ")
    assert (await chat.ask(None)).startswith("Sorry, I encountered an error: ")
    assert await chat.ask("hi") == "fine"


async def test_the_work_is_kept_when_the_rounds_are_used_up(start):
    provider = ScriptedProvider(
        [call("list_dir", path="."), call("list_dir", path="."), lambda messages, _: str(len(messages))]
    )
    chat = start(provider, max_iterations=2)
    assert "2 rounds" in await chat.ask("work")
    assert await chat.ask("go on") == "8"  # system, user, 2 × (call, result), notice, user


async def test_a_full_bus_pushes_back(start):
    bus = MessageBus(size=2)
    await bus.publish_inbound(InboundMessage("test", "u", "1", "a"))
    await bus.publish_inbound(InboundMessage("test", "u", "1", "b"))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(bus.publish_inbound(InboundMessage("test", "u", "1", "c")), 0.01)
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True), bus)
    publisher = asyncio.create_task(chat.say("d"))
    assert [await chat.hear() for _ in range(3)] == ["a", "b", "d"]
    await publisher


# ---------------------------------------------------------------------------------------------- busy


async def test_a_steered_message_reaches_the_model_at_its_next_round(start):
    provider = ScriptedProvider([call("held"), lambda messages, _: messages[-1]["content"]])
    chat = start(provider, busy="steer")
    held = Held()
    chat.agent.tools.register(held)
    await chat.say("work")
    await held.begun.wait()
    await chat.say("and hurry")
    await until(lambda: chat.bus.inbound_size == 0)
    await asyncio.sleep(0.05)
    held.go.set()
    assert await chat.hear() == "and hurry"
    assert [message["role"] for message in provider.requests[1].messages] == [
        "system", "user", "assistant", "tool", "user",
    ]  # fmt: skip


async def test_a_message_steered_in_while_the_answer_is_written_is_answered_in_the_same_turn(start, tmp_path):
    gate = Gate("first answer")
    provider = ScriptedProvider([gate, "second answer"])
    chat = start(provider, busy="steer")
    await chat.say("work")
    await gate.reached.wait()
    await chat.say("wait, also this")
    await asyncio.sleep(0.05)
    gate.open.set()
    assert await chat.hear() == "second answer"
    assert [message["content"] for message in provider.requests[1].messages[1:]] == [
        "work", "first answer", "wait, also this",
    ]  # fmt: skip
    assert sum(isinstance(entry, TurnEnded) for entry in await entries(tmp_path)) == 1


async def test_a_steered_message_never_overtakes_one_that_waits(start, tmp_path):
    gate = Gate("first")
    chat = start(ScriptedProvider([gate, "second"]), busy="steer")
    await chat.say("one")
    await gate.reached.wait()
    await chat.say("/new")
    await chat.say("two")
    await asyncio.sleep(0.05)
    gate.open.set()
    assert await chat.hear() == "first"
    assert "new conversation" in await chat.hear()
    assert await chat.hear() == "second"


async def test_an_interrupting_message_replaces_the_running_turn(start, tmp_path):
    gate = Gate()
    provider = ScriptedProvider([gate, "the new one"])
    chat = start(provider, busy="interrupt")
    await chat.say("old")
    await gate.reached.wait()
    assert await chat.ask("new") == "the new one"
    assert [type(entry).__name__ for entry in await entries(tmp_path)] == [
        "UserSaid", "TurnEnded", "UserSaid", "ModelAnswered", "TurnEnded",
    ]  # fmt: skip
    assert check_conversation(provider.requests[-1].messages) == []


async def test_an_interrupting_message_replaces_a_turn_that_is_only_beginning(start):
    provider = ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True)
    chat = start(provider, busy="interrupt")
    await asyncio.gather(*(chat.say(str(n)) for n in range(5)))
    assert await chat.hear() == "4"


# ---------------------------------------------------------------------------------------------- commands


async def test_stop_cancels_tools_at_once_and_keeps_the_history_valid(start, tmp_path):
    provider = ScriptedProvider([[call("held", n=1), call("held", n=2)], "still here"])
    chat = start(provider)
    held = Held()
    chat.agent.tools.register(held)
    await chat.say("work")
    await until(lambda: len(held.started) == 2)
    await chat.say("/stop")
    assert {await chat.hear(), await chat.hear()} == {"Stopped. What was done so far is kept."}
    assert held.cancelled == 2
    assert await chat.ask("and now?") == "still here"
    results = [entry for entry in await entries(tmp_path) if isinstance(entry, CallEnded)]
    assert [result.status for result in results] == ["cancelled", "cancelled"]
    assert all("outcome unknown" in result.content for result in results)


async def test_stop_cancels_the_model_call_and_keeps_the_text_that_had_come(start, tmp_path):
    chat = start(ScriptedProvider(["one two " + "three " * 500], token_delay=0.01))
    words: list[str] = []
    chat.agent.watch("test:1", lambda event: words.append(event.text) if isinstance(event, ev.Text) else None)
    await chat.say("count")
    await until(lambda: len(words) >= 2)
    await chat.say("/stop")
    assert {await chat.hear(), await chat.hear()} == {"Stopped. What was done so far is kept."}
    answered = [entry for entry in await entries(tmp_path) if isinstance(entry, ModelAnswered)]
    assert answered[0].content
    assert answered[0].content.startswith("one two ")
    assert answered[0].finish_reason == "cancelled"


async def test_stop_right_behind_a_message_stops_its_turn(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate], repeat_last=True))
    await chat.say("work")
    await chat.say("/stop")
    assert await chat.hear() == "Stopped. What was done so far is kept."
    assert await chat.hear() == "Stopped. What was done so far is kept."
    assert "running: nothing" in await chat.ask("/status")


async def test_stop_with_nothing_running_says_so(start):
    chat = start(ScriptedProvider([]))
    assert await chat.ask("/stop") == "Nothing is running."
    assert await chat.agent.process_direct("/stop") == "Nothing is running."


async def test_a_stopped_turn_does_not_stop_the_next_one(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate, "next"]))
    await chat.say("work")
    await gate.reached.wait()
    await chat.say("behind it")
    await asyncio.sleep(0.05)
    await chat.say("/stop")
    said = [await chat.hear() for _ in range(3)]
    assert said.count("next") == 1


async def test_new_begins_a_new_conversation_in_its_place(start):
    provider = ScriptedProvider([lambda messages, _: str(len(messages))], repeat_last=True)
    chat = start(provider)
    for text in ("a", "b", "/new", "c"):
        await chat.say(text)
    said = [await chat.hear() for _ in range(4)]
    assert said[:2] == ["2", "4"]
    assert "new conversation" in said[2]
    assert said[3] == "2"
    assert "new conversation" in await chat.agent.process_direct("/new", "test:1")
    assert await chat.agent.process_direct("d", "test:1") == "2"


@pytest.mark.parametrize("text", ["/help", " /HELP ", "/help@the_bot"])
async def test_help_lists_the_commands(start, text):
    chat = start(ScriptedProvider([]))
    for said in (await chat.ask(text), await chat.agent.process_direct(text)):
        assert all(f"/{name}" in said for name in ("stop", "new", "help", "status"))


async def test_status_tells_what_runs(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate], model="small-model"))
    assert "running: nothing" in await chat.ask("/status")
    await chat.say("work")
    await gate.reached.wait()
    said = await chat.ask("/status")
    assert "model: small-model" in said
    assert "running: turn " in said
    assert "session: test:1, 1 entries" in said
    gate.open.set()
    await chat.hear()


async def test_what_only_looks_like_a_command_goes_to_the_model(start):
    chat = start(ScriptedProvider(["yes"], repeat_last=True))
    for text in ("/stop it please", "/unknown", "stop"):
        assert await chat.ask(text) == "yes"


# ---------------------------------------------------------------------------------------------- from inside the system


@pytest.mark.parametrize(
    ("chat_id", "channel", "chat", "session"),
    [
        ("telegram:12", "telegram", "12", "telegram:12"),
        ("slack:C1:thread:9", "slack", "C1:thread:9", "slack:C1:thread:9"),
        ("direct", "cli", "direct", "cli:direct"),
    ],
)
async def test_a_system_message_works_in_its_origins_session_and_answers_there(start, chat_id, channel, chat, session):
    provider = ScriptedProvider(["hello", "the sub-agent is done"])
    running = start(provider)
    await running.agent.process_direct("hi", session)
    await running.bus.publish_inbound(InboundMessage("system", "spawn", chat_id, "result: 42"))
    answer = await asyncio.wait_for(running.bus.consume_outbound(), 5)
    assert (answer.channel, answer.chat_id, answer.content) == (channel, chat, "the sub-agent is done")
    assert [message["content"] for message in provider.requests[1].messages[1:]] == ["hi", "hello", "result: 42"]


async def test_each_call_knows_its_own_turn(start):
    @tool
    async def whereami() -> str:
        """Tell where this call comes from."""
        await asyncio.sleep(0.01)
        found = current_call()
        return f"{found.channel}|{found.chat_id}|{found.session}|{found.turn}|{found.idempotency_key}"

    def step(messages: Any, _: Any) -> Any:
        if messages[-1]["role"] == "user":
            return [call("whereami"), call("whereami")]
        return f"{messages[-2]['content']} {messages[-1]['content']}"

    chat = start(ScriptedProvider([step], repeat_last=True))
    chat.agent.tools.register(whereami)
    for n in range(10):
        await chat.say("where?", f"c{n}")
    turns = set()
    for _ in range(10):
        message = await asyncio.wait_for(chat.bus.consume_outbound(), 5)
        first, second = message.content.split()
        channel, chat_id, session, turn, key = first.split("|")
        assert (channel, chat_id, session) == ("test", message.chat_id, f"test:{message.chat_id}")
        assert second.split("|")[:4] == [channel, chat_id, session, turn]
        assert key != second.split("|")[4]
        assert key.startswith(turn)
        turns.add(turn)
    assert len(turns) == 10


# ---------------------------------------------------------------------------------------------- tools side by side


async def test_parallel_calls_start_together_and_their_results_keep_the_order_of_the_calls(start):
    provider = ScriptedProvider([[call("held", n=n) for n in range(4)], "ok"])
    chat = start(provider)
    held = Held()
    chat.agent.tools.register(held)
    await chat.say("go")
    await until(lambda: len(held.started) == 4)
    held.go.set()
    assert await chat.hear() == "ok"
    assert [message["content"] for message in provider.requests[1].messages[-4:]] == [f"held {n}" for n in range(4)]


async def test_a_tool_that_is_not_parallel_runs_alone(start):
    provider = ScriptedProvider([[call("held", n=0), call("list_dir"), call("held", n=1), call("held", n=2)], "ok"])
    chat = start(provider)
    held = Held(parallel=False)
    held.go.set()
    chat.agent.tools.register(held)
    assert await chat.ask("go") == "ok"
    assert held.started == [0, 1, 2]
    assert held.most == 1


# ---------------------------------------------------------------------------------------------- watching


async def test_events_come_in_the_order_of_what_happens(start):
    provider = ScriptedProvider(
        [
            LLMResponse("Let me look.", [call("list_dir", path=".")], reasoning="hm"),
            LLMResponse("It is empty.", usage={"total_tokens": 7}),
        ]
    )
    chat = start(provider)
    seen: list[ev.Event] = []
    await chat.agent.process_direct("look", on_event=seen.append)
    kinds = [type(event).__name__ for event in seen]
    assert [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind] == [
        "TurnStarted", "Reasoning", "Text", "ToolStarted", "ToolEnded", "Text", "Usage", "TurnEnded",
    ]  # fmt: skip
    assert "".join(event.text for event in seen if isinstance(event, ev.Text)) == "Let me look.It is empty."
    assert seen[-1] == ev.TurnEnded(seen[0].turn, "answer", "It is empty.")  # type: ignore[union-attr]


async def test_a_provider_is_streamed_only_while_somebody_watches(start):
    provider = ScriptedProvider(["a", "b"])
    chat = start(provider)
    await chat.agent.process_direct("x")
    await chat.agent.process_direct("x", on_event=lambda event: None)
    assert [request.streamed for request in provider.requests] == [False, True]


async def test_a_provider_with_only_chat_is_watched_too(start):
    chat = start(ChatOnlyProvider([LLMResponse("whole", reasoning="thought")]))
    seen: list[ev.Event] = []
    await chat.agent.process_direct("x", on_event=seen.append)
    assert [event for event in seen if isinstance(event, ev.Text | ev.Reasoning)] == [
        ev.Reasoning("thought"), ev.Text("whole"),
    ]  # fmt: skip


async def test_a_stream_without_a_whole_answer_at_its_end_is_put_together(start):
    class Pieces(LLMProvider):
        async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncIterator[Delta]:
            for delta in (Delta("lost"), Delta(restart="cut"), Delta("he"), Delta("llo")):
                yield delta

    chat = start(Pieces())
    seen: list[ev.Event] = []
    assert await chat.agent.process_direct("x", on_event=seen.append) == "hello"
    assert ev.Restarted("cut") in seen


async def test_a_turn_can_be_watched_from_its_middle_and_let_go_again(start):
    first, second = Gate(call("list_dir")), Gate("seen by nobody")
    chat = start(ScriptedProvider([first, second]))
    seen: list[ev.Event] = []
    await chat.say("work")
    await first.reached.wait()
    unwatch = chat.agent.watch("test:1", seen.append)
    first.open.set()
    await second.reached.wait()
    unwatch()
    unwatch()  # once more does no harm
    second.open.set()
    await chat.hear()
    assert [type(event).__name__ for event in seen] == ["ToolStarted", "ToolEnded"]


async def test_a_watcher_that_raises_harms_neither_the_turn_nor_other_watchers(start, caplog):
    def broken(event: ev.Event) -> None:
        raise RuntimeError("I cannot watch")

    overall: list[str] = []
    chat = start(ScriptedProvider(["fine"]), on_event=lambda key, event: overall.append(key))
    seen: list[ev.Event] = []
    chat.agent.watch("test:1", broken)
    chat.agent.watch("test:1", seen.append)
    with caplog.at_level(logging.CRITICAL):
        assert await chat.ask("hi") == "fine"
    assert isinstance(seen[-1], ev.TurnEnded)
    assert len(overall) == len(seen)


# ---------------------------------------------------------------------------------------------- stop, start, go on


async def test_stop_ends_run_at_once_and_a_new_loop_finishes_the_turn(start):
    gate = Gate()
    chat = start(ScriptedProvider([call("list_dir"), gate]))
    await chat.say("work")
    await gate.reached.wait()
    began = asyncio.get_running_loop().time()
    await chat.stop()
    assert asyncio.get_running_loop().time() - began < 1
    provider = ScriptedProvider(["finished later"])
    assert await start(provider).hear() == "finished later"
    assert [message["role"] for message in provider.requests[0].messages] == ["system", "user", "assistant", "tool"]


async def test_a_loop_runs_again_after_it_was_stopped(start):
    gate = Gate()
    chat = start(ScriptedProvider(["one", gate, "three"]))
    assert await chat.ask("1") == "one"
    await chat.say("2")
    await gate.reached.wait()
    await chat.stop()
    chat.task = asyncio.create_task(chat.agent.run())
    assert await chat.hear() == "three"


async def test_stop_before_run_has_begun_ends_it(start):
    chat = start(ScriptedProvider([]))
    await chat.stop()


async def test_a_message_taken_from_the_bus_is_not_lost_when_the_loop_is_stopped_right_then(start):
    bus = MessageBus()
    chat = start(ScriptedProvider([]), bus)
    await chat.agent.store.session("me", "x")  # the file is open
    await asyncio.sleep(0.05)
    for n in range(5):
        await chat.say(f"hi {n}")
    while bus.inbound_size:
        await asyncio.sleep(0)
    await chat.stop()
    later = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True))
    assert [await later.hear() for _ in range(5)] == [f"hi {n}" for n in range(5)]


@pytest.mark.parametrize("hops", range(8))
async def test_whoever_waits_for_an_answer_hears_that_the_loop_was_closed(start, hops):
    chat = start(ScriptedProvider([Gate()], repeat_last=True))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(chat.agent.process_direct("hi"))
    for _ in range(hops):
        await asyncio.sleep(0)
    await chat.agent.close()
    if not hops:
        waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError), pytest.raises(Exception, match="goes on at the next start"):
        await asyncio.wait_for(waiting, 5)


async def test_a_loop_that_was_stopped_at_any_instant_can_be_used_again(start):
    provider = ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True)
    chat = start(provider)
    await asyncio.sleep(0.02)
    for hops in range(12):
        waiting = asyncio.create_task(chat.agent.process_direct(f"first {hops}", f"cli:{hops}"))
        for _ in range(hops + 1):
            await asyncio.sleep(0)
        await chat.agent._quiet()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.done()
        waiting.exception()
        assert await asyncio.wait_for(chat.agent.process_direct("again", f"cli:{hops}"), 5) == "again"


async def test_an_answer_that_was_not_handed_out_when_the_loop_stopped_comes_after_its_next_start(start):
    bus = MessageBus(size=1)
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True), bus)
    for n in range(3):
        await chat.say(str(n), str(n))
    await until(lambda: bus.outbound_size == 1)
    await asyncio.sleep(0.1)
    await chat.stop()
    chat.task = asyncio.create_task(chat.agent.run())
    await asyncio.sleep(0.1)  # the answer that is on the bus already is not put there again
    assert sorted([await chat.hear() for _ in range(3)]) == ["0", "1", "2"]
    await asyncio.sleep(0.05)
    assert bus.outbound_size == 0


async def test_an_answer_is_sent_again_by_a_new_loop_when_nobody_took_it(start):
    chat = start(ScriptedProvider(["hello"]))
    await chat.say("hi")
    await until(lambda: chat.bus.outbound_size == 1)
    await chat.stop()
    later = start(ScriptedProvider([]))
    message = await asyncio.wait_for(later.bus.consume_outbound(), 5)
    assert (message.content, message.repeat) == ("hello", True)


async def test_a_caller_who_gives_up_stops_nobody_else(start):
    gate = Gate("late")
    chat = start(ScriptedProvider([gate, "next"]))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(chat.agent.process_direct("hi"), 0.1)
    gate.open.set()
    assert await chat.agent.process_direct("more") == "next"


# ---------------------------------------------------------------------------------------------- the prompt


async def test_the_prompt_only_grows_at_its_end(start):
    steps: list[Any] = [call("list_dir", path="."), "one", [call("list_dir"), call("list_dir")], "two", "three"]
    provider = ScriptedProvider(steps)
    chat = start(provider)
    for n in range(3):
        await chat.ask(f"message {n}")
    prompts = [encode_json(request.messages) for request in provider.requests]
    for before, after in itertools.pairwise(prompts):
        assert after.startswith(before[:-1])
    assert len({encode_json(request.tools) for request in provider.requests}) == 1


async def test_a_new_loop_sends_the_same_prompt_as_the_old_one_would(start):
    provider = ScriptedProvider([[call("list_dir"), call("nope")], "one", "two"])
    chat = start(provider)
    await chat.ask("a")
    await chat.stop()
    again = ScriptedProvider(["two"])
    await start(again).ask("b")
    first = encode_json(provider.requests[1].messages)
    assert encode_json(again.requests[0].messages).startswith(first[:-1])


async def test_a_picture_goes_to_the_model_and_stays_in_the_history(start, tmp_path):
    picture = tmp_path / "dot.png"
    picture.write_bytes(b"\x89PNG fake")
    provider = ScriptedProvider(["a dot", "still a dot"])
    chat = start(provider)
    await chat.ask("what is it?", media=[str(picture), str(tmp_path / "notes.pdf")])
    picture.unlink()
    await chat.ask("sure?")
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG fake").decode()
    for request in provider.requests:
        image, text = request.messages[1]["content"]
        assert image == {"type": "image_url", "image_url": {"url": url}}
        assert text["text"] == f"what is it?\n[attachment: {tmp_path / 'notes.pdf'}]"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_busy_setting_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="queue"):
        AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, busy="bad")  # type: ignore[arg-type]


async def test_a_provider_that_returns_something_else_is_told_so(start):
    class Sloppy(LLMProvider):
        async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            return "just text"

    chat = start(Sloppy())
    assert "returned a str and not an LLMResponse" in await chat.agent.process_direct("hi")
