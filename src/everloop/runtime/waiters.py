"""Who waits in this process for answers, wherever the turns run that give them."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator

from ..actions import Park, next_action
from ..errors import EverloopError
from ..log import TurnEnded
from ..store.base import Store
from .session import Item

log = logging.getLogger(__name__)


class Stopped(EverloopError):
    """The loop was stopped before the answer came; the turn goes on at the next start."""

    def __init__(self) -> None:
        super().__init__("the loop was stopped; the turn is kept and goes on at the next start")


class Waiters:
    """Messages whose answers somebody waits for, by their rows of the inbox and by session."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[int, list[Item]] = {}
        self._sessions: dict[tuple[str, str], set[int]] = {}

    def add(self, row: int, item: Item) -> None:
        self._rows.setdefault(row, []).append(item)
        self._sessions.setdefault(item.place, set()).add(row)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._rows.values() for item in items)

    def of(self, rows: Iterable[int]) -> list[Item]:
        """Who waits for the answers to these."""
        return [item for row in rows for item in self._rows.get(row, ())]

    def take(self, row: int) -> list[Item]:
        """Who waits for the answer to this; no more from now on."""
        items = self._rows.pop(row, [])
        for item in items:
            rows = self._sessions.get(item.place, set())
            rows.discard(row)
            if not rows:
                self._sessions.pop(item.place, None)
        return items

    def in_session(self, owner: str, key: str) -> list[tuple[int, Item]]:
        """Who waits for answers of a session."""
        return [(row, item) for row in sorted(self._sessions.get((owner, key), ())) for item in self._rows[row]]

    def outside(self, sessions: Container[tuple[str, str]]) -> list[int]:
        """The rows that do not belong to any of these sessions."""
        return [row for place, rows in self._sessions.items() if place not in sessions for row in rows]

    async def settle(self, row: int) -> None:
        """Give the answer of a turn that ran elsewhere, or before, or its question, to whoever waits for it."""
        found = await self._store.incoming(row)
        text: str | None = "" if found.done else None
        if found.first_seq is not None and (logged := await self._store.read_turn(found.session, found.first_seq)):
            entries = [one.entry for one in logged]
            if isinstance(last := entries[-1], TurnEnded):
                text = last.text
            elif isinstance(action := next_action(entries), Park):
                text = action.question
        if text is not None:
            tell(self.take(row), text)

    def fail_all(self, error: Exception) -> None:
        fail(self, error)
        self._rows.clear()
        self._sessions.clear()


def tell(items: Iterable[Item], text: str) -> None:
    """The answer has come."""
    for item in items:
        if not item.answer.done():
            item.answer.set_result(text)


def fail(items: Iterable[Item], error: Exception) -> None:
    """No answer comes: whoever waits must hear why."""
    if not isinstance(error, Stopped):
        log.error("%s", error)
    for item in items:
        if not item.answer.done():
            item.answer.set_exception(error)
