"""The turn engine: decides the next step from a session's log, and runs it.

A turn is a function of its log. `Progress.next_action` (in actions.py) decides from the log alone; `run_turn` carries
out the decision, appends the outcome, and asks again. A restart is not a special case: read the log, ask, continue.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
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
    Progress,
    Refuse,
    Report,
    RunTools,
    failed_before,
)
from .errors import BudgetReached
from .log import (
    UNTIMED,
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
    extend_conversation,
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
    """Calls the model. With `emit`, the answer is streamed to it."""

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


class Review(msgspec.Struct, frozen=True):
    """The policy's verdict on calls before they run. Calls that are not listed may run."""

    asked: tuple[str, ...] = ()  # calls that need a person's approval
    question: str = ""
    denied: dict[str, str] = {}  # the model's result for each denied call, by call id
    grants: tuple[str, ...] = ()  # granted to the session if the person answers "always"
    once: tuple[str, ...] = ()  # granted even by a plain yes


class Toolbox(Protocol):
    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        """Decide whether these calls may run, before any of them does."""
        ...

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the calls that may start together now; at least one."""
        ...

    def replay_safe(self, name: str) -> bool:
        """Return whether an interrupted call of this tool can safely be run again."""
        ...

    def read_only(self, name: str) -> bool:
        """Return whether calls of this tool have no side effects."""
        ...

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> ToolResult:
        """Run one call. A failure is returned as a result; only cancellation is raised."""
        ...


class Log(Protocol):
    """The session's log, written under this worker's lease."""

    def append(self, entries: Sequence[Entry], flush: bool = True) -> Written[None]:
        """Write the entries in one transaction.

        Done once they are written, so that killing the process loses nothing; with `flush`, once they are flushed to
        disk. A `TurnEnded` closes the turn and is always flushed.
        """
        ...

    def park(self, entries: Sequence[Entry], question: str) -> Written[None]:
        """Write the entries, send the question to the chat and release the turn until it is answered."""
        ...

    def steered(self) -> Sequence[UserSaid]:
        """Return messages that arrived for the running turn since the last call."""
        ...


class Window(Protocol):
    """Keeps requests within the model's context window."""

    async def fit(self, turn: Turn, refused: ProviderError | None = None) -> bool:
        """Shorten the turn's conversation if necessary, before a model call or after the model `refused` one.

        Return whether anything was left out; what was is recorded in the log.
        """
        ...


class Sent(msgspec.Struct):
    """The parts of the last request that are not in the log, by hash; "" for those that are not stored."""

    prompt: str = ""
    tools: str = ""


