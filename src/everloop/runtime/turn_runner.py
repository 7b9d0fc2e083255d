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
from ..context.prompt import ContextBuilder
from ..context.skills import SHIPPED
from ..context.view import conversation_of
from ..cron.heartbeat import says_nothing
from ..cron.jobs import HEARTBEAT
from ..engine import Ending, Turn, end_turn, run_turn
from ..errors import StaleLease, StoreError
from ..goals.phases import CHANNEL as SUBAGENTS
from ..goals.phases import report
from ..log import Call, CallsAsked, CallsDecided, Compacted, ModelAnswered, TurnEnded, UserSaid
from ..messages import Conversation, clean
from ..providers.base import LLMProvider
from ..sandbox.reach import Reach
from ..store.base import Claim, SessionInfo, Store
from ..threads import in_thread
from ..tools.context import CallContext
from ..tools.outputs import outputs_folder
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry
from .budgets import Budgets
from .clients import ABANDONED, brief_of, discreet, is_abandoned, request_of
from .compactor import Compactor, Window
from .histories import Histories, read_conversation, read_shown
from .model_call import TurnModelCall
from .ports import SessionLog, Tools, reply
from .session import Session
from .streaming import TurnStreams
from .turn_spec import Brief, deadline

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from ..observability.tracing import Tracer

log = logging.getLogger(__name__)
APOLOGY = "Sorry, I encountered an error: "
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
    streams: TurnStreams
    tracer: Tracer | None = None
    meters: Meters | None = None
    text_calls: bool = True
    request_rounds: int = 5
    allowed_model: Callable[[str], str | None] = _configured_model  # the model that an API client gets, by its wish
    _histories: Histories = field(init=False)
    _own: Places | None = None

    def __post_init__(self) -> None:
        self._histories = Histories(self.store)

    async def run(self, claim: Claim, session: Session) -> tuple[Ending, SessionLog]:
        """Take the turn to its end, or to a question, or to where it is left; its log knows what is to be sent now."""
        message = claim.message
        brief = _unread(message, self.tools, self.limits)
        turn: Turn | None = None
        session_log = SessionLog(
            self.store,
            claim,
            session,
            lambda ended: _answer_to(message, ended, left=self.sender is None and not self.awaited(claim)),
            self.sender,
            lambda ended: brief.follow(ended, turn is not None and turn.conversation.untrusted),
        )
        try:
            brief = await self._brief(claim, session)
            if self._own is None:
                self._own = await in_thread(_places, self.workspace, self.home, self.store)
            conversation = await self._conversation(claim, session, brief)
            if not claim.entries:
                claim.entries = [await self._said(claim)]
                await session_log.append(claim.entries)
            turn = Turn(claim.turn, claim.entries, conversation, session_log)
            if claim.compacted >= claim.first_seq:  # something of the turn itself was left out before it was cut off
                conversation.become(await read_conversation(self.store, claim, conversation))
            session.start_turn(turn)
            turn.emit = self.streams.open(claim, session)
            cut_off = claim.resumed and not isinstance(claim.entries[-1], CallsAsked | CallsDecided)
            turn.tell(events.TurnStarted(claim.turn, cut_off))
            measure = self.compactor.measure(brief.model)
            model = brief.model or self.model
            model_call = TurnModelCall(
                self.provider, model, brief.tools, measure, self.budgets, claim, brief.options, self.text_calls
            )
            toolbox = self._toolbox(claim, brief, turn)
            with deadline(turn, brief.ends_at):
                ended = await run_turn(
                    turn, model_call, toolbox, brief.limits, Window(self.compactor, claim, brief.model)
                )
            if isinstance(ended, TurnEnded) and _goes_on(claim):
                self._histories.keep(claim, conversation)
                self.compactor.consider(claim, conversation)
        except StoreError as error:
            if self.meters is not None and isinstance(error, StaleLease):
                self.meters.refused()
            raise
        except Exception as error:  # a fault of ours ends this turn, not the session
            log.exception("turn %s failed", claim.turn)
            turn = turn or Turn(claim.turn, claim.entries, Conversation(), session_log)
            ended = await end_turn(turn, "error", f"{APOLOGY}{clean(str(error)) or type(error).__name__}")
        finally:
            self.streams.close(claim)
            if self.meters is not None and turn is not None:
                self.meters.ran(claim, turn.entries, self.tools)
        if isinstance(ended, TurnEnded):
            await self.tools.end_turn(claim.turn)
            if self.tracer is not None:
                self.tracer.ended(claim)
        session.again |= session_log.more()
        return ended, session_log

    async def _conversation(self, claim: Claim, session: Session, brief: Brief) -> Conversation:
        """What was said before the turn, behind the system prompt."""
        assert session.system is not None
        system = brief.system(await session.system)
        system = self.context.dated(system, claim.began) if brief.dated else system
        return await self._histories.conversation(claim, system, blind=self.compactor.blind)

    async def _said(self, claim: Claim) -> UserSaid:
        """What opens the turn. Attachments and skills are read here, once, and stay in the log."""
        message = claim.message
        content = await in_thread(self.context.user_content, message.content, message.media)
        skills = await in_thread(self.context.skills_in, message.content) if message.by_a_person else ""
        return msgspec.structs.replace(message.said(content, claim.time_to_tell(time.time())), loaded=skills)

    async def _brief(self, claim: Claim, session: Session) -> Brief:
        """The terms of the claimed turn: a sub-agent's, a request's, or the agent's own."""
        if (request := request_of(claim)) is None:
            return await self.brief(claim) or Brief(self.tools, self.limits)
        if await is_abandoned(self.store, claim, request):
            session.stop("abandoned", ABANDONED)
        return brief_of(request, self.tools, self.request_rounds, self.allowed_model)

    async def compact(self, claim: Claim, session: Session) -> tuple[Compacted | None, str]:
        """`/compact`: the entry that makes a summary of all turns but the last, and what to tell the person."""
        assert session.system is not None
        system = self.context.dated(await session.system, claim.began)
        conversation = await self._histories.conversation(claim, system, blind=self.compactor.blind)
        work = self.compactor.make(
            claim, conversation, kept_turns=1, target=0, focus=words_after(claim.message.content), fall_back=False
        )
        session.command = asyncio.ensure_future(work)
        try:
            await asyncio.wait([session.command])  # it may be stopped without the session
            made = session.command.result()
        except asyncio.CancelledError:
            if not session.command.cancelled():
                session.command.cancel()
                raise
            return None, NOT_COMPACTED.format("it was stopped")
        except Exception as error:  # nothing has changed, and that is what the person hears
            told = discreet(claim.owner, error)
            return None, NOT_COMPACTED.format(clean(str(told)) or type(told).__name__)
        finally:
            session.command = None
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
            system = await in_thread(self.context.build_system_prompt, info.created_at)
            kept = conversation_of(system, *await read_shown(self.store, info))
        summary = ", older turns as a summary" if kept.summary is not None else ""
        return f"about {measure.tokens(kept):,} of {window}{summary}"

    def reach(self) -> Reach:
        """What may be read for the prompt, as by any tool. It looks at the disk: call it in a thread."""
        own = self._own or _places(self.workspace, self.home, self.store)
        return Reach(own.workspace, self.restricted, protected=own.protected)

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
                tainted=self.policy.taint and conversation.untrusted,
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
                send=partial(self._send, claim, f"{claim.turn}/{call.id}"),
            )
            guard = self.policy.guard(made, call.name, call.arguments, partial(self._paths, call, made))
            return made if guard is None else replace(made, guard=guard)

        return Tools(brief.tools, self.policy, context, message.attended)

    def _paths(self, call: Call, context: CallContext) -> Sequence[str]:
        planned = self.tools.plan(call, context)
        return planned[1].paths if planned is not None else ()

    async def _send(self, claim: Claim, key: str, message: OutboundMessage) -> None:
        """Put a message of a running turn into the outbox and on its way, once for each call."""
        id = await self.store.post(claim, message, key, self.sender)
        if id is not None:
            self.hand_out(id, message)


