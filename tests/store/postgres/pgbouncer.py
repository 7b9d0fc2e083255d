"""A real PgBouncer in front of a test server, in transaction mode. Its socket is in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from .server import NOBODY, START_SECONDS

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """[databases]
* = host={server} user=postgres

[pgbouncer]
listen_addr =
unix_socket_dir = {folder}
auth_type = any
admin_users = postgres
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 2000
server_login_retry = 0.2
query_wait_timeout = 30
logfile = {folder}/log
"""


class PgBouncer:
    def __init__(self, folder: Path, server: Path, size: int) -> None:
        assert PGBOUNCER is not None, "pgbouncer is missing: make setup installs it (apt install pgbouncer)"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._size = size
        self._settings = folder / "pgbouncer.ini"
        self._write(server)

    def start(self) -> None:
        who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
        quiet: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        self._process = subprocess.Popen([str(PGBOUNCER), str(self._settings)], cwd="/", **quiet, **who)
        give_up = time.monotonic() + START_SECONDS
        while not (self._folder / ".s.PGSQL.6432").exists():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < give_up
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for socket in self._folder.glob(".s.PGSQL.*"):
            socket.unlink()

    def lead_to(self, server: Path) -> None:
        """Use another server from now on, as a failover callback would."""
        self._write(server)
        with psycopg.connect(self.dsn("pgbouncer"), autocommit=True, prepare_threshold=None) as console:
            console.execute("RELOAD")

    def dsn(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self._folder}&port=6432"

    def _write(self, server: Path) -> None:
        self._settings.write_text(CONFIG.format(server=server, folder=self._folder, size=self._size))


@contextlib.contextmanager
def pgbouncer(server: Path, size: int = 6) -> Iterator[PgBouncer]:
    with tempfile.TemporaryDirectory(prefix="everloop-pool-") as name:  # a socket's path must be short
        folder = Path(name)
        os.chmod(folder, 0o777)
        made = PgBouncer(folder, server, size)
        made.start()
        try:
            yield made
        finally:
            made.kill()
