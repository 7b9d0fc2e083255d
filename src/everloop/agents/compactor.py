"""Keeps conversations within the model's window: in the background after a turn, or at once where it must be."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import events
from ..config import Config
from ..context.compaction import KEPT_TURNS, Room, plan
from ..context.models import is_overflow, model_info, window_in_error
from ..context.summaries import digest, summarise
from ..context.tokens import Meter, weigh, weigh_tools
from ..engine import Turn
from ..errors import StoreError
from ..log import CallEnded, Compacted
from ..messages import Conversation, Message
from ..providers.base import LLMProvider, ProviderError
from ..store.base import Claim, Store
from ..tools.outputs import keep_output, outputs_folder
from ..tools.registry import ToolRegistry
from ..tools.threads import in_thread
from .budgets import Budgets
from .histories import read_conversation, read_shown

log = logging.getLogger(__name__)

ANSWER_SHARE = 4  # at most this part of the window is kept free for the answer
FITS = 0.95  # of the rest may be filled; the estimate is not exact
TARGET = 0.4  # of what the conversation may have is left after a compaction
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
    floor: int = 0  # tokens that were left after the last time


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
        self._windows: dict[str, int] = {}  # as errors of the model API have named them
        self._weight_of_tools: tuple[Sequence[Any], int] = ((), 0)
        self._notes: OrderedDict[int, _Note] = OrderedDict()
        self._warned = False

    # ------------------------------------------------------------------------------------------ how full it is

    @property
    def model(self) -> str:
        return self._model or self._provider.get_default_model()

    @property
    def blind(self) -> bool:
        """Whether the model cannot see pictures."""
        if self._config.vision == "auto":
            return model_info(self.model).vision is False
        return self._config.vision == "no"

    @property
    def window(self) -> int:
        """Tokens that the model takes."""
        return self._windows.get(self.model) or self._config.window or model_info(self.model).window

    @property
    def room(self) -> int:
        """Tokens that a request may have, with space left for the answer."""
        return self.window - min(model_info(self.model).output, self.window // ANSWER_SHARE)

    def weight(self, conversation: Conversation) -> int:
        """The units of a request. A message is weighed once in its life."""
        count, units = conversation.weighed
        if count < len(conversation):
            units += sum(map(weigh, conversation[count:]))
            conversation.weighed = (len(conversation), units)
        return units + self._weigh_tools()

    def tokens(self, conversation: Conversation) -> int:
        return self._meter.tokens(self.model, self.weight(conversation))

    def observe(self, model: str | None, units: int, counted: int) -> None:
        """Take in what the provider counted for a request of so many units."""
        self._meter.observe(model or self.model, units, counted)

    def _weigh_tools(self) -> int:
        tools = self._tools.get_definitions()
        if self._weight_of_tools[0] is not tools:
            self._weight_of_tools = (tools, weigh_tools(tools))
        return self._weight_of_tools[1]

    def _tokens_at(self, share: float, conversation: Conversation) -> float:
        """The tokens of a request that has filled this share of what is left beside the system prompt and the tools."""
        fixed = self._meter.tokens(self.model, weigh(conversation[0]) + self._weigh_tools())
        return fixed + share * max(self.room - fixed, 0)

    # ------------------------------------------------------------------------------------------ when

    def consider(self, claim: Claim, conversation: Conversation) -> None:
        """A turn is over: if the next one may not fit, make room in the background."""
        tokens = self.tokens(conversation)
        if tokens <= self._tokens_at(self._config.compact_at, conversation) or not self._can_fit(conversation):
            return
        note = self._note(claim.session)
        if note.task is None and time.monotonic() >= note.not_before and tokens > 1.2 * note.floor:
            note.task = asyncio.create_task(self._in_background(claim, conversation, note))

    async def fit(self, claim: Claim, turn: Turn) -> bool:
        """A turn is about to ask the model: see to it that the request fits. Whether something was left out."""
        conversation, changed = turn.conversation, False
        note = self._notes.get(claim.session)
        limit = FITS * self.room
        full = self.tokens(conversation) > limit
        if note is not None and note.ready is None and note.task is not None and full:
            await asyncio.wait([note.task])
        if note is not None and note.ready is not None:
            ready, note.ready = note.ready, None
            if ready.follows == claim.compacted and ready.until >= claim.history_from:
                await self._apply(claim, turn, ready)
                changed = True
        if self.tokens(conversation) <= limit or not self._can_fit(conversation):
            return changed
        made = await self.make(claim, conversation, open_from=claim.first_seq, tell=turn.tell)
        if made is None:
            return changed
        await self._apply(claim, turn, made)
        return True

    def _can_fit(self, conversation: Conversation) -> bool:
        """Whether there is room for any conversation at all beside the system prompt and the tools."""
        fixed = int(self._tokens_at(0, conversation))
        if fixed < FITS * self.room:
            return True
        if not self._warned:
            what = f"the system prompt and the tools have about {fixed:,} tokens"
            log.warning(
                "%s, and the model %s takes %d: set provider.window if it takes more", what, self.model, self.window
            )
        self._warned = True
        return False

    def learn(self, refused: ProviderError, conversation: Conversation) -> bool:
        """Whether the model API says that a request was too long; then it is known how much it takes."""
        text = str(refused)
        if not is_overflow(text):
            return False
        had = self.tokens(conversation)
        named = window_in_error(text)
        window = named if named and named < 2 * self.window else int(0.8 * had)
        self._windows[self.model] = max(min(window, self.window), 1_000)
        if named and had < named:  # the estimate was too low
            self._meter.observe(self.model, self.weight(conversation), int(1.1 * named))
        log.warning("the model %s takes %d tokens at most: %s", self.model, self.window, "set provider.window")
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
    ) -> Compacted | None:
        """The entry that makes a conversation short enough; None where nothing can be left out.

        A summary that fails is replaced by a list of what the user said; without `fall_back` it is an error.
        """
        before, logged = await read_shown(self._store, claim, until)
        after = max(claim.history_from, before.until if before else 0)
        longest = int(CHARACTERS * max(200, min(SUMMARY_TOKENS, 0.08 * self.room)))
        fixed = weigh(conversation[0]) + self._weigh_tools() + longest
        target, limit = self._tokens_at(target, conversation), FITS * self.room
        room = Room(fixed, *(self._meter.units(self.model, int(tokens)) for tokens in (target, limit)))
        made = await in_thread(plan, logged, before, room, after=after, open_from=open_from, kept_turns=kept_turns)
        if made is None:
            return None
        self._note(claim.session).floor = self._meter.tokens(self.model, made.units)
        places = await in_thread(self._save, claim, made.aside)
        summary = ""
        if made.gone:
            if tell is not None:
                tell(events.Compacting(made.turns))
            earlier = before.summary if before else ""
            part = int(CHARACTERS * self.room / 2)
            try:
                async with asyncio.timeout(SUMMARY_SECONDS):
                    summary = await summarise(
                        made.gone, earlier, partial(self._ask, claim), part=part, longest=longest, focus=focus
                    )
            except Exception as error:  # whatever it is, the turn goes on
                if not fall_back:
                    raise
                log.warning("no summary of session %s could be made: %s", claim.key, error)
                summary = digest(made.gone, earlier, longest)
        return made.entry(before, claim.compacted, summary, places)

    async def _ask(self, claim: Claim, messages: list[Message]) -> str:
        model = self._config.summary_model or self.model
        tokens = self._meter.tokens(model, sum(map(weigh, messages)))
        await self._budgets.check(claim, model, tokens)
        response = await self._provider.chat(messages, model=self._config.summary_model or self._model)
        text = response.content or ""
        await self._budgets.record(claim, response.model or model, response.usage or {}, tokens + len(text) // 4)
        return text

    def _save(self, claim: Claim, aside: Sequence[CallEnded]) -> dict[str, str]:
        """Put results into files of their session; "" where that fails."""
        folder = outputs_folder(self._home, claim.owner, claim.key)
        places: dict[str, str] = {}
        for ended in aside:
            try:
                places[ended.id] = str(keep_output(folder, f"aside-{ended.id}", ended.content.encode()))
            except OSError:  # a full disk: the log still has it
                places[ended.id] = ""
        return places

    async def _apply(self, claim: Claim, turn: Turn, entry: Compacted) -> None:
        """Write the entry into the turn's log and show the conversation as it says from now on."""
        before, place = self.tokens(turn.conversation), claim.next_seq
        await turn.append(entry)
        claim.compacted = place
        turn.conversation.become(await read_conversation(self._store, claim, turn.conversation))
        turn.tell(events.Compacted(entry.turns, before, self.tokens(turn.conversation)))

    async def _in_background(self, claim: Claim, conversation: Conversation, note: _Note) -> None:
        try:
            made = await self.make(claim, conversation, until=claim.next_seq - 1, fall_back=False)
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

    def __init__(self, compactor: Compactor, claim: Claim) -> None:
        self._compactor = compactor
        self._claim = claim
        self._refusals = 0

    async def fit(self, turn: Turn, refused: ProviderError | None = None) -> bool:
        if refused is not None:
            self._refusals += 1
            if self._refusals > REFUSALS or not self._compactor.learn(refused, turn.conversation):
                return False
        return await self._compactor.fit(self._claim, turn)
