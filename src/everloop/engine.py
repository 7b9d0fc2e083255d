"""The turn engine: what a session's log says should happen next, and the loop that makes it happen.

A turn is a function of its log. `next_action` (in actions.py) decides from the log alone; `run_turn` does what it
says, appends the outcome, and asks again. A restart is nothing special: read the log, ask, go on.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from . import events
from .actions import (
    DEFAULT_LIMITS,
    FAILED,
    Action,
    CallModel,
    Finish,
    Hand,
    Idle,
    Limits,
    Park,
    Refuse,
    Report,
    RunTools,
    failed_before,
    next_action,
)
from .errors import BudgetReached
from .log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Entry,
    ModelAnswered,
    Reason,
    Status,
    Transcript,
    TurnEnded,
    UserSaid,
    Written,
    apology,
    hear,
)
from .messages import Conversation, encode_json
from .providers.base import LLMResponse, ProviderError, ToolCallRequest, counts
from .text import clean

logger = logging.getLogger(__name__)

INTERRUPTED = "interrupted, outcome unknown: check before you retry"
CANCELLED = "stopped while it was running, outcome unknown: check before you retry"
NOT_STARTED = "stopped before it started"
STOPPED_AS: dict[Reason, Status] = {"timeout": "timeout", "aborted": "aborted"}  # any other reason: "cancelled"
HANDED = "handed to the client, which runs it; its result comes with the next message"
REFUSED = "not run: the person who was asked said no. Do not try to reach the same by other means."

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NOT_IN_TOOL_NAME = re.compile(r"[^A-Za-z0-9_-]")

# ---------------------------------------------------------------------------------------------- the ports


class Model(Protocol):
    """Asks the model. With `emit` the answer is streamed to it as it comes."""

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse: ...


class ToolResult(Protocol):
    @property
    def content(self) -> str: ...

    @property
    def status(self) -> Status: ...

    @property
    def untrusted(self) -> bool: ...

    @property
    def images(self) -> tuple[str, ...]: ...

    @property
    def own_files(self) -> bool: ...


@dataclass(slots=True, frozen=True)
class Review:
    """What the policy says of calls before they run; those that are not named here may run."""

    asked: tuple[str, ...] = ()  # a person must be asked for these
    question: str = ""
    denied: dict[str, str] = field(default_factory=dict)  # the result that the model gets, by call
    grants: tuple[str, ...] = ()  # what the session is granted when the person answers "always"
    once: tuple[str, ...] = ()  # what it is granted by a plain yes already


class Toolbox(Protocol):
    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        """Decide whether these calls may run, before any of them does."""
        ...

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Which of these calls start together now; at least one."""
        ...

    def replay_safe(self, name: str) -> bool:
        """Whether a call of this tool that was cut off may simply be run again."""
        ...

    def read_only(self, name: str) -> bool:
        """Whether a call of this tool changes nothing anywhere."""
        ...

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        """Run one call. A failure is a result; only cancellation is raised."""
        ...


class Log(Protocol):
    """The session's log, under this worker's lease."""

    def append(self, entries: Sequence[Entry], flush: bool = True) -> Written[None]:
        """Write the entries in one transaction; done when they are written, so that a killed process loses nothing, and
        with `flush` when they are on disk. A `TurnEnded` closes the turn and is always flushed."""
        ...

    def park(self, entries: Sequence[Entry], question: str) -> Written[None]:
        """Write the entries, put the question to the chat and let go of the turn until it is answered."""
        ...

    def steered(self) -> Sequence[UserSaid]:
        """Messages that came in for the running turn since the last time."""
        ...


class Window(Protocol):
    """Sees to it that what the model is sent fits the model's window."""

    async def fit(self, turn: Turn, refused: ProviderError | None = None) -> bool:
        """Before the model is asked, or after it `refused`: leave something out of the turn's conversation if it must
        be. Whether something was left out; what is, is in the log."""
        ...


