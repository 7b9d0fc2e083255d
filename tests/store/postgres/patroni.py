"""The cluster of deploy/ha, run from its own files: two PostgreSQL under Patroni, three etcd, HAProxy and PgBouncer.

Each service of its compose.yaml is a machine (`tests/support/machines.py`) with the same name, so names and ports are
those of the files. The differences are listed in `Files`: where the programs and the data are, and that names are
looked up in /etc/hosts instead of Docker's name server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import yaml

from tests.support.machines import Machine, Network, network
from tests.support.places import ROOT

from .server import programs

HA = ROOT / "deploy" / "ha"
PASSWORDS = {"POSTGRES_PASSWORD": 'ever"loop 1', "SUPERUSER_PASSWORD": "super 2", "REPLICATION_PASSWORD": "replica 3"}
DATABASES = ("db1", "db2")
ETCD = ("etcd1", "etcd2", "etcd3")
SECONDS = 120.0


class Files:
    """The files of deploy/ha as they are run here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        compose = yaml.safe_load((HA / "compose.yaml").read_text())
        self.services: dict[str, Any] = compose["services"]

    def environment(self, service: str) -> dict[str, str]:
        """What Compose gives a service, and where its programs are."""
        given = self.services[service].get("environment", {})
        found = {name: re.sub(r"\$\{(\w+).*?\}", lambda v: PASSWORDS[v[1]], value) for name, value in given.items()}
        path = [str(Path(sys.executable).parent), str(programs()), "/usr/local/sbin", "/usr/sbin", "/usr/bin", "/bin"]
        return {**found, "PATH": os.pathsep.join(path), "LC_ALL": "C.UTF-8", "HOME": str(self.folder / service)}

    def command(self, target: str) -> list[str]:
        """What an image of the Dockerfile runs."""
        stage = (HA / "Dockerfile").read_text().partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        words: list[str] = json.loads(stage.partition("\nCMD ")[2].replace("\\\n", ""))
        return words

    def patroni(self, name: str) -> Path:
        place = self.folder / name
        return self._changed(
            "patroni.yml",
            place,
            {
                "data_dir: /var/lib/postgresql/cluster": f"data_dir: {place}/data",
                "bin_dir: /usr/lib/postgresql/17/bin": (
                    f"bin_dir: {programs()}\n  parameters:\n    unix_socket_directories: {place}"
                ),
                "post_init: sh /usr/local/bin/create.sh": f"post_init: sh {HA / 'create.sh'}",
            },
        )

    def haproxy(self) -> Path:
        names = {
            "resolvers docker\n    nameserver dns 127.0.0.11:53\n": "",
            " resolvers docker init-addr last,libc,none": "",
        }
        return self._changed("haproxy.cfg", self.folder / "haproxy", names)

    def pgbouncer(self) -> Path:
        """Return the script that starts it."""
        place = self.folder / "pgbouncer"
        users = {"/tmp/users.txt": f"{place}/users.txt"}
        sockets = {"server_reset_query =": f"server_reset_query =\nunix_socket_dir = {place}"}
        settings = self._changed("pgbouncer.ini", place, users | sockets)
        return self._changed("pgbouncer.sh", place, users | {"/etc/pgbouncer/pgbouncer.ini": str(settings)})

    @staticmethod
    def _changed(name: str, place: Path, changes: dict[str, str]) -> Path:
        text = (HA / name).read_text()
        for old, new in changes.items():
            assert old in text, f"{name} has no more {old!r}"
            text = text.replace(old, new)
        (place / name).write_text(text)
        return place / name


