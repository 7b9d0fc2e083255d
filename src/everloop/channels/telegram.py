"""Telegram, through the Bot API: by long polling or by webhook.

An update is confirmed by asking for the next one, which is done only when it is on disk. Telegram recognises
no repeats, so a possible repeat is marked in its text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from ..text import one_line
from .base import Attachment, Can, Inbox, Later, Never, NoFile, Options, OutgoingFile, Part, Received
from .http import UPLOAD_SECONDS, HttpClient, Reply, form_of, header_bytes, listening

API = "https://api.telegram.org"
POLL_SECONDS = 50
MARGIN_SECONDS = 15.0  # for a reply, in addition to the requested timeout
SEND_SECONDS = 30.0
FILES = ("document", "voice", "audio", "video", "video_note", "animation")
OTHERS = ("sticker", "location", "contact", "poll")
NAMES = {"photo": "photo.jpg", "voice": "voice.ogg", "video_note": "video.mp4", "video": "video.mp4"}
MAX_PHOTO = 10_000_000
SENDING = {"sendMessage", "sendPhoto", "sendDocument"}
UPDATES = ["message", "callback_query"]
T = TypeVar("T")


class User(msgspec.Struct):
    id: int
    first_name: str = ""
    last_name: str = ""
    username: str = ""
    is_bot: bool = False


class Chat(msgspec.Struct):
    id: int
    type: str = "private"


class Entity(msgspec.Struct):
    type: str
    offset: int
    length: int
    user: User | None = None


class RepliedTo(msgspec.Struct):
    from_: User | None = msgspec.field(default=None, name="from")


class File(msgspec.Struct):
    file_id: str
    file_name: str = ""
    file_size: int | None = None


class FilePath(msgspec.Struct):
    file_path: str = ""


class Message(msgspec.Struct):
    message_id: int
    chat: Chat
    from_: User | None = msgspec.field(default=None, name="from")
    text: str = ""
    caption: str = ""
    entities: list[Entity] = []
    caption_entities: list[Entity] = []
    message_thread_id: int | None = None
    is_topic_message: bool = False
    reply_to_message: RepliedTo | None = None
    photo: list[File] = []
    document: File | None = None
    voice: File | None = None
    audio: File | None = None
    video: File | None = None
    video_note: File | None = None
    animation: File | None = None


class CallbackQuery(msgspec.Struct):
    """A pressed button. The message is missing when it is very old."""

    id: str
    from_: User = msgspec.field(name="from")
    message: Message | None = None
    data: str = ""


class Update(msgspec.Struct):
    update_id: int
    message: msgspec.Raw = msgspec.Raw()
    callback_query: msgspec.Raw = msgspec.Raw()


class Parameters(msgspec.Struct, frozen=True):
    retry_after: float | None = None


class Envelope(msgspec.Struct):
    """The envelope of every reply of the Bot API."""

    ok: bool
    result: msgspec.Raw = msgspec.Raw()
    description: str = ""
    error_code: int = 0
    parameters: Parameters = Parameters()


class SentMessage(msgspec.Struct):
    message_id: int


class Refused(Never):
    """The Bot API refused a request."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{code} {description}")
        self.code = code
        self.description = description


