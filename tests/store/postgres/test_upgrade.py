"""An upgrade of one process after another: the previous release and this one side by side on one store.

The previous release is its frozen store (`previous.py`) with a worker's loop around it. This tests what it writes,
locks, reads, notifies and is refused; and its choice of a turn's next step, on logs that this release wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from hypothesis import example, given, settings

from everloop.actions import Limits
from everloop.errors import StoreError
from everloop.log import decode_entry, encode_entry, kind_of
from everloop.store.history_check import check_history
from everloop.store.postgres import schema
from everloop.store.postgres.store import PostgresStore
from everloop.testing.openai_server import FakeOpenAI
from everloop.testing.replies import Reply
from tests.engine.test_anything import plans
from tests.engine.world import Plan, ToolPlan, live_through
from tests.server.serving import Client, process, text_of, worker
from tests.support.places import ROOT

from . import previous
from .server import Server, name_of

# What would disturb a program that knows the old tables.
DISTURBING = re.compile(r"\b(DROP|RENAME|TRUNCATE|DELETE FROM|SET NOT NULL|ALTER COLUMN)\b|NOT NULL(?! DEFAULT)", re.I)


@pytest.fixture
def empty(postgres: Server) -> Iterator[str]:
    name = f"upgraded_{secrets.token_hex(4)}"
    postgres.sql(f"CREATE DATABASE {name}")
    yield postgres.dsn(name)
    postgres.sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    previous.unpack(folder)
    return folder


class Old:
    """A worker of the previous release, and its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.said.append(line.strip())

    async def until(self, word: str, times: int = 1) -> None:
        async with asyncio.timeout(60):
            while sum(line.startswith(word) for line in self.said) < times:
                assert self.process.returncode is None, self.said
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def old_worker(code: Path, dsn: str) -> AsyncIterator[Old]:
    # -I: neither this release nor the test's own packages are in its path; the dependencies are.
    start = f"import sys; sys.path.insert(0, {str(code)!r}); sys.argv[1:] = [{dsn!r}]; "
    start += f"import runpy; runpy.run_path({previous.__file__!r}, run_name='__main__')"
    pipe = asyncio.subprocess.PIPE
    made = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", start, stdout=pipe)
    old = Old(made)
    reading = asyncio.create_task(old.read())
    try:
        await old.until("ready")
        yield old
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()
        await reading


async def test_the_previous_release_and_this_one_take_turns_on_one_store(postgres, empty, release_before, tmp_path):
    """The old one creates the tables, this one upgrades them under it; then a new server, a new worker and the old one
    share the work.

    Neither takes a turn of the other that lasts longer than a lease, and turns that the old one has not ended are ended
    by the new one.
    """
    name = name_of(empty)
    settings = {"EVERLOOP_STORE": empty, "EVERLOOP_MODEL": "tools-0x1"}
    (tmp_path / "config.toml").write_text(f"[server]\nturns = false\n[worker]\nlease_seconds = {previous.LEASE}\n")
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http, old_worker(release_before, empty) as old:
        assert old.said[0] == f"ready {schema.NEEDED}"
        columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'everloop_schema'"
        assert postgres.sql(columns, database=name) == [(1,)]
        async with process(fake, tmp_path, **settings) as (_, url), worker(fake, tmp_path, **settings):
            versions = postgres.sql("SELECT version, applied FROM everloop_schema", database=name)
            assert versions == [(schema.NEEDED, len(schema.MIGRATIONS))]
            client, number = Client(url, http), 0
            answers: dict[str, list[str]] = {}

            async def talk(session: str) -> None:
                nonlocal number
                while not enough():
                    number += 1
                    mine = number
                    said = f"mark:{mine}"
                    answer = text_of(await client.ask(said, {"X-Session": session}))
                    assert answer in (f"old:{said}", f"done:{mine}")
                    answers.setdefault(session, []).append(answer)

            def enough() -> bool:
                given = [answer.partition(":")[0] for told in answers.values() for answer in told]
                return min(given.count("old"), given.count("done")) >= 5

            async with asyncio.timeout(120):
                await asyncio.gather(*(talk(f"s{n}") for n in range(4)))
                slow = Reply("slowly", delay=previous.LEASE + 1.5)
                while True:  # until the new one takes it
                    fake.replies.append(slow)
                    number += 1
                    answer = text_of(await client.ask(f"mark:{number}", {"X-Session": f"slow{number}"}))
                    if slow not in fake.replies:
                        break
                    fake.replies.remove(slow)
                assert answer == "slowly"
                # A turn that the old one has begun continues in the new one when the old one is dead.
                stalled = asyncio.create_task(client.ask(previous.STALL, {"X-Session": "stalled"}))
                while "stalls" not in old.said:
                    await asyncio.sleep(0.02)
                    if stalled.done() and "stalls" not in old.said:  # the new one took it: once more
                        stalled = asyncio.create_task(client.ask(previous.STALL, {"X-Session": "stalled"}))
                await asyncio.sleep(previous.LEASE + 1.5)
                assert not stalled.done()
                old.process.kill()
                assert text_of(await stalled) == f"old:{previous.STALL}"
                async with old_worker(release_before, empty):  # one that is started only now works, too
                    pass
    checked = check_history(partial(postgres.sql, database=name))
    assert (checked.violations, checked.under_way) == ([], 0)
    said = postgres.sql("SELECT data::json ->> 'content' FROM entry WHERE kind = 'user'", database=name)
    marks = [text for (text,) in said if text != previous.STALL]
    assert sorted(marks) == sorted(f"mark:{n + 1}" for n in range(number))  # none lost, none doubled