class Turn:
    """A turn in progress: its entries, the conversation they continue, and its subscriber."""

    def __init__(
        self,
        id: str,
        entries: Sequence[Entry],
        conversation: Conversation,
        log: Log,
        emit: events.Emit | None = None,
        resumed_by: str = "",
    ) -> None:
        """`resumed_by` is the worker that resumes a turn which was started earlier."""
        self.id = id
        self.entries: list[Entry] = []
        self.conversation = conversation
        self.outcome: list[Entry] = []  # entries that have happened and are not on disk yet
        self.partial: list[str] = []  # text of an answer that is still streaming
        self.asked_at = self.first_at = 0.0  # start of the model call, and arrival of the first piece of its answer
        self.stopped: tuple[Reason, str] | None = None
        self.leaves = False  # another process takes over at the next step
        self.approved: set[str] = set()  # calls that a person has approved
        self.reviewed: set[str] = set()  # calls that the policy has seen
        self.running: dict[str, float] = {}  # in-flight calls and their start times
        self.sent = Sent()
        self.flushed = 0.0  # seconds spent on flushes that no entry has recorded yet
        self._emit = emit
        self._resumed_by = resumed_by
        self._log = log
        self._transcript = Transcript()
        self.progress = Progress()  # includes the outcome
        self._read = 0  # number of entries that it includes
        self._task: asyncio.Task[object] | None = None
        self.apply(entries)

    @property
    def has_subscriber(self) -> bool:
        return self._emit is not None

    def next_action(self, limits: Limits) -> Action:
        """Decide the next step from the entries and the outcome, of which each entry is read once."""
        log = [*self.entries, *self.outcome]
        for entry in log[self._read :]:
            self.progress.read(entry)
        self._read = len(log)
        return self.progress.next_action(limits)

    def stop(self, reason: Reason, text: str) -> None:
        """End the turn now: cancel its model call and its tools, and close its log."""
        if self.stopped is None:
            self.stopped = (reason, text)
            if self._task is not None:
                self._task.cancel()

    def leave(self) -> None:
        """Hand off the turn once the current step is on disk; the worker that takes it over runs the next one."""
        self.leaves = True

    def subscribe(self, emit: events.Emit) -> None:
        """Forward the events from now on to `emit`, unless they are forwarded already."""
        if self._emit is None:
            self._emit = emit

    def tell(self, event: events.Event) -> None:
        """Forward an event to the subscriber, if there is one."""
        if self._emit is not None:
            self._emit(event)

    def show(self, event: events.Event) -> None:
        """Forward an event of the streamed answer, and keep its text in case the turn is stopped midway."""
        if not self.first_at:
            self.first_at = time.monotonic()
        if isinstance(event, events.Text):
            self.partial.append(event.text)
        elif isinstance(event, events.Restarted):
            self.partial.clear()
        if self._emit is not None:
            self._emit(event)

    def start_model_call(self) -> None:
        """Note that a model call starts now."""
        self.partial.clear()
        self.asked_at, self.first_at = time.monotonic(), 0.0

    def timed(self, answered: ModelAnswered) -> ModelAnswered:
        """Add timings to an answer, complete or partial, and mark it untrusted if the model saw external descriptions.

        Descriptions of external tools are in no entry, so the log must record the fact: the tools may be gone later.
        """
        seconds = round(time.monotonic() - self.asked_at, 4) or UNTIMED
        first = round(self.first_at - self.asked_at, 4) if self.first_at else UNTIMED
        # An answer that arrived in one piece at the end was not streamed.
        first = first if seconds - first > 0.001 else UNTIMED
        outside = self.conversation.described_outside
        flushed, worker = self.stamp()
        return replace(
            answered,
            seconds=seconds,
            first_token=first,
            untrusted=outside,
            flushed=flushed,
            worker=worker,
            prompt=self.sent.prompt,
            tools=self.sent.tools,
        )

    def stamp(self) -> tuple[float, str]:
        """Return the flush time of the last step and the worker that resumed the turn, for the next entry.

        That entry is written anyway, so this costs no extra write.
        """
        told, self.flushed, self._resumed_by = (round(self.flushed, 4) or UNTIMED, self._resumed_by), 0.0, ""
        return told

    def steered(self) -> Sequence[UserSaid]:
        return self._log.steered()

    async def append(self, *further: Entry, flush: bool = True) -> None:
        """Write the outcome and the entries that follow from it.

        Without `flush`, a power loss may undo the write: use that only for steps that are harmless to repeat. An
        in-flight write is awaited even if the turn is being stopped: the turn must never differ from what is written.
        """
        entries, self.outcome = [*self.outcome, *further], []
        if entries:
            began = time.monotonic()
            await self._written(self._log.append(entries, flush), entries)
            if flush:
                self.flushed += time.monotonic() - began

    async def park(self, question: str) -> None:
        """Write the outcome and release the turn until the question is answered."""
        entries, self.outcome = self.outcome, []
        self.reviewed.clear()  # the rules may have changed by the time it resumes
        began = time.monotonic()
        await self._written(self._log.park(entries, question), entries)
        self.flushed += time.monotonic() - began

    def apply(self, entries: Sequence[Entry]) -> None:
        """Take in entries that have been written."""
        for entry in entries:
            self.entries.append(entry)
            extend_conversation(self.conversation, self._transcript, entry)
            if isinstance(entry, CallsDecided) and entry.allowed:
                self.approved.update(entry.ids)

    async def _written(self, written: Written[None], entries: Sequence[Entry]) -> None:
        try:
            await written
        finally:
            if written.done() and written.exception() is None:
                self.apply(entries)


# ---------------------------------------------------------------------------------------------- the loop


class Parked(msgspec.Struct, frozen=True):
    """The turn waits on disk for a person's answer; nothing of it is left in memory."""

    question: str


class Left(msgspec.Struct, frozen=True):
    """The turn is open and entirely on disk; another process runs its next step."""


Ending = TurnEnded | Parked | Left


