"""The JSON API of the web page: sessions, their logs and feeds, messages, stop, answers to questions, and search."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from ..bus import INSIDE, WEB, Busy, InboundMessage
from ..errors import StoreError
from ..log import Logged, TurnEnded, UserSaid, text_of
from ..messages import encode_json
from ..providers.openai import encode
from ..runtime.owners import Owners
from ..store.base import SessionInfo
from ..text import clean, one_line
from .access import Access, set_cookie
from .errors import bad_request, conflict, not_found, unauthorized, unavailable
from .feed import FeedHandler, entry_of, read_number
from .guard import LOGIN, OWNER, TOKEN, VISITOR
from .turns import CHANNEL as API_CHANNEL
from .turns import RateLimit

log = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
B = TypeVar("B", bound=msgspec.Struct)
State = Literal["running", "waiting", "failed", "idle"]
TITLE = 80  # characters
SESSIONS = 100
KNOWN = 1_000  # titles and ends of sessions that are kept in memory
MAX_KEY = 200
MAX_TEXT = 1_000_000
MAX_NOTE = 10_000
FOUND = 20
PAGE = 200  # entries of the log in one response
HIDDEN = (*(f"{channel}:" for channel in INSIDE), f"{API_CHANNEL}:chatcmpl-")  # sessions that are not continued

# ---------------------------------------------------------------------------------------------- requests and responses


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    id: str = ""  # a message that is sent again with its id is taken once
    busy: Busy | None = None


class AnswerBody(msgspec.Struct, forbid_unknown_fields=True):
    question: int  # the position of the question in the log
    allow: bool
    always: bool = False
    note: str = ""


class LoginBody(msgspec.Struct, forbid_unknown_fields=True):
    """One of both."""

    link: str = ""  # the code of a one-time link
    token: str = ""


class LoggedIn(msgspec.Struct):
    owner: str
    page_key: str  # for the header X-Everloop-Page of further requests


class LoggedOut(msgspec.Struct):
    logged_out: bool


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class SessionItem(msgspec.Struct):
    key: str
    title: str
    state: State
    updated_at: float
    entries: int


class SessionList(msgspec.Struct):
    sessions: list[SessionItem]
    questions: int  # sessions that wait for an answer


class LogPage(msgspec.Struct):
    entries: list[msgspec.Raw]
    more: bool  # there are earlier ones


class Posted(msgspec.Struct):
    id: str
    reply: str | None  # of a command that was answered at once


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


class PageApi:
    """Everything under `/api/`. A request sees only what belongs to its owner."""

    def __init__(self, owners: Owners, access: Access, *, ping_seconds: float, per_minute: int = 0) -> None:
        self._owners = owners
        self._access = access
        self._store = owners.store
        self._feeds = FeedHandler(owners.store, ping_seconds)
        self._rate_limit = RateLimit(owners.store, per_minute)
        self._titles: dict[int, str] = {}  # by session
        self._failed: dict[tuple[int, int], bool] = {}  # by session and its number of entries

    def add_routes(self, router: web.UrlDispatcher) -> None:
        session = "/api/sessions/{key:.+}"
        router.add_post(LOGIN, self._login)
        router.add_post("/api/logout", self._guarded(self._logout))
        router.add_get("/api/sessions", self._guarded(self._sessions))
        router.add_get("/api/search", self._guarded(self._search))
        router.add_get(f"{session}/feed", self._guarded(self._feed))
        router.add_get(f"{session}/log", self._guarded(self._log))
        router.add_post(f"{session}/messages", self._guarded(self._post))
        router.add_post(f"{session}/stop", self._guarded(self._stop))
        router.add_post(f"{session}/answer", self._guarded(self._answer))

    def stop(self) -> None:
        """End the feeds: the server is shutting down."""
        self._feeds.stop()

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Let in only who has proven who they are. That a request comes from this machine is no proof: a command with
        network in the sandbox comes from there, too, and must not answer its own question."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if request[TOKEN] is None and VISITOR not in request:
                raise unauthorized(
                    "log in on the page, or send a token: Authorization: Bearer …; `everloop token add NAME` makes one",
                    "not_logged_in",
                )
            try:
                return await handler(request)
            except StoreError as error:
                log.error("%s", error)
                raise unavailable("the server cannot use its store just now; try again") from error

        return handle

    async def _login(self, request: web.Request) -> web.Response:
        """Exchange the code of a one-time link, or a token, for the page's cookie."""
        body = await _read(request, LoginBody)
        try:
            login = await (self._access.redeem(body.link) if body.link else self._access.login(body.token))
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot use its store just now; try again") from error
        if login is None:
            what = "this link was used before or is too old" if body.link else "this token is unknown or revoked"
            raise unauthorized(what, "not_logged_in")
        response = _json(LoggedIn(login.owner, login.page_key))
        set_cookie(request, response, login)
        return response

    async def _logout(self, request: web.Request) -> web.Response:
        await _read(request, Nothing)
        response = _json(LoggedOut(True))
        set_cookie(request, response, None)
        return response

    async def _sessions(self, request: web.Request) -> web.Response:
        owner = request[OWNER]
        infos = [info for info in await self._store.sessions(owner, 3 * SESSIONS) if not info.key.startswith(HIDDEN)]
        items = [await self._item(info) for info in infos[:SESSIONS]]
        return _json(SessionList(items, sum(item.state == "waiting" for item in items)))

    async def _item(self, info: SessionInfo) -> SessionItem:
        state: State = "idle"
        if info.open_turn is not None:
            state = "waiting" if info.parked else "running"
        elif await self._has_failed(info):
            state = "failed"
        return SessionItem(info.key, await self._title(info), state, info.updated_at, info.entries)

    async def _title(self, info: SessionInfo) -> str:
        """The title of a session, or its first words."""
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

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        owner, key = request[OWNER], _key(request)
        agent = await self._owners.agent(owner)
        return await self._feeds.stream(request, agent.conversations, owner, key)

    async def _log(self, request: web.Request) -> web.Response:
        """A page of the log that ends before a position."""
        info = await self._store.session(request[OWNER], _key(request))
        if info is None:
            raise not_found("there is no such session", code="session_not_found")
        before = read_number(request, "before", info.entries + 1, 10**15)
        limit = read_number(request, "limit", PAGE, PAGE)
        first = max(before - 1 - limit, 0)
        logged = await self._store.read_log(info.id, first, before - 1)
        return _json(LogPage([msgspec.Raw(encode(entry_of(one))) for one in logged], first > 0))

    async def _post(self, request: web.Request) -> web.Response:
        body, key, owner = await _read(request, MessageBody), _own_key(request), request[OWNER]
        if not body.text.strip() or len(body.text) > MAX_TEXT:
            raise bad_request(f"text: must have 1 to {MAX_TEXT:,} characters", "text")
        if len(body.id) > MAX_KEY:
            raise bad_request(f"id: must have at most {MAX_KEY} characters", "id")
        await self._rate_limit.check(owner)
        agent, id = await self._owners.agent(owner), clean(body.id) or secrets.token_hex(8)
        message = InboundMessage(
            WEB,
            _who(request),
            key,
            body.text,
            id=f"{WEB}:{len(key)}:{key}:{id}",  # with the length, because both may contain colons
            owner=owner,
            session=key,
            reply=False,
            busy=body.busy,
        )
        reply = await agent.conversations.post(message)
        self._feeds.look(owner, key)
        return _json(Posted(message.id or "", reply), 202)

    async def _stop(self, request: web.Request) -> web.Response:
        await _read(request, Nothing)
        owner, key = request[OWNER], _own_key(request)
        agent = await self._owners.agent(owner)
        stopped = await agent.conversations.stop(owner, key, _who(request))
        self._feeds.look(owner, key)
        return _json(Stopped(stopped))

    async def _answer(self, request: web.Request) -> web.Response:
        body, owner, key = await _read(request, AnswerBody), request[OWNER], _own_key(request)
        if len(body.note) > MAX_NOTE:
            raise bad_request(f"note: must have at most {MAX_NOTE:,} characters", "note")
        agent = await self._owners.agent(owner)
        answered = await agent.conversations.answer(
            owner,
            key,
            body.question,
            allowed=body.allow,
            by=_who(request),
            note=clean(body.note),
            always=body.always and body.allow,
        )
        self._feeds.look(owner, key)
        if not answered:
            raise conflict("this question is not open: it was answered, or its turn has ended", code="not_asked")
        return _json(Answered(True))

    async def _search(self, request: web.Request) -> web.Response:
        query = request.query.get("q", "")
        if not query.strip() or len(query) > 1_000:
            raise bad_request("q: must have 1 to 1,000 characters", "q")
        found = await self._store.search(request[OWNER], query, read_number(request, "limit", FOUND, 100))
        return _json(FoundList([FoundItem(one.session, one.seq, one.at, one.role, clean(one.text)) for one in found]))


