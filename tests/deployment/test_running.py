"""The commands that a deployment's files start really run: with a real PostgreSQL that requires a password."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from everloop.testing import FakeOpenAI

from ..server.serving import Client, text_of
from ..store.postgres.fixtures import postgres as postgres
from ..store.postgres.server import Server
from ..support.commands import Done, environment, finished, start
from .files import DEPLOY, UNITS, compose, filled_in, health_command, unit

PASSWORD = "p@ss/w:ord %41 'x\""  # no character needs care: it is in no address


@dataclass
class Place:
    """A machine set up according to the page."""

    folder: Path
    variables: dict[str, str]

    def as_compose(self, name: str) -> dict[str, str]:
        """The environment of a container, with the test's database instead of its own."""
        given = compose()["services"][name]["environment"]
        filled = {variable: filled_in(value, self.variables) for variable, value in given.items()}
        return {**filled, "EVERLOOP_HOME": str(self.folder), "EVERLOOP_STORE": self.variables["EVERLOOP_STORE"]}


@pytest.fixture
def place(postgres: Server, tmp_path: Path) -> Iterator[Place]:
    """A database of a user with a password, and a home with the settings."""
    name = f"d{secrets.token_hex(4)}"
    quoted = PASSWORD.replace("'", "''")
    postgres.sql(f"CREATE ROLE {name} LOGIN PASSWORD '{quoted}'")
    postgres.sql(f"CREATE DATABASE {name} OWNER {name}")
    shutil.copy(DEPLOY / "config.toml", tmp_path)
    address = f"postgresql://{name}@/{name}?host={quote(str(postgres.folder), safe='')}"
    variables = {"POSTGRES_PASSWORD": PASSWORD, "EVERLOOP_MODEL": "tools-0x1", "EVERLOOP_STORE": address}
    yield Place(tmp_path, variables)
    postgres.sql(f"DROP DATABASE {name} WITH (FORCE)")
    postgres.sql(f"DROP ROLE {name}")


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


async def said(*arguments: str, env: dict[str, str]) -> Done:
    """Return the output of a command that ends."""
    return await finished(await start(*arguments, env=environment(None, **env)))


@contextlib.asynccontextmanager
async def started(arguments: list[str], env: dict[str, str], ready: str) -> AsyncIterator[tuple[Any, str]]:
    """A process, and the line that says it is ready."""
    process = await start(*arguments, env=env, stdin=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(30):
            line = (await process.stderr.readline()).decode()
        assert ready in line, line + (await process.stderr.read()).decode()
        yield process, line
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def healthy(port: str) -> bool:
    """Return the image's health check result for a server on this port."""
    program, *arguments = [part.replace(":8002/", f":{port}/") for part in health_command()]
    process = await asyncio.create_subprocess_exec(program, *arguments, stderr=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(30):
        return await process.wait() == 0


async def test_what_compose_starts_serves_requests_and_work_and_ends_in_time(place: Place, fake: FakeOpenAI):
    place.variables["EVERLOOP_BASE_URL"] = fake.base_url
    services, env = compose()["services"], place.as_compose("serve")
    serve = [*services["serve"]["command"], "--port", "0"]
    refused = await said(*serve, env=env)
    assert (refused.status, "token" in refused.err) == (2, True)  # beyond loopback a token is required
    token = (await said("token", "add", "laptop", env=env)).out.strip()
    async with (
        started(serve, environment(None, **env), "serving on") as (server, line),
        started(services["worker"]["command"], environment(None, **place.as_compose("worker")), "is ready") as (
            worker,
            ready,
        ),
        aiohttp.ClientSession() as http,
    ):
        port = line.strip().rpartition(":")[2]
        assert await healthy(port)
        client = Client(f"http://127.0.0.1:{port}", http, token)
        assert text_of(await client.ask("hi mark:one")) == "done:one"
        assert (await Client(client.url, http).fails("hi"))[0] == 401
        for process in (server, worker):
            command = await asyncio.to_thread(Path(f"/proc/{process.pid}/cmdline").read_text)
            assert PASSWORD not in command
        assert PASSWORD not in line + ready
        for process in (server, worker):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert [await process.wait() for process in (server, worker)] == [0, 0]
        assert not await healthy(port)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
async def test_what_a_unit_starts_works_with_the_variables_of_its_file(path: Path, place: Place, fake: FakeOpenAI):
    lines = (DEPLOY / "everloop.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert {"EVERLOOP_STORE", "PGPASSWORD", "EVERLOOP_MODEL", "EVERLOOP_BASE_URL", "TZ"} <= env.keys()
    env |= {**place.variables, "PGPASSWORD": PASSWORD, "EVERLOOP_BASE_URL": fake.base_url}
    name, _, home = unit(path)["Service"]["Environment"].partition("=")
    assert (name, home) == ("EVERLOOP_HOME", unit(path)["Service"]["WorkingDirectory"])
    env["EVERLOOP_HOME"] = str(place.folder)
    (place.folder / "config.toml").write_text((DEPLOY / "config.toml").read_text() + "\n[provider]\nretries = 1\n")
    _, *arguments = unit(path)["Service"]["ExecStart"].split()
    port = ["--port", "0"] if arguments == ["serve"] else []
    async with started([*arguments, *port], environment(None, **env), "everloop: ") as (process, line):
        assert re.search("serving on http://127.0.0.1:|is ready", line)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_a_wrong_password_is_one_line_without_it(place: Place, fake: FakeOpenAI):
    place.variables |= {"POSTGRES_PASSWORD": "canary-0815", "EVERLOOP_BASE_URL": fake.base_url}
    for command in (["worker"], ["serve"], ["token", "add", "x"]):
        told = await said(*command, env=place.as_compose("serve"))
        assert told.status == 2
        assert len(told.err.splitlines()) == 1
        assert "canary-0815" not in told.err + told.out


async def test_a_request_through_a_proxy_needs_a_token_and_a_known_name(place: Place, fake: FakeOpenAI):
    settings = (place.folder / "config.toml").read_text().replace("hosts = []", 'hosts = ["agent.example.org"]')
    (place.folder / "config.toml").write_text(settings)
    place.variables["EVERLOOP_BASE_URL"] = fake.base_url
    env = place.as_compose("serve")
    token = (await said("token", "add", "laptop", env=env)).out.strip()
    async with (
        started(["serve", "--port", "0"], environment(None, **env), "serving on") as (_, line),
        aiohttp.ClientSession() as http,
    ):
        url = line.strip().rpartition(" ")[2]
        for host, shown, status in (
            ("agent.example.org", token, 200),
            ("agent.example.org", "", 401),
            ("other.example.org", token, 403),
        ):
            headers = {"Host": host, "X-Forwarded-For": "203.0.113.7"}
            headers |= {"Authorization": f"Bearer {shown}"} if shown else {}
            async with http.get(f"{url}/v1/models", headers=headers) as response:
                assert response.status == status
