"""Streams that are interrupted and resumed: the client gets what follows its position, and nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import aiohttp
import pytest

from everloop import events
from everloop.server.openai_chat import Chunks
from everloop.server.sse import MANY, RESTARTED, AnswerStream

from .serving import Client, Serving, Streamed, call, function

ADA = {"X-Session": "ada"}
ONCE = {**ADA, "Idempotency-Key": "k1"}
WORDS = [f"word{number} " for number in range(40)]
TEXT = "".join(WORDS)


@dataclass
class Begun(Streamed):
    """A stream that is not read to its end yet."""

    response: aiohttp.ClientResponse | None = None

    async def read(self, text: str | None = None) -> None:
        """Read until this has come, or to the end."""
        assert self.response is not None
        async with asyncio.timeout(40):
            while text is None or text not in self.text:
                if not (line := await self.response.content.readline()):
                    break
                self.take(line.decode().removesuffix("\n"))

    def leave(self) -> None:
        assert self.response is not None
        self.response.close()


async def begin(client: Client, text: str, headers: dict[str, str] | None = None) -> Begun:
    """Read a stream until this has come; the connection stays open."""
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    begun = Begun(response=await client.post(body, headers or ONCE))
    await begun.read(text)
    return begun


def back(position: str, headers: dict[str, str] | None = None) -> dict[str, str]:
    return {**(headers or ONCE), "Last-Event-ID": position}


async def test_only_a_resumable_stream_has_positions(server: Serving):
    for headers, some in (({}, False), ({"X-Session": "a"}, False), ({"Idempotency-Key": "k"}, False), (ONCE, True)):
        server.fake.reply(TEXT)
        assert bool((await server.stream("go", headers)).ids) is some


async def test_from_every_position_of_an_answer_exactly_the_rest_follows(server: Serving):
    server.fake.reply("Let me look. ")
    server.fake.replies[-1].calls = [call("list_dir", path=".")]
    server.fake.reply("It is 😀 empty.", tokens=["It is ", "😀", " empty", "."], token_delay=0.1)
    whole = await server.stream("go", ONCE)
    assert whole.text == "Let me look. \n\nIt is 😀 empty."
    assert len(whole.ids) >= 3
    for position in whole.ids:
        seq, chars, _ = position.split(".")
        first_round = int(seq) == min(int(id.split(".")[0]) for id in whole.ids)
        seen = int(chars) if first_round else len("Let me look. \n\n") + int(chars)
        resumed = await server.stream("go", back(position))
        assert whole.text[:seen] + resumed.text == whole.text
        assert resumed.done
        assert resumed.finish == "stop"
        assert any("list_dir" in comment for comment in resumed.comments) is first_round
    assert len(server.fake.requests) == 2


async def test_calls_that_were_handed_to_the_client_are_repeated_unchanged(server: Serving):
    tools = [function("get_weather", city={"type": "string"})]
    server.fake.reply("I ask you. ")
    server.fake.replies[-1].calls = [call("get_weather", city="Oslo")]
    first = await server.stream("go", ONCE, tools=tools)
    again = await server.stream("go", ONCE, tools=tools)
    resumed = await server.stream("go", back(first.ids[-1]), tools=tools)
    assert first.text == again.text == "I ask you. "
    assert resumed.text == ""
    assert first.calls() == again.calls() == resumed.calls() == [("c1", "get_weather", {"city": "Oslo"})]
    assert again.comments == resumed.comments == []


async def test_without_a_position_the_whole_answer_is_repeated(server: Serving):
    server.fake.reply(TEXT)
    await server.stream("go", ONCE)
    assert (await server.stream("go", ONCE)).text == TEXT


async def test_a_client_that_reconnects_during_the_answer_resumes_at_its_position(server: Serving):
    server.fake.reply(TEXT, tokens=WORDS, token_delay=0.05)
    first = await begin(server, "word10 ")
    resumed = await server.stream("go", back(first.ids[-1]))
    assert len(resumed.chunks) > 5  # as it is written, not at its end
    assert first.text + resumed.text == TEXT
    assert len(server.fake.requests) == 1
    first.leave()


async def test_the_first_connection_may_break_while_the_second_is_open(server: Serving):
    server.fake.reply(TEXT, tokens=WORDS, token_delay=0.03)
    first = await begin(server, "word5 ")
    second = await begin(server, "word7 ", back(first.ids[-1]))
    first.leave()
    await second.read()
    assert first.text + second.text == TEXT
    assert len(server.fake.requests) == 1


async def test_a_client_whose_turn_was_stopped_is_told_that_the_answer_begins_again(server: Serving):
    server.fake.hang(60, after_chunks=12, text=TEXT, tokens=WORDS)
    first = await begin(server, "word9 ")
    first.leave()
    assert (await server.ended("ada")).reason == "cancelled"
    server.fake.reply("another answer")
    resumed = await server.stream("go", back(first.ids[-1]))
    assert resumed.text == f"{RESTARTED}another answer"


@pytest.mark.parametrize(
    "position",
    [
        "",
        "x",
        "1",
        "1.",
        ".1",
        "-1.2",
        "1.2.3",
        "1.2.zzzzzzzz",
        "1 .2",
        "1.2.0000000g",
        "١.٢",
        f"{'1' * 30}.1",
        "1.2\t.3",
    ],
)
async def test_a_malformed_position_is_refused(server: Serving, position: str):
    server.fake.reply(TEXT)
    await server.stream("go", ONCE)
    with contextlib.suppress(ValueError):  # what no client library would send
        status, error = await server.fails("go", back(position), stream=True)
        assert (status, error["param"]) == (400, "Last-Event-ID")
    assert len(server.fake.requests) == 1


async def test_an_impossible_position_is_refused(server: Serving):
    server.fake.reply(TEXT)
    (*_, last) = (await server.stream("go", ONCE)).ids
    seq = int(last.split(".")[0])
    for position in (f"{seq + 1}.3", f"{seq + 2}.0", f"{seq - 1}.1", "0.0", f"{seq}.{len(TEXT) + 1000}", "999.1"):
        status, error = await server.fails("go", back(position), stream=True)
        assert (status, error["param"]) == (400, "Last-Event-ID"), position
    assert len(server.fake.requests) == 1


async def test_a_position_without_the_request_it_belongs_to_is_refused(server: Serving):
    server.fake.reply(TEXT)
    (*_, last) = (await server.stream("go", ONCE)).ids
    for headers, stream in ((ADA, True), ({}, True), ({**ONCE, "Idempotency-Key": "k2"}, True), (ONCE, False)):
        status, error = await server.fails("go", {**headers, "Last-Event-ID": last}, stream=stream)
        assert (status, error["param"]) == (400, "Last-Event-ID")
    assert len(server.fake.requests) == 1


async def test_another_owners_position_opens_nothing(server: Serving):
    ada, bob = await server.client("ada"), await server.client("bob")
    server.fake.reply("the canary of ada, " * 20)
    (*_, last) = (await ada.stream("go", ONCE)).ids
    status, error = await bob.fails("go", back(last), stream=True)
    assert status == 400
    assert "canary" not in str(error)
    server.fake.reply("bob's own")
    assert (await bob.stream("go", ONCE)).text == "bob's own"


async def test_a_wrong_checksum_repeats_the_whole_round(server: Serving):
    """As after a crash, where the model has said something else the second time."""
    server.fake.reply(TEXT)
    (*_, last) = (await server.stream("go", ONCE)).ids
    seq = last.split(".")[0]
    for chars in (5, len(TEXT), len(TEXT) + 1, 5 * len(TEXT)):  # the first answer may have been a longer one
        resumed = await server.stream("go", back(f"{seq}.{chars}.00000000"))
        assert resumed.text == f"{RESTARTED}{TEXT}"
        assert resumed.finish == "stop"


async def test_no_comment_is_a_separate_event_after_one_with_an_id(server: Serving):
    """Or some clients would take the empty line after it for the end of an event without data."""
    server.fake.reply("Let me look.")
    server.fake.replies[-1].calls = [call("list_dir", path=".")]
    server.fake.reply("Nothing.")
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
    async with server.post(body, ONCE) as response:
        events = (await response.text()).split("\n\n")
    assert any(line.startswith(": tool") for event in events for line in event.splitlines())
    seen = False
    for event in events[:-1]:
        seen = seen or "id: " in event
        assert not seen or any(line.startswith("data: ") for line in event.splitlines())


def test_a_client_that_reads_slowly_costs_no_more_than_the_text():
    feed = AnswerStream(Chunks("id", 0, "m"), 15.0, resumable=True)
    for _ in range(20_000):
        feed.show(3, events.Text("ab"))
        feed.show(3, events.Reasoning("c"))
    assert len(feed._waiting) <= MANY + 1
    assert "".join(piece.text for piece in feed._waiting if piece.kind == "text") == "ab" * 20_000


async def test_a_client_that_connects_after_another_left_sees_the_answer_as_it_is_written(server: Serving):
    server.fake.reply(TEXT, tokens=WORDS, token_delay=0.06)
    first = await begin(server, "word3 ")
    second = await begin(server, "word5 ")
    second.leave()
    await asyncio.sleep(0.1)
    third = await server.stream("go", ONCE)
    first.leave()
    assert third.text == TEXT
    assert len(third.chunks) > 10  # as it is written, not at its end
