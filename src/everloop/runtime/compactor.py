"""Conversation cache and compaction.

Conversations are cached while in use, so that no turn rereads its history, and compacted to fit the model's context
window: in the background after a turn, or before a model call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from .. import events
from ..config import Config
from ..context.compaction import KEPT_TURNS, Plan, Room, conversation_of, digest, plan, summarise
from ..context.pictures import without_pictures
from ..context.window import LONG, USABLE_SHARE, Measure, Meter, model_info, weigh
from ..engine import Turn
from ..errors import StoreError
from ..log import CallEnded, Compacted, Logged
from ..messages import Blind, Conversation, Message
from ..providers.base import LLMProvider, ProviderError, counts, own_prompt_of
from ..store.base import Claim, SessionInfo, Store
from ..threads import in_thread
from ..tools.registry import ToolRegistry, keep_output, outputs_folder
from .budgets import Budgets

KEPT_BYTES = 64_000_000  # for all cached conversations together


class _CacheEntry(msgspec.Struct):
    conversation: Conversation
    history_from: int
    compacted: int
    until: int  # the last log entry it contains
    size: int

    def holds(self, claim: Claim) -> bool:
        """Return whether it contains exactly what precedes the claimed turn, compacted in the same way."""
        shown = (self.history_from, self.compacted, self.until)
        return shown == (claim.history_from, claim.compacted, claim.first_seq - 1)


class Histories:
    """An LRU cache of conversations; those not cached are read from the store."""

    def __init__(self, store: Store, limit: int = KEPT_BYTES) -> None:
        self._store = store
        self._limit = limit
        self._size = 0
        self._kept: OrderedDict[int, _CacheEntry] = OrderedDict()

    async def conversation(self, claim: Claim, system: str, *, blind: Blind | None = None) -> Conversation:
        """Return the conversation that precedes the claimed turn, with this system prompt.

        The caller may append to it.
        """
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
        """Cache the conversation that includes the turn just run."""
        size = conversation.size
        kept = _CacheEntry(conversation, claim.history_from, claim.compacted, claim.next_seq - 1, size)
        self._kept[claim.session] = kept
        self._size += size
        while self._size > self._limit and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size

    def kept(self, session: int) -> Conversation | None:
        """Return a session's conversation, if it is cached and not in use by a turn."""
        found = self._kept.get(session)
        return found.conversation if found is not None else None

    def _take(self, session: int) -> _CacheEntry | None:
        """Remove the entry while a turn uses it, so that a turn that fails midway leaves no damaged entry."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self._size -= kept.size
        return kept


async def read_compacted(store: Store, session: int, place: int) -> Compacted | None:
    """Return the compaction at this log position; None for position 0, which means none."""
    if not place:
        return None
    (one,) = await store.read_log(session, place - 1, place)
    assert isinstance(one.entry, Compacted)
    return one.entry


async def read_shown(
    store: Store, claim: Claim | SessionInfo, until: int | None = None, compacted: int | None = None
) -> tuple[Compacted | None, list[Logged]]:
    """Return the compaction that a session's conversation starts from, and the entries after it.

    However long the log is, only the part that a model can take is read.
    """
    session = claim.session if isinstance(claim, Claim) else claim.id
    before = await read_compacted(store, session, claim.compacted if compacted is None else compacted)
    after = max(claim.history_from, before.until if before is not None else 0)
    return before, await store.read_log(session, after, until)


async def read_conversation(
    store: Store, claim: Claim, now: Conversation, compacted: int | None = None
) -> Conversation:
    """Read the conversation of the claimed turn from its log, including the turn itself.

    `compacted` is the position of the compaction, by default the claim's.
    """
    before, logged = await read_shown(store, claim, compacted=compacted)
    return conversation_of(now[0]["content"], before, logged, blind=now.blind)


log = logging.getLogger(__name__)

TARGET = 0.4  # share of the available room to use after a compaction
SHRUNK = (0.5, 0.7)  # for a refused request: the target share to keep, and the maximum
SUMMARY_TOKENS = 1_500
CHARACTERS = 3.5  # per token, on average
SUMMARY_SECONDS = 120.0
RETRY_SECONDS = 60.0  # delay after a failed summary, doubled each time
REFUSALS = 3  # refusals per turn before the model's refusal ends it
KEPT_NOTES = 1_000  # sessions


class _Note(msgspec.Struct):
    """The compaction state of a session."""

    task: asyncio.Task[None] | None = None
    ready: Compacted | None = None  # made in the background while a turn held the session
    failures: int = 0
    not_before: float = 0.0


class Compactor:
    """Decides when a conversation has grown too long, and what to leave out."""

    def __init__(
        self,
        store: Store,
        provider: LLMProvider,
        model: str | None,
        tools: ToolRegistry,
        config: Config,
        home: Path,
        budgets: Budgets,
    ) -> None:
        self._store = store
        self._provider = provider
        self._model = model
        self._tools = tools
        self._config = config
        self._home = home
        self._budgets = budgets
        self._meter = Meter()
        self._measures: OrderedDict[str, Measure] = OrderedDict()
        self._notes: OrderedDict[int, _Note] = OrderedDict()

    @property
    def model(self) -> str:
        return self._model or self._provider.get_default_model()

    @property
    def blind(self) -> Blind | None:
        """The function that replaces images, if the model has no vision."""
        known = model_info(self.model).vision is False if self._config.vision == "auto" else self._config.vision == "no"
        return without_pictures if known else None

    def measure(self, model: str | None = None) -> Measure:
        """Return the token counter of a model, by default the agent's own."""
        name = model or self.model
        if name not in self._measures:
            window = self._config.window if name == self.model else 0
            own_prompt = own_prompt_of(self._provider) if name == self.model else 0
            self._measures[name] = Measure(name, window, self._meter, self._tools, own_prompt)
        while len(self._measures) > 64:
            self._measures.popitem(last=False)
        return self._measures[name]

    # ------------------------------------------------------------------------------------------ when

    def consider(self, claim: Claim, conversation: Conversation) -> None:
        """After a turn, start compaction in the background if the next turn may not fit."""
        measure = self.measure()
        if measure.is_small(conversation, self._config.compact_at) and not conversation.stopgap:
            return
        soft = measure.tokens_at(self._config.compact_at, conversation)
        full = measure.tokens(conversation) > soft and measure.can_fit(conversation)
        if not full and not conversation.stopgap:
            return
        note = self._note(claim.session)
        if note.task is not None or time.monotonic() < note.not_before:
            return
        if conversation.stopgap:
            note.task = asyncio.create_task(self._in_background(claim, self._mended(claim), note))
        else:
            room = self.room(measure, conversation)
            work = self.make(claim, conversation, room, until=claim.next_seq - 1, fall_back=False)
            note.task = asyncio.create_task(self._in_background(claim, work, note))

    async def fit(self, claim: Claim, turn: Turn, measure: Measure, refused: bool = False) -> bool:
        """Make the request fit, before a model call or after a refusal. Return whether anything was left out."""
        conversation, changed = turn.conversation, False
        note = self._notes.get(claim.session)
        if not refused and note is None and measure.is_small(conversation, USABLE_SHARE):
            return False
        if conversation.characters > LONG:  # each message is counted only once, but this many take a while
            await in_thread(measure.weight, conversation)
        full = refused or measure.tokens(conversation) > measure.limit
        if note is not None and note.ready is None and note.task is not None and full:
            await asyncio.wait([note.task])
        if note is not None and note.ready is not None:
            ready, note.ready = note.ready, None
            if ready.follows == claim.compacted and ready.until >= claim.history_from:
                await self._apply(claim, turn, measure, ready)
                changed = True
        if not refused and (measure.tokens(conversation) <= measure.limit or not measure.can_fit(conversation)):
            return changed
        room = self._shrunk(measure, conversation) if refused else self.room(measure, conversation)
        made = await self.make(claim, conversation, room, open_from=claim.first_seq, tell=turn.tell)
        if made is None:
            return changed
        await self._apply(claim, turn, measure, made)
        return True

    async def close(self) -> None:
        """Cancel background compactions; they are redone when needed."""
        tasks = [note.task for note in self._notes.values() if note.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._notes.clear()

    def _note(self, session: int) -> _Note:
        note = self._notes.setdefault(session, _Note())
        self._notes.move_to_end(session)
        while len(self._notes) > KEPT_NOTES and next(iter(self._notes.values())).task is None:
            self._notes.popitem(last=False)
        return note

    # ------------------------------------------------------------------------------------------ how

    async def make(
        self,
        claim: Claim,
        conversation: Conversation,
        room: Room,
        *,
        open_from: int | None = None,
        until: int | None = None,
        kept_turns: int = KEPT_TURNS,
        focus: str = "",
        fall_back: bool = True,
        tell: Callable[[events.Event], None] | None = None,
    ) -> Compacted | None:
        """Create the compaction entry that fits the conversation into the room; None if nothing can be left out.

        If the summary fails, a list of the user's messages stands in until there is one; without `fall_back`, the
        failure is raised.
        """
        before, logged = await read_shown(self._store, claim, until)
        after = max(claim.history_from, before.until if before else 0)
        made = await in_thread(plan, logged, before, room, after=after, open_from=open_from, kept_turns=kept_turns)
        if made is None:
            return None
        places = await in_thread(self._save, claim, made.aside)
        if not made.gone:
            return made.entry(before, claim.compacted, "", places)
        if tell is not None:
            tell(events.Compacting(made.turns))
        return await self._summarised(claim, made, before, places, focus, fall_back)

    async def _summarised(
        self,
        claim: Claim,
        made: Plan,
        before: Compacted | None,
        places: dict[str, str],
        focus: str,
        fall_back: bool,
    ) -> Compacted:
        earlier = before.summary if before else ""
        try:
            summary, usage = await self._summary(claim, made.gone, earlier, focus)
        except Exception as error:  # the turn continues, whatever the error
            if not fall_back:
                raise
            log.warning("could not summarise the older turns of session %s: %s", claim.key, _reason(error))
            entry = made.entry(before, claim.compacted, digest(made.gone, earlier, self._longest), places)
            return msgspec.structs.replace(entry, stopgap=True)
        return msgspec.structs.replace(made.entry(before, claim.compacted, summary, places), usage=usage)

    async def _summary(
        self, claim: Claim, gone: Sequence[Logged], earlier: str, focus: str = ""
    ) -> tuple[str, dict[str, int]]:
        """Return a summary written by the model, and its usage."""
        measure = self.measure(self._config.summary_model or None)
        used: dict[str, int] = {}

        async def ask(messages: list[Message]) -> str:
            tokens = measure.in_tokens(sum(map(weigh, messages)))
            await self._budgets.check(claim, measure.model, tokens)
            response = await self._provider.chat(messages, model=self._config.summary_model or self._model)
            text, usage = response.content or "", counts(response)
            await self._budgets.record(claim, response.model or measure.model, usage, tokens + len(text) // 4)
            for name, count in usage.items():
                used[name] = used.get(name, 0) + count
            return text

        part = int(CHARACTERS * measure.room / 2)
        async with asyncio.timeout(SUMMARY_SECONDS):
            return await summarise(gone, earlier, ask, part=part, longest=self._longest, focus=focus), used

    @property
    def _longest(self) -> int:
        """The maximum length of a summary in characters."""
        return int(CHARACTERS * max(200, min(SUMMARY_TOKENS, 0.08 * self.measure().room)))

    def room(self, measure: Measure, conversation: Conversation, share: float = TARGET) -> Room:
        """Return the room for a conversation that should fill this share of the window."""
        target = measure.tokens_at(share, conversation)
        return Room(self._fixed(measure, conversation), measure.in_units(target), measure.in_units(measure.limit))

    def _shrunk(self, measure: Measure, conversation: Conversation) -> Room:
        """Return the room after a refusal: something must go, whatever the estimate says."""
        beside = measure.weight(conversation) - (fixed := measure.fixed(conversation))
        target, limit = (int(fixed + share * beside) for share in SHRUNK)
        return Room(self._fixed(measure, conversation), target, limit)

    def _fixed(self, measure: Measure, conversation: Conversation) -> int:
        """Return the weight of what cannot be left out, with the longest summary."""
        return measure.fixed(conversation) + self._longest

    def _save(self, claim: Claim, aside: Sequence[CallEnded]) -> dict[str, str]:
        """Save long results to files of their session. Return their paths by call id, "" if that failed."""
        folder = outputs_folder(self._home, claim.owner, claim.key)
        places: dict[str, str] = {}
        for ended in aside:
            # a model's call ids may contain anything
            name = f"aside-{hashlib.sha256(ended.id.encode()).hexdigest()[:20]}"
            try:
                places[ended.id] = str(keep_output(folder, name, ended.content.encode()))
            except OSError as error:  # a full disk, say: the log still has it
                log.warning("could not save a long result to %s: %s", folder, error.strerror or error)
                places[ended.id] = ""
        return places

    async def _apply(self, claim: Claim, turn: Turn, measure: Measure, entry: Compacted) -> None:
        """Write the entry to the turn's log, and shorten the conversation accordingly."""
        before, place = measure.tokens(turn.conversation), claim.next_seq
        await turn.append(entry)
        shown = await read_conversation(self._store, claim, turn.conversation, place)
        turn.conversation.become(shown)
        claim.compacted = place  # only now, so that the cache entry matches its contents
        turn.tell(events.Compacted(entry.turns, before, measure.tokens(turn.conversation)))

    async def _mended(self, claim: Claim) -> Compacted | None:
        """Replace a stopgap by a real summary: the log still has everything that it covers."""
        stopgap = await read_compacted(self._store, claim.session, claim.compacted)
        if stopgap is None or not stopgap.stopgap:
            return None
        before = await read_compacted(self._store, claim.session, stopgap.follows)
        while before is not None and before.stopgap:
            before = await read_compacted(self._store, claim.session, before.follows)
        after = max(claim.history_from, before.until if before else 0)
        gone = await self._store.read_log(claim.session, after, stopgap.until)
        summary, usage = await self._summary(claim, gone, before.summary if before else "")
        return msgspec.structs.replace(stopgap, summary=summary, usage=usage, stopgap=False, follows=claim.compacted)

    async def _in_background(self, claim: Claim, work: Awaitable[Compacted | None], note: _Note) -> None:
        try:
            made = await work
            if made is not None and not await self._store.compact(claim.owner, claim.key, made):
                note.ready = made  # a turn is already running and applies it at its next round
            note.failures = 0
        except StoreError as error:
            log.error("%s", error)
        except Exception as error:  # the conversation still fits: retry later
            note.failures += 1
            log.warning(
                "could not summarise the older turns of session %s, will retry later: %s",
                claim.key,
                _reason(error),
            )
        finally:
            note.task = None
            if note.failures:
                note.not_before = time.monotonic() + RETRY_SECONDS * 2 ** min(note.failures - 1, 6)


def _reason(error: Exception) -> str:
    """Return why a summary failed. A TimeoutError has no text of its own."""
    return f"it took longer than {SUMMARY_SECONDS:.0f} seconds" if isinstance(error, TimeoutError) else str(error)


class Window:
    """Implements the engine's `Window` port for one turn."""

    def __init__(self, compactor: Compactor, claim: Claim, model: str | None = None) -> None:
        self._compactor = compactor
        self._claim = claim
        self._measure = compactor.measure(model)
        self._refusals = 0

    async def fit(self, turn: Turn, refused: ProviderError | None = None) -> bool:
        if refused is not None:
            self._refusals += 1
            if self._refusals > REFUSALS or not self._measure.overflows(refused, turn.conversation):
                return False
        return await self._compactor.fit(self._claim, turn, self._measure, refused is not None)
