"""Web push for the page: an owner's subscribed browsers, and whether the page is being looked at."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..config import ChannelConfig
from ..runtime.notices import PUSH
from ..runtime.owners import Owners
from .errors import bad_request, conflict
from .guard import OWNER, TOKEN
from .page_routes import json_response, operation, read_body, refusals

MAX_ID = 100


class PushState(msgspec.Struct):
    enabled: bool  # [channels.push] is configured
    key: str  # the key that a browser subscribes with; "" if push is not enabled
    subscriptions: int  # browsers of the owner
    content: bool = False  # notifications include the beginning of the message


class SubscriptionBody(msgspec.Struct, forbid_unknown_fields=True):
    """A subscription as provided by a browser, in base64url."""

    endpoint: str
    p256dh: str
    auth: str


class EndpointBody(msgspec.Struct, forbid_unknown_fields=True):
    endpoint: str


class VisibleBody(msgspec.Struct, forbid_unknown_fields=True):
    page: str  # a name that the page has generated for itself
    visible: bool


class PushApi:
    """Subscriptions belong to the owner of the page that created them."""

    def __init__(self, owners: Owners) -> None:
        self._store = owners.store
        self._config = next((one for one in owners.config.channels if (one.network or one.name) == PUSH), None)

    @operation("GET", "/api/push", "push", "Whether push notifications are available, and with which key.", PushState)
    async def state(self, request: web.Request) -> web.Response:
        return json_response(await self._state(request))

    @operation(
        "POST", "/api/push/subscribe", "subscribe", "Subscribe a browser to notifications.", PushState, SubscriptionBody
    )
    async def subscribe(self, request: web.Request) -> web.Response:
        from ..channels.base import Options
        from ..channels.push import Subscriptions, checked, fetcher_of

        body, config, token = await read_body(request, SubscriptionBody), self._needed(), request[TOKEN]
        fetcher = fetcher_of(Options(config.name, config.options))
        with refusals():
            made = checked(request[OWNER], body.endpoint, body.p256dh, body.auth, token.id if token else "", fetcher)
        await Subscriptions(self._store, config.name).add(made)
        return json_response(await self._state(request))

    @operation(
        "POST",
        "/api/push/unsubscribe",
        "unsubscribe",
        "Unsubscribe a browser from notifications.",
        PushState,
        EndpointBody,
    )
    async def unsubscribe(self, request: web.Request) -> web.Response:
        from ..channels.push import Subscriptions

        body, config = await read_body(request, EndpointBody), self._needed()
        subscriptions = Subscriptions(self._store, config.name)
        for one in await subscriptions.of(request[OWNER]):
            if one.endpoint == body.endpoint:
                await subscriptions.remove(one)
        return json_response(await self._state(request))

    @operation(
        "POST", "/api/push/visible", "visible", "Report whether a page is being looked at.", PushState, VisibleBody
    )
    async def visible(self, request: web.Request) -> web.Response:
        from ..channels.push import Subscriptions

        body, config = await read_body(request, VisibleBody), self._needed()
        if not body.page or len(body.page) > MAX_ID:
            raise bad_request(f"page: must have 1 to {MAX_ID} characters", "page")
        await Subscriptions(self._store, config.name).look(request[OWNER], body.page, body.visible)
        return json_response(await self._state(request))

    def _needed(self) -> ChannelConfig:
        if self._config is None:
            raise conflict("this server sends no notifications: its settings have no [channels.push]", code="no_push")
        return self._config

    async def _state(self, request: web.Request) -> PushState:
        if self._config is None:
            return PushState(False, "", 0)
        from ..channels.push import MISSING, Subscriptions, is_installed

        if not is_installed():
            raise conflict(MISSING, code="no_push")
        subscriptions = Subscriptions(self._store, self._config.name)
        count, content = len(await subscriptions.of(request[OWNER])), self._config.options.get("content") is True
        return PushState(True, await subscriptions.public_key(), count, content)
