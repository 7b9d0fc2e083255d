"""Turns that other processes run: they are stopped by a word in the inbox, which whoever runs them hears."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Protocol

from ..bus import InboundMessage
from ..store.base import SessionInfo, Store
from ..store.news import WORK
from .peers import lives, wake_all

MEANT = "stops"  # in the metadata of the word: the turn that it is about
PATIENCE = 10.0  # seconds until a stop counts as under way


class Sessions(Protocol):
    """What runs sessions in this process."""

    @property
    def worker(self) -> str: ...

    @property
    def runs(self) -> bool: ...

    def kick(self, owner: str, key: str) -> None: ...

    def stop_turn(self, owner: str, key: str, reason: Any, text: str) -> bool: ...

    def wait_for(self, row: int, message: InboundMessage) -> asyncio.Future[str]: ...


async def runs_elsewhere(store: Store, sessions: Sessions, info: SessionInfo | None) -> bool:
    """Whether it is for another process to stop the session's turn."""
    if info is None or info.open_turn is None:
        return False
    if not sessions.runs:
        return True
    return info.worker is not None and info.worker != sessions.worker and await lives(store, info.worker)


async def stop_elsewhere(
    store: Store, sessions: Sessions, owner: str, key: str, meant: str | int | None = None, wait: bool = True
) -> None:
    """Have the session's turn stopped where it runs, and wait until it was told, if that comes soon. Where one is
    `meant`, by its id or by the inbox row that opens it, no other is."""
    # Not of the session's own channel: it would count as one of its messages.
    word = InboundMessage("system", "agent", key, "/stop", owner=owner, session=key, reply=False)
    if meant is not None:
        word.metadata = {MEANT: meant}
    word.id = f"stop:{key}:{secrets.token_hex(4)}"
    row = await store.accept(word, "urgent")
    if not wait:
        await wake_all(store, WORK, [row.session])
        return
    answer = sessions.wait_for(row.id, word)
    await wake_all(store, WORK, [row.session])
    await asyncio.wait([answer], timeout=PATIENCE)
    if not answer.done():
        answer.cancel()
