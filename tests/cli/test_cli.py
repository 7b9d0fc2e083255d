from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from everloop import InboundMessage
from everloop.cli.completion import _words
from everloop.cli.main import parser
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import call
from everloop.testing.openai_server import Reply
from tests.support.commands import COMMAND, Done, environment, everloop, finished, start, until
from tests.support.held import HeldOpenAI


def settings(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


def is_one_error(done: Done, *words: str) -> None:
    """Return whether the result is one line on standard error that starts with our name, no output, and status 2."""
    assert (done.status, done.out) == (2, "")
    assert re.fullmatch(r"everloop: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err


# ------------------------------------------------------------------------------------------------ help


def test_help_and_version_load_nothing_heavy():
    for flag in ("--help", "--version"):
        run = subprocess.run([*COMMAND[:1], "-X", "importtime", *COMMAND[1:], flag], capture_output=True, text=True)
        assert run.returncode == 0
        loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
        assert "everloop.cli.main" in loaded
        assert not loaded & {"asyncio", "aiohttp", "msgspec", "prompt_toolkit", "sqlite3", "dataclasses", "logging"}


async def test_help_lists_exactly_the_existing_commands():
    done = await everloop("--help")
    commands = re.findall(r"^    ([a-z-]+) ", done.out, re.M)
    assert commands == [
        "chat", "run", "init", "sessions", "log", "replay", "fork", "cron", "serve", "link", "acp", "mcp", "worker",
        "channels", "token", "model", "migrate", "move", "directory", "backup", "restore", "check-history",
        "completion", "doctor",
    ]  # fmt: skip


async def test_an_unknown_command_or_flag_is_reported_in_one_line():
    is_one_error(await everloop("srve"), "srve", 'did you mean "serve"?', "--help")
    is_one_error(await everloop("what files are here"), "everloop run")
    is_one_error(await everloop(".", "--workspace", "x"), "either")
    is_one_error(
        await everloop("run", "--modle", "x", "goal"), "--modle (did you mean --model?)", "everloop run --help"
    )
    is_one_error(await everloop("--modle", "x"), "--modle (did you mean --model?)", "everloop --help")
    is_one_error(await everloop("chat", "--trst"), "--trst (did you mean --trust?)", "everloop chat --help")
    is_one_error(await everloop("--zzz", "log"), "there is no flag --zzz;")
    is_one_error(await everloop("log", "mine"), '"mine" is one argument too many', "everloop log --help")
    is_one_error(await everloop("log", "-n", "0"), "above 0")


async def test_a_link_comes_with_a_hint_if_no_server_is_there():
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as listening:
        port = str(listening.sockets[0].getsockname()[1])
        there = await everloop("link", "--port", port)
    gone = await everloop("link", "--port", port)
    for done in (there, gone):
        assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/#link=[0-9a-f.]+\n", done.out)
    assert there.err == ""
    assert gone.err == f"everloop: nothing answers at port {port} yet: `everloop serve` starts it\n"


async def test_a_server_whose_port_is_taken_or_impossible_says_so(server):
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as listening:
        port = str(listening.sockets[0].getsockname()[1])
        taken = await everloop("serve", "--port", port, server=server)
    told = f"everloop: cannot listen on 127.0.0.1 port {port} (Address already in use): name another with --port\n"
    assert (taken.status, taken.err) == (2, told)
    beyond = await everloop("serve", "--port", "99999", server=server)
    is_one_error(beyond, "port 99999", "must be 0-65535)")


async def test_json_loses_no_character_where_the_output_is_not_utf8(server):
    server.reply("snow ☃")
    done = await everloop("run", "--json", "hi", server=server, PYTHONIOENCODING="ascii")
    assert done.json["result"] == "snow ☃"


async def test_a_command_without_its_action_lists():
    for command in ("channels", "sessions"):
        done = await everloop(command)
        assert (done.status, done.out) == (0, ""), done.err
        assert re.fullmatch(r"everloop: no [^\n]+\n", done.err)


def test_every_help_has_an_example_and_lists_common_flags_once():
    known = parser()
    paths = [path for path, _ in _words(known, "")]
    assert "cron add" in paths
    for path in paths:
        found = known
        for part in path.split():
            found = next(a for a in found._actions if isinstance(a, argparse._SubParsersAction)).choices[part]
        text = found.format_help()
        assert re.search(r"^examples?:\n  \S", text, re.M), path
        assert ("--base-url URL" in text) == (path == "")


async def test_the_short_flag_prints_the_version():
    assert re.fullmatch(r"everloop \d\S+\n", (await everloop("-V")).out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_a_shell_completes_commands_actions_and_flags(shell):
    script = (await everloop("completion", shell)).out
    assert "sessions" in script
    assert "export" in script
    if shutil.which("bash") is None or shell != "bash":
        return
    probe = f"""{script}
for line in "everloop ses" "everloop cron re" "everloop run --outp" "everloop sessions export --form"; do
    COMP_WORDS=($line); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _everloop; echo "${{COMPREPLY[*]}}"
done"""
    done = subprocess.run(["bash", "--norc", "-c", probe], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["sessions", "remove", "--output", "--format"]


# ------------------------------------------------------------------------------------------------ run


async def test_piped_input_is_appended_to_the_goal_or_is_the_goal(server):
    server.reply("Short.")
    server.reply("Hello.")
    done = await everloop("run", "summarise", server=server, stdin=b"a long text\n")
    assert (done.status, done.out) == (0, "Short.\n")
    assert server.requests[0].body["messages"][-1]["content"] == "summarise\n\na long text\n"
    done = await everloop("run", server=server, stdin=b"say hello\n")
    assert (done.status, done.out) == (0, "Hello.\n")
    assert server.requests[1].body["messages"][-1]["content"] == "say hello\n"


async def test_a_run_continues_the_latest_session_or_the_named_one(server):
    for answer in ("one", "two", "three", "four"):
        server.reply(answer)
    await everloop("run", "water the beans", server=server)
    await everloop("run", "feed the cat", server=server)
    await everloop("run", "--continue", "and the dog", server=server)
    assert "feed the cat" in str(server.requests[2].body)
    await everloop("run", "--resume", "BEANS", "and the peas", server=server)
    assert "water the beans" in str(server.requests[3].body)
    assert "feed the cat" not in str(server.requests[3].body)
    is_one_error(await everloop("run", "--resume", "xyz", "go", server=server), "xyz", "everloop sessions")


async def test_events_are_printed_as_they_happen_on_request(server):
    server.calls(call("list_dir", path="."))
    server.reply("Nothing there.")
    done = await everloop("run", "--output", "jsonl", "look", server=server)
    told = [json.loads(line) for line in done.lines]
    kinds = [one["event"] for one in told]
    assert kinds[0] == "turn_started"
    assert kinds.index("tool_started") < kinds.index("tool_ended") < kinds.index("text")
    assert (told[-1]["event"], told[-1]["result"], told[-1]["reason"]) == ("result", "Nothing there.", "answer")


async def test_a_session_can_be_shown_renamed_and_exported_without_secrets(server):
    server.reply("The key is sk-abcdefghijklmnopqrstuvwx.")
    await everloop("run", "--session", "my:one", "tell me the key please", server=server)
    listed = (await everloop("sessions")).out
    assert re.search(r"my:one +tell me the key please +1 .*(just now|ago)", listed)
    assert "tell me the key" in (await everloop("sessions", "show", "my:one")).out
    assert (await everloop("sessions", "rename", "my:one", "Keys")).status == 0
    assert "Keys" in (await everloop("sessions")).out
    for form, words in (("md", "## You"), ("jsonl", '"seq"'), ("html", "<!doctype html>")):
        text = (await everloop("sessions", "export", "--format", form, "keys")).out
        assert words in text
        assert "tell me the key" in text
        assert "sk-abc" not in text
        assert "[secret]" in text


async def test_run_prints_the_answer_alone(server):
    server.calls(call("write_file", path="a.txt", content="A"))
    server.reply("It is written.")
    done = await everloop("run", "write a file", server=server)
    assert (done.status, done.out, done.err) == (0, "It is written.\n", "")


async def test_run_shows_tool_calls_on_standard_error_on_request(server):
    server.calls(call("list_dir", path="."))
    server.reply("Nothing there.")
    done = await everloop("run", "-v", "look", server=server)
    assert done.out == "Nothing there.\n"
    assert 'list_dir(path=".")' in done.err
    assert "✓ list_dir" in done.err


async def test_run_prints_one_json_object_on_request(server):
    server.calls(call("list_dir", path="."))
    server.reply("Nothing there.")
    done = await everloop("run", "--json", "look", server=server)
    found = done.json
    assert set(found) == {"result", "reason", "turn", "session", "rounds", "usage", "seconds"}
    assert (found["result"], found["reason"], found["rounds"]) == ("Nothing there.", "answer", 2)
    assert found["session"].startswith("run:")
    assert found["usage"]["completion_tokens"] > 0
    assert found["seconds"] > 0


async def test_each_run_has_its_own_session_unless_one_is_named(server):
    for _ in range(2):
        server.reply("yes")
        assert (await everloop("run", "hello", server=server)).status == 0
    for _ in range(2):
        server.reply("yes")
        assert (await everloop("run", "--session", "my:work", "hello", server=server)).status == 0
    assert [seen.messages for seen in server.requests] == [2, 2, 2, 4]


async def test_flags_may_stand_before_or_after_the_command(server, tmp_path):
    server.reply("yes")
    flags = ("--workspace", str(tmp_path / "one"), "--base-url", server.base_url, "--model", "named")
    done = await everloop(*flags, "run", "hi", "--store", str(tmp_path / "s.db"))
    assert (done.status, done.out) == (0, "yes\n")
    assert server.requests[0].model == "named"
    assert (tmp_path / "one").is_dir()
    assert (tmp_path / "s.db").exists()


async def test_the_goal_can_come_from_standard_input(server):
    server.reply("Bonjour.")
    done = await everloop("run", "-", server=server, stdin="dis « bonjour »\n".encode())
    assert done.out == "Bonjour.\n"
    body = server.requests[0].body
    assert body is not None
    assert "dis « bonjour »" in body["messages"][-1]["content"]


async def test_a_run_that_reaches_its_limit_is_not_a_success(server, home):
    settings(home, "[agent]\nmax_iterations = 2\n")
    done = await everloop("run", "--json", "mark:a go", server=server, EVERLOOP_MODEL="tools-9x1-flist_dir")
    assert done.status == 1
    assert done.json["reason"] == "max_rounds"
    assert re.fullmatch(r"everloop: I stopped after 2 rounds[^\n]*\n", done.err)


async def test_a_run_without_a_reachable_endpoint_says_so_and_fails(home):
    settings(home, "[provider]\nretries = 0\n")
    done = await everloop("run", "hi", EVERLOOP_BASE_URL="http://127.0.0.1:9/v1")
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(r"everloop: [^\n]*127\.0\.0\.1:9[^\n]*\n", done.err), done.err


async def test_a_chat_command_as_a_goal_is_answered_without_a_turn(server):
    help = await everloop("run", "/help", server=server)
    assert (help.status, help.err) == (0, "")
    assert "/stop" in help.out
    server.fail(400, "no such thing")
    assert (await everloop("run", "hi", "--session", "a:b", server=server)).status == 1
    new = await everloop("run", "/new", "--json", "--session", "c:d", server=server)
    assert new.status == 0
    assert (new.json["result"][:30], new.json["turn"], new.json["session"]) == (
        "This is a new conversation. Th",
        None,
        "c:d",
    )
    slip = await everloop("run", "/statsu", server=server)
    assert (slip.status, slip.out) == (1, "")
    assert "did you mean /status?" in slip.err


async def test_ctrl_c_stops_a_run_and_closes_its_log():
    async with HeldOpenAI() as server:
        server.hold(Reply("one two three"), after_chunks=2)
        process = await start("run", "hi", env=environment(server), stdin=asyncio.subprocess.DEVNULL)
        await until(lambda: server.heard)
        process.send_signal(signal.SIGINT)
        done = await finished(process)
        assert (done.status, done.out) == (130, "")
        await until(lambda: server.requests[0].gone)
    log = await everloop("log")
    assert "cancelled: Stopped." in log.out
    assert "one two" in log.out
    assert (await everloop("sessions", "--json")).json["open_turn"] is None


async def test_a_run_waits_for_a_session_that_another_process_holds(server):
    model = "tools-0x0-d700"
    arguments = ("run", "--json", "--session", "my:work")
    first = await start(
        *arguments, "mark:one", env=environment(server, EVERLOOP_MODEL=model), stdin=asyncio.subprocess.DEVNULL
    )
    await until(lambda: server.requests)
    second = await everloop(*arguments, "mark:two", server=server, EVERLOOP_MODEL=model)
    assert (await finished(first)).json["result"] == "done:one"
    assert (second.status, second.json["result"], second.json["rounds"]) == (0, "done:two", 1)
    assert second.err == ""  # its own turn may have begun in the first process, but no other one is finished first
    body = server.requests[-1].body
    assert body is not None
    assert [message["content"] for message in body["messages"][1:]] == ["mark:one", "done:one", "mark:two"]


async def test_control_characters_of_an_answer_are_escaped_in_json_output(server):
    server.reply("a\x1b]0;owned\x07b\x9b31mc")
    done = await everloop("run", "--json", "hi", server=server)
    assert "\x1b" not in done.out
    assert "\x9b" not in done.out
    assert done.json["result"] == "a\x1b]0;owned\x07b\x9b31mc"


# ------------------------------------------------------------------------------------------------ errors in one line


async def test_an_unknown_key_in_the_settings_is_named(home, server):
    settings(home, '[provider]\nmodle = "x"\n')
    for arguments in (("run", "hi"), ("sessions",), (), ("worker",)):
        is_one_error(await everloop(*arguments, server=server), "config.toml", '"modle"', '"model"')


async def test_without_a_model_the_error_names_the_variables_and_an_example():
    for arguments in (("run", "hi"), (), ("worker",)):
        done = await everloop(*arguments, EVERLOOP_MODEL="")
        is_one_error(done, "EVERLOOP_BASE_URL", "EVERLOOP_MODEL", "Ollama", "http://127.0.0.1:11434/v1")


async def test_a_store_that_is_not_a_database_is_reported_and_left_alone(server, tmp_path):
    store = tmp_path / "broken.db"
    store.write_bytes(b"this is no database" * 1000)
    for arguments in (("run", "hi"), ("sessions",), ("log",), ("replay", "ab"), ("fork", "cli:direct"), ("worker",)):
        done = await everloop(*arguments, "--store", str(store), server=server)
        is_one_error(done, "broken.db", "not a database")
    is_one_error(await everloop("--store", str(store), server=server), "broken.db", "not a database")
    assert store.read_bytes() == b"this is no database" * 1000


async def test_an_unreadable_entry_is_named(server, home):
    server.reply("yes")
    await everloop("run", "hi", server=server)
    with closing(sqlite3.connect(home / "everloop.db")) as database, database:
        database.execute('UPDATE entry SET data = \'{"type":"answer","content":7}\' WHERE seq = 2')
    is_one_error(await everloop("log"), "entry 2", "damaged", "restore")


async def test_an_unusable_workspace_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        is_one_error(await everloop("run", "hi", "--workspace", str(bad), server=server), str(bad), "--workspace")


async def test_input_that_is_not_utf_8_is_refused(server):
    is_one_error(await everloop("run", "-", server=server, stdin=b"caf\xe9"), "not UTF-8", "byte 3")
    is_one_error(await everloop(server=server, stdin=b"caf\xe9\n"), "line 1", "not UTF-8")
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "run", b"caf\xe9", env=environment(server), stdin=-1, stdout=-1, stderr=-1
    )
    is_one_error(await finished(process), "not UTF-8")
    assert not server.requests


async def test_an_empty_goal_is_refused(server):
    is_one_error(await everloop("run", "  ", server=server), "goal is empty")
    is_one_error(await everloop("run", "-", server=server), "goal is empty")


async def test_the_error_names_what_does_not_exist(server, tmp_path):
    is_one_error(await everloop("log"), "no store")
    server.reply("yes")
    await everloop("run", "hi", "--session", "my:work", server=server)
    is_one_error(await everloop("log", "--session", "no:such"), "no:such", "everloop sessions")
    is_one_error(await everloop("log", "--session", ""), "--session")
    is_one_error(await everloop("log", "--turn", "%"), "no turn")
    is_one_error(await everloop("replay", "ffff"), "no turn", "everloop log")
    is_one_error(await everloop("fork", "no:such@2"), "no:such", "everloop sessions")
    is_one_error(await everloop("fork", "my:work@99"), "no entry 99", "ends at 3")
    is_one_error(await everloop("fork", "my:work@x"), '"x"', "everloop log")
    is_one_error(await everloop("fork", "my:work@0"), "no entry 0")
    is_one_error(await everloop("fork", "my:work", "--as", "my:work"), "exists already")


# ------------------------------------------------------------------------------------------------ sessions, log


async def test_listing_without_sessions_prints_nothing_and_creates_nothing(home):
    done = await everloop("sessions")
    assert (done.status, done.out) == (0, "")
    assert "no sessions yet" in done.err
    assert not (home / "everloop.db").exists()


async def test_sessions_are_listed_latest_first(server):
    for key in ("my:one", "my:two"):
        server.reply("yes")
        await everloop("run", "hi", "--session", key, server=server)
    done = await everloop("sessions")
    assert [line.split()[0] for line in done.lines] == ["session", "my:two", "my:one"]
    rows = [json.loads(line) for line in (await everloop("sessions", "--json")).lines]
    assert [(row["key"], row["entries"], row["open_turn"]) for row in rows] == [
        ("my:two", 3, None),
        ("my:one", 3, None),
    ]


async def test_the_log_shows_each_entry_on_one_line_and_a_turn_in_full(server):
    server.calls(call("write_file", path="notes/a.txt", content="first\nsecond"))
    server.reply("Written.\nAll of it.")
    run = (await everloop("run", "--json", "write", server=server)).json
    log = await everloop("log")
    assert log.lines[0] == f"session {run['session']}"
    kinds = [line[17:].split()[0] for line in log.lines[2:]]
    assert kinds == ["user", "model", "answer", "tool", "result", "model", "answer", "end"]
    kinds = [
        kind for kind in kinds if kind not in ("model", "tool")
    ]  # whatever is not an entry follows from the entries around it
    assert 'write_file(path="notes/a.txt", content="first' in log.out
    assert "tokens" in log.out
    turn = await everloop("log", "--turn", run["turn"][:15])
    assert '{"path": "notes/a.txt", "content": "first\\nsecond"}' in turn.out
    assert len(turn.lines) == len(log.lines) + 1
    assert len((await everloop("log", "-n", "2")).lines) == 4
    rows = [json.loads(line) for line in (await everloop("log", "--json", "--turn", run["turn"])).lines]
    assert [row["entry"]["type"] for row in rows if "entry" in row] == kinds
    assert {row["turn"] for row in rows} == {run["turn"]}


async def test_an_ambiguous_turn_id_is_refused(server):
    turns = []
    for _ in range(2):
        server.reply("yes")
        turns.append((await everloop("run", "--json", "hi", server=server)).json["turn"])
    is_one_error(await everloop("log", "--turn", turns[0][:3]), *turns, "more of its id")


async def test_nothing_in_a_log_controls_the_terminal(server):
    server.calls(call("list_dir", path="\x1b[2J"))
    server.reply("\x1b]0;owned\x07 \x9b31m and \u202e", reasoning="\x1b[1m")
    run = (await everloop("run", "--json", "\x1b[31mhi", server=server)).json
    for arguments in (("log",), ("log", "--turn", run["turn"]), ("log", "--json"), ("replay", run["turn"])):
        out = (await everloop(*arguments)).out
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)


async def test_a_reader_that_closes_the_pipe_early_causes_no_error(server):
    server.reply("long " * 50_000)
    run = (await everloop("run", "--json", "hi", server=server)).json
    command = f"{shlex.quote(sys.executable)} -m everloop log --turn {run['turn']} | head -c 10"
    done = await asyncio.to_thread(subprocess.run, command, shell=True, capture_output=True, text=True)
    assert done.stdout == "session ru"
    assert done.stderr == ""


@pytest.mark.parametrize(("shell", "status"), [("<&-", 0), (">&-", 0), (">&- 2>&-", 0), (">/dev/full", 2), ("", 0)])
async def test_a_closed_or_full_output_causes_no_crash(server, home, shell, status):
    server.reply("yes")
    command = f"{shlex.quote(sys.executable)} -m everloop run hi {shell}"
    env = environment(server, PYTHONUNBUFFERED="")
    done = await asyncio.to_thread(subprocess.run, command, shell=True, capture_output=True, env=env)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr
    full = b"everloop: standard output cannot be written: No space left on device\n"
    assert done.stderr == (full if status else b"")
    assert (home / "everloop.db").read_bytes().startswith(b"SQLite format 3")


@pytest.mark.parametrize("arguments", ["--help", "run --help", "--version"])
def test_help_that_cannot_be_written_is_an_error(arguments):
    command = f"{shlex.quote(sys.executable)} -m everloop {arguments} >/dev/full"
    env = environment(PYTHONUNBUFFERED="")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env)
    told = "everloop: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)


async def test_a_terminal_that_lacks_the_characters_causes_no_crash(server):
    server.calls(call("list_dir", path="."))
    server.reply("naïve ✓")
    done = await everloop("run", "-v", "hi", server=server, PYTHONIOENCODING="ascii")
    assert (done.status, done.out) == (0, "na?ve ?\n")


# ------------------------------------------------------------------------------------------------ fork, worker


async def test_a_fork_continues_from_an_earlier_point(server):
    for text in ("one", "two"):
        server.reply(text)
        await everloop("run", f"say {text}", "--session", "my:work", server=server)
    done = await everloop("fork", "my:work@3")
    assert done.lines[0] == "my:work-fork"
    assert "everloop --session my:work-fork" in done.out
    assert (await everloop("fork", "my:work", "--as", "my:copy")).lines[0] == "my:copy"
    server.reply("three")
    await everloop("run", "go on", "--session", "my:work-fork", server=server)
    body = server.requests[-1].body
    assert body is not None
    assert [message["content"] for message in body["messages"][1:]] == ["say one", "one", "go on"]


async def test_a_worker_processes_the_inbox_and_ends_on_a_signal(server, home):
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text("[worker]\ndrain_seconds = 1\n")
    process = await start("worker", env=environment(server))
    async with asyncio.timeout(30):
        line = (await process.stderr.readline()).decode()
    assert re.match(r"everloop: worker \d+ is ready", line)
    store = SQLiteStore(home / "everloop.db")
    server.reply("done")
    bus = DurableBus(store)
    await bus.publish_inbound(InboundMessage("test", "someone", "chat", "do it"))
    await until(lambda: server.requests)
    async with asyncio.timeout(30):
        while not await store.turns("me") or (await store.turns("me"))[0].reason is None:
            await asyncio.sleep(0.02)
    server.hang(60)
    await bus.publish_inbound(InboundMessage("test", "someone", "chat", "and this"))
    await until(lambda: len(server.requests) == 2)
    process.send_signal(signal.SIGTERM)
    done = await asyncio.wait_for(finished(process), 30)
    assert (done.status, done.err) == (0, "everloop: stopping; turns continue elsewhere, or at the next start\n")
    open_turns = [turn for turn in await store.turns("me") if turn.reason is None]
    assert len(open_turns) == 1
    session = await store.session("me", "test:chat")
    assert session is not None
    assert session.worker is None
    await store.close()


async def test_a_run_in_a_session_with_an_interrupted_turn_says_so(server, home):
    store = SQLiteStore(home / "everloop.db")
    message = InboundMessage("cli", "user", "direct", "old", reply=False).addressed()
    assert await store.begin("me", "cli:direct", "gone.1.999999999.1.1", message) is not None
    await store.close()
    server.reply("old answer")
    server.reply("new answer")
    done = await everloop("run", "--session", "cli:direct", "new", server=server)
    assert done.out == "new answer\n"
    assert "finishing another turn of this session first" in done.err
