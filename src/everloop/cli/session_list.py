"""Sessions as shown to a user: their titles, age, turns, tokens and cost."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..config import Config
from ..log import Cleared, Compacted, Logged, ModelAnswered, UserSaid, text_of
from ..store.base import SessionInfo, Store
from ..text import counted, one_line
from ..threads import in_thread
from .common import OWNER

TITLE = 60  # characters
MAX_ENTRIES = 20_000  # of a session that are read for its numbers
_OTHER = "another model"


class Totals(msgspec.Struct):
    """Tokens of a session's model calls, by model."""

    turns: int = 0
    tokens: dict[str, Counter[str]] = {}

    @classmethod
    def of(cls, entries: Iterable[Logged], usual: str, info: SessionInfo | None = None) -> Totals:
        """Count the model calls in a log, and those for the session's title. `usual` is the model of calls that name
        none.
        """
        found = cls()
        turns = set()
        for one in entries:
            if one.turn:
                turns.add(one.turn)
            if isinstance(one.entry, ModelAnswered):
                found.add(one.entry.model or usual, one.entry.usage)
            elif isinstance(one.entry, Compacted) and one.entry.usage:
                found.add(usual, one.entry.usage)
        if info is not None and info.naming_usage:
            found.add(info.named_by or usual, info.naming_usage)
        found.turns = len(turns)
        return found

    def add(self, model: str, usage: dict[str, int]) -> None:
        self.tokens.setdefault(model or _OTHER, Counter()).update(usage)

    def count(self, name: str) -> int:
        return sum(tokens[name] for tokens in self.tokens.values())

    def cost(self, config: Config) -> float | None:
        """Return the total cost; None if the price of a model is unknown. A model on this machine costs nothing."""
        if config.provider == "local":
            return None
        from ..config.prices import cost_of, price_of

        total = 0.0
        for model, tokens in self.tokens.items():
            if (price := price_of(model, config.prices)) is None:
                return None
            total += cost_of(price, tokens)
        return total if self.tokens else None


def money(cost: float | None) -> str:
    """Return an amount for a person: $0.0012, $1.25; "" if it is unknown."""
    if cost is None:
        return ""
    return f"${cost:.4f}" if cost < 0.1 else f"${cost:.2f}"


def age(at: float, now: float | None = None) -> str:
    """Return how long ago something was, in one unit."""
    seconds = max(0.0, (time.time() if now is None else now) - at)
    for size, unit in ((86_400 * 365, "year"), (86_400 * 30, "month"), (86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{counted(count, unit)} ago"
    return "just now"


# ---------------------------------------------------------------------------------------------- titles


async def adopt_titles(store: Store, config: Config) -> None:
    """Move titles into the store from the file in the home in which an earlier version kept them."""
    path = config.home / "titles.json"
    for key, title in (await in_thread(_take_titles, path, str(config.store))).items():
        info = await store.session(OWNER, key)
        if info is not None and not info.title:
            await store.set_title(OWNER, key, one_line(title, TITLE))


def _take_titles(path: Path, store: str) -> dict[str, str]:
    """Take a store's session titles out of the file; return them by key."""
    try:
        titles = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    own = titles.pop(store, {}) if isinstance(titles, dict) else {}
    if not titles:
        path.unlink(missing_ok=True)
    elif own:
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        draft.touch(0o600)
        draft.write_text(json.dumps(titles, indent=1, ensure_ascii=False), encoding="utf-8")
        draft.replace(path)
    return {key: title for key, title in own.items() if isinstance(title, str)} if isinstance(own, dict) else {}


def first_words(entries: Iterable[Logged]) -> str:
    """Return the first message of the user in the latest conversation."""
    title = ""
    for one in entries:
        if isinstance(one.entry, Cleared):
            title = ""
        elif isinstance(one.entry, UserSaid) and not one.entry.inside and not title:
            title = one_line(text_of(one.entry.content), TITLE)
    return title


class Listed(msgspec.Struct, frozen=True):
    """A session in a list."""

    info: SessionInfo
    title: str
    totals: Totals | None  # None for a session that is too long to be counted


async def list_sessions(store: Store, config: Config, owner: str, limit: int) -> list[Listed]:
    """Return the latest sessions, each with its title and numbers."""
    await adopt_titles(store, config)
    listed = []
    for info in await store.sessions(owner, limit):
        short = info.entries <= MAX_ENTRIES
        entries = await store.read_log(info.id, 0 if short else max(0, info.entries - 200))
        totals = Totals.of(entries, config.model, info) if short else None
        listed.append(Listed(info, info.title or first_words(entries), totals))
    return listed
