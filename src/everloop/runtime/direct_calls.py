"""Calls of an agent's tools by code, with `agent.tools.execute`: the agent's workspace, restriction and policy hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from ..config import Rule
from ..context.skills import SHIPPED
from ..log import Call
from ..messages import Conversation
from ..tools.base import ToolError
from ..tools.context import CallContext
from ..tools.outputs import outputs_folder
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry
from .tool_calls import DENIED_ADVICE, judged, refusal
from .workspace import Workspace

SESSION = "cli:direct"
# Calls that show what the defaults of the policy say about any call of a tool.
_PROBES = {"exec": {"command": "true"}}


class AgentCalls:
    """Decides about the calls that code makes with `ToolRegistry.execute`.

    No turn waits for an answer there, so what would be asked for is refused. A call that a running tool makes belongs
    to the session and turn of that tool's call, and is judged for itself: an approval of the one is none of the other.
    """

    def __init__(self, policy: Policy, workspace: Workspace, owner: str) -> None:
        self._policy = policy
        self._workspace = workspace
        self._owner = owner

    async def admit(self, call: Call, registry: ToolRegistry, outer: CallContext | None) -> CallContext:
        """Return the context that a call runs in; a `ToolError` if the policy does not allow it, or the error that
        kept the call from being planned."""
        context = replace(outer, approved=False) if outer is not None else await self._context(call)
        guard = self._policy.guard(context, call.name, call.arguments, partial(_paths, registry, call, context))
        context = replace(context, guard=guard)
        planned = registry.plan(call, context)
        if planned is None:  # the registry says that there is no such tool
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
        """Return why every call of a tool from this chat would be asked for or denied; None if some would run."""
        for number, rule in self._policy.rules:
            if not _concerns(rule, name, f"{channel}:{chat_id}"):
                continue
            if rule.do == "allow":
                return None
            if not rule.arguments and not rule.path and not rule.network and rule.command in ("", "*"):
                what = "denies it" if rule.do == "deny" else "wants a person to be asked for it"
                return f"rule {number} of the policy {what}" + (f" ({rule.why})" if rule.why else "")
        probe = Call("probe", name, dict(_PROBES.get(name, {})))
        context = replace(await self._context(probe), channel=channel, chat_id=chat_id)
        if name not in _PROBES or (planned := registry.plan(probe, context)) is None:
            return None
        verdict = await judged(self._policy, name, *planned, context, Conversation())
        return None if verdict.decision == "allow" else verdict.why

    async def _context(self, call: Call) -> CallContext:
        places = await self._workspace.places()
        channel, _, chat_id = SESSION.partition(":")
        return CallContext(
            owner=self._owner,
            session=SESSION,
            turn="",
            call=call.id,
            channel=channel,
            chat_id=chat_id,
            workspace=places.workspace,
            restricted=self._workspace.restricted,
            idempotency_key=call.id,
            progress=_unwatched,
            outputs=outputs_folder(self._workspace.home, self._owner, SESSION),
            readable=(SHIPPED,),
            attended=False,
            protected=places.protected,
            frozen=places.frozen,
            real_workspace=places.real_workspace,
        )


def _paths(registry: ToolRegistry, call: Call, context: CallContext) -> Sequence[str]:
    planned = registry.plan(call, context)
    return planned[1].paths if planned is not None else ()


def _concerns(rule: Rule, name: str, origin: str) -> bool:
    if rule.command and name != "exec":
        return False
    return (not rule.tool or fnmatchcase(name, rule.tool)) and (not rule.origin or fnmatchcase(origin, rule.origin))


def _unwatched(text: str) -> None:
    """No turn shows the progress of a direct call."""
