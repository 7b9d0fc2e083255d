"""What both stores decide in the same way when sessions are deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..bus import InboundMessage

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
