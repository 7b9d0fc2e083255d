"""The database's cost of a turn: its statements, from the server's own log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.log import ModelAnswered, TurnEnded
from everloop.runtime.durable_bus import DurableBus
from everloop.store.peers import new_worker, retire
from everloop.store.postgres import prepared
from everloop.store.postgres import transactions as tx
from everloop.store.postgres.store import PostgresStore
from everloop.testing import FakeOpenAI, ScriptedProvider
from tests.support.commands import environment, start

from .pgbouncer import pgbouncer
from .server import Server, name_of

if TYPE_CHECKING:
    from everloop.store.postgres.connect import Connection

TURNS = 10
WRITES = ("everloop_accept", "everloop_begin", "everloop_finish", "COMMIT")
NOTICES = ("pg_notify", "everloop_direct")
# The statements of a turn that the server plans in no time. The others are in functions, whose plans are kept: in a
# pool nothing is prepared, and planning costs more than running.
PLANNED = re.compile(
    r"SELECT (\* FROM )?everloop_|SELECT set_config\('synchronous_commit', 'off', true\), pg_notify\(\$|"
    r"SELECT seq, turn, at, data FROM entry WHERE session = \$1 |UPDATE outbox SET sent_at"
)


@pytest.fixture(params=["direct", "pooled"])
def pool(request: pytest.FixtureRequest, postgres: Server) -> Iterator[Callable[[str], str]]:
    """The address of a database through a pooler, or none."""
    if request.param == "direct":
        yield lambda name: ""
    else:
        with pgbouncer(postgres.folder) as pooler:
            yield pooler.dsn


async def test_a_turn_of_one_answer_is_nine_statements_from_its_message_to_the_mark_that_it_was_sent(
    postgres: Server, database: str, pool: Callable[[str], str], fake: FakeOpenAI, tmp_path: Path
):
    name = name_of(database)
    postgres.sql(f"ALTER DATABASE {name} SET log_statement = 'all'")
    env = environment(fake, EVERLOOP_HOME=str(tmp_path), EVERLOOP_STORE=database, EVERLOOP_MODEL="tools-0x0")
    env |= {"EVERLOOP_STORE_POOL": pool(name)} if pool(name) else {}
    store = PostgresStore(database, pool=pool(name) or None)
    bus = DurableBus(store)
    worker = await start("worker", env=env, stdin=asyncio.subprocess.DEVNULL)
    delivered: asyncio.Queue[str] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            answer = await bus.consume_outbound()
            await bus.sent(answer)
            delivered.put_nowait(str(answer.reply_to))

    async def turn(id: str) -> None:
        await bus.publish_inbound(InboundMessage("chat", "ada", "1", "hi", id=id))
        assert await delivered.get() == id
        await asyncio.sleep(0.1)  # as messages arrive: the work that a turn leaves is done

    delivering = asyncio.create_task(deliver())
    try:
        async with asyncio.timeout(50):
            assert b"is ready" in await worker.stderr.readline()
            for number in range(8):  # all connections are open
                await turn(f"first {number}")
            said = postgres.folder / "log"
            begin = said.stat().st_size
            for number in range(TURNS):
                await turn(f"m{number}")
            with open(said, errors="replace") as log:
                log.seek(begin)
                found = re.findall(r"LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)", log.read())
    finally:
        delivering.cancel()
        await asyncio.wait([delivering])
        worker.kill()
        await worker.wait()
        await bus.close()
        await store.close()
    found = [one for one in found if "INTO worker" not in one and "FROM worker" not in one[:60]]  # of the heartbeats
    # How long turns waited for the disk is written for many of them at once, in a statement that waits for no disk.
    noted = sum("everloop_note_flushes" in one for one in found)
    assert noted < TURNS / 2
    # A connection that is opened late has its own two, once.
    found = [one for one in found if not one.startswith(("SELECT set_config($1, $2, false)", "INSERT INTO lane"))]
    assert len(found) <= 9 * TURNS + noted + 5, "\n".join(found)
    assert [one for one in found if PLANNED.match(one) is None] == []
    # A session that a notice names is looked at once, not again when its turn begins.
    assert 0 < sum("everloop_look_at" in one for one in found) <= TURNS + 1
    assert (
        0 < sum(any(word in one for word in NOTICES) for one in found) <= 2 * TURNS + 1
    )  # of the message, and of the answer
    # On the way to the answer three wait for the disk, and two more for its delivery.
    writes = [one for one in found if any(word in one for word in WRITES)]
    assert len(writes) == 3 * TURNS, "\n".join(writes)
    assert sum("UPDATE outbox SET sent_at" in one for one in found) == TURNS


async def test_an_answer_that_is_awaited_in_the_same_process_takes_two_commits_and_no_outbox(
    postgres: Server, database: str, tmp_path: Path
):
    name = name_of(database)
    postgres.sql(f"ALTER DATABASE {name} SET log_statement = 'all'")
    provider = ScriptedProvider(["hello"], repeat_last=True)
    async with AgentLoop(MessageBus(), provider, tmp_path, store=PostgresStore(database)) as agent:
        for _ in range(8):  # all connections are open
            await agent.process_direct("hi")
        said = postgres.folder / "log"
        begin = said.stat().st_size
        for _ in range(TURNS):
            assert await agent.process_direct("hi") == "hello"
        with open(said, errors="replace") as log:
            log.seek(begin)
            found = re.findall(r"LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)", log.read())
    assert sum(any(word in one for word in WRITES) for one in found) == 2 * TURNS, "\n".join(found)
    assert not any("outbox SET" in one or "take_outgoing" in one for one in found)


async def test_a_session_is_found_by_its_indexes_while_the_tables_are_small(database: str):
    store = PostgresStore(database)
    rows = """WITH s AS (
            INSERT INTO session (owner, key, created_at, updated_at)
            SELECT 'me', 'test:' || n, 0, 0 FROM generate_series(1, 20) AS n RETURNING id)
        INSERT INTO inbox (owner, session, kind, data, at) SELECT 'me', id, 'message', '{}', 0 FROM s"""

    def plans(db: Connection) -> str:
        db.execute(rows)
        db.execute("ANALYZE")
        body = "SELECT prosrc FROM pg_proc WHERE proname = 'everloop_look_at'"
        source = db.execute(body).fetchall()[0][0].partition("RETURN QUERY ")[2].partition(";")[0]
        look_at = source.replace("p_lease", "15.0").replace("p_sessions", "ARRAY[7]")
        found = db.execute(f"EXPLAIN {look_at}").fetchall() + db.execute(f"EXPLAIN {tx.LOOK}", ("me", "x")).fetchall()
        return "\n".join(line for (line,) in found)

    try:
        plan = await store.connections.submit("reads", plans)
        assert "Index" in plan
        assert "Seq Scan" not in plan, plan
    finally:
        await store.close()


async def test_a_turn_begins_with_the_current_state_even_if_it_has_changed_since_the_look(database: str):
    stores = [PostgresStore(database) for _ in range(2)]
    workers = [new_worker() for _ in stores]
    one, other = stores
    try:
        for store, worker in zip(stores, workers, strict=True):
            await store.join(worker, "work")
        first = await one.accept(InboundMessage("test", "user", "1", "first").addressed())
        assert await one.look(workers[0], [first.session]) == ([("me", "test:1")], [])
        claim = await other.begin("me", "test:1", workers[1])
        assert claim is not None
        await other.finish(claim, [ModelAnswered("hello"), TurnEnded("answer", "hello")])
        await one.accept(InboundMessage("test", "user", "1", "second").addressed())
        claim = await one.begin("me", "test:1", workers[0])
        assert claim is not None
        assert (claim.message.content, claim.first_seq) == ("second", 4)
    finally:
        for store, worker in zip(stores, workers, strict=True):
            await store.close()
            retire(worker)


async def test_values_and_results_of_prepared_statements_are_those_of_psycopg(database):
    store = PostgresStore(database)
    texts = ["", "plain", 'a "b" \\ {c}, d', "NULL", "é\n€\u2028", "'", "%s"]
    numbers = [0, -1, 2**62]
    query = "SELECT %s::text, %s::bigint, %s::float8, %s::boolean, %s::text[], %s::bigint[], %s::text, %s::smallint"
    values = ("x'\\y", 2**40, 0.1, True, texts, numbers, None, 7)

    def work(db):
        ours = prepared.run(db, query, values)
        theirs = db.execute(query, values).fetchall()
        elements = prepared.run(db, "SELECT unnest(%s::text[])", (texts,))
        return ours, theirs, elements, prepared.run(db, "SELECT 1 WHERE false")

    ours, theirs, elements, nothing = await store.connections.submit("reads", work)
    assert ours[0][:4] == theirs[0][:4]
    assert ours[0][5:] == theirs[0][5:]
    assert [text for (text,) in elements] == texts
    assert nothing == []
    await store.close()


async def test_a_write_that_was_rolled_back_leaves_the_connection_usable(database):
    """psycopg deallocates all prepared statements after a ROLLBACK, once it has prepared one of its own."""
    store = PostgresStore(database, connections=1)
    message = InboundMessage("test", "user", "1", "hi").addressed()
    await store.accept(message)

    def prepare_one(db):
        for _ in range(10):
            db.execute("SELECT %s::text", ("x",))
        assert db.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()[0] > 1

    def fail(db):
        raise RuntimeError("no")

    await store.connections.submit("reads", prepare_one)
    with pytest.raises(RuntimeError):
        await store.connections.submit("writes", fail)
    await store.connections.submit("reads", lambda db: db.execute("SELECT 1").fetchall())
    assert (await store.accept(message)).message.content == "hi"
    await store.close()