async def test_a_newer_releases_store_is_used_if_it_allows_that_and_refused_in_one_line_if_not(
    postgres, database, caplog
):
    name = name_of(database)
    postgres.sql("UPDATE everloop_schema SET applied = applied + 1", database=name)
    store = PostgresStore(database)
    assert await store.sessions("me") == []
    await store.close()
    assert "was upgraded by a newer Everloop" in caplog.text
    postgres.sql("UPDATE everloop_schema SET version = applied", database=name)
    store = PostgresStore(database)
    with pytest.raises(StoreError, match="written by a newer Everloop: update this one") as refused:
        await store.sessions("me")
    await store.close()
    assert "\n" not in str(refused.value)
    assert postgres.sql("SELECT version - applied FROM everloop_schema", database=name) == [(0,)]


# Reads logs, one a line, each a list of entries; prints what comes next after each of the entries, and the entries as
# this release writes them. The wording of a notice may change from one release to the next.
DECIDE = """
import json, sys
from everloop.actions import next_action
from everloop.log import decode_entry, encode_entry
def decided(log):
    action = next_action(log)
    facts = {name: getattr(action, name) for name in type(action).__annotations__ if name != "text"}
    return f"{type(action).__name__} {facts}"
for line in sys.stdin:
    log = [decode_entry(data) for data in json.loads(line)]
    print(json.dumps([[decided(log[:end]) for end in range(1, len(log))], [encode_entry(entry) for entry in log]]))
"""


TOOLS = {
    name: ToolPlan(False, False, 1, "ok", verdict) for name, verdict in (("x", "ask"), ("y", "allow"), ("z", "deny"))
}
ASKS = Plan(
    TOOLS, [([("c1", "x", {}), ("c2", "y", {}), ("c3", "z", {})], 0), ("done", 0)], [], {}, 0, False, Limits(), [True]
)


def decided(code: Path, logs: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return what a release does next after each entry of these logs, and the logs as it writes them."""
    start = f"import sys; sys.path.insert(0, {str(code)!r})\n{DECIDE}"
    lines = "".join(json.dumps(log) + "\n" for log in logs)
    done = subprocess.run([sys.executable, "-I", "-c", start], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [actions for actions, _ in found], [log for _, log in found]


@pytest.mark.may_block
def test_each_release_continues_a_log_of_the_other_as_it_would_itself(release_before):
    """Wherever a turn is interrupted: in a round, in parallel calls, while a question is open, or after steering."""
    logs: list[list[str]] = []

    @settings(max_examples=30, database=None, deadline=None, derandomize=True)
    @given(plan=plans)
    @example(ASKS)
    def live(plan: Plan) -> None:
        world, _, _ = asyncio.run(live_through(plan))
        logs.append([encode_entry(entry) for entry in world.log])

    live()
    kinds = {kind_of(decode_entry(data)) for log in logs for data in log}
    assert kinds >= {"user", "answer", "begun", "result", "asked", "decided", "end"}
    before, rewritten = decided(release_before, logs)
    now, _ = decided(ROOT / "src", logs)
    assert len(before) == len(logs)
    assert before == now
    assert decided(ROOT / "src", rewritten)[0] == before


def test_additions_since_the_previous_release_remove_nothing():
    """A new column has a default or may be empty, since the previous release does not write it."""
    for step in schema.MIGRATIONS[schema.NEEDED :]:
        changed = re.sub(r"CREATE (OR REPLACE )?FUNCTION.*?\$\$;|CREATE TABLE.*?;\n", "", step, flags=re.S)
        assert DISTURBING.search(changed) is None, changed


def test_the_frozen_store_is_that_of_the_previous_release(release_before):
    text = (release_before / "everloop" / "store" / "postgres" / "schema.py").read_text()
    listed = text.partition("MIGRATIONS: tuple[str, ...] = (")[2].partition(")")[0]
    assert listed.count(",") == schema.NEEDED
