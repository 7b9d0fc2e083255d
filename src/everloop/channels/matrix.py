"""Matrix, by the client-server API: plain rooms.

A sync is confirmed by asking for the next one, which is done only when its messages are on disk; what a sync leaves out
is read from the room's history. A part is sent under its key as the transaction, which the server knows for a while.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from ..text import one_line
from .base import Attachment, Can, Inbox, Later, Never, Options, Part, Received
from .http import HttpClient

log = logging.getLogger(__name__)
API = "/_matrix/client/v3"
MEDIA = "/_matrix/client/v1/media"
POLL_SECONDS = 30
MARGIN_SECONDS = 20.0
CALL_SECONDS = 30.0
TYPING_SECONDS = 6
TIMELINE = 50  # events of a room in a sync; more are read from its history
MOST_MISSED = 1000  # events of a room that are read so
FILTER = {
    "presence": {"types": []},
    "account_data": {"types": []},
    "room": {
        "timeline": {"limit": TIMELINE, "types": ["m.room.message", "m.room.member", "m.room.encrypted"]},
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


class Synced(msgspec.Struct):
    next_batch: str
    rooms: Rooms = msgspec.field(default_factory=Rooms)


class Messages(msgspec.Struct):
    chunk: list[Event] = []
    end: str | None = None


class WhoAmI(msgspec.Struct):
    user_id: str


class Members(msgspec.Struct):
    joined: dict[str, Any] = {}


class SentEvent(msgspec.Struct):
    event_id: str


class Done(msgspec.Struct):
    """An answer that says nothing more."""


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

    can = Can(text=16_000, form="html", repeats="window", threads=True, typing=True)

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._token = options.secret("token")
        server = options.address("server")
        self._names = options.texts("names")
        self._from_now = options.text("start", "new", choices=("new", "all")) == "new"
        if not self._token.isascii() or " " in self._token:
            raise options.problem("token has characters that no access token has")
        # Polling has a connection of its own: it is busy nearly all of the time.
        self._poll_client, self._client = HttpClient(server), HttpClient(server)
        self._me = ""
        self._direct: dict[str, bool] = {}  # rooms with one other person
        self._unreadable: set[str] = set()  # encrypted rooms

    # ------------------------------------------------------------------------------------------ receiving

    async def receive(self, inbox: Inbox) -> None:
        self._me = (await self._call("GET", "/account/whoami", None, WhoAmI)).user_id
        since = await inbox.cursor()
        await inbox.ready()
        while True:
            synced = await self._sync(since, POLL_SECONDS if since else 0)
            await self._join_invites(synced.rooms, inbox)
            if since or not self._from_now:  # else it was said before the first start
                for room, joined in synced.rooms.join.items():
                    await self._take_room(room, joined.timeline, since, inbox)
            if synced.rooms.join or not since:
                await inbox.keep_cursor(synced.next_batch)
            since = synced.next_batch

    async def _sync(self, since: str, seconds: int) -> Synced:
        asked = {"timeout": str(1000 * seconds), "filter": msgspec.json.encode(FILTER).decode()}
        if since:
            asked["since"] = since
        target = f"/sync?{urlencode(asked)}"
        return await self._call("GET", target, None, Synced, self._poll_client, seconds + MARGIN_SECONDS)

    async def _join_invites(self, rooms: Rooms, inbox: Inbox) -> None:
        """Join the rooms that people who are let in have invited the agent to. Others get nothing."""
        for room, invited in rooms.invite.items():
            mine = [one for one in invited.invite_state.events if one.type == "m.room.member"]
            by = next((one.sender for one in mine if one.state_key == self._me), "")
            if not by or not await inbox.knows(by):
                continue
            try:
                await self._call("POST", f"/rooms/{quote(room, safe='')}/join", {}, Done)
            except Refused as error:  # the invitation was taken back, or the room is gone
                log.info("channel %s could not join a room: %s", self.name, error)

    async def _take_room(self, room: str, timeline: Timeline, since: str, inbox: Inbox) -> None:
        events = timeline.events
        if timeline.limited and timeline.prev_batch:
            events = [*await self._missed(room, timeline.prev_batch, since), *events]
        joined_at = max((n for n, one in enumerate(events) if self._is_own_join(one)), default=-1)
        for event in events[joined_at + 1 :]:  # what was said before it was there is not for the agent
            if event.type == "m.room.member":
                self._direct.pop(room, None)
            elif event.type == "m.room.encrypted" and room not in self._unreadable:
                self._unreadable.add(room)
                log.warning("channel %s: the room %s is encrypted, which cannot be read", self.name, one_line(room, 80))
            elif (message := await self._received(room, event)) is not None:
                await inbox.accept(message)

    def _is_own_join(self, event: Event) -> bool:
        joins = event.type == "m.room.member" and event.content.get("membership") == "join"
        return joins and event.state_key == self._me

    async def _missed(self, room: str, start: str, since: str) -> list[Event]:
        """The events of a room between two places, the oldest first."""
        found: list[Event] = []
        place: str | None = start
        while place is not None and len(found) < MOST_MISSED:
            asked = {"dir": "b", "from": place, "limit": "100", **({"to": since} if since else {})}
            target = f"/rooms/{quote(room, safe='')}/messages?{urlencode(asked)}"
            page = await self._call("GET", target, None, Messages)
            found += page.chunk
            place = page.end if page.chunk else None
        return found[::-1]

    async def _received(self, room: str, event: Event) -> Received | None:
        """The message of an event; None for what no person wrote."""
        content = event.content
        if event.type != "m.room.message" or event.sender == self._me or not event.event_id:
            return None
        text, kind = content.get("body"), content.get("msgtype")
        relation = content.get("m.relates_to")
        relation = relation if isinstance(relation, dict) else {}
        if not isinstance(text, str) or kind == "m.notice" or relation.get("rel_type") == "m.replace":
            return None  # notices are written by programs
        files: tuple[Attachment, ...] = ()
        if kind not in ("m.text", "m.emote"):  # a file, whose name is the text where it has no caption
            name, url, info = content.get("filename"), content.get("url"), content.get("info")
            size = info.get("size") if isinstance(info, dict) else None
            title = name if isinstance(name, str) else text
            text = text if isinstance(name, str) and name != text else ""
            url = url if isinstance(url, str) else ""
            files = (Attachment(title, partial(self._download, url), size if isinstance(size, int) else None),)
        thread = relation.get("event_id") if relation.get("rel_type") == "m.thread" else ""
        mentions = content.get("m.mentions")
        named = isinstance(mentions, dict) and self._me in (mentions.get("user_ids") or [])
        text, in_words = self._without_name(_without_quote(text) if "m.in_reply_to" in relation else text)
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

    async def _download(self, url: str, limit: int) -> bytes:
        """Read a file by its address, such as mxc://example.org/abc."""
        if not (found := re.fullmatch(r"mxc://([^/\s?#]+)/([A-Za-z0-9_-]+)", url)):
            raise Never("no address of a file")
        target = f"{self._client.target.rstrip('/')}{MEDIA}/download/{quote(found[1], safe=':')}/{found[2]}"
        return await self._client.download(target, {"Authorization": f"Bearer {self._token}"}, limit)

    async def _is_direct(self, room: str) -> bool:
        if room not in self._direct:
            target = f"/rooms/{quote(room, safe='')}/joined_members"
            self._direct[room] = len((await self._call("GET", target, None, Members)).joined) <= 2
        return self._direct[room]

    def _without_name(self, text: str) -> tuple[str, bool]:
        """The text without the name that it begins with, and whether a name is in it at all."""
        local = self._me[1:].partition(":")[0]
        names = "|".join(re.escape(name) for name in (self._me, *self._names, local))
        if begins := re.match(rf"@?(?:{names})[:,]?\s+", text, re.IGNORECASE):
            return text[begins.end() :], True
        return text, re.search(rf"(?<![\w-])(?:{names})(?![\w-])", text, re.IGNORECASE) is not None

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, part: Part, key: str) -> str:
        content: dict[str, Any] = {"msgtype": "m.text", "body": part.plain, "m.mentions": {}}
        if part.text != part.plain:
            content |= {"format": "org.matrix.custom.html", "formatted_body": _with_breaks(part.text)}
        if part.thread:
            content["m.relates_to"] = {"rel_type": "m.thread", "event_id": part.thread, "is_falling_back": True}
            content["m.relates_to"]["m.in_reply_to"] = {"event_id": part.thread}
        target = f"/rooms/{quote(part.chat, safe='')}/send/m.room.message/{key}"
        return (await self._call("PUT", target, content, SentEvent)).event_id

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


def _without_quote(text: str) -> str:
    """A reply without the lines that older clients quote before it."""
    lines = text.split("\n")
    while lines and lines[0].startswith("> "):
        lines.pop(0)
    return "\n".join(lines).strip() or text


def _with_breaks(text: str) -> str:
    """HTML with its line ends as tags; blocks of code keep theirs."""
    parts = re.split(r"(<pre>.*?</pre>)", text, flags=re.S)
    return "".join(one if one.startswith("<pre>") else one.replace("\n", "<br>") for one in parts)
