"""The door: what every request must pass before anything of ours runs, and what every response goes out with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from aiohttp import web

from ..errors import StoreError
from ..store.base import Store, Token
from ..store.tokens import NOTED_EVERY, PREFIX, RIGHTS, USE, hash_of
from . import errors
from .errors import ApiError
from .origins import LOOPBACK_NAMES, configured_origins, is_loopback, is_own_origin, name_of, plain

log = logging.getLogger("everloop.server")

# What a handler behind the door finds in its request.
OWNER = web.RequestKey("owner", str)
TOKEN: web.RequestKey[Token | None] = web.RequestKey("token")  # None for the person at this machine
REQUEST_ID = web.RequestKey("request_id", str)
ORIGIN = web.RequestKey("origin", str)  # of another page that the settings allow

T = TypeVar("T", bound=web.StreamResponse)
H = TypeVar("H", bound=Callable[..., Awaitable[web.StreamResponse]])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = frozenset({"/healthz", "/readyz"})  # for whoever watches the machine, which has no token
CLIENT_LEFT = 499  # is sent to nobody: it stands for a client that did not wait for its answer
WRITING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# Two of these, and two readers differ.
ONCE = (
    "Host",
    "Origin",
    "Authorization",
    "Content-Type",
    "Content-Encoding",
    "X-Session",
    "Idempotency-Key",
    "Last-Event-ID",
)
# Headers that reverse proxies, CDNs and tunnels add: by a word in the name, by the address that they carry, or by whose
# they are. A client on this machine has no reason to send any of them.
PROXY = re.compile(
    r"(.+-)?(forward(ed)?|via|cdn|hops?|proxy\w*)(-.+)?"
    r"|(.+-)?(client|connecting|real|remote|source|originating|external|cluster)-(ip|addr|address|host|port|user)"
    r"|x-(original|rewrite)-.+|x-(host|scheme|url-scheme|proto|protocol)|front-end-https"
    r"|(x-)?(cf|fly|fastly|akamai|azure|appengine|amz-cf|envoy|tailscale|vercel|nf|ngrok|varnish|traefik|arr|sucuri|incap"
    r"|gfe|render|railway|pomerium)(-.+)?",
    re.I,
)
BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/=-]{1,512})", re.I)
HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(?: *, *[A-Za-z0-9-]+)*")
NUMBERS = "/metrics"
NUMBERS_SECONDS = 3.0  # for the store to say whether a token is good; who scrapes waits ten
BODY_SECONDS = 20.0
LARGE_BODIES = 8  # of the largest size that may be here at once, all requests together
SMALL_BODY = 256 * 1024  # is taken whatever others have sent
SLOWEST = 16 * 1024  # bytes a second, on top of those seconds: an honest upload over a thin line may take its time
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Door:
    """Checks who asks, from where, and how much at once; gives the request its owner, or says no in OpenAI's words.

    A handler behind it finds `request[OWNER]`, `request[TOKEN]`, `request[REQUEST_ID]`, and a body that was read whole.
    """

    def __init__(
        self,
        store: Store,
        *,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        loopback: bool,
        token_needed: bool,
        body_limit: int,
        at_once: int,
        at_once_each: int,
        body_seconds: float = BODY_SECONDS,
        bodies_limit: int | None = None,
        on_answer: Callable[[str, int], None] | None = None,
    ) -> None:
        """`on_answer` is told the path and the status of each request."""
        self.closing = False  # new requests are turned away, those under way may end
        self._on_answer = on_answer
        self._store = store
        self._hosts = LOOPBACK_NAMES | {plain(host) for host in hosts}
        self._origins = configured_origins(origins)
        self._trusts_machine = loopback and not token_needed
        self._body_limit = body_limit
        self._at_once = at_once
        self._at_once_each = at_once_each
        self._body_seconds = body_seconds
        self._bodies_limit = LARGE_BODIES * body_limit if bodies_limit is None else bodies_limit
        self._held = 0  # bytes of the bodies of all requests under way
        self._under_way: Counter[str] = Counter()
        self._readers: dict[str, Token] = {}  # tokens that have read numbers, by their hashes
        self._tokens_exist: bool | None = None  # True is final: a revoked token has existed, too
        self._checking: asyncio.Future[bool] | None = None

    @property
    def under_way(self) -> int:
        """Requests that are being handled now."""
        return self._under_way.total()

    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request through to its handler; whatever goes wrong becomes a response in OpenAI's shape."""
        request[REQUEST_ID] = new_request_id()
        status = CLIENT_LEFT
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            if self._on_answer is not None:
                self._on_answer(request.rel_url.raw_path, status)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await self._pass(request, handler)
        except ApiError as error:
            return self.refusal(request, error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return self.refusal(request, _translated(request, error))
        except web.RequestPayloadError:
            return self.refusal(request, errors.bad_request("the request's body is not valid HTTP"), close=True)
        except Exception:
            if request.transport is None or request.transport.is_closing():
                raise  # the client is gone, and that is what went wrong
            log.exception("request %s: %s %s failed", request[REQUEST_ID], request.method, request.path)
            return self.refusal(request, errors.internal_error(request[REQUEST_ID]))

    @web.middleware
    async def read_body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Take the body in before the handler begins: JSON, not more than allowed, and not slower. Only from a client
        that has the right which the handler needs."""
        if request.match_info.http_exception is None:  # else no handler begins: the address or the method is wrong
            _check_right(request)
            _check_kind(request)
        if not request.can_read_body:
            return await handler(request)
        body = bytearray()
        try:
            await self._take(request, body)
            # Where aiohttp keeps what `request.read` and `request.json` give.
            request._read_bytes = bytes(body)
            return await handler(request)
        finally:
            self._held -= len(body)

    async def dress(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Give a response the headers that all of them have; a signal of the application, for streams too."""
        self._dress(request, response)

    def refusal(self, request: web.BaseRequest, error: ApiError, *, close: bool = False) -> web.StreamResponse:
        """The response that says no. Once another has begun to go out, the connection can only be cut."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response had begun")
        response = web.json_response(error.body(), status=error.status, headers=error.headers)
        if close or error.status in (408, 413) or self.closing or request.method == "CONNECT":
            # What is left of a body, or meant for a tunnel, must not be taken for the next request.
            response.force_close()
        return self._dress(request, response)

    # ------------------------------------------------------------------------------------------ the checks, in order

    async def _pass(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._check_form(request)
        self._check_host(request)
        self._check_origin(request)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers and ORIGIN in request:
            return self._dress(request, _preflight(request))
        if request.rel_url.raw_path in OPEN and request.method in ("GET", "HEAD"):
            return await handler(request)
        if self.closing:
            raise errors.unavailable("the server is shutting down; try again soon")
        self._check_body(request)
        token = await self._token(request)
        request[TOKEN], request[OWNER] = token, token.owner if token is not None else "me"
        with self._place("" if token is None else token.id):
            return await handler(request)

    def _check_form(self, request: web.Request) -> None:
        for name in ONCE:
            if len(request.headers.getall(name, ())) > 1:
                raise errors.bad_request(f"the header {name} is there more than once")
        texts = [request.raw_path, *(part for pair in request.headers.items() for part in pair)]
        if any(not text.isascii() and not _is_text(text) for text in texts):
            raise errors.bad_request("the request's path and headers must be UTF-8")

    def _check_host(self, request: web.Request) -> None:
        # A page whose name is made to lead here (DNS rebinding) counts for a browser as our own: only the name tells.
        asked = [request.headers.get("Host", "")]
        if not request.raw_path.startswith("/"):  # a whole URL, whose name comes before that of the header
            asked.append(request.url.authority)
        own = self._hosts | {plain(_end(request, "sockname"))}
        if any((name := name_of(host)) is None or name not in own for host in asked):
            raise errors.forbidden(
                "this server does not answer to the name in the Host header; add it to the names in its settings",
                "host_not_allowed",
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() in self._origins:
            request[ORIGIN] = origin
            return
        strange = origin is not None and not is_own_origin(origin, request.headers["Host"])
        if strange or request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
            raise errors.forbidden(
                "pages of other origins may not use this server; add the origin to its settings", "origin_not_allowed"
            )

    def _check_body(self, request: web.Request) -> None:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise errors.unsupported_media_type("send the body without a Content-Encoding")
        if (request.content_length or 0) > self._body_limit:
            raise errors.too_large(self._body_limit)

    async def _token(self, request: web.Request) -> Token | None:
        """The token that is shown, asked of the store each time so that a revoked one ends at once."""
        shown = request.headers.get("Authorization")
        try:
            if shown is None:
                if await self._is_person_here(request):
                    return None
                raise errors.unauthorized(
                    "show a token: Authorization: Bearer …; `everloop token add` makes one", "no_api_key"
                )
            found = BEARER.fullmatch(shown.strip())
            token = await self._found(request, hash_of(found[1])) if found is not None else None
            if token is None:
                # OpenAI's clients need some key to start: before the first token, one that they make up is not wrong.
                made_up = found is None or not found[1].startswith(PREFIX)
                if made_up and await self._is_person_here(request):
                    return None
                raise errors.unauthorized("this token is not, or no longer, one of this server's")
            return token
        except StoreError as error:
            log.error("request %s: tokens cannot be read: %s", request[REQUEST_ID], error)
            raise errors.unavailable("the server cannot read its store just now; try again") from None

    async def _found(self, request: web.Request, hash: str) -> Token | None:
        """The token with this hash. Where numbers are read, one that was good before will do while the store is away:
        that it is away is one of the numbers."""
        asked = asyncio.ensure_future(self._store.token(hash))
        known = self._readers.get(hash) if request.path == NUMBERS else None
        if known is not None:
            asked.add_done_callback(lambda late: late.cancelled() or late.exception())  # perhaps nobody waits by then
            await asyncio.wait([asked], timeout=NUMBERS_SECONDS)
            if not asked.done() or asked.exception() is not None:
                return known
        token = await asked
        if request.path == NUMBERS:
            self._readers.pop(hash, None)
            if token is not None:
                self._readers[hash] = token
        if token is not None:
            await self._note_use(token)
        return token

    async def _is_person_here(self, request: web.Request) -> bool:
        """Whether a request without a token counts as one of the machine's own person: it comes from this machine, not
        through a proxy on it, and no token has ever existed. A sandboxed command with network comes from here, too."""
        if not self._trusts_machine or not is_loopback(_end(request, "peername")) or is_proxied(request.headers):
            return False
        if request.path == NUMBERS and self._tokens_exist is False:
            # That the store is away is one of the numbers: what it said before will do.
            with contextlib.suppress(TimeoutError, StoreError):
                async with asyncio.timeout(NUMBERS_SECONDS):
                    return not await self._check_tokens_exist()
            return True
        return not await self._check_tokens_exist()

    async def _check_tokens_exist(self) -> bool:
        """Whether a token has ever existed, made by whatever process. Once it has, the store is not asked again; until
        then requests that come at the same time share one query, which began after each of them came."""
        if self._tokens_exist:
            return True
        if self._checking is not None and not self._checking.done():
            await asyncio.wait([self._checking])
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._store.tokens_exist())
            self._checking.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._tokens_exist = await asyncio.shield(self._checking)
        return self._tokens_exist

    async def _note_use(self, token: Token) -> None:
        now = time.time()
        if token.last_used_at is None or now - token.last_used_at >= NOTED_EVERY:
            try:
                await self._store.token_used(token.id, now)
            except StoreError as error:  # a full disk: what the request itself has to write says so to its client
                log.error("%s", error)

    @contextlib.contextmanager
    def _place(self, who: str) -> Iterator[None]:
        if self.under_way >= self._at_once:
            raise errors.too_many_requests("the server has as many requests as it can handle at once; try again soon")
        if self._under_way[who] >= self._at_once_each:
            raise errors.too_many_requests(
                f"at most {self._at_once_each} requests at once with one token; try again soon"
            )
        self._under_way[who] += 1
        try:
            yield
        finally:
            self._under_way[who] -= 1
            if not self._under_way[who]:
                del self._under_way[who]

    def _dress(self, request: web.BaseRequest, response: T) -> T:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers["Server"] = "everloop"  # aiohttp would name itself and its version
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if self._origins:
            response.headers["Vary"] = "Origin"
        if (origin := request.get(ORIGIN)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"
            response.headers["Cross-Origin-Resource-Policy"] = "cross-origin"
        return response

    async def _take(self, request: web.Request, body: bytearray) -> None:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._body_seconds) as limit:
                while chunk := await request.content.readany():
                    body += chunk
                    self._held += len(chunk)
                    if self._held > self._bodies_limit and len(body) > SMALL_BODY:
                        # What is made of a body needs several times its size for as long as the request runs.
                        raise errors.too_many_requests("too many large requests at once; try again soon")
                    if len(body) > self._body_limit:
                        raise errors.too_large(self._body_limit)
                    limit.reschedule(began + self._body_seconds + len(body) / SLOWEST)
        except TimeoutError:
            raise errors.too_slow("the request's body came too slowly") from None


def needs(right: str) -> Callable[[H], H]:
    """Say which right a handler needs; without this it is `use`."""

    def mark(handler: H) -> H:
        handler.needs = right  # type: ignore[attr-defined]
        return handler

    return mark


def is_proxied(headers: Iterable[str]) -> bool:
    """Whether one of these headers is a sign that the request came through a proxy."""
    return any(PROXY.fullmatch(name.replace("_", "-")) for name in headers)


def _check_right(request: web.Request) -> None:
    right = getattr(request.match_info.handler, "needs", USE)
    if TOKEN in request and right not in (RIGHTS if (token := request[TOKEN]) is None else token.rights):
        raise errors.forbidden(
            f"this needs a token with the right {right}: `everloop token add NAME --rights {right}` makes one",
            "missing_right",
        )


def _check_kind(request: web.Request) -> None:
    """A form of any page can be sent here without asking; JSON cannot."""
    if request.method in WRITING:
        kind, _, parameters = request.headers.get("Content-Type", "").lower().partition(";")
        charset = parameters.replace(" ", "").replace('"', "")
        if kind.strip() != "application/json" or charset not in ("", "charset=utf-8", "charset=utf8"):
            raise errors.unsupported_media_type("the body must be application/json in UTF-8")


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def _translated(request: web.Request, error: web.HTTPException) -> ApiError:
    """An error of aiohttp's in OpenAI's shape."""
    if isinstance(error, web.HTTPNotFound):
        return errors.not_found("there is nothing at this address", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return errors.method_not_allowed(request.method, ", ".join(sorted(error.allowed_methods)))
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "the request's body is too large", code="request_too_large")
    if error.status >= 500:
        return errors.internal_error(request[REQUEST_ID])
    return ApiError(error.status, error.reason)


def _preflight(request: web.Request) -> web.Response:
    """What a browser asks before a page of an allowed origin may send its request."""
    headers = {"Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE", "Access-Control-Max-Age": "600"}
    asked = request.headers.get("Access-Control-Request-Headers", "")
    if HEADER_NAMES.fullmatch(asked):
        headers["Access-Control-Allow-Headers"] = asked
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _end(request: web.Request, end: str) -> str:
    """The address of one end of the connection."""
    found = request.transport.get_extra_info(end) if request.transport is not None else None
    return str(found[0]) if isinstance(found, tuple) else ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
