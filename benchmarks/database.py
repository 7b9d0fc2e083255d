"""A PostgreSQL for benchmarks: started as the tests start it, but with fsync and autovacuum on; what it has done."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.store.postgres.server import Server

TICKS = os.sysconf("SC_CLK_TCK")
REAL = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "autovacuum": "on",
    "shared_buffers": "'128MB'",
    "max_connections": "300",
}


@contextlib.contextmanager
def postgres() -> Iterator[Server]:
    """A PostgreSQL with the settings that it would have in earnest."""
    with tempfile.TemporaryDirectory(prefix="everloop-bench-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        server = Server(Path(folder) / "pg")
        server.create()
        with open(server.folder / "data" / "postgresql.conf", "a") as conf:  # what is said last counts
            conf.writelines(f"{name} = {value}\n" for name, value in REAL.items())
        server.start()
        try:
            server.make_template()
            yield server
        finally:
            if server.runs:
                server.stop("fast")


def cpu_of_postgres(server: Server) -> float:
    """Seconds of CPU of all of its processes so far, also of those that have ended."""
    postmaster = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    total = sum(times_of(postmaster))
    for child in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split():
        with contextlib.suppress(OSError):
            total += sum(times_of(int(child))[:2])
    return total


def times_of(pid: int) -> list[float]:
    """Its own user and system time, and that of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) / TICKS for field in fields[11:15]]


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has for itself alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@dataclass(slots=True)
class Counted:
    """What a server has done between two looks."""

    writes: float  # transactions that wrote something
    wal: float  # bytes of the write-ahead log
    cpu: float  # seconds of all of its processes

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.writes - other.writes, self.wal - other.wal, self.cpu - other.cpu)


def counted(server: Server) -> Counted:
    """Its counters so far. Those of `pg_stat_database` would come up to ten seconds late."""
    ((writes, wal),) = server.sql(
        "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::float8, pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
    )
    return Counted(writes, float(wal), cpu_of_postgres(server))


@contextlib.contextmanager
def statements(server: Server) -> Iterator[list[str]]:
    """All statements that are run meanwhile, as the server's own log has them. It slows the server down."""
    said = server.folder / "log"
    found: list[str] = []
    _set(server, "'all'")
    begin = said.stat().st_size
    try:
        yield found
    finally:
        _set(server, "'none'")
        with open(said, errors="replace") as log:
            log.seek(begin)
            found += re.findall(r"LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)", log.read())


def _set(server: Server, what: str) -> None:
    server.sql(f"ALTER SYSTEM SET log_statement = {what}")
    server.sql("SELECT pg_reload_conf()")
    time.sleep(0.3)  # until every backend has heard of it


LEAST = """
CREATE TABLE least (id int PRIMARY KEY, n int NOT NULL);
INSERT INTO least VALUES (1, 0), (2, 0), (3, 0);
CREATE FUNCTION change_and_notify(p_id int, p_channel text) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
    UPDATE least SET n = n + 1 WHERE id = p_id;
    PERFORM pg_notify(p_channel, '');
    RETURN 1;
END $$;
CREATE FUNCTION change_unflushed(p_id int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE least SET n = n + 1 WHERE id = p_id;
    RETURN 1;
END $$;
"""


def least_cpu(server: Server, turns: int, rate: float = 20.0) -> float:
    """Seconds of CPU a turn that PostgreSQL needs at least: the statements, commits and notifications of the turn of a
    chat's message, in the processes that make them, but each on one row of one small table and without any contents."""
    import psycopg

    dsn = server.dsn("postgres")
    with contextlib.ExitStack() as stack:
        channel, worker, sender, *listeners = (
            stack.enter_context(psycopg.connect(dsn, autocommit=True, prepare_threshold=0)) for _ in range(5)
        )
        worker.execute(LEAST, prepare=False)
        for name, listener in zip(("work", "sending"), listeners, strict=True):
            listener.execute(f"LISTEN {name}")
        pause = 1 / rate / 5

        def turn() -> None:
            channel.execute("SELECT change_and_notify(1, 'work')")  # the message is accepted
            time.sleep(pause)
            worker.execute("SELECT n FROM least WHERE id = 1")  # what is there to do?
            worker.execute("UPDATE least SET n = n + 1 WHERE id = 2")  # the turn begins
            time.sleep(pause)
            worker.execute("SELECT change_and_notify(2, 'sending')")  # it ends
            time.sleep(pause)
            sender.execute("SELECT change_unflushed(3)")  # the answer is taken
            time.sleep(pause)
            sender.execute("SELECT change_unflushed(3)")  # and was sent
            time.sleep(pause)

        for _ in range(20):
            turn()
        began = cpu_of_postgres(server)
        for _ in range(turns):
            turn()
        return (cpu_of_postgres(server) - began) / turns
