"""Streaming: whatever is lost, duplicated or late on the way, a subscriber sees the log's text once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everloop import AgentLoop, MessageBus, events
from everloop.log import ModelAnswered
from everloop.providers.base import LLMResponse
from everloop.runtime.streaming import Batch, Follow, TurnStreams, TurnSubscriber, decode, encode
from everloop.store.peers import NoRelay
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.text_cursor import Position, TextCursor, checksum

from .chat import until

FIRST, SECOND = "Let me look at it. ", "There is nothing 😀 in the folder, nothing at all."


class Shown:
    """The text a client has seen, assembled as a client would."""

    def __init__(self) -> None:
        self.rounds: dict[int, str] = {}
        self.pieces: dict[int, int] = {}
        self.tools: list[str] = []
        self.ends = 0

    def __call__(self, seq: int, event: events.Event) -> None:
        match event:
            case events.Text(text):
                self.rounds[seq] = self.rounds.get(seq, "") + text
                self.pieces[seq] = self.pieces.get(seq, 0) + 1
            case events.Restarted():
                self.rounds[seq] = ""
            case events.ToolStarted(call) | events.ToolEnded(call):
                self.tools.append(f"{type(event).__name__} {call}")
            case events.TurnEnded():
                self.ends += 1

    @property
    def texts(self) -> list[str]:
        return list(self.rounds.values())


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[tuple[SQLiteStore, int, list[Batch]]]:
    """A completed turn of two rounds: its store, its inbox row, and all events published about it."""
    answer = LLMResponse(FIRST, [call("list_dir", path=".")], "tool_calls")
    store, batches = SQLiteStore(tmp_path / "store.db"), list[Batch]()
    provider = ScriptedProvider([answer, SECOND])
    async with AgentLoop(MessageBus(), provider, tmp_path, store=store) as agent:
        agent._streams.follow("me", "cli:direct", batches.append)
        await agent.process_direct("go")
    yield store, 1, batches
    await store.close()


class Ways(TurnStreams):
    """Streams without a publisher: the test passes batches to the subscriber."""

    def __init__(self, ask: Callable[[], Batch] | None = None) -> None:
        super().__init__(NoRelay(), lambda *_: None)
        self._ask_for = ask
        self._follow: Follow | None = None

    def connect(self, owner: str, key: str, follow: Follow) -> Ways:
        self._follow = follow
        return self

    def ask(self) -> None:
        if self._ask_for is not None and self._follow is not None:
            self._follow(self._ask_for())

    def close(self, *_: object) -> None:
        pass


def subscribed(store: SQLiteStore, shown: Shown, ask: Callable[[], Batch] | None = None) -> TurnSubscriber:
    return TurnSubscriber(store, Ways(ask), "me", "cli:direct", shown)


async def follow(store: SQLiteStore, row: int, batches: list[Batch], shown: Shown) -> None:
    """Deliver these, and at the end what the log contains."""
    await followed(store, subscribed(store, shown), row, batches)


async def followed(store: SQLiteStore, subscriber: TurnSubscriber, row: int, batches: list[Batch]) -> None:
    subscriber.follow(row)
    for batch in batches:
        subscriber.receive(batch)
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    subscriber.close()
    found = await store.incoming(row)
    assert found.first_seq is not None
    subscriber.finish(await store.read_turn(found.session, found.first_seq))


def right(shown: Shown) -> bool:
    (id,) = {tool.split(" ")[1] for tool in shown.tools}
    tools = [f"ToolStarted {id}", f"ToolEnded {id}"]
    return shown.texts == [FIRST, SECOND] and shown.tools == tools and shown.ends == 1


async def test_a_finished_turn_is_shown_from_the_log(recorded):
    store, row, _ = recorded
    await follow(store, row, [], shown := Shown())
    assert right(shown)


async def test_only_one_turn_of_a_session_is_shown(recorded, tmp_path):
    store, row, _ = recorded
    async with AgentLoop(MessageBus(), ScriptedProvider(["canary"]), tmp_path, store=SQLiteStore(store.path)) as agent:
        await agent.process_direct("and now?")
    await follow(store, row, [], shown := Shown())
    assert right(shown)


Way = Callable[[Batch], list[Batch]]


class Paced(ScriptedProvider):
    """A model that sends each word once the previous one was taken, so that even on a slow machine subscribers have
    shown the words before the log has the answer."""

    def __init__(self, steps: list[Any], taken: Callable[[], bool]) -> None:
        super().__init__(steps)
        self._taken = taken

    async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncGenerator[Any, None]:
        async for item in super().stream(messages, tools, model):
            yield item
            await until(self._taken)


async def watched_live(folder: Path, way: Way, ask: Callable[[], Batch] | None = None) -> Shown:
    """Return what a subscriber has shown of a turn at its end, given events delivered in this way."""
    answer = LLMResponse(FIRST, [call("list_dir", path=".")], "tool_calls")
    shown, store, begun = Shown(), SQLiteStore(folder / "store.db"), list[Batch]()
    subscriber = subscribed(store, shown, ask)
    provider = Paced([answer, SECOND], lambda: not subscriber._batches)

    def hear(batch: Batch) -> None:
        if not begun:
            begun.append(batch)
            subscriber.follow(1)
        for one in way(batch):
            subscriber.receive(one)

    async with AgentLoop(MessageBus(), provider, folder, store=store) as agent:
        agent._streams.follow("me", "cli:direct", hear)
        await agent.process_direct("go")
        subscriber.close()
        found = await store.incoming(1)
        assert found.first_seq is not None
        subscriber.finish(await store.read_turn(found.session, found.first_seq))
    return shown


async def test_events_are_shown_as_they_happen(tmp_path):
    shown = await watched_live(tmp_path, lambda batch: [batch])
    assert right(shown)
    assert min(shown.pieces.values()) > 2


async def test_missed_events_are_requested_and_shown_before_the_end(tmp_path):
    told: list[Batch] = []

    def way(batch: Batch) -> list[Batch]:
        told.append(batch)
        texts = [one for one in told if isinstance(one.events[0], events.Text)]
        return [] if batch in texts and len(texts) in (8, 9) else [batch]

    def so_far() -> Batch:
        round = [one for one in told if one.seq == told[-1].seq]
        text = "".join(event.text for one in round for event in one.events if isinstance(event, events.Text))
        return replace(round[-1], chars=0, events=[events.Text(text)])

    shown = await watched_live(tmp_path, way, so_far)
    assert right(shown)
    assert max(shown.pieces.values()) > 5


@pytest.mark.parametrize("seed", range(10))
async def test_lost_duplicated_and_late_events_still_give_the_logs_text(tmp_path, seed):
    chance, kept = random.Random(seed), list[Batch]()

    def way(batch: Batch) -> list[Batch]:
        kept.append(batch)
        return [chance.choice(kept[-4:]) for _ in range(chance.choice([0, 1, 1, 2]))] if seed else []

    shown = await watched_live(tmp_path, way)
    assert right(shown)


async def test_events_of_other_turns_are_not_shown(tmp_path):
    def way(batch: Batch) -> list[Batch]:
        text = events.Text("canary")
        return [replace(batch, turn="another", events=[text], attempt="another", chars=0), batch]

    shown = await watched_live(tmp_path, way)
    assert right(shown)


@pytest.mark.parametrize("count", [1, 3, 8, 10, 14])
async def test_a_handed_off_turn_continues_where_the_stream_left_off(recorded, count):
    store, row, batches = recorded
    shown = Shown()
    subscriber = subscribed(store, shown)
    for batch in batches[:count]:
        subscriber.on_event(batch.seq, batch.events[0])
    await followed(store, subscriber, row, batches[count:])
    assert right(shown)


def pieces(text: str, size: int = 3) -> list[tuple[int, str]]:
    return [(start, text[start : start + size]) for start in range(0, len(text), size)]


def taken(cursor: TextCursor, attempt: str, told: list[tuple[int, str]]) -> tuple[str, int, bool]:
    """(text shown since the last restart, number of restarts, whether something was missed)"""
    text, again, missed = "", 0, False
    if attempt != cursor.attempt:
        cursor.begin(attempt)
    for offset, piece in told:
        if offset > cursor.length:
            missed = True
        elif (new := cursor.feed(piece[cursor.length - offset :])) is None:
            text, again = cursor.restart(), again + 1
        else:
            text += new
    return text, again, missed


def test_a_retried_round_with_the_same_text_is_shown_once():
    cursor = TextCursor()
    assert taken(cursor, "1.0", pieces("abcdefgh")) == ("abcdefgh", 0, False)
    assert taken(cursor, "2.0", pieces("abcdefghijkl", 5)) == ("ijkl", 0, False)
    assert cursor.finish("abcdefghijkl") == ""


def test_a_retried_round_with_different_text_starts_over():
    cursor = TextCursor()
    taken(cursor, "1.0", pieces("abcdefgh"))
    assert taken(cursor, "2.0", pieces("abcxyz")) == ("abcxyz", 1, False)
    assert cursor.finish("abcxyz") == ""


def test_an_attempt_that_ends_short_is_behind_and_differs_from_the_log():
    cursor = TextCursor()
    taken(cursor, "1.0", pieces("abcdefgh"))
    assert taken(cursor, "2.0", pieces("abc")) == ("", 0, False)
    assert cursor.is_behind
    assert cursor.finish("abc") is None
    assert cursor.finish("abcdefghi") == "i"


def test_the_longest_shown_text_counts_after_several_attempts():
    cursor = TextCursor()
    taken(cursor, "1.0", pieces("abcdefgh"))
    taken(cursor, "2.0", pieces("abc"))
    assert taken(cursor, "3.0", pieces("abcdefghij")) == ("ij", 0, False)


def test_a_gap_is_detected_and_filled_with_all_text_so_far():
    cursor = TextCursor()
    told = pieces("abcdefghi")
    assert taken(cursor, "1.0", [told[0], told[2]]) == ("abc", 0, True)
    assert taken(cursor, "1.0", [(0, "abcdefghi")]) == ("defghi", 0, False)


def test_an_attempt_with_a_missed_beginning_is_not_mixed_with_the_previous_one():
    cursor = TextCursor()
    taken(cursor, "1.0", pieces("abcdef"))
    assert taken(cursor, "2.0", [(6, "XYZ")]) == ("", 0, True)
    assert taken(cursor, "2.0", [(0, "abcdefXYZ")]) == ("XYZ", 0, False)


@pytest.mark.parametrize("chars", range(10))
def test_a_reconnecting_subscriber_gets_what_follows_its_position(chars: int):
    text = "abcdéfghi"
    cursor = TextCursor(Position(1, chars, checksum(text[:chars])))
    assert taken(cursor, "", pieces(text)) == (text[chars:], 0, False)


def test_a_subscriber_that_reconnects_to_a_different_text_starts_over():
    cursor = TextCursor(Position(1, 4, checksum("abcd")))
    assert taken(cursor, "", pieces("abXdefgh", 1)) == ("abXdefgh", 1, False)


@pytest.mark.parametrize("ending", ["", " ", "\n", "\n\n"])
def test_a_subscriber_has_the_whole_text_whatever_spaces_ended_its_stream(ending: str):
    shown = "abc" + ending
    has = Position(1, len(shown), checksum(shown))
    assert has.is_all_of("abc")
    assert not has.is_all_of("abd")
    assert not has.is_all_of("ab")
    assert not has.is_all_of("abcde")
    assert Position(1, len(shown)).is_all_of("xyz")  # without a checksum they are assumed to be the same


@pytest.mark.parametrize(
    ("shown", "logged", "rest"),
    [
        ("", "abc", "abc"),
        ("ab", "abc", "c"),
        ("abc", "abc", ""),
        ("abc\n", "abc", ""),
        ("\n\nab", "abc", "c"),
        ("  abc  ", "abc", ""),
        ("", "", ""),
    ],
)
def test_spaces_missing_from_the_log_cause_no_duplicates(shown: str, logged: str, rest: str):
    cursor = TextCursor()
    taken(cursor, "1.0", [(0, shown)])
    assert cursor.finish(logged) == rest


EVERY_EVENT: list[events.Event] = [
    events.TurnStarted("t", True),
    events.Text("é😀\x00\u2028"),
    events.Reasoning("hm"),
    events.Restarted("lost"),
    events.ToolStarted("c", "exec", {"command": "ls", "timeout": 3, "deep": None, "yes": True}),
    events.ToolProgress("c", "10 %"),
    events.ToolEnded("c", "exec", "done", "ok", 0.5),
    events.Asked("t", ("c",), "May I?"),
    events.Usage({"prompt_tokens": 3}),
    events.Steered("and this"),
    events.Compacting(3),
    events.Compacted(3, 100, 10),
    events.Error("oh"),
    events.TurnEnded("t", "answer", "bye"),
]


def test_every_event_round_trips_over_the_wire():
    assert {type(event) for event in EVERY_EVENT} == set(events.Event.__args__)
    batch = Batch("t", 7, "1.0", 3, EVERY_EVENT)
    data = encode(batch)
    assert b"\n" not in data
    assert decode(data) == batch


def test_a_split_multibyte_character_does_not_fail():
    assert decode(encode(Batch("t", 1, "1.0", 0, [events.Text("a\ud83d")]))).events


def test_an_unknown_event_is_skipped():
    data = msgspec.json.encode(("t", 1, "1.0", 0, [("Newer", {"x": 1}), ("Text", {"text": "hi", "more": 2})]))
    assert decode(data).events == [events.Text("hi")]


async def test_nothing_is_streamed_without_a_subscriber(tmp_path: Path):
    provider = ScriptedProvider(["one", "two"])
    async with AgentLoop(MessageBus(), provider, tmp_path, store=SQLiteStore(tmp_path / "s.db")) as agent:
        await agent.process_direct("go")
        stop = agent._streams.follow("me", "cli:direct", lambda _: None)
        await agent.process_direct("go")
        stop()
        assert not agent._streams._topics
    assert [request.streamed for request in provider.requests] == [False, True]


async def test_an_answers_entry_follows_the_position_of_its_round(recorded):
    """Positions rely on this: text belongs to the answer that is the next entry."""
    store, row, batches = recorded
    found = await store.incoming(row)
    entries = {one.seq: one.entry for one in await store.read_log(found.session)}
    texts = {batch.seq for batch in batches for event in batch.events if isinstance(event, events.Text)}
    assert len(texts) == 2
    assert all(isinstance(entries[seq + 1], ModelAnswered) for seq in texts)
