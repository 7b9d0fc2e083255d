"""`everloop log`: one session, all sessions, and live events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI, Reply
from tests.support.commands import COMMAND, Done, environment, everloop, finished, start, terminal

SECRET = "canary-7f3a"


class Follower:
    """A running `everloop log --follow --json` and its output so far."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.rows: list[dict[str, Any]] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for line in self.process.stdout:
            self.rows.append(json.loads(line))

    def events(self, **facts: Any) -> list[str]:
        return [row["event"] for row in self.rows if facts.items() <= row.items()]

    async def sees(self, event: str, count: int = 1, **facts: Any) -> None:
        try:
            async with asyncio.timeout(30):
                while self.events(**facts).count(event) < count:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"never saw {event} in {self.rows}") from None

    async def end(self, number: int = signal.SIGINT) -> Done:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(30):
            await self._task
            err = await self.process.stderr.read()
            return Done(await self.process.wait(), "", err.decode())


@contextlib.asynccontextmanager
async def following(*arguments: str) -> AsyncIterator[Follower]:
    follower = Follower(await start("log", "--follow", "--json", *arguments, env=environment()))
    try:
        yield follower
    finally:
        await follower.end(signal.SIGKILL)


async def one_turn(server: FakeOpenAI, session: str = "cli:direct", text: str = "hi") -> None:
    server.reply("yes")
    assert (await everloop("run", text, "--session", session, server=server)).status == 0


# ---------------------------------------------------------------------------------------------- reading


async def test_a_turn_reads_as_a_timeline_with_times_and_counts(server):
    server.calls(call("read_file", path="missing.txt"))
    server.replies.append(Reply("It is not there.", delay=0.15))
    await everloop("run", "look", "--session", "my:one", server=server)
    log = (await everloop("log")).lines
    assert [line[17:].split()[0] for line in log[2:]] == [
        "user", "model", "answer", "tool", "result", "feedback", "model", "answer", "end",
    ]  # fmt: skip
    assert "[my, user, 4 characters]" in log[2]
    assert "[round 1" in log[3]
    assert "tokens" in log[4]
    assert "read_file started" in log[5]
    assert log[6].rstrip("]").endswith("characters")
    assert "[error]" in log[7]
    assert "[round 2" in log[8]
    seconds = float(log[9].rpartition("[")[2].split()[0])
    assert 0.15 <= seconds < 10
    ended = log[10].rpartition("[")[2].split(", ")
    assert ended[0] == "2 rounds"
    assert float(ended[1].split()[0]) >= seconds


async def test_json_uses_the_same_names_for_every_event(server):
    server.calls(call("list_dir", path="."))
    await one_turn(server, "my:one")
    rows = [json.loads(line) for line in (await everloop("log", "--json")).lines]
    assert [row["event"] for row in rows] == [
        "request", "model_called", "model_answered", "tool_started", "tool_ended", "model_called", "model_answered",
        "turn_ended",
    ]  # fmt: skip
    assert all(row["session"] == "my:one" and row["turn"] and row["at"] > 1e9 for row in rows)
    assert {"channel": "my", "sender": "user", "size": 2}.items() <= rows[0].items()
    assert {"round": 1, "finish_reason": "tool_calls", "tools": ["list_dir"]}.items() <= rows[2].items()
    assert rows[2]["input_tokens"] > 0
    assert rows[2]["seconds"] > 0
    assert {"tool": "list_dir", "status": "ok"}.items() <= rows[4].items()
    assert {"reason": "answer", "rounds": 2}.items() <= rows[-1].items()
    assert [row["entry"]["type"] for row in rows if "entry" in row] == ["user", "answer", "result", "answer", "end"]
    assert [row["seq"] for row in rows if row["seq"] is not None] == [1, 2, 3, 4, 5]


async def test_the_last_events_keep_their_round_and_turn(server):
    server.calls(call("list_dir", path="."))
    await one_turn(server)
    rows = [json.loads(line) for line in (await everloop("log", "--json", "-n", "2")).lines]
    assert [row["event"] for row in rows] == ["model_answered", "turn_ended"]
    assert rows[0]["round"] == 2
    assert rows[1]["rounds"] == 2
    whole = [json.loads(line) for line in (await everloop("log", "--json")).lines]
    assert whole[-2:] == rows


async def test_the_cost_of_a_turn_is_shown_if_the_price_is_known(server, home):
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text('[[price]]\nmodel = "scripted"\ninput = 1000000\n')
    await one_turn(server)
    rows = [json.loads(line) for line in (await everloop("log", "--json")).lines]
    assert rows[-1]["cost"] == rows[-1]["input_tokens"]
    assert f"cost {rows[-1]['cost']:.4f}" in (await everloop("log")).out


async def test_events_of_all_sessions_are_shown_by_time_with_session_names(server):
    for key in ("my:one", "my:two", "my:one"):
        await one_turn(server, key)
    rows = [json.loads(line) for line in (await everloop("log", "--all", "--json")).lines]
    ends = [row["session"] for row in rows if row["event"] == "turn_ended"]
    assert ends == ["my:one", "my:two", "my:one"]
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    heads = [line for line in (await everloop("log", "--all")).lines if line.startswith("session ")]
    assert heads == ["session my:one", "session my:two", "session my:one"]
    assert len((await everloop("log", "--all", "--json", "-n", "3")).lines) == 3
    refused = await everloop("log", "--all", "--session", "my:one")
    assert (refused.status, refused.out) == (2, "")


