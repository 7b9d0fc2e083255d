"""Every command of the deployment page is tried; those that would change this machine are at least known."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from everloop.config import Config
from everloop.testing import FakeOpenAI

from ..server.serving import process
from ..store.postgres.server import Server, own_server, programs
from ..support.commands import environment, everloop
from .files import DEPLOY, ROOT, UNITS, compose

PAGE = (ROOT / "docs" / "deployment.md").read_text()
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
COMMANDS = [line for block in BLOCK.findall(PAGE) for line in block.splitlines() if line]
# These would install something here, and need the network or a system administrator.
OF_THE_MACHINE = {
    "apt install python3-venv bubblewrap ripgrep",
    "useradd --system --user-group --home-dir /var/lib/everloop --shell /usr/sbin/nologin everloop",
    "/usr/bin/python3 -m venv /opt/everloop",
    "/opt/everloop/bin/pip install --require-hashes --requirement requirements.lock",
    "/opt/everloop/bin/pip install --no-deps --no-build-isolation .",
}
PASSWORD = 'p@ss/w:ord $x "y"'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with own_server() as running:
        yield running


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


def of(*heads: str) -> list[str]:
    return [line for line in COMMANDS if line.split()[0] in heads]


def test_no_command_of_the_page_is_left_out():
    tried = of(
        "everloop", "cp", "chmod", "install", "set", "export", "createuser", "createdb", "pg_dump", "pg_restore", "curl"
    )
    checked = of("docker", "systemctl")
    assert set(COMMANDS) == OF_THE_MACHINE | set(tried) | set(checked)
    assert len(COMMANDS) >= 25


# ---------------------------------------------------------------------------------------------- the database


async def test_the_commands_of_the_database_and_of_everloop_do_what_the_page_says(
    server: Server, fake: FakeOpenAI, tmp_path: Path
):
    """From scratch: a user, a database, a moved store, a token, a look, a backup and its copy."""
    home = Path(os.environ["HOME"])
    said = await everloop(server=fake, stdin=b"remember the beans\n", EVERLOOP_MODEL="tools-0x1")
    assert said.status == 0, said.err
    assert (home / ".everloop" / "everloop.db").exists()
    shim = tmp_path / "bin" / "everloop"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m everloop "$@"\n')
    shim.chmod(0o755)
    env = environment(
        fake, PATH=f"{shim.parent}:{programs()}:{os.environ['PATH']}", EVERLOOP_MODEL="tools-0x1",
        PGHOST=str(server.folder), PGUSER="postgres", PGPASSWORD=PASSWORD, EVERLOOP_STORE=_here(server, "everloop"),
    )  # fmt: skip
    outputs = {}
    for command in of("createuser", "createdb", "everloop", "pg_dump", "pg_restore"):
        line = re.sub(
            r"postgresql://everloop@db\.internal/(\w+)", lambda found: shlex.quote(_here(server, found[1])), command
        )
        outputs[command] = await shell(line, env, tmp_path, f"{PASSWORD}\n{PASSWORD}\n" if "pwprompt" in line else "")
    assert "All rows have arrived" in outputs[of("everloop")[0]]
    assert re.search(r"^ev_\S+$", outputs["everloop token add laptop"], re.M)
    assert "postgresql" in outputs["everloop doctor"]
    assert PASSWORD not in "".join(outputs.values())
    for table in ("entry", "session", "token"):
        counts = [server.sql(f"SELECT count(*) FROM {table}", database=name) for name in ("everloop", "copy")]
        assert counts[0] == counts[1] != [(0,)]
    logged = await everloop("log", EVERLOOP_STORE=_here(server, "copy"), PGPASSWORD=PASSWORD)
    assert "remember the beans" in logged.out


def _here(server: Server, database: str) -> str:
    return f"postgresql://everloop@/{database}?host={quote(str(server.folder), safe='')}"


async def shell(line: str, env: dict[str, str], folder: Path, stdin: str = "") -> str:
    """Both outputs of a line, without a terminal."""
    started = await asyncio.create_subprocess_exec(
        "sh", "-c", line, cwd=folder, env=env, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(40):
        out, _ = await started.communicate(stdin.encode())
    assert started.returncode == 0 or line.endswith("doctor"), out.decode()
    return out.decode()


# ---------------------------------------------------------------------------------------------- files and services


async def test_the_commands_that_install_files_find_them_and_keep_secrets_private(tmp_path: Path):
    source, root = tmp_path / "source", tmp_path / "root"
    shutil.copytree(DEPLOY, source / "deploy")
    for command in of("cp", "chmod", "install"):
        await shell(re.sub(r"(?<=[ =])/(?=etc|var)", f"{root}/", command), dict(os.environ), source)
    etc, home = root / "etc", root / "var/lib/everloop"
    for secret in (source / ".env", etc / "everloop/everloop.env"):
        assert secret.stat().st_mode & 0o777 == 0o600
    for unit in UNITS:
        assert (etc / "systemd/system" / unit.name).read_text() == unit.read_text()
    assert (await asyncio.to_thread(Config.load, env={}, home=home)).server_tokens
    # A shell reads the units' file as systemd does.
    variables = etc / "everloop/everloop.env"
    await asyncio.to_thread(
        variables.write_text, variables.read_text().replace("PGPASSWORD=", f"PGPASSWORD='{PASSWORD}'")
    )
    read = "; ".join(line.replace("/etc/everloop", f"{etc}/everloop") for line in of("set", "export"))
    shown = await shell(f"{read}; env", {"PATH": os.environ["PATH"]}, source)
    assert f"PGPASSWORD={PASSWORD}\n" in shown
    assert {"EVERLOOP_HOME=/var/lib/everloop", "EVERLOOP_STORE=postgresql://everloop@db.internal/everloop"} <= set(
        shown.splitlines()
    )


def test_the_services_that_are_started_are_those_of_the_files():
    units = {path.name.removesuffix(".service") for path in UNITS}
    for _, action, *rest in map(str.split, of("systemctl")):
        named = [name for name in rest if not name.startswith("--")]
        assert action in ("daemon-reload", "enable", "restart")
        assert {re.sub(r"@\w+", "@", name) for name in named} <= units
        assert named or action == "daemon-reload"


COMPOSE: dict[str, Callable[[list[str]], list[str]]] = {  # the services that a command names
    "build": lambda rest: rest,
    "run": lambda rest: rest[1:2] if rest[0] == "--rm" else [],
    "up": lambda rest: [part.partition("=")[0] for part in rest if not part.startswith("--")],
    "logs": lambda rest: rest,
}


async def test_the_compose_commands_name_existing_services_and_known_commands(fake: FakeOpenAI):
    inline = re.findall(r"`(docker compose [^`]+)`", PAGE)
    assert len(inline) >= 3
    for command in (*of("docker"), *inline):
        _, _, action, *rest = command.split()
        assert set(COMPOSE[action](rest)) <= compose()["services"].keys(), command
        if action == "run":
            done = await everloop(*rest[2:], server=fake)
            assert done.status == 0 or rest[2:] == ["doctor"], done.err


async def test_the_monitored_address_says_when_a_server_is_ready(fake: FakeOpenAI, tmp_path: Path):
    (command,) = of("curl")
    async with (
        process(fake, tmp_path) as (_, url),
        aiohttp.ClientSession() as http,
        http.get(command.split()[-1].replace("http://127.0.0.1:8002", url)) as response,
    ):
        assert response.status == 200


def test_the_pages_proxy_passes_streams_and_accepts_what_the_server_accepts():
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE, re.S)
    assert block.count("{") == block.count("}") == 3
    said = dict(line.strip().rstrip(";").split(None, 1) for line in block.splitlines() if line.endswith(";"))
    assert said["proxy_buffering"] == said["proxy_request_buffering"] == "off"
    assert int(said["client_max_body_size"].removesuffix("m")) * 2**20 >= Config().body_limit
    assert said["proxy_read_timeout"] == "1h"
    assert "proxy_set_header Host $host;" in block
    assert f":{Config().port};" in block


def test_the_pages_figures_are_those_of_the_code():
    assert f"every {Config().ping_seconds:.0f} seconds" in PAGE
    assert Config().host in PAGE
