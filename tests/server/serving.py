"""The whole server in the test's own process, on a real socket, with the fake model behind it; and its real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from everloop.cli.serve import page_services
from everloop.config import Config
from everloop.log import Entry, TurnEnded
from everloop.providers.base import ToolCallRequest
from everloop.providers.factory import make_provider
from everloop.runtime.agent import agent_of
from everloop.runtime.owners import Owners
from everloop.server.app import Server
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from ..support.commands import environment, start

CHAT = "/v1/chat/completions"
# A model's stream that fails behind its first word.
HALF = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "half "}}]}\n\n'
    b'data: {"error": {"message": "broken", "type": "invalid_request_error", "code": 400}}\n\n'
)


@dataclass
class Streamed:
    """A stream as a client reads it."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(delta.get("content") or "" for delta in self._deltas())

    @property
    def reasoning(self) -> str:
        return "".join(delta.get("reasoning_content") or "" for delta in self._deltas())

    @property
    def finish(self) -> str | None:
        reasons = [choice["finish_reason"] for chunk in self.chunks for choice in chunk.get("choices", ())]
        (reason,) = filter(None, reasons)
        return str(reason)

    @property
    def usage(self) -> dict[str, int] | None:
        return self.chunks[-1].get("usage")

    @property
    def error(self) -> dict[str, Any]:
        (error,) = [chunk["error"] for chunk in self.chunks if "error" in chunk]
        return dict(error)

    def calls(self) -> list[tuple[str, str, Any]]:
        """(id, name, arguments), put together as clients do."""
        found: dict[int, list[str]] = {}
        for delta in self._deltas():
            for piece in delta.get("tool_calls", ()):
                call = found.setdefault(piece["index"], ["", "", ""])
                call[0] += piece.get("id", "")
                call[1] += piece["function"].get("name", "")
                call[2] += piece["function"]["arguments"]
        return [(id, name, json.loads(arguments)) for id, name, arguments in found.values()]

    def take(self, line: str) -> None:
        if line.startswith(":"):
            self.comments.append(line[2:])
        elif line.startswith("id: "):
            self.ids.append(line[4:])
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self.chunks.append(json.loads(line[6:]))
        else:
            assert not line, line

    def _deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices", ())]


