from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import sqlite3
from pathlib import Path

import pytest

from everloop import events
from everloop.cli.output import Output, Renderer, as_json, mark_of
from everloop.cli.setup import remember
from everloop.store.sqlite import SQLiteStore
from everloop.testing import call
from everloop.testing.openai_server import Reply
from everloop.text import one_line, printable
from tests.support.commands import COMMAND, Terminal, environment, everloop, finished, start, terminal, until

# ------------------------------------------------------------------------------------------------ at a terminal


async def test_text_and_tool_calls_are_shown_as_they_arrive(held):
    held.calls(call("list_dir", path="."))
    held.hold(Reply("Nothing is there."), after_chunks=2)
    async with terminal(server=held) as screen:
        await screen.ready()
        screen.type("what is here?\r")
        place = await screen.sees("> what is here?")
        place = await screen.sees('✓ list_dir(path=".")', after=place)
        place = await screen.sees("Nothing", after=place)
        assert "there." not in screen.text[place:]  # the rest has not been sent yet
        held.go.set()
        place = await screen.sees("Nothing is there.", after=place)
        await screen.sees("tokens read", after=place)
        screen.type("\x04")
        assert await screen.ends() == 0
    assert "\x1b[2m" in screen.raw


async def test_a_key_pressed_while_a_line_is_printed_is_not_lost(server):
    server.reply("\n".join(f"line {number}" for number in range(60)), token_delay=0.005)
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("tell me\r")
        while "tokens read" not in screen.text:
            assert screen.takes_keys
            await asyncio.sleep(0.002)
        screen.type("\x04")
        assert await screen.ends() == 0


async def test_reasoning_is_shown_and_a_retried_answer_is_announced(server, home):
    server.cut(3, text="one two three four", reasoning="hmm")
    server.reply("another answer")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("hi\r")
        place = await screen.sees("hmm")
        place = await screen.sees("starts again", after=place)
        await screen.sees("another answer", after=place)


async def test_a_failed_command_is_marked_as_failed_although_its_tool_call_succeeded(server):
    server.calls(call("exec", command="ls no-such-thing"), call("exec", command="echo '[exit status 1] said he'"))
    server.reply("It is not there.")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("look\r")
        await screen.sees("✗ $ ls no-such-thing")
        await screen.sees("✓ $ echo")
        await screen.sees("It is not there.")
        screen.type("\x04")
        assert await screen.ends() == 0
    log = await everloop("log", server=server)
    assert "✗ exec: ls" in log.out
    assert "✓ exec: [exit status 1] said he" in log.out


async def test_help_says_how_to_leave_the_chat(server):
    async with terminal("chat", server=server) as screen:
        await screen.ready()
        screen.type("/help\r")
        await screen.sees("\n/exit", after=await screen.sees("/stop"))
        screen.type("/exit\r")
        assert await screen.ends() == 0
    piped = await everloop("chat", server=server, stdin=b"/help\n")
    assert "\n/exit" in piped.out


async def prompts_after_ctrl_c(screen: Terminal, place: int) -> bool:
    """Press Ctrl-C, and return whether the program asks for it once more instead of ending or staying silent."""
    screen.type("\x03")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await until(lambda: screen.process.returncode is not None or "Ctrl-C again" in screen.text[place:])
    return "Ctrl-C again" in screen.text[place:]


async def test_ctrl_c_stops_the_turn_and_twice_at_the_prompt_leaves(server):
    server.hang(30, after_chunks=1, text="first second")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("go\r")
        place = await screen.sees("first")
        screen.type("\x03")
        place = await screen.sees("Stopped. The work so far is kept.", after=place)
        for _ in range(3):  # one pressed before the turn is completely over belongs to the turn
            if await prompts_after_ctrl_c(screen, place):
                break
        place = await screen.sees("Ctrl-C again", after=place)
        while await prompts_after_ctrl_c(
            screen, place
        ):  # the machine was so slow that the second press counted as a first one
            place = await screen.sees("Ctrl-C again", after=place)
        assert await screen.ends() == 0
    await until(lambda: server.requests[0].gone)


