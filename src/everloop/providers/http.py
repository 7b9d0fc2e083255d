"""One model endpoint over HTTP: a pool of connections, time-outs, bounded reads, and errors a person can act on."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import aiohttp
import msgspec
from yarl import URL

from ..errors import ConfigError
from .base import ProviderError
from .body import payload
from .sse import error_text, one_line

RETRYABLE = frozenset({408, 409, 425, 429})  # and all of 5xx
ERROR_BODY = 1 << 16
GOODBYE = 1.0  # seconds a server has to end a stream whose last word is in
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
    """Where requests go. The pool opens on first use, in the loop that uses it; anew in another, or after `close`."""

    def __init__(self, url: URL, headers: Mapping[str, str], timeouts: Timeouts, secret: str | None = None) -> None:
        self.where = url.with_user(None).authority
        self.timeouts = timeouts
        self._url = url
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._secret = secret
        self._proxy = proxy_for(url)
        self._whole = aiohttp.ClientTimeout(total=timeouts.total, connect=timeouts.connect)
        self._piecewise = aiohttp.ClientTimeout(total=None, connect=timeouts.connect)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: set[aiohttp.ClientResponse] = set()

    async def close(self) -> None:
        for response in list(self._ending):
            self._part(response)
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def fetch(self, body: Sequence[bytes], limit: int) -> bytes:
        """Send a request and read its whole answer, which may have up to `limit` bytes."""
        try:
            response = await self._post(body, self._whole)
            return await self._read_whole(response, limit)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error, f"gave no answer within {self.timeouts.total:g} s") from error

    async def read_whole(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """The body of an open response that turned out not to be a stream."""
        try:
            async with asyncio.timeout(self.timeouts.total):
                return await self._read_whole(response, limit)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error, f"gave no answer within {self.timeouts.total:g} s") from error

    async def open(self, body: Sequence[bytes]) -> aiohttp.ClientResponse:
        """Send a request whose answer will be streamed; whoever takes the response must `leave` it."""
        try:
            async with asyncio.timeout(self.timeouts.first_token):
                return await self._post(body, self._piecewise)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error, f"sent no first token within {self.timeouts.first_token:g} s") from error

    def leave(self, response: aiohttp.ClientResponse, ended: bool) -> None:
        """Part from a stream: at once when it was broken off, and with a moment to end by itself when all was said.

        A response that ends by itself gives its connection back to the pool.
        """
        if response.closed:
            return
        if not ended:
            response.close()
            return
        self._ending.add(response)
        asyncio.get_running_loop().call_later(GOODBYE, self._part, response)

    def _part(self, response: aiohttp.ClientResponse) -> None:
        self._ending.discard(response)
        response.close()

    async def _post(self, body: Sequence[bytes], timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        loop = asyncio.get_running_loop()
        session = self._session
        if session is None or self._loop is not loop:
            if self._loop is not None and self._loop.is_closed():
                await self.close()
            session = self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers
            )
            self._loop = loop
        response = await session.post(
            self._url,
            data=payload(body),
            timeout=timeout,
            # A redirect would make a GET of the POST, or carry the conversation to a host nobody configured.
            allow_redirects=False,
            proxy=self._proxy,
        )
        if response.status != 200:
            try:
                raise await self._refusal(response)
            finally:
                response.close()
        return response

    async def _read_whole(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        try:
            data = await read_up_to(response, limit)
        finally:
            if not response.closed:
                response.close()
        if len(data) > limit:
            raise ProviderError(f"{self.where}: the answer is larger than {limit} bytes")
        return data

    async def _refusal(self, response: aiohttp.ClientResponse) -> ProviderError:
        """What a status other than 200 means, in the server's own words."""
        status, headers = response.status, response.headers
        if 300 <= status < 400:
            target = one_line(headers.get("Location", "nowhere"))
            return ProviderError(
                f"{self.where}: HTTP {status}, moved to {target}: set the base URL (EVERLOOP_BASE_URL) anew",
                status=status,
            )
        data = (await read_up_to(response, ERROR_BODY))[:ERROR_BODY]
        error: Any = data.decode("utf-8", "replace")
        quota = False
        try:
            error = msgspec.json.decode(data)
            quota = error["error"]["code"] == "insufficient_quota"  # a 429 that waiting does not cure
        except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
            pass
        text = error_text(error) or response.reason or "no reason given"
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
        """A network error or a time-out as a person reads it."""
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            why = f"no connection within {self.timeouts.connect:g} s"
            return ProviderError(f"cannot reach {self._url.origin()}: {why}", retryable=True)
        if isinstance(error, TimeoutError):
            return ProviderError(f"{self.where} {late}", retryable=True)
        if isinstance(error, aiohttp.ClientSSLError):
            return ProviderError(f"no safe connection to {self._url.origin()}: {one_line(str(error))}")
        if isinstance(error, aiohttp.ClientConnectorError):
            why = one_line(error.os_error.strerror or str(error.os_error))
            return ProviderError(f"cannot reach {self._url.origin()}: {why}: is the server running?", retryable=True)
        reason = one_line(str(error) or type(error).__name__)
        return ProviderError(f"the connection to {self.where} broke: {reason}", retryable=True)