class Turn:
    """A turn under way: its entries, the conversation they continue, and who watches."""

    def __init__(
        self,
        id: str,
        entries: Sequence[Entry],
        conversation: Conversation,
        log: Log,
        emit: events.Emit | None = None,
        resumed_by: str = "",
    ) -> None:
        """`resumed_by` is the worker that goes on with a turn which was begun before."""
        self.id = id
        self.entries: list[Entry] = []
        self.conversation = conversation
        self.emit = emit
        self.outcome: list[Entry] = []  # what has happened and is not on disk yet
        self.partial: list[str] = []  # text of an answer that is still coming
        self.asked_at = self.first_at = 0.0  # when the model was asked, and when the first piece of its answer came
        self.stopped: tuple[Reason, str] | None = None
        self.leaves = False  # another process is to go on with it from the next step on
        self.approved: set[str] = set()  # calls that a person has allowed
        self.reviewed: set[str] = set()  # calls that the policy has seen
        self.running: dict[str, float] = {}  # calls under way, and since when
        self.flushed = 0.0  # seconds of waiting for the disk that no entry tells of yet
        self._resumed_by = resumed_by
        self._log = log
        self._transcript = Transcript()
        self._task: asyncio.Task[object] | None = None
        self.know(entries)

    def stop(self, reason: Reason, text: str) -> None:
        """End the turn now: its model call and its tools are cancelled, its log is closed."""
        if self.stopped is None:
            self.stopped = (reason, text)
            if self._task is not None:
                self._task.cancel()

    def leave(self) -> None:
        """Let go of the turn once the step that runs is on disk; the worker that takes it up goes on with the next."""
        self.leaves = True

    def tell(self, event: events.Event) -> None:
        if self.emit is not None:
            self.emit(event)

    def show(self, event: events.Event) -> None:
        """Pass on an event of the streamed answer, and keep its text in case the turn is stopped in the middle."""
        if not self.first_at:
            self.first_at = time.monotonic()
        if isinstance(event, events.Text):
            self.partial.append(event.text)
        elif isinstance(event, events.Restarted):
            self.partial.clear()
        if self.emit is not None:
            self.emit(event)

    def asks(self) -> None:
        """The model is asked now."""
        self.partial.clear()
        self.asked_at, self.first_at = time.monotonic(), 0.0

    def timed(self, answered: ModelAnswered) -> ModelAnswered:
        """The answer that has just come, or what there is of it, with how long it took and whether the model was shown
        text from outside that is in no entry: the log must say so when the tools are gone."""
        seconds = round(time.monotonic() - self.asked_at, 4)
        first = round(self.first_at - self.asked_at, 4) if self.first_at else 0.0
        # What came in one piece at the end was not streamed.
        first = first if seconds - first > 0.001 else 0.0
        outside = self.conversation.described_outside
        flushed, worker = self.stamp()
        return replace(answered, seconds=seconds, first_token=first, untrusted=outside, flushed=flushed, worker=worker)

    def stamp(self) -> tuple[float, str]:
        """What the next entry tells of the step before it: the time of its flush, and the worker that has resumed the
        turn. The entry is written anyway, so that this costs no write."""
        told, self.flushed, self._resumed_by = (round(self.flushed, 4), self._resumed_by), 0.0, ""
        return told

    def steered(self) -> Sequence[UserSaid]:
        return self._log.steered()

    async def append(self, *further: Entry, flush: bool = True) -> None:
        """Write the outcome, and what follows from it.

        Without `flush` a power loss may undo it: that is for steps that can be repeated without harm. A write that is
        under way is waited for even when the turn is being stopped: what is written and what the turn knows must never
        differ.
        """
        entries, self.outcome = [*self.outcome, *further], []
        if entries:
            began = time.monotonic()
            await self._written(self._log.append(entries, flush), entries)
            if flush:
                self.flushed += time.monotonic() - began

    async def park(self, question: str) -> None:
        """Put the outcome on disk and let go of the turn until the question is answered."""
        entries, self.outcome = self.outcome, []
        self.reviewed.clear()  # the rules may be others when it goes on
        await self._written(self._log.park(entries, question), entries)

    def know(self, entries: Sequence[Entry]) -> None:
        """Take in what is on disk."""
        for entry in entries:
            self.entries.append(entry)
            hear(self.conversation, self._transcript, entry)
            if isinstance(entry, CallsDecided) and entry.allowed:
                self.approved.update(entry.ids)

    async def _written(self, written: Written[None], entries: Sequence[Entry]) -> None:
        try:
            await written
        finally:
            if written.done() and written.exception() is None:
                self.know(entries)


