"""Matrix, by the client-server API: plain rooms, and encrypted ones by `matrix_crypto`.

Asking for the next sync confirms the previous one, so that is done only once its messages are on disk. Messages that a
sync omits are read from the room's history. A part's key is its transaction id, which the server remembers for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from ..errors import ConfigError, StoreError
from ..text import one_line
from ..threads import in_thread
from .base import Attachment, Can, Inbox, Later, Never, NoFile, Options, Part, Received
from .http import HttpClient, Reply
from .matrix_devices import FIRST_USE, ROOMS, STRICT, DeviceLists, Name, ToDevice
from .text import without_name

if TYPE_CHECKING:
    from .matrix_crypto import Crypto, RoomSession

log = logging.getLogger(__name__)
API = "/_matrix/client/v3"
MEDIA = "/_matrix/client/v1/media"
POLL_SECONDS = 30
CONFIRM_SECONDS = 5  # while messages wait for their device to be confirmed
MARGIN_SECONDS = 20.0
CALL_SECONDS = 30.0
UPLOAD_SECONDS = 300.0
TYPING_SECONDS = 6
KEYS_SECONDS = 30.0  # to wait for the keys to be read, after a start
TIMELINE = 50  # events of a room in a sync; more are read from its history
MAX_MISSED = 1000  # events read from a room's history
FILTER = {
    "presence": {"types": []},
    "account_data": {"types": []},
    "room": {
        "timeline": {
            "limit": TIMELINE,
            "types": ["m.room.message", "m.room.member", "m.room.encrypted", "m.room.encryption"],
        },
        "state": {"types": ["m.room.member"], "lazy_load_members": True},
        "ephemeral": {"types": []},
        "account_data": {"types": []},
    },
}
T = TypeVar("T")


class Event(msgspec.Struct):
    type: str = ""
    sender: str = ""
    event_id: str = ""
    state_key: str | None = None
    content: dict[str, Any] = {}


class Timeline(msgspec.Struct):
    events: list[Event] = []
    limited: bool = False
    prev_batch: str = ""


class Joined(msgspec.Struct):
    timeline: Timeline = msgspec.field(default_factory=Timeline)


class State(msgspec.Struct):
    events: list[Event] = []


class Invited(msgspec.Struct):
    invite_state: State = msgspec.field(default_factory=State)


class Rooms(msgspec.Struct):
    join: dict[str, Joined] = {}
    invite: dict[str, Invited] = {}


class ToDeviceEvents(msgspec.Struct):
    events: list[ToDevice] = []


class Synced(msgspec.Struct):
    next_batch: str
    rooms: Rooms = msgspec.field(default_factory=Rooms)
    to_device: ToDeviceEvents = msgspec.field(default_factory=ToDeviceEvents)
    device_lists: DeviceLists = msgspec.field(default_factory=DeviceLists)
    device_one_time_keys_count: dict[str, int] = {}
    device_unused_fallback_key_types: list[str] | None = None


class Messages(msgspec.Struct):
    chunk: list[Event] = []
    end: str | None = None


class WhoAmI(msgspec.Struct):
    user_id: str
    device_id: str = ""


class Members(msgspec.Struct):
    joined: dict[str, Any] = {}


class SentEvent(msgspec.Struct):
    event_id: str


class Uploaded(msgspec.Struct):
    content_uri: str


class Done(msgspec.Struct):
    """A reply without content."""


class Failure(msgspec.Struct):
    errcode: str = ""
    error: str = ""
    retry_after_ms: float | None = None


class Refused(Never):
    """The server refused a request."""

    def __init__(self, status: int, failure: Failure) -> None:
        super().__init__(f"{status} {failure.errcode} {one_line(failure.error, 200)}".strip())
        self.errcode = failure.errcode


class Matrix:
    """An account at a Matrix server."""

    can = Can(text=16_000, form="html", repeats="window", threads=True, typing=True, media=100_000_000)

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._token = options.token("token")
        server = options.address("server")
        self._names = options.texts("names")
        self._from_now = options.text("start", "new", choices=("new", "all")) == "new"
        # Polling has its own connection, because it is busy nearly all the time.
        self._poll_client, self._client = HttpClient(server), HttpClient(server)
        self._me = ""
        self._direct: dict[str, bool] = {}  # rooms with one other person
        self._told: set[str] = set()  # rooms for which a warning was logged
        self._encrypts = options.flag("encryption", False)
        self._strict = options.text("trust", FIRST_USE, choices=(FIRST_USE, STRICT)) == STRICT
        if self._encrypts:
            _import_crypto(options)
        self._crypto: Crypto | None = None
        self._has_keys = asyncio.Event()
        self._sessions: dict[str, RoomSession] = {}  # that encrypt, by room
        self._encrypted: dict[str, dict[str, Any]] = {}  # the settings of encrypted rooms
        self._plain: set[str] = set()  # rooms that are not encrypted

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        who = await self._call("GET", "/account/whoami", None, WhoAmI)
        self._me = who.user_id
        if self._encrypts:
            await self._open_keys(who, inbox)
        since = await inbox.cursor()
        await inbox.ready()
        while True:
            synced = await self._sync(since, self._poll_seconds() if since else 0)
            await self._take_keys(synced)
            await self._join_invites(synced.rooms, inbox)
            for room, joined in synced.rooms.join.items():
                if since or not self._from_now:  # otherwise the messages precede the first start
                    await self._take_room(room, joined.timeline, since, inbox)
            await self._take_waiting(inbox)
            if synced.rooms.join or not since:
                await inbox.keep_cursor(synced.next_batch)
            since = synced.next_batch

    async def _open_keys(self, who: WhoAmI, inbox: Inbox) -> None:
        from .matrix_crypto import Crypto

        if not who.device_id:
            raise Never("the token has no device, which encryption needs: log in for one (docs/channels.md)")
        self._crypto = None
        self._has_keys.clear()
        self._encrypted = {room: msgspec.json.decode(text) for room, text in (await inbox.state(ROOMS)).items()}
        self._plain.clear()
        me = Name(who.user_id, who.device_id)
        crypto = Crypto(self.name, me, self._strict, self._call, inbox, self._sessions)
        await crypto.open()
        self._crypto = crypto
        self._has_keys.set()

    async def _take_keys(self, synced: Synced) -> None:
        """Process the keys in a sync before the messages that need them."""
        if self._crypto is not None:
            fallback = synced.device_unused_fallback_key_types
            has_fallback = fallback is None or "signed_curve25519" in fallback
            count = synced.device_one_time_keys_count.get("signed_curve25519", 0)
            await self._crypto.take(synced.to_device.events, synced.device_lists, count, has_fallback)

    async def _take_waiting(self, inbox: Inbox) -> None:
        """Process the messages whose keys have arrived."""
        if self._crypto is None:
            return
        for one in await self._crypto.readable_again():
            event = Event("m.room.encrypted", one.sender, one.event_id, None, one.content)
            if (opened := await self._decrypted(one.room, event)) is not None:
                if (message := await self._received(one.room, opened)) is not None:
                    await inbox.accept(message)
                await self._crypto.forget(one.event_id)

    def _poll_seconds(self) -> int:
        waits = self._strict and self._crypto is not None and self._crypto.waiting
        return CONFIRM_SECONDS if waits else POLL_SECONDS

    async def _sync(self, since: str, seconds: int) -> Synced:
        asked = {"timeout": str(1000 * seconds), "filter": msgspec.json.encode(FILTER).decode()}
        if since:
            asked["since"] = since
        target = f"/sync?{urlencode(asked)}"
        return await self._call("GET", target, None, Synced, self._poll_client, seconds + MARGIN_SECONDS)

    async def _join_invites(self, rooms: Rooms, inbox: Inbox) -> None:
        """Accept invitations from admitted people; ignore all others."""
        for room, invited in rooms.invite.items():
            mine = [one for one in invited.invite_state.events if one.type == "m.room.member"]
            by = next((one.sender for one in mine if one.state_key == self._me), "")
            if not by or not await inbox.knows(by):
                continue
            try:
                await self._call("POST", f"/rooms/{quote(room, safe='')}/join", {}, Done)
            except Refused as error:  # the invitation was withdrawn, or the room is gone
                log.info("channel %s could not join a room: %s", self.name, error)

    async def _take_room(self, room: str, timeline: Timeline, since: str, inbox: Inbox) -> None:
        events = timeline.events
        if timeline.limited and timeline.prev_batch:
            events = [*await self._missed(room, timeline.prev_batch, since), *events]
        if self._crypto is not None and timeline.limited:
            self._crypto.members_changed(room)
        joined_at = max((n for n, one in enumerate(events) if self._is_own_join(one)), default=-1)
        # Messages from before a room was encrypted may be plain, as long as the room is not known to be encrypted.
        begins = max((n for n, one in enumerate(events) if one.type == "m.room.encryption"), default=-1)
        plain_until = begins if room not in self._encrypted else -1
        if begins >= 0:
            self._plain.discard(room)
        for number, event in enumerate(events):
            if event.type == "m.room.member":
                self._direct.pop(room, None)
                if self._crypto is not None:
                    self._crypto.members_changed(room)
            elif number > joined_at:  # earlier messages are not for the agent
                await self._take_event(room, event, number < plain_until, inbox)

    async def _take_event(self, room: str, event: Event, may_be_plain: bool, inbox: Inbox) -> None:
        opened: Event | None = event
        if event.sender == self._me:
            return
        if event.type == "m.room.encrypted":
            opened = await self._decrypted(room, event)
        elif event.type == "m.room.message" and not may_be_plain and await self._is_encrypted(room):
            self._tell(room, "a message is ignored because it is unencrypted in an encrypted room")
            return
        if opened is not None and (message := await self._received(room, opened)) is not None:
            await inbox.accept(message)

    async def _decrypted(self, room: str, event: Event) -> Event | None:
        if self._crypto is None:
            self._tell(room, "it is encrypted, and cannot be read without `encryption = true`")
            return None
        payload = await self._crypto.decrypt(room, event.sender, event.event_id, event.content)
        if payload is None:
            return None
        if not await self._is_encrypted(room):  # the server denies that it is: answers are encrypted nevertheless
            await self._keep_settings(room, {"algorithm": event.content["algorithm"]})
        content = payload.content
        if "m.relates_to" in event.content:  # which is sent unencrypted
            content = {"m.relates_to": event.content["m.relates_to"], **content}
        return Event(payload.type, event.sender, event.event_id, None, content)

    def _tell(self, room: str, what: str) -> None:
        if room not in self._told:
            self._told.add(room)
            log.warning("channel %s: the room %s: %s", self.name, one_line(room, 80), what)

    async def _is_encrypted(self, room: str) -> bool:
        return self._crypto is not None and await self._settings(room) is not None

    async def _settings(self, room: str) -> dict[str, Any] | None:
        """Return a room's encryption settings; None if it is plain. A server cannot turn encryption off again."""
        if room in self._encrypted or room in self._plain:
            return self._encrypted.get(room)
        try:
            target = f"/rooms/{quote(room, safe='')}/state/m.room.encryption/"
            settings = await self._call("GET", target, None, dict[str, Any])
        except Refused as error:
            if error.errcode != "M_NOT_FOUND":
                raise
            self._plain.add(room)
            return None
        await self._keep_settings(room, settings)
        return settings

    async def _keep_settings(self, room: str, settings: dict[str, Any]) -> None:
        if self._crypto is not None:
            await self._crypto.keep_room(room, settings)
        self._encrypted[room] = settings

    def _is_own_join(self, event: Event) -> bool:
        joins = event.type == "m.room.member" and event.content.get("membership") == "join"
        return joins and event.state_key == self._me

    async def _missed(self, room: str, start: str, since: str) -> list[Event]:
        """Return the events of a room between two positions, oldest first."""
        found: list[Event] = []
        place: str | None = start
        while place is not None and len(found) < MAX_MISSED:
            asked = {"dir": "b", "from": place, "limit": "100", **({"to": since} if since else {})}
            target = f"/rooms/{quote(room, safe='')}/messages?{urlencode(asked)}"
            page = await self._call("GET", target, None, Messages)
            found += page.chunk
            place = page.end if page.chunk else None
        return found[::-1]

    async def _received(self, room: str, event: Event) -> Received | None:
        """Convert an event to a message; None if no person wrote it."""
        content = event.content
        if event.type != "m.room.message" or event.sender == self._me or not event.event_id:
            return None
        text, kind = content.get("body"), content.get("msgtype")
        relation = content.get("m.relates_to")
        relation = relation if isinstance(relation, dict) else {}
        if not isinstance(text, str) or kind == "m.notice" or relation.get("rel_type") == "m.replace":
            return None  # notices come from programs
        files: tuple[Attachment, ...] = ()
        if kind not in ("m.text", "m.emote"):  # a file; without a caption, the text is its name
            name, info = content.get("filename"), content.get("info")
            size = info.get("size") if isinstance(info, dict) else None
            title = name if isinstance(name, str) else text
            text = text if isinstance(name, str) and name != text else ""
            read = partial(self._read_file, content)
            files = (Attachment(title, read, size if isinstance(size, int) else None),)
        thread = relation.get("event_id") if relation.get("rel_type") == "m.thread" else ""
        mentions = content.get("m.mentions")
        named = isinstance(mentions, dict) and self._me in (mentions.get("user_ids") or [])
        said, own = _without_quote(text) if "m.in_reply_to" in relation else text, self._me[1:].partition(":")[0]
        text, in_words = without_name(said, self._me, *self._names, own)
        return Received(
            id=event.event_id,
            chat=room,
            sender=event.sender,
            text=text,
            name=event.sender[1:].partition(":")[0],
            group=not await self._is_direct(room),
            mentioned=named or in_words,
            thread=thread if isinstance(thread, str) else "",
            files=files,
        )

    async def _read_file(self, content: dict[str, Any], limit: int) -> bytes:
        """Read the file of a message; in encrypted rooms it is encrypted, too."""
        if self._encrypts and "file" in content:
            from .matrix_crypto import EncryptedFile, decrypted

            try:
                file = msgspec.convert(content["file"], EncryptedFile)
            except msgspec.ValidationError:
                raise Never("no encrypted file") from None
            data = await self._download(file.url, limit)
            return data if len(data) > limit else await in_thread(decrypted, data, file)
        url = content.get("url")
        return await self._download(url if isinstance(url, str) else "", limit)

    async def _download(self, url: str, limit: int) -> bytes:
        """Download a file by its address, such as mxc://example.org/abc."""
        if not (found := re.fullmatch(r"mxc://([^/\s?#]+)/([A-Za-z0-9_-]+)", url)):
            raise Never("no address of a file")
        target = f"{self._client.target.rstrip('/')}{MEDIA}/download/{quote(found[1], safe=':')}/{found[2]}"
        return await self._client.download(target, {"Authorization": f"Bearer {self._token}"}, limit)

    async def _is_direct(self, room: str) -> bool:
        if room not in self._direct:
            target = f"/rooms/{quote(room, safe='')}/joined_members"
            self._direct[room] = len((await self._call("GET", target, None, Members)).joined) <= 2
        return self._direct[room]

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        content: dict[str, Any] = {"msgtype": "m.text", "body": part.plain, "m.mentions": {}}
        if part.files:
            content |= await self._file_content(part)
        elif part.text != part.plain:
            content |= {"format": "org.matrix.custom.html", "formatted_body": _with_breaks(part.text)}
        if part.thread:
            content["m.relates_to"] = {"rel_type": "m.thread", "event_id": part.thread, "is_falling_back": True}
            content["m.relates_to"]["m.in_reply_to"] = {"event_id": part.thread}
        kind = "m.room.message"
        if (crypto := await self._crypto_for(part.chat)) is not None:
            kind, content = "m.room.encrypted", await self._encrypted_content(crypto, part.chat, content)
        target = f"/rooms/{quote(part.chat, safe='')}/send/{kind}/{key}"
        return (await self._call("PUT", target, content, SentEvent)).event_id

    async def _crypto_for(self, room: str) -> Crypto | None:
        """Return the keys for an encrypted room; None for a plain one."""
        if not self._encrypts:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEYS_SECONDS):
                await self._has_keys.wait()
        if (crypto := self._crypto) is None:
            raise Later(1.0, "the keys are not read yet")
        try:
            return crypto if await self._settings(room) is not None else None
        except (OSError, TimeoutError, StoreError) as error:  # nothing was sent, so the next attempt is no repeat
            raise Later(2.0, f"cannot encrypt: {error}") from error

    async def _encrypted_content(self, crypto: Crypto, room: str, content: dict[str, Any]) -> dict[str, Any]:
        try:
            return await crypto.encrypt(room, content, self._encrypted[room])
        except (OSError, TimeoutError, StoreError) as error:  # nothing was sent, so the next attempt is no repeat
            raise Later(2.0, f"cannot encrypt: {error}") from error

    async def _file_content(self, part: Part) -> dict[str, Any]:
        """Upload a file, encrypted if the room is, and return the content of its message."""
        (file,) = part.files
        content: dict[str, Any] = {
            "msgtype": "m.image" if file.is_picture else "m.file",
            "body": part.plain or file.name,
            "filename": file.name,
            "info": {"mimetype": file.type, "size": len(file.data)},
        }
        if await self._crypto_for(part.chat) is None:
            return {**content, "url": await self._upload(file.data, file.type)}
        from .matrix_crypto import encrypted

        data, keys = await in_thread(encrypted, file.data)
        return {**content, "file": {**keys, "url": await self._upload(data, "application/octet-stream")}}

    async def _upload(self, data: bytes, type: str) -> str:
        """Upload a file and return its address. Its name is in the message, which may be encrypted."""
        target = f"{self._client.target.rstrip('/')}/_matrix/media/v3/upload"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": type}
        try:
            reply = await self._client.request("POST", target, headers, data, UPLOAD_SECONDS)
            if reply.status == 413:
                raise NoFile("it is too large for the server")
            return self._read_reply("/upload", reply, Uploaded).content_uri
        except (OSError, TimeoutError) as error:  # no message was sent, so the next attempt is no repeat
            raise Later(5.0, f"cannot upload: {error}") from error

    async def show(self, chat: str, key: str, text: str) -> None:
        target = f"/rooms/{quote(chat, safe='')}/typing/{quote(self._me, safe='')}"
        await self._call("PUT", target, {"typing": True, "timeout": 1000 * TYPING_SECONDS}, Done)

    async def check(self) -> str:
        """Ask who the account is."""
        try:
            return (await self._call("GET", "/account/whoami", None, WhoAmI)).user_id
        finally:
            await self.close()

    async def close(self) -> None:
        self._crypto = None  # from now on another worker may change the keys
        self._has_keys.clear()
        await asyncio.gather(self._poll_client.close(), self._client.close())

    async def _call(
        self,
        method: str,
        path: str,
        asked: dict[str, Any] | None,
        result: type[T],
        client: HttpClient | None = None,
        seconds: float = CALL_SECONDS,
    ) -> T:
        """Send a request; all of them can be repeated."""
        client = client or self._client
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        body = b"" if asked is None else msgspec.json.encode(asked)
        reply = await client.request(method, client.target.rstrip("/") + API + path, headers, body, seconds)
        return self._read_reply(path, reply, result)

    def _read_reply(self, path: str, reply: Reply, result: type[T]) -> T:
        if reply.status == 200:
            try:
                return msgspec.json.decode(reply.body, type=result)
            except msgspec.MsgspecError:
                raise OSError(f"{path.partition('?')[0]}: no answer of a Matrix server") from None
        try:
            failure = msgspec.json.decode(reply.body, type=Failure)
        except msgspec.MsgspecError:
            failure = Failure(error=f"HTTP {reply.status}")
        if reply.status == 429:
            raise Later((failure.retry_after_ms or 0) / 1000 or reply.retry_after or 5.0, "429 rate limited")
        if reply.status >= 500:
            raise OSError(f"HTTP {reply.status} {one_line(failure.error, 100)}")
        raise Refused(reply.status, failure)


def _import_crypto(options: Options) -> None:
    try:
        import vodozemac  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"[channels.{options.name}] encryption needs a package: pip install 'everloop[matrix]'"
        ) from None


def _without_quote(text: str) -> str:
    """Return a reply without the quoted lines that older clients put first."""
    lines = text.split("\n")
    while lines and lines[0].startswith("> "):
        lines.pop(0)
    return "\n".join(lines).strip() or text


def _with_breaks(text: str) -> str:
    """Return HTML with line ends as tags, except in code blocks."""
    parts = re.split(r"(<pre>.*?</pre>)", text, flags=re.S)
    return "".join(one if one.startswith("<pre>") else one.replace("\n", "<br>") for one in parts)
