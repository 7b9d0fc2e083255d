"""A small HTTP client for channels: requests to one server, on the connections of `providers.http`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from ..providers.http import ConnectionBroke, Pool, origin_of, proxy_for, read_up_to, retry_after
from ..threads import in_thread

CONNECT_SECONDS = 10.0
LARGEST_REPLY = 16 * 1024 * 1024
AGENT = "everloop"


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after(self) -> float | None:
        """The seconds that the server asks to wait."""
        return retry_after(self.headers)


class HttpClient:
    """Sends requests to one origin. Raises `OSError` or `TimeoutError` when there is no answer."""

    def __init__(self, url: str) -> None:
        self._origin = origin_of(url)
        self._pool: Pool | None = None

    async def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        seconds: float,
        repeatable: bool = True,
    ) -> Reply:
        """Send a request to a path of the origin, and read the whole reply.

        A connection that ends before an answer is replaced by another if the request is `repeatable`.
        """
        if self._pool is None:
            self._pool = await in_thread(lambda: Pool(self._origin, {}, proxy_for(self._origin)))
        async with asyncio.timeout(seconds):
            response = None
            while response is None:
                connection = await self._pool.take(CONNECT_SECONDS)
                response = await connection.send(
                    (body,), whole=True, head=self._head(method, target, headers, len(body))
                )
                if response is None and not repeatable:  # the server may have read it
                    raise ConnectionBroke("the server closed it")
            try:
                data = await read_up_to(response, LARGEST_REPLY)
            finally:
                if not response.complete:
                    response.close()
        if len(data) > LARGEST_REPLY:
            raise OSError(f"the reply is larger than {LARGEST_REPLY} bytes")
        return Reply(response.status, response.headers, data)

    async def post(
        self, target: str, headers: Mapping[str, str], body: bytes, seconds: float, repeatable: bool = True
    ) -> Reply:
        """Send a POST request."""
        return await self.request("POST", target, headers, body, seconds, repeatable)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            await asyncio.sleep(0)  # let the transports close

    @property
    def target(self) -> str:
        """The path and query of the URL."""
        return self._origin.target

    def _head(self, method: str, target: str, headers: Mapping[str, str], size: int) -> bytes:
        through = f"{self._origin}" if self._origin.scheme == "http" and proxy_for(self._origin) else ""
        lines = [f"{method} {through}{target} HTTP/1.1", f"Host: {self._origin.authority}"]
        lines += [f"{name}: {value}" for name, value in {"User-Agent": AGENT, **headers}.items()]
        lines += ["Accept-Encoding: identity", f"Content-Length: {size}", "", ""]
        head = "\r\n".join(lines)
        if head.count("\r\n") != len(lines) - 1 or "\0" in head:
            raise ValueError("a header has a line end")
        return head.encode("latin-1", "replace")
