"""Approvals on the command line: the user is asked, and answers now or later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everloop.testing import call

from ..support.commands import everloop
from ..support.settings import ASK_BEFORE_WRITING, home_with


@pytest.fixture
def workspace() -> Path:
    return home_with(ASK_BEFORE_WRITING) / "workspace"


async def test_a_command_is_shown_first_and_runs_once_approved(server, workspace):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    server.reply("written")
    done = await everloop(server=server, stdin=b"go\n/approve\n")
    assert "plan.txt" in done.out
    assert "beans" in done.out
    assert "writing is dear" in done.out
    assert done.out.rstrip().endswith("written")
    assert (workspace / "plan.txt").read_text() == "beans"


async def test_an_open_question_is_asked_again_at_the_next_start(server, workspace):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    first = await everloop(server=server, stdin=b"go\n")
    assert first.status == 1
    assert not (workspace / "plan.txt").exists()
    server.reply("then not")
    second = await everloop(server=server, stdin=b"/deny too early\n")
    assert "beans" in second.out  # it is asked again
    assert "then not" in second.out
    assert not (workspace / "plan.txt").exists()
    assert "too early" in str(server.requests[-1].body)


async def test_a_line_sent_after_a_question_is_answered_before_the_chat_ends(server, workspace):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    server.reply("written")
    server.reply("it is noon")
    done = await everloop(server=server, stdin=b"go\nWhat is the time?\n/approve\n")
    assert "it is noon" in done.out
    assert done.status == 0
    assert "cut off" not in done.err


async def test_stopping_a_question_is_not_reported_as_a_crash(server, workspace):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    done = await everloop(server=server, stdin=b"go\n/stop\n")
    assert "cut off" not in done.out + done.err
    assert not (workspace / "plan.txt").exists()


async def test_an_mcp_server_that_does_not_start_is_reported(server):
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True)
    (home / "config.toml").write_text('[mcp.clock]\ncommand = "no-such-program"\n')
    server.reply("hi")
    done = await everloop("run", "say hi", server=server)
    assert done.out.strip() == "hi"
    assert "clock" in done.err
    assert "no-such-program" in done.err


async def test_run_never_asks_for_approval(server, workspace):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    server.reply("could not")
    done = await everloop("run", "write it", server=server)
    assert done.out.strip() == "could not"
    assert not (workspace / "plan.txt").exists()
    assert "there is no one to ask" in str(server.requests[-1].body)


async def test_the_log_shows_the_question_and_the_decision(server, workspace):
    server.calls(call("write_file", path="plan.txt", content="beans"))
    server.reply("written")
    await everloop(server=server, stdin=b"go\n/approve\n")
    log = (await everloop("log")).out
    assert "asked" in log
    assert "approved" in log


async def test_a_message_sent_during_the_turn_is_shown(server):
    server.calls(call("message", content="half-way there"))
    server.reply("done")
    done = await everloop(server=server, stdin=b"go\n")
    assert "half-way there" in done.out
