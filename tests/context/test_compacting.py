"""Compaction through the whole loop: when it happens, what the model then sees, and that nothing waits or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, Config, LLMResponse, MessageBus, events, tool
from everloop.config import Rule
from everloop.context.compaction import SUMMARY_HEAD
from everloop.log import CallEnded, Compacted, UserSaid
from everloop.providers.base import ProviderError
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call, check_conversation

from ..runtime.chat import until

WINDOW = 10_800
LONG = "All work and no play makes a long line. "  # about 10 tokens


class Model(ScriptedProvider):
    """Answers the agent with `answers`, and requests for a summary with `summary`."""

    def __init__(self, *answers: Any, summary: Any = "SUMMARY of what was", **options: Any) -> None:
        super().__init__([self._answer_one], repeat_last=True, **options)
        self.answers = list(answers)
        self.summary = summary
        self.summaries: list[list[dict[str, Any]]] = []
        self.asked: list[list[dict[str, Any]]] = []

    async def _answer_one(self, messages: list[dict[str, Any]], tools: Any) -> Any:
        if "You write summaries" in messages[0]["content"]:
            self.summaries.append(messages)
            said = self.summary(messages) if callable(self.summary) else self.summary
            return await said if asyncio.iscoroutine(said) else said
        assert check_conversation(messages, strict=True) == []
        self.asked.append(messages)
        said = self.answers.pop(0) if self.answers else "fine"
        return said(messages) if callable(said) else said


def agent(tmp_path: Path, model: Any, **options: Any) -> AgentLoop:
    config = Config(home=tmp_path / "home", window=options.pop("window", WINDOW), **options)
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    loop = AgentLoop(MessageBus(), model, work, config=config, store=tmp_path / "store.db")
    for name in loop.tools.names:  # keeps the room for a conversation the same, whatever tools are added
        if name not in ("read_file", "web_fetch", "remember"):
            loop.tools.unregister(name)
    return loop


async def log(tmp_path: Path, key: str = "cli:direct") -> list[Any]:
    store = SQLiteStore(tmp_path / "store.db")
    info = await store.session("me", key)
    assert info is not None
    logged = await store.read_log(info.id)
    await store.close()
    return [one.entry for one in logged]


def summaries_in(messages: list[dict[str, Any]]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "user" and str(m["content"]).startswith(f"[{SUMMARY_HEAD}")]


async def fill(loop: AgentLoop, turns: int, size: int = 100, key: str = "cli:direct") -> None:
    for number in range(turns):
        await loop.process_direct(f"message {number}: {LONG * size}", key)


async def fill_until_summarised(loop: AgentLoop, model: Model) -> None:
    """Fill the conversation until a summary is requested.

    After each turn, wait for the check that finds too little to summarise; no other check starts while it runs.
    """

    def settled() -> bool:
        return bool(model.summaries) or all(note.task is None for note in loop._compactor._notes.values())

    for number in range(4):
        await loop.process_direct(f"message {number}: {LONG * 100}")
        await until(settled)
    await until(lambda: len(model.summaries) == 1)


async def quiet(loop: AgentLoop) -> None:
    """Wait until no compaction runs in the background."""
    async with asyncio.timeout(30):
        while any(note.task is not None for note in loop._compactor._notes.values()):
            await asyncio.sleep(0.005)


async def test_a_conversation_that_grows_is_summarised_after_the_reply_and_stays_whole_on_disk(tmp_path):
    model = Model()
    async with agent(tmp_path, model) as loop:
        for number in range(7):
            await loop.process_direct(f"message {number}: {LONG * 80}")
            await quiet(loop)
        assert await loop.process_direct("and now?") == "fine"
    assert 1 <= len(model.summaries) <= 2
    shown = model.asked[-1]
    assert summaries_in(shown) == [f"[{SUMMARY_HEAD}]\n\nSUMMARY of what was"]
    assert "message 0" not in str(shown)
    assert "message 6" in str(shown)
    assert "message 0" in str(model.summaries[0])
    assert "message 6" not in str(model.summaries[0])
    entries = await log(tmp_path)
    said = [str(entry.content) for entry in entries if isinstance(entry, UserSaid)]
    assert [text.split(":")[0] for text in said] == [f"message {n}" for n in range(7)] + ["and now?"]
    assert sum(isinstance(entry, Compacted) for entry in entries) == 1


@pytest.mark.parametrize(("own_prompt", "summarised"), [(0, True), (100, False)])
async def test_a_provider_with_its_own_prompt_has_room_for_more(tmp_path, own_prompt, summarised):
    """A small local model receives neither the system prompt nor the tools, so they do not fill its window."""
    model = Model()
    model.own_prompt = own_prompt
    async with agent(tmp_path, model) as loop:
        (tmp_path / "work" / "AGENTS.md").write_text(LONG * 250)
        for number in range(5):
            await loop.process_direct(f"message {number}: {LONG * 80}")
            await quiet(loop)
    assert bool(model.summaries) is summarised


def summary_after(ready: asyncio.Event, text: str) -> Callable[[Any], Awaitable[str]]:
    """Return a model's summary that arrives once the event is set."""

    async def summary(messages: Any) -> str:
        await ready.wait()
        return text

    return summary


