"""A real IRC server (ngircd), and a person on it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.irc import Line, parse

from .hooks import free_port, server_process

NGIRCD = shutil.which("ngircd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """[Global]
Name = irc.test
Info = A server for tests
Listen = 127.0.0.1
Ports = {port}
MotdPhrase = hello
{global_more}
[Limits]
MaxNickLength = 30
MaxConnectionsIP = 0
MaxPenaltyTime = 0
[Options]
DNS = no
Ident = no
PAM = no
SyslogFacility = local1
{more}
"""


class IrcNetwork:
    """A server, and a person who writes to the bot until it is there."""

    def __init__(self, *, tls: tuple[Path, Path] | None = None, password: str = "") -> None:
        self.settings: dict[str, Any] = {}
        self.port = free_port()
        self._tls, self._tls_port = tls, free_port()
        self._password = password
        self._heard: defaultdict[str, list[str]] = defaultdict(list)
        self._people: dict[str, Person] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[IrcNetwork]:
        if NGIRCD is None:
            pytest.skip("needs ngircd (scripts/system.sh dev)")
        folder = Path(tempfile.mkdtemp(prefix="irc"))
        folder.chmod(0o755)
        more = ""
        if self._tls is not None:
            for name, source in zip(("cert", "key"), self._tls, strict=True):
                (folder / name).write_bytes(source.read_bytes())
                (folder / name).chmod(0o644)
            more = f"[SSL]\nCertFile = {folder / 'cert'}\nKeyFile = {folder / 'key'}\nPorts = {self._tls_port}\n"
        password = f"Password = {self._password}" if self._password else ""
        (folder / "ngircd.conf").write_text(CONFIG.format(port=self.port, more=more, global_more=password))
        (folder / "ngircd.conf").chmod(0o644)
        self.settings = {
            "name": "irc",
            "server": "127.0.0.1",
            "port": self.port,
            "tls": False,
            "nick": "everbot",
            "allow": ["*"],
            "lines_per_second": 200,
        }
        if self._tls is not None:
            self.settings |= {"tls": True, "port": self._tls_port}
        async with server_process(NGIRCD, "-n", "-f", str(folder / "ngircd.conf"), port=self.port, folder=folder):
            try:
                yield self
            finally:
                for person in self._people.values():
                    await person.close()

    async def person(self, nick: str) -> Person:
        if nick not in self._people:
            made = self._people[nick] = Person(nick, self._heard)
            await made.connect(self.port, self._password)
        return self._people[nick]

    async def say(self, chat: str, text: str) -> None:
        await (await self.person(chat)).tell("everbot", text)

    def heard(self, chat: str) -> list[str]:
        return self._heard[chat]

    async def disturb(self) -> None:
        """Drop the connection, as when its process dies."""


class Person:
    """A separate client, which shares no code with the channel except how a line is parsed."""

    def __init__(self, nick: str, heard: defaultdict[str, list[str]]) -> None:
        self.nick = nick
        self.lines: list[Line] = []
        self._heard = heard
        self._answers: asyncio.Queue[Line] = asyncio.Queue()
        self._registered = asyncio.Event()

    async def connect(self, port: int, password: str = "") -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    await asyncio.sleep(0.02)
            if password:
                self.write(f"PASS {password}")
            self.write(f"NICK {self.nick}", f"USER {self.nick} 0 * :A person")
            self._task = asyncio.create_task(self._read())
            await self._registered.wait()

    def write(self, *lines: str) -> None:
        self._writer.write("".join(f"{line}\r\n" for line in lines).encode())

    async def tell(self, target: str, text: str) -> None:
        """Say something until the server knows the target."""
        async with asyncio.timeout(60):
            while True:
                self.write(f"PRIVMSG {target} :{text}", "PING :mark")
                answer = await self._answers.get()
                if answer.command == "PONG":
                    return
                while (await self._answers.get()).command != "PONG":
                    pass
                await asyncio.sleep(0.03)

    async def close(self) -> None:
        self._task.cancel()
        self._writer.transport.abort()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        while data := await self._reader.readline():
            line = parse(data.decode().rstrip("\r\n"))
            self.lines.append(line)
            match line.command:
                case "PING":
                    self.write(f"PONG :{line.params[-1]}")
                case "001":
                    self._registered.set()
                case "PRIVMSG":
                    target = line.params[0]
                    self._heard[target if target.startswith("#") else self.nick].append(line.params[1].strip())
                case "PONG" | "401" | "404":
                    self._answers.put_nowait(line)
