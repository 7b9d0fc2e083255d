"""Calls of an agent's tools by code, with `agent.tools.execute`: the agent's workspace, restriction and policy hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..context.skills import SHIPPED
from ..log import Call
from ..messages import Conversation
from ..tools.base import ToolError
from ..tools.context import CallContext
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry, outputs_folder
from .tool_calls import DENIED_ADVICE, judged, refusal
from .workspace import Workspace

SESSION = "cli:direct"


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


def _unwatched(text: str) -> None:
    """No turn shows the progress of a direct call."""
