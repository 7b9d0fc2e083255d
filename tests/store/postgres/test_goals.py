"""A run of an executor with its sessions in PostgreSQL: logged, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path

from everloop.store.postgres.store import PostgresStore
from everloop.testing import ScriptedProvider, call
from tests.goals.goals import executor
from tests.goals.test_durable import interrupt


async def test_an_interrupted_run_is_resumed_from_the_database(database: str, folder: Path):
    work = call("write_file", path="a.txt", content="x")
    await interrupt(folder, work, "worked", tools=["write_file"], store=database)
    provider = ScriptedProvider(["the result"])
    output = await (await executor(folder, provider, tools=["write_file"], store=database)).run({})
    assert (output.result, output.terminate_reason, output.turns) == ("the result", "goal", 2)
    assert len(provider.requests) == 1
    store = PostgresStore(database)
    assert [info.key for info in await store.sessions("me")] == [output.session]
    await store.close()
