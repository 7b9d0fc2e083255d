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

LEASE = 1.5  # seconds; longer where no lease should expire, since a busy machine may prevent a worker from renewing it
PAUSE = 0.02  # seconds to send an answer, during which the sender may be killed


def command(
    folder: str,
    dsn: str,
    arguments: list[str],
    plant: str = "",
    said: str = "",
    settings: dict[str, str] | None = None,
) -> int:
    """Run an `everloop` command whose connections are named after its process id."""
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
    """Return the DSN with the name by which the witness in the database knows this process."""
    return f"{dsn}&application_name={os.getpid()}"


async def channel(folder: str, dsn: str, said: str = "", lease: float = LEASE) -> None:
    """Take answers from the outbox and record each, until killed."""
    if said:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    store = PostgresStore(named(dsn), lease_seconds=lease)
    await store.workers()
    print(f"everloop: channel {os.getpid()} is ready", file=sys.stderr, flush=True)
    await send(Path(folder), DurableBus(store), PAUSE)


async def announcer(folder: str, dsn: str, messages: list[dict[str, Any]], plant: str = "") -> None:
    """A channel that acknowledges each message once it is on disk, without a local worker."""
    company_bugs.plant(plant)
    store = PostgresStore(named(dsn), lease_seconds=LEASE)
    bus = DurableBus(store)
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
        note(Path(folder), "acknowledged", id=message["id"])
    await store.close()