async def run_turn(
    turn: Turn, model: Model, toolbox: Toolbox, limits: Limits = DEFAULT_LIMITS, window: Window | None = None
) -> Ending:
    """Run the open turn until it ends, parks for a question, or, after `turn.leave`, finishes its current step.

    It starts from whatever state the log is in. If it is cancelled without `turn.stop`, because the process is shutting
    down, the turn stays open and the next start resumes it.
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
        if turn.stopped is not None:  # a tool or a provider swallowed the cancellation
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        action = _decide(turn, limits)
        if turn.leaves and isinstance(action, CallModel | RunTools):
            await turn.append(flush=False)
            return Left()
        # The decision is pure, so the outcome of one step and the intent of the next share one write.
        match action:
            case CallModel():
                if turn.outcome:
                    # unflushed tool results: after a power loss their calls are run again, or reported
                    await turn.append(flush=False)
                    await asyncio.sleep(0)  # let other tasks run, even if neither the disk nor the model makes us wait
                if window is not None:
                    await window.fit(turn)
                if (failed := await _call_model(turn, model, limits, window)) is not None:
                    return await _end(turn, failed)
            case RunTools(calls):
                if await _may_run(turn, toolbox, calls):  # otherwise the policy's verdict decides the next step
                    await _run_tools(turn, toolbox, toolbox.batch(calls))
            case Hand(calls):
                turn.outcome += [CallEnded(call.id, call.name, HANDED) for call in calls]
            case Report(calls):
                turn.outcome += [_reported(turn, call) for call in calls]
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
    action = turn.next_action(limits)
    if _will_call_model(action, turn, limits) and (said := turn.steered()):
        turn.outcome += said
        for message in said:
            turn.tell(events.Steered(message.content if isinstance(message.content, str) else "(attachment)"))
        return turn.next_action(limits)
    return action


def _will_call_model(action: Action, turn: Turn, limits: Limits) -> bool:
    """Return whether the model would still see a further message; if not, it is left for the next turn."""
    return isinstance(action, CallModel) or (isinstance(action, Finish) and turn.progress.has_round_for_message(limits))


async def _may_run(turn: Turn, toolbox: Toolbox, calls: Sequence[Call]) -> bool:
    """Have the policy review the calls of a round before any of them runs; its objections become outcomes."""
    unseen = [call for call in calls if call.id not in turn.reviewed]
    review = await toolbox.review(unseen, turn.conversation) if unseen else Review()
    turn.reviewed.update(call.id for call in unseen)
    turn.outcome += [_refused(turn, call, review.denied[call.id]) for call in unseen if call.id in review.denied]
    asked = tuple(id for id in review.asked if id not in turn.approved)  # approval does not override a denial by a rule
    if asked:
        turn.outcome.append(CallsAsked(asked, review.question, review.grants, review.once))
    return not asked and not review.denied


def _reported(turn: Turn, call: Call) -> CallEnded:
    """Return the result of a call that an earlier process had begun, and that must not be repeated."""
    turn.tell(events.ToolStarted(call.id, call.name, call.arguments))
    turn.tell(events.ToolEnded(call.id, call.name, INTERRUPTED, "interrupted", 0.0))
    return CallEnded(call.id, call.name, INTERRUPTED, "interrupted")


def _refused(turn: Turn, call: Call, content: str) -> CallEnded:
    """Return the result of a call that was denied."""
    repeats = failed_before([*turn.entries, *turn.outcome], call)
    turn.tell(events.ToolStarted(call.id, call.name, call.arguments))
    turn.tell(events.ToolEnded(call.id, call.name, content, "denied", 0.0))
    return CallEnded(call.id, call.name, clean(content), "denied", repeats=repeats)


async def _call_model(turn: Turn, model: Model, limits: Limits, window: Window | None) -> TurnEnded | None:
    """Call the model and add its answer to the outcome.

    Return the end of the turn if the call failed; None after an answer, or if the call must be repeated with a shorter
    conversation.
    """
    turn.start_model_call()
    try:
        response = await model(turn.conversation, turn.show if turn.has_subscriber else None)
        answered = entry_of(response, turn.id, turn.conversation.call_ids, limits.calls)
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        if turn.stopped is not None:  # the error was caused by the cancellation, not by the model
            return None
        if isinstance(error, BudgetReached):
            return TurnEnded("budget", clean(str(error)))
        if isinstance(error, ProviderError) and window is not None and await window.fit(turn, error):
            return None
        if not isinstance(error, ProviderError):  # a bug in the provider's code: log the traceback for its author
            trace = clean("".join(traceback.format_exception(error)))
            logger.warning("the model call of turn %s failed\n%s", turn.id, trace)
        what = repr(error) if isinstance(error, LookupError) else clean(str(error)) or type(error).__name__
        turn.tell(events.Error(what))
        status = getattr(error, "status", None)  # a library's own exception may have any type here
        return TurnEnded.failed(what, int(status) if isinstance(status, int) else 0)
    turn.outcome.append(turn.timed(answered))
    turn.partial.clear()
    if answered.usage:
        turn.tell(events.Usage(answered.usage))
    return None


async def _run_tools(turn: Turn, toolbox: Toolbox, calls: Sequence[Call]) -> None:
    """Run the calls concurrently. Each result is written as it arrives, the last one together with the next step."""
    unsafe = tuple(call.id for call in calls if not toolbox.replay_safe(call.name))
    # Calls that are made idempotent by their id need the flush too: asked again, the model would generate a different
    # id.
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
        turn.outcome.append(ended)  # look up `outcome` now: another call's write may have replaced the list
        running -= 1
        if running:
            await turn.append(flush=False)

    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(one(call))
    except BaseExceptionGroup as failed:  # a write was refused; one such error is enough
        raise failed.exceptions[0] from None


async def _run_call(turn: Turn, toolbox: Toolbox, call: Call) -> CallEnded:
    turn.tell(events.ToolStarted(call.id, call.name, call.arguments))
    turn.running[call.id] = time.monotonic()
    progress = partial(_progress, turn, call.id)
    result = await toolbox.run(call, progress, call.id in turn.approved)
    seconds = round(time.monotonic() - turn.running.pop(call.id), 4) or UNTIMED
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
    """End a turn that is not running with an error, whatever its state.

    Entries that were not yet written are dropped.
    """
    turn.outcome.clear()
    turn.partial.clear()
    turn.stopped = ("error", apology(error))
    return await _close(turn, error)


async def _close(turn: Turn, error: str = "") -> TurnEnded:
    """Close a stopped turn: completed steps are kept, and every open call gets a result that says it was stopped."""
    assert turn.stopped is not None
    if turn.entries and isinstance(ended := turn.entries[-1], TurnEnded):  # it had just ended
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
    """Convert a response to a log entry that is valid whatever the provider returned.

    Its calls get ids that are distinct from each other and from those in `used`; calls beyond `limit` are not run.
    """
    if not hasattr(response, "tool_calls"):
        raise TypeError(f"the provider returned a {type(response).__name__} and not an LLMResponse")
    for part in ("content", "reasoning"):
        if not isinstance(value := getattr(response, part), str | None):
            raise TypeError(
                f"the provider returned an LLMResponse whose {part} is a {type(value).__name__}, not a text"
            )
    calls: list[Call] = []
    mine: set[str] = set()
    for number, request in enumerate(response.tool_calls or ()):
        if not hasattr(request, "arguments"):
            raise TypeError(f"the provider returned a call that is a {type(request).__name__}, not a ToolCallRequest")
        id = clean(str(request.id or ""))
        while not id or id in used or id in mine:
            id, number = f"{turn}_{len(used) + number}", number + 1
        mine.add(id)
        arguments, error = _arguments(request)
        if len(calls) >= limit:
            error = f"at most {limit} calls in one answer are run; make the others in the next round"
        calls.append(Call(id, _tool_name(str(request.name or "")), arguments, error))
    return ModelAnswered(
        content=clean(response.content) if response.content else None,
        calls=tuple(calls),
        reasoning=clean(response.reasoning) if response.reasoning else None,
        finish_reason=_short_text(response.finish_reason) or "stop",
        usage=counts(response),
        model=_short_text(response.model),
        logprobs=tuple(getattr(response, "logprobs", ())),
        failures=tuple(getattr(response, "failures", ())),
    )


def _short_text(value: Any) -> str:
    """Return a short provider field as text; it may be a number or an enum of the provider's library."""
    return clean(str.__str__(value) if isinstance(value, str) else str(value)) if value else ""


def _arguments(request: ToolCallRequest) -> tuple[dict[str, Any], str | None]:
    """Return a call's arguments if they can be stored, and the error in them if there is one."""
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
    """Return a name that model APIs accept, even if the model made it up."""
    return name if TOOL_NAME.fullmatch(name) else NOT_IN_TOOL_NAME.sub("_", name)[:64] or "unknown"