class Cluster:
    """Runs until the block that made it ends."""

    def __init__(self, folder: Path, net: Network) -> None:
        self.files = Files(folder)
        self.net = net
        self.pool = self._dsn("everloop", "POSTGRES_PASSWORD", net.machines["pgbouncer"].address + ":6432")
        self.dsn = self._dsn("everloop", "POSTGRES_PASSWORD", self._hosts())

    def _hosts(self) -> str:
        return ",".join(self.net.machines[name].address for name in DATABASES)

    @staticmethod
    def _dsn(user: str, password: str, hosts: str, database: str = "everloop") -> str:
        secret = urllib.request.quote(PASSWORDS[password], safe="")  # type: ignore[attr-defined]
        return f"postgresql://{user}:{secret}@{hosts}/{database}"

    def create(self) -> None:
        for program in ("etcd", "haproxy", "pgbouncer", "patroni"):
            assert shutil.which(program, path=self.files.environment(ETCD[0])["PATH"]), (
                f"{program}: make failover installs it"
            )
        for name in self.net.machines:
            place = self.files.folder / name
            place.mkdir()
            shutil.chown(place, "postgres", "postgres")
        for name in (*ETCD, *DATABASES):
            self.start(name)
        self.start("haproxy")
        self.start("pgbouncer")
        self.wait(self.is_whole, "the cluster to have a primary and a synchronous standby")

    def start(self, name: str) -> None:
        files, place = self.files, self.files.folder / name
        if name in ETCD:
            command = [word.replace("/var/lib/etcd", str(place / "data")) for word in files.command("etcd")]
        elif name == "haproxy":
            command = ["haproxy", "-f", str(files.haproxy())]
        elif name == "pgbouncer":
            command = ["sh", str(files.pgbouncer())]
        else:
            command = [word.replace("/etc/patroni.yml", str(files.patroni(name))) for word in files.command("patroni")]
        self.net.machines[name].start(command, files.environment(name), place / "log")

    def states(self) -> dict[str, dict[str, Any]]:
        """Return Patroni's view of its members, from all that respond."""
        found = {}
        for name in DATABASES:
            with contextlib.suppress(OSError, ValueError):
                url = f"http://{self.net.machines[name].address}:8008/patroni"
                with urllib.request.urlopen(url, timeout=1) as response:
                    found[name] = json.load(response)
        return found

    def is_whole(self) -> bool:
        """Whether there is a primary, and a standby without which it commits nothing."""
        states = self.states()
        roles = sorted(str(state.get("role")) for state in states.values() if state.get("state") == "running")
        if roles != ["primary", "replica"] or not any(state.get("sync_standby") for state in states.values()):
            return False
        return self.sql("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == [(1,)]

    def has_all_etcd(self) -> bool:
        """Whether each etcd takes part in all decisions."""
        with contextlib.suppress(OSError, ValueError):
            for name in ETCD:
                url = f"http://{self.net.machines[name].address}:2379/health"
                with urllib.request.urlopen(url, timeout=1) as response:
                    if json.load(response).get("health") != "true":
                        return False
            return True
        return False

    def wait(self, done: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        give_up = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < give_up, f"waited in vain for {what}: {self.states()}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(
            f"== {name}\n"
            + "\n".join((self.files.folder / name / "log").read_text(errors="replace").splitlines()[-40:])
            for name in self.net.machines
        )

    def primary(self) -> Machine:
        """Return the machine that accepts writes; it need not be the one that Patroni names."""
        for name in DATABASES:
            if not self.recovers(self.net.machines[name]):
                return self.net.machines[name]
        raise AssertionError("there is no primary")

    def other(self, machine: Machine) -> Machine:
        return next(self.net.machines[name] for name in DATABASES if name != machine.name)

    def recovers(self, machine: Machine) -> bool:
        """Whether a server is a standby, or cannot be reached."""
        dsn = self._dsn("postgres", "SUPERUSER_PASSWORD", machine.address, "postgres")
        try:
            with psycopg.connect(dsn, autocommit=True, connect_timeout=2) as connection:
                return connection.execute("SELECT pg_is_in_recovery()").fetchone() != (False,)
        except psycopg.Error:
            return True

    def wait_for_promotion(self, machine: Machine) -> float:
        """Return when the server accepted writes, by the monotonic clock."""
        self.wait(lambda: not self.recovers(machine), f"{machine.name} to be promoted", 90)
        return time.monotonic()

    def renew_database(self) -> None:
        """Recreate Everloop's database, as create.sh created it."""
        self.sql("DROP DATABASE everloop WITH (FORCE)")
        self.sql("CREATE DATABASE everloop OWNER everloop")

    def sql(self, query: str, *values: object, database: str = "postgres") -> list[Any]:
        dsn = self._dsn("postgres", "SUPERUSER_PASSWORD", self._hosts(), database)
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(
            dsn, autocommit=True, connect_timeout=3, target_session_attrs="read-write"
        ) as connection:  # fmt: skip
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description else []
        return []


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="everloop-patroni-") as name:
        folder = Path(name)
        os.chmod(folder, 0o755)
        with network([*ETCD, *DATABASES, "haproxy", "pgbouncer"]) as net:
            made = Cluster(folder, net)
            made.create()
            yield made
