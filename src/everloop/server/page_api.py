"""The JSON API of the web page: all of its operations, and login."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from ..errors import StoreError
from ..runtime.owners import Owners
from .access import Access, set_cookie
from .errors import unauthorized, unavailable
from .guard import LOGIN
from .page_changes import ChangesApi, MakeChanges
from .page_channels import ChannelsApi
from .page_files import FileNames, FilesApi, NoFileNames
from .page_operation import Checks, OperationApi, no_checks
from .page_push import PushApi
from .page_routes import Nothing, add_operations, json_response, operation, read_body
from .page_sessions import Export, NamedFiles, SessionsApi, no_export
from .page_timeline import TimelineApi
from .page_work import WorkApi

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------- requests and responses


class LoginBody(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two fields."""

    link: str = ""  # the code of a one-time link
    token: str = ""


class LoggedIn(msgspec.Struct):
    owner: str
    page_key: str  # for the header X-Everloop-Page of later requests


class LoggedOut(msgspec.Struct):
    logged_out: bool


# ---------------------------------------------------------------------------------------------- handlers


@dataclass(slots=True, frozen=True)
class Services:
    """What the command line provides to the page.

    These are the checks of `doctor`, session export, file names for @ mentions, and the recording of workspace changes.
    """

    checks: Checks = no_checks
    export: Export = no_export
    file_names: Callable[[Path], FileNames] = NoFileNames
    named_files: NamedFiles = lambda text, workspace: []
    changes: MakeChanges | None = None


NO_SERVICES = Services()


class PageApi:
    """Everything under `/api/`. A request only sees data of its owner."""

    def __init__(
        self,
        owners: Owners,
        access: Access,
        *,
        ping_seconds: float,
        per_minute: int = 0,
        services: Services = NO_SERVICES,
    ) -> None:
        self._access = access
        self._changes = ChangesApi(owners, services.changes)
        self._sessions = SessionsApi(
            owners,
            self._changes,
            services.export,
            services.named_files,
            ping_seconds=ping_seconds,
            per_minute=per_minute,
        )
        self._handlers = (
            self,
            self._sessions,
            TimelineApi(owners),
            WorkApi(owners),
            FilesApi(owners, services.file_names),
            self._changes,
            OperationApi(owners, services.checks),
            ChannelsApi(owners),
            PushApi(owners),
        )

    def add_routes(self, router: web.UrlDispatcher) -> None:
        for handlers in self._handlers:
            add_operations(router, handlers)

    def stop(self) -> None:
        """End the feeds, because the server is shutting down."""
        self._changes.stop()
        self._sessions.end_feeds()

    @operation(
        "POST",
        LOGIN,
        "login",
        "Exchange a one-time link, or a token, for the page's cookie.",
        LoggedIn,
        LoginBody,
        public=True,
    )
    async def login(self, request: web.Request) -> web.Response:
        body = await read_body(request, LoginBody)
        try:
            login = await (self._access.redeem(body.link) if body.link else self._access.login(body.token))
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot use its store at the moment; try again") from error
        if login is None:
            what = "this link was used before or is too old" if body.link else "this token is unknown or revoked"
            raise unauthorized(what, "not_logged_in")
        response = json_response(LoggedIn(login.owner, login.page_key))
        set_cookie(request, response, login)
        return response

    @operation("POST", "/api/logout", "logout", "Remove the page's cookie.", LoggedOut, Nothing)
    async def logout(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        response = json_response(LoggedOut(True))
        set_cookie(request, response, None)
        return response


# The classes of all operations, for the OpenAPI document.
HANDLERS: tuple[type, ...] = (
    PageApi,
    SessionsApi,
    TimelineApi,
    WorkApi,
    FilesApi,
    ChangesApi,
    OperationApi,
    ChannelsApi,
    PushApi,
)
