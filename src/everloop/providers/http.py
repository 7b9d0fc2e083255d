"""One model endpoint over HTTP: time-outs, bounded reads, streamed answers, and errors that a person can act on."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import msgspec

from ..errors import ConfigError
from ..text import one_line
from .base import Delta, LLMResponse, ProviderError
from .http_client import ConnectionBroke, ConnectTimeout, NoConnection, Origin, Pool, ProxyRefused, Response, origin_of
from .sse import BYTE_ORDER_MARK, Lines, error_text

RETRYABLE = frozenset({408, 409, 425, 429})  # and all of 5xx
ERROR_BODY = 1 << 16
ERROR_SECONDS = 5.0
LAST_WORDS = 5.0  # seconds for a server's last events (usage, [DONE]) after the answer has ended
ADVICE = {
    401: "check the API key (EVERLOOP_API_KEY)",
    403: "check the API key (EVERLOOP_API_KEY) and what it may use",
    404: "check the model's name (EVERLOOP_MODEL) and the base URL (EVERLOOP_BASE_URL, mostly ending in /v1)",
}


@dataclass(slots=True, frozen=True)
class Timeouts:
    """Seconds: to connect, from sending to the first token, between two tokens, and for a whole unstreamed call."""

    connect: float = 10
    first_token: float = 120
    token: float = 60
    total: float = 600


class Endpoint:
    """A model endpoint with one connection pool for each event loop, opened on first use and again after `close`."""

    def __init__(
        self, origin: Origin, headers: Mapping[str, str], timeouts: Timeouts, secret: str | None = None
    ) -> None:
        self.where = origin.authority
        self.timeouts = timeouts
        self._origin = origin
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._secret = secret
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        if secret and not (secret.isascii() and secret.isprintable() and " " not in secret):
            raise ConfigError(
                "the API key has a space, a line end or another character that no key has: set EVERLOOP_API_KEY to the "
                "key alone"
            )
        try:
            Pool(origin, self._headers)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    async def close(self) -> None:
        here = asyncio.get_running_loop()
        for loop in list(self._pools):
            pool = self._pools.pop(loop, None)
            if pool is None:
                continue
            if loop is here:
                pool.close()
                await asyncio.sleep(0)  # let the transports close
            elif not loop.is_closed():
                with suppress(RuntimeError):  # it was closed meanwhile
                    loop.call_soon_threadsafe(pool.close)

    @property
    def _pool(self) -> Pool | None:
        return self._pools.get(asyncio.get_running_loop())

    async def fetch(self, body: Sequence[bytes], limit: int) -> bytes:
        """Send a request and read its whole answer, which may have up to `limit` bytes."""
        try:
            async with asyncio.timeout(self.timeouts.total):
                return await self._read_whole(await self._post(body, whole=True), limit)
        except OSError as error:
            raise self._failure(error, f"gave no answer within {self.timeouts.total:g} s") from error

    async def read_whole(self, response: Response, limit: int) -> bytes:
        """Read the body of an open response that turned out not to be a stream."""
        try:
            async with asyncio.timeout(self.timeouts.total):
                return await self._read_whole(response, limit)
        except OSError as error:
            raise self._failure(error, f"gave no answer within {self.timeouts.total:g} s") from error

    async def open(self, body: Sequence[bytes]) -> Response:
        """Send a request whose answer will be streamed; the caller must `leave` or `close` the response."""
        try:
            async with asyncio.timeout(self.timeouts.first_token):
                return await self._post(body)
        except OSError as error:
            raise self._failure(error, f"sent no first token within {self.timeouts.first_token:g} s") from error

    async def _post(self, body: Sequence[bytes], whole: bool = False) -> Response:
        pool = self._pool or self._new_pool()
        response = await pool.post(body, self.timeouts.connect, whole)
        if response.status != 200:
            try:
                raise await self._refusal(response)
            finally:
                response.close()
        if coding := coding_of(response):
            response.close()
            raise ProviderError(f"{self.where} compressed its answer ({one_line(coding, 40)}) though asked not to")
        return response

    def _new_pool(self) -> Pool:
        for loop in list(self._pools):
            if loop.is_closed():
                self._pools.pop(loop, None)
        try:
            pool = Pool(self._origin, self._headers, proxy_for(self._origin))
        except ValueError as error:
            raise ProviderError(f"the proxy for {self._origin} (HTTPS_PROXY, …) is no URL: {error}") from None
        self._pools[asyncio.get_running_loop()] = pool
        return pool

    async def _read_whole(self, response: Response, limit: int) -> bytes:
        try:
            data = await read_up_to(response, limit)
        finally:
            response.close()
        if len(data) > limit:
            raise ProviderError(f"{self.where}: the answer is larger than {limit} bytes")
        return data

    async def _refusal(self, response: Response) -> ProviderError:
        """The error that a status other than 200 means, with the server's own message."""
        status, headers = response.status, response.headers
        if 300 <= status < 400:
            target = one_line(headers.get("location", "nowhere"))
            return ProviderError(
                f"{self.where}: HTTP {status}, moved to {target}: set the base URL (EVERLOOP_BASE_URL) anew",
                status=status,
            )
        try:
            async with asyncio.timeout(ERROR_SECONDS):
                data = b"" if coding_of(response) else (await read_up_to(response, ERROR_BODY))[:ERROR_BODY]
        except (
            ConnectionBroke,
            TimeoutError,
        ):  # it may answer before it has read the whole request: the status still counts
            data = b""
        error: Any = data.decode("utf-8", "replace")
        quota = False
        try:
            error = msgspec.json.decode(data)
            quota = error["error"]["code"] == "insufficient_quota"  # a 429 that a retry does not cure
        except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
            pass
        text = error_text(error) or one_line(response.reason) or "no reason given"
        if self._secret:
            text = text.replace(self._secret, "***")
        advice = f": {ADVICE[status]}" if status in ADVICE else ""
        return ProviderError(
            f"{self.where}: HTTP {status}: {text}{advice}",
            retryable=(status in RETRYABLE or status >= 500) and not quota,
            retry_after=retry_after(headers),
            status=status,
        )

    def _failure(self, error: Exception, late: str) -> ProviderError:
        """A network error or a time-out as a message for a person."""
        if isinstance(error, ConnectTimeout):
            return ProviderError(f"cannot reach {self._origin}: {error}", retryable=True)
        if isinstance(error, TimeoutError):
            return ProviderError(f"{self.where} {late}", retryable=True)
        if isinstance(error, ssl.SSLError):
            return ProviderError(f"no safe connection to {self._origin}: {one_line(str(error))}")
        if isinstance(error, ProxyRefused):
            return ProviderError(
                f"cannot reach {self._origin}: {one_line(str(error))}: check the proxy's address, user and password "
                "(HTTPS_PROXY)",
                retryable=error.status in RETRYABLE or error.status >= 500,
            )
        if isinstance(error, NoConnection):
            why = one_line(str(error))
            return ProviderError(f"cannot reach {self._origin}: {why}: is the server running?", retryable=True)
        reason = one_line(str(error) or type(error).__name__)
        return ProviderError(f"the connection to {self.where} broke: {reason}", retryable=True)


