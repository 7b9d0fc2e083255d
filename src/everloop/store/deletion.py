"""Deletes sessions: what both stores decide in the same way, and the pruning of old API requests in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..bus import InboundMessage
from ..errors import StoreError
from .base import Store

log = logging.getLogger(__name__)

API = "api:"  # how the keys of API requests' sessions begin, unless a client names another
SUBAGENT = "sub:"
STEP_SESSIONS = 500  # sessions that one step of pruning looks at
STEP_DELETIONS = 25  # sessions that it deletes at most


@dataclass(slots=True, frozen=True)
class OldRequests:
    """Sessions that may be pruned, and where to look next; None at the end."""

    sessions: Sequence[int]
    position: int | None


class _Request(msgspec.Struct):
    kept: bool = False


class _First(msgspec.Struct):
    request: _Request | None = None


_decode_first = msgspec.json.Decoder(_First).decode
_decode_message = msgspec.json.Decoder(InboundMessage).decode


def is_stateless(first_entry: str | bytes | None) -> bool:
    """Whether a session is one API request and no more, by the first entry of its log or by its message."""
    if first_entry is None:
        return False
    try:
        request = _decode_first(first_entry).request
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return request is not None and not request.kept


def parent_of(data: str | bytes | None) -> str:
    """The key of the session that started a sub-agent, by its task in the inbox; "" if that is unknown."""
    if data is None:
        return ""
    try:
        task = _decode_message(data).task
    except (msgspec.MsgspecError, UnicodeError):
        return ""
    return task.parent if task is not None else ""


def family(root: tuple[int, str], subagents: Iterable[tuple[int, str, str]]) -> list[tuple[int, str]]:
    """(id, key) of a session and of the sub-agents below it, from (id, key, parent's key) of all sub-agents."""
    children: dict[str, list[tuple[int, str]]] = {}
    for id, key, parent in subagents:
        children.setdefault(parent, []).append((id, key))
    found = [root]
    for _, key in found:  # grows while it is read
        found += [child for child in children.get(key, ()) if child not in found]
    return found


def is_prunable(key: str, first_entry: str | None, message: str | None, exists: Callable[[str], bool]) -> bool:
    """Whether an old session is a request without a session, or a sub-agent of one that no longer exists; by the first
    entry of its log and the first message of its inbox."""
    if key.startswith(API):
        return is_stateless(first_entry if first_entry is not None else message)
    parent = parent_of(message)
    return parent.startswith((API, SUBAGENT)) and not exists(parent)


# ---------------------------------------------------------------------------------------------- pruning

FIRST_SECONDS = 120.0  # after the start of a process, which has other things to do
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
    """Remove requests without a session that are older than this, again and again.

    It goes on in small steps, so that no turn waits for it. `forget` gets (owner, key) of those that were removed, for
    what is kept of them outside of the store.
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
            log.warning("old requests are pruned later: %s", error)
        if count:
            log.info("removed %d API requests from before %s", count, time.strftime("%Y-%m-%d", time.gmtime(before)))
        await sleep(EVERY_SECONDS)
