"""Keeps conversations within the model's window: in the background after a turn, or at once where it must be."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .. import events
from ..config import Config
from ..context.compaction import KEPT_TURNS, Plan, Room, plan
from ..context.models import model_info
from ..context.pictures import without_pictures
from ..context.summaries import digest, summarise
from ..context.tokens import Meter, weigh
from ..context.window import FITS, Measure
from ..engine import Turn
from ..errors import StoreError
from ..log import CallEnded, Compacted, Logged
from ..messages import Blind, Conversation, Message
from ..providers.base import LLMProvider, ProviderError, counts
from ..store.base import Claim, Store
from ..threads import in_thread
from ..tools.outputs import keep_output, outputs_folder
from ..tools.registry import ToolRegistry
from .budgets import Budgets
from .histories import read_compacted, read_conversation, read_shown

log = logging.getLogger(__name__)

TARGET = 0.4  # of what the conversation may have is left after a compaction
SHRUNK = (0.5, 0.7)  # of a request that was refused: how much is to be left, and how much at most
SUMMARY_TOKENS = 1_500
CHARACTERS = 3.5  # of a token, about
SUMMARY_SECONDS = 120.0
RETRY_SECONDS = 60.0  # after a summary that failed; doubled each time
REFUSALS = 3  # in one turn, after which the model's word is final
KEPT_NOTES = 1_000  # sessions


@dataclass(slots=True)
class _Note:
    """What is known of a session's compaction, while it is in use."""

    task: asyncio.Task[None] | None = None
    ready: Compacted | None = None  # made in the background, while a turn held the session
    failures: int = 0
    not_before: float = 0.0


class Compactor:
    """Decides when a conversation has grown too long, and what is left out of it then."""

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
        """What takes the place of pictures, if the model cannot see them."""
        known = model_info(self.model).vision is False if self._config.vision == "auto" else self._config.vision == "no"
        return without_pictures if known else None

    def measure(self, model: str | None = None) -> Measure:
        """What weighs conversations for a model, by default the agent's own."""
        name = model or self.model
        if name not in self._measures:
            window = self._config.window if name == self.model else 0
            self._measures[name] = Measure(name, window, self._meter, self._tools)
        while len(self._measures) > 64:
            self._measures.popitem(last=False)
        return self._measures[name]

    # ------------------------------------------------------------------------------------------ when

    def consider(self, claim: Claim, conversation: Conversation) -> None:
        """A turn is over: if the next one may not fit, make room in the background."""
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
            work = self.make(claim, conversation, until=claim.next_seq - 1, fall_back=False)
            note.task = asyncio.create_task(self._in_background(claim, work, note))

    async def fit(self, claim: Claim, turn: Turn, measure: Measure, refused: bool = False) -> bool:
        """A turn is about to ask the model, or was refused: see to it that the request fits. Whether something was left
        out."""
        conversation, changed = turn.conversation, False
        note = self._notes.get(claim.session)
        if not refused and note is None and measure.is_small(conversation, FITS):
            return False
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
        room = self._shrunk(measure, conversation) if refused else None
        made = await self.make(
            claim, conversation, open_from=claim.first_seq, tell=turn.tell, measure=measure, room=room
        )
        if made is None:
            return changed
        await self._apply(claim, turn, measure, made)
        return True

    async def close(self) -> None:
        """Give up what runs in the background; it is done again when it is needed."""
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
        *,
        open_from: int | None = None,
        until: int | None = None,
        kept_turns: int = KEPT_TURNS,
        target: float = TARGET,
        focus: str = "",
        fall_back: bool = True,
        tell: Callable[[events.Event], None] | None = None,
        measure: Measure | None = None,
        room: Room | None = None,
    ) -> Compacted | None:
        """The entry that makes a conversation short enough; None where nothing can be left out.

        A summary that fails is replaced by a list of what the user said, until there is one; without `fall_back` it is
        an error.
        """
        measure = measure or self.measure()
        before, logged = await read_shown(self._store, claim, until)
        after = max(claim.history_from, before.until if before else 0)
        room = room or self._room(measure, conversation, measure.tokens_at(target, conversation), measure.limit)
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
        except Exception as error:  # whatever it is, the turn goes on
            if not fall_back:
                raise
            log.warning("no summary of session %s could be made: %s", claim.key, error)
            entry = made.entry(before, claim.compacted, digest(made.gone, earlier, self._longest), places)
            return msgspec.structs.replace(entry, stopgap=True)
        return msgspec.structs.replace(made.entry(before, claim.compacted, summary, places), usage=usage)

    async def _summary(
        self, claim: Claim, gone: Sequence[Logged], earlier: str, focus: str = ""
    ) -> tuple[str, dict[str, int]]:
        """A summary by the model, and what it has cost."""
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
        """Characters of a summary."""
        return int(CHARACTERS * max(200, min(SUMMARY_TOKENS, 0.08 * self.measure().room)))

    def _room(self, measure: Measure, conversation: Conversation, target: float, limit: float) -> Room:
        fixed = measure.fixed(conversation) + self._longest
        return Room(fixed, measure.in_units(target), measure.in_units(limit))

    def _shrunk(self, measure: Measure, conversation: Conversation) -> Room:
        """The room after a refusal: whatever the estimate says, something must go."""
        beside = measure.weight(conversation) - (fixed := measure.fixed(conversation))
        target, limit = (int(fixed + share * beside) for share in SHRUNK)
        room = self._room(measure, conversation, 0, 0)
        return Room(room.fixed, target, limit)

    def _save(self, claim: Claim, aside: Sequence[CallEnded]) -> dict[str, str]:
        """Put results into files of their session; "" where that fails."""
        folder = outputs_folder(self._home, claim.owner, claim.key)
        places: dict[str, str] = {}
        for ended in aside:
            name = f"aside-{hashlib.sha256(ended.id.encode()).hexdigest()[:20]}"  # ids of models may be anything
            try:
                places[ended.id] = str(keep_output(folder, name, ended.content.encode()))
            except OSError as error:  # a full disk: the log still has it
                log.warning("a long result could not be put aside in %s: %s", folder, error.strerror or error)
                places[ended.id] = ""
        return places

    async def _apply(self, claim: Claim, turn: Turn, measure: Measure, entry: Compacted) -> None:
        """Write the entry into the turn's log and show the conversation as it says from now on."""
        before, place = measure.tokens(turn.conversation), claim.next_seq
        await turn.append(entry)
        shown = await read_conversation(self._store, claim, turn.conversation, place)
        turn.conversation.become(shown)
        claim.compacted = place  # only now: what is kept in memory is kept with what it shows
        turn.tell(events.Compacted(entry.turns, before, measure.tokens(turn.conversation)))

    async def _mended(self, claim: Claim) -> Compacted | None:
        """A real summary in the place of a stopgap: all that it stands for is in the log."""
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
                note.ready = made  # a turn runs already; it takes it at its next round
            note.failures = 0
        except StoreError as error:
            log.error("%s", error)
        except Exception as error:  # it fits as yet: try again later
            note.failures += 1
            log.warning("no summary of session %s could be made: %s", claim.key, error)
        finally:
            note.task = None
            if note.failures:
                note.not_before = time.monotonic() + RETRY_SECONDS * 2 ** min(note.failures - 1, 6)


class Window:
    """The engine's port, for one turn."""

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
