"""XMPP, with rooms (MUC), on the server's message archive (XEP-0313).

The archive has an id for each message. Messages that arrived while disconnected are read from it, starting after the
last id on disk. A part that may have been sent is looked up in the archive by its key before it is sent again.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple, cast
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree as ET

import msgspec

from ..text import one_line
from ..tools.web.fetch import PORTS, Fetcher, FetchError
from ..tools.web.urls import BadURL, parse_url
from .base import Attachment, Can, Inbox, Later, Never, NoFile, Options, OutgoingFile, Part, Received, tls_context
from .http import DOWNLOAD_SECONDS, UPLOAD_SECONDS, HttpClient
from .text import without_name
from .xmpp_stream import CLIENT, Security, XmppStream, bare, element, error_of, within

MAM, RSM = "{urn:xmpp:mam:2}", "{http://jabber.org/protocol/rsm}"
SID, DELAY, FORWARD = "{urn:xmpp:sid:0}", "{urn:xmpp:delay}", "{urn:xmpp:forward:0}"
DATA, PING = "{jabber:x:data}", "{urn:xmpp:ping}"
MUC, MUC_USER = "{http://jabber.org/protocol/muc}", "{http://jabber.org/protocol/muc#user}"
UPLOAD, OOB = "{urn:xmpp:http:upload:0}", "{jabber:x:oob}"
DISCO_INFO, DISCO_ITEMS = "{http://jabber.org/protocol/disco#info}", "{http://jabber.org/protocol/disco#items}"
STATES, HINTS = "{http://jabber.org/protocol/chatstates}", "{urn:xmpp:hints}"
ITS_OWN, PUBLIC = "110", "100"  # status codes of a presence: it is our own; the room reveals addresses
PAGE = 50
LOOKED_AT = 100  # the latest messages of a chat, among which a part is looked up
SEND_SECONDS = 30.0
UPLOAD_HEADERS = {"authorization", "cookie", "expires"}  # that the server may request for an upload
FILE_PORTS = (*PORTS, 5281, 5443, 7443)  # those of the web, and of XMPP servers
MAX_SERVICES = 20  # of a server that are asked whether they accept uploads


class Entry(NamedTuple):
    """A message of the archive."""

    id: str
    message: ET.Element


class Xmpp:
    """An account at an XMPP server."""

    can = Can(text=5000, form="plain", repeats="key", typing=True, media=100_000_000, case=False)

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._jid = options.text("jid")
        self._password = options.secret("password")
        self._host = options.text("host", "")
        self._security = cast(Security, options.text("tls", "starttls", choices=("starttls", "implicit", "none")))
        self._port = options.number("port", 5223 if self._security == "implicit" else 5222)
        self._ca_file = options.text("ca_file", "")
        self._rooms = tuple(bare(room) for room in options.texts("rooms"))
        self._nick = options.text("nick", bare(self._jid).partition("@")[0])
        self._private_hosts = options.texts("private_hosts")
        self._from_now = options.text("start", "new", choices=("new", "all")) == "new"
        for jid in (self._jid, *self._rooms):
            if not re.fullmatch(r"[^@/\s<>&'\"]+@[^@/\s<>&'\"]+", jid):
                raise options.problem(f"{jid!r} is no address such as name@example.org")
        self._stream: XmppStream | None = None
        self._connected = asyncio.Event()
        self._incoming: asyncio.Queue[tuple[ET.Element, str]] = asyncio.Queue()
        self._occupants: dict[str, str] = {}  # room/nick → the person's address, if the room reveals it
        self._public: set[str] = set()  # rooms that reveal addresses to everyone
        self._sent: dict[str, asyncio.Future[None]] = {}  # parts that wait for a reflection or an error, by key
        self._queries: dict[str, list[Entry]] = {}
        self._uploads: str | None = None  # the upload service; "" if there is none, None if unknown
        self._at: dict[str, str] = {}  # the last archive id of each archive; "" is the account's own

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        self._at = msgspec.json.decode(await inbox.cursor() or "{}", type=dict[str, str])
        self._incoming, self._uploads = asyncio.Queue(), None
        self._occupants.clear()
        self._public.clear()
        stream = await self._open()
        reading = asyncio.create_task(stream.run(self._sort))
        working = asyncio.create_task(self._work(stream, inbox))
        try:
            done, _ = await asyncio.wait({reading, working}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._connected.clear()
            for task in (reading, working):
                task.cancel()
            stream.close()
            for future in self._sent.values():
                if not future.done():
                    future.set_exception(OSError("the connection ended"))
            await asyncio.gather(reading, working, return_exceptions=True)

    async def check(self) -> str:
        """Connect and log in."""
        stream = await self._open()
        stream.close()
        return stream.jid

    async def _open(self) -> XmppStream:
        stream = XmppStream(self._jid, self._password, self._host, self._port, self._security)
        try:
            await stream.open(partial(tls_context, self._ca_file))
        except BaseException:
            stream.close()
            raise
        return stream

    async def _work(self, stream: XmppStream, inbox: Inbox) -> None:
        self._stream = stream
        stream.send(element(f"{CLIENT}presence"))  # before the archive is read, so that nothing is missed in between
        for room in self._rooms:
            history = element(f"{MUC}history", maxstanzas="0")
            join = within(element(f"{MUC}x"), history)
            stream.send(within(element(f"{CLIENT}presence", to=f"{room}/{self._nick}"), join))
        for archive in ("", *self._rooms):
            await self._catch_up(archive, inbox)
        await inbox.ready()
        self._connected.set()
        while True:
            stanza, person = await self._incoming.get()
            await self._take(stanza, person, inbox)

    def _sort(self, stanza: ET.Element) -> None:
        """Handle a stanza from the stream: presences and archive results at once, messages in order."""
        sender = stanza.get("from", "")
        if stanza.tag == f"{CLIENT}presence":
            self._note_occupant(stanza, sender)
        elif (result := stanza.find(f"{MAM}result")) is not None:
            archive, query = bare(sender) if sender else bare(self._jid), result.get("queryid", "")
            message = result.find(f"{FORWARD}forwarded/{CLIENT}message")
            if (found := self._queries.get(f"{archive} {query}")) is not None and message is not None:
                found.append(Entry(result.get("id", ""), message))
        else:
            self._settle(stanza, sender)
            # Look up the nick now: when the message is processed, it may belong to another person.
            self._incoming.put_nowait((stanza, self._occupants.get(sender, "")))

    def _note_occupant(self, stanza: ET.Element, sender: str) -> None:
        item = stanza.find(f"{MUC_USER}x/{MUC_USER}item")
        if bare(sender) not in self._rooms or item is None:
            return
        statuses = {one.get("code") for one in stanza.findall(f"{MUC_USER}x/{MUC_USER}status")}
        if ITS_OWN in statuses:
            (self._public.add if PUBLIC in statuses else self._public.discard)(bare(sender))
        if stanza.get("type") == "unavailable":
            self._occupants.pop(sender, None)
        elif jid := item.get("jid"):
            self._occupants[sender] = bare(jid)

    def _settle(self, stanza: ET.Element, sender: str) -> None:
        """Complete the send of a part that a room has reflected or the server has refused."""
        future = self._sent.get(stanza.get("id", ""))
        if future is None or future.done():
            return
        if stanza.get("type") == "error":
            future.set_exception(Never(error_of(stanza)))
        elif stanza.get("type") == "groupchat" and bare(sender) in self._rooms:
            future.set_result(None)

    async def _take(self, stanza: ET.Element, person: str, inbox: Inbox) -> None:
        """Process a live message; `person` is its author's address in a room, if the room reveals it."""
        room = bare(stanza.get("from", ""))
        archive = room if stanza.get("type") == "groupchat" else ""
        own = archive or bare(self._jid)
        ids = [one.get("id", "") for one in stanza.findall(f"{SID}stanza-id") if bare(one.get("by", "")) == own]
        delays = {bare(one.get("from", "")) for one in stanza.findall(f"{DELAY}delay")}
        if not archive and delays & {own, own.partition("@")[2]}:
            return  # it was stored until the account connected, so it is in the archive
        await self._accept(archive, ids[0] if ids else "", stanza, person, inbox)

    async def _accept(self, archive: str, id: str, stanza: ET.Element, person: str, inbox: Inbox) -> None:
        message = self._received(archive, id, stanza, person)
        if message is not None:
            await inbox.accept(message)
        if id:
            self._at[archive] = id
        if id and message is not None and (message.mentioned or not message.group):
            await inbox.keep_cursor(msgspec.json.encode(self._at).decode())

    def _received(self, archive: str, id: str, stanza: ET.Element, person: str) -> Received | None:
        kind, sender = stanza.get("type", "normal"), stanza.get("from", "")
        text = (stanza.findtext(f"{CLIENT}body") or "").strip()
        if not text or not sender or kind not in ("chat", "normal", "groupchat"):
            return None
        files = self._files(stanza)
        if files and text == files[0][1]:  # a fallback for clients that do not support files
            text = ""
        attached = tuple(Attachment(name, partial(self._download, url)) for name, url in files)
        network_id = id or f"{sender}:{stanza.get('id', '')}" if id or stanza.get("id") else None
        if kind == "groupchat":
            room, _, nick = sender.partition("/")
            if bare(room) not in self._rooms or not nick or nick == self._nick:
                return None
            text, mentioned = without_name(text, self._nick)
            return Received(
                id=network_id,
                chat=bare(room),
                sender=person or sender,
                name=nick,
                text=text,
                group=True,
                mentioned=mentioned,
                files=attached,
            )
        if bare(sender) in self._rooms or bare(sender) == bare(self._jid) or archive:
            return None  # private messages through a room have no trustworthy address
        return Received(id=network_id, chat=bare(sender), sender=bare(sender), text=text, files=attached)

    def _files(self, stanza: ET.Element) -> list[tuple[str, str]]:
        """Return the names and addresses of a message's files (XEP-0066)."""
        urls = [(one.text or "").strip() for one in stanza.findall(f"{OOB}x/{OOB}url")]
        return [(unquote(urlsplit(url).path.rpartition("/")[2]), url) for url in urls if self._is_safe(url)]

    async def _download(self, url: str, limit: int) -> bytes:
        """Download a file from an address that a person sent, if it is public or listed."""
        fetcher = Fetcher(
            private_hosts=self._private_hosts, ports=FILE_PORTS, timeout=DOWNLOAD_SECONDS, max_bytes=limit
        )
        try:
            page = await fetcher.get(parse_url(url))
        except (BadURL, FetchError) as error:
            raise Never(str(error)) from None
        if not 200 <= page.status < 300:
            raise Never(f"HTTP {page.status}")
        return bytes(limit + 1) if page.cut else page.body

    # ------------------------------------------------------------------------------------------ the archive

    async def _catch_up(self, archive: str, inbox: Inbox) -> None:
        """Process what an archive has received since the last accepted message."""
        if archive not in self._at and self._from_now:
            async for entry in self._pages(archive, before="", most=1):
                self._at[archive] = entry.id
            self._at.setdefault(archive, "")
            await inbox.keep_cursor(msgspec.json.encode(self._at).decode())
            return
        async for entry in self._pages(archive, after=self._at.get(archive, "")):
            person = self._archived_person(archive, entry.message)
            await self._accept(archive, entry.id, entry.message, person, inbox)

    def _archived_person(self, room: str, message: ET.Element) -> str:
        """Return the author's address as recorded with an archived room message.

        The nick is no evidence: it may belong to another person by now. Only a room that reveals addresses records them
        itself; in others the sender may have forged the record.
        """
        noted = [bare(jid) for one in message.findall(f"{MUC_USER}x/{MUC_USER}item") if (jid := one.get("jid"))]
        return noted[0] if room in self._public and len(noted) == 1 else ""

    async def _pages(
        self, archive: str, *, after: str = "", before: str | None = None, most: int = PAGE, chat: str = ""
    ) -> AsyncIterator[Entry]:
        """Yield the messages of an archive after an id or, with `before`, only the last ones."""
        assert self._stream is not None
        while True:
            form = within(
                element(f"{DATA}x", type="submit"),
                within(element(f"{DATA}field", var="FORM_TYPE"), element(f"{DATA}value", MAM[1:-1])),
            )
            if chat:
                form.append(within(element(f"{DATA}field", var="with"), element(f"{DATA}value", chat)))
            pages = within(element(f"{RSM}set"), element(f"{RSM}max", str(most)))
            if before is not None:
                pages.append(element(f"{RSM}before", before))
            elif after:
                pages.append(element(f"{RSM}after", after))
            query_id = secrets.token_hex(8)
            key = f"{archive or bare(self._jid)} {query_id}"
            found = self._queries[key] = []
            try:
                query = within(element(f"{MAM}query", queryid=query_id), form, pages)
                answer = await self._stream.ask("set", query, archive)
            finally:
                self._queries.pop(key, None)
            if answer.get("type") == "error":
                if archive:
                    return  # a room without an archive: messages sent while disconnected are lost
                if "item-not-found" in error_of(answer) and after:  # the archive has expired the last id
                    after = ""
                    continue
                raise Never("the server keeps no archive of messages (XEP-0313), which this channel needs")
            for entry in found:
                yield entry
            fin = answer.find(f"{MAM}fin")
            if not found or before is not None or (fin is not None and fin.get("complete") == "true"):
                return
            after = found[-1].id

    async def _is_sent(self, part: Part, key: str) -> bool:
        """Return whether the archive has a part."""
        is_room = part.chat in self._rooms
        where, chat = (part.chat, "") if is_room else ("", part.chat)
        async for entry in self._pages(where, before="", most=LOOKED_AT, chat=chat):
            origin = entry.message.find(f"{SID}origin-id")
            if entry.message.get("id") == key or (origin is not None and origin.get("id") == key):
                return True
        return False

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        stream = self._stream
        if not self._connected.is_set() or stream is None:
            raise Later(1.0, "not connected")
        if part.repeat and await self._is_sent(part, key):
            return key
        words = [element(f"{CLIENT}body", part.text)]
        if part.files:
            url = await self._upload(stream, part.files[0])
            words = [element(f"{CLIENT}body", url), within(element(f"{OOB}x"), element(f"{OOB}url", url))]
        is_room = part.chat in self._rooms
        kind = "groupchat" if is_room else "chat"
        future = self._sent[key] = asyncio.get_running_loop().create_future()
        try:
            message = element(f"{CLIENT}message", type=kind, to=part.chat, id=key)
            stream.send(within(message, *words, element(f"{SID}origin-id", id=key)))
            async with asyncio.timeout(SEND_SECONDS):
                if is_room:
                    await future
                else:
                    # The server handles stanzas in order: its answer confirms the message before.
                    await stream.ask("get", element(f"{PING}ping"), bare(self._jid).partition("@")[2])
            if future.done():
                future.result()
        finally:
            del self._sent[key]
        return key

    async def _upload(self, stream: XmppStream, file: OutgoingFile) -> str:
        """Upload a file (XEP-0363) and return its address. It is invisible until the address is sent."""
        if self._uploads is None:
            self._uploads = await self._find_uploads(stream)
        if not self._uploads:
            raise NoFile("the server takes no files")
        asked = {"filename": file.name, "size": str(len(file.data)), "content-type": file.type}
        answer = await stream.ask("get", element(f"{UPLOAD}request", **asked), self._uploads)
        if answer.get("type") == "error":
            raise NoFile(f"the server refuses it: {error_of(answer)}")
        put, got = answer.find(f"{UPLOAD}slot/{UPLOAD}put"), answer.find(f"{UPLOAD}slot/{UPLOAD}get")
        if put is None or got is None or not self._is_safe(put.get("url", "")) or not got.get("url"):
            raise NoFile("the server gives it no safe place")
        headers = {one.get("name", ""): one.text or "" for one in put.findall(f"{UPLOAD}header")}
        headers = {name: value for name, value in headers.items() if name.lower() in UPLOAD_HEADERS}
        try:
            client = HttpClient(put.get("url", ""))
            sent = {**headers, "Content-Type": file.type}
            try:
                reply = await client.request("PUT", client.target, sent, file.data, UPLOAD_SECONDS)
            finally:
                await client.close()
        except (OSError, TimeoutError, ValueError) as error:
            raise Later(5.0, f"the upload failed: {one_line(str(error), 100)}") from None
        if not 200 <= reply.status < 300:
            raise Later(reply.retry_after or 5.0, f"the upload failed: HTTP {reply.status}")
        return got.get("url", "")

    def _is_safe(self, url: str) -> bool:
        """Return whether a file may be transferred over this address: over TLS, unless the account uses none."""
        return url.startswith("https://") or (self._security == "none" and url.startswith("http://"))

    async def _find_uploads(self, stream: XmppStream) -> str:
        """Return the server's upload service; "" if there is none."""
        domain = bare(self._jid).partition("@")[2]
        items = await stream.ask("get", element(f"{DISCO_ITEMS}query"), domain)
        services = [one.get("jid", "") for one in items.findall(f"{DISCO_ITEMS}query/{DISCO_ITEMS}item")]
        for service in [domain, *filter(None, services)][:MAX_SERVICES]:
            info = await stream.ask("get", element(f"{DISCO_INFO}query"), service)
            features = {one.get("var") for one in info.findall(f"{DISCO_INFO}query/{DISCO_INFO}feature")}
            if UPLOAD[1:-1] in features:
                return service
        return ""

    async def show(self, chat: str, key: str, text: str) -> None:
        if self._stream is None or not self._connected.is_set() or chat in self._rooms:
            return
        message = element(f"{CLIENT}message", type="chat", to=chat)
        self._stream.send(within(message, element(f"{STATES}composing"), element(f"{HINTS}no-store")))
