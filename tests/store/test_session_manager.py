"""Sessions as a library sees them."""

from __future__ import annotations

import asyncio

import pytest

from everloop import AgentLoop, MessageBus, SessionManager
from everloop.store.base import Busy
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call, check_conversation


@pytest.fixture
def manager(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    yield SessionManager(store=store)
    asyncio.run(store.close())


def test_a_saved_session_is_visible_to_another_program(manager, tmp_path):
    session = manager.get_or_create("cli:a")
    session.add_message("user", "hi")
    session.add_message("assistant", "hello")
    manager.save(session)
    store = SQLiteStore(tmp_path / "store.db")
    again = SessionManager(store=store).get_or_create("cli:a")
    assert again.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    asyncio.run(store.close())


def test_a_session_is_the_same_object_and_shows_unsaved_messages(manager):
    session = manager.get_or_create("cli:a")
    assert manager.get_or_create("cli:a") is session
    session.add_message("user", "hi", name="me")
    assert session.messages == [{"role": "user", "content": "hi", "name": "me"}]
    assert manager.get_or_create("cli:b").messages == []
    manager.save(session)
    manager.save(session)
    assert len(session.messages) == 1


def test_a_cleared_session_begins_again_and_keeps_its_log(manager):
    session = manager.get_or_create("cli:a")
    session.add_message("user", "old")
    manager.save(session)
    session.clear()
    session.add_message("user", "new")
    assert [message["content"] for message in session.messages] == ["new"]
    manager.save(session)
    assert [message["content"] for message in session.messages] == ["new"]


def test_a_short_history_begins_with_a_user_and_separates_no_call_from_its_result(manager):
    session = manager.get_or_create("cli:a")
    for n in range(3):
        session.add_message("user", f"q{n}")
        function = {"name": "t", "arguments": "{}"}
        session.add_message("assistant", None, tool_calls=[{"id": f"c{n}", "type": "function", "function": function}])
        session.add_message("tool", "r", tool_call_id=f"c{n}", name="t")
        session.add_message("assistant", f"a{n}")
    assert len(session.get_history()) == 12
    for most in range(14):
        history = session.get_history(most)
        assert len(history) <= most
        assert not history or (history[0]["role"] == "user" and check_conversation(history) == [])


def test_messages_that_could_not_be_saved_are_kept_and_saved_later(manager):
    session = manager.get_or_create("cli:a")
    session.add_message("user", "first")
    session.add_message("user", object())
    with pytest.raises(TypeError):
        manager.save(session)
    assert len(session._unsaved) == 2
    session._unsaved.pop()
    manager.save(session)
    assert [message["content"] for message in session.messages] == ["first"]


async def test_a_loop_and_its_sessions_see_the_same(tmp_path):
    provider = ScriptedProvider([call("list_dir"), "one", lambda messages, _: str(len(messages))])
    async with AgentLoop(MessageBus(), provider, tmp_path, store=tmp_path / "store.db") as agent:
        await agent.process_direct("hi", "cli:a")
        session = agent.sessions.get_or_create("cli:a")
        messages = await asyncio.to_thread(lambda: session.messages)
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        session.add_message("user", "noted")
        session.add_message("assistant", "yes")
        await asyncio.to_thread(agent.sessions.save, session)
        assert await agent.process_direct("and?", "cli:a") == "8"


async def test_a_session_cannot_be_written_while_its_turn_runs(tmp_path):
    gate = asyncio.Event()

    async def wait(messages, tools):
        await gate.wait()
        return "done"

    async with AgentLoop(MessageBus(), ScriptedProvider([wait]), tmp_path, store=tmp_path / "store.db") as agent:
        turn = asyncio.create_task(agent.process_direct("hi", "cli:a"))
        while await agent.store.session("me", "cli:a") is None:
            await asyncio.sleep(0.005)
        session = agent.sessions.get_or_create("cli:a")
        session.add_message("user", "late")
        with pytest.raises(Busy):
            await asyncio.to_thread(agent.sessions.save, session)
        gate.set()
        await turn
        await asyncio.to_thread(agent.sessions.save, session)


def test_what_no_model_could_read_is_refused_before_it_is_in_the_session(manager):
    session = manager.get_or_create("cli:a")
    with pytest.raises(
        ValueError, match="role of a message must be system, developer, user, assistant or tool, not 'wiz"
    ):
        session.add_message("wizard", "hi")
    for key in (None, "", 5):
        with pytest.raises(ValueError, match="key of a session must be a text such as cli:direct"):
            manager.get_or_create(key)
    session.add_message("user", "tea\ud800")
    manager.save(session)
    assert session.messages == [{"role": "user", "content": "tea?"}]
