"""The HTTP server: its routes, startup and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from ..config import Config
from ..errors import StoreError
from ..messages import encode_json
from ..observability.metrics import Meters
from ..runtime.owners import Owners
from ..threads import in_thread
from . import web_files
from .access import Access
from .agent_choice import MODELS
from .anthropic_messages import VERSION_HEADER, MessagesHandler, anthropic_models
from .connections import Runner, connection_limit
from .errors import not_found, unavailable
from .guard import Guard
from .metrics import MetricsHandler
from .model_endpoints import ModelEndpoints
from .ollama import OllamaHandler
from .openai_chat import ChatHandler
from .openai_responses import ResponsesHandler
from .origins import check_bind
from .page_api import NO_SERVICES, PageApi, Services
from .responses import health, model, models
from .turns import Turns

if TYPE_CHECKING:
    from .placement import Database, Placement

log = logging.getLogger("everloop.server")
READY_SECONDS = 3.0  # time limit for the store to accept a write; load balancers do not wait much longer
READY_FRESH = 1.0  # seconds for which the result of a write probe is reused


class Server:
    """Serves the APIs and the web page.

    With a `placement`, it passes each request on to the server of the database that the request's owner is in. Those
    servers do not listen: for them, `prepare` is enough.
    """

    def __init__(
        self,
        config: Config,
        owners: Owners,
        meters: Meters | None = None,
        services: Services = NO_SERVICES,
        placement: Placement | None = None,
    ) -> None:
        self._config = config
        self._owners = owners
        self._metrics = MetricsHandler(owners.store, meters or Meters())
        self._turns = Turns(
            owners,
            messages_limit=config.messages_limit,
            ping_seconds=config.ping_seconds,
            per_minute=config.requests_per_minute,
            agent=config.server_agent,
        )
        self._placement = placement
        find_token = placement.find_token if placement is not None else None
        self.access = Access(owners.store, config.home, find_token)
        self._page = PageApi(
            owners,
            self.access,
            ping_seconds=config.ping_seconds,
            per_minute=config.requests_per_minute,
            services=services,
        )
        self._runner: Runner | None = None
        self._guard: Guard | None = None
        self._is_local = False
        self._openapi = b""
        self._probe: asyncio.Task[bool] | None = None  # whether the store accepts writes
        self._probed_at = 0.0

    async def start(self) -> Sequence[str]:
        """Listen, and return the URLs."""
        config = self._config
        tokens = await self._owners.store.tokens()
        usable = any(token.revoked_at is None for token in tokens)
        # With a placement, every request needs a token, and the tokens may be in another database.
        binding = await check_bind(config.host, usable or self._placement is not None)
        self._is_local = binding.loopback
        if tokens and not usable and self._placement is None:
            log.warning("all tokens are revoked: every request is refused until `everloop token add NAME` creates one")
        runner = await self._make_runner(binding.loopback)
        return await runner.listen(binding, config.port, "--port")

    async def prepare(self) -> Database:
        """Get ready for requests that another server passes on."""
        runner = await self._make_runner(loopback=False)
        await runner.setup()
        return self.database

    @property
    def database(self) -> Database:
        """The handlers of this server, once it has started."""
        from .placement import Database

        assert self._runner is not None
        assert self._guard is not None
        return Database(self._runner.admit, self._guard, self._owners.store.token)

    async def _make_runner(self, loopback: bool) -> Runner:
        config = self._config
        await in_thread(web_files.files)
        app = self._app()
        self._guard = Guard(
            self._owners.store,
            hosts=(config.host, *config.server_hosts),
            origins=config.server_origins,
            loopback=loopback,
            token_needed=config.server_tokens or not loopback or self._placement is not None,
            body_limit=config.body_limit,
            at_once=config.at_once,
            at_once_each=config.at_once_each,
            access=self.access,
            on_response=self._metrics.counter(app),
        )
        self._runner = Runner(
            app,
            self._guard,
            shutdown_timeout=max(config.drain_seconds, 0.01),
            connections=connection_limit(config.at_once),
            admit=self._placement.admit if self._placement is not None else None,
        )
        return self._runner

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach it."""
        return self._is_local

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Refuse new requests, and let running ones finish within `drain_seconds`, or until `hurry` is set.

        Unfinished turns stay open on disk.
        """
        if self._runner is None or self._guard is None:
            return
        self.refuse()
        cleanup = asyncio.ensure_future(self._runner.cleanup())
        if hurry is not None:
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait([cleanup, hurried], return_when=asyncio.FIRST_COMPLETED)
            if not hurried.cancel():
                self._runner.hurry()
        await cleanup

    def refuse(self) -> None:
        """Refuse new requests, and end the feeds."""
        if self._guard is not None:
            self._guard.close()
        self._turns.stop()
        self._page.stop()

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", ChatHandler(self._turns).handle)
        messages = MessagesHandler(self._turns)
        app.router.add_post("/v1/messages", messages.handle)
        app.router.add_post("/v1/messages/count_tokens", messages.count)
        responses = ResponsesHandler(self._turns)
        app.router.add_post("/v1/responses", responses.create)
        app.router.add_get("/v1/responses/{id}", responses.get)
        app.router.add_delete("/v1/responses/{id}", responses.delete)
        app.router.add_post("/v1/responses/{id}/cancel", responses.cancel)
        ollama = OllamaHandler(self._turns, self._names())
        app.router.add_post("/api/chat", ollama.chat)
        app.router.add_post("/api/generate", ollama.generate)
        app.router.add_get("/api/tags", ollama.tags)
        app.router.add_get("/api/ps", ollama.ps)
        app.router.add_get("/api/version", ollama.version)
        app.router.add_post("/api/show", ollama.show)
        forwarded = ModelEndpoints(self._turns)
        app.router.add_post("/v1/completions", forwarded.completions)
        app.router.add_post("/v1/embeddings", forwarded.embeddings)
        app.router.add_post("/api/embed", forwarded.ollama_embed)
        app.router.add_post("/api/embeddings", forwarded.ollama_embedding)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/openapi.json", self._document)
        app.router.add_get("/metrics", self._metrics.handle)
        app.router.add_get("/", web_files.serve)
        app.router.add_get("/web/{path:.+}", web_files.serve)
        self._page.add_routes(app.router)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if VERSION_HEADER in request.headers:
            return _json(anthropic_models(self._names()))
        return _json(models(self._names()))

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self._names():
            raise not_found(f"unknown model {name[:100]!r}; GET /v1/models lists them", "model", "model_not_found")
        return _json(model(name))

    async def _healthz(self, request: web.Request) -> web.Response:
        return _json(health())

    async def _readyz(self, request: web.Request) -> web.Response:
        """Return whether a request would succeed now: the store accepts writes, and the server is not shutting down."""
        if self._turns.is_stopping:
            raise unavailable("the server is shutting down")
        now = asyncio.get_running_loop().time()
        if self._probe is None or (self._probe.done() and now - self._probed_at > READY_FRESH):
            # Shared by concurrent requests, which need no token.
            self._probe = asyncio.create_task(self._check_store())
        await asyncio.wait([probe := self._probe], timeout=READY_SECONDS)
        if not probe.done() or not probe.result():
            raise unavailable("the server cannot write to its store")
        return _json(health())

    async def _check_store(self) -> bool:
        try:
            await self._owners.store.check_writable()
        except StoreError as error:
            log.error("%s", error)
            return False
        finally:
            self._probed_at = asyncio.get_running_loop().time()
        return True

    async def _document(self, request: web.Request) -> web.Response:
        from .openapi import document

        self._openapi = self._openapi or encode_json(document())
        return _json(self._openapi)

    def _names(self) -> list[str]:
        """Return the models that a request may name."""
        config = self._config
        named = [name for name in config.server_models if not any(c in name for c in "*?[")]
        first = config.model or self._owners.provider.get_default_model()
        return list(dict.fromkeys(filter(None, (first, *config.fallbacks, *named, *MODELS))))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