async def test_a_terminated_chat_restores_the_terminal(server):
    server.hang(30)
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("go\r")
        await until(lambda: server.requests)
        screen.process.send_signal(signal.SIGTERM)
        assert await screen.ends() == 0
        await screen.sees("continues when you come back")
        assert screen.raw.rindex("\x1b[?2004l") > screen.raw.rindex("\x1b[?2004h")  # bracketed paste is off again


async def test_signals_that_arrive_together_or_with_enter_end_the_chat_once(server, home):
    server.hang(30)
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.process.send_signal(signal.SIGSTOP)  # so that all of them arrive at once
        screen.type("hello\r")
        screen.process.send_signal(signal.SIGTERM)
        screen.process.send_signal(signal.SIGHUP)
        screen.process.send_signal(signal.SIGCONT)
        assert await screen.ends() == 0
        assert "xception" not in screen.text
    if "> hello" in screen.text:  # then the line is kept
        store = SQLiteStore(home / "everloop.db")
        info = await store.session("me", "cli:direct")
        assert info is not None
        assert info.open_turn or [row.message.content for row in await store.waiting("me", "cli:direct")] == ["hello"]
        await store.close()


async def test_a_line_is_kept_if_the_chat_is_terminated_while_it_scans_the_workspace(server, home):
    server.hang(30)
    workspace = home / "workspace"
    await asyncio.to_thread(workspace.mkdir, parents=True)
    for number in range(3_000):  # makes the scan, which /undo needs, take a while
        (workspace / f"{number}.txt").write_text("x")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("hello\r")
        await screen.sees("> hello")
        screen.process.send_signal(signal.SIGTERM)
        assert await screen.ends() == 0
    store = SQLiteStore(home / "everloop.db")
    info = await store.session("me", "cli:direct")
    assert info is not None
    assert info.open_turn or [row.message.content for row in await store.waiting("me", "cli:direct")] == ["hello"]
    await store.close()


async def test_an_unusable_store_is_reported_in_one_line_before_the_prompt(server, tmp_path):
    (tmp_path / "broken.db").write_bytes(b"no database" * 1000)
    async with terminal("--store", str(tmp_path / "broken.db"), server=server) as screen:
        assert await screen.ends() == 2
        assert re.fullmatch(r"everloop: [^\n]*broken.db[^\n]*\r\n", screen.text)


async def test_a_long_input_line_scrolls_to_its_end(held):
    words = [f"word{number} " for number in range(600)]
    words[589] = (
        "QXZJKV "  # a terminal is sent only what changes, so a word that resembles its neighbours arrives in pieces
    )
    held.hold(Reply("".join(words)), after_chunks=590)
    async with terminal(server=held) as screen:
        await screen.ready()
        screen.type("go\r")
        place = await screen.sees("QXZJKV")
        assert "word599" not in screen.text[place:]
        held.go.set()
        place = await screen.sees("word0 ", after=place)
        end = await screen.sees("word599\r\n", after=place)
        assert screen.text[place:end].split() == "".join(words).split()[1:]


async def test_the_user_can_type_while_a_turn_runs(held):
    held.hold(Reply("first answer"))
    held.reply("second answer")
    async with terminal(server=held) as screen:
        await screen.ready()
        screen.type("one\r")
        await held.reached.wait()
        screen.type("two\r/status\r")
        place = await screen.sees("running: turn")
        held.go.set()
        place = await screen.sees("first answer", after=place)
        place = await screen.sees("second answer", after=place)
        screen.type("/new\r")
        await screen.sees("This is a new conversation.", after=place)
        screen.type("/help\r")
        await screen.sees("/stop", after=place)
        screen.type("/exit\r")
        assert await screen.ends() == 0


