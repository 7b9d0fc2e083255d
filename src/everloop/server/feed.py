"""GET /api/sessions/KEY/feed: a session as server-sent events, from a position in its log.

Every event that a client can resume from has an id: the position of the log's last entry, a mark that distinguishes
this entry from another one at the same position, and how much the client has of the text streamed after it. The ids are
valid on every server of the store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec import structs

from .. import events
from ..log import CallEnded, CallsAsked, Content, Logged, Noted, UserSaid, kind_of, text_of
from ..providers.openai import encode
from ..runtime.conversations import Conversations
from ..runtime.streaming import SessionState, SessionSubscriber, Streamed, Update, mark_of
from ..runtime.tool_calls import HOW_TO_ANSWER
from ..store.base import SessionInfo, Store
from ..text_cursor import Position
from .errors import bad_request
from .sse import LAST_EVENT_ID, WritePosition

RETRY = b"retry: 1000\n\n"
PING = b": ping\n\n"
PACE = 0.1  # minimum seconds between two chunks of text: a page that redraws at every word does nothing else
LAST = 1_000  # maximum number of entries before the end at which a client may start
_ID = re.compile(r"([0-9]{1,15})(?:-([0-9a-f]{8})(?:\.([0-9]{1,9})\.([0-9a-f]{8}))?)?", re.ASCII)


@dataclass(slots=True, frozen=True)
class Resume:
    """Where a client resumes: a position, and the mark of the entry there if the client knows it."""

    position: Position
    mark: int | None = None


def read_position(request: web.Request) -> Resume | None:
    """Return the position in the request: the id of the last event that the client has, or `after`."""
    for name, given in ((LAST_EVENT_ID, request.headers.get(LAST_EVENT_ID)), ("after", request.query.get("after"))):
        if given:
            found = _ID.fullmatch(given)
            if found is None:
                raise bad_request(f"{name}: is not a position in a feed; send the id of an event or a number", name)
            seq, mark, chars, sum = found.groups()
            position = Position(int(seq), int(chars or 0), int(sum, 16) if sum else None)
            return Resume(position, int(mark, 16) if mark else None)
    return None


async def start_of(store: Store, info: SessionInfo | None, wanted: Resume | None, last: int) -> Resume:
    """Return the start of a feed.

    Without a position, that is `last` entries before the end. A client whose entry is gone, because a power loss undid
    it, restarts at the turn at that position.
    """
    if info is None:
        return Resume(Position(0, 0))
    if wanted is None:
        return await _marked(store, info, max(info.entries - last, 0))
    seq = wanted.position.seq
    if wanted.mark is None:
        return await _marked(store, info, min(seq, info.entries))
    there = await store.read_log(info.id, max(seq - 1, 0), seq) if seq else []
    if not seq or (there and mark_of(there[0]) == wanted.mark):
        return wanted
    return await _marked(store, info, await _before_turn(store, info, min(seq, info.entries)))


async def _before_turn(store: Store, info: SessionInfo, seq: int) -> int:
    """Return the position before the turn that contains this entry."""
    there = await store.read_log(info.id, max(seq - 1, 0), seq)
    turn = there[0].turn if there else None
    found = await store.turns(info.owner, session=info.id, prefix=turn, limit=1) if turn else []
    return max((found[0].first_seq if found else seq) - 1, 0)


async def _marked(store: Store, info: SessionInfo, seq: int) -> Resume:
    there = await store.read_log(info.id, seq - 1, seq) if seq else []
    return Resume(Position(seq, 0), mark_of(there[0]) if there else None)


class FeedHandler:
    """Serves the feeds of all sessions."""

    def __init__(self, store: Store, ping_seconds: float) -> None:
        self._store = store
        self._ping_seconds = ping_seconds
        self._open: dict[tuple[str, str], set[SessionSubscriber]] = {}
        self._stopping = False

    def stop(self) -> None:
        """End all feeds, because the server is shutting down."""
        self._stopping = True
        for subscribers in self._open.values():
            for subscriber in subscribers:
                subscriber.end()

    def look(self, owner: str, key: str) -> None:
        """Check a session for changes."""
        for subscriber in self._open.get((owner, key), ()):
            subscriber.look()

    async def stream(
        self, request: web.Request, conversations: Conversations, owner: str, key: str
    ) -> web.StreamResponse:
        """Write a session's feed until the client disconnects or the server stops."""
        wanted, last = read_position(request), read_number(request, "last", LAST, LAST)
        start = await start_of(self._store, await self._store.session(owner, key), wanted, last)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        feed = Feed(start)
        subscriber = conversations.follow(owner, key, start.position, start.mark)
        self._open.setdefault((owner, key), set()).add(subscriber)
        try:
            await response.prepare(request)
            await response.write(RETRY + feed.opening())
            while not self._stopping and not subscriber.is_over:
                updates = await subscriber.next(self._ping_seconds)
                await response.write(b"".join(feed.encode(updates)) or PING)
                if any(isinstance(update, Streamed) for update in updates):
                    await asyncio.sleep(PACE)
            await response.write_eof()
        finally:
            subscriber.close()
            self._open[owner, key].discard(subscriber)
            if not self._open[owner, key]:
                del self._open[owner, key]
        return response


