"""An XMPP stream: connecting, TLS, SASL, and stanzas in and out."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Literal
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape, quoteattr

from ..text import one_line
from .base import Never, fold_case

CLIENT, STREAM = "{jabber:client}", "{http://etherx.jabber.org/streams}"
TLS, SASL = "{urn:ietf:params:xml:ns:xmpp-tls}", "{urn:ietf:params:xml:ns:xmpp-sasl}"
BIND = "{urn:ietf:params:xml:ns:xmpp-bind}"
CONNECT_SECONDS = 30.0
IQ_SECONDS = 30.0
SILENT_SECONDS = 90.0  # after which the server is sent a ping
MAX_STANZA = 4 * 1024 * 1024
Security = Literal["starttls", "implicit", "none"]
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(tag: str, text: str = "", **attributes: str) -> ET.Element:
    """Return an element with a text, without characters that XML does not allow."""
    made = ET.Element(tag, {name: _NOT_XML.sub("", value) for name, value in attributes.items()})
    made.text = _NOT_XML.sub("", text) or None
    return made


def within(parent: ET.Element, *children: ET.Element) -> ET.Element:
    parent.extend(children)
    return parent


def bare(jid: str) -> str:
    return fold_case(jid.partition("/")[0])


def serialized(stanza: ET.Element, inside: str = CLIENT[1:-1]) -> str:
    """Serialize an element without namespace prefixes, which servers need not support in a stream."""
    space, _, name = stanza.tag[1:].partition("}")
    attributes = dict(stanza.attrib) if space == inside else {"xmlns": space, **stanza.attrib}
    words = "".join(f" {key}={quoteattr(value)}" for key, value in attributes.items())
    within_it = escape(stanza.text or "") + "".join(serialized(child, space) for child in stanza)
    return f"<{name}{words}>{within_it}</{name}>" if within_it else f"<{name}{words}/>"


class Stanzas:
    """Splits the bytes of a stream into elements."""

    def __init__(self) -> None:
        self._parser: Any = ET.XMLPullParser(("start", "end"))
        self._root: ET.Element | None = None
        self._depth = self._size = 0

    def feed(self, data: bytes) -> Iterator[ET.Element]:
        self._size += len(data)
        if b"<!DOCTYPE" in data or b"<!ENTITY" in data or self._size > MAX_STANZA:
            raise OSError("the server sent something that is not allowed in a stream")
        try:
            self._parser.feed(data)
            events: list[tuple[str, ET.Element]] = list(self._parser.read_events())
        except ET.ParseError as error:
            raise OSError(f"the server sent no XML: {error}") from None
        for event, found in events:
            if event == "start":
                self._depth += 1
                self._root = self._root if self._root is not None else found
                continue
            self._depth -= 1
            if self._depth == 1:
                self._size = 0
                yield found
                assert self._root is not None
                self._root.clear()
            elif self._depth == 0:
                raise OSError("the server ended the stream")


class XmppStream:
    """A connection to an account's server."""

    def __init__(self, jid: str, password: str, host: str, port: int, security: Security) -> None:
        self.jid = jid  # with the resource, once it is bound
        self._user, _, self._domain = bare(jid).partition("@")
        self._password = password
        self._address = (host or self._domain, port)
        self._security = security
        self._stanzas = Stanzas()
        self._ready: list[ET.Element] = []
        self._waiting: dict[str, asyncio.Future[ET.Element]] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    # ------------------------------------------------------------------------------------------ connecting

    async def open(self, context: Callable[[], ssl.SSLContext]) -> None:
        """Connect, log in and bind a resource. `context` makes the TLS context, if one is needed."""
        async with asyncio.timeout(CONNECT_SECONDS):
            made = await asyncio.to_thread(context) if self._security != "none" else None
            implicit = made if self._security == "implicit" else None
            self._reader, self._writer = await asyncio.open_connection(*self._address, ssl=implicit)
            features = await self._restart()
            if self._security == "starttls" and made is not None:
                if features.find(f"{TLS}starttls") is None:
                    raise Never('the server offers no TLS: tls = "none" would send the password in the clear')
                self._write("<starttls xmlns='urn:ietf:params:xml:ns:xmpp-tls'/>")
                if (await self.read()).tag != f"{TLS}proceed":
                    raise OSError("the server refuses TLS")
                await self._writer.start_tls(made, server_hostname=self._domain)
                features = await self._restart()
            await self._log_in({one.text or "" for one in features.iter(f"{SASL}mechanism")})
            await self._restart()
            bind = within(element(f"{BIND}bind"), element(f"{BIND}resource", f"everloop-{secrets.token_hex(4)}"))
            self.send(within(element(f"{CLIENT}iq", type="set", id="bind"), bind))
            bound = (await self.read()).find(f".//{BIND}jid")
            if bound is None or not bound.text:
                raise OSError("the server binds no resource")
            self.jid = bound.text

    async def _restart(self) -> ET.Element:
        """Begin a stream, and return the server's features."""
        self._stanzas, self._ready = Stanzas(), []
        self._write(
            f"<?xml version='1.0'?><stream:stream to={quoteattr(self._domain)} version='1.0' "
            "xmlns='jabber:client' xmlns:stream='http://etherx.jabber.org/streams'>"
        )
        features = await self.read()
        if features.tag != f"{STREAM}features":
            raise OSError(_failure(features))
        return features

    async def _log_in(self, offered: set[str]) -> None:
        for name, digest in (("SCRAM-SHA-256", "sha256"), ("SCRAM-SHA-1", "sha1")):
            if name in offered:
                await self._scram(name, digest)
                return
        if "PLAIN" not in offered:
            raise Never("the server offers no login method that is supported here")
        await self._auth("PLAIN", f"\0{self._user}\0{self._password}")
        await self._success()

    async def _scram(self, name: str, digest: str) -> None:
        def mac(key: bytes, text: str) -> bytes:
            return hmac.new(key, text.encode(), digest).digest()

        nonce = secrets.token_urlsafe(24)
        user = self._user.replace("=", "=3D").replace(",", "=2C")
        first = f"n={user},r={nonce}"
        await self._auth(name, f"n,,{first}")
        challenge = await self._success(f"{SASL}challenge")
        given = dict(part.split("=", 1) for part in challenge.split(",") if "=" in part)
        if not given.get("r", "").startswith(nonce) or not given.get("i", "").isdecimal():
            raise OSError("the server's challenge does not belong to this login")
        salt, rounds = base64.b64decode(given["s"]), min(int(given["i"]), 1_000_000)
        salted = await asyncio.to_thread(hashlib.pbkdf2_hmac, digest, self._password.encode(), salt, rounds)
        key = mac(salted, "Client Key")
        last = f"c=biws,r={given['r']}"
        signed = f"{first},{challenge},{last}"
        proof = bytes(
            one ^ other for one, other in zip(key, mac(hashlib.new(digest, key).digest(), signed), strict=True)
        )
        text = base64.b64encode(f"{last},p={base64.b64encode(proof).decode()}".encode()).decode()
        self._write(f"<response xmlns='urn:ietf:params:xml:ns:xmpp-sasl'>{text}</response>")
        proved = base64.b64encode(mac(mac(salted, "Server Key"), signed)).decode()
        if f"v={proved}" not in (await self._success()).split(","):
            raise Never("the server does not know the password: it is not the one of this account")

    async def _auth(self, mechanism: str, text: str) -> None:
        encoded = base64.b64encode(text.encode()).decode()
        self._write(f"<auth xmlns='urn:ietf:params:xml:ns:xmpp-sasl' mechanism='{mechanism}'>{encoded}</auth>")

    async def _success(self, tag: str = f"{SASL}success") -> str:
        answer = await self.read()
        if answer.tag != tag:
            raise Never(f"the server refuses the account or its password ({_failure(answer)})")
        return base64.b64decode(answer.text or "").decode("utf-8", "replace")

    # ------------------------------------------------------------------------------------------ stanzas

    async def run(self, take: Callable[[ET.Element], None]) -> None:
        """Read until the connection ends; answers go to `ask`, and everything else to `take`."""
        while True:
            stanza = await self._read_or_ping()
            if stanza.tag == f"{CLIENT}iq":
                self._take_iq(stanza)
            elif stanza.tag in (f"{CLIENT}message", f"{CLIENT}presence"):
                take(stanza)
            elif stanza.tag == f"{STREAM}error":
                raise OSError(_failure(stanza))

    def _take_iq(self, stanza: ET.Element) -> None:
        id, kind = stanza.get("id", ""), stanza.get("type")
        if kind in ("result", "error"):
            key = f"{bare(stanza.get('from', '') or self.jid)} {id}"
            if (future := self._waiting.pop(key, None)) is not None and not future.done():
                future.set_result(stanza)
        elif stanza.find("{urn:xmpp:ping}ping") is not None and bare(stanza.get("from", "")) in ("", self._domain):
            self.send(element(f"{CLIENT}iq", type="result", id=id, to=stanza.get("from", "")))

    async def _read_or_ping(self) -> ET.Element:
        for last in (False, True):
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    return await self.read()
            except TimeoutError:
                if last:
                    raise OSError(f"the server was silent for {2 * SILENT_SECONDS:g} s") from None
                self.send(within(element(f"{CLIENT}iq", type="get", id="alive"), element("{urn:xmpp:ping}ping")))
        raise AssertionError("not reached")

    async def read(self) -> ET.Element:
        """Return the next element of the stream."""
        assert self._reader is not None
        while not self._ready:
            if not (data := await self._reader.read(65536)):
                raise OSError("the server closed the connection")
            self._ready.extend(self._stanzas.feed(data))
        return self._ready.pop(0)

    async def ask(self, kind: str, child: ET.Element, to: str = "") -> ET.Element:
        """Send a request and return its answer, which may be an error."""
        id = secrets.token_hex(8)
        iq = element(f"{CLIENT}iq", type=kind, id=id, **({"to": to} if to else {}))
        key = f"{bare(to or self.jid)} {id}"
        future: asyncio.Future[ET.Element] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            self.send(within(iq, child))
            async with asyncio.timeout(IQ_SECONDS):
                return await future
        finally:
            self._waiting.pop(key, None)

    def send(self, stanza: ET.Element) -> None:
        self._write(serialized(stanza))

    def _write(self, text: str) -> None:
        if self._writer is None or self._writer.is_closing():
            raise OSError("not connected")
        self._writer.write(text.encode())

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(OSError("the connection ended"))


def _failure(stanza: ET.Element) -> str:
    """Return the text of a failure or an error."""
    words = [
        child.text if child.tag.endswith("}text") and child.text else child.tag.partition("}")[2]
        for child in stanza.iter()
        if child is not stanza
    ]
    return one_line(" ".join(words), 200) or stanza.tag.partition("}")[2]


def error_of(stanza: ET.Element) -> str:
    """Return the condition of an error stanza."""
    found = stanza.find(f"{CLIENT}error")
    return _failure(found) if found is not None else "error"
