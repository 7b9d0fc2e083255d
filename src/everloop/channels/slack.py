"""Slack, by Socket Mode (an app token) or by events over HTTP (a signing secret).

An event is acknowledged when its message is on disk; Slack delivers it again until then. Slack recognises no
repeats, so a possible repeat is marked in its text.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlencode

import msgspec

from ..text import one_line
from .base import Attachment, Can, Inbox, Later, Never, NoFile, Options, Part, Received
from .http import HttpClient, connected, download_from, header_bytes, listening, upload_to

if TYPE_CHECKING:
    from aiohttp import web

API = "https://slack.com/api"
CALL_SECONDS = 30.0
HEARTBEAT_SECONDS = 30.0
FRESH_SECONDS = 300.0  # how old a signed request may be
MAX_SECTION = 3000  # characters in a block of text
MAX_NAMES = 1000
TEMPORARY = {"internal_error", "fatal_error", "service_unavailable", "request_timeout", "team_added_to_org"}
WRITTEN_BY_PEOPLE = {"", "file_share", "thread_broadcast", "me_message"}
FORM = "application/x-www-form-urlencoded"
T = TypeVar("T")


class File(msgspec.Struct):
    name: str = "file"
    size: int | None = None
    url_private_download: str = ""


class Event(msgspec.Struct):
    """A message, or a mention of the app. A message that mentions the app causes both events."""

    type: str = ""
    subtype: str = ""
    channel: str = ""
    channel_type: str = ""
    user: str = ""
    bot_id: str = ""
    text: str = ""
    ts: str = ""
    thread_ts: str = ""
    parent_user_id: str = ""
    files: list[File] = []


class Id(msgspec.Struct):
    id: str = ""


class Pressed(msgspec.Struct):
    value: str = ""
    action_ts: str = ""


class Place(msgspec.Struct):
    ts: str = ""
    thread_ts: str = ""
    text: str = ""
    blocks: list[dict[str, Any]] = []


class Payload(msgspec.Struct):
    """The payload of an event or a pressed button."""

    type: str = ""
    challenge: str = ""
    event: Event = msgspec.field(default_factory=Event)
    user: Id = msgspec.field(default_factory=Id)
    channel: Id = msgspec.field(default_factory=Id)
    message: Place = msgspec.field(default_factory=Place)
    actions: list[Pressed] = []


class Envelope(msgspec.Struct):
    """A frame of Socket Mode."""

    type: str = ""
    envelope_id: str = ""
    payload: msgspec.Raw = msgspec.Raw(b"{}")


class Outcome(msgspec.Struct):
    ok: bool
    error: str = ""


class Me(msgspec.Struct):
    user_id: str
    user: str = ""
    team: str = ""


class Opened(msgspec.Struct):
    url: str


class Posted(msgspec.Struct):
    ts: str


class UploadSlot(msgspec.Struct):
    upload_url: str
    file_id: str


class Uploaded(msgspec.Struct):
    files: list[Id] = []


class Profile(msgspec.Struct):
    real_name: str = ""
    name: str = ""


class Person(msgspec.Struct):
    user: Profile


class Refused(Never):
    """Slack refused a call."""

    def __init__(self, method: str, error: str) -> None:
        super().__init__(f"{method}: {error}")
        self.error = error


class Slack:
    """An app in a Slack workspace."""

    can = Can(
        text=3000, form="slack", repeats="none", threads=True, buttons=True, edit=True, pace=3.0, media=500_000_000
    )

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._token = options.token("bot_token")
        self._app_token = options.token("app_token", "")
        self._signing = options.secret("signing_secret", "")
        self._in_thread = options.flag("reply_in_thread", True)
        base = options.address("base_url", API)
        self._host, self.port = options.text("host", "127.0.0.1"), options.number("port", 8004)
        self._path = options.text("path", f"/{options.name}")
        if bool(self._app_token) == bool(self._signing):
            raise options.problem("needs an app_token (Socket Mode) or a signing_secret (events over HTTP), not both")
        self._client = HttpClient(base)
        self._me = ""
        self._names: dict[str, str] = {}

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        self._me = (await self._call("auth.test", {}, Me)).user_id
        if self._signing:
            await self._listen(inbox)
        while True:
            await self._connect(inbox)

    async def _connect(self, inbox: Inbox) -> None:
        """Receive over one connection until Slack asks for another."""
        opened = await self._call("apps.connections.open", {}, Opened, self._app_token)
        async with connected(opened.url, heartbeat=HEARTBEAT_SECONDS) as socket:
            while True:
                envelope = msgspec.json.decode(await socket.receive(), type=Envelope)
                if envelope.type == "hello":
                    await inbox.ready()
                elif envelope.type == "disconnect":
                    return
                elif envelope.envelope_id:
                    if (payload := _read(bytes(envelope.payload))) is not None:
                        await self._take(payload, inbox)
                    await socket.send({"envelope_id": envelope.envelope_id})

    async def _listen(self, inbox: Inbox) -> None:
        from aiohttp import web

        async def handle(request: web.Request) -> web.Response:
            body, headers = await request.read(), request.headers
            at, given = headers.get("X-Slack-Request-Timestamp", ""), headers.get("X-Slack-Signature", "")
            if not is_signed(self._signing, at, body, given, time.time()):
                return web.Response(status=401)
            if headers.get("Content-Type", "").startswith(FORM):
                body = parse_qs(body.decode("utf-8", "replace")).get("payload", [""])[0].encode()
            if (payload := _read(body)) is None:
                return web.Response(status=400)
            if payload.type == "url_verification":
                return web.json_response({"challenge": payload.challenge})
            await self._take(payload, inbox)
            return web.Response()

        async with listening(self._host, self.port, self._path, handle) as self.port:
            await inbox.ready()
            await asyncio.Event().wait()

    async def _take(self, payload: Payload, inbox: Inbox) -> None:
        if payload.type == "block_actions":
            await self._take_button(payload, inbox)
        elif (message := self._received(payload.event)) is not None:
            if message.group:
                message = replace(message, name=await self._name_of(message.sender))
            await inbox.accept(message)

    async def _take_button(self, payload: Payload, inbox: Inbox) -> None:
        place, chat = payload.message, payload.channel.id
        for pressed in payload.actions[:1]:
            message = Received(
                id=f"{chat}:{place.ts}:{pressed.value}",
                chat=chat,
                sender=payload.user.id,
                text="",
                button=pressed.value,
                thread=place.thread_ts,
                group=not chat.startswith("D"),
                mentioned=True,
            )
            if await inbox.accept(message):
                blocks = [block for block in place.blocks if block.get("type") != "actions"]
                asked = {**_text(chat, place.text), "ts": place.ts, "blocks": blocks}
                try:
                    await self._call("chat.update", asked, Posted)
                except (OSError, TimeoutError, Never, Later):
                    return  # the buttons stay, but do nothing

    def _received(self, event: Event) -> Received | None:
        """Convert an event to a message; None if no person wrote it."""
        if event.type not in ("message", "app_mention") or event.subtype not in WRITTEN_BY_PEOPLE:
            return None
        if not event.user or event.bot_id or event.user == self._me or not event.ts or not event.channel:
            return None
        group = event.channel_type != "im" if event.channel_type else not event.channel.startswith("D")
        mention = f"<@{self._me}>"
        text = _plain(re.sub(rf"\s*<@{self._me}(\|[^>]*)?>[:,]?\s*", " ", event.text).strip())
        thread = event.thread_ts or (event.ts if group and self._in_thread else "")
        return Received(
            id=f"{event.channel}:{event.ts}",
            chat=event.channel,
            sender=event.user,
            text=text,
            group=group,
            mentioned=mention in event.text or event.type == "app_mention" or event.parent_user_id == self._me,
            thread=thread,
            files=tuple(Attachment(one.name, partial(self._download, one), one.size) for one in event.files),
        )

    async def _download(self, file: File, limit: int) -> bytes:
        """Download a file; the token is sent only to Slack."""
        return await download_from(file.url_private_download, (".slack.com",), self._client, limit, self._token)

    async def _name_of(self, user: str) -> str:
        """Return a person's name; "" if the app may not read it."""
        if user not in self._names:
            try:
                found = (await self._call("users.info", {"user": user}, Person, form=True)).user
                self._names[user] = found.real_name or found.name
            except (Never, Later, OSError, TimeoutError):
                self._names[user] = ""
            while len(self._names) > MAX_NAMES:
                del self._names[next(iter(self._names))]
        return self._names[user]

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        if part.files:
            return await self._send_file(part)
        asked = {**_text(part.chat, part.text), "unfurl_links": False, "unfurl_media": False}
        if part.thread:
            asked["thread_ts"] = part.thread
        if part.buttons:
            asked["blocks"] = _blocks(part)
        sent = await self._call("chat.postMessage", asked, Posted, repeatable=False)
        return f"{part.chat}:{sent.ts}"

    async def _send_file(self, part: Part) -> str:
        """Upload a file, then share it. Only sharing is visible, so only sharing can be a repeat."""
        (file,) = part.files
        if not file.data:
            raise NoFile("it is empty")
        asked: dict[str, Any] = {"filename": file.name, "length": len(file.data)}
        try:
            slot = await self._call("files.getUploadURLExternal", asked, UploadSlot, form=True)
            await upload_to(slot.upload_url, (".slack.com",), self._client, file)
        except (OSError, TimeoutError) as error:  # nothing was shared
            raise Later(5.0, f"the upload failed: {one_line(str(error), 100)}") from None
        asked = {"files": [{"id": slot.file_id, "title": file.name}], "channel_id": part.chat}
        if part.thread:
            asked["thread_ts"] = part.thread
        if part.text:
            asked["initial_comment"] = part.text
        await self._call("files.completeUploadExternal", asked, Uploaded, repeatable=False)
        return f"{part.chat}:{slot.file_id}"

    async def show(self, chat: str, key: str, text: str) -> str | None:
        if not text:
            if key:
                await self._call("chat.delete", {"channel": chat, "ts": key}, Outcome)
            return None  # apps cannot show a typing notice
        if key:
            await self._call("chat.update", {**_text(chat, text), "ts": key}, Posted)
            return key
        return (await self._call("chat.postMessage", _text(chat, text), Posted, repeatable=False)).ts

    async def check(self) -> str:
        """Ask who the app is, and whether it may connect."""
        try:
            me = await self._call("auth.test", {}, Me)
            if self._app_token:
                await self._call("apps.connections.open", {}, Opened, self._app_token)
        finally:
            await self.close()
        return f"{me.user} at {me.team}"

    async def close(self) -> None:
        await self._client.close()

    async def _call(
        self,
        method: str,
        asked: dict[str, Any],
        result: type[T],
        token: str = "",
        *,
        repeatable: bool = True,
        form: bool = False,
    ) -> T:
        """Call a method of the Web API."""
        headers = {"Authorization": f"Bearer {token or self._token}"}
        headers["Content-Type"] = FORM if form else "application/json; charset=utf-8"
        body = urlencode(asked).encode() if form else msgspec.json.encode(asked)
        target = f"{self._client.target.rstrip('/')}/{method}"
        reply = await self._client.post(target, headers, body, CALL_SECONDS, repeatable)
        if reply.status == 429:
            raise Later(reply.retry_after or 5.0, f"{method}: rate limited")
        try:
            outcome = msgspec.json.decode(reply.body, type=Outcome)
            if outcome.ok:
                return msgspec.json.decode(reply.body, type=result)
        except msgspec.MsgspecError:
            raise OSError(f"{method}: HTTP {reply.status}, and no answer of Slack's") from None
        error = one_line(outcome.error, 100)
        if error in ("ratelimited", "rate_limited"):
            raise Later(reply.retry_after or 5.0, f"{method}: {error}")
        if error in TEMPORARY or reply.status >= 500:
            raise OSError(f"{method}: {error}")
        raise Refused(method, error)


