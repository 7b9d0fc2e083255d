"""Workspace changes made by turns, for the page: a diff of the last one, and undoing it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from ..errors import StoreError
from ..log import Call, Logged, TurnEnded
from ..runtime.agent import AgentLoop
from ..runtime.owners import Owners
from ..store.base import SessionInfo
from ..text import clean
from ..text_cursor import Position
from ..tools.base import ToolError
from ..tools.files.texts import BINARY_HEAD, form_of, is_binary
from .errors import conflict, forbidden
from .page_routes import Nothing, json_response, operation, own_session_in, read_body, session_in

log = logging.getLogger(__name__)
SHOWN = 100_000  # bytes per version of a file
FOLLOWED = 16  # sessions whose turns are followed concurrently; beyond that, changes are not recorded
WAIT = 60.0
NOTED = 5.0  # seconds


class FileChanges(Protocol):
    """The changes that a session's turns make."""

    async def begin(self) -> None: ...

    def note(self, one: Logged) -> None: ...

    async def end(self) -> None: ...

    async def latest(self) -> list[tuple[str, bytes | None, bytes | None]] | None: ...

    async def undo(self) -> tuple[list[str], list[str]]: ...


MakeChanges = Callable[[Path, str], FileChanges]  # of a workspace and a session


class ChangedFile(msgspec.Struct):
    path: str
    before: str | None  # None if the file did not exist, or is not shown
    after: str | None
    note: str  # why it is not shown


class ChangeList(msgspec.Struct):
    files: list[ChangedFile]


class Undone(msgspec.Struct):
    restored: list[str]
    kept: list[str]  # what was not restored, and why


class ChangesApi:
    """Follows the turns that the page opens, and undoes their changes."""

    def __init__(self, owners: Owners, make: MakeChanges | None) -> None:
        self._owners = owners
        self._store = owners.store
        self._make = make
        self._following: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def before(self, agent: AgentLoop, owner: str, key: str) -> None:
        """Record the state of the workspace before a message is sent, unless a turn is already being followed."""
        if self._make is None or (owner, key) in self._following or len(self._following) >= FOLLOWED:
            return
        info = await self._store.session(owner, key)
        if info is not None and info.open_turn is not None:
            return
        changes = self._make(agent.workspace, key)
        await changes.begin()
        if (owner, key) in self._following:  # another message arrived in the meantime
            return
        task = asyncio.create_task(self._follow(agent, changes, owner, key, info.entries if info is not None else 0))
        self._following[owner, key] = task
        task.add_done_callback(lambda _: self._following.pop((owner, key), None))

    async def _follow(self, agent: AgentLoop, changes: FileChanges, owner: str, key: str, entries: int) -> None:
        subscriber = agent.conversations.follow(owner, key, Position(entries, 0))
        try:
            while not subscriber.is_over:
                for update in await subscriber.next(WAIT):
                    if isinstance(update, Logged):
                        changes.note(update)
                        if isinstance(update.entry, TurnEnded):
                            await changes.end()
                            return
        except (StoreError, OSError) as error:
            log.warning("could not record the changes of a turn: %s", error)
        finally:
            subscriber.close()

    def stop(self) -> None:
        for task in list(self._following.values()):
            task.cancel()

    @operation(
        "GET",
        "/api/sessions/{key}/changes",
        "changes",
        "What the last turn that changed files did to them.",
        ChangeList,
    )
    async def changes(self, request: web.Request) -> web.Response:
        agent, changes = await self._of(await session_in(self._store, request))
        found = await changes.latest() if changes is not None else None
        return json_response(ChangeList([await _shown(agent, *one) for one in found or []]))

    @operation(
        "POST", "/api/sessions/{key}/undo", "undo", "Undo what the last turn that changed files did.", Undone, Nothing
    )
    async def undo(self, request: web.Request) -> web.Response:
        await read_body(request, Nothing)
        info = await own_session_in(self._store, request)
        agent, changes = await self._of(info)
        if info.open_turn is not None:
            raise conflict("the session is running or waits for you: stop it first", code="running")
        found = await changes.latest() if changes is not None else None
        if changes is None or not found:
            raise conflict("there is nothing to undo", code="nothing_changed")
        for path, before, _ in found:
            if (refused := await _refusal(agent, "write_file", path, content=_text(before) or "")) is not None:
                raise forbidden(refused, "not_allowed")
        restored, kept = await changes.undo()
        return json_response(Undone([clean(path) for path in restored], [clean(why) for why in kept]))

    async def _of(self, info: SessionInfo) -> tuple[AgentLoop, FileChanges | None]:
        if info.open_turn is None and (task := self._following.get((info.owner, info.key))) is not None:
            await asyncio.wait({task}, timeout=NOTED)  # the end of the turn is being recorded
        agent = await self._owners.agent(info.owner)
        return agent, self._make(agent.workspace, info.key) if self._make is not None else None


async def _refusal(agent: AgentLoop, tool: str, path: str, **arguments: str) -> str | None:
    """Return why the policy does not allow this; None if it does."""
    try:
        await agent.tools.admit(Call(secrets.token_hex(8), tool, {"path": path, **arguments}))
    except ToolError as error:
        return clean(str(error))
    return None


async def _shown(agent: AgentLoop, path: str, before: bytes | None, after: bytes | None) -> ChangedFile:
    if (refused := await _refusal(agent, "read_file", path)) is not None:
        return ChangedFile(clean(path), None, None, refused)
    sides = [side for side in (before, after) if side is not None]
    if any(len(side) > SHOWN or is_binary(side[:BINARY_HEAD]) for side in sides) or not sides:
        return ChangedFile(clean(path), None, None, "It is not text, or too long to show.")
    return ChangedFile(clean(path), _text(before), _text(after), "")


def _text(data: bytes | None) -> str | None:
    if data is None:
        return None
    form = form_of(data)
    return clean(data[len(form.mark) :].decode(form.encoding, "replace"))