# ---------------------------------------------------------------------------------------------- the loop


@dataclass(slots=True, frozen=True)
class Parked:
    """The turn waits for a person's word, on disk; nothing of it is left in memory."""

    question: str


@dataclass(slots=True, frozen=True)
class Left:
    """The turn is open and all of it on disk: its next step is for another process."""


Ending = TurnEnded | Parked | Left


async def run_turn(
    turn: Turn, model: Model, toolbox: Toolbox, limits: Limits = DEFAULT_LIMITS, window: Window | None = None
) -> Ending:
    """Take the open turn to its end, or to where a person must be asked, from wherever its log says it is; or, told to
    leave it, to the end of the step that runs.

    Cancelled without `turn.stop` (the process is going down) it leaves the turn open: the next start goes on.
    """
    turn._task = asyncio.current_task()
    try:
        if turn.stopped is not None:
            return await _close(turn)
        return await _steps(turn, model, toolbox, limits, window)
    except asyncio.CancelledError:
        if turn.stopped is None or turn._task is None:
            raise
        turn._task.uncancel()
        return await _close(turn)
    finally:
        turn._task = None


async def _steps(turn: Turn, model: Model, toolbox: Toolbox, limits: Limits, window: Window | None) -> Ending:
    while True:
        if turn.stopped is not None:  # a tool or a provider has kept the cancellation to itself
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        action = _decide(turn, limits)
        if turn.leaves and isinstance(action, CallModel | RunTools):
            await turn.append(flush=False)
            return Left()
        # The choice is pure, so the outcome of one step and the intent of the next are one write.
        match action:
            case CallModel():
                if turn.outcome:
                    await turn.append(flush=False)  # after a power loss these calls are run again, or reported
                    await asyncio.sleep(0)  # other tasks get their turn, though neither the disk nor the model may wait
                if window is not None:
                    await window.fit(turn)
                if (failed := await _call_model(turn, model, limits, window)) is not None:
                    return await _end(turn, failed)
            case RunTools(calls):
                if await _may_run(turn, toolbox, calls):  # else what the policy said decides what comes next
                    await _run_tools(turn, toolbox, toolbox.batch(calls))
            case Hand(calls):
                turn.outcome += [CallEnded(call.id, call.name, HANDED) for call in calls]
            case Report(calls):
                turn.outcome += [CallEnded(call.id, call.name, INTERRUPTED, "interrupted") for call in calls]
            case Refuse(calls, note):
                reason = f" Their words: {note}" if note else ""
                turn.outcome += [_refused(turn, call, REFUSED + reason) for call in calls]
            case Park(calls, question):
                await turn.park(question)
                turn.tell(events.Asked(turn.id, tuple(call.id for call in calls), question))
                return Parked(question)
            case Finish(reason, text):
                return await _end(turn, TurnEnded(reason, text))
            case Idle():
                raise ValueError(f"turn {turn.id} has no open entries")


def _decide(turn: Turn, limits: Limits) -> Action:
    action = next_action([*turn.entries, *turn.outcome], limits)
    if _model_may_be_asked(action, turn, limits) and (said := turn.steered()):
        turn.outcome += said
        for message in said:
            turn.tell(events.Steered(message.content if isinstance(message.content, str) else "(attachment)"))
        return next_action([*turn.entries, *turn.outcome], limits)
    return action


def _model_may_be_asked(action: Action, turn: Turn, limits: Limits) -> bool:
    """Whether a further message would still be shown to the model; if not it is left to the next turn."""
    if isinstance(action, Finish):
        action = next_action([*turn.entries, *turn.outcome, UserSaid("")], limits)
    return isinstance(action, CallModel)


async def _may_run(turn: Turn, toolbox: Toolbox, calls: Sequence[Call]) -> bool:
    """Show the policy the calls of a round before any of them runs; what it objects to is an outcome."""
    unseen = [call for call in calls if call.id not in turn.reviewed]
    review = await toolbox.review(unseen, turn.conversation) if unseen else Review()
    turn.reviewed.update(call.id for call in unseen)
    turn.outcome += [_refused(turn, call, review.denied[call.id]) for call in unseen if call.id in review.denied]
    asked = tuple(
        id for id in review.asked if id not in turn.approved
    )  # a person's yes does not lift a no of the rules
    if asked:
        turn.outcome.append(CallsAsked(asked, review.question, review.grants, review.once))
    return not asked and not review.denied