class Telegram:
    """A bot at Telegram."""

    can = Can(
        text=4096,
        unit="utf16",
        form="telegram",
        repeats="none",
        threads=True,
        typing=True,
        buttons=True,
        edit=True,
        pace=3.0,
        media=50_000_000,
    )

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._token = options.token("token")
        base = options.address("base_url", API)
        if "/" in self._token:
            raise options.problem("token has characters that no bot's token has: copy it from @BotFather")
        # Polling has its own connection, because it is busy nearly all the time.
        self._poll_client, self._client = HttpClient(base), HttpClient(base)
        self._webhook = options.text("webhook_url", "")
        self._host, self.port = options.text("host", "127.0.0.1"), options.number("port", 8005)
        self._path = options.text("path", f"/{options.name}")
        if self._webhook and not self._webhook.startswith("https://"):
            raise options.problem("webhook_url must begin with https://: Telegram sends to nothing else")
        # Telegram sends this with each update. The token cannot be derived from it.
        self._proof = hmac.new(self._token.encode(), b"everloop webhook", hashlib.sha256).hexdigest()

    async def receive(self, inbox: Inbox) -> None:
        me = await self._call("getMe", {}, User)
        if self._webhook:
            await self._listen(me, inbox)
        await self._call("deleteWebhook", {}, bool)  # while one is set, Telegram refuses polls
        await inbox.ready()
        await self._poll(me, inbox)

    async def _listen(self, me: User, inbox: Inbox) -> None:
        """Receive updates as requests; Telegram repeats each until it is answered with 200."""
        from aiohttp import web

        async def handle(request: web.Request) -> web.Response:
            given = request.headers.get("X-Telegram-Bot-Api-Secret-Token", "")
            if not hmac.compare_digest(header_bytes(given), self._proof.encode()):
                return web.Response(status=401)
            try:
                update = msgspec.json.decode(await request.read(), type=Update)
            except msgspec.MsgspecError:
                return web.Response(status=400)
            await self._take(update, me, inbox)
            return web.Response()

        async with listening(self._host, self.port, self._path, handle) as self.port:
            asked = {"url": self._webhook, "secret_token": self._proof, "allowed_updates": UPDATES}
            await self._call("setWebhook", asked, bool)
            await inbox.ready()
            await asyncio.Event().wait()

    async def _poll(self, me: User, inbox: Inbox) -> None:
        offset: int | None = None
        while True:
            asked: dict[str, Any] = {"timeout": POLL_SECONDS, "allowed_updates": UPDATES}
            if offset is not None:
                asked["offset"] = offset
            updates = await self._call(
                "getUpdates", asked, list[Update], self._poll_client, POLL_SECONDS + MARGIN_SECONDS
            )
            for update in updates:
                await self._take(update, me, inbox)
                offset = update.update_id + 1

    async def _take(self, update: Update, me: User, inbox: Inbox) -> None:
        if bytes(update.callback_query):
            await self._take_button(update.callback_query, inbox)
        elif (message := _received(update, me, self._attachments)) is not None:
            await inbox.accept(message)

    def _attachments(self, message: Message) -> tuple[Attachment, ...]:
        found = [("photo", message.photo[-1])] if message.photo else []  # the last one is the largest
        found += [(name, file) for name in FILES if (file := getattr(message, name)) is not None]
        if message.animation is not None:  # it is also sent as a document
            found = [one for one in found if one[0] != "document"]
        return tuple(
            Attachment(file.file_name or NAMES.get(name, name), partial(self._download, file.file_id), file.file_size)
            for name, file in found
        )

    async def _download(self, id: str, limit: int) -> bytes:
        path = (await self._call("getFile", {"file_id": id}, FilePath)).file_path
        target = f"{self._client.target.rstrip('/')}/file/bot{self._token}/{quote(path)}"
        return await self._client.download(target, {}, limit)

    async def _take_button(self, data: msgspec.Raw, inbox: Inbox) -> None:
        try:
            query = msgspec.json.decode(data, type=CallbackQuery)
        except msgspec.MsgspecError:
            return
        taken, place = False, query.message
        if place is not None and query.data:
            chat = str(place.chat.id)
            pressed = Received(
                id=f"{chat}:{place.message_id}:{query.data}",
                chat=chat,
                sender=str(query.from_.id),
                text="",
                button=query.data,
                group=place.chat.type != "private",
                mentioned=True,
            )
            taken = await inbox.accept(pressed)
        with contextlib.suppress(OSError, TimeoutError, Never, Later):  # only the display is affected
            if taken and place is not None:
                asked = {"chat_id": place.chat.id, "message_id": place.message_id}
                await self._call("editMessageReplyMarkup", {**asked, "reply_markup": {"inline_keyboard": []}}, Any)
            await self._call("answerCallbackQuery", {"callback_query_id": query.id}, bool)

    async def send(self, part: Part, key: str) -> str:
        to: dict[str, Any] = {"chat_id": int(part.chat) if re.fullmatch(r"-?[0-9]{1,20}", part.chat) else part.chat}
        if part.thread:
            if not re.fullmatch(r"[0-9]{1,20}", part.thread):
                raise Never("that is not a Telegram topic: its id is a number")
            to["message_thread_id"] = int(part.thread)
        if part.files:
            return f"{part.chat}:{(await self._send_file(to, part)).message_id}"
        asked = {**to, "text": part.text, "parse_mode": "HTML", "link_preview_options": {"is_disabled": True}}
        if part.reply_to is not None and part.chat.startswith("-"):  # in a group, show which message is answered
            replied = int(part.reply_to.rpartition(":")[2])
            asked["reply_parameters"] = {"message_id": replied, "allow_sending_without_reply": True}
        if part.buttons:
            row = [{"text": one.label, "callback_data": one.value} for one in part.buttons]
            asked["reply_markup"] = {"inline_keyboard": [row]}
        try:
            sent = await self._call("sendMessage", asked, SentMessage)
        except Refused as error:
            if "parse entities" not in error.description:
                raise
            plain = {name: value for name, value in asked.items() if name != "parse_mode"}
            sent = await self._call("sendMessage", {**plain, "text": part.plain}, SentMessage)
        return f"{part.chat}:{sent.message_id}"

    async def _send_file(self, to: dict[str, Any], part: Part) -> SentMessage:
        """Send a file: a picture as one if Telegram can show it."""
        (file,) = part.files
        fields = {name: str(value) for name, value in to.items()}
        if part.plain:
            fields["caption"] = part.plain
        try:
            if file.is_picture and file.type != "image/gif" and len(file.data) <= MAX_PHOTO:
                try:
                    return await self._call("sendPhoto", fields, SentMessage, files={"photo": file})
                except Refused as error:
                    if error.code != 400 or not re.search("photo|image", error.description, re.I):
                        raise
            return await self._call("sendDocument", fields, SentMessage, files={"document": file})
        except Refused as error:
            if error.code == 413:
                raise NoFile("it is too large for Telegram") from None
            raise

    async def show(self, chat: str, key: str, text: str) -> str | None:
        if not text:
            if key:
                await self._call("deleteMessage", {"chat_id": chat, "message_id": int(key)}, bool)
            else:
                await self._call("sendChatAction", {"chat_id": chat, "action": "typing"}, bool)
            return None
        asked: dict[str, Any] = {
            "chat_id": chat,
            "text": text,
            "parse_mode": "HTML",
            "link_preview_options": {"is_disabled": True},
        }
        if key:
            await self._call("editMessageText", {**asked, "message_id": int(key)}, Any)
            return key
        sent = await self._call("sendMessage", {**asked, "disable_notification": True}, SentMessage)
        return str(sent.message_id)

    async def check(self) -> str:
        """Ask who the bot is."""
        try:
            me = await self._call("getMe", {}, User)
        finally:
            await self.close()
        return f"@{me.username}"

    async def close(self) -> None:
        await self._poll_client.close()
        await self._client.close()

    async def _call(
        self,
        method: str,
        asked: dict[str, Any],
        result: type[T],
        client: HttpClient | None = None,
        seconds: float = SEND_SECONDS,
        files: dict[str, OutgoingFile] | None = None,
    ) -> T:
        """Call a method of the Bot API."""
        client = client or self._client
        target = f"{client.target.rstrip('/')}/bot{self._token}/{method}"
        kind, body = "application/json", msgspec.json.encode(asked)
        if files is not None:
            kind, body = form_of(asked, files)
            seconds = UPLOAD_SECONDS
        reply = await client.post(target, {"Content-Type": kind}, body, seconds, method not in SENDING)
        answer = _envelope(reply)
        if answer.ok and bytes(answer.result):
            return msgspec.json.decode(answer.result, type=result)
        code, description = answer.error_code or reply.status, one_line(answer.description, 200)
        if code == 429:
            raise Later(answer.parameters.retry_after or reply.retry_after or 5.0, f"{code} {description}")
        if code == 409:  # another program polls this bot
            raise Later(10.0, f"{code} {description}")
        if code >= 500:
            raise OSError(f"HTTP {code} {description}")
        raise Refused(code, description)


