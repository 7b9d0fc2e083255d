"""Discord: messages by the gateway, answers by the REST API.

The gateway has no acknowledgements. With each accepted message, the position in its stream is stored: the next
connection resumes there, and later messages are delivered again. If the session has expired, the known chats are read
from the last message on. A part is sent with a nonce, which Discord checks for some minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from ..text import one_line
from .base import Attachment, Can, Inbox, Later, Never, NoFile, Options, OutgoingFile, Part, Received
from .http import UPLOAD_SECONDS, Closed, HttpClient, WebSocket, connected, download_from, form_of

API = "https://discord.com/api/v10"
AGENT = "DiscordBot (everloop, 1)"  # in the form that Discord requires
CALL_SECONDS = 30.0
HELLO_SECONDS = 30.0
NONCE_LENGTH = 25
FILE_TOO_LARGE = 40005
MAX_CHATS = 200  # whose last message is stored
PAGE = 100
GUILDS, GUILD_MESSAGES, DIRECT_MESSAGES, MESSAGE_CONTENT = 1 << 0, 1 << 9, 1 << 12, 1 << 15
HEARTBEAT, IDENTIFY, RESUME, HELLO = 1, 2, 6, 10
FOR_GOOD = {  # close codes after which reconnecting does not help
    4004: "the token is wrong",
    4010: "the shard is wrong",
    4011: "the bot is in too many servers for one connection",
    4012: "the version of the gateway is no longer served",
    4013: "the intents are wrong",
    4014: "message_content must be allowed for this bot in Discord's developer portal",
}
NEW_SESSION = {4007, 4009}
MESSAGE_TYPES = {0, 19, 20, 21}  # a message, a reply, a command, the first message of a thread
T = TypeVar("T")


class User(msgspec.Struct):
    id: str
    username: str = ""
    global_name: str | None = None
    bot: bool = False


class Member(msgspec.Struct):
    nick: str | None = None
    user: User | None = None


class Replied(msgspec.Struct):
    author: User | None = None


class File(msgspec.Struct):
    filename: str = "file"
    size: int | None = None
    url: str = ""


class Message(msgspec.Struct):
    id: str
    channel_id: str
    author: User
    content: str = ""
    type: int = 0
    guild_id: str | None = None
    webhook_id: str | None = None
    mentions: list[User] = []
    attachments: list[File] = []
    member: Member | None = None
    referenced_message: Replied | None = None


class Pressed(msgspec.Struct):
    custom_id: str = ""


class Interaction(msgspec.Struct):
    id: str
    token: str
    type: int
    channel_id: str = ""
    guild_id: str | None = None
    user: User | None = None
    member: Member | None = None
    message: SentMessage | None = None
    data: Pressed = msgspec.field(default_factory=Pressed)


class SentMessage(msgspec.Struct):
    id: str


class Frame(msgspec.Struct):
    """A frame of the gateway."""

    op: int
    d: msgspec.Raw = msgspec.Raw(b"null")
    s: int | None = None
    t: str | None = None


class Hello(msgspec.Struct):
    heartbeat_interval: float


class Ready(msgspec.Struct):
    session_id: str
    resume_gateway_url: str
    user: User


class Gateway(msgspec.Struct):
    url: str


class Failure(msgspec.Struct):
    message: str = ""
    code: int = 0
    retry_after: float | None = None


class Seen(msgspec.Struct):
    """The last message that was accepted from a chat."""

    id: str
    group: bool


class Cursor(msgspec.Struct):
    """The position of receiving: the gateway's session, and how far each chat was read."""

    session: str = ""
    url: str = ""
    seq: int | None = None
    me: str = ""
    seen: dict[str, Seen] = {}


class Refused(Never):
    """Discord refused a request."""

    def __init__(self, status: int, failure: Failure) -> None:
        super().__init__(f"{status} {one_line(failure.message, 200)} ({failure.code})")
        self.status = status
        self.code = failure.code