def _key(request: web.Request) -> str:
    key = request.match_info["key"]
    if not key.strip() or len(key) > MAX_KEY or not key.isprintable():
        raise bad_request(f"the session's key must have 1 to {MAX_KEY} printable characters", "key")
    return key


def _own_key(request: web.Request) -> str:
    """The key of a session that a person may write to."""
    key = _key(request)
    if key.partition(":")[0] in INSIDE:
        raise bad_request(f"{key.partition(':')[0]}: is reserved for internal sessions", "key")
    return key


def _who(request: web.Request) -> str:
    token = request[TOKEN]
    return token.name if token is not None else "user"


def _said(one: Logged) -> str:
    entry = one.entry
    return text_of(entry.content) if isinstance(entry, UserSaid) and not entry.inside else ""


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Keep a value, and forget the oldest of too many."""
    known[key] = value
    if len(known) > KNOWN:
        del known[next(iter(known))]


async def _read(request: web.Request, shape: type[B]) -> B:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=shape)
    except msgspec.MsgspecError as error:
        raise bad_request(f"the body is not what is expected here: {error}") from None


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    try:
        data = encode_json(body)
    except UnicodeEncodeError:  # a lone surrogate in what a model wrote
        data = encode(msgspec.to_builtins(body))
    return web.Response(body=data, status=status, content_type="application/json")