def _refused(turn: Turn, call: Call, content: str) -> CallEnded:
    """The result of a call that may not run."""
    repeats = failed_before([*turn.entries, *turn.outcome], call)
    turn.tell(events.ToolStarted(call.id, call.name, call.arguments))
    turn.tell(events.ToolEnded(call.id, call.name, content, "denied", 0.0))
    return CallEnded(call.id, call.name, clean(content), "denied", repeats=repeats)


async def _call_model(turn: Turn, model: Model, limits: Limits, window: Window | None) -> TurnEnded | None:
    """Ask the model; its answer is an outcome. Where there is none, what is given back ends the turn; where something
    had to be left out first, the model is to be asked again."""
    turn.asks()
    try:
        response = await model(turn.conversation, turn.show if turn.emit else None)
        answered = entry_of(response, turn.id, turn.conversation.call_ids, limits.calls)
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        if turn.stopped is not None:  # what came of the cancellation is no fault of the model's
            return None
        if isinstance(error, BudgetReached):
            return TurnEnded("budget", clean(str(error)))
        if isinstance(error, ProviderError) and window is not None and await window.fit(turn, error):
            return None
        if not isinstance(error, ProviderError):  # a fault of the provider's code: its author wants to see where
            trace = clean("".join(traceback.format_exception(error)))
            logger.warning("the model call of turn %s failed\n%s", turn.id, trace)
        what = repr(error) if isinstance(error, LookupError) else clean(str(error)) or type(error).__name__
        turn.tell(events.Error(what))
        status = getattr(error, "status", None)  # of a library's own error it may be anything
        return TurnEnded.failed(what, int(status) if isinstance(status, int) else 0)
    turn.outcome.append(turn.timed(answered))
    turn.partial.clear()
    if answered.usage:
        turn.tell(events.Usage(answered.usage))
    return None


async def _run_tools(turn: Turn, toolbox: Toolbox, calls: Sequence[Call]) -> None:
    """Run the calls side by side. Each result goes to disk as it comes; the last one with what follows from it."""
    unsafe = tuple(call.id for call in calls if not toolbox.replay_safe(call.name))
    # A call that is repeated by its id needs the flush too: the model, asked again, would give it another id.
    flush = not all(toolbox.read_only(call.name) for call in calls)
    await turn.append(*([CallsBegun(unsafe)] if unsafe else []), flush=flush)
    if len(calls) == 1:
        ended = await _run_call(turn, toolbox, calls[0])
        turn.outcome.append(ended)
        return
    running = len(calls)

    async def one(call: Call) -> None:
        nonlocal running
        ended = await _run_call(turn, toolbox, call)
        turn.outcome.append(ended)  # the list of now: another call's write has taken the one of before
        running -= 1
        if running:
            await turn.append(flush=False)

    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(one(call))
    except BaseExceptionGroup as failed:  # a write was refused: one such error says it all
        raise failed.exceptions[0] from None


async def _run_call(turn: Turn, toolbox: Toolbox, call: Call) -> CallEnded:
    turn.tell(events.ToolStarted(call.id, call.name, call.arguments))
    turn.running[call.id] = time.monotonic()
    progress = partial(_progress, turn, call.id)
    result = await toolbox.run(call, progress, call.id in turn.approved)
    seconds = round(time.monotonic() - turn.running.pop(call.id), 4)
    repeats = failed_before([*turn.entries, *turn.outcome], call) if result.status in FAILED else 0
    content = clean(result.content)
    flushed, worker = turn.stamp()
    ended = CallEnded(
        call.id,
        call.name,
        content,
        result.status,
        seconds,
        result.untrusted,
        result.images,
        repeats,
        own_files=result.own_files,
        flushed=flushed,
        worker=worker,
    )
    turn.tell(events.ToolEnded(ended.id, ended.name, ended.content, ended.status, seconds))
    return ended


