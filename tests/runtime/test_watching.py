"""Subscribing to a turn's events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from everloop import LLMProvider, LLMResponse
from everloop import events as ev
from everloop.providers.base import Delta
from everloop.testing import ChatOnlyProvider, ScriptedProvider, call

from .chat import Gate


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


async def test_a_provider_streams_only_with_a_subscriber(start):
    provider = ScriptedProvider(["a", "b"])
    chat = start(provider)
    await chat.agent.process_direct("x")
    await chat.agent.process_direct("x", on_event=lambda event: None)
    assert [request.streamed for request in provider.requests] == [False, True]


async def test_a_provider_with_only_chat_still_gives_events(start):
    chat = start(ChatOnlyProvider([LLMResponse("whole", reasoning="thought")]))
    seen: list[ev.Event] = []
    await chat.agent.process_direct("x", on_event=seen.append)
    assert [event for event in seen if isinstance(event, ev.Text | ev.Reasoning)] == [
        ev.Reasoning("thought"), ev.Text("whole"),
    ]  # fmt: skip


async def test_a_stream_without_a_final_response_is_assembled_from_its_chunks(start):
    class Pieces(LLMProvider):
        async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncIterator[Delta]:
            for delta in (Delta("lost"), Delta(restart="cut"), Delta("he"), Delta("llo")):
                yield delta

    chat = start(Pieces())
    seen: list[ev.Event] = []
    assert await chat.agent.process_direct("x", on_event=seen.append) == "hello"
    assert ev.Restarted("cut") in seen


async def test_a_subscriber_can_join_and_leave_in_the_middle_of_a_turn(start):
    first, second = Gate(call("list_dir")), Gate("seen by nobody")
    chat = start(ScriptedProvider([first, second]))
    seen: list[ev.Event] = []
    await chat.say("work")
    await first.reached.wait()
    unwatch = chat.agent.watch("test:1", seen.append)
    first.open.set()
    await second.reached.wait()
    unwatch()
    unwatch()  # leaving twice does no harm
    second.open.set()
    await chat.hear()
    assert [type(event).__name__ for event in seen] == ["ToolStarted", "ToolEnded"]


async def test_a_watcher_that_raises_affects_neither_the_turn_nor_other_watchers(start, caplog):
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