class Feed:
    """Encodes the events of one feed."""

    def __init__(self, start: Resume) -> None:
        self._start = start
        self._written = WritePosition()
        self._written.resume(start.position)
        self._mark = start.mark

    def opening(self) -> bytes:
        """Return the first event: anything the client has beyond this position is void."""
        return _event("start", {"after": self._start.position.seq, "chars": self._start.position.chars}, self._id())

    def encode(self, updates: Sequence[Update]) -> Iterator[bytes]:
        for update in _joined(updates):
            match update:
                case Logged():
                    self._written.advance(update.seq)
                    self._mark = mark_of(update)
                    yield _event("entry", entry_of(update), self._id())
                case SessionState(turn, parked, waiting):
                    texts = [{"id": id, "text": text} for id, text in waiting]
                    yield _event("state", {"turn": turn, "parked": parked, "waiting": texts})
                case Streamed(seq, events.Text(text)):
                    self._written.add(seq, text)
                    yield _event("text", {"after": seq, "text": text}, self._id())
                case Streamed(seq, events.Restarted()):
                    self._written.restart()
                    yield _event("restart", {"after": seq}, self._id())
                case Streamed(seq, event):
                    if (told := _told(event)) is not None:
                        yield _event(told[0], {"after": seq, **told[1]})

    def _id(self) -> str:
        written = self._written
        if not written.seq:
            return "0" if not written.chars else f"0-00000000.{written.chars}.{written.sum:08x}"
        at = f"{written.seq}-{self._mark or 0:08x}"
        return f"{at}.{written.chars}.{written.sum:08x}" if written.chars else at


def _told(event: events.Event) -> tuple[str, dict[str, Any]] | None:
    """Return the name and data of an event of the running round; None if a log entry covers it."""
    match event:
        case events.Reasoning(text):
            return "reasoning", {"text": text}
        case events.ToolStarted(call, name, _):
            return "tool", {"call": call, "name": name, "status": "running"}
        case events.ToolProgress(call, text):
            return "progress", {"call": call, "text": text}
        case events.ToolEnded(call, name, _, status, seconds):
            return "tool", {"call": call, "name": name, "status": status, "seconds": seconds}
        case events.Compacting(turns):
            return "compacting", {"turns": turns}
        case _:
            return None


def _joined(updates: Sequence[Update]) -> Iterator[Update]:
    """Yield the updates with adjacent texts joined."""
    held: Streamed | None = None
    for update in updates:
        if isinstance(update, Streamed) and isinstance(update.event, events.Text):
            before = held.event.text if held is not None and isinstance(held.event, events.Text) else ""
            held = Streamed(update.seq, events.Text(before + update.event.text))
            continue
        if held is not None:
            yield held
            held = None
        yield update
    if held is not None:
        yield held


def entry_of(one: Logged) -> dict[str, Any]:
    """Return a log entry for clients: without content meant only for the model, and with images only counted."""
    entry = one.entry
    facts: dict[str, Any] = {"seq": one.seq, "turn": one.turn, "at": one.at, "kind": kind_of(entry)}
    match entry:
        case UserSaid():
            return facts | {
                "text": words_of(entry.content),
                "job": entry.job,
                "note": entry.note,
                "images": 0 if isinstance(entry.content, str) else sum(map(_is_picture, entry.content)),
                "sender": entry.sender,
                "inside": entry.inside,
                "untrusted": entry.untrusted,
            }
        case CallEnded():
            return facts | {**structs.asdict(entry), "images": len(entry.images)}
        case CallsAsked():
            # Instructions for chat replies are useless next to buttons.
            question = entry.question.removesuffix(HOW_TO_ANSWER).rstrip()
            return facts | {"ids": entry.ids, "question": question, "grants": entry.grants}
        case Noted():
            message = entry.message
            return facts | {"role": str(message.get("role", "")), "text": text_of(message.get("content"))}
        case _:
            return facts | structs.asdict(entry)


def words_of(content: Content) -> str:
    """Return the text of a message, without a placeholder for each image."""
    return text_of(content if isinstance(content, str) else [part for part in content if not _is_picture(part)])


def _is_picture(part: dict[str, Any]) -> bool:
    return part.get("type") == "image_url"


def read_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number from the query."""
    given = request.query.get(name)
    if given is None:
        return default
    if not re.fullmatch(r"[0-9]{1,15}", given, re.ASCII) or not 0 < int(given) <= most:
        raise bad_request(f"{name}: must be a number from 1 to {most}", name)
    return int(given)


def _event(name: str, data: dict[str, Any], id: str = "") -> bytes:
    """Return one server-sent event. JSON has no line breaks, so its data is a single line."""
    head = f"event: {name}\nid: {id}\ndata: " if id else f"event: {name}\ndata: "
    return head.encode() + encode(data) + b"\n\n"
