"""A primary with a synchronous standby on this machine: killed, promoted and rebuilt as often as a test requires."""

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

from .server import NOBODY, START_SECONDS, Server, programs

REPLICATION = "local all postgres trust\nlocal replication postgres trust\nlocal all all scram-sha-256\n"


class Pair:
    """Two servers with one address. The first of them is the primary until it is killed."""

    def __init__(self, folder: Path) -> None:
        self.primary = Server(folder / "a")
        self.standby = Server(folder / "b")
        self._folder = folder

    def create(self) -> None:
        self.primary.create()
        (self.primary.folder / "data" / "pg_hba.conf").write_text(REPLICATION)
        self.primary.start()
        self.primary.make_template()
        self.add_standby()

    def dsn(self, database: str) -> str:
        """Return both servers, always in the same order, whichever is the primary."""
        return f"postgresql://postgres@/{database}?host={self._folder / 'a'},{self._folder / 'b'}"

    def add_standby(self) -> None:
        """Make the other server a copy of the primary, and have commits wait for it."""
        other = self.standby
        data = other.folder / "data"
        if data.exists():
            shutil.rmtree(data)
        other.folder.mkdir(parents=True, exist_ok=True)
        who: dict[str, Any] = {}
        if os.getuid() == 0:
            os.chown(other.folder, NOBODY, NOBODY)
            who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        command = [
            "pg_basebackup",
            "-h",
            str(self.primary.folder),
            "-U",
            "postgres",
            "-D",
            str(data),
            "-R",
            "-c",
            "fast",
        ]
        subprocess.run(
            [str(programs() / command[0]), *command[1:], "--no-sync"],
            cwd="/", check=True, timeout=3 * START_SECONDS, capture_output=True, **who,
        )  # fmt: skip
        with open(data / "postgresql.conf", "a") as conf:
            conf.write(f"unix_socket_directories = '{other.folder}'\nsynchronous_standby_names = ''\n")
        other.start()
        self.wait_for_standby()

    def repair(self) -> None:
        """Restore a primary with its synchronous standby, whatever state a test has left them in."""
        for server in (self.primary, self.standby):
            if server.runs:
                server.thaw()
        if not self.primary.runs:
            if not self.standby.runs:
                self.standby.start()
            self.promote()
        if self.standby.runs and self.standby.sql("SELECT pg_is_in_recovery()") != [(True,)]:
            self.standby.crash()  # it was promoted, and a test failed before recording that
        if self.standby.runs:
            self.wait_for_standby()
        else:
            self.add_standby()

    def wait_for_standby(self) -> None:
        """Have commits wait for the standby, once it is connected."""
        self.configure("synchronous_standby_names", "*")
        give_up = time.monotonic() + START_SECONDS
        connected = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
        while not self.primary.sql(connected):
            assert time.monotonic() < give_up, "the standby does not connect"
            time.sleep(0.02)

    def fail_over(self) -> None:
        """Kill all processes of the primary, and promote the standby, which then waits for no standby of its own."""
        self.primary.crash()
        self.promote()

    def promote(self) -> None:
        self.standby._run("pg_ctl", "-w", "-t", "40", "promote")
        self.primary, self.standby = self.standby, self.primary

    def configure(self, name: str, value: str) -> None:
        """Change a setting of the primary."""
        with open(self.primary.folder / "data" / "postgresql.conf", "a") as conf:  # the last setting counts
            conf.write(f"{name} = '{value}'\n")
        self.primary._run("pg_ctl", "reload")


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="everloop-ha-") as name:
        folder = Path(name)
        os.chmod(folder, 0o755)
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        made = Pair(folder)
        try:
            made.create()
            yield made
        finally:
            for server in (made.standby, made.primary):
                if server.runs:
                    server.crash()  # it may be frozen