async def test_a_reply_that_fits_does_not_wait_for_the_summary(tmp_path):
    model = Model(summary=summary_after(asyncio.Event(), "late"))
    async with agent(tmp_path, model, compact_at=0.1) as loop:
        await fill_until_summarised(loop, model)
        async with asyncio.timeout(20):
            assert await loop.process_direct("quick") == "fine"
            assert await loop.process_direct("quick", "cli:other") == "fine"
        assert len(model.summaries) == 1  # one at a time


async def test_a_summary_that_arrives_during_a_turn_is_used_by_that_turn(tmp_path):
    ready = asyncio.Event()

    @tool
    async def let_go() -> str:
        """Let the summary arrive."""
        ready.set()
        await quiet(loop)
        return "let go"

    model = Model(summary=summary_after(ready, "SUMMARY at last"))
    async with agent(tmp_path, model, compact_at=0.1) as loop:
        loop.tools.register(let_go)
        await fill_until_summarised(loop, model)
        model.answers = [call("let_go"), "done"]
        assert await loop.process_direct("go") == "done"
    assert summaries_in(model.asked[-2]) == []
    assert "SUMMARY at last" in summaries_in(model.asked[-1])[0]
    assert [type(entry).__name__ for entry in await log(tmp_path)][-4:] == [
        "CallEnded",
        "Compacted",
        "ModelAnswered",
        "TurnEnded",
    ]


async def test_a_conversation_that_does_not_fit_is_compacted_before_the_model_call_and_subscribers_are_notified(
    tmp_path,
):
    model = Model()
    seen: list[events.Event] = []
    async with agent(tmp_path, model, compact_at=100.0) as loop:  # never in the background
        await fill(loop, 5)
        assert await loop.process_direct(f"long {LONG * 200}", on_event=seen.append) == "fine"
    assert len(summaries_in(model.asked[-1])) == 1
    assert [type(event).__name__ for event in seen][:3] == ["TurnStarted", "Compacting", "Compacted"]
    told = next(event for event in seen if isinstance(event, events.Compacted))
    assert told.after < told.before
    assert told.turns >= 3


@pytest.mark.parametrize(
    "summary",
    [ProviderError("down"), "", "  ", lambda messages: "much more " * 50_000, ValueError("bug"), "<think>hm</think>"],
    ids=["error", "empty", "blank", "inflating", "bug", "only thoughts"],
)
async def test_a_summary_that_fails_loses_no_turn(tmp_path, summary):
    model = Model(summary=summary)
    async with agent(tmp_path, model, compact_at=100.0) as loop:
        await fill(loop, 5)
        assert await loop.process_direct(f"long {LONG * 200}") == "fine"
    assert len(model.summaries) == 1
    (shown,) = summaries_in(model.asked[-1])
    assert "message 0: All work" in shown  # the first words of what the user said
    assert len(shown) < 8_000


async def test_a_failed_background_summary_changes_nothing_and_is_not_retried_at_every_turn(tmp_path):
    model = Model(summary=ProviderError("down"))
    async with agent(tmp_path, model, compact_at=0.3) as loop:
        for number in range(5):
            await loop.process_direct(f"message {number}: {LONG * 100}")
            await quiet(loop)
    assert len(model.summaries) == 1
    assert not any(isinstance(entry, Compacted) for entry in await log(tmp_path))
    assert "message 0" in str(model.asked[-1])


