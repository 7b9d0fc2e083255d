"""The conversations of sessions in use, kept in memory so that no turn reads its history twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..log import CallEnded, messages_of
from ..messages import Conversation
from ..store.base import Claim, Store

KEPT_BYTES = 64_000_000  # of all conversations together


@dataclass(slots=True)
class _Kept:
    conversation: Conversation
    history_from: int
    until: int  # the last entry it holds
    size: int


class Histories:
    """Least recently used conversations go first; what is not here is read from the store."""

    def __init__(self, store: Store, limit: int = KEPT_BYTES) -> None:
        self._store = store
        self._limit = limit
        self._size = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def conversation(self, claim: Claim, system: str) -> Conversation:
        """All that stands before the claimed turn, behind this system prompt. The caller may add to it."""
        before = claim.first_seq - 1
        kept = self._take(claim.session)
        if kept is not None and kept.until == before and kept.history_from == claim.history_from:
            if kept.conversation[0]["content"] == system:
                return kept.conversation
            renewed = Conversation([{"role": "system", "content": system}, *kept.conversation[1:]])
            renewed.untrusted = kept.conversation.untrusted
            return renewed
        conversation = Conversation([{"role": "system", "content": system}])
        if before > claim.history_from:
            logged = await self._store.read_log(claim.session, claim.history_from, before)
            conversation.extend(messages_of(one.entry for one in logged))
            conversation.untrusted = any(isinstance(one.entry, CallEnded) and one.entry.untrusted for one in logged)
        return conversation

    def keep(self, claim: Claim, conversation: Conversation) -> None:
        """The turn is over and the conversation holds it."""
        size = conversation.size
        self._kept[claim.session] = _Kept(conversation, claim.history_from, claim.next_seq - 1, size)
        self._size += size
        while self._size > self._limit and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size

    def _take(self, session: int) -> _Kept | None:
        """Taken out while a turn works on it, so that one that fails half-way is not used again."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._size -= kept.size
        return kept
