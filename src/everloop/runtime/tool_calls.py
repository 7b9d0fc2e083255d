"""Tool calls of a turn: reviewed by the policy, asked for where it says so, and run with a context of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..engine import Review
from ..log import Call
from ..messages import Conversation
from ..threads import in_thread
from ..tools.base import Plan
from ..tools.context import CallContext
from ..tools.policy.policy import Policy, Verdict
from ..tools.policy.taint import is_free
from ..tools.registry import ToolRegistry, ToolResult, error_result, failure_of
from .images import Free, plain_images

AGAIN = "Call it again."
HOW_TO_ANSWER = (
    "Answer y (yes), n (no) or a (always in this session). "
    "/approve, /deny and /approve always do the same; words after /deny tell me why."
)
DENIED_ADVICE = "Do not try to get around this. Do without it, or tell the user what you would need."


class Context(Protocol):
    """Makes the context of one call."""

    def __call__(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext: ...


class Tools:
    """The registry's tools under the policy, each call with its own context.

    Without a person to ask, calls that need approval are refused.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        policy: Policy,
        context: Context,
        attended: bool,
        grants: Callable[[], Awaitable[frozenset[str]]] | None = None,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._context = context
        self._attended = attended
        self._read_grants = grants
        self._granted: frozenset[str] | None = None  # what the session was granted, once it is read
        self._allowed_before: set[str] = set()  # calls that need no question because of such a grant
        self._failed: dict[str, ToolResult] = {}  # calls that will not run, because no plan of them could be made
        self._unknown: set[str] = set()  # calls of tools that did not exist when they were reviewed
        self.batch = registry.batch
        self.replay_safe, self.read_only = registry.replay_safe, registry.read_only

    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        asked: dict[str, Verdict] = {}
        denied: dict[str, str] = {}
        for call in calls:
            if call.name in self._registry and not self._policy.rules and self._registry.harmless(call.name):
                continue
            if self._granted is None:
                self._granted = await self._read_grants() if self._read_grants is not None else frozenset()
            context = self._made(call, _unwatched)
            planned = self._registry.plan(call, context)
            if planned is None:
                self._unknown.add(call.id)
                continue
            verdict = await judged(self._policy, call.name, *planned, context, conversation)
            self._failed.pop(call.id, None)
            self._allowed_before.discard(call.id)
            if verdict.granted:
                self._allowed_before.add(call.id)
            elif verdict.decision == "deny" and not verdict.why and (failure := planned[1].failure) is not None:
                self._failed[call.id] = failure_of(call.name, failure)
            elif verdict.decision == "deny" or (verdict.decision == "ask" and not self._attended):
                denied[call.id] = error_result(refusal(call.name, verdict), DENIED_ADVICE)
            elif verdict.decision == "ask":
                asked[call.id] = verdict
        verdicts = list(asked.values())
        grants = tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.grants))
        once = tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.once))
        question = _question(verdicts)
        if (free := free_addresses(self._policy, conversation)) is not None:
            question = plain_images(question, free)  # it shows what the model wrote
        return Review(tuple(asked), question, denied, grants, once)

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        if (failed := self._failed.get(call.id)) is not None:
            return failed
        context = self._made(call, progress, approved or call.id in self._allowed_before)
        if call.id in self._unknown and call.name in self._registry:
            # It could not have run when the policy looked: a server has come back, say, with a tool of that name.
            return ToolResult(error_result(f"{call.name} was not run: it was not there a moment ago.", AGAIN), "error")
        result = await self._registry.run(call, context)
        if context.taint and self._registry.described_outside:  # what the model has read of the tools stays in the log
            return replace(result, untrusted=True, own_files=False)
        return result

    def _made(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext:
        made = self._context(call, progress, approved)
        return replace(made, granted=self._granted) if self._granted else made


def free_addresses(policy: Policy, conversation: Conversation) -> Free | None:
    """Which addresses may be loaded by what is said in this conversation; None for all of them."""
    if not policy.taint or not conversation.untrusted:
        return None
    return lambda url: is_free(url, conversation, policy.addresses)


async def judged(
    policy: Policy,
    name: str,
    arguments: dict[str, Any],
    plan: Plan,
    context: CallContext,
    conversation: Conversation,
) -> Verdict:
    """Decide about a call, in a thread where that may take long."""
    given = (name, arguments, plan, context, conversation, conversation.untrusted)
    return await in_thread(policy.judge, *given) if policy.takes_long(arguments) else policy.judge(*given)


def refusal(name: str, verdict: Verdict) -> str:
    """Return why a call is not run: it is denied, or needs approval and no person can be asked."""
    if verdict.decision == "deny":
        return f"{name} was not run: {verdict.why}"
    why = f"{verdict.why.rstrip('.')}. That needs a person's approval, and there is no one to ask"
    return f"{name} was not run: {why}."


def _unwatched(text: str) -> None:
    """A call that is only planned shows no progress."""


def _question(asked: Sequence[Verdict]) -> str:
    """What the person is asked: exactly what would run, and why it is asked for."""
    if not asked:
        return ""
    parts = ["May I do this?" if len(asked) == 1 else f"May I do these {len(asked)} things?"]
    parts += [f"{verdict.shown}\n({verdict.why})" for verdict in asked]
    parts.append(HOW_TO_ANSWER)
    return "\n\n".join(parts)
