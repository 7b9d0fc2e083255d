"""A real XMPP server (prosody), and people on it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest

from everloop.channels.xmpp_stream import CLIENT, XmppStream, bare, element, within
from everloop.testing.channels import shown_file

from .hooks import free_port, server_process

PROSODY = shutil.which("prosody")
PASSWORD = "a-password-that-must-never-be-shown"
ROOM = "garden@rooms.localhost"
CONFIG = """
daemonize = false
run_as_root = true
pidfile = "{folder}/prosody.pid"
data_path = "{folder}/data"
certificates = "{folder}"
plugin_paths = {{}}
modules_enabled = {{ "roster", "saslauth", "tls", "disco", "ping", "mam", "presence", "message", "iq", "offline" }}
modules_disabled = {{ "s2s", "posix" }}
authentication = "internal_plain"
c2s_require_encryption = {encrypted}
allow_unencrypted_plain_auth = true
c2s_ports = {{ {port} }}
interfaces = {{ "127.0.0.1" }}
http_interfaces = {{ "127.0.0.1" }}
http_ports = {{ {http_port} }}
https_ports = {{ }}
http_default_host = "upload.localhost"
http_external_url = "http://127.0.0.1:{http_port}/"
log = {{ error = "*console" }}
VirtualHost "localhost"
{tls}
Component "rooms.localhost" "muc"
  modules_enabled = {{ "muc_mam" }}
  muc_log_by_default = true
  muc_room_default_public_jids = true
{uploads}
"""
UPLOADS = """
Component "upload.localhost" "http_file_share"
  http_file_share_size_limit = 1000000
"""


class XmppNetwork:
    """A server, a bot's account, and people who write to it."""

    def __init__(
        self, *, tls: tuple[Path, Path] | None = None, people: Sequence[str] = ("anna", "bert"), uploads: bool = True
    ) -> None:
        self.settings: dict[str, Any] = {}
        self.port = free_port()
        self._tls = tls
        self._names = tuple(people)
        self._uploads = UPLOADS if uploads else ""
        self._heard: defaultdict[str, list[str]] = defaultdict(list)
        self._people: dict[str, XmppPerson] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[XmppNetwork]:
        if PROSODY is None:
            pytest.skip("needs prosody (scripts/system.sh dev)")
        folder = Path(tempfile.mkdtemp(prefix="xmpp"))
        accounts = folder / "data" / "localhost" / "accounts"
        accounts.mkdir(parents=True)
        for name in ("ever", *self._names, "eve"):
            (accounts / f"{name}.dat").write_text(f'return {{ ["password"] = "{PASSWORD}"; }};\n')
        tls = ""
        if self._tls is not None:
            tls = f'ssl = {{ certificate = "{self._tls[0]}"; key = "{self._tls[1]}"; }}'
        encrypted = "true" if self._tls is not None else "false"
        (folder / "prosody.cfg.lua").write_text(
            CONFIG.format(
                folder=folder,
                port=self.port,
                http_port=free_port(),
                tls=tls,
                encrypted=encrypted,
                uploads=self._uploads,
            )
        )
        self.settings = {
            "name": "xmpp",
            "jid": "ever@localhost",
            "password": PASSWORD,
            "host": "127.0.0.1",
            "port": self.port,
            "tls": "none" if self._tls is None else "starttls",
            "start": "all",
            "allow": [f"{name}@localhost" for name in self._names],
        }
        async with server_process(PROSODY, "--config", str(folder / "prosody.cfg.lua"), port=self.port, folder=folder):
            try:
                yield self
            finally:
                for person in self._people.values():
                    await person.close()

    async def person(self, name: str) -> XmppPerson:
        if name not in self._people:
            made = self._people[name] = XmppPerson(name, self._heard)
            await made.connect(self.port)
        return self._people[name]

    async def say(self, chat: str, text: str) -> None:
        await (await self.person(chat.partition("@")[0])).tell("ever@localhost", text)

    def heard(self, chat: str) -> list[str]:
        return self._heard[chat]

    async def disturb(self) -> None:
        """Drop the connection, as when its process dies."""


class XmppPerson:
    """A client that writes, and records what it receives."""

    def __init__(self, name: str, heard: defaultdict[str, list[str]]) -> None:
        self.name = name
        self.presences: list[str] = []
        self.states: list[str] = []
        self.files: list[str] = []  # their addresses
        self._heard = heard

    async def connect(self, port: int) -> None:
        self._stream = XmppStream(f"{self.name}@localhost", PASSWORD, "127.0.0.1", port, "none")
        await self._stream.open(lambda: None)  # type: ignore[arg-type, return-value]
        self._task = asyncio.create_task(self._stream.run(self._take))
        self._stream.send(element(f"{CLIENT}presence"))
        await self._ping()

    async def join(self, room: str, nick: str = "", form: Mapping[str, str] | None = None) -> None:
        nick = nick or self.name
        muc = element("{http://jabber.org/protocol/muc}x")
        self.presences = [one for one in self.presences if one != f"{room}/{nick}"]
        self._stream.send(within(element(f"{CLIENT}presence", to=f"{room}/{nick}"), muc))
        async with asyncio.timeout(30):
            while f"{room}/{nick}" not in self.presences:
                await asyncio.sleep(0.01)
        # The creator of a room must open it.
        fields = {"FORM_TYPE": "http://jabber.org/protocol/muc#roomconfig", **form} if form else {}
        config = element("{jabber:x:data}x", type="submit")
        for name, value in fields.items():
            config.append(within(element("{jabber:x:data}field", var=name), element("{jabber:x:data}value", value)))
        await self._stream.ask("set", within(element("{http://jabber.org/protocol/muc#owner}query"), config), room)

    async def leave(self, room: str, nick: str = "") -> None:
        self._stream.send(element(f"{CLIENT}presence", to=f"{room}/{nick or self.name}", type="unavailable"))
        await self._ping()

    async def tell(self, to: str, text: str, kind: str = "chat", *, note: str = "", file: str = "") -> None:
        """Say something, perhaps with a forged note of the sender's address or the address of a file.

        The server has it when this returns.
        """
        message = element(f"{CLIENT}message", to=to, type=kind)
        if file:
            message.append(within(element("{jabber:x:oob}x"), element("{jabber:x:oob}url", file)))
        if note:
            x = element("{http://jabber.org/protocol/muc#user}x")
            message.append(within(x, element("{http://jabber.org/protocol/muc#user}item", jid=note)))
        self._stream.send(within(message, element(f"{CLIENT}body", text)))
        await self._ping()

    async def _ping(self) -> None:
        await self._stream.ask("get", element("{urn:xmpp:ping}ping"), "localhost")

    async def close(self) -> None:
        self._task.cancel()
        self._stream.close()
        await asyncio.gather(self._task, return_exceptions=True)

    def _take(self, stanza: ET.Element) -> None:
        sender = stanza.get("from", "")
        if stanza.tag == f"{CLIENT}presence":
            self.presences.append(sender)
            return
        if stanza.find("{http://jabber.org/protocol/chatstates}composing") is not None:
            self.states.append(bare(sender))
        text = stanza.findtext(f"{CLIENT}body")
        if text is None or stanza.get("type") == "error":
            return
        if url := stanza.findtext("{jabber:x:oob}x/{jabber:x:oob}url"):
            self.files.append(url)
            text = shown_file(unquote(url.rpartition("/")[2]))
        if stanza.get("type") != "groupchat":
            self._heard[f"{self.name}@localhost"].append(text)
        elif sender.endswith("/ever"):
            self._heard[bare(sender)].append(text)