def _envelope(reply: Reply) -> Envelope:
    try:
        return msgspec.json.decode(reply.body, type=Envelope)
    except msgspec.MsgspecError:
        if reply.status in (404, 401, 413):
            return Envelope(False, error_code=reply.status, description="not the Bot API")
        raise OSError(f"HTTP {reply.status}, and no answer of the Bot API") from None


def _received(update: Update, me: User, attachments: Callable[[Message], tuple[Attachment, ...]]) -> Received | None:
    """Convert an update to a message; None if no person wrote it, or if it cannot be read."""
    if not bytes(update.message):
        return None
    try:
        message = msgspec.json.decode(update.message, type=Message)
        attached = [name for name in msgspec.json.decode(update.message) if name in OTHERS]
    except msgspec.MsgspecError:  # an unknown kind of message
        return None
    if message.from_ is None or message.from_.is_bot or message.chat.type not in ("private", "group", "supergroup"):
        return None
    text = message.text or message.caption
    text, named = _without_mention(text, message.entities or message.caption_entities, me)
    replied = message.reply_to_message is not None and message.reply_to_message.from_ is not None
    to_me = replied and message.reply_to_message.from_.id == me.id  # type: ignore[union-attr]
    if attached:
        text = f"{text}\n\n[A {attached[0].replace('_', ' ')} was attached, which I cannot open here.]".strip()
    sender = message.from_
    return Received(
        id=f"{message.chat.id}:{message.message_id}",
        chat=str(message.chat.id),
        sender=str(sender.id),
        text=text,
        files=attachments(message),
        name=f"{sender.first_name} {sender.last_name}".strip() or sender.username,
        group=message.chat.type != "private",
        mentioned=named or to_me,
        thread=str(message.message_thread_id) if message.is_topic_message and message.message_thread_id else "",
    )


def _without_mention(text: str, entities: list[Entity], me: User) -> tuple[str, bool]:
    """Return the text without the bot's name, and whether it was mentioned. Entities count in UTF-16 units."""
    units = text.encode("utf-16-le")
    named = False
    for entity in sorted(entities, key=lambda one: one.offset, reverse=True):
        start, end = 2 * entity.offset, 2 * (entity.offset + entity.length)
        words = units[start:end].decode("utf-16-le", "replace")
        name = f"@{me.username}".lower()
        if (entity.type == "mention" and words.lower() == name) or (
            entity.type == "text_mention" and entity.user is not None and entity.user.id == me.id
        ):
            named, units = True, units[:start] + units[end:]
        elif entity.type == "bot_command" and words.lower().endswith(name):
            named = True
    return units.decode("utf-16-le", "replace").strip() if named else text, named
