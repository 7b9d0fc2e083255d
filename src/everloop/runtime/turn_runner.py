"""Runs a claimed turn: context, model, tools and log put together around the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .. import events
from ..actions import Limits
from ..bus import InboundMessage, OutboundMessage
from ..commands import words_after
from ..context.compaction import conversation_of
from ..context.prompt import Composer, ContextBuilder
from ..context.skills import SHIPPED
from ..cron.heartbeat import says_nothing
from ..cron.jobs import HEARTBEAT
from ..engine import Ending, Turn, fail_turn, run_turn
from ..errors import EverloopError, StaleLease, StoreError
from ..goals.phases import CHANNEL as SUBAGENTS
from ..goals.phases import report
from ..log import Call, CallsAsked, CallsDecided, Compacted, ModelAnswered, TurnEnded, UserSaid
from ..messages import Conversation
from ..providers.base import LLMProvider
from ..sandbox.reach import Reach
from ..store.base import Claim, FileMark, Gathering, SessionInfo, Store
from ..store.relays import Relay
from ..text import clean
from ..threads import in_thread
from ..tools.context import CallContext
from ..tools.outputs import outputs_folder
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry
from ..tools.trust import Mark
from .budgets import Budgets
from .clients import ABANDONED, ClientTools, brief_of, discreet, is_abandoned, request_of
from .compactor import Compactor, Window
from .histories import Histories, read_conversation, read_shown
from .images import Free, plain_images
from .ports import Asking, SessionLog, Tools, free_addresses, reply
from .session import Live
from .streaming import Follow, Showing
from .turn_spec import Brief, deadline

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from ..observability.tracing import Tracer

log = logging.getLogger(__name__)
COMPACTED = "{} now a summary: about {:,} tokens have become {:,}. The whole history stays in the log."
NOTHING_TO_COMPACT = "There is nothing to compact yet: a summary would be no shorter."
NOT_COMPACTED = "I could not compact the conversation: {}. Nothing was changed."


def _configured_model(wish: str) -> str | None:
    return None


@dataclass(slots=True)
class TurnRunner:
    """All that a turn needs. One for each loop; what belongs to one turn is passed in."""

    store: Store
    provider: LLMProvider
    tools: ToolRegistry
    policy: Policy
    context: ContextBuilder
    workspace: Path
    home: Path  # the runtime's own folder
    restricted: bool
    model: str | None
    limits: Limits
    compactor: Compactor
    budgets: Budgets
    brief: Callable[[Claim], Awaitable[Brief | None]]  # what a turn works with that is not the agent's own
    sender: str | None  # the worker that sends the answers, where this process does
    hand_out: Callable[[int, OutboundMessage], None]  # sends a message of a running turn
    awaited: Callable[[Claim], bool]  # whether somebody in this process waits for the answer
    on_event: Callable[[str, events.Event], None] | None = None
    tracer: Tracer | None = None
    meters: Meters | None = None
    text_calls: bool = True
    request_rounds: int = 5
    allowed_model: Callable[[str], str | None] = _configured_model  # the model that an API client gets, by its wish
    watchers: dict[tuple[str, str], list[events.Emit]] = field(default_factory=dict)
    on_withdrawn: Callable[[str, str, str], None] | None = None  # a client elsewhere waits no more: owner, key, message
    _showings: dict[tuple[str, str], Showing] = field(default_factory=dict)
    _followers: dict[tuple[str, str], list[Follow]] = field(default_factory=dict)
    _relay: Relay | None = None
    _histories: Histories = field(init=False)
    _own: Places | None = None

    def __post_init__(self) -> None:
        self._histories = Histories(self.store)
        self._relay = self.store.relay if isinstance(self.store, Gathering) else None

    async def run(self, claim: Claim, live: Live) -> tuple[Ending, SessionLog]:
        """Take the turn to its end, or to a question, or to where it is left; its log knows what is to be sent now."""
        message = claim.message
        brief = _unread(message, self.tools, self.limits)
        turn: Turn | None = None
        session_log = SessionLog(
            self.store,
            claim,
            live,
            lambda ended: _answer_to(
                message, ended, left=self.sender is None and not self.awaited(claim), chat_told=live.chat_told
            ),
            self.sender,
            lambda ended: _following(brief, ended, turn),
        )
        try:
            brief = await self._brief(claim, live)
            if self._own is None:
                await in_thread(_check, self.workspace)
                self._own = await in_thread(places_of, self.workspace, self.home, self.store)
            conversation = await self._conversation(claim, live, brief)
            if not claim.entries:
                claim.entries = [await self._said(claim)]
                await session_log.append(claim.entries)
            before = len(conversation)
            turn = Turn(claim.turn, claim.entries, conversation, session_log)
            compose = self._composer(claim, conversation, before)
            if claim.compacted >= claim.first_seq:  # something of the turn itself was left out before it was cut off
                conversation.become(await read_conversation(self.store, claim, conversation))
            live.runs(turn)
            turn.emit = self._emit(claim, live)
            cut_off = claim.resumed and not isinstance(claim.entries[-1], CallsAsked | CallsDecided)
            turn.tell(events.TurnStarted(claim.turn, cut_off))
            measure = self.compactor.measure(brief.model)
            model = brief.model or self.model
            asking = Asking(
                self.provider,
                model,
                brief.tools,
                measure,
                self.budgets,
                claim,
                brief.options,
                self.text_calls,
                compose,
                partial(self._free_addresses, brief.tools),
            )
            toolbox = self._toolbox(claim, brief, turn)
            with deadline(turn, brief.ends_at):
                ended = await run_turn(turn, asking, toolbox, brief.limits, Window(self.compactor, claim, brief.model))
            if isinstance(ended, TurnEnded) and _goes_on(claim):
                self._histories.keep(claim, conversation)
                self.compactor.consider(claim, conversation)
        except StoreError as error:
            if self.meters is not None and isinstance(error, StaleLease):
                self.meters.refused()
            raise
        except Exception as error:  # a fault of ours ends this turn, not the session
            if isinstance(error, WorkspaceError):
                log.error("%s", error)
            else:
                log.exception("turn %s failed", claim.turn)
            turn = turn or Turn(claim.turn, claim.entries, Conversation(), session_log)
            ended = await fail_turn(turn, clean(str(error)) or type(error).__name__)
        finally:
            self._shown_no_more(claim)
            if self.meters is not None and turn is not None:
                self.meters.ran(claim, turn.entries, self.tools)
        if isinstance(ended, TurnEnded):
            await self.tools.end_turn(claim.turn)
            if self.tracer is not None:
                self.tracer.ended(claim)
        live.again |= session_log.more()
        return ended, session_log

    async def _conversation(self, claim: Claim, live: Live, brief: Brief) -> Conversation:
        """What was said before the turn, behind the system prompt."""
        assert live.system is not None
        system = brief.system(await live.system)
        system = self.context.conversation_prompt(system, claim.began) if brief.dated else system
        return await self._histories.conversation(claim, system, blind=self.compactor.blind)

    def _composer(self, claim: Claim, conversation: Conversation, before: int) -> Composer | None:
        """What builds the turn's requests, where a subclass of the context builder has its own `build_messages`."""
        message = claim.message
        own = message.channel != SUBAGENTS and request_of(claim) is None  # others come with a prompt of their own
        if not own or not self.context.builds_messages or len(conversation) == before:
            return None
        return Composer(self.context, conversation[before], message.content, message.media)

    async def _said(self, claim: Claim) -> UserSaid:
        """What opens the turn. Attachments and skills are read here, once, and stay in the log."""
        message = claim.message
        content = await in_thread(self.context.user_content, message.content, message.media)
        skills = await in_thread(self.context.skills_in, message.content) if message.by_a_person else ""
        return msgspec.structs.replace(message.said(content, claim.time_to_tell(time.time())), loaded=skills)

    async def _brief(self, claim: Claim, live: Live) -> Brief:
        """The terms of the claimed turn: a sub-agent's, a request's, or the agent's own."""
        if (request := request_of(claim)) is None:
            return await self.brief(claim) or Brief(self.tools, self.limits)
        if await is_abandoned(self.store, claim, request):
            live.stop("abandoned", ABANDONED)
        return brief_of(request, self.tools, self.request_rounds, self.allowed_model)

    async def compact(self, claim: Claim, live: Live) -> tuple[Compacted | None, str]:
        """`/compact`: the entry that makes a summary of all turns but the last, and what to tell the person."""
        assert live.system is not None
        system = self.context.conversation_prompt(await live.system, claim.began)
        conversation = await self._histories.conversation(claim, system, blind=self.compactor.blind)
        work = self.compactor.make(
            claim, conversation, kept_turns=1, target=0, focus=words_after(claim.message.content), fall_back=False
        )
        live.command = asyncio.ensure_future(work)
        try:
            await asyncio.wait([live.command])  # it may be stopped without the session
            made = live.command.result()
        except asyncio.CancelledError:
            if not live.command.cancelled():
                live.command.cancel()
                raise
            return None, NOT_COMPACTED.format("it was stopped")
        except Exception as error:  # nothing has changed, and that is what the person hears
            told = discreet(claim.owner, error)
            return None, NOT_COMPACTED.format(clean(str(told)) or type(told).__name__)
        finally:
            live.command = None
        if made is None:
            return None, NOTHING_TO_COMPACT
        after = conversation_of(system, made, await self.store.read_log(claim.session, made.until))
        measure = self.compactor.measure()
        then, now = measure.tokens(conversation), measure.tokens(after)
        if now >= then:
            return None, NOTHING_TO_COMPACT
        turns = "1 turn is" if made.turns == 1 else f"{made.turns} turns are"
        return made, COMPACTED.format(turns, then, now)

    async def fullness(self, info: SessionInfo | None) -> str:
        """How full the model's window is with a session's conversation."""
        measure = self.compactor.measure()
        window = f"{measure.window:,} tokens"
        if info is None:
            return f"the model takes {window}"
        kept = self._histories.kept(info.id)
        if kept is None:
            system = self.context.conversation_prompt(await in_thread(self.context.shared_prompt), info.created_at)
            kept = conversation_of(system, *await read_shown(self.store, info))
        summary = ", older turns as a summary" if kept.summary is not None else ""
        return f"about {measure.tokens(kept):,} of {window}{summary}"

    def reach(self) -> Reach:
        """What may be read for the prompt, as by any tool. It looks at the disk: call it in a thread."""
        own = self._own or places_of(self.workspace, self.home, self.store)
        return Reach(own.workspace, self.restricted, protected=own.protected)

    def watch(self, live: Live | None, owner: str, key: str, emit: events.Emit) -> None:
        """Tell `emit` what happens in a session's turns from now on."""
        self.watchers.setdefault((owner, key), []).append(emit)
        if live is not None and live.turn is not None and live.turn.emit is None:
            live.turn.emit = self._showings.get((owner, key))

    def unwatch(self, owner: str, key: str, emit: events.Emit) -> None:
        watchers = [watcher for watcher in self.watchers.pop((owner, key), ()) if watcher is not emit]
        if watchers:
            self.watchers[owner, key] = watchers

    def follow(self, owner: str, key: str, follow: Follow) -> Callable[[], None]:
        """Tell `follow` of a session's turns, each thing with its place, until the function that comes back is called;
        first of all, where the turn is that runs."""
        followers = self._followers.setdefault((owner, key), [])
        followers.append(follow)
        if (showing := self._showings.get((owner, key))) is not None:
            showing.show_to(follow)

        def stop() -> None:
            followers.remove(follow)
            if not followers and (owner, key) not in self._showings:  # a turn that runs tells those in this very list
                self._followers.pop((owner, key), None)

        return stop

    def shown(self, owner: str, key: str) -> Showing | None:
        """The session's turn that runs here, as it is shown to those who watch."""
        return self._showings.get((owner, key))

    def _emit(self, claim: Claim, live: Live) -> events.Emit | None:
        """Where the turn's events go; None when nobody watches, and then nothing is streamed at all."""
        where = (claim.owner, claim.key)
        followers = self._followers.setdefault(where, [])  # there, and the same one, until the turn is over
        watchers = partial(self._watching, where, live)
        showing = Showing(claim, live, watchers, followers, self._relay, partial(self._told, where))
        self._showings[where] = showing
        watched = live.emit or where in self.watchers or self.on_event is not None
        # The client of a request whose process died is on its way back.
        expected = claim.resumed and claim.message.request is not None
        return showing if watched or expected or showing.followed else None

    def _shown_no_more(self, claim: Claim) -> None:
        if (showing := self._showings.pop(where := (claim.owner, claim.key), None)) is not None:
            showing.close()
            if not self._followers.get(where):
                self._followers.pop(where, None)

    def _watching(self, where: tuple[str, str], live: Live) -> list[events.Emit]:
        """Those of this process who are told every event."""
        own = [partial(self.on_event, where[1])] if self.on_event is not None else []
        return [*live.emit, *self.watchers.get(where, ()), *own]

    def _told(self, where: tuple[str, str], word: bytes) -> None:
        """A client that waits elsewhere for a message of this session has gone."""
        showing = self._showings.get(where)
        if showing is not None and not showing.followed_elsewhere and self.on_withdrawn is not None:
            self.on_withdrawn(*where, msgspec.json.decode(word, type=str))

    def _toolbox(self, claim: Claim, brief: Brief, turn: Turn) -> Tools:
        own, message, conversation = self._own, claim.message, turn.conversation
        assert own is not None
        channel, chat_id = message.origin
        outputs = outputs_folder(self.home, claim.owner, claim.key)

        def context(call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext:
            made = CallContext(
                owner=claim.owner,
                session=claim.key,
                turn=claim.turn,
                call=call.id,
                channel=channel,
                chat_id=chat_id,
                workspace=own.workspace,
                restricted=self.restricted,
                idempotency_key=f"{claim.turn}/{call.id}",
                progress=progress,
                approved=approved,
                tainted=bool(self.policy.taint) and conversation.untrusted,
                own_files=conversation.untrusted and not conversation.outside,
                taint=self.policy.taint,
                marks=_StoreMarks(self.store),
                outputs=outputs,
                readable=(SHIPPED,),
                attended=message.attended,
                rounds_left=brief.limits.rounds - sum(isinstance(entry, ModelAnswered) for entry in turn.entries),
                ends_at=brief.ends_at,
                scheduled=str(message.metadata.get("cron", "")),
                may_schedule=bool(message.metadata.get("may_schedule")),
                protected=own.protected,
                frozen=own.frozen,
                real_workspace=own.real_workspace,
                send=partial(self._send, claim, conversation, f"{claim.turn}/{call.id}"),
            )
            guard = self.policy.guard(made, call.name, call.arguments, partial(self._paths, call, made))
            return made if guard is None else replace(made, guard=guard)

        grants = partial(self.store.grants, claim.owner, claim.key)
        return Tools(brief.tools, self.policy, context, message.attended, grants)

    def _paths(self, call: Call, context: CallContext) -> Sequence[str]:
        planned = self.tools.plan(call, context)
        return planned[1].paths if planned is not None else ()

    def _free_addresses(self, tools: ToolRegistry, conversation: Conversation) -> Free | None:
        """Which images an answer may show; None for all: also for a client that brings its own tools, which is the
        agent itself and gets the model's own words."""
        if tools.described_outside:  # they may have come while the turn ran
            conversation.untrusted = conversation.outside = True
        return None if isinstance(tools, ClientTools) else free_addresses(self.policy, conversation)

    async def _send(self, claim: Claim, conversation: Conversation, key: str, message: OutboundMessage) -> None:
        """Put a message of a running turn into the outbox and on its way, once for each call."""
        if (free := free_addresses(self.policy, conversation)) is not None:
            message = replace(message, content=plain_images(message.content, free))
        id = await self.store.post(claim, message, key, self.sender)
        if id is not None:
            self.hand_out(id, message)


class WorkspaceError(EverloopError):
    """The workspace is missing, or no folder."""


@dataclass(slots=True, frozen=True)
class _StoreMarks:
    """The file contents that the agent wrote, as the store remembers them."""

    store: Store

    async def add(self, owner: str, marks: Sequence[Mark]) -> None:
        await self.store.mark_files(owner, [FileMark(*mark) for mark in marks])

    async def tainted(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        return await self.store.file_marks(owner, digests)

    async def tainted_paths(self, owner: str) -> list[str]:
        return await self.store.tainted_paths(owner)


class Places(NamedTuple):
    """The workspace, as it was named and as it really is; the runtime's own files, which no tool may touch where the
    workspace is restricted, and its code, which none may change."""

    workspace: Path
    real_workspace: Path
    protected: tuple[Path, ...]
    frozen: tuple[Path, ...]


def _following(brief: Brief, ended: TurnEnded, turn: Turn | None) -> Sequence[InboundMessage]:
    """What follows from the turn's end, each message with what is known of where its text came from."""
    untrusted = turn is not None and turn.conversation.untrusted
    messages = brief.follow(ended, untrusted)
    if turn is None or not untrusted or turn.conversation.outside:
        return messages
    return [replace(message, metadata={**message.metadata, "own_files": True}) for message in messages]


def _unread(message: InboundMessage, tools: ToolRegistry, limits: Limits) -> Brief:
    """The terms of a turn until its own are read: if they cannot be, whoever gave the task is still told of its end."""
    brief = Brief(tools, limits)
    return replace(brief, follow=partial(report, message)) if message.channel == SUBAGENTS else brief


def _goes_on(claim: Claim) -> bool:
    """Whether the session may have another turn: not that of a request which is all there is."""
    return (request := request_of(claim)) is None or request.kept


def _check(workspace: Path) -> None:
    if not workspace.is_dir():
        what = "is not a folder" if workspace.exists() else "does not exist"
        raise WorkspaceError(f"the workspace {os.path.abspath(workspace)} {what}: make the folder, or name another one")


def places_of(workspace: Path, home: Path, store: Store) -> Places:
    """Look up the places of an agent's calls on the disk."""
    protected = [home.resolve()]
    if (path := getattr(store, "path", None)) is not None:
        real = Path(path).resolve()
        protected += [real, *(real.with_name(real.name + suffix) for suffix in ("-wal", "-shm", "-journal"))]
    frozen = Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()
    return Places(Path(os.path.abspath(workspace)), workspace.resolve(), tuple(protected), frozen)


def _answer_to(message: InboundMessage, ended: TurnEnded, left: bool, chat_told: bool) -> Sequence[OutboundMessage]:
    """What is sent: nothing for a turn whose stop the chat is told of by the answer to its /stop. A client whose
    process has `left` the turn to this one, a killed chat for example, finds the answer in the outbox later."""
    if left and message.attended and message.by_a_person:
        message = replace(message, reply=True)
    silent = message.metadata.get("cron") == HEARTBEAT and says_nothing(ended.text)
    silent |= ended.reason == "replaced" or (ended.reason == "cancelled" and chat_told)
    return [] if silent else reply(message, ended.text)
