"""Retries, fallbacks, and a subscriber that never sees the same output twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop.providers.base import Delta, LLMProvider, LLMResponse, ProviderError
from everloop.providers.retry import Resilient
from everloop.testing import ChatOnlyProvider, ScriptedProvider

ASK = [{"role": "user", "content": "hello"}]


def busy(wait: float | None = None) -> ProviderError:
    return ProviderError("busy", retryable=True, retry_after=wait)


class Streams(LLMProvider):
    """A model whose every attempt is a list of things to show; an exception interrupts it."""

    def __init__(self, *tries: list[Any], model: str = "streams") -> None:
        self.default_model = model
        self.tries = list(tries)
        self.closed = 0

    async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
        text = reasoning = ""
        for item in self.tries.pop(0):
            if isinstance(item, Exception):
                raise item
            delta = Delta(item) if isinstance(item, str) else item
            text, reasoning = text + delta.text, reasoning + delta.reasoning
            yield delta
        yield LLMResponse(text, reasoning=reasoning or None)

    async def close(self) -> None:
        self.closed += 1


class Clock:
    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def resilient(clock: Clock, *providers: LLMProvider, **options: Any) -> Resilient:
    return Resilient([(provider, None) for provider in providers], sleep=clock.sleep, rng=lambda: 1.0, **options)


async def watch(provider: Resilient, model: str | None = None) -> tuple[list[Delta], Any]:
    items: list[Any] = [item async for item in provider.stream(ASK, None, model)]
    return items[:-1], items[-1]


def screen(shown: list[Delta]) -> tuple[str, str]:
    """Return what a subscriber that obeys restarts shows in the end: text and reasoning."""
    text = reasoning = ""
    for delta in shown:
        if delta.restart:
            text = reasoning = ""
        text, reasoning = text + delta.text, reasoning + delta.reasoning
    return text, reasoning


@pytest.fixture(params=["chat", "stream"])
def ask(request) -> Any:
    async def chat(provider: Resilient, model: str | None = None) -> Any:
        return await provider.chat(ASK, None, model)

    async def stream(provider: Resilient, model: str | None = None) -> Any:
        return (await watch(provider, model))[1]

    return chat if request.param == "chat" else stream


async def test_a_temporary_error_is_retried_with_growing_waits(ask, clock):
    model = ScriptedProvider([busy(), ConnectionResetError("gone"), TimeoutError(), "at last"])
    answer = await ask(resilient(clock, model))
    assert answer.content == "at last"
    assert answer.model is None
    assert clock.waits == [0.5, 1.0, 2.0]


async def test_waits_have_jitter_and_a_ceiling(clock):
    model = ScriptedProvider([busy()] * 4 + ["ok"])
    await Resilient([(model, None)], sleep=clock.sleep, rng=lambda: 0.0, max_delay=1.5).chat(ASK)
    assert clock.waits == [0.25, 0.5, 0.75, 0.75]


async def test_a_wait_requested_by_the_server_is_kept(ask, clock):
    model = ScriptedProvider([busy(20), busy(0.1), "ok"])
    await ask(resilient(clock, model))
    assert clock.waits == [20, 1.0]


async def test_a_server_that_requests_too_long_a_wait_is_left_for_the_fallback(ask, clock):
    answer = await ask(resilient(clock, ScriptedProvider([busy(3600)]), ScriptedProvider(["ok"], model="second")))
    assert (answer.content, answer.model) == ("ok", "second")
    assert clock.waits == []


async def test_without_a_fallback_too_long_a_wait_is_an_error_that_says_so(ask, clock):
    with pytest.raises(ProviderError, match=r"busy \(it asks to wait 3600 s\)") as error:
        await ask(resilient(clock, ScriptedProvider([busy(3600)])))
    assert error.value.retryable
    assert error.value.retry_after == 3600


async def test_a_permanent_error_goes_to_the_fallback_at_once(ask, clock):
    first = ScriptedProvider([ProviderError("no such model", status=404)])
    answer = await ask(resilient(clock, first, ScriptedProvider(["ok"], model="second")))
    assert (answer.content, answer.model) == ("ok", "second")
    assert clock.waits == []
    assert len(first.requests) == 1


async def test_a_permanent_error_is_raised_if_there_is_no_fallback(ask, clock):
    model = ScriptedProvider([ProviderError("HTTP 401: bad key", status=401)])
    with pytest.raises(ProviderError, match=r"^HTTP 401: bad key$") as error:
        await ask(resilient(clock, model))
    assert not error.value.retryable
    assert error.value.status == 401


async def test_when_all_fail_the_error_names_each_one(ask, clock):
    first = ScriptedProvider([busy()] * 3, model="large")
    second = ScriptedProvider([ProviderError("bad key")], model="small")
    with pytest.raises(ProviderError) as error:
        await ask(resilient(clock, first, second, retries=2))
    assert str(error.value) == "no model answered: large: busy (tried 3 times); small: bad key"
    assert len(first.requests) == 3


async def test_a_bug_is_not_retried(ask, clock):
    model = ScriptedProvider([KeyError("bug"), "ok"])
    with pytest.raises(KeyError):
        await ask(resilient(clock, model))
    assert clock.waits == []


async def test_the_requested_model_replaces_the_first_one_only(ask, clock):
    first, second = ScriptedProvider([ProviderError("no")]), ScriptedProvider(["ok"])
    provider = Resilient([(first, "own"), (second, "spare")], sleep=clock.sleep)
    assert provider.get_default_model() == "own"
    assert (await ask(provider, "asked")).model == "spare"
    assert (first.requests[0].model, second.requests[0].model) == ("asked", "spare")


async def test_cancelling_during_a_wait_ends_it(ask):
    provider = Resilient([(ScriptedProvider([busy()], repeat_last=True), None)], base_delay=30)
    task = asyncio.create_task(ask(provider))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stream_without_errors_is_passed_on_unchanged(clock):
    shown, answer = await watch(resilient(clock, Streams(["a", Delta(reasoning="r"), "b"])))
    assert shown == [Delta("a"), Delta(reasoning="r"), Delta("b")]
    assert answer.content == "ab"


async def test_a_retry_that_repeats_what_was_shown_shows_only_the_rest(clock):
    provider = resilient(clock, Streams(["Hello ", "wor", busy()], ["Hel", "lo world", ", again"]))
    shown, answer = await watch(provider)
    assert [delta.text for delta in shown] == ["Hello ", "wor", "ld", ", again"]
    assert not any(delta.restart for delta in shown)
    assert answer.content == "Hello world, again"


async def test_a_retry_that_differs_restarts_once_and_then_shows_it_whole(clock):
    provider = resilient(clock, Streams(["Hello ", "world", busy()], ["Hel", "p is", " here"]))
    shown, answer = await watch(provider)
    assert shown == [Delta("Hello "), Delta("world"), Delta(restart="busy"), Delta("Help is"), Delta(" here")]
    assert answer.content == "Help is here"


async def test_a_retry_that_ends_short_of_what_was_shown_restarts(clock):
    shown, answer = await watch(resilient(clock, Streams(["Hello ", "world", busy()], ["Hello "])))
    assert shown[-2:] == [Delta(restart="busy"), Delta("Hello ")]
    assert answer.content == "Hello "


async def test_a_retry_that_calls_a_tool_instead_restarts_with_nothing(clock):
    shown, _ = await watch(resilient(clock, Streams(["I will", busy()], [])))
    assert shown == [Delta("I will"), Delta(restart="busy")]


async def test_nothing_restarts_when_nothing_was_shown(clock):
    shown, _ = await watch(resilient(clock, Streams([busy()], [busy()], ["ok"])))
    assert shown == [Delta("ok")]


async def test_reasoning_is_not_shown_twice_either(clock):
    thought = Delta(reasoning="think ")
    provider = resilient(clock, Streams([thought, "Yes", busy()], [thought, Delta(reasoning="more"), "Yes, ok"]))
    shown, _ = await watch(provider)
    assert shown == [thought, Delta("Yes"), Delta(reasoning="more"), Delta(", ok")]


async def test_different_reasoning_restarts_everything(clock):
    provider = resilient(
        clock, Streams([Delta(reasoning="abc"), "Yes", busy()], [Delta(reasoning="ab"), Delta(reasoning="x"), "Yes"])
    )
    shown, _ = await watch(provider)
    assert shown[2:] == [Delta(restart="busy"), Delta(reasoning="abx"), Delta("Yes")]
    assert screen(shown) == ("Yes", "abx")


async def test_reasoning_that_is_missing_from_the_retry_restarts_everything(clock):
    shown, answer = await watch(resilient(clock, Streams([Delta(reasoning="hm"), "Yes", busy()], ["Yes", "."])))
    assert screen(shown) == ("Yes.", "") == (answer.content, answer.reasoning or "")


async def test_consecutive_failures_keep_count_of_what_is_shown(clock):
    provider = resilient(
        clock, Streams(["one ", "two", busy()], ["one", busy()], ["one two ", "three", busy()], ["one two three four"])
    )
    shown, answer = await watch(provider)
    assert [delta.text for delta in shown] == ["one ", "two", " ", "three", " four"]
    assert screen(shown)[0] == answer.content


async def test_a_fallback_repeats_nothing_either_with_a_stream_or_without(clock):
    broken = Streams(["same ", ProviderError("gone")])
    shown, answer = await watch(resilient(clock, broken, ChatOnlyProvider(["same words"], model="plain")))
    assert [delta.text for delta in shown] == ["same ", "words"]
    assert (answer.content, answer.model) == ("same words", "plain")


async def test_a_provider_without_a_stream_is_shown_in_one_piece(clock):
    shown, answer = await watch(resilient(clock, ChatOnlyProvider([LLMResponse("hi", reasoning="hm")])))
    assert shown == [Delta("hi", "hm")]
    assert answer.content == "hi"


async def test_a_restart_by_the_provider_itself_is_passed_on(clock):
    provider = resilient(clock, Streams(["old", Delta("n", restart="x"), "ew", busy()], ["new one"]))
    shown, _ = await watch(provider)
    assert shown == [Delta("old"), Delta("n", restart="x"), Delta("ew"), Delta(" one")]


async def test_a_stream_without_an_answer_is_retried(clock):
    class Empty(Streams):
        async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            if len(self.tries) == 1:
                async for item in super().stream(messages):
                    yield item
            self.tries.pop(0)

    shown, _ = await watch(resilient(clock, Empty([], ["ok"])))
    assert shown == [Delta("ok")]


async def test_leaving_the_stream_closes_the_underlying_one_at_once():
    below: list[Any] = []

    class Kept(Streams):
        def stream(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            below.append(super().stream(messages))  # kept here, so that nothing but `aclose` ends it
            return below[-1]

    stream = Resilient([(Kept(["a ", "b"]), None)]).stream(ASK)
    assert await anext(stream) == Delta("a ")
    await stream.aclose()
    assert below[0].ag_frame is None


async def test_each_provider_is_closed_once():
    provider = Streams()
    await Resilient([(provider, None), (provider, "other")]).close()
    assert provider.closed == 1


def test_it_needs_a_provider():
    with pytest.raises(ValueError, match="at least one"):
        Resilient([])


async def test_a_stream_refused_before_it_begins_is_left_for_the_next_model(clock):
    class Refuses(LLMProvider):
        default_model = "strict"

        def stream(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            raise ProviderError("it takes no such request", status=400)

    shown, answer = await watch(resilient(clock, Refuses(), Streams(["fine"], model="other")))
    assert [delta.text for delta in shown] == ["fine"]
    assert (answer.content, answer.model) == ("fine", "other")
