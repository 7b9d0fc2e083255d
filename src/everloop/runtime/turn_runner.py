"""Runs a claimed turn: assembles context, model, tools and log around the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from .. import events
from ..actions import Limits
from ..bus import InboundMessage, OutboundMessage, Question
from ..commands import words_after
from ..context.compaction import conversation_of
from ..context.prompt import Composer, ContextBuilder
from ..context.skills import SHIPPED
from ..engine import Ending, Left, Model, Toolbox, Turn, fail_turn, run_turn
from ..errors import StaleLease, StoreError
from ..goals.phases import CHANNEL as SUBAGENTS
from ..goals.phases import report
from ..log import Call, CallsAsked, CallsDecided, Compacted, Entry, TurnEnded, UserSaid, Written
from ..messages import Conversation
from ..providers.base import LLMProvider, own_prompt_of
from ..sandbox.reach import Places, Workspace, WorkspaceError
from ..store.base import Claim, FileMark, Finished, SessionInfo, Store
from ..text import clean
from ..threads import BackgroundTasks, in_thread
from ..tools.context import CallContext
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry, outputs_folder
from ..tools.trust import Mark
from .api_requests import ClientTools, brings_all, is_abandoned, spec_of
from .budgets import Budgets
from .compactor import Compactor, Histories, Window, read_conversation, read_shown
from .images import Free, plain_images
from .model_call import Reminder, RequestTexts, TurnModelCall, TurnTexts, error_for
from .notices import Notices
from .outbox import BusAdapter, reply
from .session import ABANDONED, Session
from .steps import SteppedModelCall, SteppedTools, StoppableTools
from .streaming import TurnStreams
from .subagents import SubagentManager
from .tool_calls import Tools, free_addresses, paths_of
from .turn_spec import TurnSpec, request_of, stopping

if TYPE_CHECKING:
    from ..observability.metrics import Meters
    from ..observability.tracing import Tracer
    from ..providers.transcription import Transcriber

log = logging.getLogger(__name__)
COMPACTED = "{} now a summary: about {:,} tokens have become {:,}. The whole history stays in the log."
NOTHING_TO_COMPACT = "There is nothing to compact yet: a summary would be no shorter."
NOTE_SECONDS = 1.0  # how long flush times are collected before they are written in one batch
NOT_COMPACTED = "I could not compact the conversation: {}. Nothing was changed."


class TurnSpecs(msgspec.Struct):
    """Chooses the spec of a turn: a sub-agent's, an API request's, or the agent's own."""

    store: Store
    tools: ToolRegistry
    limits: Limits
    subagents: SubagentManager
    request_rounds: int = 5
    server_models: tuple[str, ...] = ()  # patterns of the models that an API client may request

    async def of(self, claim: Claim, session: Session) -> TurnSpec:
        """Return the spec of a claimed turn. A request whose client has disconnected is stopped."""
        if (request := request_of(claim)) is None:
            return await self.subagents.turn_spec(claim) or TurnSpec(self.tools, self.limits)
        # set before the check: from then on the session is notified of the server's death
        session.state.server = "" if request.kept else request.via
        if await is_abandoned(self.store, claim, request):
            session.stop("abandoned", ABANDONED)
        return spec_of(request, self.tools, self.request_rounds, self.allowed_model)

    def unread(self, message: InboundMessage) -> TurnSpec:
        """Return a provisional spec: if reading the real one fails, the parent agent is still told of the end."""
        spec = TurnSpec(self.tools, self.limits)
        return msgspec.structs.replace(spec, follow=partial(report, message)) if message.channel == SUBAGENTS else spec

    def allowed_model(self, wish: str) -> str | None:
        """Return the model that an API client requests, if it is allowed."""
        return wish if any(fnmatchcase(wish, pattern) for pattern in self.server_models) else None


class Models(msgspec.Struct):
    """The model of an agent, within its budgets and its context window."""

    provider: LLMProvider
    model: str | None
    budgets: Budgets
    compactor: Compactor
    text_calls: bool = True

    def call(
        self,
        claim: Claim,
        spec: TurnSpec,
        compose: Composer | None,
        free: Callable[[Conversation], Free | None],
        texts: TurnTexts | None,
    ) -> Model:
        if is_reminder(claim):
            return Reminder(claim.message.content, free)
        kind = TurnModelCall if spec.ask_model is None else SteppedModelCall
        return kind(
            self.provider,
            spec.model or self.model,
            claim,
            spec,
            budgets=self.budgets,
            measure=self.compactor.measure(spec.model),
            text_calls=self.text_calls,
            free=free,
            texts=texts,
            compose=compose,
        )

    def window(self, claim: Claim, spec: TurnSpec) -> Window | None:
        return None if is_reminder(claim) else Window(self.compactor, claim, spec.model)


