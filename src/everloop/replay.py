"""Replay a recorded turn through the real engine, without a model, tools or a store.

The model returns the recorded answers and the tools return the recorded results; the engine must then reproduce the
recorded turn, step by step. Intents, timings and compactions are ignored: they record when and how, not what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from . import events
from .actions import DEFAULT_LIMITS, Limits
from .engine import INTERRUPTED, REFUSED, Parked, Review, Turn, run_turn
from .log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Compacted,
    Entry,
    ModelAnswered,
    Status,
    TurnEnded,
    UserSaid,
    Written,
    messages_of,
)
from .messages import Conversation
from .providers.base import LLMResponse, ToolCallRequest

# Turns that end for one of these reasons were stopped from outside, at a moment that no log can reproduce.
CUT = frozenset({"cancelled", "timeout", "aborted", "replaced", "budget", "error", "abandoned"})


@dataclass(slots=True, frozen=True)
class Difference:
    """The first step (from 1) at which the recording and the engine diverge, and what each of them has there."""

    step: int
    recorded: Entry | None
    replayed: Entry | None
    why: str


@dataclass(slots=True)
class Replayed:
    """The result of a replay. `cut` says why the recording could only be followed this far."""

    steps: list[Entry] = field(default_factory=list)
    difference: Difference | None = None
    cut: str = ""

    @property
    def same(self) -> bool:
        return self.difference is None


async def replay(entries: Iterable[Entry], history: Iterable[Entry] = ()) -> Replayed:
    """Replay a turn from its recorded entries; `history` is the part of its conversation that precedes it."""
    recorded = [entry for entry in entries if not isinstance(entry, CallsBegun | Compacted)]
    if not recorded or not isinstance(first := recorded[0], UserSaid):
        first_entry = recorded[0] if recorded else None
        return Replayed(difference=Difference(1, first_entry, None, "a turn begins with a user's message"))
    kept, cut = _until_cut(recorded)
    recording = _Recording(kept, ends=not cut)
    conversation = Conversation(messages_of(history))
    # the recorded ids were free, including those of calls that had been compacted away by then
    conversation.call_ids.clear()
    turn = Turn("replay", [first], conversation, recording)
    found: Difference | None = None
    try:
        while isinstance(await run_turn(turn, recording.model, recording, _limits(kept)), Parked):
            turn.apply(recording.decision())
    except _RecordingEnded:
        pass
    except _Divergence as divergence:
        found = Difference(recording.at + 1, recording.next, None, str(divergence))
    produced = [first, *recording.written, *turn.outcome]
    if cut:  # what the engine would do next is not recorded
        produced = produced[: len(kept)]
    found = _compare(kept, produced, complete=found is None and not cut) or found
    return Replayed(produced[: found.step - 1] if found else produced, found, cut)


def _until_cut(recorded: Sequence[Entry]) -> tuple[Sequence[Entry], str]:
    """Return the part of a turn that can be replayed, and why the rest cannot."""
    last = recorded[-1]
    if not isinstance(last, TurnEnded):
        return recorded, "it has not ended"
    if last.reason not in CUT:
        return recorded, ""
    end = len(recorded) - 1
    while end > 1 and _belongs_to_cut(recorded[end - 1]):
        end -= 1
    return recorded[:end], f"it ended with “{last.reason}”"


def _belongs_to_cut(entry: Entry) -> bool:
    match entry:
        case CallEnded(status="cancelled" | "timeout" | "aborted") | ModelAnswered(finish_reason="cancelled"):
            return True
        case _:
            return False


def _limits(recorded: Sequence[Entry]) -> Limits:
    """Reconstruct the limits, which are not in the log.

    The limit of rounds is as many as the turn took, plus one if they did not end it.
    """
    rounds = sum(isinstance(entry, ModelAnswered) for entry in recorded)
    last = recorded[-1]
    if isinstance(last, TurnEnded) and last.reason == "empty":
        answers = [entry for entry in recorded if isinstance(entry, ModelAnswered)]
        empty = len(list(takewhile(lambda answer: answer.empty, reversed(answers))))
        return Limits(rounds=max(rounds + 1, DEFAULT_LIMITS.rounds), empty_answers=max(empty, 1))
    if isinstance(last, TurnEnded) and last.reason == "max_rounds":
        request = recorded[0].request if isinstance(recorded[0], UserSaid) else None
        return Limits(rounds=rounds, kept=request is None or request.kept)
    return Limits(rounds=max(rounds + 1, DEFAULT_LIMITS.rounds))


def _compare(recorded: Sequence[Entry], produced: Sequence[Entry], *, complete: bool) -> Difference | None:
    """Return the first step at which the two differ; unless `complete`, one may be longer."""
    for place, (one, other) in enumerate(zip(recorded, produced, strict=False)):
        if _timeless(one) != _timeless(other):
            return Difference(place + 1, one, other, "the engine takes a different step")
    shared = min(len(recorded), len(produced))
    if complete and len(recorded) > shared:
        return Difference(shared + 1, recorded[shared], None, "the turn is over here")
    if complete and len(produced) > shared:
        return Difference(shared + 1, None, produced[shared], "the recording ends here")
    return None


def _timeless(entry: Entry) -> Entry:
    """Return the entry without what a replay cannot reproduce: timings, workers, and how the request was sent."""
    if isinstance(entry, ModelAnswered):
        return msgspec.structs.replace(
            entry, seconds=0.0, first_token=0.0, flushed=0.0, worker="", prompt="", tools="", failures=()
        )
    return (
        msgspec.structs.replace(entry, seconds=0.0, flushed=0.0, worker="") if isinstance(entry, CallEnded) else entry
    )


def _by_policy(entry: CallEnded) -> bool:
    """Return whether the policy, not a person, denied the call. A person's denial is added by the engine itself."""
    return entry.status == "denied" and not entry.content.startswith(REFUSED)


