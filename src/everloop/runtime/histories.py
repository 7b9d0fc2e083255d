"""The conversations of sessions in use, kept in memory so that no turn reads its history twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..context.compaction import conversation_of
from ..log import Compacted, Logged
from ..messages import Blind, Conversation
from ..store.base import Claim, SessionInfo, Store

KEPT_BYTES = 64_000_000  # of all conversations together


@dataclass(slots=True)
class _Kept:
    conversation: Conversation
    history_from: int
    compacted: int
    until: int  # the last entry it holds
    size: int

    def holds(self, claim: Claim) -> bool:
        """Whether it holds exactly what precedes the claimed turn, compacted in the same way."""
        shown = (self.history_from, self.compacted, self.until)
        return shown == (claim.history_from, claim.compacted, claim.first_seq - 1)


class Histories:
    """A cache of conversations that drops the least recently used; others are read from the store."""

    def __init__(self, store: Store, limit: int = KEPT_BYTES) -> None:
        self._store = store
        self._limit = limit
        self._size = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def conversation(self, claim: Claim, system: str, *, blind: Blind | None = None) -> Conversation:
        """The conversation before the claimed turn, after this system prompt. The caller may add to it."""
        kept = self._take(claim.session)
        if kept is not None and kept.holds(claim) and kept.conversation.blind == blind:
            if kept.conversation[0]["content"] == system:
                return kept.conversation
            renewed = Conversation([{"role": "system", "content": system}, *kept.conversation[1:]], blind=blind)
            renewed.untrusted, renewed.summary = kept.conversation.untrusted, kept.conversation.summary
            renewed.outside = kept.conversation.outside
            renewed.own_words, renewed.stopgap = kept.conversation.own_words, kept.conversation.stopgap
            return renewed
        if claim.first_seq - 1 <= claim.history_from:
            return Conversation([{"role": "system", "content": system}], blind=blind)
        before, logged = await read_shown(self._store, claim, claim.first_seq - 1)
        return conversation_of(system, before, logged, blind=blind)

    def keep(self, claim: Claim, conversation: Conversation) -> None:
        """Cache the conversation after a turn that it contains."""
        size = conversation.size
        kept = _Kept(conversation, claim.history_from, claim.compacted, claim.next_seq - 1, size)
        self._kept[claim.session] = kept
        self._size += size
        while self._size > self._limit and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size

    def kept(self, session: int) -> Conversation | None:
        """A session's conversation, if it is cached and no turn uses it."""
        found = self._kept.get(session)
        return found.conversation if found is not None else None

    def _take(self, session: int) -> _Kept | None:
        """Remove it while a turn uses it, so that a turn that fails half-way does not leave it damaged."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._size -= kept.size
        return kept


async def read_compacted(store: Store, session: int, place: int) -> Compacted | None:
    """The compaction at this place in the log; None for place 0, where nothing is left out."""
    if not place:
        return None
    (one,) = await store.read_log(session, place - 1, place)
    assert isinstance(one.entry, Compacted)
    return one.entry


async def read_shown(
    store: Store, claim: Claim | SessionInfo, until: int | None = None, compacted: int | None = None
) -> tuple[Compacted | None, list[Logged]]:
    """The compaction that a session's conversation starts from, and the entries after it.

    However long the log is, only the part that a model can take is read.
    """
    session = claim.session if isinstance(claim, Claim) else claim.id
    before = await read_compacted(store, session, claim.compacted if compacted is None else compacted)
    after = max(claim.history_from, before.until if before is not None else 0)
    return before, await store.read_log(session, after, until)


async def read_conversation(
    store: Store, claim: Claim, now: Conversation, compacted: int | None = None
) -> Conversation:
    """The conversation of the claimed turn from its log, including the turn itself; `compacted` is the place of the
    compaction, by default the claim's."""
    before, logged = await read_shown(store, claim, compacted=compacted)
    return conversation_of(now[0]["content"], before, logged, blind=now.blind)
