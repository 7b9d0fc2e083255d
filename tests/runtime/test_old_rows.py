"""Inbox rows that an earlier version wrote, with what caused a message in its metadata, mean the same as before."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everloop import AgentLoop, Config, InboundMessage, MessageBus
from everloop.bus import CronOrigin, StopRequest, SubagentTask
from everloop.log import UserSaid, decode_entry, encode_entry, messages_of
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider

# As the previous version wrote them: the facts were in `metadata`, without `cause` or `untrusted`.
OLD: dict[str, Any] = {
    "channel": "sub",
    "sender_id": "agent",
    "chat_id": "5f0c",
    "content": "count the beans",
    "media": [],
    "metadata": {},
    "id": "spawn:5f0c",
    "owner": "me",
    "session": "sub:5f0c",
    "reply": False,
    "attended": False,
    "request": None,
    "parts": None,
}
TASK = {
    "label": "count the beans",
    "origin": "test:1",
    "parent": "test:1",
    "depth": 1,
    "caps": {"5f0c": 5000},
    "rounds": 3,
    "ends_at": 4102444800.5,
    "latest": None,
    "root": "t9",
    "untrusted": True,
    "attended": False,
    "report": True,
}


def read(**changed: Any) -> InboundMessage:
    return msgspec.json.decode(json.dumps({**OLD, **changed}), type=InboundMessage)


def test_the_task_of_a_subagent_is_read():
    message = read(metadata=TASK)
    assert message.task == SubagentTask(
        label="count the beans",
        origin="test:1",
        parent="test:1",
        caps={"5f0c": 5000},
        rounds=3,
        ends_at=4102444800.5,
        root="t9",
        attended=False,
    )
    assert message.untrusted


def test_the_phase_of_an_agent_with_a_definition_is_read():
    facts = {"definition": {"name": "counter"}, "inputs": {"what": "beans"}, "phase": "grace", "cut": "timeout"}
    task = read(metadata={**TASK, **facts}, id="spawn:5f0c:grace:0").task
    assert task is not None
    assert (task.definition, task.inputs, task.phase, task.cut) == (
        {"name": "counter"},
        {"what": "beans"},
        "grace",
        "timeout",
    )


def test_a_task_that_is_damaged_has_no_cause():
    assert read(metadata={**TASK, "depth": "deep"}).task is None


def test_a_scheduled_message_is_read():
    facts = {"cron": "j1", "may_schedule": True, "note": "This is scheduled work."}
    message = read(channel="test", id="cron:j1:1700000000", metadata=facts)
    assert message.cause == CronOrigin("j1", True, "This is scheduled work.")
    (shown,) = messages_of([message.said()])
    assert shown["content"] == "count the beans\n\n[This is scheduled work.]"


def test_the_note_of_a_job_is_read_out_of_the_content_of_its_message():
    """An earlier version logged it there; the model reads the same as before."""
    note = "This is scheduled work: the job j1 “daily”, every day, added by a program. Nobody is there."
    content = f"count the beans\n\n[{note}]"
    said = decode_entry(json.dumps({"type": "user", "content": content, "sender": "cron", "now": "noon"}))
    assert said == UserSaid("count the beans", "cron", "noon", job="j1", note=note)
    (shown,) = messages_of([said])
    assert shown["content"] == f"{content}\n\n[It is now noon.]"


@pytest.mark.parametrize("content", ["hi", "hi\n\n[This is scheduled work: the job", [{"type": "text", "text": "hi"}]])
def test_a_message_without_such_a_note_is_read_as_it_is(content: Any):
    said = UserSaid(content, "cron")
    assert decode_entry(encode_entry(said)) == said


@pytest.mark.parametrize("target", ["t7", 12])
def test_a_stop_of_another_process_is_read(target: str | int):
    message = read(channel="system", id="stop:sub:5f0c:ab12", content="/stop", metadata={"stops": target})
    assert message.cause == StopRequest(target)


def test_the_server_of_a_request_is_read():
    message = read(channel="api", id="r1", request={"system": "be short"}, metadata={"via": "w3", "untrusted": True})
    assert message.request is not None
    assert message.request.via == "w3"
    assert message.untrusted


@pytest.mark.parametrize(
    "metadata", [{"cron": "j1"}, {"stops": "t7"}, {"root": "t1", "caps": {}}, {"untrusted": True}, {"note": "hi"}]
)
def test_the_metadata_of_a_channel_causes_nothing(metadata: dict[str, Any]):
    message = read(channel="test", id="m1", metadata=metadata)
    assert message.cause is None
    assert not message.untrusted
    assert message.metadata == metadata


async def test_a_task_in_the_inbox_is_run_and_reported_after_an_upgrade(tmp_path: Path):
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    await store.accept(InboundMessage("sub", "agent", "5f0c", "x", id="spawn:5f0c", session="sub:5f0c", reply=False))
    await store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE inbox SET data = ?", [json.dumps({**OLD, "metadata": TASK})])
    provider = ScriptedProvider(["seven beans", "There are seven."])
    config = Config(home=tmp_path / "home", turn_tokens=100_000)
    agent = AgentLoop(MessageBus(), provider, tmp_path, config=config, store=SQLiteStore(path))
    async with agent:
        assert await agent.subagents.running("me", "test:1")
        await agent.resume("test:1")
        assert await agent.subagents.result("5f0c") == "seven beans"
        await agent.resume("test:1")
        info = await agent.store.session("me", "test:1")
        assert info is not None
        entries = [one.entry for one in await agent.store.read_log(info.id)]
        spent = await agent.store.spent("me", ["turn t9", "sub 5f0c"])
    assert "seven beans" in str(entries[0])
    assert set(spent) == {"turn t9", "sub 5f0c"}