async def test_a_command_that_waits_for_the_turn_to_end_is_answered(held):
    held.hold(Reply("first answer"))
    async with terminal(server=held) as screen:
        await screen.ready()
        screen.type("one\r")
        await held.reached.wait()
        screen.type("/new\r")
        place = await screen.sees("> /new")
        held.go.set()
        place = await screen.sees("first answer", after=place)
        await screen.sees("This is a new conversation.", after=place)
        screen.type("\x04")
        assert await screen.ends() == 0


async def test_a_message_steers_the_running_turn_if_so_configured(held, home):
    home.mkdir()
    (home / "config.toml").write_text('[agent]\nbusy = "steer"\n')
    held.hold(Reply(calls=[call("list_dir", path=".")]))
    held.reply("I heard both.")
    async with terminal(server=held) as screen:
        await screen.ready()
        screen.type("one\r")
        await held.reached.wait()
        screen.type("and two\r")
        store = SQLiteStore(home / "everloop.db")
        async with asyncio.timeout(20):
            while "and two" not in [row.message.content for row in await store.waiting("me", "cli:direct")]:
                await asyncio.sleep(0.01)
        await store.close()
        held.go.set()
        place = await screen.sees("passed to the running turn: and two")
        place = await screen.sees("I heard both.", after=place)
        await screen.sees("tokens read", after=place)
    assert len(held.requests) == 2


async def test_output_of_models_and_pages_cannot_control_the_terminal(server, home):
    (home / "workspace").mkdir(parents=True)
    (home / "workspace" / "page").write_text("\x1b]0;owned\x07\x1b[2Jpage\x9b5n")
    server.calls(call("read_file", path="page"), call("list_dir", path="\x1b]52;c;aGk=\x07"))
    server.reply("text \x1b]0;owned\x07 \x1b[41m\x9b31m end", reasoning="\x1b[8m")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("go\r")
        place = await screen.sees("end\r\n")
        await screen.sees("tokens read", after=place)
    assert "\x1b]" not in screen.raw
    assert "\x9b" not in screen.raw
    assert "\x07" not in screen.raw
    assert "\x1b[41m" not in screen.raw
    assert "\x1b[8m" not in screen.raw
    assert "␛]0;owned␇" in screen.text


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_colours_can_be_disabled(server, setting):
    server.calls(call("list_dir", path="."))
    server.reply("An answer.", reasoning="thought")
    async with terminal(server=server, **setting) as screen:
        await screen.ready()
        screen.type("hi\r")
        place = await screen.sees("An answer.")
        await screen.sees("tokens read", after=place)
        screen.type("\x04")
        assert await screen.ends() == 0
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?(?:2|3[0-9]|9[0-7])m", screen.raw)
    if "TERM" in setting:
        assert "\x1b" not in screen.raw


async def test_the_first_start_asks_for_a_model_and_saves_the_choice(server, home):
    server.reply("Hello.")
    async with terminal(EVERLOOP_MODEL="") as screen:
        place = await screen.sees("Download it? [Y/n]")
        screen.type("n\r")
        place = await screen.sees("Base URL", after=place)
        screen.type("nonsense\r")
        place = await screen.sees("http:// or https://")
        screen.type(f"{server.base_url}\r")
        await screen.sees("Model", after=place)
        screen.type("scripted\r")
        place = await screen.sees("API key", after=place)
        screen.type("sk-hidden\r")
        await screen.sees("[Y/n]", after=place)
        screen.type("\r")
        await screen.sees("Written to")
        await screen.sees("session cli:direct")
        screen.type("hi\r")
        await screen.sees("Hello.")
    assert "sk-hidden" not in screen.text
    assert server.requests[0].headers["Authorization"] == "Bearer sk-hidden"
    assert (home / "config.toml").stat().st_mode & 0o777 == 0o600
    server.reply("Again.")
    done = await everloop("run", "hi", EVERLOOP_MODEL="")
    assert (done.status, done.out) == (0, "Again.\n")