def is_reminder(claim: Claim) -> bool:
    """Return whether the turn only repeats the text of a scheduled reminder, without a model call."""
    return claim.message.cron is not None and claim.message.cron.deliver == "text"


@dataclass(slots=True)
class TurnRunner:
    """Runs the turns of one agent. State of a single turn is passed in."""

    store: Store
    specs: TurnSpecs
    models: Models
    tools: ToolRegistry
    policy: Policy
    context: ContextBuilder
    workspace: Workspace
    outbox: BusAdapter
    streams: TurnStreams
    tasks: BackgroundTasks
    tracer: Tracer | None = None
    meters: Meters | None = None
    transcriber: Transcriber | None = None
    notices: Notices | None = None
    _histories: Histories = field(init=False)
    _texts: RequestTexts = field(init=False)
    flush_times: FlushTimes = field(init=False)

    def __post_init__(self) -> None:
        self._histories = Histories(self.store)
        self._texts = RequestTexts(self.store)
        self.flush_times = FlushTimes(self.store)

    async def run(self, claim: Claim, session: Session) -> tuple[Ending, SessionLog]:
        """Run the turn until it ends, parks or is handed off; the returned log knows what is to be sent now."""
        spec = self.specs.unread(claim.message)
        session_log = SessionLog(self.store, claim, session, spec, self.outbox, self.notices)
        try:
            ended = await self._run(claim, session, session_log)
        except StoreError as error:
            if self.meters is not None and isinstance(error, StaleLease):
                self.meters.refused()
            raise
        except Exception as error:  # a bug of ours ends this turn, not the session
            ended = await self._fail(claim, session_log, error)
        finally:
            self.streams.close(claim)
            if self.meters is not None and session_log.turn is not None:
                self.meters.ran(claim, session_log.turn.entries, self.tools)
        if isinstance(ended, TurnEnded):
            await self.tools.end_turn(claim.turn)
            if self.tracer is not None:
                self.tracer.ended(claim)
        session.again |= session_log.more()
        return ended, session_log

    async def _run(self, claim: Claim, session: Session, session_log: SessionLog) -> Ending:
        """Assemble the turn and run it in the engine."""
        spec = session_log.spec = await self.specs.of(claim, session)
        await self.workspace.check()
        places = await self.workspace.places()
        conversation = await self._conversation(claim, session, spec)
        flushed = 0.0
        if not claim.entries:
            claim.entries = [await self._said(claim, spec)]
            began = time.monotonic()
            await session_log.append(claim.entries)
            flushed = time.monotonic() - began
        before = len(conversation)
        resumed_by = session.worker if claim.resumed else ""
        turn = session_log.turn = Turn(claim.turn, claim.entries, conversation, session_log, resumed_by=resumed_by)
        turn.flushed = flushed
        compose = self._composer(claim, conversation, before)
        if claim.compacted >= claim.first_seq:  # part of the turn itself was compacted before it was interrupted
            conversation.become(await read_conversation(self.store, claim, conversation))
        session.start_turn(turn)
        self.streams.open(claim, session)
        cut_off = claim.resumed and not isinstance(claim.entries[-1], CallsAsked | CallsDecided)
        turn.tell(events.TurnStarted(claim.turn, cut_off))
        toolbox = self._toolbox(claim, spec, turn, places)
        with stopping(turn, spec):
            free = partial(self._free_addresses, spec.tools)
            texts = await self._texts_of(claim, session, spec, turn) if compose is None else None
            model, window = self.models.call(claim, spec, compose, free, texts), self.models.window(claim, spec)
            ended = await run_turn(turn, model, toolbox, spec.limits, window)
        if turn.flushed and claim.inbox and not isinstance(ended, Left):
            self.flush_times.note(claim.inbox[0], turn.flushed)
        if isinstance(ended, TurnEnded) and _goes_on(claim, session_log.incoming):
            self._histories.keep(claim, conversation)
            self.models.compactor.consider(claim, conversation)
        return ended

    async def _fail(self, claim: Claim, session_log: SessionLog, error: Exception) -> Ending:
        """End the turn because of an error, and log the error."""
        if isinstance(error, WorkspaceError):
            log.error("%s", error)
        else:
            log.error("turn %s failed", claim.turn, exc_info=error)
        if session_log.turn is None:
            session_log.turn = Turn(claim.turn, claim.entries, Conversation(), session_log)
        return await fail_turn(session_log.turn, clean(str(error)) or type(error).__name__)

    async def _conversation(self, claim: Claim, session: Session, spec: TurnSpec) -> Conversation:
        """Return the conversation before the turn, after the system prompt."""
        assert session.system is not None
        system = spec.system(await session.system)
        system = self.context.conversation_prompt(system, claim.began) if spec.dated else system
        return await self._histories.conversation(claim, system, blind=self.models.compactor.blind)

    async def _texts_of(self, claim: Claim, session: Session, spec: TurnSpec, turn: Turn) -> TurnTexts | None:
        """Return the recorder of the turn's system prompt and tools.

        None if the log has them, or if the provider sends something else instead.
        """
        assert session.system is not None
        request = request_of(claim)
        if own_prompt_of(self.models.provider) or (request is not None and brings_all(request)):
            return None
        if is_own := claim.message.task is not None:  # written for this task
            prompt = turn.conversation[0]["content"]
        else:
            prompt = await session.system
        return self._texts.of_turn(claim, prompt, turn.sent, is_own=is_own)

    def _composer(self, claim: Claim, conversation: Conversation, before: int) -> Composer | None:
        """Return the composer of the turn's requests if a context builder subclass overrides `build_messages`."""
        message = claim.message
        own = message.task is None and request_of(claim) is None  # other turns come with a prompt of their own
        if not own or not self.context.builds_messages or len(conversation) == before:
            return None
        return Composer(self.context, conversation[before], message.content, message.media)

    async def _said(self, claim: Claim, spec: TurnSpec) -> UserSaid:
        """Return the entry that opens the turn. Attachments and skills are read here, once, and kept in the log."""
        message = claim.message
        text = message.content if spec.opening is None else clean(await spec.opening())
        if message.media and self.transcriber is not None:
            from .voice import with_transcripts

            text = await with_transcripts(self.transcriber, text, message.media, self.workspace.reach)
        content = await in_thread(self.context.user_content, text, message.media)
        names_skills = message.by_a_person and message.task is None
        skills = await in_thread(self.context.skills_in, message.content) if names_skills else ""
        said = message.said(content, claim.time_to_tell(time.time()))
        return msgspec.structs.replace(said, loaded=skills, before=spec.before)

    async def compact(self, claim: Claim, session: Session) -> tuple[Compacted | None, str]:
        """Run `/compact`: return the entry that summarises all turns but the last, and the reply to the person."""
        assert session.system is not None
        compactor = self.models.compactor
        measure = compactor.measure()
        system = self.context.conversation_prompt(await session.system, claim.began)
        conversation = await self._histories.conversation(claim, system, blind=compactor.blind)
        room, focus = compactor.room(measure, conversation, share=0), words_after(claim.message.content)
        work = compactor.make(claim, conversation, room, kept_turns=1, focus=focus, fall_back=False)
        session.command = asyncio.ensure_future(work)
        try:
            await asyncio.wait([session.command])  # it may be cancelled without the session
            made = session.command.result()
        except asyncio.CancelledError:
            if not session.command.cancelled():
                session.command.cancel()
                raise
            return None, NOT_COMPACTED.format("it was stopped")
        except Exception as error:  # nothing has changed, and the person is told so
            told = error_for(claim.owner, error)
            return None, NOT_COMPACTED.format(clean(str(told)) or type(told).__name__)
        finally:
            session.command = None
        if made is None:
            return None, NOTHING_TO_COMPACT
        after = conversation_of(system, made, await self.store.read_log(claim.session, made.until))
        then, now = measure.tokens(conversation), measure.tokens(after)
        if now >= then:
            return None, NOTHING_TO_COMPACT
        turns = "1 turn is" if made.turns == 1 else f"{made.turns} turns are"
        return made, COMPACTED.format(turns, then, now)

    async def fullness(self, info: SessionInfo | None) -> str:
        """Describe how much of the model's context window a session's conversation uses."""
        used, window, summary = await self.context_use(info)
        if info is None:
            return f"the model takes {window:,} tokens"
        return f"about {used:,} of {window:,} tokens{', older turns as a summary' if summary else ''}"

    async def context_use(self, info: SessionInfo | None) -> tuple[int, int, bool]:
        """Return a session's approximate tokens, the context window, and whether a summary replaces older turns."""
        measure = self.models.compactor.measure()
        if info is None:
            return 0, measure.window, False
        kept = self._histories.kept(info.id)
        if kept is None:
            system = self.context.conversation_prompt(await in_thread(self.context.shared_prompt), info.created_at)
            kept = conversation_of(system, *await read_shown(self.store, info))
        return measure.tokens(kept), measure.window, kept.summary is not None

    def _toolbox(self, claim: Claim, spec: TurnSpec, turn: Turn, own: Places) -> Toolbox:
        message, conversation = claim.message, turn.conversation
        channel, chat_id = message.origin
        outputs = outputs_folder(self.workspace.home, claim.owner, claim.key)

        def context(call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext:
            made = CallContext(
                owner=claim.owner,
                session=claim.key,
                turn=claim.turn,
                call=call.id,
                channel=channel,
                chat_id=chat_id,
                workspace=own.workspace,
                restricted=self.workspace.restricted,
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
                rounds_left=spec.limits.rounds - turn.progress.rounds,
                ends_at=spec.ends_at,
                sender=message.sender_id,
                scheduled=message.cron.job if message.cron is not None else "",
                may_schedule=message.cron is not None and message.cron.may_schedule,
                protected=own.protected,
                frozen=own.frozen,
                real_workspace=own.real_workspace,
                send=partial(self._send, claim, conversation, f"{claim.turn}/{call.id}"),
            )
            guard = self.policy.guard(made, call.name, call.arguments, partial(paths_of, self.tools, call, made))
            return made if guard is None else replace(made, guard=guard)

        grants = partial(self.store.grants, claim.owner, claim.key)
        tools = Tools(spec.tools, self.policy, context, message.attended, grants)
        if spec.run_calls is not None:
            return SteppedTools(tools, spec.run_calls)
        return tools if spec.ends_at is None else StoppableTools(tools)

    def _free_addresses(self, tools: ToolRegistry, conversation: Conversation) -> Free | None:
        """Return which image addresses an answer may contain; None for all.

        A client that brings its own tools also gets None: it is the agent itself, and receives the model's text
        unchanged.
        """
        conversation.described_outside = tools.described_outside
        if tools.described_outside:  # they may have been added while the turn ran
            conversation.untrusted = conversation.outside = True
        return None if isinstance(tools, ClientTools) else free_addresses(self.policy, conversation)

    async def _send(self, claim: Claim, conversation: Conversation, key: str, message: OutboundMessage) -> None:
        """Put a message of a running turn into the outbox and send it, once per call."""
        if (free := free_addresses(self.policy, conversation)) is not None:
            message = replace(message, content=plain_images(message.content, free))
        id = await self.store.post(claim, message, key, self.outbox.sender)
        if id is not None:
            self.tasks.start(self.outbox.hand_out(id, message))


class SessionLog:
    """The log of a claimed session. Its last append closes the turn and puts the answer into the outbox."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        session: Session,
        spec: TurnSpec,
        outbox: BusAdapter,
        notices: Notices | None,
    ) -> None:
        """`spec` is provisional until the turn's own has been read."""
        self.spec = spec
        self.turn: Turn | None = None  # once it is assembled
        self._store = store
        self._claim = claim
        self._session = session
        self._outbox = outbox
        self._sender = outbox.sender
        self._notices = notices
        self.incoming: Sequence[InboundMessage] = ()  # messages that follow from the turn's end
        self._took: list[int] = []
        self._outgoing: Sequence[OutboundMessage] = ()
        self._finished: Written[Finished] | None = None

    def append(self, entries: Sequence[Entry], flush: bool = True) -> Written[Any]:
        took, self._took = self._took, []
        if not isinstance(last := entries[-1], TurnEnded):
            return self._store.append(self._claim, entries, took, flush)
        self._outgoing, self.incoming = self._answer(last), self._following(last)
        if self._notices is not None:
            self._outgoing = [*self._outgoing, *self._notices.of_end(self._claim, last)]
        self._finished = self._store.finish(self._claim, entries, self._outgoing, self._sender, took, self.incoming)
        return self._finished

    def park(self, entries: Sequence[Entry], question: str) -> Written[Any]:
        took, self._took = self._took, []
        claim = self._claim
        asks = Question(claim.key, claim.next_seq + len(entries) - 1, claim.message.sender_id)
        self._outgoing = [replace(message, question=asks) for message in reply(claim.message, question)]
        if self._notices is not None:
            self._outgoing = [*self._outgoing, *self._notices.of_question(claim, question)]
        self._finished = self._store.park(self._claim, entries, self._outgoing, self._sender, took)
        return self._finished

    def _answer(self, ended: TurnEnded) -> Sequence[OutboundMessage]:
        """Return the messages to send when the turn ends.

        A turn that was stopped by /stop sends nothing if the chat gets the reply to that command. If the person's
        process has left the turn to this one, as a killed chat does, the answer waits in the outbox for the person's
        return.
        """
        message = self._claim.message
        if message.attended and message.by_a_person and self._outbox.is_unattended(self._claim):
            message = replace(message, reply=True)
        silent = message.cron is not None and message.cron.is_silent(ended.text)
        silent |= ended.reason == "replaced" or (ended.reason == "cancelled" and self._session.state.chat_told)
        return [] if silent else reply(message, ended.text)

    def _following(self, ended: TurnEnded) -> Sequence[InboundMessage]:
        """Return the messages that follow from the turn's end, each marked with the origin of its text."""
        conversation = self.turn.conversation if self.turn is not None else Conversation()
        messages = self.spec.follow(ended, conversation.untrusted)
        if not conversation.untrusted or conversation.outside:
            return messages
        return [replace(message, own_files=True) for message in messages]

    def steered(self) -> Sequence[UserSaid]:
        rows, said = self._session.steered()
        self._took += rows
        return said

    def outgoing(self) -> list[tuple[int, OutboundMessage]]:
        """Return the answer's outbox rows, once the turn is closed."""
        return [] if self._finished is None else list(zip(self._finished.result().outbox, self._outgoing, strict=True))

    @property
    def announced(self) -> bool:
        """Return whether sending processes know about the answer, once the turn is closed."""
        return self._finished is not None and self._finished.result().announced

    def more(self) -> bool:
        """Return whether the session has more to do, once the turn is closed."""
        return self._finished is None or self._finished.result().more


class FlushTimes:
    """Records the flush time of each turn's last write, which cannot contain it: in batches, later, and unflushed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seconds: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, row: int, seconds: float) -> None:
        """Record the flush time of the turn that this inbox row opened."""
        self._seconds[row] = self._seconds.get(row, 0.0) + round(seconds, 4)
        if self._task is None:
            self._task = asyncio.ensure_future(self._write_later())

    async def _write_later(self) -> None:
        try:
            await asyncio.sleep(NOTE_SECONDS)
        finally:
            self._task = None
        await self.write()

    async def write(self) -> None:
        """Write the recorded times. They are only informative: if the write fails, they are dropped."""
        seconds, self._seconds = self._seconds, {}
        if seconds:
            try:
                await self._store.note_flushes(seconds)
            except StoreError as error:
                log.warning("flush times could not be written: %s", error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.write()


class _StoreMarks(msgspec.Struct, frozen=True):
    """The marks of file contents that the agent wrote, kept in the store."""

    store: Store

    async def add(self, owner: str, marks: Sequence[Mark]) -> None:
        await self.store.mark_files(owner, [FileMark(*mark) for mark in marks])

    async def tainted(self, owner: str, digests: Sequence[str]) -> dict[str, bool]:
        return await self.store.file_marks(owner, digests)

    async def tainted_paths(self, owner: str) -> list[str]:
        return await self.store.tainted_paths(owner)


def _goes_on(claim: Claim, following: Sequence[InboundMessage]) -> bool:
    """Return whether the session can have another turn: false for a self-contained request and a finished agent."""
    if claim.message.task is not None:
        return any(message.session_key == claim.key for message in following)
    return (request := request_of(claim)) is None or request.kept