class TimedReader:
    """Reads a stream within its time-outs, with one timer that is seldom rescheduled.

    The caller sets `heard` when it finds data, and calls `alive` for a comment or a ping that should extend the wait.
    The time-out runs only while a read waits.
    """

    def __init__(self, endpoint: Endpoint, response: Response, started: float) -> None:
        self.heard = False
        self._endpoint = endpoint
        self._response = response
        self._loop = asyncio.get_running_loop()
        self._late = f"sent no first token within {endpoint.timeouts.first_token:g} s"
        self._due = started + endpoint.timeouts.first_token
        self._deadline = math.inf  # of the read in progress
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    async def read(self, patience: float = math.inf) -> bytes:
        """The next bytes, empty at the end; `patience` is a time-out shorter than the usual one."""
        if self.heard:
            self.heard = False
            seconds = self._endpoint.timeouts.token
            self._late = f"stopped in the middle of the answer: nothing came for {seconds:g} s"
            self._due = self._loop.time() + seconds
        self._wait_until(min(self._due, self._loop.time() + patience))
        try:
            return await self._response.read()
        except OSError as error:
            raise self._endpoint._failure(error, self._late) from error
        finally:
            self._deadline = math.inf

    def alive(self) -> None:
        """Extend the time-out as if a token had arrived now."""
        seconds = self._endpoint.timeouts.token
        due = self._loop.time() + seconds
        if due > self._due:
            self._due, self._late = due, f"gave signs of life and no token: nothing came for {seconds:g} s"

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait_until(self, deadline: float) -> None:
        self._deadline = deadline
        if deadline < self._timer_at:
            self.stop()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        self._timer_at = math.inf
        if self._deadline <= self._loop.time():
            self._response.fail(TimeoutError())
        elif self._deadline < math.inf:
            self._wait_until(self._deadline)


# -------------------------------------------------------------------------------- streamed answers


class StreamedAnswer(Protocol):
    """An answer that is still arriving: `ended` after its last event, `over` also when it takes no more."""

    finish_reason: str
    ended: bool

    def feed(self, payload: bytes) -> Delta | None: ...

    def over(self) -> bool: ...

    def size(self) -> int: ...

    def response(self) -> LLMResponse: ...


