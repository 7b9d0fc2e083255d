"""The context of a tool call, carried by a ContextVar so that concurrent turns never see each other's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bus import OutboundMessage

if TYPE_CHECKING:
    from ..config import Taint
    from .trust import Marks


@dataclass(slots=True, frozen=True)
class CallContext:
    """Where a tool call comes from, and what it may reach."""

    owner: str
    session: str  # the session key, "channel:chat_id"
    turn: str
    call: str
    channel: str
    chat_id: str
    workspace: Path
    restricted: bool  # files outside the workspace are out of reach
    idempotency_key: str  # the same on every try of this call, also after a crash
    progress: Callable[[str], None]  # shows a line to the subscribers of the turn
    real_workspace: Path | None = None  # the same without links, where it is known
    approved: bool = False  # a person has seen this very call and allowed it
    tainted: bool = False  # untrusted content was read before, and that counts
    own_files: bool = False  # all of that came from files that the agent did not write
    taint: Taint = False  # what counts as untrusted; False: nothing does
    marks: Marks | None = None  # which file contents the agent wrote itself
    granted: frozenset[str] = frozenset()  # what a person allowed for the rest of the session, as `Store.grants`
    outputs: Path | None = None  # read-only folder of the session, for texts too long for a result
    readable: tuple[Path, ...] = ()  # further read-only folders
    protected: tuple[Path, ...] = ()  # the runtime's own files: never read or written if `restricted`
    frozen: tuple[Path, ...] = ()  # the program that runs the agent: never written if `restricted`
    attended: bool = True  # a person can be asked
    rounds_left: int | None = None  # model rounds left in the turn, if known
    ends_at: float | None = None  # deadline of the turn, if it has one
    sender: str = ""  # who wrote the message that the turn works on
    scheduled: str = ""  # id of the job that started the turn, if any
    may_schedule: bool = False  # turns of that job may schedule further jobs
    guard: Callable[[str, bool], None] | None = None  # called with (real path, writing) for each opened file
    send: Callable[[OutboundMessage], Awaitable[None]] | None = None  # puts a message into the outbox, once per call


current: ContextVar[CallContext] = ContextVar("everloop_call")


def current_call() -> CallContext:
    """Return the context of the running tool call; raises a LookupError outside of one."""
    return current.get()
