"""Sessions for the page: their list, logs and feeds, messages, stop, answers to questions, and search.

A session can also be forked, exported, renamed, archived and deleted, and its images are served from here.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args
from urllib.parse import quote

import msgspec
from aiohttp import web

from ..bus import INSIDE, WEB, InboundMessage, repeatable_id
from ..bus import Busy as BusyMode
from ..errors import EverloopError
from ..log import CallEnded, Logged, TurnEnded, UserSaid
from ..providers.openai import encode
from ..runtime.owners import Owners
from ..store.base import Busy, SessionInfo
from ..text import clean, one_line
from ..threads import in_thread
from .errors import bad_request, conflict, not_found
from .feed import FeedHandler, entry_of, read_number, words_of
from .guard import OWNER
from .page_changes import ChangesApi
from .page_files import HEADERS, attached
from .page_routes import (
    EVENTS,
    MAX_KEY,
    Nothing,
    Parameter,
    json_response,
    key_of,
    operation,
    own_key_of,
    own_session_in,
    read_body,
    read_text,
    session_in,
    who,
)
from .turns import CHANNEL as API_CHANNEL
from .turns import RateLimit

K = TypeVar("K")
V = TypeVar("V")
State = Literal["running", "waiting", "failed", "idle"]
Format = Literal["md", "jsonl", "html"]
Export = Callable[[Sequence[Logged], str, Format], str]
NamedFiles = Callable[[str, Path], list[str]]  # the paths that a text mentions, in a workspace
TITLE = 80  # characters
SESSIONS = 100
KNOWN = 1_000  # cached titles and ends of sessions
MAX_TEXT = 1_000_000
MAX_NOTE = 10_000
MAX_MEDIA = 20
FOUND = 20
PAGE = 200  # log entries per response
HIDDEN = (*(f"{channel}:" for channel in INSIDE), f"{API_CHANNEL}:chatcmpl-")  # sessions that are not continued
PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


def no_export(entries: Sequence[Logged], title: str, form: Format) -> str:
    """The default, which exports nothing."""
    raise EverloopError("this server exports no sessions")


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    id: str = ""  # idempotency key: a message sent again with the same id is handled once
    busy: BusyMode | None = None
    media: list[str] = []  # paths of uploaded files


class AnswerBody(msgspec.Struct, forbid_unknown_fields=True):
    question: int  # the position of the question in the log
    allow: bool
    always: bool = False
    note: str = ""


class SessionItem(msgspec.Struct):
    key: str
    title: str
    state: State
    updated_at: float
    entries: int
    archived: bool


class SessionList(msgspec.Struct):
    sessions: list[SessionItem]
    questions: int  # sessions that wait for an answer


class LogPage(msgspec.Struct):
    entries: list[msgspec.Raw]
    more: bool  # there are earlier entries


class Posted(msgspec.Struct):
    id: str
    reply: str | None  # the reply to a command that was answered at once


class Stopped(msgspec.Struct):
    stopped: bool


class Answered(msgspec.Struct):
    answered: bool


class FoundItem(msgspec.Struct):
    session: str
    seq: int
    at: float
    role: str
    text: str


class FoundList(msgspec.Struct):
    found: list[FoundItem]


class ForkBody(msgspec.Struct, forbid_unknown_fields=True):
    until: int  # the position of the last entry in the new session


class Forked(msgspec.Struct):
    key: str


class RenameBody(msgspec.Struct, forbid_unknown_fields=True):
    title: str  # "" removes a title


class Renamed(msgspec.Struct):
    title: str


class ArchiveBody(msgspec.Struct, forbid_unknown_fields=True):
    archived: bool


class Archived(msgspec.Struct):
    archived: bool


class SessionDeleted(msgspec.Struct):
    deleted: bool


class SessionsApi:
    """Reads and writes sessions of an owner: what a conversation does, and what is done to it as a whole."""

    def __init__(
        self,
        owners: Owners,
        changes: ChangesApi,
        export: Export,
        named_files: NamedFiles,
        *,
        ping_seconds: float,
        per_minute: int,
    ) -> None:
        self._owners = owners
        self._store = owners.store
        self._changes = changes
        self._export = export
        self._named_files = named_files
        self._feeds = FeedHandler(owners.store, ping_seconds)
        self._rate_limit = RateLimit(owners.store, per_minute)
        self._titles: dict[int, str] = {}  # by session
        self._failed: dict[tuple[int, int], bool] = {}  # by session and its number of entries

    def end_feeds(self) -> None:
        """End the feeds, because the server is shutting down."""
        self._feeds.stop()

    # ------------------------------------------------------------------------------------------ the conversation

    @operation(
        "GET",
        "/api/sessions",
        "sessions",
        "The latest unarchived sessions with their states.",
        SessionList,
        None,
        Parameter("archived", "1 for archived sessions instead."),
    )
    async def sessions(self, request: web.Request) -> web.Response:
        owner, archived = request[OWNER], request.query.get("archived", "") == "1"
        known = await self._store.sessions(owner, 10 * SESSIONS if archived else 3 * SESSIONS)
        infos = [info for info in known if info.archived is archived and not info.key.startswith(HIDDEN)]
        items = [await self._item(info) for info in infos[:SESSIONS]]
        return json_response(SessionList(items, sum(item.state == "waiting" for item in items)))

    async def _item(self, info: SessionInfo) -> SessionItem:
        state: State = "idle"
        if info.open_turn is not None:
            state = "waiting" if info.parked else "running"
        elif await self._has_failed(info):
            state = "failed"
        title = await self._title(info)
        return SessionItem(info.key, title, state, info.updated_at, info.entries, info.archived)

    async def _title(self, info: SessionInfo) -> str:
        """Return the session's title, or its first words."""
        if info.title:
            return info.title
        if (title := self._titles.get(info.id)) is None:
            logged = await self._store.read_log(info.id, 0, 3)
            title = next((one_line(text) for one in logged if (text := _said(one))), "")[:TITLE]
            if not title:
                return info.key
            _keep(self._titles, info.id, title)
        return title

    async def _has_failed(self, info: SessionInfo) -> bool:
        key = (info.id, info.entries)
        if (failed := self._failed.get(key)) is None:
            last = await self._store.read_log(info.id, max(info.entries - 1, 0))
            entry = last[-1].entry if last else None
            failed = isinstance(entry, TurnEnded) and entry.reason == "error"
            _keep(self._failed, key, failed)
        return failed

    @operation(
        "GET",
        "/api/sessions/{key}/feed",
        "feed",
        "A session as server-sent events: the entries of its log, then what is being written.",
        None,
        None,
        Parameter("after", "The position, or the id of an event, to resume from."),
        Parameter("last", "Without a position: how many entries before the end to start.", "integer"),
        Parameter("Last-Event-ID", "The id of the last event that the client has.", place="header"),
        media=EVENTS,
    )
    async def feed(self, request: web.Request) -> web.StreamResponse:
        owner, key = request[OWNER], key_of(request)
        agent = await self._owners.agent(owner)
        return await self._feeds.stream(request, agent.conversations, owner, key)

    @operation(
        "GET",
        "/api/sessions/{key}/log",
        "log",
        "Entries of a session's log, up to a position.",
        LogPage,
        None,
        Parameter("before", "The position before which the page ends.", "integer"),
        Parameter("limit", "How many entries.", "integer"),
    )
    async def log(self, request: web.Request) -> web.Response:
        info = await session_in(self._store, request)
        before = read_number(request, "before", info.entries + 1, 10**15)
        limit = read_number(request, "limit", PAGE, PAGE)
        first = max(before - 1 - limit, 0)
        logged = await self._store.read_log(info.id, first, before - 1)
        return json_response(LogPage([msgspec.Raw(encode(entry_of(one))) for one in logged], first > 0))

    @operation("POST", "/api/sessions/{key}/messages", "message", "Send a message.", Posted, MessageBody, status=202)
    async def post(self, request: web.Request) -> web.Response:
        body, key, owner = await read_body(request, MessageBody), own_key_of(request), request[OWNER]
        if not body.text.strip() or len(body.text) > MAX_TEXT:
            raise bad_request(f"text: must have 1 to {MAX_TEXT:,} characters", "text")
        if len(body.media) > MAX_MEDIA:
            raise bad_request(f"media: must have at most {MAX_MEDIA} files", "media")
        if len(body.id) > MAX_KEY:
            raise bad_request(f"id: must have at most {MAX_KEY} characters", "id")
        await self._rate_limit.check(owner)
        agent, id = await self._owners.agent(owner), clean(body.id) or secrets.token_hex(8)
        named = await in_thread(self._named_files, body.text, agent.workspace) if "@" in body.text else []
        content = await attached(agent, body.text, body.media, named[:MAX_MEDIA])
        message = InboundMessage(
            WEB,
            who(request),
            key,
            content if isinstance(content, str) else body.text,
            parts=content if isinstance(content, list) else None,
            id=repeatable_id(WEB, key, id),
            owner=owner,
            session=key,
            reply=False,
            busy=body.busy,
        )
        if not body.text.startswith("/"):
            await self._changes.before(agent, owner, key)
        reply = await agent.conversations.post(message)
        self._feeds.look(owner, key)
        return json_response(Posted(message.id or "", reply), 202)

    @operation("POST", "/api/sessions/{key}/stop", "stop", "Stop the running turn.", Stopped, Nothing)
    async def stop(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        owner, key = request[OWNER], own_key_of(request)
        agent = await self._owners.agent(owner)
        stopped = await agent.conversations.stop(owner, key, who(request))
        self._feeds.look(owner, key)
        return json_response(Stopped(stopped))

    @operation("POST", "/api/sessions/{key}/answer", "answer", "Answer an open question.", Answered, AnswerBody)
    async def answer(self, request: web.Request) -> web.Response:
        body, owner, key = await read_body(request, AnswerBody), request[OWNER], own_key_of(request)
        if len(body.note) > MAX_NOTE:
            raise bad_request(f"note: must have at most {MAX_NOTE:,} characters", "note")
        agent = await self._owners.agent(owner)
        answered = await agent.conversations.answer(
            owner,
            key,
            body.question,
            allowed=body.allow,
            by=who(request),
            note=clean(body.note),
            always=body.always and body.allow,
        )
        self._feeds.look(owner, key)
        if not answered:
            raise conflict("this question is not open: it was answered, or its turn has ended", code="not_asked")
        return json_response(Answered(True))

    @operation(
        "GET",
        "/api/search",
        "search",
        "Search all conversations.",
        FoundList,
        None,
        Parameter("q", "Words to look for.", required=True),
        Parameter("limit", "How many messages.", "integer"),
    )
    async def search(self, request: web.Request) -> web.Response:
        query = read_text(request, "q", 1_000)
        found = await self._store.search(request[OWNER], query, read_number(request, "limit", FOUND, 100))
        return json_response(
            FoundList([FoundItem(one.session, one.seq, one.at, one.role, clean(one.text)) for one in found])
        )

    # ------------------------------------------------------------------------------------------ the whole session

    @operation(
        "POST",
        "/api/sessions/{key}/fork",
        "fork",
        "Start a new session with the first entries of this one; an unfinished turn is run again.",
        Forked,
        ForkBody,
    )
    async def fork(self, request: web.Request) -> web.Response:
        body, info = await read_body(request, ForkBody), await session_in(self._store, request)
        if not 0 < body.until <= info.entries:
            raise bad_request(f"until: must be a position from 1 to {info.entries}", "until")
        made = await self._store.fork(info.owner, info.key, body.until, f"{WEB}:{secrets.token_hex(8)}")
        self._owners.changed()
        return json_response(Forked(made.key))

    @operation(
        "GET",
        "/api/sessions/{key}/export",
        "export",
        "The session as a document, with secrets redacted.",
        None,
        None,
        Parameter("format", "md, jsonl or html."),
        media="application/octet-stream",
    )
    async def export(self, request: web.Request) -> web.Response:
        info, form = await session_in(self._store, request), request.query.get("format", "md")
        if form not in get_args(Format):
            raise bad_request("format: must be md, jsonl or html", "format")
        entries = await self._store.read_log(info.id)
        try:
            text = await in_thread(self._export, entries, info.key, cast(Format, form))
        except EverloopError as error:
            raise bad_request(str(error), code="unsupported") from None
        name = quote(f"{re.sub(r'[^A-Za-z0-9_-]+', '-', info.key)}.{form}", safe="")
        headers = {**HEADERS, "Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
        data = text.encode("utf-8", "replace")
        return web.Response(body=data, headers=headers, content_type="application/octet-stream")

    @operation("POST", "/api/sessions/{key}/title", "rename", "Give a session a title.", Renamed, RenameBody)
    async def rename(self, request: web.Request) -> web.Response:
        body, info = await read_body(request, RenameBody), await session_in(self._store, request)
        title = one_line(body.title, TITLE)
        await self._store.set_title(info.owner, info.key, title)
        return json_response(Renamed(title))

    @operation(
        "POST",
        "/api/sessions/{key}/archive",
        "archive",
        "Archive a session until something happens in it, or unarchive it.",
        Archived,
        ArchiveBody,
    )
    async def archive(self, request: web.Request) -> web.Response:
        body, info = await read_body(request, ArchiveBody), await session_in(self._store, request)
        if body.archived and info.open_turn is not None:
            raise conflict("the session is running or waits for you: stop it first", code="running")
        await self._store.set_archived(info.owner, info.key, body.archived)
        return json_response(Archived(body.archived))

    @operation("POST", "/api/sessions/{key}/delete", "delete", "Delete a session.", SessionDeleted, Nothing)
    async def delete(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        info = await own_session_in(self._store, request)
        try:
            deleted = await self._store.delete_session(info.owner, info.key)
        except Busy:
            raise conflict("the session is running: stop it first", code="running") from None
        return json_response(SessionDeleted(deleted is not None))

    @operation(
        "GET",
        "/api/sessions/{key}/pictures/{seq}/{number}",
        "picture",
        "A picture of an entry.",
        None,
        None,
        media="image/*",
    )
    async def picture(self, request: web.Request) -> web.Response:
        info = await session_in(self._store, request)
        seq, number = (request.match_info[name] for name in ("seq", "number"))
        if not re.fullmatch(r"[0-9]{1,15}", seq, re.ASCII) or not re.fullmatch(r"[0-9]{1,3}", number, re.ASCII):
            raise bad_request("the position and the number of the picture must be numbers", "seq")
        logged = await self._store.read_log(info.id, int(seq) - 1, int(seq)) if int(seq) else []
        urls = pictures_of(logged[0]) if logged else []
        found = await in_thread(_decoded, urls[int(number)]) if int(number) < len(urls) else None
        if found is None:
            raise not_found("there is no such picture", code="picture_not_found")
        return web.Response(body=found[1], headers=HEADERS, content_type=found[0])


def pictures_of(one: Logged) -> list[str]:
    """Return the data URLs of the images in an entry."""
    match one.entry:
        case CallEnded(images=images):
            return list(images)
        case UserSaid(content=list(parts)):
            shown = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
            return [str(url.get("url", "")) if isinstance(url, dict) else str(url) for url in shown]
        case _:
            return []


def _decoded(url: str) -> tuple[str, bytes] | None:
    """Return the type and bytes of an image in a data URL; None for anything else."""
    found = _DATA.match(url)
    if found is None or found[1].lower() not in PICTURES:
        return None
    try:
        return found[1].lower(), base64.b64decode(url[found.end() :], validate=True)
    except binascii.Error:
        return None


def _said(one: Logged) -> str:
    entry = one.entry
    if not isinstance(entry, UserSaid) or entry.inside:
        return ""
    return words_of(entry.content)


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Cache a value, evicting the oldest if there are too many."""
    known[key] = value
    if len(known) > KNOWN:
        del known[next(iter(known))]
