"""An HTTP server for networks that deliver messages by requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

LARGEST_BODY = 1024 * 1024
Handle = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def listening(host: str, port: int, path: str, handle: Handle, largest: int = LARGEST_BODY) -> AsyncIterator[int]:
    """Hand the POST requests to a path to `handle`; yield the port, which is any free one if 0 is given."""
    app = web.Application(client_max_size=largest)
    app.router.add_post("/" + path.strip("/"), handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, reuse_address=True)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