async def test_each_owner_sees_only_their_own(server, home):
    await one_turn(server, "my:one", f"keep {SECRET} to yourself")
    with contextlib.closing(sqlite3.connect(home / "everloop.db")) as database, database:
        for table in ("session", "inbox"):
            database.execute(f"UPDATE {table} SET owner = 'ada'")
    await one_turn(server, "my:two")
    turn = json.loads((await everloop("log", "--owner", "ada", "--json", "-n", "1")).out)["turn"]
    for arguments in ((), ("--all",), ("--session", "my:one"), ("--turn", turn)):
        assert SECRET not in (done := await everloop("log", *arguments)).out + done.err
        assert SECRET in (await everloop("log", "--owner", "ada", *arguments)).out
    async with following() as mine, following("--owner", "ada") as theirs:
        await theirs.sees("turn_ended")
        await mine.sees("turn_ended")
        await one_turn(server, "my:three")
        await mine.sees("turn_ended", 2)
        assert SECRET not in str(mine.rows)
        assert SECRET in str(theirs.rows)
        assert "my:three" not in str(theirs.rows)


# ---------------------------------------------------------------------------------------------- following


async def test_events_are_shown_while_the_turn_runs(server):
    await one_turn(server, "my:before")
    server.calls(call("list_dir", path="."))
    server.replies.append(Reply("done", delay=60))
    async with following() as follower:
        await follower.sees("turn_ended", session="my:before")
        run = await start("run", "hi", "--session", "my:one", env=environment(server), stdin=asyncio.subprocess.DEVNULL)
        await follower.sees("tool_ended", session="my:one")
        await follower.sees("model_called", 2, session="my:one")
        assert "turn_ended" not in follower.events(session="my:one")
        run.send_signal(signal.SIGINT)
        await follower.sees("turn_ended", session="my:one", reason="cancelled")
        await finished(run)
        done = await follower.end()
    assert (done.status, done.err) == (130, "")
    assert follower.events(session="my:one") == [
        "request", "model_called", "model_answered", "tool_started", "tool_ended", "model_called", "turn_ended",
    ]  # fmt: skip


async def test_follow_waits_for_a_store_that_does_not_exist_yet(server, home):
    async with following() as follower:
        assert b"waiting" in await asyncio.wait_for(follower.process.stderr.readline(), 30)
        assert not (home / "everloop.db").exists()
        await one_turn(server, "my:one")
        await follower.sees("turn_ended")
        assert follower.events() == ["request", "model_called", "model_answered", "turn_ended"]


async def test_only_the_named_session_is_followed_even_before_it_exists(server):
    await one_turn(server, "my:other")
    async with following("--session", "my:one") as follower:
        await one_turn(server, "my:other")
        await one_turn(server, "my:one")
        await follower.sees("turn_ended")
        assert {row["session"] for row in follower.rows} == {"my:one"}


async def test_following_a_turn_ends_with_the_turn(server):
    server.replies.append(Reply("done", delay=1.0))
    run = await start("run", "hi", "--session", "my:one", env=environment(server), stdin=asyncio.subprocess.DEVNULL)
    async with following("--session", "my:one") as first:
        await first.sees("model_called")
        turn = first.rows[0]["turn"]
    async with following("--turn", turn) as follower:
        await follower.sees("turn_ended")
        assert (await asyncio.wait_for(follower.process.wait(), 30)) == 0
    assert follower.events() == ["request", "model_called", "model_answered", "turn_ended"]
    await finished(run)
    over = await everloop("log", "--follow", "--turn", turn)
    assert over.status == 0


async def test_follow_continues_across_a_killed_and_restarted_worker(server):
    server.replies.append(Reply("lost", delay=60))
    async with following() as follower:
        run = await start("run", "hi", "--session", "my:one", env=environment(server), stdin=asyncio.subprocess.DEVNULL)
        await follower.sees("model_called")
        run.kill()
        await run.wait()
        server.replies.clear()
        server.reply("yes")
        worker = await start("worker", env=environment(server))
        await follower.sees("turn_ended", session="my:one", reason="answer")
        worker.send_signal(signal.SIGTERM)
        await finished(worker)
        assert follower.events().count("request") == 1
        assert follower.events().count("model_answered") == 1


async def test_a_replaced_store_file_is_followed(server, home):
    await one_turn(server, "my:old")
    async with following() as follower:
        await follower.sees("turn_ended", session="my:old")
        for name in ("everloop.db", "everloop.db-wal", "everloop.db-shm"):
            (home / name).unlink(missing_ok=True)
        await one_turn(server, "my:new")
        await follower.sees("turn_ended", session="my:new")
        assert follower.events(session="my:new")[0] == "request"


async def test_an_idle_follower_uses_no_processor_time(server):
    await one_turn(server)
    async with following() as follower:
        await follower.sees("turn_ended")
        await wait_until_idle(follower.process.pid)


async def wait_until_idle(pid: int) -> None:
    """Wait until a process uses no processor time for a while; on a busy machine, pending work may take long. A
    process that polls uses a hundredth of a second in each interval and never becomes idle."""
    async with asyncio.timeout(30):
        before = -1
        while (now := processor_time(pid)) != before:
            before = now
            await asyncio.sleep(2)


def processor_time(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_closing_the_pipe_ends_the_follower_at_once(server):
    await one_turn(server)
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "log", "--follow", env=environment(), stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    assert (await asyncio.to_thread(os.read, reading, 8)).startswith(b"session ")
    os.close(reading)
    async with asyncio.timeout(30):
        assert await process.wait() == 141
        assert process.stderr is not None
        assert await process.stderr.read() == b""


async def test_at_a_terminal_ctrl_c_ends_it(server):
    await one_turn(server, "my:one")
    async with terminal("log", "--follow") as seen:
        await seen.sees("[1 round")
        await one_turn(server, "my:two")
        await seen.sees("session my:two")
        await seen.sees("[1 round", after=seen.text.find("my:two"))
        seen.type("\x03")
        assert await seen.ends() == 130
