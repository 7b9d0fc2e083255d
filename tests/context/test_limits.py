"""What a window, an error, an outage or a full disk may do to a conversation: never lose it or keep it small for
good."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from everloop import LLMResponse, tool
from everloop.config import Config
from everloop.log import CallEnded, Compacted
from everloop.messages import Conversation
from everloop.providers.base import ProviderError, ToolCallRequest
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Output
from everloop.tools.registry import keep_output

from .test_compacting import LONG, Model, agent, fill, log, quiet, summaries_in

TOO_LONG = ProviderError("This model's maximum context length is 8000 tokens. However, you requested 9000 tokens")
DOT = "data:image/png;base64,aGk="


async def test_an_error_that_only_quotes_a_window_does_not_change_it(tmp_path):
    quoting = ProviderError("400: the string 'the page said: maximum context length is 300 tokens' is not allowed")
    model = Model()
    async with agent(tmp_path, model, window=200_000) as loop:
        await fill(loop, 2, size=5)
        model.answers = [quoting] * 5
        await loop.process_direct("go on")
        assert loop._compactor.measure().window == 200_000


async def test_a_window_reported_by_another_model_is_ignored(tmp_path):
    model = Model()
    several = ProviderError("no model answered: a is down; b: maximum context length is 8000 tokens", several=True)
    async with agent(tmp_path, model, window=200_000) as loop:
        await fill(loop, 5)
        model.answers = [several, "fine"]
        assert await loop.process_direct("go on") == "fine"
        assert loop._compactor.measure().window == 200_000
        long = Conversation([{"role": "system", "content": ""}, {"role": "user", "content": LONG * 1_000}])
        loop._compactor.measure("mini").overflows(TOO_LONG, long)
        assert loop._compactor.measure("mini").window == 8_000
        assert loop._compactor.measure().window == 200_000


async def test_a_window_that_proves_larger_is_corrected(tmp_path):
    model = Model()
    async with agent(tmp_path, model, window=200_000) as loop:
        await fill(loop, 5)
        model.answers = [TOO_LONG, LLMResponse("fine", usage={"prompt_tokens": 9_500})]
        await loop.process_direct("go on")
        assert loop._compactor.measure().window == 200_000


async def test_a_refused_request_gets_smaller_whatever_the_estimate(tmp_path):
    model = Model()
    async with agent(tmp_path, model, window=200_000) as loop:
        await fill(loop, 6)
        loop._compactor._meter.observe("scripted", 100_000, 12_500)  # far too low
        model.answers = [ProviderError("prompt is too long"), "fine"]
        assert await loop.process_direct("go on") == "fine"
        sizes = [len(str(messages)) for messages in model.asked[-2:]]
    assert sizes[1] < 0.75 * sizes[0]


@pytest.mark.parametrize("usage", [{"prompt_tokens": "900"}, {"prompt_tokens": [1]}, ["x"], "many", None, {"a": {}}])
async def test_an_answer_with_invalid_usage_is_still_an_answer(tmp_path, usage):
    model = ScriptedProvider([LLMResponse("THE ANSWER", usage=usage)])
    async with agent(tmp_path, model, day_tokens=1_000_000) as loop:
        assert await loop.process_direct("hi") == "THE ANSWER"


async def test_a_turn_full_of_pictures_continues_without_the_older_ones(tmp_path):
    @tool
    async def look(n: int) -> Output:
        """Look."""
        return Output(f"picture {n}", images=(DOT,))

    model = Model(*[call("look", n=n) for n in range(12)], "done")
    async with agent(tmp_path, model, window=16_000) as loop:
        loop.tools.register(look)
        assert await loop.process_direct("look around") == "done"
    last = json.dumps(model.asked[-1])
    assert 1 <= last.count(DOT) < 8
    assert "picture 0" in last


async def test_a_turn_full_of_long_arguments_continues_with_truncated_ones(tmp_path):
    @tool
    async def store(text: str) -> str:
        """Store a text."""
        return "stored"

    model = Model(*[call("store", text=f"text {n} {LONG * 100}") for n in range(12)], "done")
    async with agent(tmp_path, model, window=16_000) as loop:
        loop.tools.register(store)
        assert await loop.process_direct("store them") == "done"
    calls = [one["function"]["arguments"] for m in model.asked[-1] for one in m.get("tool_calls", ())]
    assert len(calls) == 12
    assert "cut here to save room" in json.loads(calls[0])["text"]
    assert json.loads(calls[0])["text"].startswith("text 0 ")
    assert json.loads(calls[-1])["text"] == f"text 11 {LONG * 100}"


async def test_a_long_turn_rarely_changes_what_was_already_sent(tmp_path):
    @tool
    async def report(n: int) -> str:
        """Report."""
        return f"report {n} " + LONG * 60

    model = Model(*[call("report", n=n) for n in range(60)], "done")
    async with agent(tmp_path, model, window=24_000) as loop:
        loop.max_iterations = 100
        loop._turns.specs.limits = type(loop._turns.specs.limits)(rounds=100)
        loop.tools.register(report)
        assert await loop.process_direct("go") == "done"
    compactions = [entry for entry in await log(tmp_path) if isinstance(entry, Compacted)]
    assert 1 <= len(compactions) <= 10


async def test_turns_listed_without_a_model_are_summarised_once_there_is_one(tmp_path):
    model = Model(summary=ProviderError("connection refused"))
    async with agent(tmp_path, model, compact_at=100.0) as loop:
        await fill(loop, 5)
        model.answers = [ProviderError("connection refused")]
        assert "connection refused" in await loop.process_direct(f"long {LONG * 200}")
        model.summary = "A REAL SUMMARY"
        await loop.process_direct("back again?")
        await quiet(loop)
        await loop.process_direct("and now?")
    assert "No summary could be written" in summaries_in(model.asked[-2])[0]
    assert "A REAL SUMMARY" in summaries_in(model.asked[-1])[0]
    told = str(model.summaries[-1])
    assert "message 0: All work" in told
    assert len(told) > 4_000  # the turns themselves, not the list of them
    stopgaps = [entry.stopgap for entry in await log(tmp_path) if isinstance(entry, Compacted)]
    assert stopgaps == [True, False]


async def test_a_smaller_summary_model_gets_what_fits_its_window(tmp_path):
    model = Model()
    async with agent(tmp_path, model, window=100_000, summary_model="gpt-4") as loop:  # 8,192 tokens
        await fill(loop, 12, size=200)
        assert "now a summary" in await loop.process_direct("/compact")
    assert len(model.summaries) > 1
    assert max(len(str(messages)) for messages in model.summaries) < 8_192 * 4


async def test_results_of_calls_with_long_names_get_separate_files(tmp_path):
    @tool
    async def report(n: int) -> str:
        """Report."""
        return f"REPORT {n} " + LONG * 150

    ids = ["x" * 90 + "." + "a", "x" * 90 + ":" + "b"]
    model = Model([ToolCallRequest(id, "report", {"n": n}) for n, id in enumerate(ids)], "seen", "one", "two", "three")
    async with agent(tmp_path, model, compact_at=0.2) as loop:
        loop.tools.register(report)
        for text in ("go", "a", "b"):
            await loop.process_direct(text)
            await quiet(loop)
    entry = next(entry for entry in await log(tmp_path) if isinstance(entry, Compacted))
    texts = [Path(place).read_text() for place in entry.aside.values()]
    assert [text[:8] for text in texts] == ["REPORT 0", "REPORT 1"]


async def test_a_fork_shows_full_results_instead_of_pointers_to_another_sessions_files(tmp_path):
    @tool
    async def report() -> str:
        """Report."""
        return "REPORT " + LONG * 150 + "THE END"

    model = Model(call("report"), "seen", "one", "two", "three", "four")
    async with agent(tmp_path, model, compact_at=0.2) as loop:
        loop.tools.register(report)
        for text in ("go", "a", "b"):
            await loop.process_direct(text)
            await quiet(loop)
        await loop.process_direct("c")
        assert "THE END" not in str(model.asked[-1])
        await loop.store.fork("me", "cli:direct", None, "cli:copy")
        await loop.process_direct("d", "cli:copy")
        assert "THE END" in str(model.asked[-1])


async def test_a_stop_while_the_history_is_rebuilt_leaves_memory_consistent(tmp_path, monkeypatch):
    model = Model()
    async with agent(tmp_path, model, compact_at=100.0) as loop:
        await fill(loop, 5)
        reading, real = asyncio.Event(), loop.store.read_log

        async def slow(session: int, after: int = 0, until: int | None = None) -> Any:
            if any(isinstance(entry, Compacted) for entry in await log(tmp_path)):
                reading.set()
                await asyncio.sleep(0.3)
            return await real(session, after, until)

        monkeypatch.setattr(loop.store, "read_log", slow)
        turn = asyncio.create_task(loop.process_direct(f"long {LONG * 200}"))
        await asyncio.wait_for(reading.wait(), 20)
        await loop.process_direct("/stop")
        await turn
        monkeypatch.setattr(loop.store, "read_log", real)
        await loop.process_direct("next")
        here = model.asked[-1]
    async with agent(tmp_path, model, compact_at=100.0) as loop:
        await loop.process_direct("once more")
    assert model.asked[-1][: len(here)] == here


async def test_a_full_disk_fails_no_turn_and_leaves_no_partial_files(tmp_path):
    @tool
    async def report(n: int) -> str:
        """Report."""
        return f"REPORT {n} " + LONG * 280

    model = Model(*[call("report", n=n) for n in range(6)], "done")
    loop = agent(tmp_path, model)
    outputs = tmp_path / "home" / "outputs"
    outputs.parent.mkdir(exist_ok=True)
    outputs.write_text("in the way")
    async with loop:
        loop.tools.register(report)
        assert await loop.process_direct("go") == "done"
    assert "make the call again if you need it" in str(model.asked[-1])
    assert sum(isinstance(entry, CallEnded) for entry in await log(tmp_path)) == 6


def test_a_partial_file_is_not_left_behind(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(OSError):
            keep_output(tmp_path / "outputs", "name", b"x" * 50_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "outputs").iterdir()) == []


async def test_a_compaction_that_would_save_nothing_is_not_made(tmp_path):
    model = Model(summary="much longer than the two words that were said, " * 6)
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("a")
        await loop.process_direct("b")
        said = await loop.process_direct("/compact")
        assert "nothing to compact yet" in said or "Nothing was changed" in said
    assert not any(isinstance(entry, Compacted) for entry in await log(tmp_path))


async def test_a_commands_arguments_may_start_on_the_next_line(tmp_path):
    model = Model()
    async with agent(tmp_path, model) as loop:
        await fill(loop, 3, size=20)
        assert "now a summary" in await loop.process_direct("/compact\nkeep the names")
    assert "Keep especially: keep the names" in str(model.summaries[0])


async def test_the_python_api_may_add_any_message(tmp_path):
    model = ScriptedProvider(["fine"], check=False)
    async with agent(tmp_path, model) as loop:
        session = loop.sessions.get_or_create("cli:direct")
        for content in (["hello"], 5, None, {"a": 1}):
            session.add_message("user", content)
        await asyncio.to_thread(loop.sessions.save, session)
        assert await loop.process_direct("hi") == "fine"


async def test_a_provider_that_reports_the_exact_model_also_calibrates_the_estimate(tmp_path):
    exact = LLMResponse("fine", usage={"prompt_tokens": 20_000}, model="scripted-2026-01-01")
    model = Model(exact)
    async with agent(tmp_path, model, window=400_000) as loop:
        await fill(loop, 1, size=500)
        assert loop._compactor._meter.ratio("scripted") != Config().compact_at
        assert loop._compactor.measure().tokens(loop._turns._histories.kept(1)) > 15_000  # type: ignore[arg-type]


async def test_the_cost_of_a_summary_is_in_the_log(tmp_path):
    model = Model(summary=LLMResponse("short", usage={"prompt_tokens": 700, "completion_tokens": 5}))
    async with agent(tmp_path, model) as loop:
        await fill(loop, 3, size=20)
        await loop.process_direct("/compact")
    (entry,) = [entry for entry in await log(tmp_path) if isinstance(entry, Compacted)]
    assert entry.usage == {"prompt_tokens": 700, "completion_tokens": 5}
