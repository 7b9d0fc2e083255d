"""API clients: on what terms the turn of a request runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..actions import Limits
from ..context.prompt import PARTING
from ..context.window import is_overflow
from ..log import Call, Request, UserSaid, text_of
from ..providers.base import ProviderError
from ..store.base import Claim, Store
from ..tools.context import CallContext
from ..tools.registry import ToolRegistry, ToolResult, error_result
from .peers import lives
from .session import VIA
from .turn_spec import Brief

log = logging.getLogger(__name__)
ABANDONED = "Abandoned: the server was stopped before the answer, and nobody waits for it any more."
PLAIN = "You are a helpful assistant."
FAILED = "the model behind the server failed"
TOGETHER = "Make it again, together with the corrected one."


def request_of(claim: Claim) -> Request | None:
    """The request that the claimed turn is about, if it is one."""
    first = claim.entries[0] if claim.entries else None
    return first.request if isinstance(first, UserSaid) else claim.message.request


def brought_by(claim: Claim) -> list[str]:
    """The results of a client's own tools that came with the claimed request: what they found is from outside."""
    before = request.before if (request := request_of(claim)) is not None else ()
    return [text_of(message.get("content")) for message in before if message.get("role") == "tool"]


def discreet(owner: str, error: Exception) -> Exception:
    """What an owner may read of a model call that failed, in the chat, in the log or by asking for it later: only the
    person of the machine reads where the model is and what it says of our key. The others' errors are in the server's
    own log."""
    if owner == "me" or is_overflow(str(error)):  # of that one, what is shortened next depends on its words
        return error
    log.error("the model failed for %s: %s", owner, error)
    status = getattr(error, "status", None)
    told = ProviderError(f"{FAILED} (it answered {status})" if status else FAILED, status=status)
    if isinstance(error, ProviderError):
        told.retryable, told.retry_after, told.several = error.retryable, error.retry_after, error.several
    return told


async def is_abandoned(store: Store, claim: Claim, request: Request) -> bool:
    """Whether nobody can be waiting any more: the client of a request that is all there is, and a process that died."""
    if request.kept:
        return False
    server = claim.message.metadata.get(VIA)  # it has the client's connection, and runs no turns
    return claim.resumed if server is None else not await lives(store, str(server))


def brief_of(request: Request, tools: ToolRegistry, rounds: int, models: Callable[[str], str | None]) -> Brief:
    """The terms of a request's turn.

    With tools of its own the client is the agent and we are its model: it gets no prompt but its own. Without, the
    agent works with its own tools, and what the client says as the system stands behind the agent's prompt.
    """
    limits = Limits(rounds=rounds, kept=request.kept)
    model = models(request.model)
    if request.tools:
        client = ClientTools(() if request.answer_only else request.tools)
        return Brief(client, limits, model, lambda _: request.system or PLAIN, dated=False, options=request.options)
    tools = ToolRegistry() if request.answer_only else tools
    return Brief(
        tools,
        limits,
        model,
        lambda standing: f"{standing}{PARTING}{request.system}" if request.system else standing,
        options=request.options,
    )


class ClientTools(ToolRegistry):
    """The tools of an API client: offered to the model, and never run here."""

    def __init__(self, definitions: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._definitions = list(definitions)
        self._client = [tool["function"]["name"] for tool in definitions]

    @property
    def names(self) -> list[str]:
        return list(self._client)

    async def run(self, call: Call, context: CallContext) -> ToolResult:
        """Only calls get here that cannot be handed over: wrong ones, and those that came with them."""
        if call.name in self._client and call.error is None:
            why = f"{call.name} was not run: another call of the answer was wrong."
            return ToolResult(error_result(why, TOGETHER), "error")
        return await super().run(call, context)