def _progress(turn: Turn, call: str, text: str) -> None:
    turn.tell(events.ToolProgress(call, text))


async def fail_turn(turn: Turn, error: str) -> TurnEnded:
    """End a turn that is not running with an error, whatever state it is in. What was not on disk yet is dropped."""
    turn.outcome.clear()
    turn.partial.clear()
    turn.stopped = ("error", apology(error))
    return await _close(turn, error)


async def _close(turn: Turn, error: str = "") -> TurnEnded:
    """End a turn that was stopped: what had happened stays, and every call gets a result that says so."""
    assert turn.stopped is not None
    if turn.entries and isinstance(ended := turn.entries[-1], TurnEnded):  # it was just over
        turn.tell(events.TurnEnded(turn.id, ended.reason, ended.text))
        return ended
    if turn.partial:
        turn.outcome.append(turn.timed(ModelAnswered(content="".join(turn.partial), finish_reason="cancelled")))
        turn.partial.clear()
    log = [*turn.entries, *turn.outcome]
    begun = {id for entry in log if isinstance(entry, CallsBegun) for id in entry.ids}
    over = {entry.id for entry in log if isinstance(entry, CallEnded)}
    status = STOPPED_AS.get(turn.stopped[0], "cancelled")
    for call in (call for entry in log if isinstance(entry, ModelAnswered) for call in entry.calls):
        if call.id not in over:
            since = turn.running.pop(call.id, None)
            content = CANCELLED if call.id in begun or since is not None else NOT_STARTED
            seconds = round(time.monotonic() - since, 4) if since is not None else 0.0
            turn.outcome.append(CallEnded(call.id, call.name, content, status, seconds))
            turn.tell(events.ToolEnded(call.id, call.name, content, status, seconds))
    return await _end(turn, TurnEnded(*turn.stopped, error=error))


async def _end(turn: Turn, ended: TurnEnded) -> TurnEnded:
    await turn.append(ended)
    turn.tell(events.TurnEnded(turn.id, ended.reason, ended.text))
    return ended


# ---------------------------------------------------------------------------------------------- answers as log entries


def entry_of(response: LLMResponse, turn: str, used: Collection[str], limit: int) -> ModelAnswered:
    """The log entry of an answer, valid whatever a provider returned.

    Its calls have ids that differ from each other and from those in `used`; calls beyond `limit` are not run.
    """
    if not hasattr(response, "tool_calls"):
        raise TypeError(f"the provider returned a {type(response).__name__} and not an LLMResponse")
    calls: list[Call] = []
    mine: set[str] = set()
    for number, request in enumerate(response.tool_calls or ()):
        id = clean(str(request.id or ""))
        while not id or id in used or id in mine:
            id, number = f"{turn}_{len(used) + number}", number + 1
        mine.add(id)
        arguments, error = _arguments(request)
        if len(calls) >= limit:
            error = f"at most {limit} calls in one answer are run; make the others in the next round"
        calls.append(Call(id, _tool_name(request.name), arguments, error))
    return ModelAnswered(
        content=clean(response.content) if response.content else None,
        calls=tuple(calls),
        reasoning=clean(response.reasoning) if response.reasoning else None,
        finish_reason=_short_text(response.finish_reason) or "stop",
        usage=counts(response),
        model=_short_text(response.model),
        logprobs=tuple(getattr(response, "logprobs", ())),
    )


def _short_text(value: Any) -> str:
    """A short text of the provider, which may be a number or an enum of its library."""
    return clean(str.__str__(value) if isinstance(value, str) else str(value)) if value else ""


def _arguments(request: ToolCallRequest) -> tuple[dict[str, Any], str | None]:
    """A call's arguments if they can be stored, and what is wrong with them."""
    arguments: Any = request.arguments
    try:
        if isinstance(arguments, dict):
            encode_json(arguments)
            return arguments, request.error
        problem = f"they must be an object, not {type(arguments).__name__}"
    except Exception as error:
        problem = clean(str(error))
    return {}, request.error or problem


def _tool_name(name: str) -> str:
    """A name that model APIs accept, even if the model invented it."""
    return name if TOOL_NAME.fullmatch(name) else NOT_IN_TOOL_NAME.sub("_", name)[:64] or "unknown"
