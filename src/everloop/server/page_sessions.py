"""Operations on whole sessions for the page: fork, export, rename, archive, delete; and the images in a session."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Literal, cast, get_args
from urllib.parse import quote

import msgspec
from aiohttp import web

from ..bus import WEB
from ..errors import EverloopError
from ..log import CallEnded, Logged, UserSaid
from ..runtime.owners import Owners
from ..store.base import Busy, SessionInfo
from ..text import one_line
from ..threads import in_thread
from .errors import bad_request, conflict, not_found
from .guard import OWNER
from .page_files import HEADERS
from .page_routes import Nothing, Parameter, json_response, key_of, operation, own_key_of, read_body

TITLE = 80  # characters
PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
Format = Literal["md", "jsonl", "html"]
Export = Callable[[Sequence[Logged], str, Format], str]
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


def no_export(entries: Sequence[Logged], title: str, form: Format) -> str:
    """The default, which exports nothing."""
    raise EverloopError("this server exports no sessions")


class ForkBody(msgspec.Struct, forbid_unknown_fields=True):
    until: int  # the position of the last entry in the new session


class Forked(msgspec.Struct):
    key: str


class RenameBody(msgspec.Struct, forbid_unknown_fields=True):
    title: str  # "" removes a title


class Renamed(msgspec.Struct):
    title: str


class ArchiveBody(msgspec.Struct, forbid_unknown_fields=True):
    archived: bool


class Archived(msgspec.Struct):
    archived: bool


class SessionDeleted(msgspec.Struct):
    deleted: bool


class SessionsApi:
    """Forks, exports, renames, archives and deletes sessions of an owner."""

    def __init__(self, owners: Owners, export: Export) -> None:
        self._owners = owners
        self._store = owners.store
        self._export = export

    @operation(
        "POST",
        "/api/sessions/{key}/fork",
        "fork",
        "Start a new session with the first entries of this one; an unfinished turn is run again.",
        Forked,
        ForkBody,
    )
    async def fork(self, request: web.Request) -> web.Response:
        body, info = await read_body(request, ForkBody), await self._session(request)
        if not 0 < body.until <= info.entries:
            raise bad_request(f"until: must be a position from 1 to {info.entries}", "until")
        made = await self._store.fork(info.owner, info.key, body.until, f"{WEB}:{secrets.token_hex(8)}")
        self._owners.changed()
        return json_response(Forked(made.key))

    @operation(
        "GET",
        "/api/sessions/{key}/export",
        "export",
        "The session as a document, with secrets redacted.",
        None,
        None,
        Parameter("format", "md, jsonl or html."),
        media="application/octet-stream",
    )
    async def export(self, request: web.Request) -> web.Response:
        info, form = await self._session(request), request.query.get("format", "md")
        if form not in get_args(Format):
            raise bad_request("format: must be md, jsonl or html", "format")
        entries = await self._store.read_log(info.id)
        try:
            text = await in_thread(self._export, entries, info.key, cast(Format, form))
        except EverloopError as error:
            raise bad_request(str(error), code="unsupported") from None
        name = quote(f"{re.sub(r'[^A-Za-z0-9_-]+', '-', info.key)}.{form}", safe="")
        headers = {**HEADERS, "Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
        data = text.encode("utf-8", "replace")
        return web.Response(body=data, headers=headers, content_type="application/octet-stream")

    @operation("POST", "/api/sessions/{key}/title", "rename", "Give a session a title.", Renamed, RenameBody)
    async def rename(self, request: web.Request) -> web.Response:
        body, info = await read_body(request, RenameBody), await self._session(request)
        title = one_line(body.title, TITLE)
        await self._store.set_title(info.owner, info.key, title)
        return json_response(Renamed(title))

    @operation(
        "POST",
        "/api/sessions/{key}/archive",
        "archive",
        "Archive a session until something happens in it, or unarchive it.",
        Archived,
        ArchiveBody,
    )
    async def archive(self, request: web.Request) -> web.Response:
        body, info = await read_body(request, ArchiveBody), await self._session(request)
        if body.archived and info.open_turn is not None:
            raise conflict("the session is running or waits for you: stop it first", code="running")
        await self._store.set_archived(info.owner, info.key, body.archived)
        return json_response(Archived(body.archived))

    @operation("POST", "/api/sessions/{key}/delete", "delete", "Delete a session.", SessionDeleted, Nothing)
    async def delete(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        own_key_of(request)
        info = await self._session(request)
        try:
            deleted = await self._store.delete_session(info.owner, info.key)
        except Busy:
            raise conflict("the session is running: stop it first", code="running") from None
        return json_response(SessionDeleted(deleted is not None))

    @operation(
        "GET",
        "/api/sessions/{key}/pictures/{seq}/{number}",
        "picture",
        "A picture of an entry.",
        None,
        None,
        media="image/*",
    )
    async def picture(self, request: web.Request) -> web.Response:
        info = await self._session(request)
        seq, number = (request.match_info[name] for name in ("seq", "number"))
        if not re.fullmatch(r"[0-9]{1,15}", seq, re.ASCII) or not re.fullmatch(r"[0-9]{1,3}", number, re.ASCII):
            raise bad_request("the position and the number of the picture must be numbers", "seq")
        logged = await self._store.read_log(info.id, int(seq) - 1, int(seq)) if int(seq) else []
        urls = pictures_of(logged[0]) if logged else []
        found = await in_thread(_decoded, urls[int(number)]) if int(number) < len(urls) else None
        if found is None:
            raise not_found("there is no such picture", code="picture_not_found")
        return web.Response(body=found[1], headers=HEADERS, content_type=found[0])

    async def _session(self, request: web.Request) -> SessionInfo:
        info = await self._store.session(request[OWNER], key_of(request))
        if info is None:
            raise not_found("there is no such session", code="session_not_found")
        return info


def pictures_of(one: Logged) -> list[str]:
    """Return the data URLs of the images in an entry."""
    match one.entry:
        case CallEnded(images=images):
            return list(images)
        case UserSaid(content=list(parts)):
            shown = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
            return [str(url.get("url", "")) if isinstance(url, dict) else str(url) for url in shown]
        case _:
            return []


def _decoded(url: str) -> tuple[str, bytes] | None:
    """Return the type and bytes of an image in a data URL; None for anything else."""
    found = _DATA.match(url)
    if found is None or found[1].lower() not in PICTURES:
        return None
    try:
        return found[1].lower(), base64.b64decode(url[found.end() :], validate=True)
    except binascii.Error:
        return None