def test_existing_settings_are_never_overwritten(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[agent]\nname = "A"')
    assert "Written" in remember(path, {"base_url": "http://127.0.0.1:1/v1", "model": 'a"b\\', "api_key": ""})
    text = path.read_text()
    assert text == '[agent]\nname = "A"\n\n[provider]\nbase_url = "http://127.0.0.1:1/v1"\nmodel = "a\\"b\\\\"\n'
    assert "not changed" in remember(path, {"base_url": "http://127.0.0.1:2/v1"})
    assert path.read_text() == text


# ------------------------------------------------------------------------------------------------ over a pipe


async def test_piped_lines_are_answered_one_by_one(server):
    server.calls(call("list_dir", path="."))
    server.reply("one")
    server.reply("two")
    done = await everloop(server=server, stdin=b"first\r\n\nsecond")
    assert (done.status, done.out, done.err) == (0, "one\ntwo\n", "")
    assert [seen.messages for seen in server.requests] == [2, 4, 6]


async def test_a_failed_turn_over_a_pipe_is_reported_and_the_next_line_is_answered(server):
    server.fail(400, "no such thing")
    server.reply("fine")
    done = await everloop(server=server, stdin=b"first\nsecond\n")
    assert (done.status, done.out) == (1, "fine\n")
    assert re.fullmatch(r"everloop: [^\n]*no such thing[^\n]*\n", done.err)


async def test_a_piped_chat_ends_when_its_output_is_no_longer_read(server):
    server.reply("one")
    server.reply("two")
    reads, writes = os.pipe()
    os.close(reads)
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        env=environment(server),
        stdin=asyncio.subprocess.PIPE,
        stdout=writes,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(writes)
    async with asyncio.timeout(30):
        assert (await process.communicate(b"first\nsecond\n"))[1] == b""
    assert (process.returncode, len(server.requests)) == (141, 1)


async def test_commands_work_over_a_pipe(server):
    server.reply("yes")
    done = await everloop("--session", "my:chat", server=server, stdin=b"hi\n/status\n/new\n/exit\nnever\n")
    assert done.status == 0
    assert "session: my:chat" in done.out
    assert "This is a new conversation." in done.out
    assert len(server.requests) == 1


async def test_an_unknown_command_over_a_pipe_is_refused_and_not_sent_to_the_model(server):
    server.reply("A path.")
    done = await everloop(server=server, stdin=b"/statsu\n/undo\n/usr/bin\n")
    assert (done.status, done.out) == (1, "A path.\n")
    assert "did you mean /status?" in done.err
    assert "/undo works only" in done.err
    assert len(server.requests) == 1


async def test_ctrl_c_over_a_pipe_stops_the_turn(server):
    server.hang(30)
    process = await start(env=environment(server))
    process.stdin.write(b"hi\n")
    await until(lambda: server.requests)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 130
    assert (await everloop("sessions", "--json")).json["open_turn"] is None


async def test_a_second_ctrl_c_over_a_pipe_leaves_at_once_and_silently(server, home):
    server.hang(30)
    process = await start(env=environment(server))
    process.stdin.write(b"hi\n")
    await until(lambda: server.requests)
    with contextlib.closing(sqlite3.connect(home / "everloop.db", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")  # so that the end of the turn cannot be written
        process.send_signal(signal.SIGINT)
        await until(lambda: server.requests[0].gone)
        process.send_signal(signal.SIGINT)
        await until(lambda: signal_delivered(process.pid, signal.SIGINT))
    done = await finished(process)
    assert (done.status, done.err) == (130, "")


def signal_delivered(process: int, number: int) -> bool:
    """Return whether the signal has been delivered to the process."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:  # and it has ended
        return True
    pending = re.findall(r"^S[hi][dg]Pnd:\s+(\w+)$", status, re.M)
    return not any(int(mask, 16) & (1 << (number - 1)) for mask in pending)


async def test_ctrl_c_while_waiting_for_a_line_leaves(server):
    server.reply("yes")
    process = await start(env=environment(server))
    process.stdin.write(b"hi\n")
    assert await process.stdout.readline() == b"yes\n"
    await asyncio.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 130
    assert (await process.communicate())[1] == b""


# ------------------------------------------------------------------------------------------------ after a crash


async def test_a_chat_that_was_killed_finishes_its_turn_when_it_starts_again(server, home):
    server.calls(call("write_file", path="a.txt", content="A"))
    server.hang(30)
    process = await start(env=environment(server))
    process.stdin.write(b"write it\n")
    await until(lambda: len(server.requests) == 2)
    process.kill()
    await process.wait()
    assert (await everloop("sessions", "--json")).json["open_turn"]
    server.reply("It is written.")
    server.reply("Yes?")
    async with terminal(server=server) as screen:
        place = await screen.sees("Continuing an interrupted turn")
        place = await screen.sees("It is written.", after=place)
        place = await screen.sees("tokens read", after=place)
        screen.type("hello\r")
        await screen.sees("Yes?", after=place)
    assert [seen.messages for seen in server.requests] == [2, 4, 4, 6]
    assert (home / "workspace" / "a.txt").read_text() == "A"


async def test_a_killed_chat_also_resumes_over_a_pipe(server):
    server.hang(30)
    process = await start(env=environment(server))
    process.stdin.write(b"hi\n")
    await until(lambda: server.requests)
    process.kill()
    await process.wait()
    server.reply("late but here")
    done = await everloop(server=server)
    assert (done.status, done.out) == (0, "late but here\n")
    assert done.err == "everloop: continuing an interrupted turn\n"


async def test_leaving_in_the_middle_of_a_turn_keeps_it(server):
    server.hang(30)
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("hi\r")
        await until(lambda: server.requests)
        screen.type("\x04")
        assert await screen.ends() == 0
        await screen.sees("continues when you come back")
    server.reply("here")
    assert (await everloop(server=server)).out == "here\n"


# ------------------------------------------------------------------------------------------------ output


def test_only_a_commands_own_status_line_marks_it_as_failed():
    assert mark_of("exec", "ok", "no\n[exit status 137, SIGKILL]\n[perhaps it used too much memory]") == "✗"
    assert mark_of("exec", "timeout", "") == "✗"
    for tool, text in (
        ("read_file", "[exit status 1]"),
        ("exec", "so [exit status 1]"),
        ("exec", "[exit status 1]\nok"),
    ):
        assert mark_of(tool, "ok", text) == "✓"


def test_control_characters_become_visible_symbols():
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[31m\x07\x00\x7f") == "␛[31m␇␀␡"
    assert printable("a\r\nb\x9bc\u202ed") == "a\nb\\x9bc�d"
    assert printable("\ud800") == "�"


def test_one_line_output_is_short_and_a_single_line():
    assert one_line("a\n b\t\x1bc") == "a b ␛c"
    assert one_line("x" * 1000, 10) == "x" * 9 + "…"
    assert len(one_line("y " * 1000, 50)) == 50


def test_json_contains_no_raw_control_characters():
    assert as_json({"a": "é\x1b\x9b\u202e"}) == '{"a": "é\\u001b\\u009b\\u202e"}'


def test_a_turn_that_took_neither_time_nor_tokens_has_no_line_about_them():
    for usage, ends in (({}, "Reminder: tea\n"), ({"prompt_tokens": 9, "completion_tokens": 2}, "read, 2 written\n")):
        screen = io.StringIO()
        renderer = Renderer(Output(screen, colour=False))
        renderer(events.TurnStarted("t1"))
        renderer(events.Usage(usage))
        renderer(events.TurnEnded("t1", "answer", "Reminder: tea"))
        assert screen.getvalue().endswith(ends)
