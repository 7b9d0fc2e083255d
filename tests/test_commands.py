"""The commands that work in every chat, and what resembles one."""

from __future__ import annotations

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.commands import COMMANDS, kind_of, meant_by
from everloop.testing import ScriptedProvider


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/hlep", "help"), ("/HELPP", "help"), (" /hel\n", "help"), ("/stpo", "stop"), ("/sop", "stop"),
        ("/statsu", "status"), ("/nwe", "new"), ("/compacct", "compact"), ("/aprove", "approve"), ("/dent", "deny"),
    ],
)  # fmt: skip
def test_one_typing_error_is_answered_with_the_command_that_was_meant(text, command):
    assert meant_by(text) == command
    assert kind_of(InboundMessage("cli", "user", "1", text)) == "urgent"


@pytest.mark.parametrize(
    "text",
    [
        "/etc", "/dev", "/home", "/usr", "/tmp", "/help.txt", "/hlep me", "hlep", "/", "//help", "/help/x", "/new1",
        "/proc", "/srv", "/opt", "/bin", "/var", "/root", "/hleeep", "/näw",
    ],
)  # fmt: skip
def test_paths_and_words_that_are_less_similar_go_to_the_model(text):
    assert meant_by(text) is None
    assert kind_of(InboundMessage("cli", "user", "1", text)) == "message"


def test_no_command_resembles_another_one():
    assert [meant_by(f"/{name}") for name in COMMANDS] == [None] * len(COMMANDS)


def test_internal_messages_are_not_checked_for_typing_errors():
    assert kind_of(InboundMessage("system", "sub:1", "cli:1", "/hlep")) == "message"


async def test_the_model_is_not_asked_about_a_typing_error(tmp_path):
    model = ScriptedProvider([])
    async with AgentLoop(MessageBus(), model, tmp_path, store=tmp_path / "store.db") as agent:
        assert "/stop" in await agent.process_direct("/stpo")
    assert model.requests == []