async def stream_answer(
    endpoint: Endpoint, body: Sequence[bytes], answer: StreamedAnswer, limit: int
) -> AsyncGenerator[Delta | LLMResponse, None]:
    """Send a request and stream its answer; `limit` is the size of a whole answer or a line in bytes."""
    clock = asyncio.get_running_loop().time
    started = clock()
    response = await endpoint.open(body)
    if response.content_type.endswith(("json", "html")):  # a server that does not stream, or no model server
        if delta := feed_whole(answer, await endpoint.read_whole(response, limit), endpoint.where):
            yield delta
        yield answer.response()
        return
    lines, reader = Lines(limit), TimedReader(endpoint, response, started)
    ping, last = False, -math.inf  # whether the next data belongs to a ping, and when other data last arrived
    patience = endpoint.timeouts.first_token
    size, grown = 0, started  # of the answer, and when it last grew: a chunk may be empty
    try:
        while not answer.over():
            data = await _read(reader, answer, grown + LAST_WORDS - clock())
            for line in lines.feed(data) if data else (lines.rest(),):
                if line[:5] != b"data:":
                    if line[:1] != b":":
                        ping = line[:6] == b"event:" and line[6:].strip() == b"ping"
                    elif clock() < (started + endpoint.timeouts.total if last < 0 else last + patience):
                        reader.alive()  # a local server sends comments while it reads a long prompt
                    continue
                if ping:
                    # A model may think silently, so a ping extends the time-out, but not without limit.
                    if clock() < last + patience:
                        reader.alive()
                    continue
                last = clock()
                if (payload := line[5:].strip()) and (delta := _feed(answer, payload, cut=not data)):
                    yield delta
                if (now := answer.size()) > size:
                    size, grown = now, last
                reader.heard = last < grown + endpoint.timeouts.total
                if answer.over():
                    break
            if not data:
                break
    finally:
        reader.stop()
        if answer.ended:
            response.leave()
        else:
            response.close()
    if not (answer.ended or answer.finish_reason):
        raise ProviderError(f"the stream from {endpoint.where} ended in the middle of the answer", retryable=True)
    yield answer.response()


def feed_whole(answer: StreamedAnswer, data: bytes, where: str) -> Delta | None:
    """Add a whole body; one that is not JSON mostly comes from a wrong address."""
    data = data.removeprefix(BYTE_ORDER_MARK)
    if data.lstrip()[:1] != b"{":
        raise ProviderError(
            f"{where} answered with something that is not JSON (is the base URL right? it mostly "
            f"ends in /v1): "
            f"{one_line(data[:300].decode('utf-8', 'replace'))}"
        )
    return answer.feed(data)


def _feed(answer: StreamedAnswer, payload: bytes, cut: bool) -> Delta | None:
    """Add one event. One that is `cut` off does not matter after the answer has ended."""
    try:
        return answer.feed(payload)
    except ProviderError:
        if cut and answer.finish_reason:
            return None
        raise


async def _read(reader: TimedReader, answer: StreamedAnswer, patience: float) -> bytes:
    """The next bytes. After the answer has ended, a broken connection is its end, and `patience` limits the wait."""
    if not answer.finish_reason:
        return await reader.read()
    try:
        return await reader.read(patience)
    except ProviderError:
        return b""


# ---------------------------------------------------------------------------- requests and headers


async def read_up_to(response: Response, limit: int) -> bytes:
    """Read the body; stop soon after `limit` bytes."""
    data = await response.read()
    if response.complete and not response.waiting:
        return data
    parts, size = [data], len(data)
    while size <= limit and (data := await response.read()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def coding_of(response: Response) -> str:
    """The compression of the body, if any: requests ask for none, and none is decoded."""
    for name in ("content-encoding", "transfer-encoding"):
        coding = response.headers.get(name, "").strip()
        if coding and coding.lower() not in ("identity", "chunked"):
            return coding
    return ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """How many seconds the server asks to wait, in any of the three forms of the header."""
    seconds = math.nan
    try:
        if value := headers.get("retry-after-ms"):
            seconds = float(value) / 1000
        elif value := headers.get("retry-after"):
            seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def endpoint_of(base_url: str, path: str) -> Origin:
    """The origin of a base URL plus a path, which the base URL may already have."""
    try:
        origin = origin_of(base_url.strip())
    except ValueError:
        shown = re.sub(r"//[^/@]*@", "//***@", one_line(base_url))  # without its password
        raise ConfigError(f'base_url "{shown}" is not a URL: set EVERLOOP_BASE_URL to http://… or https://…') from None
    target, mark, query = origin.target.partition("?")
    target = target.rstrip("/")
    return replace(origin, target=(target if target.endswith(path) else target + path) + mark + query)


def proxy_for(origin: Origin) -> str | None:
    """The proxy that the environment names for a public host; none for this machine and its network."""
    host = origin.host
    try:
        public = ipaddress.ip_address(host).is_global
    except ValueError:
        public = "." in host and not host.endswith((".localhost", ".local", ".internal", ".lan"))
    if not public or proxy_bypass_environment(host):
        return None
    proxies = getproxies_environment()
    proxy: str = proxies.get(origin.scheme) or proxies.get("all") or ""
    if "://" not in proxy:
        return f"http://{proxy}" if proxy else None
    return proxy if proxy.startswith("http") else None
