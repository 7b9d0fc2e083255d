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
        """Whether it is all that stands before the claimed turn, shown as it is to be."""
        shown = (self.history_from, self.compacted, self.until)
        return shown == (claim.history_from, claim.compacted, claim.first_seq - 1)


class Histories:
    """Least recently used conversations go first; what is not here is read from the store."""

    def __init__(self, store: Store, limit: int = KEPT_BYTES) -> None:
        self._store = store
        self._limit = limit
        self._size = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def conversation(self, claim: Claim, system: str, *, blind: Blind | None = None) -> Conversation:
        """All that stands before the claimed turn, behind this system prompt. The caller may add to it."""
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
        """The turn is over and the conversation holds it."""
        size = conversation.size
        kept = _Kept(conversation, claim.history_from, claim.compacted, claim.next_seq - 1, size)
        self._kept[claim.session] = kept
        self._size += size
        while self._size > self._limit and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size

    def kept(self, session: int) -> Conversation | None:
        """A session's conversation, if it is in memory and no turn works on it."""
        found = self._kept.get(session)
        return found.conversation if found is not None else None

    def _take(self, session: int) -> _Kept | None:
        """Taken out while a turn works on it, so that one that fails half-way is not used again."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._size -= kept.size
        return kept


async def read_compacted(store: Store, session: int, place: int) -> Compacted | None:
    """The entry that stands there; None for the place 0, where nothing is left out."""
    if not place:
        return None
    (one,) = await store.read_log(session, place - 1, place)
    assert isinstance(one.entry, Compacted)
    return one.entry


async def read_shown(
    store: Store, claim: Claim | SessionInfo, until: int | None = None, compacted: int | None = None
) -> tuple[Compacted | None, list[Logged]]:
    """What says how the claimed session's conversation is shown, and the entries that are shown by themselves.

    However long the log is, only the part that a model can take is read.
    """
    session = claim.session if isinstance(claim, Claim) else claim.id
    before = await read_compacted(store, session, claim.compacted if compacted is None else compacted)
    after = max(claim.history_from, before.until if before is not None else 0)
    return before, await store.read_log(session, after, until)


async def read_conversation(
    store: Store, claim: Claim, now: Conversation, compacted: int | None = None
) -> Conversation:
    """The conversation of the claimed turn as its log says it, all that has happened in it included; `compacted` is
    where that is said, if not where the claim has it."""
    before, logged = await read_shown(store, claim, compacted=compacted)
    return conversation_of(now[0]["content"], before, logged, blind=now.blind)