class Client:
    """Speaks to a server as any OpenAI client does."""

    def __init__(self, url: str, http: aiohttp.ClientSession, token: str = "") -> None:
        self.url = url
        self.http = http
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def post(self, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        return self.http.post(self.url + CHAT, json=body, headers={**self.headers, **(headers or {})})

    async def ask(self, said: Any, headers: Mapping[str, str] | None = None, **options: Any) -> dict[str, Any]:
        """The answer to a text, or to whole messages."""
        async with self.post({"messages": _messages(said), **options}, headers) as response:
            body = await response.json()
            assert response.status == 200, body
            return dict(body)

    async def fails(
        self, said: Any, headers: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, dict[str, Any]]:
        async with self.post({"messages": _messages(said), **options}, headers) as response:
            return response.status, (await response.json())["error"]

    async def stream(self, said: Any, headers: Mapping[str, str] | None = None, **options: Any) -> Streamed:
        streamed = Streamed()
        async with self.post({"messages": _messages(said), "stream": True, **options}, headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                streamed.take(line.decode().removesuffix("\n"))
        return streamed

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path, headers=self.headers) as response:
            return response.status, await response.json()


async def named_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream in which each has its type as its name."""
    name = ""
    async for line in response.content:
        text = line.decode().removesuffix("\n")
        if text.startswith("event: "):
            name = text[7:]
        elif text.startswith("data: "):
            data = json.loads(text[6:])
            assert data["type"] == name
            yield data


def _messages(said: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def call(name: str, id: str = "c1", **arguments: Any) -> ToolCallRequest:
    return ToolCallRequest(id, name, arguments)


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A tool of the client's."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Serving(Client):
    """A server that runs here, and what it keeps."""

    def __init__(self, url: str, http: aiohttp.ClientSession, fake: FakeOpenAI, owners: Owners, server: Server) -> None:
        super().__init__(url, http)
        self.fake = fake
        self.owners = owners
        self.server = server
        self.store = owners.store

    async def client(self, name: str, owner: str | None = None, rights: str = "use") -> Client:
        """A client with a token. With the first token, the machine's own user gets one too, since it now needs one."""
        if not self.headers:
            self.headers = await self._token("person", "me", "use,admin")
        client = Client(self.url, self.http)
        client.headers = await self._token(name, owner or name, rights)
        return client

    async def _token(self, name: str, owner: str, rights: str) -> dict[str, str]:
        token = new_token()
        await self.store.add_token(name, owner, hash_of(token), rights.split(","))
        return {"Authorization": f"Bearer {token}"}

    def workspace(self, owner: str) -> Path:
        return self.owners.config.home / "owners" / owner / "workspace"

    def seen(self, number: int = -1) -> list[dict[str, Any]]:
        """The messages that the model was sent."""
        body = self.fake.requests[number].body
        assert body is not None
        return list(body["messages"])

    async def model_left(self, number: int = -1) -> None:
        """Wait until a model call has ended because its client left."""
        async with asyncio.timeout(30):
            while not self.fake.requests[number].gone:
                await asyncio.sleep(0.01)

    async def entries(self, key: str | None = None, owner: str = "me") -> list[Entry]:
        """All that is in the log of a session, by default the latest."""
        key = key or (await self.store.sessions(owner, 1))[0].key
        info = await self.store.session(owner, key)
        assert info is not None
        return [one.entry for one in await self.store.read_log(info.id)]

    async def ended(self, key: str | None = None, owner: str = "me") -> TurnEnded:
        """How the last turn of a session ended, once it has."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(IndexError, AssertionError):
                    if isinstance(last := (await self.entries(key, owner))[-1], TurnEnded):
                        return last
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Serving]:
    """A server with its own home; `settings` are those of `Config`."""
    home = folder / "home"
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http:
        config = Config(
            **{
                "home": home,
                "workspace": home / "workspace",
                "base_url": fake.base_url,
                "model": "scripted",
                "retries": 0,
                "port": 0,
                "drain_seconds": 5.0,
                **settings,
            }
        )
        config.workspace.mkdir(parents=True, exist_ok=True)
        store, provider = SQLiteStore(home / "everloop.db"), make_provider(config)
        owners = Owners(config, store, provider, agent_of)
        server = Server(config, owners, services=page_services(config, store))
        work = asyncio.create_task(owners.run())
        try:
            (url,) = await server.start()
            yield Serving(url, http, fake, owners, server)
        finally:
            await server.stop()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await owners.close()
            await provider.close()
            await store.close()


@contextlib.asynccontextmanager
async def process(
    fake: FakeOpenAI, folder: Path, *arguments: str, first: str = "", **settings: str
) -> AsyncIterator[tuple[Any, str]]:
    """The real `everloop serve`, and its address; `first` is what it says before that."""
    env = environment(fake, EVERLOOP_HOME=str(folder), EVERLOOP_WORKSPACE=str(folder / "workspace"))
    env = {name: value for name, value in {**env, **settings}.items() if value}
    made = await start("serve", "--port", "0", *arguments, env=env, stdin=asyncio.subprocess.DEVNULL)
    try:
        if first:
            assert first in (await asyncio.wait_for(made.stderr.readline(), 40)).decode()
        line = (await asyncio.wait_for(made.stderr.readline(), 40)).decode()
        found = re.fullmatch(r"everloop: serving on (http://\S+)\n", line)
        assert found is not None, line + (await made.stderr.read()).decode()
        yield made, found[1]
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def refuses(url: str) -> None:
    """Wait until a terminated server has noticed the signal and accepts no more connections."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):  # or it closes its door just then
            while True:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def worker(fake: FakeOpenAI, folder: Path, **settings: str) -> AsyncIterator[Any]:
    """The real `everloop worker`, once it is ready."""
    env = environment(fake, EVERLOOP_HOME=str(folder), EVERLOOP_WORKSPACE=str(folder / "workspace"), **settings)
    made = await start("worker", env=env, stdin=asyncio.subprocess.DEVNULL)
    try:
        line = (await asyncio.wait_for(made.stderr.readline(), 40)).decode()
        assert "is ready" in line, line + (await made.stderr.read()).decode()
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()
