"""Whether a tool could be used at all where nobody is there to be asked."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from ..config import Rule
from ..log import Call
from ..messages import Conversation
from ..tools.context import CallContext
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry

# Calls that show what the defaults say of any call of a tool.
_PROBES = {"exec": {"command": "true"}}


def always_refused(
    name: str, registry: ToolRegistry, policy: Policy, context: Callable[[Call], CallContext]
) -> str | None:
    """Why every call of this tool would be asked for or denied; None if some would run."""
    probe = Call("probe", name, dict(_PROBES.get(name, {})))
    where = context(probe)
    for number, rule in policy.rules:
        if not _about(rule, name, f"{where.channel}:{where.chat_id}"):
            continue
        if rule.do == "allow":
            return None
        if not rule.arguments and not rule.path and not rule.network and rule.command in ("", "*"):
            what = "denies it" if rule.do == "deny" else "wants a person to be asked for it"
            return f"rule {number} of the policy {what}" + (f" ({rule.why})" if rule.why else "")
    if name not in _PROBES or (planned := registry.plan(probe, where)) is None:
        return None
    verdict = policy.judge(name, *planned, where, Conversation(), False)
    return None if verdict.decision == "allow" else verdict.why


def _about(rule: Rule, name: str, origin: str) -> bool:
    if rule.command and name != "exec":
        return False
    return (not rule.tool or fnmatchcase(name, rule.tool)) and (not rule.origin or fnmatchcase(origin, rule.origin))