class TimedReader:
    """Reads a stream within its time-outs, for the price of one timer that mostly does not move.

    Only data keeps it waiting, so whoever finds some sets `heard`: comments that keep a connection alive do not
    count. The clock stands still while nobody reads.
    """

    def __init__(self, endpoint: Endpoint, response: aiohttp.ClientResponse, started: float) -> None:
        self.heard = False
        self._endpoint = endpoint
        self._content = response.content
        self._loop = asyncio.get_running_loop()
        self._late = f"sent no first token within {endpoint.timeouts.first_token:g} s"
        self._due = started + endpoint.timeouts.first_token
        self._deadline = math.inf  # of the read that waits now
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    async def read(self, patience: float = math.inf) -> bytes:
        """The next bytes as they came, empty at the end; `patience` is a shorter time-out than the usual."""
        if self.heard:
            self.heard = False
            seconds = self._endpoint.timeouts.token
            self._late = f"stopped in the middle of the answer: nothing came for {seconds:g} s"
            self._due = self._loop.time() + seconds
        self._wait_until(min(self._due, self._loop.time() + patience))
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._endpoint._failure(error, self._late) from error
        finally:
            self._deadline = math.inf

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
            self._content.set_exception(TimeoutError())
        elif self._deadline < math.inf:
            self._wait_until(self._deadline)


async def read_up_to(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body; reading stops soon after `limit` bytes."""
    content = response.content
    data = await content.readany()
    if content.at_eof():
        return data
    parts, size = [data], len(data)
    while size <= limit and (data := await content.readany()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """How many seconds the server asks us to wait, from any of the three ways to say so."""
    seconds = math.nan
    try:
        if value := headers.get("retry-after-ms"):
            seconds = float(value) / 1000
        elif value := headers.get("retry-after"):
            seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def endpoint_url(base_url: str, path: str) -> URL:
    """The URL of a request below a base URL; a base URL that has the path already is taken as it is."""
    try:
        url = URL(base_url.strip().rstrip("/"))
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f'base_url "{base_url}" is not a URL: set EVERLOOP_BASE_URL to http://… or https://…')
    return url if url.path.endswith(path) else url.with_path(url.path.rstrip("/") + path, keep_query=True)


def proxy_for(url: URL) -> str | None:
    """The proxy that the environment names for a public host; our own machine and network need none."""
    host = url.host or ""
    try:
        public = ipaddress.ip_address(host).is_global
    except ValueError:
        public = "." in host and not host.endswith((".localhost", ".local", ".internal", ".lan"))
    if not public or proxy_bypass_environment(host):
        return None
    proxies = getproxies_environment()
    proxy: str | None = proxies.get(url.scheme) or proxies.get("all")
    return proxy if proxy and proxy.startswith("http") else None
