"""Turns that other workers of the store run: find out whether one does, and ask it to stop."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Protocol

from ..bus import InboundMessage, StopRequest
from ..store.base import SessionInfo, Store
from ..store.peers import WORK

PATIENCE = 10.0  # seconds to wait for the answer to a stop request


class Sessions(Protocol):
    """Runs sessions in this process."""

    @property
    def worker(self) -> str: ...

    @property
    def runs(self) -> bool: ...

    def kick(self, owner: str, key: str) -> None: ...

    def stop_turn(self, owner: str, key: str, reason: Any, text: str) -> bool: ...

    def wait_for(self, row: int, message: InboundMessage) -> asyncio.Future[str]: ...

    def follow(self, row: int, message: InboundMessage) -> asyncio.Future[str]: ...


async def runs_elsewhere(store: Store, sessions: Sessions, info: SessionInfo | None) -> bool:
    """Whether another process runs the session's turn, and so must stop it."""
    if info is None or info.open_turn is None:
        return False
    if not sessions.runs:
        return True
    return info.worker is not None and info.worker != sessions.worker and await store.is_alive(info.worker)


async def stop_elsewhere(
    store: Store,
    sessions: Sessions,
    owner: str,
    key: str,
    meant: str | int | None = None,
    wait: bool = True,
    chat_told: bool = False,
) -> None:
    """Ask the process that runs the session's turn to stop it, and wait a while for its answer. With `meant`, a turn id
    or the inbox row that opens the turn, no other turn is stopped."""
    # Not from the session's own channel: it would count as one of its messages.
    word = InboundMessage("system", "agent", key, "/stop", owner=owner, session=key, reply=False)
    word.cause = StopRequest(meant, chat_told)
    word.id = f"stop:{key}:{secrets.token_hex(4)}"
    row = await store.accept(word, "urgent")
    if not wait:
        await store.wake(WORK, [row.session])
        return
    answer = sessions.wait_for(row.id, word)
    await store.wake(WORK, [row.session])
    await asyncio.wait([answer], timeout=PATIENCE)
    if not answer.done():
        answer.cancel()