class Places(NamedTuple):
    """The workspace, as it was named and as it really is; the runtime's own files, which no tool may touch where the
    workspace is restricted, and its code, which none may change."""

    workspace: Path
    real_workspace: Path
    protected: tuple[Path, ...]
    frozen: tuple[Path, ...]


def _unread(message: InboundMessage, tools: ToolRegistry, limits: Limits) -> Brief:
    """The terms of a turn until its own are read: if they cannot be, whoever gave the task is still told of its end."""
    brief = Brief(tools, limits)
    return replace(brief, follow=partial(report, message)) if message.channel == SUBAGENTS else brief


def _goes_on(claim: Claim) -> bool:
    """Whether the session may have another turn: not that of a request which is all there is."""
    return (request := request_of(claim)) is None or request.kept


def _places(workspace: Path, home: Path, store: Store) -> Places:
    protected = [home.resolve()]
    protected += store.files()
    frozen = Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()
    return Places(Path(os.path.abspath(workspace)), workspace.resolve(), tuple(protected), frozen)


def _answer_to(message: InboundMessage, ended: TurnEnded, left: bool) -> Sequence[OutboundMessage]:
    """What is sent. Whoever said it to a process that has `left` the turn to this one, a killed chat say, finds the
    answer in the outbox when he comes back."""
    if left and message.attended and message.by_a_person:
        message = replace(message, reply=True)
    silent = message.metadata.get("cron") == HEARTBEAT and says_nothing(ended.text)
    return [] if ended.reason == "replaced" or silent else reply(message, ended.text)
