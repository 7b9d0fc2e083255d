"""A real Matrix server (Synapse), and people on it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from everloop.testing.channels import shown_file
from tests.clients.environments import python_environment

from .hooks import free_port

SHARED = "registration-secret-of-the-test"
API = "/_matrix/client/v3"


def config_of(folder: Path, port: int) -> str:
    limits = {name: {"per_second": 1000, "burst_count": 1000} for name in ("rc_message", "rc_registration")}
    fast = {"per_second": 1000, "burst_count": 1000}
    return json.dumps(  # JSON is valid YAML
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

    def __init__(self, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self._numbers = itertools.count(1)

    def call(self, method: str, path: str, body: Any = None, token: str = "") -> Any:
        """Make a blocking request; not for the event loop."""
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Content-Type", "application/json")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=30) as reply:
            return json.loads(reply.read())

    def has(self, text: str) -> bool:
        """Whether a text is anywhere in the server's database or media."""
        return any(text.encode() in path.read_bytes() for path in self.folder.rglob("*") if path.is_file())

    def log_in(self, account: dict[str, Any]) -> dict[str, Any]:
        """Return another device of an account."""
        who = {"type": "m.id.user", "user": account["user_id"]}
        asked = {"type": "m.login.password", "identifier": who, "password": account["password"]}
        made: dict[str, Any] = self.call("POST", f"{API}/login", asked)
        return {**made, "password": account["password"]}

    def register(self, name: str) -> dict[str, Any]:
        path = "/_synapse/admin/v1/register"
        nonce = self.call("GET", path)["nonce"]
        user, password = f"{name}{next(self._numbers)}{secrets.token_hex(2)}", secrets.token_hex(8)
        signed = hmac.new(SHARED.encode(), f"{nonce}\0{user}\0{password}\0notadmin".encode(), hashlib.sha1).hexdigest()
        asked = {"nonce": nonce, "username": user, "password": password, "mac": signed, "admin": False}
        made: dict[str, Any] = self.call("POST", path, asked)
        return {**made, "password": password}


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
        server = Synapse(port, folder)
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
    """Separate accounts on the server: a bot, and people who write to it."""

    initial_state: ClassVar[list[dict[str, Any]]] = []  # of a room

    def __init__(self, server: Synapse) -> None:
        self.server = server
        self.settings: dict[str, Any] = {}
        self.rooms: dict[str, str] = {}
        self._people_of: dict[str, dict[str, Any]] = {}  # the person who writes in each room
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
            self.add_room(chat, self.anna)

    # These block until the server responds: call them in a thread.

    def make_room(self, by: dict[str, Any], others: list[dict[str, Any]]) -> str:
        asked: dict[str, Any] = {"preset": "private_chat", "is_direct": True}
        asked |= {"invite": [one["user_id"] for one in others], "initial_state": self.initial_state}
        return str(self.server.call("POST", f"{API}/createRoom", asked, by["access_token"])["room_id"])

    def add_room(self, chat: str, person: dict[str, Any]) -> None:
        """Create a room for a person and the bot."""
        self.rooms[chat], self._people_of[chat] = self.make_room(person, [self.bot]), person
        self.join(self.bot, self.rooms[chat])

    def invite(self, by: dict[str, Any], who: dict[str, Any], room: str) -> None:
        asked = {"user_id": who["user_id"]}
        self.server.call("POST", f"{API}/rooms/{quote(room)}/invite", asked, by["access_token"])

    def join(self, who: dict[str, Any], room: str) -> None:
        self.server.call("POST", f"{API}/rooms/{quote(room)}/join", {}, who["access_token"])

    def write(self, who: dict[str, Any], room: str, text: str, **more: Any) -> str:
        path = f"{API}/rooms/{quote(room)}/send/m.room.message/p{next(self._numbers)}"
        content = {"msgtype": "m.text", "body": text, **more}
        return str(self.server.call("PUT", path, content, who["access_token"])["event_id"])

    def contents(self, room: str, who: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return what the bot has written in a room, as a person sees it."""
        token = (who or self.anna)["access_token"]
        page = self.server.call("GET", f"{API}/rooms/{quote(room)}/messages?dir=b&limit=500", None, token)
        mine = [one for one in page["chunk"][::-1] if one["sender"] == self.bot["user_id"]]
        return [one["content"] for one in mine if one["type"] == "m.room.message"]

    def is_in(self, room: str) -> bool:
        """Return whether the bot has joined a room."""
        joined = self.server.call("GET", f"{API}/joined_rooms", None, self.bot["access_token"])
        return room in joined["joined_rooms"]

    # Needed by the kit.

    def id_of(self, chat: str) -> str:
        return self.rooms[chat]

    async def say(self, chat: str, text: str) -> None:
        await asyncio.to_thread(self.write, self._people_of[chat], self.rooms[chat], text)

    def heard(self, chat: str) -> list[str]:
        return [_shown(one) for one in self.contents(self.rooms[chat], self._people_of[chat])]

    def upload(self, data: bytes) -> dict[str, Any]:
        """Upload a file as Anna. Return the message content that describes it."""
        request = urllib.request.Request(f"{self.server.url}/_matrix/media/v3/upload", data, method="POST")
        request.add_header("Authorization", f"Bearer {self.anna['access_token']}")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return {"url": json.loads(reply.read())["content_uri"]}

    def send_file(self, name: str, kind: str, data: bytes) -> None:
        """Anna sends a file in the first room."""
        self.write(self.anna, self.rooms["1"], name, msgtype=kind, filename=name, **self.upload(data))

    def fetch(self, content: dict[str, Any]) -> bytes:
        """Return the file of a message."""
        path = "/_matrix/client/v1/media/download/" + content["url"].removeprefix("mxc://")
        request = urllib.request.Request(self.server.url + path)
        request.add_header("Authorization", f"Bearer {self.anna['access_token']}")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return bytes(reply.read())

    async def disturb(self) -> None:
        """Drop all connections, as when the process dies."""


def _shown(content: Any) -> str:
    """Return how a person sees a message."""
    if not isinstance(content, dict):
        return str(content)
    if content["msgtype"] == "m.text":
        return str(content["body"]).strip()
    caption = content["body"] if content["body"] != content["filename"] else ""
    return shown_file(content["filename"], caption)


# ------------------------------------------------------------------------------------------------- encrypted rooms


class People:
    """A process with people's encrypting clients. Its methods block: call them in a thread."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._replies: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, method: str, who: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        reply: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._replies[number] = reply
            self._process.stdin.write(json.dumps([number, method, who, args]) + "\n")
            self._process.stdin.flush()
        return reply.result(90)

    def close(self) -> None:
        self._reader.join(30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, result, error = json.loads(line)
            reply = self._replies.pop(number)
            reply.set_result(result) if error is None else reply.set_exception(AssertionError(error))


@contextmanager
def people() -> Iterator[People]:
    """Start the process of the people's clients."""
    python = python_environment("nio")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory(prefix="nio") as folder:
        environment = {"TMPDIR": folder, "PATH": os.environ.get("PATH", "")}
        script = Path(__file__).with_name("nio_people.py")
        with subprocess.Popen([str(python), "-P", str(script)], text=True, env=environment, **pipes) as process:
            made = People(process)
            try:
                yield made
            finally:
                process.kill()
                made.close()


class EncryptedNetwork(MatrixNetwork):
    """The same with encrypted rooms, in which Anna writes with a real client."""

    initial_state: ClassVar[list[dict[str, Any]]] = [
        {"type": "m.room.encryption", "state_key": "", "content": {"algorithm": "m.megolm.v1.aes-sha2"}}
    ]

    def __init__(self, server: Synapse, people: People) -> None:
        super().__init__(server)
        self.people = people

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EncryptedNetwork]:
        await asyncio.to_thread(self._begin)
        self.fingerprint = await asyncio.to_thread(self.use_client, self.anna)
        self.settings |= {"encryption": True}
        yield self
        await asyncio.to_thread(self.people.ask, "stop", self.anna["device_id"])

    def use_client(self, account: dict[str, Any]) -> str:
        """Run a client for a device of an account. Return its fingerprint."""
        known = [account[key] for key in ("user_id", "device_id", "access_token")]
        return str(self.people.ask("start", account["device_id"], self.server.url, *known))

    def tell(self, room: str, text: str, who: dict[str, Any] | None = None, **more: Any) -> str:
        """Write in a room, encrypted."""
        content = {"msgtype": "m.text", "body": text, **more}
        return str(self.people.ask("say", (who or self.anna)["device_id"], room, content, self.bot["user_id"]))

    def sent(self, room: str, who: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the bot's events in a room, as stored by the server."""
        path = f"{API}/rooms/{quote(room)}/messages?dir=b&limit=500"
        page = self.server.call("GET", path, None, (who or self.anna)["access_token"])
        mine = [one for one in page["chunk"][::-1] if one["sender"] == self.bot["user_id"]]
        return [one for one in mine if one["type"] in ("m.room.message", "m.room.encrypted")]

    def contents(self, room: str, who: dict[str, Any] | None = None) -> list[Any]:
        ids = [one["event_id"] for one in self.sent(room, who)]
        return list(self.people.ask("read", (who or self.anna)["device_id"], ids))

    async def say(self, chat: str, text: str) -> None:
        await asyncio.to_thread(self.tell, self.rooms[chat], text, self._people_of[chat])

    def upload(self, data: bytes) -> dict[str, Any]:
        return {"file": self.people.ask("upload", self.anna["device_id"], base64.b64encode(data).decode())}

    def send_file(self, name: str, kind: str, data: bytes) -> None:
        self.tell(self.rooms["1"], name, msgtype=kind, filename=name, **self.upload(data))

    def fetch(self, content: dict[str, Any]) -> bytes:
        return base64.b64decode(self.people.ask("download", self.anna["device_id"], content["file"]))

    def keys_of(self, account: dict[str, Any]) -> dict[str, str]:
        """Return the fingerprints of an account's devices, as known to the server."""
        user = account["user_id"]
        asked: dict[str, Any] = {"device_keys": {user: []}}
        found = self.server.call("POST", f"{API}/keys/query", asked, self.anna["access_token"])["device_keys"][user]
        return {id: one["keys"][f"ed25519:{id}"] for id, one in found.items()}

    def log_out(self, device: dict[str, Any]) -> None:
        self.people.ask("stop", device["device_id"])
        self.server.call("POST", f"{API}/logout", {}, device["access_token"])

    def repeat(self, who: dict[str, Any], room: str, event: str) -> None:
        """Send the content of an event once more, as another event."""
        path, token = f"{API}/rooms/{quote(room)}", who["access_token"]
        content = self.server.call("GET", f"{path}/event/{quote(event)}", None, token)["content"]
        self.server.call("PUT", f"{path}/send/m.room.encrypted/r{next(self._numbers)}", content, token)

    def turn_on_encryption(self, room: str) -> None:
        """Encrypt a room from now on, with a new key for each message."""
        content = {"algorithm": "m.megolm.v1.aes-sha2", "rotation_period_msgs": 1}
        self.server.call(
            "PUT", f"{API}/rooms/{quote(room)}/state/m.room.encryption/", content, self.anna["access_token"]
        )