class Discord:
    """A bot at Discord."""

    can = Can(
        text=2000,
        form="markdown",
        repeats="window",
        typing=True,
        buttons=True,
        edit=True,
        pace=1.5,
        media=10 * 1024 * 1024,
    )

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._token = options.token("token")
        base = options.address("base_url", API)
        self._intents = GUILDS | GUILD_MESSAGES | DIRECT_MESSAGES
        if options.flag("message_content", False):
            self._intents |= MESSAGE_CONTENT
        self._client = HttpClient(base)
        self._at = Cursor()

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self._at = msgspec.json.decode(await inbox.cursor() or "{}", type=Cursor)
        while True:
            url = self._at.url if self._at.session else ""
            url = url or (await self._call("GET", "/gateway/bot", None, Gateway)).url
            try:
                async with connected(f"{url.rstrip('/')}/?v=10&encoding=json") as socket:
                    await self._attend(socket, inbox)
            except Closed as error:
                if error.code in FOR_GOOD:
                    self._at.session = ""
                    raise Never(FOR_GOOD[error.code]) from None
                if error.code in NEW_SESSION:
                    self._at.session = ""
                    continue
                raise
            except OSError:
                self._at.url = ""  # the next attempt asks where to connect
                raise

    async def _attend(self, socket: WebSocket, inbox: Inbox) -> None:
        """Receive over one connection until Discord asks for another."""
        async with asyncio.timeout(HELLO_SECONDS):
            first = msgspec.json.decode(await socket.receive(), type=Frame)
        if first.op != HELLO:
            raise OSError("the gateway did not say hello")
        beat = Heartbeat(socket, msgspec.json.decode(first.d, type=Hello).heartbeat_interval / 1000, self._at.seq)
        beating = asyncio.create_task(beat.run())
        try:
            await self._begin(socket)
            while True:
                frame = msgspec.json.decode(await socket.receive(), type=Frame)
                beat.hear()
                match frame.op:
                    case 0:
                        await self._dispatch(frame, inbox)
                        self._at.seq = frame.s
                        beat.hear(frame.s)
                        if frame.t == "READY":
                            await beat.send()  # the session is on disk: from now on nothing is missed
                    case 1:
                        await beat.send()
                    case 7:
                        return
                    case 9:
                        if bytes(frame.d) != b"true":
                            self._at.session = ""
                        await asyncio.sleep(random.uniform(0.1, 1.0))  # Discord asks for a pause
                        await self._begin(socket)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await socket.close(code=4000)  # 1000 would end the session

    async def _begin(self, socket: WebSocket) -> None:
        """Resume the session, or begin one."""
        if self._at.session:
            told = {"token": self._token, "session_id": self._at.session, "seq": self._at.seq}
            await socket.send({"op": RESUME, "d": told})
            return
        properties = {"os": "linux", "browser": "everloop", "device": "everloop"}
        hello = {"token": self._token, "intents": self._intents, "properties": properties}
        await socket.send({"op": IDENTIFY, "d": hello})

    async def _dispatch(self, frame: Frame, inbox: Inbox) -> None:
        match frame.t:
            case "READY":
                ready = msgspec.json.decode(frame.d, type=Ready)
                # Stored only once everything is read: after a crash in between, resuming would skip the rest.
                self._at.session, self._at.seq, self._at.me = "", None, ready.user.id
                await self._catch_up(inbox)
                self._at.session, self._at.url, self._at.seq = ready.session_id, ready.resume_gateway_url, frame.s
                await self._keep(inbox)
                await inbox.ready()
            case "RESUMED":
                await inbox.ready()
            case "MESSAGE_CREATE":
                with contextlib.suppress(msgspec.MsgspecError):  # an unknown kind of message
                    await self._take(msgspec.json.decode(frame.d, type=Message), inbox, frame.s)
            case "INTERACTION_CREATE":
                with contextlib.suppress(msgspec.MsgspecError):
                    await self._take_button(msgspec.json.decode(frame.d, type=Interaction), inbox)

    async def _catch_up(self, inbox: Inbox) -> None:
        """Read what arrived in the known chats while there was no session."""
        for chat in list(self._at.seen):
            while True:
                last = self._at.seen[chat]
                target = f"/channels/{chat}/messages?after={last.id}&limit={PAGE}"
                try:
                    found = await self._call("GET", target, None, list[Message])
                except Refused:  # the chat is gone
                    self._at.seen.pop(chat, None)
                    break
                for message in sorted(found, key=lambda one: int(one.id)):
                    message.guild_id = "?" if last.group else None  # only the gateway reports the server
                    await self._take(message, inbox, None)
                if len(found) < PAGE:
                    break

    async def _take(self, message: Message, inbox: Inbox, seq: int | None) -> None:
        received = _received(message, self._at.me)
        if received is None:
            return
        if message.attachments:
            files = (Attachment(one.filename, partial(self._download, one), one.size) for one in message.attachments)
            received = replace(received, files=tuple(files))
        await inbox.accept(received)
        if received.group and not received.mentioned and seq is not None:
            return  # after a crash it is read again, which is harmless
        self._at.seen.pop(message.channel_id, None)
        self._at.seen[message.channel_id] = Seen(message.id, received.group)
        while len(self._at.seen) > MAX_CHATS:
            del self._at.seen[next(iter(self._at.seen))]
        self._at.seq = seq if seq is not None else self._at.seq
        await self._keep(inbox)

    async def _download(self, file: File, limit: int) -> bytes:
        return await download_from(file.url, (".discordapp.com", ".discordapp.net"), self._client, limit)

    async def _keep(self, inbox: Inbox) -> None:
        await inbox.keep_cursor(msgspec.json.encode(self._at).decode())

    async def _take_button(self, pressed: Interaction, inbox: Inbox) -> None:
        user = pressed.user or (pressed.member.user if pressed.member is not None else None)
        if pressed.type != 3 or user is None or pressed.message is None:
            return
        taken = await inbox.accept(
            Received(
                id=f"{pressed.channel_id}:{pressed.message.id}:{pressed.data.custom_id}",
                chat=pressed.channel_id,
                sender=user.id,
                text="",
                button=pressed.data.custom_id,
                group=pressed.guild_id is not None,
                mentioned=True,
            )
        )
        # 7 edits the message, which removes the buttons; 6 only acknowledges the press.
        answer: dict[str, Any] = {"type": 7, "data": {"components": []}} if taken else {"type": 6}
        with contextlib.suppress(OSError, TimeoutError, Never, Later):  # only the display is affected
            await self._call("POST", f"/interactions/{pressed.id}/{pressed.token}/callback", answer, None)

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        asked: dict[str, Any] = {
            "content": part.text,
            "nonce": key[:NONCE_LENGTH],
            "enforce_nonce": True,
            "allowed_mentions": {"parse": [], "replied_user": True},
            "flags": 1 << 2,  # no previews of links
        }
        if part.reply_to is not None:
            replied = part.reply_to.rpartition(":")[2]
            asked["message_reference"] = {"message_id": replied, "fail_if_not_exists": False}
        if part.buttons:
            row = [{"type": 2, "style": 2, "label": button.label, "custom_id": button.value} for button in part.buttons]
            asked["components"] = [{"type": 1, "components": row}]
        try:
            sent = await self._call("POST", f"/channels/{_id(part.chat)}/messages", asked, SentMessage, part.files)
        except Refused as error:
            if part.files and (error.status == 413 or error.code == FILE_TOO_LARGE):
                raise NoFile("it is too large for Discord") from None
            raise
        return f"{part.chat}:{sent.id}"

    async def show(self, chat: str, key: str, text: str) -> str | None:
        if not text and not key:
            await self._call("POST", f"/channels/{_id(chat)}/typing", {}, None)
            return None
        messages = f"/channels/{_id(chat)}/messages"
        if not text:
            await self._call("DELETE", f"{messages}/{_id(key)}", None, None)
            return None
        asked: dict[str, Any] = {"content": text, "allowed_mentions": {"parse": []}}
        if key:
            return (await self._call("PATCH", f"{messages}/{_id(key)}", asked, SentMessage)).id
        silent = 1 << 12 | 1 << 2  # without a notification and previews of links
        return (await self._call("POST", messages, {**asked, "flags": silent}, SentMessage)).id

    async def check(self) -> str:
        """Ask who the bot is."""
        try:
            me = await self._call("GET", "/users/@me", None, User)
        finally:
            await self.close()
        return me.username

    async def close(self) -> None:
        await self._client.close()

    async def _call(
        self,
        method: str,
        path: str,
        asked: dict[str, Any] | None,
        result: type[T] | None,
        files: Sequence[OutgoingFile] = (),
    ) -> T:
        """Send a request to the REST API."""
        headers = {"Authorization": f"Bot {self._token}", "User-Agent": AGENT, "Content-Type": "application/json"}
        body = b"" if asked is None else msgspec.json.encode(asked)
        seconds = CALL_SECONDS
        if files:
            named = {f"files[{number}]": file for number, file in enumerate(files)}
            headers["Content-Type"], body = form_of({"payload_json": body.decode()}, named)
            seconds = UPLOAD_SECONDS
        target = self._client.target.rstrip("/") + path
        # Retries are safe: each message has a nonce.
        reply = await self._client.request(method, target, headers, body, seconds)
        if 200 <= reply.status < 300:
            try:
                return msgspec.json.decode(reply.body, type=result) if result is not None else None  # type: ignore[return-value]
            except msgspec.MsgspecError:
                raise OSError(f"{method} {path}: no answer of Discord's") from None
        try:
            failure = msgspec.json.decode(reply.body, type=Failure)
        except msgspec.MsgspecError:
            failure = Failure(f"HTTP {reply.status}")
        if reply.status == 429:
            raise Later(failure.retry_after or reply.retry_after or 5.0, "429 rate limited")
        if reply.status >= 500:
            raise OSError(f"HTTP {reply.status}")
        raise Refused(reply.status, failure)


