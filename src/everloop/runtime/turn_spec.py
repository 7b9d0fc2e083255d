"""TurnSpec: the settings of one turn. A sub-agent or an API request has its own tools, limits and prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from .. import events
from ..actions import Limits
from ..bus import InboundMessage
from ..engine import Turn
from ..log import Call, Request, TurnEnded, UserSaid, text_of
from ..messages import Conversation, Message
from ..providers.base import LLMResponse
from ..store.base import Claim
from ..tools.registry import ToolRegistry, ToolResult

TIME_IS_UP = "I stopped because my time was up. The work so far is kept."
ABORTED = "The run was aborted."

RunCall = Callable[[Call], Awaitable[ToolResult]]
# Runs calls that may start together, each with the given function; returns their results in order.
RunCalls = Callable[[Sequence[Call], RunCall], Awaitable[Sequence[ToolResult]]]


class AskModel(Protocol):
    """Calls the model once. With `emit`, the answer is streamed to it."""

    async def __call__(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, emit: events.Emit | None
    ) -> LLMResponse: ...


def _unchanged(prompt: str) -> str:
    return prompt


def _nothing(ended: TurnEnded, untrusted: bool) -> Sequence[InboundMessage]:
    return ()


class TurnSpec(msgspec.Struct, frozen=True):
    """The settings of one turn."""

    tools: ToolRegistry
    limits: Limits
    model: str | None = None
    system: Callable[[str], str] = _unchanged  # derives the system prompt from the agent's own
    dated: bool = True  # the system prompt ends with the date
    ends_at: float | None = None  # deadline
    aborted: asyncio.Event | None = None  # stops the turn when it is set
    options: Mapping[str, Any] = {}  # of each model call
    before: tuple[Message, ...] = ()  # messages that precede the one that opens the turn
    # Returns messages to send when the turn ends, written together with its end; the flag tells whether the turn has
    # read external content.
    follow: Callable[[TurnEnded, bool], Sequence[InboundMessage]] = _nothing
    # Steps overridden by a program.
    opening: Callable[[], Awaitable[str]] | None = None  # creates the text that opens the turn
    ask_model: AskModel | None = None
    run_calls: RunCalls | None = None


@contextmanager
def stopping(turn: Turn, spec: TurnSpec) -> Iterator[None]:
    """Stop the turn at its deadline or when it is aborted, whatever it is doing."""
    loop = asyncio.get_running_loop()
    _stop_if_due(turn, spec)
    timer = watcher = None
    if spec.ends_at is not None:
        timer = loop.call_later(max(spec.ends_at - time.time(), 0), turn.stop, "timeout", TIME_IS_UP)
    if spec.aborted is not None:
        watcher = loop.create_task(_abort(turn, spec, spec.aborted))
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        if watcher is not None:
            watcher.cancel()


async def _abort(turn: Turn, spec: TurnSpec, aborted: asyncio.Event) -> None:
    await aborted.wait()
    _stop_if_due(turn, spec)


def _stop_if_due(turn: Turn, spec: TurnSpec) -> None:
    """Stop the turn if it is past its deadline or was aborted, in that order."""
    if spec.ends_at is not None and time.time() >= spec.ends_at:
        turn.stop("timeout", TIME_IS_UP)
    elif spec.aborted is not None and spec.aborted.is_set():
        turn.stop("aborted", ABORTED)


def request_of(claim: Claim) -> Request | None:
    """Return the API request of the claimed turn, if it has one."""
    first = claim.entries[0] if claim.entries else None
    return first.request if isinstance(first, UserSaid) else claim.message.request


def brought_by(claim: Claim) -> list[str]:
    """Return the results of the client's own tools in the claimed request, which are external content."""
    before = request.before if (request := request_of(claim)) is not None else ()
    return [text_of(message.get("content")) for message in before if message.get("role") == "tool"]
