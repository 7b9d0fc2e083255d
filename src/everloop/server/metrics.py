"""GET /metrics, in the server and in a worker with `[worker] metrics`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from aiohttp import web

from ..config import Config
from ..errors import ConfigError
from ..observability.metrics import CONTENT_TYPE, OTHER, Meters, Page
from ..store.base import Store
from ..store.tokens import ADMIN
from .connections import Runner
from .guard import Guard, needs
from .origins import check_bind
from .responses import health

ADDRESS = re.compile(r"(?:\[([^\]\s]+)\]|([^:\s]+)):([0-9]{1,5})")
AT_ONCE = 20  # concurrent requests to a worker
BODY_LIMIT = 1_000


class MetricsHandler:
    """Serves the metrics. They cover all owners, so a token needs the `admin` right."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._page = Page(store, meters)
        self._meters = meters

    @needs(ADMIN)
    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._page.text(), headers={"Content-Type": CONTENT_TYPE})

    def counter(self, app: web.Application) -> Callable[[str, int], None]:
        """Return a function that counts the responses of an application by route.

        Unknown paths are counted together: clients can make up any number of them.
        """
        plain, patterns = set(), []
        for resource in app.router.resources():
            info = resource.get_info()
            if "pattern" in info:
                patterns.append((info["pattern"], info["formatter"]))
            else:
                plain.add(info["path"])

        def count(path: str, status: int) -> None:
            matches = (route for pattern, route in patterns if pattern.fullmatch(path))
            self._meters.requested(path if path in plain else next(matches, OTHER), status)

        return count


class MetricsServer:
    """The HTTP listener of a worker: /metrics and /healthz, behind the same guard as the server."""

    def __init__(self, config: Config, store: Store, meters: Meters) -> None:
        self._config = config
        self._store = store
        self._metrics = MetricsHandler(store, meters)
        self._runner: Runner | None = None

    async def start(self) -> Sequence[str]:
        """Listen on the address in `[worker] metrics`, and return the URLs."""
        host, port = _address(self._config.metrics)
        tokens = await self._store.tokens()
        binding = await check_bind(host, any(token.revoked_at is None for token in tokens))
        app = web.Application()
        app.router.add_get("/metrics", self._metrics.handle)
        app.router.add_get("/healthz", _healthz)
        guard = Guard(
            self._store,
            hosts=(host, *self._config.server_hosts),
            loopback=binding.loopback,
            token_needed=self._config.server_tokens or not binding.loopback,
            body_limit=BODY_LIMIT,
            at_once=AT_ONCE,
            at_once_each=AT_ONCE,
            on_response=self._metrics.counter(app),
        )
        self._runner = Runner(app, guard, shutdown_timeout=1.0, connections=AT_ONCE)
        return await self._runner.listen(binding, port, "--metrics")

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(body=health(), content_type="application/json")


def _address(text: str) -> tuple[str, int]:
    found = ADDRESS.fullmatch(text)
    if found is None:
        raise ConfigError(f'[worker] metrics must be HOST:PORT, like 127.0.0.1:9464, not "{text[:100]}"')
    return found[1] or found[2], int(found[3])
