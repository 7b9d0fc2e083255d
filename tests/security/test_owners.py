"""One owner must not be able to act as another: attacks on a real server from a sandboxed command with network.

The model obeys the attacker. The tests check what the model's server received and what the command got back: a secret
of the machine's own user, which only a request that is authenticated as that user can reveal.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.testing.openai_server import FakeOpenAI

from ..server.serving import CHAT, Client, call, process
from ..support.commands import everloop
from .scene import canary

RULES = '[[policy]]\ndo = "allow"\ncommand = "curl"\nnetwork = true\n'
LEFT_OPEN = ("/healthz", "/readyz")


@dataclass
class Machine:
    """A real server, the model behind it, and the secrets of the machine's own user."""

    folder: Path
    url: str
    fake: FakeOpenAI
    http: aiohttp.ClientSession
    secret: str  # the user's, in every prompt of the user's agent
    attack: str  # what the attacker's request says

    async def token(self, action: str, *arguments: str) -> str:
        done = await everloop("token", action, *arguments, server=self.fake, EVERLOOP_HOME=str(self.folder))
        assert done.status == 0, done.err
        return done.out.strip()

    async def curl_of(self, client: Client, *requests: str) -> str:
        """Return what a command with network in this client's sandbox gets from the server."""
        command = f"curl -sS -m 20 {' '.join(requests)}"
        self.fake.calls(call("exec", command=command, network=True))
        self.fake.reply("done")
        await client.ask("go")
        body = self.fake.requests[-1].body
        assert body is not None
        (result,) = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        return str(result)

    def chat(self, *headers: str) -> str:
        body = json.dumps({"messages": [{"role": "user", "content": self.attack}]})
        given = " ".join(f"-H '{header}'" for header in ("Content-Type: application/json", *headers))
        return f"{given} -d '{body}' {self.url}{CHAT}"

    def told(self) -> str:
        """Everything the model was sent because of the attacker's request."""
        seen = [json.dumps(request.body) for request in self.fake.requests]
        return "".join(text for text in seen if self.secret in text)


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    secret = canary("secret")
    memory = tmp_path / "workspace" / "memory" / "MEMORY.md"
    memory.parent.mkdir(parents=True)
    memory.write_text(f"The word is {secret}.\n")
    (tmp_path / "config.toml").write_text(RULES)
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http, process(fake, tmp_path) as (_, url):
        yield Machine(tmp_path, url, fake, http, secret, canary("attack"))


async def test_a_sandboxed_command_with_network_cannot_act_as_the_machines_own_user(machine: Machine):
    # First show that the attack works: without tokens, the machine has a single user.
    machine.fake.reply(f"the word is {machine.secret}")
    assert machine.secret in await in_shell(f"curl -sS {machine.chat()}")
    ada = Client(machine.url, machine.http, await machine.token("add", "ada"))
    machine.fake.requests.clear()
    ways = [
        machine.chat(),
        machine.chat("Authorization: Bearer x"),
        machine.chat("Authorization: Bearer"),
        machine.chat("Authorization: Bearer me"),
        machine.chat("Host: localhost"),
        f"{machine.url}/v1/models",
        f"{machine.url}/metrics",
    ]
    got = ""
    for way in ways:
        got += await machine.curl_of(ada, way)
    assert got.count("no_api_key") + got.count("invalid_api_key") == len(ways), got
    assert machine.told() == ""
    assert not any(machine.attack in str(messages[-1]) for messages in sent(machine))
    assert "everloop_" not in got
    for path in LEFT_OPEN:
        assert '"ok"' in await machine.curl_of(ada, machine.url + path)


async def test_revoking_the_last_token_does_not_open_the_server_again(machine: Machine):
    await machine.token("add", "ada")
    await machine.token("revoke", "ada")
    machine.fake.reply(f"the word is {machine.secret}")
    assert machine.secret not in await in_shell(f"curl -sS {machine.chat()}")
    assert machine.fake.requests == []


async def test_a_token_without_admin_reads_no_metrics_of_other_owners(machine: Machine):
    owner = canary("owner")[:20]
    machine.fake.reply("hello")
    await Client(machine.url, machine.http, await machine.token("add", "other", "--owner", owner)).ask("hi")
    for flags in ((), ("--owner", "me")):
        token = await machine.token("add", f"use{len(flags)}", *(flags or ("--owner", "ada")))
        answer = await in_shell(f"curl -sS -H 'Authorization: Bearer {token}' {machine.url}/metrics")
        assert "everloop_" not in answer
        assert "missing_right" in answer
    token = await machine.token("add", "prometheus", "--rights", "admin")
    assert "everloop_" in await in_shell(f"curl -sS -H 'Authorization: Bearer {token}' {machine.url}/metrics")
    refused = await in_shell(f"curl -sS -H 'Authorization: Bearer {token}' {machine.chat()}")
    assert "missing_right" in refused
    assert not any(machine.attack in str(messages) for messages in sent(machine))


async def test_a_token_cannot_gain_permissions_through_the_server(machine: Machine):
    """Tokens cannot be created or changed over HTTP, only on the machine's command line."""
    ada = await machine.token("add", "ada")
    for path in ("/v1/tokens", "/tokens", "/api/tokens"):
        for method in ("POST", "PUT", "PATCH"):
            body = json.dumps({"name": "evil", "owner": "me", "rights": ["admin"]})
            async with machine.http.request(
                method,
                machine.url + path,
                data=body,
                headers={"Authorization": f"Bearer {ada}", "Content-Type": "application/json"},
            ) as answer:
                assert answer.status in (403, 404, 405)
    assert await asyncio.to_thread(rights_in, machine.folder / "everloop.db") == [("ada", "use")]


def rights_in(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT name, rights FROM token").fetchall()


def sent(machine: Machine) -> list[list[dict[str, Any]]]:
    return [request.body["messages"] for request in machine.fake.requests if request.body is not None]


async def in_shell(command: str) -> str:
    """Return what an unsandboxed process of this machine gets."""
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    return out.decode()
