"""Budgets: limits on the tokens and the money that a turn or an owner's day may use, including all sub-agents and jobs.

The cost of an answer is written together with the answer. Before a model call, the remaining budget is compared with
the minimum that the request needs, so a long prompt cannot overrun a budget either; only concurrent calls may each
claim the same remainder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ..bus import EXECUTOR
from ..config import Config, Price
from ..errors import BudgetReached
from ..store.base import Claim, Spent, Store

Scopes = dict[str, tuple[str, int, float]]  # keyed by scope: the budget's name, its token limit and its cost limit


class Budgets:
    """The budget limits of an agent, and what has been used of them."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._limits = {
            "turn": (config.turn_tokens, config.turn_cost),
            "day": (config.day_tokens, config.day_cost),
        }
        self._limited = any(limit for limits in self._limits.values() for limit in limits)

    def limits(self, claim: Claim) -> bool:
        """Return whether the claimed turn has any budget."""
        return self._limited or bool(_caps(claim))

    async def check(self, claim: Claim, model: str, tokens: int) -> None:
        """Raise `BudgetReached` if a budget has no room for a request of about this many tokens."""
        await self._check(claim.owner, self._scopes(claim), model, tokens, claim.spent, _is_run(claim))

    async def _check(
        self, owner: str, scopes: Scopes, model: str, tokens: int, unwritten: Sequence[Spent] = (), is_run: bool = False
    ) -> None:
        spent = await self._store.spent(owner, list(scopes)) if scopes else {}
        for scope, (name, most, dearest) in scopes.items():
            used, cost = spent.get(scope, (0, 0.0))
            for waiting in unwritten:
                if waiting.scope == scope:
                    used, cost = used + waiting.tokens, cost + waiting.cost
            if dearest and not self.price(model):
                raise BudgetReached(NO_PRICE.format(model))
            if most and used + tokens > most:
                shown = f"{used:,} are" if used else ""
                raise BudgetReached(_words(name, f"{most:,} tokens", shown, f"about {tokens:,}", is_run))
            needed = self.cost(model, {"prompt_tokens": tokens})
            if dearest and cost + needed > dearest:
                shown = f"{cost:.4f} is" if cost else ""
                raise BudgetReached(_words(name, f"{dearest:g}", shown, f"about {needed:.4f}", is_run))

    def spend(self, claim: Claim, model: str, usage: Mapping[str, int], estimate: int) -> None:
        """Record the cost of an answer; it is written with the turn's next entries.

        `estimate` is used if the provider reports no usage.
        """
        claim.spent += self._spent(claim, model, usage, estimate)

    async def check_day(self, owner: str, model: str, tokens: int) -> None:
        """Raise `BudgetReached` if an owner's daily budget has no room for a request that is not a turn."""
        await self._check(owner, self._of_day(), model, tokens)

    async def record_day(self, owner: str, model: str, usage: Mapping[str, int], estimate: int) -> None:
        """Record the usage of a request that is not a turn."""
        if scopes := self._of_day():
            await self._store.spend(owner, self._amounts(scopes, model, usage, estimate))

    async def record(self, claim: Claim, model: str, usage: Mapping[str, int], estimate: int) -> None:
        """Record usage outside of the turn's entries, such as that of a summary."""
        if spent := self._spent(claim, model, usage, estimate):
            await self._store.spend(claim.owner, spent)

    async def allows(self, owner: str, model: str, tokens: int) -> bool:
        """Return whether an owner's daily budget has room for a request that is not a turn."""
        try:
            await self.check_day(owner, model, tokens)
        except BudgetReached:
            return False
        return True

    def _spent(self, claim: Claim, model: str, usage: Mapping[str, int], estimate: int) -> list[Spent]:
        if not self.limits(claim):
            return []
        return self._amounts(self._scopes(claim), model, usage, estimate)

    def _amounts(self, scopes: Scopes, model: str, usage: Mapping[str, int], estimate: int) -> list[Spent]:
        total = usage.get("total_tokens") or usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        if not total:
            total, usage = estimate, {"prompt_tokens": estimate}
        cost = self.cost(model, usage)
        return [Spent(scope, total, cost) for scope in scopes]

    def _scopes(self, claim: Claim) -> Scopes:
        """Return the budgets that apply to a turn, each with its limits.

        They are those of the root turn, of the day, and of every sub-agent above it that has a token cap.
        """
        root = (task.root if (task := claim.message.task) is not None else "") or claim.turn
        scopes: Scopes = {}
        if self._limited:
            scopes[f"turn {root}"] = ("turn", *self._limits["turn"])
        return scopes | self._of_day() | {f"sub {id}": ("sub", most, 0.0) for id, most in _caps(claim).items()}

    def _of_day(self) -> Scopes:
        return {_day(): ("day", *self._limits["day"])} if self._limited else {}

    def price(self, model: str) -> Price | None:
        """Return the configured price of a model."""
        return next((one for one in self._config.prices if fnmatchcase(model, one.model)), None)

    def cost(self, model: str, usage: Mapping[str, int]) -> float:
        """Return the cost of these tokens; 0 if the model has no price."""
        price = self.price(model) or Price(model="*")
        cached = min(usage.get("cached_tokens", 0), usage.get("prompt_tokens", 0))
        read = usage.get("prompt_tokens", 0) - cached
        cheap = price.cached if price.cached >= 0 else price.input
        parts = read * price.input + cached * cheap + usage.get("completion_tokens", 0) * price.output
        return parts / 1_000_000


def _day() -> str:
    """Return the scope of the current day. UTC, because machines that share a store may be in different time zones."""
    return time.strftime("day %Y-%m-%d", time.gmtime())


def _caps(claim: Claim) -> dict[str, int]:
    """Return the token caps of a sub-agent and of those above it, by id."""
    return task.caps if (task := claim.message.task) is not None else {}


NO_PRICE = (
    "I stopped before asking the model: there is a cost budget, but no [[price]] for the model {}, so its "
    "cost is unknown. Add a price to the settings, or remove turn_cost and day_cost."
)


def _is_run(claim: Claim) -> bool:
    return claim.message.channel == EXECUTOR


def _words(name: str, limit: str, used: str, needed: str, is_run: bool) -> str:
    if name == "sub":
        used = f"{used} used, and " if used else ""
        return f"I stopped: my allowance of {limit} is not enough ({used}{needed} more would be needed)."
    if not used:
        return (
            f"I stopped before asking the model: one request takes {needed}, and the budget under [budget] in the "
            f"settings is {limit}. Raise it, or remove it."
        )
    whose = {"turn": f"this {'run' if is_run else 'turn'}, with its sub-agents,", "day": "today"}[name]
    again = "Another run gets a new one" if is_run else "Say “continue” to start a new one"
    then = {"turn": again, "day": "It resets at midnight UTC"}[name]
    return (
        f"I stopped before asking the model: the budget of {limit} for {whose} is used up ({used} used, and {needed} "
        f"more would be needed). The work so far is kept. {then}; see [budget] in the settings."
    )