def _text(chat: str, text: str) -> dict[str, Any]:
    """Return the arguments for a text that Slack does not scan for names: an `@here` in it notifies nobody."""
    return {"channel": chat, "text": text, "parse": "none", "link_names": False}


def is_signed(secret: str, at: str, body: bytes, given: str, now: float) -> bool:
    """Return whether Slack has recently signed a request with the secret."""
    made = hmac.new(secret.encode(), b"v0:" + header_bytes(at) + b":" + body, hashlib.sha256).hexdigest()
    right = hmac.compare_digest(f"v0={made}".encode(), header_bytes(given))
    return right and at.isdecimal() and len(at) < 16 and abs(now - int(at)) <= FRESH_SECONDS


def _read(body: bytes) -> Payload | None:
    """Decode an envelope's payload; None if it is of an unknown kind."""
    try:
        return msgspec.json.decode(body, type=Payload)
    except msgspec.MsgspecError:
        return None


def _plain(text: str) -> str:
    """Return a text as the person wrote it: Slack puts links and mentions in angle brackets."""

    def shown(found: re.Match[str]) -> str:
        target, _, label = found[1].partition("|")
        if target[:1] in "@#!":
            return f"{target[0].replace('!', '@')}{label or target[1:].partition('^')[0]}"
        return target if label in ("", target) or target.endswith(f"//{label}") else f"{label} ({target})"

    return html.unescape(re.sub(r"<([^<>]+)>", shown, text))


def _blocks(part: Part) -> list[dict[str, Any]]:
    """Return the blocks of a text with buttons below it."""
    blocks: list[dict[str, Any]] = []
    rest = part.text
    while rest:
        end = len(rest) if len(rest) <= MAX_SECTION else rest.rfind("\n", 1, MAX_SECTION)
        end = end if end > 0 else MAX_SECTION
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": rest[:end]}})
        rest = rest[end:].lstrip("\n")
    buttons = [
        {"type": "button", "text": {"type": "plain_text", "text": one.label}, "action_id": f"b{n}", "value": one.value}
        for n, one in enumerate(part.buttons)
    ]
    return [*blocks, {"type": "actions", "elements": buttons}]
