"""What a tool call knows about where it comes from: carried by a ContextVar, so two turns never see each other's."""

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
    """The origin of one tool call."""

    owner: str
    session: str  # the session key, "channel:chat_id"
    turn: str
    call: str
    channel: str
    chat_id: str
    workspace: Path
    restricted: bool  # files outside the workspace are out of reach
    idempotency_key: str  # the same on every try of this call, also after a crash
    progress: Callable[[str], None]  # shows a line to whoever watches the turn
    real_workspace: Path | None = None  # the same without links, where it is known
    approved: bool = False  # a person has seen this very call and allowed it
    tainted: bool = False  # untrusted content was read before, and that counts
    own_files: bool = False  # all of that came from files that the agent did not write
    taint: Taint = False  # what counts as untrusted; False: nothing does
    marks: Marks | None = None  # which file contents the agent wrote itself
    granted: frozenset[str] = frozenset()  # what a person allowed for the rest of the session, as `Store.grants`
    outputs: Path | None = None  # the session's own folder for texts too long for a result; it can be read, not written
    readable: tuple[Path, ...] = ()  # further folders that can be read, not written
    protected: tuple[Path, ...] = ()  # the runtime's own files: never read or written where `restricted`
    frozen: tuple[Path, ...] = ()  # the program that runs the agent: not to be written where `restricted`
    attended: bool = True  # somebody is there who could be asked
    rounds_left: int | None = None  # that the turn may still take, where that is known
    ends_at: float | None = None  # when the turn's time is up, if it has a limit
    scheduled: str = ""  # the job that started the turn, if one did
    may_schedule: bool = False  # and whether that job's turns may make further jobs
    guard: Callable[[str, bool], None] | None = None  # called with (real path, writing) of a file that was opened
    send: Callable[[OutboundMessage], Awaitable[None]] | None = None  # puts a message into the outbox, once a call


current: ContextVar[CallContext] = ContextVar("everloop_call")


def current_call() -> CallContext:
    """The context of the tool call that is running; a LookupError outside of one."""
    return current.get()
