"""The guard: the checks that every request passes before a handler runs, and the headers of every response."""

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

from ..errors import OwnerMoved, StoreError
from ..runtime.owners import OWN
from ..store.base import Store, Token
from ..store.tokens import NOTED_EVERY, PREFIX, RIGHTS, USE, hash_of
from . import errors
from .access import Access, Visitor
from .errors import ApiError
from .origins import LOOPBACK_NAMES, configured_origins, host_name, is_loopback, is_own_origin, normalize_host
from .web_files import is_file

log = logging.getLogger("everloop.server")

# Set on the request for its handler.
OWNER = web.RequestKey("owner", str)
TOKEN: web.RequestKey[Token | None] = web.RequestKey("token")  # None for the person of this machine
VISITOR = web.RequestKey("visitor", Visitor)  # the web page visitor who sent the request
REQUEST_ID = web.RequestKey("request_id", str)
MOVED = web.RequestKey("moved", bool)  # it was refused without any effect, because its owner is in another database now
ORIGIN = web.RequestKey("origin", str)  # an origin allowed by the settings

T = TypeVar("T", bound=web.StreamResponse)
H = TypeVar("H", bound=Callable[..., Awaitable[web.StreamResponse]])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = frozenset({"/healthz", "/readyz"})  # for load balancers and monitors, which have no token
LOGIN = "/api/login"
CLIENT_LEFT = 499  # never sent; counted for a client that disconnected before its response
WRITING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
# Given two headers with the same name, one program reads the first and another the last.
ONCE = (
    "Host",
    "Origin",
    "Authorization",
    "Content-Type",
    "Content-Encoding",
    "X-Session",
    "X-Agent",
    "X-Api-Key",
    "Idempotency-Key",
    "Last-Event-ID",
)
# Headers that reverse proxies, CDNs and tunnels add, recognised by a word in the name, by an address in the value, or
# by vendor. A client on this machine has no reason to send any of them.
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
METRICS = "/metrics"
SPOKEN = (
    "this server speaks OpenAI's API (/v1/chat/completions, /v1/responses, /v1/models), Anthropic's (/v1/messages) and "
    "Ollama's (/api/chat, /api/generate, /api/tags, /api/show, /api/version, /api/ps)"
)
METRICS_SECONDS = 3.0  # time limit for the store to check a token; Prometheus waits ten seconds
BODY_SECONDS = 20.0
LARGE_BODIES = 8  # number of maximum-size bodies that may be in memory at once, over all requests
SMALL_BODY = 256 * 1024  # accepted regardless of other requests
SLOWEST = 16 * 1024  # bytes per second, in addition to BODY_SECONDS: an upload over a slow line may take longer
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Checks each request: its host, origin, token, rights and size, and the number of concurrent requests.

    A handler finds `request[OWNER]`, `request[TOKEN]`, `request[REQUEST_ID]`, and a body that was read completely.
    `on_response` is called with the path and the status of each request.
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
        access: Access | None = None,
        on_response: Callable[[str, int], None] | None = None,
    ) -> None:
        self._is_closing = False
        self._on_response = on_response
        self._store = store
        self._access = access  # for the web page's visitors
        self._hosts = LOOPBACK_NAMES | {normalize_host(host) for host in hosts}
        self._origins = configured_origins(origins)
        self._trusts_loopback = loopback and not token_needed
        self._body_limit = body_limit
        self._at_once = at_once
        self._at_once_each = at_once_each
        self._body_seconds = body_seconds
        self._bodies_limit = LARGE_BODIES * body_limit if bodies_limit is None else bodies_limit
        self._held = 0  # bytes of the bodies of all running requests
        self._running: Counter[str] = Counter()  # requests by token
        self._scrapers: dict[str, Token] = {}  # tokens that have read the metrics, by hash
        self._tokens_exist: bool | None = None  # True is final: a revoked token has existed, too
        self._checking: asyncio.Future[bool] | None = None

    def close(self) -> None:
        """Refuse new requests, and let running ones finish."""
        self._is_closing = True

    @property
    def running(self) -> int:
        """The number of requests being handled."""
        return self._running.total()

    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request and call its handler; every error becomes a response in OpenAI's format."""
        request[REQUEST_ID] = new_request_id()
        status = CLIENT_LEFT
        try:
            response = await self._respond(request, handler)
            status = response.status
            return response
        finally:
            if self._on_response is not None:
                self._on_response(request.rel_url.raw_path, status)

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await self._check(request, handler)
        except ApiError as error:
            request[MOVED] = isinstance(error.__cause__, OwnerMoved)
            return self.refusal(request, error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return self.refusal(request, _converted(request, error))
        except web.RequestPayloadError:
            return self.refusal(request, errors.bad_request("the request's body is not valid HTTP"), close=True)
        except Exception:
            if request.transport is None or request.transport.is_closing():
                raise  # the client disconnected, which caused the error
            log.exception("request %s: %s %s failed", request[REQUEST_ID], request.method, request.path)
            return self.refusal(request, errors.internal_error(request[REQUEST_ID]))

    @web.middleware
    async def read_body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token's rights, and read the body before the handler starts.

        The body must be JSON, not too large, and not too slow.
        """
        if request.match_info.http_exception is None:  # otherwise there is no handler: the path or the method is wrong
            _check_right(request)
            _check_content_type(request)
        if not request.can_read_body:
            return await handler(request)
        body = bytearray()
        try:
            await self._read(request, body)
            # aiohttp's cache for `request.read` and `request.json`.
            request._read_bytes = bytes(body)
            return await handler(request)
        finally:
            self._held -= len(body)

    async def add_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add the headers of every response; a signal handler of the application, so that it applies to streams too."""
        self._add_headers(request, response)

    def refusal(self, request: web.BaseRequest, error: ApiError, *, close: bool = False) -> web.StreamResponse:
        """Return the response for an error. Once another response has started, the connection can only be closed."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response had started")
        response = web.json_response(
            errors.body_for(request.rel_url.raw_path, error), status=error.status, headers=error.headers
        )
        if close or error.status in (408, 413) or self._is_closing or request.method == "CONNECT":
            # The rest of a body, or data for a tunnel, must not be parsed as the next request.
            response.force_close()
        return self._add_headers(request, response)

    # ------------------------------------------------------------------------------------------ the checks, in order

    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._check_headers(request)
        self._check_host(request)
        self._check_origin(request)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers and ORIGIN in request:
            return self._add_headers(request, _preflight(request))
        if request.rel_url.raw_path in OPEN and request.method in ("GET", "HEAD"):
            return await handler(request)
        if self._is_closing:
            raise errors.unavailable("the server is shutting down; try again soon")
        self._check_body(request)
        if is_public(request):
            with self._slot("page"):
                return await handler(request)
        if (visitor := await self._visitor(request)) is not None:
            request[VISITOR] = visitor
        token = visitor.token if visitor is not None else await self._token(request)
        request[TOKEN], request[OWNER] = token, token.owner if token is not None else OWN
        with self._slot("" if token is None else token.id):
            return await handler(request)

    def _check_headers(self, request: web.Request) -> None:
        for name in ONCE:
            if len(request.headers.getall(name, ())) > 1:
                raise errors.bad_request(f"the header {name} is repeated")
        texts = [request.raw_path, *(part for pair in request.headers.items() for part in pair)]
        if any(not text.isascii() and not _is_text(text) for text in texts):
            raise errors.bad_request("the request's path and headers must be UTF-8")

    def _check_host(self, request: web.Request) -> None:
        # DNS rebinding: a browser treats a page whose name resolves to this address as ours. Only the name reveals it.
        asked = [request.headers.get("Host", "")]
        if not request.raw_path.startswith("/"):  # an absolute URL, whose host takes precedence over the header
            asked.append(request.url.authority)
        own = self._hosts | {normalize_host(_address(request, "sockname"))}
        if any((name := host_name(host)) is None or name not in own for host in asked):
            raise errors.forbidden(
                "this server does not serve the name in the Host header; add it to [server] hosts in its settings",
                "host_not_allowed",
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() in self._origins:
            request[ORIGIN] = origin
            return
        foreign = origin is not None and not is_own_origin(origin, request.headers["Host"])
        if foreign or request.headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
            raise errors.forbidden(
                "pages of other origins may not use this server; add the origin to [server] origins in its settings",
                "origin_not_allowed",
            )

    def _check_body(self, request: web.Request) -> None:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise errors.unsupported_media_type("send the body without a Content-Encoding")
        if (request.content_length or 0) > self._body_limit:
            raise errors.too_large(self._body_limit)

    async def _visitor(self, request: web.Request) -> Visitor | None:
        """Return the web page visitor who sent the request, if there is one."""
        try:
            return await self._access.visitor(request) if self._access is not None else None
        except StoreError as error:
            log.error("request %s: tokens cannot be read: %s", request[REQUEST_ID], error)
            raise errors.unavailable("the server cannot read its store at the moment; try again") from None

    async def _token(self, request: web.Request) -> Token | None:
        """Return the request's token, read from the store every time so that revoking one takes effect at once."""
        sent = credential_of(request)
        try:
            if sent is None:
                if await self._is_local_person(request):
                    return None
                raise errors.unauthorized(
                    "a token is required: Authorization: Bearer …; `everloop token add NAME` creates one", "no_api_key"
                )
            found = BEARER.fullmatch(sent)
            token = await self._look_up(request, hash_of(found[1])) if found is not None else None
            if token is None:
                # OpenAI's clients do not start without a key: before the first token exists, any placeholder will do.
                placeholder = found is None or not found[1].startswith(PREFIX)
                if placeholder and await self._is_local_person(request):
                    return None
                raise errors.unauthorized("this token is unknown or revoked")
            return token
        except StoreError as error:
            log.error("request %s: tokens cannot be read: %s", request[REQUEST_ID], error)
            raise errors.unavailable("the server cannot read its store at the moment; try again") from None

    async def _look_up(self, request: web.Request, hash: str) -> Token | None:
        """Return the token with this hash.

        For the metrics, a token that was valid before is accepted while the store is unavailable, because the metrics
        report exactly that.
        """
        query = asyncio.ensure_future(self._store.token(hash))
        known = self._scrapers.get(hash) if request.path == METRICS else None
        if known is not None:
            query.add_done_callback(lambda done: done.cancelled() or done.exception())  # this request may end first
            await asyncio.wait([query], timeout=METRICS_SECONDS)
            if not query.done() or query.exception() is not None:
                return known
        token = await query
        if request.path == METRICS:
            self._scrapers.pop(hash, None)
            if token is not None:
                self._scrapers[hash] = token
        if token is not None:
            await self._note_use(token)
        return token

    async def _is_local_person(self, request: web.Request) -> bool:
        """Return whether a request without a token is served as the person of this machine.

        It must come from loopback, not through a proxy, and no token may ever have existed. (A sandboxed command with
        network access comes from loopback, too.)
        """
        if not self._trusts_loopback or not is_loopback(_address(request, "peername")) or is_proxied(request.headers):
            return False
        if request.path == METRICS and self._tokens_exist is False:
            # The metrics report that the store is unavailable: its last answer is accepted.
            with contextlib.suppress(TimeoutError, StoreError):
                async with asyncio.timeout(METRICS_SECONDS):
                    return not await self._check_tokens_exist()
            return True
        return not await self._check_tokens_exist()

    async def _check_tokens_exist(self) -> bool:
        """Return whether a token has ever existed, created by any process.

        Once one has, the store is not asked again; until then, concurrent requests share a query, which starts after
        each of them arrived.
        """
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
            except StoreError as error:  # a full disk, say: the request's own writes report that to its client
                log.error("%s", error)

    @contextlib.contextmanager
    def _slot(self, token: str) -> Iterator[None]:
        if self.running >= self._at_once:
            raise errors.too_many_requests("the server is handling as many requests as it can; try again soon")
        if self._running[token] >= self._at_once_each:
            raise errors.too_many_requests(
                f"one token may have at most {self._at_once_each} requests at once; try again soon"
            )
        self._running[token] += 1
        try:
            yield
        finally:
            self._running[token] -= 1
            if not self._running[token]:
                del self._running[token]

    def _add_headers(self, request: web.BaseRequest, response: T) -> T:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers["Server"] = "everloop"  # instead of aiohttp's name and version
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if self._origins:
            response.headers["Vary"] = "Origin"
        if (origin := request.get(ORIGIN)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"
            response.headers["Cross-Origin-Resource-Policy"] = "cross-origin"
        return response

    async def _read(self, request: web.Request, body: bytearray) -> None:
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._body_seconds) as limit:
                while chunk := await request.content.readany():
                    body += chunk
                    self._held += len(chunk)
                    if self._held > self._bodies_limit and len(body) > SMALL_BODY:
                        # A parsed body takes several times its size for as long as the request runs.
                        raise errors.too_many_requests("too many large requests at once; try again soon")
                    if len(body) > self._body_limit:
                        raise errors.too_large(self._body_limit)
                    limit.reschedule(began + self._body_seconds + len(body) / SLOWEST)
        except TimeoutError:
            raise errors.too_slow("the request's body arrived too slowly") from None


def needs(right: str) -> Callable[[H], H]:
    """Declare the right that a handler needs; the default is `use`."""

    def mark(handler: H) -> H:
        handler.needs = right  # type: ignore[attr-defined]
        return handler

    return mark


def without_body(handler: H) -> H:
    """Declare that a handler needs no body: a request without one needs no Content-Type either."""
    handler.without_body = True  # type: ignore[attr-defined]
    return handler


def without_content_type(handler: H) -> H:
    """Declare that a body without a Content-Type is parsed as JSON, because some clients of Ollama omit it.

    A content type that an HTML form can send is still refused, and a page of another origin is refused by its Origin.
    """
    handler.without_content_type = True  # type: ignore[attr-defined]
    return handler


def is_public(request: web.Request) -> bool:
    """Return whether a request needs no token: the page's files, and its login."""
    path = request.rel_url.raw_path
    return is_file(path) if request.method in ("GET", "HEAD") else request.method == "POST" and path == LOGIN


def credential_of(request: web.Request) -> str | None:
    """Return what the request has in its Authorization header, or as an Anthropic client sends it."""
    sent, key = request.headers.get("Authorization"), request.headers.get("X-Api-Key")
    if sent is None and key is not None:
        sent = f"Bearer {key}"
    return sent.strip() if sent is not None else None


def is_proxied(headers: Iterable[str]) -> bool:
    """Return whether one of these headers shows that the request came through a proxy."""
    return any(PROXY.fullmatch(name.replace("_", "-")) for name in headers)


def _check_right(request: web.Request) -> None:
    right = getattr(request.match_info.handler, "needs", USE)
    if TOKEN in request and right not in (RIGHTS if (token := request[TOKEN]) is None else token.rights):
        raise errors.forbidden(
            f"this needs a token with the right {right}: `everloop token add NAME --rights {right}` creates one",
            "missing_right",
        )


def _check_content_type(request: web.Request) -> None:
    """Require JSON: a browser sends a form from any page without a preflight request, but not JSON."""
    handler = request.match_info.handler
    if "Content-Type" not in request.headers and (
        getattr(handler, "without_content_type", False)
        or (getattr(handler, "without_body", False) and not request.can_read_body)
    ):
        return
    if request.method in WRITING:
        kind, _, parameters = request.headers.get("Content-Type", "").lower().partition(";")
        charset = parameters.replace(" ", "").replace('"', "")
        if kind.strip() != "application/json" or charset not in ("", "charset=utf-8", "charset=utf8"):
            raise errors.unsupported_media_type("the body must be application/json in UTF-8")


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def _converted(request: web.Request, error: web.HTTPException) -> ApiError:
    """Convert an error of aiohttp to OpenAI's format."""
    if isinstance(error, web.HTTPNotFound):
        return errors.not_found(f"there is nothing at this path; {SPOKEN}", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return errors.method_not_allowed(request.method, ", ".join(sorted(error.allowed_methods)))
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "the request's body is too large", code="request_too_large")
    if error.status >= 500:
        return errors.internal_error(request[REQUEST_ID])
    return ApiError(error.status, error.reason)


def _preflight(request: web.Request) -> web.Response:
    """Answer a browser's preflight request for a page of an allowed origin."""
    headers = {"Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE", "Access-Control-Max-Age": "600"}
    asked = request.headers.get("Access-Control-Request-Headers", "")
    if HEADER_NAMES.fullmatch(asked):
        headers["Access-Control-Allow-Headers"] = asked
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _address(request: web.Request, end: str) -> str:
    """Return the address of one end of the connection, `sockname` or `peername`."""
    found = request.transport.get_extra_info(end) if request.transport is not None else None
    return str(found[0]) if isinstance(found, tuple) else ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
