"""Requests to the model's server that are no turns, such as for embeddings: passed on, within the owner's budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..providers.base import LLMProvider
from .budgets import Budgets


class PlainCalls:
    """Passes requests on to the endpoints that a provider has beside its chat."""

    def __init__(self, provider: LLMProvider, budgets: Budgets) -> None:
        self._provider = provider
        self._budgets = budgets

    @property
    def endpoints(self) -> frozenset[str]:
        return getattr(self._provider, "endpoints", frozenset())

    async def ask(self, owner: str, endpoint: str, body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """The answer of an endpoint; `tokens` is about what the request takes. Raises ProviderError, BudgetReached."""
        model = str(body.get("model") or self._provider.get_default_model())
        await self._budgets.check_day(owner, model, tokens)
        answer = await self._provider.forward(endpoint, body)
        usage = answer.get("usage")
        counted = usage.items() if isinstance(usage, dict) else ()
        await self._budgets.record_day(owner, model, {name: n for name, n in counted if type(n) is int}, tokens)
        return answer
