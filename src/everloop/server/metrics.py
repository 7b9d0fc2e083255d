"""GET /metrics, on the server and on a worker that is told to have an address for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from aiohttp import web

from ..config import Config
from ..errors import ConfigError
from ..observability.metrics import Meters
from ..observability.metrics_page import Page
from ..observability.metrics_text import CONTENT_TYPE, OTHER
from ..store.base import Store
from ..store.tokens import ADMIN
from .answers import health
from .connections import Runner
from .guard import Door, needs
from .listening import listen
from .origins import check_bind

ADDRESS = re.compile(r"(?:\[([^\]\s]+)\]|([^:\s]+)):([0-9]{1,5})")
AT_ONCE = 20  # requests to a worker, which has better things to do
BODY_LIMIT = 1_000


class Monitor:
    """Answers the monitoring of the machine: with the numbers of all owners, so only to a token with `admin`."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._page = Page(store, meters)
        self._meters = meters

    @needs(ADMIN)
    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._page.text(), headers={"Content-Type": CONTENT_TYPE})

    def counts(self, app: web.Application) -> Callable[[str, int], None]:
        """What a door is to tell of each answer. A path that leads nowhere is not told: anybody can make one up."""
        plain, patterns = set(), []
        for resource in app.router.resources():
            info = resource.get_info()
            if "pattern" in info:
                patterns.append((info["pattern"], info["formatter"]))
            else:
                plain.add(info["path"])

        def count(path: str, status: int) -> None:
            found = path if path in plain else next((name for one, name in patterns if one.fullmatch(path)), OTHER)
            self._meters.requested(found, status)

        return count


class MetricsServer:
    """The listener of a worker: /metrics and /healthz, behind the same door as the server's."""

    def __init__(self, config: Config, store: Store, meters: Meters) -> None:
        self._config = config
        self._store = store
        self._monitor = Monitor(store, meters)
        self._runner: Runner | None = None

    async def start(self) -> Sequence[str]:
        """Begin to listen where `[worker] metrics` says; gives the addresses."""
        host, port = _address(self._config.metrics)
        tokens = await self._store.tokens()
        binding = await check_bind(host, any(token.revoked_at is None for token in tokens))
        app = web.Application()
        app.router.add_get("/metrics", self._monitor.handle)
        app.router.add_get("/healthz", _healthz)
        door = Door(
            self._store,
            hosts=(host, *self._config.server_hosts),
            loopback=binding.loopback,
            token_needed=self._config.server_tokens or not binding.loopback,
            body_limit=BODY_LIMIT,
            at_once=AT_ONCE,
            at_once_each=AT_ONCE,
            on_answer=self._monitor.counts(app),
        )
        self._runner = Runner(app, door, shutdown_timeout=1.0, places=AT_ONCE)
        return await listen(self._runner, binding, port, "--metrics")

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
