"""Recordings of the real model, replayed through the whole loop without its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from evaluation.ablation import HELPS, without
from evaluation.cases import HERE
from evaluation.conversations import CONVERSATIONS, load_conversations, run_conversation
from evaluation.recording import RecordedEngine, Recording, key_of
from evaluation.runner import Desk

from everloop import AgentLoop, MessageBus
from everloop.config import Config
from everloop.errors import EverloopError
from everloop.providers.base import ProviderError
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.provider import LocalProvider
from everloop.providers.local.small.shaping import SmallShaping
from everloop.threads import in_thread
from tests.test_evaluation import evaluate

MODEL = "qwen2.5-coder-1.5b"
DAYS = ("2026-11-16", "2027-02-28")
RECORDINGS = HERE / "recordings"
(FIRST_THINGS,) = load_conversations(CONVERSATIONS["first_things"])
REMINDERS = load_conversations(CONVERSATIONS["reminders"])


def replaying(name: str) -> tuple[LocalProvider, RecordedEngine]:
    engine = RecordedEngine(Recording(RECORDINGS / f"{name}.jsonl"))
    return LocalProvider(engine, SmallShaping(), model=MODEL), engine


class Written(Engine):
    """A model that always gives the same answer, and counts its requests."""

    def __init__(self, text: str) -> None:
        super().__init__(Settings(Path("none.gguf")))
        self.text = text
        self.times = 0

    async def complete(self, request: dict[str, Any], on_delta: Any = None, *, session: str = "") -> dict[str, Any]:
        self.times += 1
        if on_delta is not None:
            on_delta({"content": self.text})
        return {"choices": [{"index": 0, "message": {"content": self.text}, "finish_reason": "stop"}]}


# ---------------------------------------------------------------------------------------------- what the model wrote


async def test_the_ten_things_that_a_newcomer_tries_first_work_at_the_first_attempt(tmp_path):
    provider, engine = await in_thread(replaying, "first_things")
    outcomes = await run_conversation(FIRST_THINGS, provider, Config(), Desk(tmp_path / "desk"))
    assert [(one.request, one.answer, one.problems) for one in outcomes if not one.right] == []
    assert len(outcomes) == 10
    assert engine.recording.used == engine.recording.keys  # what is never replayed proves nothing


@pytest.mark.parametrize("conversation", [pytest.param(one, id=one.name) for one in REMINDERS])
async def test_a_due_reminder_says_what_it_is_about_without_asking_the_model(conversation, tmp_path):
    (turn,) = conversation.turns
    provider, engine = await in_thread(replaying, "reminders")
    bus = MessageBus()
    config = Config(home=tmp_path / "home", workspace=tmp_path / "work", store=tmp_path / "store.db")
    async with AgentLoop(bus, provider, config.workspace, config=config, store=config.store) as agent:
        await agent.process_direct(turn.request, "test:7", "test", "7")
        (job,) = await agent.cron_service.list()
        assert job.deliver == "text"
        asked = len(engine.recording.used)
        assert asked > 0
        agent.cron_service.clock = lambda: job.next_due + 1
        running = asyncio.create_task(agent.run())
        async with asyncio.timeout(30):
            said = await bus.consume_outbound()
        agent.stop()
        await running
    assert turn.jobs[0]["about"] in said.content
    assert (said.channel, said.chat_id, said.content) == ("test", "7", f"Reminder: {job.message}")
    assert len(engine.recording.used) == asked


def test_there_are_ten_reminders_in_six_languages():
    assert len(REMINDERS) == 10
    assert len({one.about for one in REMINDERS}) == 6


# ---------------------------------------------------------------------------------------------- recordings

ASKED = [{"role": "user", "content": "hello"}]
DAY = "You help.\nWorkspace: {}\n\n---\n\nThis conversation began on {}."


def said_on(day: str, folder: str, words: str = "hello") -> list[dict[str, Any]]:
    return [{"role": "system", "content": DAY.format(folder, day)}, {"role": "user", "content": words}]


async def test_a_recording_is_replayed_on_another_day_in_another_folder_and_the_rest_is_asked(tmp_path):
    path = tmp_path / "some.jsonl"
    model = Written("Hi there.")
    recorder = LocalProvider(RecordedEngine(await in_thread(Recording, path), model), SmallShaping(), model="m")
    assert (await recorder.chat(said_on("Monday, 2026-11-16", "/a/work"))).content == "Hi there."
    again = LocalProvider(RecordedEngine(await in_thread(Recording, path), model), SmallShaping(), model="m")
    pieces = [piece async for piece in again.stream(said_on("Friday, 2027-01-15", "/b/other"))]
    assert [getattr(piece, "text", None) or getattr(piece, "content", None) for piece in pieces] == ["Hi there."] * 2
    assert model.times == 1
    await again.chat(said_on("Monday, 2026-11-16", "/a/work", "good bye"))
    assert model.times == 2
    assert len(path.read_text().splitlines()) == 2


def test_the_date_of_a_memory_is_not_part_of_a_recordings_key():
    remembered = "## Memory\n\n- {}: The user's sister's birthday is on 12 March."
    keys = {key_of({"messages": [{"role": "user", "content": remembered.format(day)}]}) for day in DAYS}
    assert len(keys) == 1


async def test_a_prompt_without_a_recording_is_an_error_with_advice(tmp_path):
    provider = LocalProvider(RecordedEngine(Recording(tmp_path / "none.jsonl")), SmallShaping(), model="m")
    with pytest.raises(ProviderError, match=r"none\.jsonl has no answer for 'hello'.*make record"):
        await provider.chat(ASKED)


def test_a_damaged_recording_is_a_one_line_error(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"key": "a", "text": "x", "reason": "stop"}\n{"key"\n')
    with pytest.raises(EverloopError, match=r"some\.jsonl: line 2"):
        Recording(path)


# ---------------------------------------------------------------------------------------------- helps switched off

REMIND = [{"role": "user", "content": "every friday at 16:00 remind me of the bins"}]
OF_CRON = {name: {"type": "string"} for name in ("action", "message", "cron", "deliver")}
CRON = {"type": "function", "function": {"name": "cron", "parameters": {"type": "object", "properties": OF_CRON}}}


def grammar_for_a_reminder() -> str:
    request = SmallShaping().prepare(REMIND, [CRON])
    assert isinstance(request, dict)
    return str(request["grammar"])


@pytest.mark.parametrize("name", [*HELPS])
def test_a_help_that_is_switched_off_is_on_again_afterwards(name: str) -> None:
    there = [getattr(module, attribute) for module, attribute, _ in HELPS[name]]
    with without(name):
        assert all(getattr(module, attribute) is instead for module, attribute, instead in HELPS[name])
    assert [getattr(module, attribute) for module, attribute, _ in HELPS[name]] == there


def test_without_a_help_the_request_to_the_model_differs() -> None:
    usual = grammar_for_a_reminder()
    with without("known values"):
        assert grammar_for_a_reminder() != usual
    with without():
        assert grammar_for_a_reminder() == usual


async def test_recording_a_remote_model_is_a_one_line_error(tmp_path):
    record = ["--record", str(tmp_path / "some.jsonl")]
    status, out, err = await evaluate("--set", "talks", "--provider", "openai", "--model", "m", *record)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "--provider local" in err
