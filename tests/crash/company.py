"""Everloop's own commands on a PostgreSQL store, with the tools of these tests; and a channel beside them.

python -m tests.crash.company FOLDER DSN PLANT serve --port 0
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Any

from everloop import AgentLoop, InboundMessage
from everloop.cli import serve as _serve  # noqa: F401 - the forge has it ready for its children
from everloop.cli.main import main
from everloop.runtime.durable_bus import DurableBus
from everloop.store.postgres.store import PostgresStore

from . import company_bugs
from .programs import equip, note, send

LEASE = 1.5  # seconds; where no lease is to end, a longer one is better: a busy machine may not let a worker renew it
PAUSE = 0.02  # seconds that it takes to send an answer, in which the sender may be killed


def command(
    folder: str,
    dsn: str,
    arguments: list[str],
    plant: str = "",
    said: str = "",
    settings: dict[str, str] | None = None,
) -> int:
    """An `everloop` command. Its connections have the number of its process as their name."""
    import psycopg  # noqa: F401 - before there are threads

    if said:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    faulthandler.register(signal.SIGUSR1)  # where it hangs, if it does
    company_bugs.plant(plant)
    os.environ.update(settings or {}, EVERLOOP_STORE=named(dsn))
    make = AgentLoop.__init__

    def made(self: AgentLoop, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        equip(self, Path(folder))

    AgentLoop.__init__ = made  # type: ignore[method-assign]
    return main(arguments)


def named(dsn: str) -> str:
    """The address, under which this process is known to the witness in the database."""
    return f"{dsn}&application_name={os.getpid()}"


async def channel(folder: str, dsn: str, said: str = "", lease: float = LEASE) -> None:
    """Takes answers from the outbox and notes each, until it is killed."""
    if said:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    store = PostgresStore(named(dsn), lease_seconds=lease)
    await store.workers()
    print(f"everloop: channel {os.getpid()} is ready", file=sys.stderr, flush=True)
    await send(Path(folder), DurableBus(store), PAUSE)


async def announcer(folder: str, dsn: str, messages: list[dict[str, Any]], plant: str = "") -> None:
    """A channel that acknowledges each message once it is on disk; nobody works on them here."""
    company_bugs.plant(plant)
    store = PostgresStore(named(dsn), lease_seconds=LEASE)
    bus = DurableBus(store)
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
        note(Path(folder), "acknowledged", id=message["id"])
    await store.close()
