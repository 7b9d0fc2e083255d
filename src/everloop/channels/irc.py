"""IRC, over TLS and with SASL.

IRC has neither message ids nor acknowledgements. Incoming messages are accepted at most once, and only while connected.
An outgoing line is followed by a PING: the PONG confirms that the server has read the line; an error would come first.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..text import one_line
from ..threads import in_thread
from .base import Can, Inbox, Later, Never, Options, Part, Received, fold_case, tls_context
from .text import without_name

CONNECT_SECONDS = 30.0
SEND_SECONDS = 30.0
SILENT_SECONDS = 120.0  # after which the server is sent a PING
BURST = 5  # lines sent at once; further ones are paced, because servers disconnect clients that flood
MAX_LINE = 8191 + 512  # tags and message
CAPABILITIES = ("account-tag", "message-tags")
REFUSED = {"401", "402", "403", "404", "405", "407", "411", "412", "437", "439", "477", "482", "486", "489"}
_UNESCAPED = {":": ";", "s": " ", "r": "\r", "n": "\n", "\\": "\\"}


@dataclass(slots=True)
class Line:
    """A message of the protocol."""

    command: str
    params: list[str] = field(default_factory=list)
    source: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def nick(self) -> str:
        return self.source.partition("!")[0]


def parse(text: str) -> Line:
    """Parse a line of the protocol. The command is empty if there is none."""
    tags: dict[str, str] = {}
    source = ""
    if text.startswith("@"):
        given, _, text = text[1:].partition(" ")
        for tag in given.split(";"):
            name, _, value = tag.partition("=")
            tags[name] = re.sub(r"\\(.?)", lambda found: _UNESCAPED.get(found[1], found[1]), value)
    text = text.lstrip(" ")
    if text.startswith(":"):
        source, _, text = text[1:].partition(" ")
    head, colon, last = text.lstrip(" ").partition(" :")
    words = head.split()
    if colon:
        words.append(last)
    return Line(words[0].upper() if words else "", words[1:], source, tags)


class Irc:
    """An account at an IRC network."""

    can = Can(text=400, unit="bytes", lines=False, form="plain", repeats="none", ids=False, case=False, nicks=True)

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._host = options.text("server")
        self._tls = options.flag("tls", True)
        self._port = options.number("port", 6697 if self._tls else 6667)
        self._ca_file = options.text("ca_file", "")
        self._nick = options.text("nick")
        self._join = options.texts("join")
        self._lines_per_second = options.number("lines_per_second", 1)
        self._account = options.text("account", "")
        self._password = options.secret("password", "")
        if self._account and not self._password:
            raise options.problem("account needs a password, for SASL")
        if not self._lines_per_second:
            raise options.problem("lines_per_second must be at least 1")
        for word in (self._nick, *self._join):
            if not word or re.search(r"[\s,:\0\x07]", word) or not word.isprintable():
                raise options.problem(f"{word!r} can be neither a nick nor a channel")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._me = self._nick
        self._connected = asyncio.Event()
        self._sending = asyncio.Lock()
        self._pong: asyncio.Future[None] | None = None
        self._pong_key = ""
        self._allowance, self._paid_at = float(BURST), 0.0

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        try:
            await self._connect()
            await self._register()
            await inbox.ready()
            self._connected.set()
            while True:
                line = await self._next()
                if (message := self._received(line)) is not None:
                    await inbox.accept(message)
        finally:
            self._disconnect()

    async def check(self) -> str:
        """Connect and register."""
        try:
            await self._connect()
            await self._register()
            return f"{self._me} at {self._host}"
        finally:
            self._disconnect()

    async def _connect(self) -> None:
        context = await in_thread(tls_context, self._ca_file) if self._tls else None
        async with asyncio.timeout(CONNECT_SECONDS):
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, ssl=context, limit=MAX_LINE
            )

    def _disconnect(self) -> None:
        self._connected.clear()
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None
        if self._pong is not None and not self._pong.done():
            self._pong.set_exception(OSError("the connection ended"))

    async def _register(self) -> None:
        """Negotiate capabilities, log in, and join the channels."""
        await self._write("CAP LS 302")
        if self._password and not self._account:
            await self._write(f"PASS {self._password}")
        await self._write(f"NICK {self._nick}", f"USER {self._nick} 0 * :{self._nick}")
        offered: set[str] = set()
        async with asyncio.timeout(CONNECT_SECONDS):
            while True:
                line = await self._next()
                match line.command:
                    case "CAP":
                        await self._negotiate(line, offered)
                    case "AUTHENTICATE":
                        word = f"\0{self._account}\0{self._password}".encode()
                        await self._write(f"AUTHENTICATE {base64.b64encode(word).decode()}")
                    case "903":
                        await self._write("CAP END")
                    case "902" | "904" | "905" | "906" | "908":
                        raise Never("the server refuses the account or its password (SASL)")
                    case "464" | "465":
                        raise Never(f"the server refuses: {one_line(line.params[-1], 100)}")
                    case "432" | "433" | "436":
                        raise OSError(f"the nick {self._nick} cannot be used: {one_line(line.params[-1], 100)}")
                    case "421" if "CAP" in line.params:  # an old server without capabilities
                        self._needs_no_sasl()
                    case "001":
                        self._me = line.params[0]
                        break
        for channel in self._join:
            await self._write(f"JOIN {channel}")

    async def _negotiate(self, line: Line, offered: set[str]) -> None:
        match line.params[1:]:
            case ["LS", "*", names]:
                offered.update(name.partition("=")[0] for name in names.split())
            case ["LS", names]:
                offered.update(name.partition("=")[0] for name in names.split())
                if self._account and "sasl" not in offered:
                    self._needs_no_sasl()
                wanted = [name for name in CAPABILITIES if name in offered] + (["sasl"] if self._account else [])
                await self._write(f"CAP REQ :{' '.join(wanted)}" if wanted else "CAP END")
            case ["ACK", names] if "sasl" in names.split():
                await self._write("AUTHENTICATE PLAIN")
            case ["ACK" | "NAK", *_]:
                await self._write("CAP END")

    def _needs_no_sasl(self) -> None:
        if self._account:
            raise Never("the server offers no SASL: remove `account`, or use another server")

    async def _next(self) -> Line:
        """Return the next line for the caller; pings and pongs are handled here."""
        while True:
            line = parse(await self._read())
            if line.command == "PING":
                await self._write(f"PONG :{line.params[-1] if line.params else ''}")
            elif line.command == "PONG":
                if self._pong is not None and not self._pong.done() and line.params[-1:] == [self._pong_key]:
                    self._pong.set_result(None)
            elif line.command == "ERROR":
                raise OSError(one_line(" ".join(line.params), 200))
            elif line.command in REFUSED and self._pong is not None:
                if not self._pong.done():
                    self._pong.set_exception(Never(f"{line.command} {one_line(line.params[-1], 100)}"))
            else:
                return line

    async def _read(self) -> str:
        assert self._reader is not None
        for last in (False, True):
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    data = await self._reader.readuntil(b"\n")
                return data.decode("utf-8", "replace").rstrip("\r\n")
            except asyncio.IncompleteReadError:
                raise OSError("the server closed the connection") from None
            except asyncio.LimitOverrunError:
                raise OSError("the server sent a line without an end") from None
            except TimeoutError:
                if last:
                    raise OSError(f"the server was silent for {2 * SILENT_SECONDS:g} s") from None
                await self._write("PING :still-there")
        raise AssertionError("not reached")

    async def _write(self, *lines: str) -> None:
        if self._writer is None:
            raise OSError("not connected")
        for line in lines:
            if re.search(r"[\r\n\0]", line):  # a second command could follow
                raise Never("a line contains a line end")
        self._writer.write("".join(f"{line}\r\n" for line in lines).encode())
        await self._writer.drain()

    def _received(self, line: Line) -> Received | None:
        if line.command != "PRIVMSG" or len(line.params) < 2 or "!" not in line.source:
            return None
        target, text = line.params[0], line.params[1]
        if text.startswith("\x01"):
            if not text.startswith("\x01ACTION "):
                return None
            text = text.strip("\x01").removeprefix("ACTION ")
        text = re.sub(r"\x03(?:\d{1,2}(?:,\d{1,2})?)?|[\x02\x0f\x11\x16\x1d\x1e\x1f]", "", text)
        target = fold_case(target)  # channel names are case-insensitive
        group = target != fold_case(self._me)
        text, mentioned = without_name(text, self._me)
        return Received(
            chat=target if group else line.nick,
            sender=line.tags.get("account") or line.source,
            name=line.nick,
            text=text,
            group=group,
            mentioned=mentioned,
        )

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        if not self._connected.is_set():
            raise Later(1.0, "not connected")
        if re.search(r"[\s,\0\x07]", part.chat) or part.chat.startswith(":"):
            raise Never("that can be neither a nick nor a channel")
        async with self._sending:
            await self._pace()
            self._pong, self._pong_key = asyncio.get_running_loop().create_future(), key
            try:
                await self._write(f"PRIVMSG {part.chat} :{_safe(part.text)}", f"PING :{key}")
                async with asyncio.timeout(SEND_SECONDS):
                    await self._pong
            finally:
                self._pong = None
        return key

    async def _pace(self) -> None:
        now = asyncio.get_running_loop().time()
        self._allowance = min(float(BURST), self._allowance + (now - self._paid_at) * self._lines_per_second)
        self._paid_at = now
        if self._allowance < 1:
            await asyncio.sleep((1 - self._allowance) / self._lines_per_second)
        self._allowance -= 1

    async def show(self, chat: str, key: str, text: str) -> None:
        """Nothing is shown before the answer."""


def _safe(text: str) -> str:
    """Return the text without control characters, which could start another command."""
    return "".join(_letters(text))


def _letters(text: str) -> Iterator[str]:
    for letter in text:
        yield letter if letter >= " " else " "
