"""What a tool call may do: rules, first form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..config import Rule
from .base import Plan
from .context import CallContext


@dataclass(frozen=True, slots=True)
class Verdict:
    decision: Literal["allow", "ask", "deny"]
    why: str = ""
    shown: str = ""


class Policy:
    def __init__(self, rules: Sequence[Rule] = (), *, taint: bool = True) -> None:
        self.rules = rules

    def judge(self, name: str, arguments: dict[str, Any], plan: Plan, context: CallContext, conversation: Sequence[Any], tainted: bool) -> Verdict:
        for rule in self.rules:
            if rule.tool in ("", name):
                return Verdict(rule.do, rule.why or "a rule", plan.shown or name)
        return Verdict("allow")

    def guard(self, context: CallContext) -> Callable[[str, bool], None] | None:
        return None