class _Divergence(BaseException):
    """The engine asks for something that is not in the recording.

    Not an Exception, because the engine would handle one.
    """


class _RecordingEnded(BaseException):
    """Everything recorded of an interrupted turn has been replayed."""


@dataclass(slots=True, frozen=True)
class _Result:
    content: str
    status: Status
    untrusted: bool
    images: tuple[str, ...]
    own_files: bool


class _Recording:
    """Model, tools and log in one: returns the recorded entries in their recorded order."""

    def __init__(self, recorded: Sequence[Entry], ends: bool) -> None:
        self.at = 1  # the first message is already there
        self.written: list[Entry] = []
        self._recorded = recorded
        self._ends = ends

    @property
    def next(self) -> Entry | None:
        return self._recorded[self.at] if self.at < len(self._recorded) else None

    async def model(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        entry = self._peek("calls the model")
        if not isinstance(entry, ModelAnswered):
            raise _Divergence("the engine calls the model here")
        self.at += 1
        conversation.described_outside = entry.untrusted
        calls = [ToolCallRequest(call.id, call.name, call.arguments, call.error) for call in entry.calls]
        return LLMResponse(entry.content, calls, entry.finish_reason, entry.usage, entry.reasoning, entry.model)

    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        """Return the recorded verdict of the policy: denials, and a question."""
        ids, denied = {call.id for call in calls}, {}
        while isinstance(entry := self.next, CallEnded) and _by_policy(entry) and entry.id in ids:
            denied[entry.id] = entry.content
            self.at += 1
        if isinstance(entry, CallsAsked) and ids.issuperset(entry.ids):
            self.at += 1
            return Review(entry.ids, entry.question, denied, entry.grants, entry.once)
        return Review(denied=denied)

    def decision(self) -> list[Entry]:
        """Return the recorded answer of the person."""
        entry = self._peek("waits for a person")
        if not isinstance(entry, CallsDecided):
            raise _Divergence("the engine waits for a person here")
        self.at += 1
        self.written.append(entry)
        while not entry.allowed and isinstance(ended := self.next, CallEnded) and ended.id in entry.ids:
            self.at += 1  # the engine itself produces these results
        return [entry]

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the one call whose result comes next, so that results come in their recorded order."""
        entry = self._peek(f"runs {calls[0].name}")
        for call in calls:
            if isinstance(entry, CallEnded) and entry.id == call.id and entry.name == call.name:
                return [call]
        names = ", ".join(f"{call.name} ({call.id})" for call in calls)
        raise _Divergence(f"the engine runs {names} here")

    def replay_safe(self, name: str) -> bool:
        return True  # no intents: a replay cannot be interrupted

    def read_only(self, name: str) -> bool:
        return True

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> _Result:
        entry = self.next
        assert isinstance(entry, CallEnded)
        if entry.status == "denied":
            raise _Divergence(f"the engine runs {call.name} ({call.id}) here, which was allowed")
        self.at += 1
        # The text after a crash comes from the engine, not from a tool.
        content = INTERRUPTED if entry.status == "interrupted" else entry.content
        return _Result(content, entry.status, entry.untrusted, entry.images, entry.own_files)

    def steered(self) -> Sequence[UserSaid]:
        said: list[UserSaid] = []
        while isinstance(entry := self.next, UserSaid):
            said.append(entry)
            self.at += 1
        return said

    def park(self, entries: Sequence[Entry], question: str) -> Written[None]:
        return self.append(entries)

    def append(self, entries: Sequence[Entry], flush: bool = True) -> Written[None]:
        self.written += entries
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _peek(self, doing: str) -> Entry:
        if (entry := self.next) is None:
            if not self._ends:
                raise _RecordingEnded
            raise _Divergence(f"the recording ends, and the engine {doing} here")
        return entry
