"""Operations of the page's API: declared next to their handlers, which also generates their OpenAPI description."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from ..bus import is_inside
from ..errors import EverloopError, StoreError
from ..messages import encode_json
from ..providers.openai import encode
from ..store.base import SessionInfo, Store
from ..store.tokens import USE
from .errors import ApiError, bad_request, not_found, unauthorized, unavailable
from .guard import OWNER, TOKEN, VISITOR, needs

log = logging.getLogger(__name__)
B = TypeVar("B", bound=msgspec.Struct)
H = TypeVar("H", bound=Callable[..., Awaitable[web.StreamResponse]])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_KEY = 200
JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(slots=True, frozen=True)
class Parameter:
    """A query parameter, or a header."""

    name: str
    about: str
    type: Literal["string", "integer"] = "string"
    required: bool = False
    place: Literal["query", "header"] = "query"


@dataclass(slots=True, frozen=True)
class Operation:
    """The inputs and outputs of an operation. A `{key}` in the path may contain slashes."""

    method: Literal["GET", "POST"]
    path: str
    name: str
    summary: str
    answer: type[msgspec.Struct] | None = None  # for JSON; None if the response is something else
    body: type[msgspec.Struct] | None = None
    parameters: tuple[Parameter, ...] = ()
    status: int = 200
    right: str = USE
    media: str = JSON
    public: bool = False  # no login is required


def operation(
    method: Literal["GET", "POST"],
    path: str,
    name: str,
    summary: str,
    answer: type[msgspec.Struct] | None = None,
    body: type[msgspec.Struct] | None = None,
    *parameters: Parameter,
    status: int = 200,
    right: str = USE,
    media: str = JSON,
    public: bool = False,
) -> Callable[[H], H]:
    """Declare the operation that a method handles."""
    made = Operation(method, path, name, summary, answer, body, parameters, status, right, media, public)

    def mark(handler: H) -> H:
        handler.operation = made  # type: ignore[attr-defined]
        return handler

    return mark


def operations_of(handlers: type) -> Iterator[tuple[str, Operation]]:
    """Return the operations of a handler class, each with the name of its method."""
    for name, member in vars(handlers).items():
        if isinstance(made := getattr(member, "operation", None), Operation):
            yield name, made


def add_operations(router: web.UrlDispatcher, handlers: object) -> None:
    """Add the routes of an object's operations."""
    for name, made in operations_of(type(handlers)):
        handler: Handler = getattr(handlers, name)
        path = made.path.replace("{key}", "{key:.+}")
        router.add_route(made.method, path, handler if made.public else _guarded(handler, made.right))


def _guarded(handler: Handler, right: str) -> Handler:
    """Only admit authenticated visitors.

    Coming from this machine is not sufficient: a sandboxed command with network access does so, too, and must not be
    able to answer its own question.
    """

    @needs(right)
    async def handle(request: web.Request) -> web.StreamResponse:
        if request[TOKEN] is None and VISITOR not in request:
            raise unauthorized(
                "log in on the page, or send a token: Authorization: Bearer …; `everloop token add NAME` creates one",
                "not_logged_in",
            )
        try:
            return await handler(request)
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot use its store at the moment; try again") from error

    return handle


# ---------------------------------------------------------------------------------------------- requests and responses


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """An empty object."""


async def read_body(request: web.Request, shape: type[B]) -> B:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=shape)
    except msgspec.MsgspecError as error:
        raise bad_request(f"the body is not valid here: {error}") from None


def json_response(body: msgspec.Struct, status: int = 200) -> web.Response:
    try:
        data = encode_json(body)
    except UnicodeEncodeError:  # a lone surrogate in a model's text
        data = encode(msgspec.to_builtins(body))
    return web.Response(body=data, status=status, content_type=JSON)


def read_text(request: web.Request, name: str, most: int = 4_000) -> str:
    """Return a required text from the query."""
    given = request.query.get(name, "")
    if not given.strip() or len(given) > most:
        raise bad_request(f"{name}: must have 1 to {most:,} characters", name)
    return given


def key_of(request: web.Request) -> str:
    """Return the key of the session in the path."""
    key = request.match_info["key"]
    if not key.strip() or len(key) > MAX_KEY or not key.isprintable():
        raise bad_request(f"the session's key must have 1 to {MAX_KEY} printable characters", "key")
    return key


async def session_in(store: Store, request: web.Request) -> SessionInfo:
    """Return the visitor's session whose key is in the path."""
    info = await store.session(request[OWNER], key_of(request))
    if info is None:
        raise not_found("there is no such session", code="session_not_found")
    return info


async def own_session_in(store: Store, request: web.Request) -> SessionInfo:
    """Return the visitor's session whose key is in the path, if a person may write to it."""
    own_key_of(request)
    return await session_in(store, request)


def own_key_of(request: web.Request) -> str:
    """Return the key of a session that a person may write to."""
    key = key_of(request)
    if is_inside(key):
        raise bad_request(f"{key.partition(':')[0]}: is reserved for internal sessions", "key")
    return key


@contextmanager
def refusals(refusal: Callable[[str], ApiError] = bad_request) -> Iterator[None]:
    """Raise an error that the visitor caused as this refusal. Errors of the store pass through."""
    try:
        yield
    except StoreError:
        raise
    except EverloopError as error:
        raise refusal(str(error)) from None


def who(request: web.Request) -> str:
    """Return the name under which a person's actions are logged."""
    token = request[TOKEN]
    return token.name if token is not None else "user"


# ---------------------------------------------------------------------------------------------- the description


def paths_of(classes: Sequence[type], ref: Callable[[type], Any], errors: Callable[..., Any]) -> dict[str, Any]:
    """Return the paths of these handler classes for the OpenAPI document."""
    paths: dict[str, Any] = {}
    for handlers in classes:
        for _, made in operations_of(handlers):
            paths.setdefault(made.path, {})[made.method.lower()] = _described(made, ref, errors)
    return paths


def _described(made: Operation, ref: Callable[[type], Any], errors: Callable[..., Any]) -> dict[str, Any]:
    codes = ["400", "401", "403", "405", "429", "500", "503"]
    if "{" in made.path or made.parameters:
        codes += ["404"]
    if made.body is not None:
        codes += ["404", "408", "409", "413", "415"]
    schema = ref(made.answer) if made.answer is not None else {"type": "string"}
    if made.media == EVENTS:
        schema = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    described: dict[str, Any] = {
        "operationId": f"page_{made.name}",
        "summary": made.summary,
        "security": [] if made.public else [{"token": []}],
        "parameters": [*_in_path(made.path), *map(_parameter, made.parameters)],
        "responses": {
            str(made.status): {"description": made.summary, "content": {made.media: {"schema": schema}}},
            **errors(*sorted(set(codes))),
        },
    }
    if made.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(made.body)}}}
    return described


def _in_path(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    limits = {"key": {"minLength": 1, "maxLength": MAX_KEY}}
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **limits.get(name, {})}}
        for name in names
    ]


def _parameter(one: Parameter) -> dict[str, Any]:
    return {
        "name": one.name,
        "in": one.place,
        "description": one.about,
        "required": one.required,
        "schema": {"type": one.type},
    }