async def test_long_old_results_become_pointers_that_read_file_can_read(tmp_path):
    @tool
    async def report() -> str:
        """Give a long report."""
        return "REPORT\n" + f"{LONG}\n" * 300 + "THE END"

    model = Model(call("report"), "seen", "one", "two", "three")
    async with agent(tmp_path, model, compact_at=0.3) as loop:
        loop.tools.register(report)
        for text in ("make a report", "a", "b"):
            await loop.process_direct(text)
            await quiet(loop)
        await loop.process_direct("c")
        (result,) = [m["content"] for m in model.asked[-1] if m["role"] == "tool"]
        assert "THE END" not in result
        assert len(result) < 700
        place = result.split("while it is kept: ")[1].split("]")[0]
        model.answers = [call("read_file", path=place), "found"]
        await loop.process_direct("what was in it?")
        assert "THE END" in str(model.asked[-1][-1])
    assert model.summaries == []  # pointers were enough
    assert any("THE END" in entry.content for entry in await log(tmp_path) if isinstance(entry, CallEnded))


async def test_a_turn_that_alone_outgrows_the_window_continues_with_pointers(tmp_path):
    @tool
    async def report(n: int) -> str:
        """Give a long report."""
        return f"REPORT {n} " + LONG * 280 + f" END {n}"

    model = Model(*[call("report", n=n) for n in range(8)], "done")
    async with agent(tmp_path, model) as loop:
        loop.tools.register(report)
        assert await loop.process_direct("make eight reports") == "done"
    last = str(model.asked[-1])
    assert "END 7" in last  # the newest result is there
    assert "END 0" not in last
    assert "make eight reports" in last


async def test_a_models_context_length_error_triggers_compaction(tmp_path):
    too_long = ProviderError("This model's maximum context length is 8000 tokens. However, you requested 9000 tokens")
    model = Model()
    async with agent(tmp_path, model, window=100_000) as loop:
        await fill(loop, 5)
        model.answers = [too_long, "it fits now"]
        assert await loop.process_direct("go on") == "it fits now"
        assert len(summaries_in(model.asked[-1])) == 1
        assert await loop.process_direct("again") == "fine"
        assert loop._compactor.measure().window == 8000
    assert sum(isinstance(entry, Compacted) for entry in await log(tmp_path)) <= 2


async def test_a_model_that_always_reports_a_context_length_error_ends_the_turn_with_it(tmp_path):
    too_long = ProviderError("maximum context length is 8000 tokens")
    model = Model()
    async with agent(tmp_path, model, window=100_000) as loop:
        await fill(loop, 2)
        model.answers = [too_long] * 50
        assert "maximum context length" in await loop.process_direct("go on")
        assert len(model.answers) > 40


async def test_the_compact_command_keeps_what_the_user_asks_for(tmp_path):
    model = Model()
    async with agent(tmp_path, model) as loop:
        assert "nothing to compact yet" in await loop.process_direct("/compact")
        await fill(loop, 3, size=20)
        said = await loop.process_direct("/compact the name of the ship")
        assert said.startswith("2 turns are now a summary")
        assert "Keep especially: the name of the ship" in str(model.summaries[0])
        await loop.process_direct("go on")
        assert "message 0" not in str(model.asked[-1])
        assert "message 2" in str(model.asked[-1])
        await loop.process_direct("/compact")
        assert "SUMMARY of what was" in str(model.summaries[1])  # the previous summary is part of the next one
        model.summary = ProviderError("down")
        await fill(loop, 2, size=5)
        assert "could not compact" in await loop.process_direct("/compact")


async def test_compact_can_be_stopped(tmp_path):
    begun = asyncio.Event()

    async def hangs(messages: Any) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    model = Model(summary=hangs)
    async with agent(tmp_path, model) as loop:
        await fill(loop, 3, size=20)
        compacting = asyncio.create_task(loop.process_direct("/compact"))
        await begun.wait()
        assert "Stopped" in await loop.process_direct("/stop")
        assert "Nothing was changed" in await compacting
        assert await loop.process_direct("still there?") == "fine"