class Heartbeat:
    """Sends heartbeats to the gateway, and closes the connection if one is not answered."""

    def __init__(self, socket: WebSocket, seconds: float, seq: int | None) -> None:
        self._socket = socket
        self._seconds = seconds
        self._seq = seq
        self._answered = True

    def hear(self, seq: int | None = None) -> None:
        """Count a frame as an answer: the acknowledgement may be queued behind many. `seq` is an event's number."""
        self._answered = True
        self._seq = seq if seq is not None else self._seq

    async def run(self) -> None:
        await asyncio.sleep(self._seconds * random.random())
        while True:
            if not self._answered:
                await self._socket.close(code=4000)
                return
            self._answered = False
            await self.send()
            await asyncio.sleep(self._seconds)

    async def send(self) -> None:
        await self._socket.send({"op": HEARTBEAT, "d": self._seq})


def _id(chat: str) -> str:
    if not re.fullmatch(r"[0-9]{1,20}", chat):
        raise Never("that is not a Discord channel: its id is a number")
    return chat


def _received(message: Message, me: str) -> Received | None:
    """Convert a message; None if no person wrote it."""
    author = message.author
    if author.bot or author.id == me or message.webhook_id is not None or message.type not in MESSAGE_TYPES:
        return None
    text = re.sub(rf"\s*<@[!&]?{re.escape(me)}>[:,]?\s*", " ", message.content).strip()
    replied = message.referenced_message
    to_me = replied is not None and replied.author is not None and replied.author.id == me
    nick = message.member.nick if message.member is not None else None
    return Received(
        id=f"{message.channel_id}:{message.id}",
        chat=message.channel_id,
        sender=author.id,
        text=text,
        name=nick or author.global_name or author.username,
        group=message.guild_id is not None,
        mentioned=to_me or any(one.id == me for one in message.mentions),
    )
