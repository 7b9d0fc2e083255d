"""Tool calls under the policy, each with its own context.

Covers the calls of a turn, which ask for approval if the policy requires it, and calls that code makes with
`agent.tools.execute`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from ..config import Rule
from ..context.skills import SHIPPED
from ..engine import Review
from ..log import Call
from ..messages import Conversation
from ..sandbox.reach import Workspace
from ..threads import in_thread
from ..tools.base import Plan, ToolError
from ..tools.context import CallContext
from ..tools.policy.policy import Policy, Verdict
from ..tools.policy.taint import is_free
from ..tools.registry import ToolRegistry, ToolResult, error_result, failure_of, outputs_folder
from .images import Free, plain_images

AGAIN = "Call it again."
HOW_TO_ANSWER = (
    "Answer y (yes), n (no) or a (always in this session). "
    "/approve, /deny and /approve always do the same; you can add a reason after /deny."
)
DENIED_ADVICE = "Do not try to get around this. Do without it, or tell the user what you would need."

DIRECT = "cli:direct"  # the session of calls made by code
# Calls that reveal the policy's default verdict on any call of a tool.
_PROBES = {"exec": {"command": "true"}}


# ---------------------------------------------------------------------------------------------- calls of a turn


class Context(Protocol):
    """Creates the context of one call."""

    def __call__(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext: ...


class Tools:
    """The registry's tools under the policy, each call with its own context.

    Calls that need approval are refused if no person can be asked.
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
        self._granted: frozenset[str] | None = None  # the session's grants, once read
        self._allowed_before: set[str] = set()  # calls that need no question because of such a grant
        self._failed: dict[str, ToolResult] = {}  # calls that will not run, because they could not be planned
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
            question = plain_images(question, free)  # it shows text that the model wrote
        return Review(tuple(asked), question, denied, grants, once)

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        if (failed := self._failed.get(call.id)) is not None:
            return failed
        context = self._made(call, progress, approved or call.id in self._allowed_before)
        if call.id in self._unknown and call.name in self._registry:
            # It did not exist when the policy looked: a reconnected server may have brought a tool of that name.
            return ToolResult(error_result(f"{call.name} was not run: it was not there a moment ago.", AGAIN), "error")
        result = await self._registry.run(call, context)
        # record in the log that the model has read external tool descriptions
        if context.taint and self._registry.described_outside:
            return replace(result, untrusted=True, own_files=False)
        return result

    def _made(self, call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext:
        made = self._context(call, progress, approved)
        return replace(made, granted=self._granted) if self._granted else made


def free_addresses(policy: Policy, conversation: Conversation) -> Free | None:
    """Return which addresses may be loaded from text in this conversation; None for all of them."""
    if not policy.taint or not conversation.untrusted:
        return None
    return lambda url: is_free(url, conversation, policy.addresses)


def paths_of(registry: ToolRegistry, call: Call, context: CallContext) -> Sequence[str]:
    """Return the files that a call declares it will touch."""
    planned = registry.plan(call, context)
    return planned[1].paths if planned is not None else ()


async def judged(
    policy: Policy,
    name: str,
    arguments: dict[str, Any],
    plan: Plan,
    context: CallContext,
    conversation: Conversation,
) -> Verdict:
    """Return the policy's verdict on a call, computed in a thread if it may take long."""
    given = (name, arguments, plan, context, conversation, conversation.untrusted)
    return await in_thread(policy.judge, *given) if policy.takes_long(arguments) else policy.judge(*given)


def refusal(name: str, verdict: Verdict) -> str:
    """Return why a call is not run: it is denied, or it needs approval and no person can be asked."""
    if verdict.decision == "deny":
        return f"{name} was not run: {verdict.why}"
    why = f"{verdict.why.rstrip('.')}. That needs a person's approval, and there is no one to ask"
    return f"{name} was not run: {why}."


def _unwatched(text: str) -> None:
    """Ignore the progress of a call that is only planned, or made by code."""


def _question(asked: Sequence[Verdict]) -> str:
    """Return the question for the person: exactly what would run, and why approval is needed."""
    if not asked:
        return ""
    parts = ["May I do this?" if len(asked) == 1 else f"May I do these {len(asked)} things?"]
    parts += [f"{verdict.shown}\n({verdict.why})" for verdict in asked]
    parts.append(HOW_TO_ANSWER)
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------- calls that code makes


class AgentCalls:
    """Reviews the calls that code makes with `ToolRegistry.execute`.

    No turn waits for an answer there, so calls that need approval are refused. A call made by a running tool belongs to
    the session and turn of that tool's call, but is judged on its own: approval of the outer call does not extend to
    it.
    """

    def __init__(self, policy: Policy, workspace: Workspace, owner: str) -> None:
        self._policy = policy
        self._workspace = workspace
        self._owner = owner

    async def admit(self, call: Call, registry: ToolRegistry, outer: CallContext | None) -> CallContext:
        """Return the context that a call runs in.

        Raises a `ToolError` if the policy does not allow the call, or the error that kept it from being planned.
        """
        context = replace(outer, approved=False) if outer is not None else await self._context(call)
        guard = self._policy.guard(context, call.name, call.arguments, partial(paths_of, registry, call, context))
        context = replace(context, guard=guard)
        planned = registry.plan(call, context)
        if planned is None:  # the registry reports the unknown tool
            return context
        conversation = Conversation()
        conversation.untrusted = context.tainted
        verdict = await judged(self._policy, call.name, *planned, context, conversation)
        if verdict.decision == "allow":
            return replace(context, approved=verdict.granted)
        if (failure := planned[1].failure) is not None and not verdict.why:
            raise failure
        raise ToolError(refusal(call.name, verdict), DENIED_ADVICE)

    async def refuses(self, name: str, registry: ToolRegistry, channel: str, chat_id: str) -> str | None:
        """Return why every call of a tool from this chat would need approval or be denied; None if some would run."""
        for number, rule in self._policy.rules:
            if not _concerns(rule, name, f"{channel}:{chat_id}"):
                continue
            if rule.do == "allow":
                return None
            if not rule.arguments and not rule.path and not rule.network and rule.command in ("", "*"):
                what = "denies it" if rule.do == "deny" else "requires a person's approval"
                return f"rule {number} of the policy {what}" + (f" ({rule.why})" if rule.why else "")
        probe = Call("probe", name, dict(_PROBES.get(name, {})))
        context = replace(await self._context(probe), channel=channel, chat_id=chat_id)
        if name not in _PROBES or (planned := registry.plan(probe, context)) is None:
            return None
        verdict = await judged(self._policy, name, *planned, context, Conversation())
        return None if verdict.decision == "allow" else verdict.why

    async def _context(self, call: Call) -> CallContext:
        places = await self._workspace.places()
        channel, _, chat_id = DIRECT.partition(":")
        return CallContext(
            owner=self._owner,
            session=DIRECT,
            turn="",
            call=call.id,
            channel=channel,
            chat_id=chat_id,
            workspace=places.workspace,
            restricted=self._workspace.restricted,
            idempotency_key=call.id,
            progress=_unwatched,
            outputs=outputs_folder(self._workspace.home, self._owner, DIRECT),
            readable=(SHIPPED,),
            attended=False,
            protected=places.protected,
            frozen=places.frozen,
            real_workspace=places.real_workspace,
        )


def _concerns(rule: Rule, name: str, origin: str) -> bool:
    if rule.command and name != "exec":
        return False
    return (not rule.tool or fnmatchcase(name, rule.tool)) and (not rule.origin or fnmatchcase(origin, rule.origin))
