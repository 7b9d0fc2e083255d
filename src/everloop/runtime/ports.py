"""What the engine's ports are in an agent loop: a provider, a registry of tools, a session's log in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..bus import PULLED, InboundMessage, OutboundMessage
from ..engine import Review
from ..log import Call, Entry, TurnEnded, UserSaid, Written
from ..messages import Conversation
from ..store.base import Claim, Finished, Store
from ..tools.context import CallContext
from ..tools.policy.policy import Policy, Verdict
from ..tools.registry import ToolRegistry, ToolResult, error_result
from .session import Session

AGAIN = "Call it again."
DENIED_ADVICE = "Do not try to get around this. Do without it, or tell the user what you would need."


class Context(Protocol):
    """Makes the context of one call."""

    def __call__(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext: ...


class Tools:
    """The registry's tools under the policy, each call with its own context.

    With nobody there to be asked, what would be asked for is refused.
    """

    def __init__(self, registry: ToolRegistry, policy: Policy, context: Context, attended: bool) -> None:
        self._registry = registry
        self._policy = policy
        self._context = context
        self._attended = attended
        self._unplanned: set[str] = set()  # calls of which nobody could say what they would do
        self.batch = registry.batch
        self.replay_safe = registry.replay_safe

    def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        asked: dict[str, Verdict] = {}
        denied: dict[str, str] = {}
        for call in calls:
            if call.name in self._registry and not self._policy.rules and self._registry.harmless(call.name):
                continue
            context = self._context(call, _nobody)
            planned = self._registry.plan(call, context)
            if planned is None:
                self._unplanned.add(call.id)
                continue
            verdict = self._policy.judge(call.name, *planned, context, conversation, conversation.untrusted)
            if verdict.decision == "deny":
                denied[call.id] = error_result(f"{call.name} was not run: {verdict.why}", DENIED_ADVICE)
            elif verdict.decision == "ask" and not self._attended:
                why = f"{verdict.why.rstrip('.')}. That needs a person's approval, and nobody is there to be asked"
                denied[call.id] = error_result(f"{call.name} was not run: {why}.", DENIED_ADVICE)
            elif verdict.decision == "ask":
                asked[call.id] = verdict
        return Review(tuple(asked), _question(list(asked.values())), denied)

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        context = self._context(call, progress, approved)
        if call.id in self._unplanned and self._registry.plan(call, context) is not None:
            # It could not have run when the policy looked: a server has come back, say, with a tool of that name.
            return ToolResult(error_result(f"{call.name} was not run: it was not there a moment ago.", AGAIN), "error")
        return await self._registry.run(call, context)


def _nobody(text: str) -> None:
    """Nobody watches a call that does not run yet."""


def _question(asked: Sequence[Verdict]) -> str:
    """What the person is asked: exactly what would run, and why it is asked for."""
    if not asked:
        return ""
    parts = ["May I do this?" if len(asked) == 1 else f"May I do these {len(asked)} things?"]
    parts += [f"{verdict.shown}\n({verdict.why})" for verdict in asked]
    parts.append("/approve allows it, /deny refuses it (words after /deny tell me why).")
    return "\n\n".join(parts)


class SessionLog:
    """The log of a claimed session. Its last append closes the turn and puts the answer into the outbox."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        session: Session,
        answer: Callable[[TurnEnded], Sequence[OutboundMessage]],
        sender: str | None,
        follow: Callable[[TurnEnded], Sequence[InboundMessage]],
    ) -> None:
        self._store = store
        self._claim = claim
        self._session = session
        self._answer = answer
        self._sender = sender
        self._follow = follow
        self.incoming: Sequence[InboundMessage] = ()  # what follows from the turn's end
        self._took: list[int] = []
        self._outgoing: Sequence[OutboundMessage] = ()
        self._finished: Written[Finished] | None = None

    def append(self, entries: Sequence[Entry]) -> Written[Any]:
        took, self._took = self._took, []
        if not isinstance(last := entries[-1], TurnEnded):
            return self._store.append(self._claim, entries, took)
        self._outgoing, self.incoming = self._answer(last), self._follow(last)
        self._finished = self._store.finish(self._claim, entries, self._outgoing, self._sender, took, self.incoming)
        return self._finished

    def park(self, entries: Sequence[Entry], question: str) -> Written[Any]:
        took, self._took = self._took, []
        self._outgoing = reply(self._claim.message, question)
        self._finished = self._store.park(self._claim, entries, self._outgoing, self._sender, took)
        return self._finished

    def steered(self) -> Sequence[UserSaid]:
        rows, said = self._session.steered()
        self._took += rows
        return said

    def outgoing(self) -> list[tuple[int, OutboundMessage]]:
        """The answer's rows in the outbox, once the turn is closed."""
        return [] if self._finished is None else list(zip(self._finished.result().outbox, self._outgoing, strict=True))

    def more(self) -> bool:
        """Whether the session has more to do, once the turn is closed."""
        return self._finished is None or self._finished.result().more


def reply(message: InboundMessage, text: str) -> list[OutboundMessage]:
    """The message that says this in the chat that asked, if it is to be told at all."""
    channel, chat_id = message.origin
    if not message.reply or channel in PULLED:
        return []
    return [OutboundMessage(channel, chat_id, text, reply_to=message.id, metadata=dict(message.metadata))]
