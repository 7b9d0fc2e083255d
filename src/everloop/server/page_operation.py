"""Operator functions of the page: usage and costs, tokens, health, workers and leases."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from aiohttp import web

from ..log import Compacted, Logged, ModelAnswered
from ..runtime.owners import Owners
from ..store.base import SessionInfo, Token
from ..store.tokens import ADMIN, checked_agent, checked_name, checked_owner, checked_rights, hash_of, new_token
from .errors import not_found
from .feed import read_number
from .guard import OWNER
from .page_routes import Nothing, Parameter, json_response, operation, read_body, refusals
from .page_timeline import cost_by

DAYS = 30
SESSIONS = 500  # the latest sessions, whose usage is counted
MAX_ENTRIES = 20_000  # entries per session that are read for its usage
KNOWN = 2_000  # sessions whose usage is cached
DAY = 86_400


class Check(Protocol):
    """One check, as reported by `everloop doctor`."""

    @property
    def name(self) -> str: ...

    @property
    def ok(self) -> bool: ...

    @property
    def found(self) -> str: ...

    @property
    def fix(self) -> str: ...


Checks = Callable[[], Awaitable[Sequence[Check]]]


async def no_checks() -> Sequence[Check]:
    """The default, which checks nothing."""
    return ()


# ---------------------------------------------------------------------------------------------- responses


class UsageItem(msgspec.Struct):
    """The model calls of one session with one model on one day."""

    day: str  # in UTC, as in budgets
    session: str
    model: str
    calls: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None  # in dollars; None if no price is known


class UsageList(msgspec.Struct):
    usage: list[UsageItem]
    since: str  # the first day
    day_tokens: int  # the daily budget; 0 for none
    day_cost: float


class TokenItem(msgspec.Struct):
    id: str
    name: str
    owner: str
    rights: list[str]
    agent: str
    created_at: float
    last_used_at: float | None
    revoked_at: float | None


class TokenList(msgspec.Struct):
    tokens: list[TokenItem]


class TokenBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    owner: str
    rights: list[str]
    agent: str = ""


class NewToken(msgspec.Struct):
    token: str  # only shown this once
    item: TokenItem


class TokenRevoked(msgspec.Struct):
    revoked: bool


class HealthItem(msgspec.Struct):
    name: str
    ok: bool
    found: str
    fix: str


class HealthList(msgspec.Struct):
    ok: bool
    checks: list[HealthItem]


class WorkerItem(msgspec.Struct):
    id: str
    process: int
    held: int  # sessions that it holds
    silent: float  # seconds since its last heartbeat
    takes_work: bool


class LeaseItem(msgspec.Struct):
    owner: str
    session: str
    worker: str


class StuckItem(msgspec.Struct):
    owner: str
    session: str
    seconds: float


class WorkerList(msgspec.Struct):
    workers: list[WorkerItem]
    leases: list[LeaseItem]
    stuck: list[StuckItem]  # sessions with work that no worker does
    waiting: int  # messages that no turn has taken
    waiting_seconds: float
    open_turns: int
    parked_turns: int
    unsent: int


# ---------------------------------------------------------------------------------------------- usage


@dataclass(slots=True)
class _Count:
    calls: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0


@dataclass(slots=True)
class SessionUsage:
    """The model calls of one session, by day and model, as far as its log has been read."""

    read: int = 0
    counts: dict[tuple[int, str], _Count] = field(default_factory=dict)

    def add(self, logged: Sequence[Logged], usual: str) -> None:
        """Count these entries. `usual` is the model of answers that do not name one."""
        for one in logged:
            self.read = one.seq
            if isinstance(entry := one.entry, ModelAnswered | Compacted) and entry.usage:
                model = entry.model if isinstance(entry, ModelAnswered) else ""
                count = self.counts.setdefault((int(one.at // DAY), model or usual), _Count())
                count.calls += 1
                count.input += entry.usage.get("prompt_tokens", 0)
                count.cached += entry.usage.get("cached_tokens", 0)
                count.output += entry.usage.get("completion_tokens", 0)


# ---------------------------------------------------------------------------------------------- handlers


class OperationApi:
    """An operator's view. Usage is that of the requesting owner; the rest needs the right `admin`."""

    def __init__(self, owners: Owners, checks: Checks) -> None:
        self._owners = owners
        self._store = owners.store
        self._checks = checks
        self._usage: dict[int, SessionUsage] = {}  # by session

    @operation(
        "GET",
        "/api/usage",
        "usage",
        "Tokens and money by day, session and model.",
        UsageList,
        None,
        Parameter("days", "How many days back.", "integer"),
    )
    async def usage(self, request: web.Request) -> web.Response:
        owner, config = request[OWNER], self._owners.config
        first = int(time.time() // DAY) - read_number(request, "days", DAYS, 366) + 1
        items = []
        for info in await self._store.sessions(owner, SESSIONS):
            if info.updated_at < first * DAY:
                continue
            for (day, model), count in (await self._counted(info)).counts.items():
                if day >= first:
                    tokens = {"prompt_tokens": count.input, "cached_tokens": count.cached}
                    cost = cost_by(config, model, {**tokens, "completion_tokens": count.output})
                    numbers = (count.calls, count.input, count.cached, count.output)
                    items.append(UsageItem(_day(day), info.key, model, *numbers, cost))
        items.sort(key=lambda one: (one.day, one.session, one.model))
        return json_response(UsageList(items, _day(first), config.day_tokens, config.day_cost))

    async def _counted(self, info: SessionInfo) -> SessionUsage:
        known = self._usage.pop(info.id, None)
        if known is None or known.read > info.entries:  # a power loss has undone entries
            known = SessionUsage(max(info.entries - MAX_ENTRIES, 0))
        if known.read < info.entries:
            known.add(await self._store.read_log(info.id, known.read), self._owners.config.model)
        self._usage[info.id] = known  # move to the end: the oldest is evicted first
        while len(self._usage) > KNOWN:
            del self._usage[next(iter(self._usage))]
        return known

    @operation("GET", "/api/tokens", "tokens", "All tokens, including revoked ones.", TokenList, right=ADMIN)
    async def tokens(self, request: web.Request) -> web.Response:
        return json_response(TokenList([_token(token) for token in await self._store.tokens()]))

    @operation(
        "POST", "/api/tokens", "add_token", "Make a token, which is shown once.", NewToken, TokenBody, right=ADMIN
    )
    async def add_token(self, request: web.Request) -> web.Response:
        body = await read_body(request, TokenBody)
        token = new_token()
        with refusals():
            rights = checked_rights(body.rights)
            name, owner, agent = checked_name(body.name), checked_owner(body.owner), checked_agent(body.agent)
            made = await self._store.add_token(name, owner, hash_of(token), rights, agent)
        return json_response(NewToken(token, _token(made)))

    @operation("POST", "/api/tokens/{id}/revoke", "revoke_token", "Revoke a token.", TokenRevoked, Nothing, right=ADMIN)
    async def revoke_token(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        if not await self._store.revoke_token(request.match_info["id"]):
            raise not_found("there is no valid token with this id", code="token_not_found")
        return json_response(TokenRevoked(True))

    @operation("GET", "/api/health", "health", "The report of `everloop doctor`.", HealthList, right=ADMIN)
    async def health(self, request: web.Request) -> web.Response:
        found = await self._checks()
        items = [HealthItem(one.name, one.ok, one.found, "" if one.ok else one.fix) for one in found]
        return json_response(HealthList(all(one.ok for one in found), items))

    @operation("GET", "/api/workers", "workers", "Workers, leases and pending work.", WorkerList, right=ADMIN)
    async def workers(self, request: web.Request) -> web.Response:
        work = await self._store.overview()
        return json_response(
            WorkerList(
                [WorkerItem(one.id, one.process, one.held, one.silent, one.takes_work) for one in work.workers],
                [LeaseItem(one.owner, one.key, one.worker) for one in work.leases],
                [StuckItem(one.owner, one.key, max(work.at - one.since, 0.0)) for one in work.stuck_sessions()],
                work.waiting,
                work.waiting_seconds,
                work.open_turns,
                work.parked_turns,
                work.unsent,
            )
        )


def _day(number: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(number * DAY))


def _token(token: Token) -> TokenItem:
    return TokenItem(
        token.id,
        token.name,
        token.owner,
        sorted(token.rights),
        token.agent,
        token.created_at,
        token.last_used_at,
        token.revoked_at,
    )
