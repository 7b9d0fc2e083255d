"""A real Matrix server (Synapse), and people at it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.clients.environments import python_environment

from .hooks import free_port

SHARED = "registration-secret-of-the-test"
API = "/_matrix/client/v3"


def config_of(folder: Path, port: int) -> str:
    limits = {name: {"per_second": 1000, "burst_count": 1000} for name in ("rc_message", "rc_registration")}
    fast = {"per_second": 1000, "burst_count": 1000}
    return json.dumps(  # JSON is YAML
        {
            "server_name": "localhost",
            "pid_file": str(folder / "pid"),
            "listeners": [
                {
                    "port": port,
                    "bind_addresses": ["127.0.0.1"],
                    "type": "http",
                    "tls": False,
                    "resources": [{"names": ["client"], "compress": False}],
                }
            ],
            "database": {"name": "sqlite3", "args": {"database": str(folder / "homeserver.db")}},
            "media_store_path": str(folder / "media"),
            "registration_shared_secret": SHARED,
            "macaroon_secret_key": "m",
            "form_secret": "f",
            "report_stats": False,
            "bcrypt_rounds": 4,
            "signing_key_path": str(folder / "signing.key"),
            "trusted_key_servers": [],
            "presence": {"enabled": False},
            **limits,
            "rc_login": {"address": fast, "account": fast, "failed_attempts": fast},
            "rc_joins": {"local": fast, "remote": fast},
            "rc_room_creation": fast,
            "rc_invites": {"per_room": fast, "per_user": fast, "per_issuer": fast},
        }
    )


class Synapse:
    """A server that a whole file of tests shares: it takes seconds to start."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._numbers = itertools.count(1)

    def call(self, method: str, path: str, body: Any = None, token: str = "") -> Any:
        """A request, which waits for its answer: not for the event loop."""
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Content-Type", "application/json")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=30) as reply:
            return json.loads(reply.read())

    def register(self, name: str) -> dict[str, Any]:
        path = "/_synapse/admin/v1/register"
        nonce = self.call("GET", path)["nonce"]
        user, password = f"{name}{next(self._numbers)}{secrets.token_hex(2)}", secrets.token_hex(8)
        signed = hmac.new(SHARED.encode(), f"{nonce}\0{user}\0{password}\0notadmin".encode(), hashlib.sha1).hexdigest()
        asked = {"nonce": nonce, "username": user, "password": password, "mac": signed, "admin": False}
        made: dict[str, Any] = self.call("POST", path, asked)
        return made


@contextmanager
def synapse() -> Iterator[Synapse]:
    """Start a server."""
    python = python_environment("synapse")
    folder, port = Path(tempfile.mkdtemp(prefix="synapse")), free_port()
    config = folder / "homeserver.yaml"
    config.write_text(config_of(folder, port))
    command = [str(python), "-m", "synapse.app.homeserver", "--config-path", str(config)]
    process: subprocess.Popen[bytes] | None = None
    try:
        quiet: dict[str, Any] = {
            "cwd": folder,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        key = base64.b64encode(secrets.token_bytes(32)).decode().rstrip("=")
        (folder / "signing.key").write_text(f"ed25519 a_test {key}\n")
        process = subprocess.Popen(command, **quiet)
        server = Synapse(port)
        _wait(server, process)
        yield server
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: Synapse, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.call("GET", "/_matrix/client/versions")
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("Synapse did not start")


class MatrixNetwork:
    """Accounts of their own on the server: a bot, and people who write to it."""

    def __init__(self, server: Synapse) -> None:
        self.server = server
        self.settings: dict[str, Any] = {}
        self.rooms: dict[str, str] = {}
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MatrixNetwork]:
        await asyncio.to_thread(self._begin)
        yield self

    def _begin(self) -> None:
        self.bot, self.anna, self.eve = (self.server.register(name) for name in ("ever", "anna", "eve"))
        self.settings = {
            "name": "matrix",
            "server": self.server.url,
            "token": self.bot["access_token"],
            "allow": [self.anna["user_id"]],
            "start": "all",
        }
        for chat in ("1", "2"):
            self.rooms[chat] = self.make_room(self.anna, [self.bot])
            self.join(self.bot, self.rooms[chat])

    # Each of these waits for the server, and is meant for a thread.

    def make_room(self, by: dict[str, Any], others: list[dict[str, Any]]) -> str:
        asked = {"preset": "private_chat", "is_direct": True, "invite": [one["user_id"] for one in others]}
        return str(self.server.call("POST", f"{API}/createRoom", asked, by["access_token"])["room_id"])

    def join(self, who: dict[str, Any], room: str) -> None:
        self.server.call("POST", f"{API}/rooms/{quote(room)}/join", {}, who["access_token"])

    def write(self, who: dict[str, Any], room: str, text: str, **more: Any) -> str:
        path = f"{API}/rooms/{quote(room)}/send/m.room.message/p{next(self._numbers)}"
        content = {"msgtype": "m.text", "body": text, **more}
        return str(self.server.call("PUT", path, content, who["access_token"])["event_id"])

    def contents(self, room: str, who: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """What the bot has written in a room, as a person sees it."""
        token = (who or self.anna)["access_token"]
        page = self.server.call("GET", f"{API}/rooms/{quote(room)}/messages?dir=b&limit=500", None, token)
        mine = [one for one in page["chunk"][::-1] if one["sender"] == self.bot["user_id"]]
        return [one["content"] for one in mine if one["type"] == "m.room.message"]

    def is_in(self, room: str) -> bool:
        """Whether the bot has joined a room."""
        joined = self.server.call("GET", f"{API}/joined_rooms", None, self.bot["access_token"])
        return room in joined["joined_rooms"]

    # What the kit needs.

    def id_of(self, chat: str) -> str:
        return self.rooms[chat]

    async def say(self, chat: str, text: str) -> None:
        await asyncio.to_thread(self.write, self.anna, self.rooms[chat], text)

    def heard(self, chat: str) -> list[str]:
        return [one["body"].strip() for one in self.contents(self.rooms[chat])]

    async def disturb(self) -> None:
        """The connections died with the process."""
