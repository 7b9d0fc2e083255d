"""The JSON API of the web page: sessions, their logs and feeds, messages, stop, answers to questions, and search."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from ..bus import INSIDE, WEB, Busy, InboundMessage
from ..errors import StoreError
from ..log import Logged, TurnEnded, UserSaid
from ..providers.openai import encode
from ..runtime.owners import Owners
from ..store.base import SessionInfo
from ..text import clean, one_line
from ..threads import in_thread
from .access import Access, set_cookie
from .errors import bad_request, conflict, not_found, unauthorized, unavailable
from .feed import FeedHandler, entry_of, read_number, words_of
from .guard import LOGIN, OWNER
from .page_changes import ChangesApi, MakeChanges
from .page_channels import ChannelsApi
from .page_files import FileNames, FilesApi, NoFileNames, attached
from .page_operation import Checks, OperationApi, no_checks
from .page_push import PushApi
from .page_routes import (
    EVENTS,
    MAX_KEY,
    Nothing,
    Parameter,
    add_operations,
    json_response,
    key_of,
    operation,
    own_key_of,
    read_body,
    read_text,
    who,
)
from .page_sessions import Export, SessionsApi, no_export
from .page_timeline import TimelineApi
from .page_work import WorkApi
from .turns import CHANNEL as API_CHANNEL
from .turns import RateLimit

log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
State = Literal["running", "waiting", "failed", "idle"]
TITLE = 80  # characters
SESSIONS = 100
KNOWN = 1_000  # cached titles and ends of sessions
MAX_TEXT = 1_000_000
MAX_NOTE = 10_000
MAX_MEDIA = 20
FOUND = 20
PAGE = 200  # log entries per response
HIDDEN = (*(f"{channel}:" for channel in INSIDE), f"{API_CHANNEL}:chatcmpl-")  # sessions that are not continued

# ---------------------------------------------------------------------------------------------- requests and responses


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    id: str = ""  # idempotency key: a message sent again with the same id is handled once
    busy: Busy | None = None
    media: list[str] = []  # paths of uploaded files


class AnswerBody(msgspec.Struct, forbid_unknown_fields=True):
    question: int  # the position of the question in the log
    allow: bool
    always: bool = False
    note: str = ""


class LoginBody(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two fields."""

    link: str = ""  # the code of a one-time link
    token: str = ""


class LoggedIn(msgspec.Struct):
    owner: str
    page_key: str  # for the header X-Everloop-Page of later requests


class LoggedOut(msgspec.Struct):
    logged_out: bool


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


# ---------------------------------------------------------------------------------------------- handlers


@dataclass(slots=True, frozen=True)
class Services:
    """What the command line provides to the page.

    These are the checks of `doctor`, session export, file names for @ mentions, and the recording of workspace changes.
    """

    checks: Checks = no_checks
    export: Export = no_export
    file_names: Callable[[Path], FileNames] = NoFileNames
    named_files: Callable[[str, Path], list[str]] = lambda text, workspace: []
    changes: MakeChanges | None = None


NO_SERVICES = Services()


class PageApi:
    """Everything under `/api/`. A request only sees data of its owner."""

    def __init__(
        self,
        owners: Owners,
        access: Access,
        *,
        ping_seconds: float,
        per_minute: int = 0,
        services: Services = NO_SERVICES,
    ) -> None:
        self._owners = owners
        self._access = access
        self._store = owners.store
        self._feeds = FeedHandler(owners.store, ping_seconds)
        self._changes = ChangesApi(owners, services.changes)
        self._others = (
            self._changes,
            SessionsApi(owners, services.export),
            TimelineApi(owners),
            WorkApi(owners),
            FilesApi(owners, services.file_names),
            OperationApi(owners, services.checks),
            ChannelsApi(owners),
            PushApi(owners),
        )
        self._named_files = services.named_files
        self._rate_limit = RateLimit(owners.store, per_minute)
        self._titles: dict[int, str] = {}  # by session
        self._failed: dict[tuple[int, int], bool] = {}  # by session and its number of entries

    def add_routes(self, router: web.UrlDispatcher) -> None:
        for handlers in (self, *self._others):
            add_operations(router, handlers)

    def stop(self) -> None:
        """End the feeds, because the server is shutting down."""
        self._changes.stop()
        self._feeds.stop()

    @operation(
        "POST",
        LOGIN,
        "login",
        "Exchange a one-time link, or a token, for the page's cookie.",
        LoggedIn,
        LoginBody,
        public=True,
    )
    async def _login(self, request: web.Request) -> web.Response:
        """Exchange the code of a one-time link, or a token, for the page's cookie."""
        body = await read_body(request, LoginBody)
        try:
            login = await (self._access.redeem(body.link) if body.link else self._access.login(body.token))
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot use its store at the moment; try again") from error
        if login is None:
            what = "this link was used before or is too old" if body.link else "this token is unknown or revoked"
            raise unauthorized(what, "not_logged_in")
        response = json_response(LoggedIn(login.owner, login.page_key))
        set_cookie(request, response, login)
        return response

    @operation("POST", "/api/logout", "logout", "Remove the page's cookie.", LoggedOut, Nothing)
    async def _logout(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        response = json_response(LoggedOut(True))
        set_cookie(request, response, None)
        return response

    @operation(
        "GET",
        "/api/sessions",
        "sessions",
        "The latest unarchived sessions with their states.",
        SessionList,
        None,
        Parameter("archived", "1 for archived sessions instead."),
    )
    async def _sessions(self, request: web.Request) -> web.Response:
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
    async def _feed(self, request: web.Request) -> web.StreamResponse:
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
    async def _log(self, request: web.Request) -> web.Response:
        """Return a page of the log that ends before a position."""
        info = await self._store.session(request[OWNER], key_of(request))
        if info is None:
            raise not_found("there is no such session", code="session_not_found")
        before = read_number(request, "before", info.entries + 1, 10**15)
        limit = read_number(request, "limit", PAGE, PAGE)
        first = max(before - 1 - limit, 0)
        logged = await self._store.read_log(info.id, first, before - 1)
        return json_response(LogPage([msgspec.Raw(encode(entry_of(one))) for one in logged], first > 0))

    @operation("POST", "/api/sessions/{key}/messages", "message", "Send a message.", Posted, MessageBody, status=202)
    async def _post(self, request: web.Request) -> web.Response:
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
            id=f"{WEB}:{len(key)}:{key}:{id}",  # the length is included because both may contain colons
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
    async def _stop(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        owner, key = request[OWNER], own_key_of(request)
        agent = await self._owners.agent(owner)
        stopped = await agent.conversations.stop(owner, key, who(request))
        self._feeds.look(owner, key)
        return json_response(Stopped(stopped))

    @operation("POST", "/api/sessions/{key}/answer", "answer", "Answer an open question.", Answered, AnswerBody)
    async def _answer(self, request: web.Request) -> web.Response:
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
    async def _search(self, request: web.Request) -> web.Response:
        query = read_text(request, "q", 1_000)
        found = await self._store.search(request[OWNER], query, read_number(request, "limit", FOUND, 100))
        return json_response(
            FoundList([FoundItem(one.session, one.seq, one.at, one.role, clean(one.text)) for one in found])
        )


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


HANDLERS: tuple[type, ...] = (
    PageApi,
    SessionsApi,
    TimelineApi,
    WorkApi,
    FilesApi,
    ChangesApi,
    OperationApi,
    ChannelsApi,
    PushApi,
)  # of all operations of the page
