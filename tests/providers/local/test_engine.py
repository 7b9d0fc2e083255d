"""The engine with a real model: streamed, stopped, shared, killed, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.context.window import is_overflow
from everloop.providers.base import ProviderError
from everloop.providers.local.engine import Engine, Settings

from .real import TINY, weights
from .real import found_tiny as found_tiny

pytestmark = pytest.mark.timeout(300)  # in CI the weights may have to be pulled first

LONG = {"prompt": "One, two, three, four,", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "One, two, three, four,", "max_tokens": 8, "temperature": 0}
RULES = " ".join(f"Rule {n}: be kind to guest {n * 7}." for n in range(16))


@contextlib.asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[Engine]:
    made = Engine(Settings(weights(TINY), **{"window": 2048, "threads": 1, **settings}))
    try:
        yield made
    finally:
        await made.close()


def alive(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int | None, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < ends:
        await asyncio.sleep(0.01)
    return not alive(pid)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


class Stream:
    """A request in progress, and its results."""

    def __init__(self, made: Engine, request: dict[str, Any], session: str = "") -> None:
        self.texts: list[str] = []
        self.times: list[float] = []
        self._enough = asyncio.Event()
        self._wanted = 0
        self.task = asyncio.create_task(made.complete(request, self._take, session=session))

    def _take(self, delta: dict[str, Any]) -> None:
        if "content" in delta:
            self.texts.append(delta["content"])
            self.times.append(time.monotonic())
        if len(self.texts) >= self._wanted:
            self._enough.set()

    async def tokens(self, count: int) -> None:
        self._wanted = count
        self._enough.clear()
        if len(self.texts) < count:
            enough = asyncio.ensure_future(self._enough.wait())
            await asyncio.wait([enough, self.task], return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            if self.task.done():
                await self.task

    async def cancelled(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


# ------------------------------------------------------------------------------------------------------ answers


async def test_an_answer_streams_in_pieces_that_make_the_whole():
    async with engine() as made:
        hello = [{"role": "user", "content": "Hello!"}]
        stream = Stream(made, {"messages": hello, "max_tokens": 30, "ignore_eos": True})
        answer = await stream.task
        assert len(stream.texts) > 5
        assert "".join(stream.texts) == text_of(answer)
        assert answer["usage"]["completion_tokens"] == 30
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_second_round_reads_only_what_is_new():
    async with engine() as made:
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Hello, who is there?"}]
        first = await made.complete({"messages": messages, "max_tokens": 20, "temperature": 0})
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        second = await made.complete({"messages": messages, "max_tokens": 5, "temperature": 0})
        assert first["timings"]["prompt_n"] > 150
        assert second["timings"]["prompt_n"] < 40
        assert second["timings"]["cache_n"] >= first["timings"]["prompt_n"]


async def test_a_conversation_is_not_read_again_after_others_came_between():
    async with engine(slots=1) as made:
        mine = [{"role": "system", "content": RULES}, {"role": "user", "content": "Hello, who is there?"}]
        first = await made.complete({"messages": mine, "max_tokens": 5, "temperature": 0}, session="mine")
        other = [{"role": "user", "content": "Something else. " * 15}]
        await made.complete({"messages": other, "max_tokens": 5}, session="other")
        again = await made.complete({"messages": mine, "max_tokens": 5, "temperature": 0}, session="mine")
        assert again["timings"]["prompt_n"] < first["timings"]["prompt_n"] // 4


async def test_a_grammar_limits_what_can_be_written():
    async with engine() as made:
        request = {"messages": [{"role": "user", "content": "Hello!"}], "grammar": 'root ::= "yes" | "no"'}
        assert text_of(await made.complete(request)) in ("yes", "no")


async def test_an_unsupported_request_fails_alone():
    async with engine() as made:
        hello = [{"role": "user", "content": "Hello!"}]
        for wrong in ({"grammar": "root ::= ((("}, {"json_schema": {"type": "nonsense"}}):
            with pytest.raises(ProviderError) as caught:
                await made.complete({"messages": hello, **wrong})
            assert not caught.value.retryable
            assert "\n" not in str(caught.value)
        pid = made.pid
        assert text_of(await made.complete(SHORT))
        assert made.pid == pid


async def test_a_request_that_is_too_long_is_recognised():
    async with engine() as made:
        with pytest.raises(ProviderError) as caught:
            await made.complete({"messages": [{"role": "user", "content": "word " * 4000}]})
        assert is_overflow(str(caught.value))
        assert not caught.value.retryable


async def test_a_failing_subscriber_fails_alone():
    async with engine() as made:

        def broken(_: dict[str, Any]) -> None:
            raise RuntimeError("my own mistake")

        other = Stream(made, SHORT, "other")
        with pytest.raises(RuntimeError, match="my own mistake"):
            await made.complete(LONG, broken, session="broken")
        assert text_of(await other.task)
        assert text_of(await made.complete(SHORT))


# ------------------------------------------------------------------------------------------------------ stopping


async def test_a_cancelled_request_stops_within_a_token():
    async with engine(slots=1) as made:
        stream = Stream(made, LONG)
        await stream.tokens(10)
        token = statistics.median(b - a for a, b in zip(stream.times, stream.times[1:], strict=False))
        await stream.cancelled()
        started = time.monotonic()
        await made.complete({**SHORT, "max_tokens": 1})  # there is one slot: it is free once the work has ended
        assert time.monotonic() - started < 5 + 100 * token  # of 1490 that were left
        seen = len(stream.texts)
        await asyncio.sleep(0.2)
        assert len(stream.texts) == seen


async def test_a_request_cancelled_while_its_prompt_is_read_stops_too():
    async with engine(slots=1, window=8192) as made:
        await made.start()
        started = time.monotonic()
        await made.complete({"prompt": "again and again " * 50, "max_tokens": 1})
        some = time.monotonic() - started
        reading = Stream(made, {"prompt": "word after word " * 2000, "max_tokens": 1})
        await asyncio.sleep(some / 4)
        await reading.cancelled()
        started = time.monotonic()
        await made.complete({**SHORT, "max_tokens": 1})
        assert time.monotonic() - started < 3 * some + 1  # of about twenty times as much


async def test_closing_leaves_no_process_and_no_socket(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with engine() as made:
        stream = Stream(made, LONG)
        await stream.tokens(3)
        pid = made.pid
        assert alive(pid)
        assert list(tmp_path.glob("everloop-engine-*"))
    assert not alive(pid)
    assert not list(tmp_path.glob("everloop-engine-*"))
    with pytest.raises(ProviderError):
        await stream.task
    with pytest.raises(ProviderError):
        await made.complete(SHORT)


# ------------------------------------------------------------------------------------------------------ crashes


async def test_a_killed_child_fails_its_requests_and_the_next_one_starts_another():
    async with engine() as made:
        one, two = Stream(made, LONG, "one"), Stream(made, LONG, "two")
        await one.tokens(3)
        await two.tokens(3)
        pid = made.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for stream in (one, two):
            with pytest.raises(ProviderError) as caught:
                await stream.task
            assert caught.value.retryable
        assert text_of(await made.complete(SHORT))
        assert made.pid not in (pid, None)
        assert not alive(pid)


async def test_a_hung_child_is_killed_and_another_one_answers():
    async with engine(silence=5.0) as made:
        stream = Stream(made, LONG)
        await stream.tokens(3)
        pid = made.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ProviderError) as caught:
            await stream.task
        assert caught.value.retryable
        assert await gone(pid, 20)
        assert text_of(await made.complete(SHORT))


async def test_a_child_without_work_may_be_silent_forever():
    async with engine(silence=2.0) as made:
        await made.complete(SHORT)
        pid = made.pid
        await asyncio.sleep(3)
        assert made.pid == pid
        assert alive(pid)


async def test_several_first_requests_wait_for_one_start():
    async with engine() as made:
        streams = [Stream(made, SHORT, str(n)) for n in range(4)]
        pids = set()
        for stream in streams:
            await stream.task
            pids.add(made.pid)
        assert len(pids) == 1


async def test_a_request_cancelled_while_the_model_loads_does_not_stop_the_others():
    async with engine() as made:
        impatient, patient = Stream(made, SHORT, "one"), Stream(made, SHORT, "two")
        await asyncio.sleep(0.02)
        await impatient.cancelled()
        assert text_of(await patient.task)


# ------------------------------------------------------------------------------------------------------ sharing


async def test_a_session_with_many_requests_does_not_keep_another_waiting():
    async with engine(slots=1) as made:
        ended: list[str] = []

        async def ask(session: str) -> None:
            await made.complete(SHORT, session=session)
            ended.append(session)

        many = [asyncio.create_task(ask("many")) for _ in range(6)]
        await asyncio.sleep(0)
        await asyncio.gather(asyncio.create_task(ask("one")), *many)
        assert ended.index("one") <= 1


async def test_two_sessions_are_answered_concurrently():
    async with engine(slots=2) as made:
        one, two = Stream(made, {**LONG, "max_tokens": 60}, "one"), Stream(made, {**LONG, "max_tokens": 60}, "two")
        await asyncio.gather(one.task, two.task)
        assert one.times[0] < two.times[-1]
        assert two.times[0] < one.times[-1]
        between = sum(one.times[0] < at < one.times[-1] for at in two.times)
        assert between > 30


async def test_other_work_on_the_event_loop_does_not_wait_for_the_model():
    async with engine() as made:
        stream = Stream(made, {"prompt": "word after word " * 100, "max_tokens": 100, "ignore_eos": True})
        delays = []
        while not stream.task.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            delays.append(time.monotonic() - before - 0.01)
        await stream.task
        assert len(delays) > 20
        assert statistics.quantiles(delays, n=10)[8] < 0.25  # the model uses all available processors