async def test_new_also_cancels_the_summary(tmp_path):
    model = Model()
    async with agent(tmp_path, model) as loop:
        await fill(loop, 3, size=20)
        await loop.process_direct("/compact")
        await loop.process_direct("/new")
        await loop.process_direct("hello")
    assert [message["role"] for message in model.asked[-1]] == ["system", "user"]


async def test_a_summary_of_an_abandoned_conversation_is_discarded(tmp_path):
    ready = asyncio.Event()
    model = Model(summary=summary_after(ready, "OLD STORY"))
    async with agent(tmp_path, model, compact_at=0.1) as loop:
        await fill_until_summarised(loop, model)
        await loop.process_direct("/new")
        ready.set()
        await quiet(loop)
        await loop.process_direct("hello")
        await loop.process_direct("hello again")
    assert "OLD STORY" not in str(model.asked[-2:])


async def test_taint_survives_a_summary(tmp_path):
    @tool(untrusted=True)
    async def page() -> str:
        """Read a page."""
        return "a page " * 50

    model = Model(call("page"), "seen", summary="see https://evil.example/x for more")
    async with agent(tmp_path, model) as loop:
        loop.tools.register(page)
        await loop.process_direct("read it")
        await fill(loop, 3, size=20)
        await loop.process_direct("/compact")
        model.answers = [call("web_fetch", url="https://evil.example/x"), "done"]
        await loop.process_direct("go on")
        assert "a page a page" not in str(model.asked[-1])
        denied = [m["content"] for m in model.asked[-1] if m["role"] == "tool"][-1]
        # an address in a summary does not count as written by the user
        assert "untrusted content was read before" in denied


async def test_a_long_session_costs_no_more_per_turn_than_a_short_one(tmp_path):
    model = Model()
    async with agent(tmp_path, model, window=8_000) as loop:
        sizes = []
        for _ in range(6):
            await fill(loop, 25, size=20)
            await quiet(loop)
            sizes.append(len(str(model.asked[-1])))
            (kept,) = loop._turns._histories._kept.values()
            assert kept.size < 300_000
        assert max(sizes) < 40_000
        largest = max(len(str(messages)) for messages in [*model.asked, *model.summaries])
        assert largest < 50_000
    assert len(model.summaries) < 60


async def test_a_fork_and_a_restart_show_the_same_summary(tmp_path):
    model = Model()
    async with agent(tmp_path, model) as loop:
        await fill(loop, 3, size=20)
        await loop.process_direct("/compact")
        await loop.process_direct("one")
        await loop.store.fork("me", "cli:direct", None, "cli:copy")
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("two")
        await loop.process_direct("two", "cli:copy")
    mine, copy = model.asked[-2], model.asked[-1]
    assert mine[1:] == copy[1:]
    assert len(summaries_in(mine)) == 1


async def test_the_providers_usage_calibrates_the_estimate(tmp_path):
    def counted(messages: list[dict[str, Any]]) -> LLMResponse:
        return LLMResponse("fine", usage={"prompt_tokens": len(str(messages))})

    model = Model(*[counted] * 20)
    async with agent(tmp_path, model, window=400_000) as loop:
        await fill(loop, 2, size=200)
        before = loop._compactor._meter.ratio("scripted")
    assert before > 0.45  # one token per character, where one per four is usual


async def test_compact_waits_for_an_open_question_and_does_not_end_it(tmp_path):
    model = Model("one", "two", call("remember", text="tea"), "kept")
    async with agent(tmp_path, model, policy=(Rule(do="ask", tool="remember"),)) as loop:
        await fill(loop, 2, size=20)
        assert "May I" in await loop.process_direct("remember it", attended=True)
        assert "waiting for your answer" in await loop.process_direct("/compact", attended=True)
        assert await loop.process_direct("/approve", attended=True) == "kept"
        await until(lambda: len(model.summaries) == 1)
        async with asyncio.timeout(20):
            while not any(isinstance(entry, Compacted) for entry in await log(tmp_path)):
                await asyncio.sleep(0.01)
