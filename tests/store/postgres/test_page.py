"""The page about PostgreSQL is correct."""

from __future__ import annotations

import re

from everloop.bus import InboundMessage, OutboundMessage
from everloop.log import TurnEnded
from everloop.store.peers import new_worker, retire
from everloop.store.postgres import connect, store
from everloop.store.postgres.store import PostgresStore
from tests.support.places import DOCS

from .server import name_of

PAGE = (DOCS / "postgresql.md").read_text()


async def test_the_queries_of_the_page_find_what_is_there(postgres, database):
    worker, made = new_worker(), PostgresStore(database)
    claim = await made.begin("me", "test:1", worker, InboundMessage("test", "user", "1", "hi").addressed())
    assert claim is not None
    await made.finish(claim, [TurnEnded("answer", "x")], [OutboundMessage("test", "1", "x")])
    await made.accept(InboundMessage("test", "user", "1", "waits").addressed())
    await made.close()
    retire(worker)
    name = name_of(database)
    queries = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert len(queries) == 3
    for query in queries:
        assert len(postgres.sql(query, database=name)) == 1


def test_the_figures_of_the_postgres_page_are_those_of_the_code():
    assert f"{store.PATIENCE:.0f} seconds" in PAGE
    assert f"{store.LEASE_SECONDS:.0f} by default" in PAGE
    assert store.CONNECTIONS == 8
    assert connect.MISSING.endswith("pip install 'everloop[postgres]'")
    assert "pip install 'everloop[postgres]'" in PAGE
