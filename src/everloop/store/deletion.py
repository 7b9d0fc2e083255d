"""Deleting sessions: the decisions that both stores share, and background pruning of old API requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from ..bus import InboundMessage
from ..errors import StoreError
from .base import Store

log = logging.getLogger(__name__)

API = "api:"  # key prefix of API requests' sessions, unless a client names another one
SUBAGENT = "sub:"
STEP_SESSIONS = 500  # sessions examined per pruning step
STEP_DELETIONS = 25  # maximum deletions per pruning step


class OldRequests(msgspec.Struct, frozen=True):
    """Sessions that may be pruned, and the next position to examine; None at the end."""

    sessions: Sequence[int]
    position: int | None


class _Request(msgspec.Struct):
    kept: bool = False


class _First(msgspec.Struct):
    request: _Request | None = None


_decode_first = msgspec.json.Decoder(_First).decode
_decode_message = msgspec.json.Decoder(InboundMessage).decode


def is_stateless(first_entry: str | bytes | None) -> bool:
    """Return whether a session is a single sessionless API request, judging by its first log entry or its message."""
    if first_entry is None:
        return False
    try:
        request = _decode_first(first_entry).request
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return request is not None and not request.kept


def parent_of(data: str | bytes | None) -> str:
    """Return the key of the session that started a sub-agent, from its task in the inbox; "" if unknown."""
    if data is None:
        return ""
    try:
        task = _decode_message(data).task
    except (msgspec.MsgspecError, UnicodeError):
        return ""
    return task.parent if task is not None else ""


def family(root: tuple[int, str], subagents: Iterable[tuple[int, str, str]]) -> list[tuple[int, str]]:
    """Return (id, key) of a session and of its descendants, given (id, key, parent's key) of all sub-agents."""
    children: dict[str, list[tuple[int, str]]] = {}
    for id, key, parent in subagents:
        children.setdefault(parent, []).append((id, key))
    found = [root]
    for _, key in found:  # grows during the iteration
        found += [child for child in children.get(key, ()) if child not in found]
    return found


def is_prunable(key: str, first_entry: str | None, message: str | None, exists: Callable[[str], bool]) -> bool:
    """Return whether an old session is a sessionless request, or a sub-agent of a session that no longer exists.

    Decided by the first entry of its log and the first message of its inbox.
    """
    if key.startswith(API):
        return is_stateless(first_entry if first_entry is not None else message)
    parent = parent_of(message)
    return parent.startswith((API, SUBAGENT)) and not exists(parent)


def prunable(
    rows: Iterable[Sequence[Any]], position: int, last: int, exists: Callable[[str, str], bool]
) -> OldRequests:
    """Return those of the old sessions after a position that may be pruned, a limited number of them.

    `rows` are (id, owner, key, first entry, first message); `last` is the highest id of a session.
    """
    until = position + STEP_SESSIONS
    found: list[int] = []
    for id, owner, key, entry, message in rows:
        if is_prunable(key, entry, message, partial(exists, owner)):
            found.append(id)
            if len(found) == STEP_DELETIONS:
                until = id
                break
    return OldRequests(found, until if until < last else None)


# ---------------------------------------------------------------------------------------------- pruning

FIRST_SECONDS = 120.0  # delay after the start of a process, which has other things to do
EVERY_SECONDS = 3600.0
PAUSE_SECONDS = 0.5  # between two steps


async def prune(
    store: Store,
    keep_seconds: float,
    forget: Callable[[Sequence[tuple[str, str]]], Awaitable[None]],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Periodically remove sessionless requests that are older than this.

    It proceeds in small steps, so that no turn waits for it. `forget` is called with (owner, key) of the removed
    sessions, to remove what is stored for them outside of the store.
    """
    await sleep(FIRST_SECONDS)
    while True:
        before, position, count = clock() - keep_seconds, 0, 0
        try:
            while True:
                step = await store.prune_requests(before, position)
                if step.removed:
                    await forget(step.removed)
                    count += len(step.removed)
                if step.position is None:
                    break
                position = step.position
                await sleep(PAUSE_SECONDS)
        except StoreError as error:
            log.warning("could not prune old requests, will retry later: %s", error)
        if count:
            log.info("removed %d API requests from before %s", count, time.strftime("%Y-%m-%d", time.gmtime(before)))
        await sleep(EVERY_SECONDS)
