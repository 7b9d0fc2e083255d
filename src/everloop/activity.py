"""The activity log: a session's entries as a timeline of events, with durations and counts.

Nothing extra is stored for it. Model calls, tool starts and feedback are inferred from the neighbouring entries, so a
turn costs no more and old logs have a timeline too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from .log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Compacted,
    Entry,
    Logged,
    ModelAnswered,
    Noted,
    TurnEnded,
    UserSaid,
    text_of,
    with_notice,
)

Event = Literal[
    "request",
    "steered",
    "model_called",
    "model_answered",
    "tool_started",
    "tool_ended",
    "feedback",
    "asked",
    "decided",
    "compacted",
    "cleared",
    "noted",
    "turn_ended",
]
Cost = Callable[[str, Mapping[str, int]], float | None]
EMPTY_ANSWER = "The answer was empty; the model is called again."
# end reasons that interrupt a model call
WHILE_ASKING = frozenset({"error", "cancelled", "timeout", "aborted", "replaced"})
# result statuses that carry feedback to the model
TELLS = {"error": "error", "denied": "denied", "interrupted": "interrupted"}


@dataclass(slots=True, frozen=True)
class ActivityEvent:
    """One event on the timeline. `entry` is the log entry that records it, if there is one."""

    event: Event
    at: float
    turn: str | None
    seq: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    entry: Entry | None = None


@dataclass(slots=True)
class _Turn:
    """State of the turn that is being read."""

    id: str | None
    began: float
    said: bool = False
    rounds: int = 0
    asked_model: bool = False  # `model_called` was already emitted for this round
    due: bool = False  # the next step is a model call
    empty: bool = False  # the last answer was empty
    question: bool = False  # a question to a person is open
    calls: dict[str, Call] = field(default_factory=dict)  # calls without a result
    started: set[str] = field(default_factory=set)
    clients: frozenset[str] = frozenset()  # tools that the API client runs
    model: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    cost: float | None = None


class Timeline:
    """Reads a session's log incrementally. `cost` returns the price of a model's tokens."""

    def __init__(self, cost: Cost = lambda model, usage: None) -> None:
        self._cost = cost
        self._turn = _Turn(None, 0.0)
        self._last = 0.0  # when the last entry was written

    def read(self, logged: Sequence[Logged]) -> Iterator[ActivityEvent]:
        """Yield the events of these entries, which continue those read before, and then whatever is in flight."""
        for one in logged:
            if one.turn != self._turn.id:
                self._turn = _Turn(one.turn, one.at)
            yield from self._entry(one)
            self._last = one.at
        yield from self._under_way()

    def _entry(self, one: Logged) -> Iterator[ActivityEvent]:
        turn, entry = self._turn, one.entry
        facts: dict[str, Any]
        match entry:
            case UserSaid():
                yield self._said(one, entry)
            case ModelAnswered():
                yield from self._asks(one.at - entry.seconds if entry.seconds else self._last, entry.model)
                yield self._answered(one, entry)
            case CallsBegun():
                for number, id in enumerate(entry.ids):
                    yield self._started(id, one.at, one if number == 0 else None)
            case CallsAsked():
                turn.question = True
                facts = {"tools": self._names(entry.ids), "calls": list(entry.ids), "question": entry.question}
                yield _activity_event("asked", one, facts)
            case CallsDecided():
                turn.question = False
                facts = {"tools": self._names(entry.ids), "calls": list(entry.ids), "allowed": entry.allowed}
                yield _activity_event("decided", one, facts | _given(by=entry.by, note=entry.note, always=entry.always))
            case CallEnded():
                yield from self._ended(one, entry)
            case TurnEnded():
                if turn.due and entry.reason in WHILE_ASKING:
                    yield from self._asks(self._last)
                yield self._turn_ended(one, entry)
                self._turn = _Turn(None, 0.0)
            case Noted():
                yield _activity_event("noted", one, {"role": str(entry.message.get("role"))})
            case Cleared():
                yield _activity_event("cleared", one, {})
            case Compacted():
                turns = {"turns": entry.turns, "results": len(entry.aside)}
                yield _activity_event("compacted", one, turns | _tokens(entry.usage))

    def _under_way(self) -> Iterator[ActivityEvent]:
        """Yield what the last entries started: no entry is written when a call starts."""
        turn = self._turn
        if turn.due:
            yield from self._asks(self._last)
        if not turn.question and not turn.started & turn.calls.keys():
            for call in turn.calls.values():
                if call.error is None and call.name not in turn.clients:
                    yield self._started(call.id, self._last)

    # ------------------------------------------------------------------------------------------ one event each

    def _said(self, one: Logged, said: UserSaid) -> ActivityEvent:
        turn = self._turn
        event: Event = "steered" if turn.said else "request"
        turn.said, turn.due, turn.asked_model = True, not turn.calls, False
        if said.request is not None:
            turn.clients, turn.model = said.request.client_tools, said.request.model
        facts = _given(sender=said.sender, inside=said.inside, untrusted=said.untrusted, api=said.request is not None)
        return _activity_event(event, one, {"size": len(text_of(said.with_note())), **facts})

    def _asks(self, at: float, model: str = "") -> Iterator[ActivityEvent]:
        """Yield the model call of the next round, unless it has already been emitted."""
        turn = self._turn
        if turn.asked_model:
            return
        if turn.empty:
            yield self._feedback(self._last, "empty", EMPTY_ANSWER)
        turn.asked_model = True
        facts: dict[str, Any] = {"round": turn.rounds + 1, **_given(model=model or turn.model)}
        yield ActivityEvent("model_called", at, turn.id, None, facts)

    def _answered(self, one: Logged, answered: ModelAnswered) -> ActivityEvent:
        turn = self._turn
        turn.rounds += 1
        turn.calls = {call.id: call for call in answered.calls}
        turn.model = answered.model or turn.model
        turn.asked_model, turn.due, turn.empty = False, answered.empty, answered.empty
        tokens = _tokens(answered.usage)
        for name, count in tokens.items():
            turn.tokens[name] = turn.tokens.get(name, 0) + count
        cost = self._cost(turn.model, answered.usage) if answered.usage else None
        if cost is not None:
            turn.cost = (turn.cost or 0.0) + cost
        # Older logs do not record the duration; use the time since the previous entry.
        seconds = answered.seconds or (round(max(one.at - self._last, 0.0), 4) if self._last else 0.0)
        facts: dict[str, Any] = {"round": turn.rounds, "seconds": seconds, "size": len(answered.content or "")}
        facts |= _given(first_token=answered.first_token, model=answered.model, cost=cost) | tokens
        facts |= {"finish_reason": answered.finish_reason, "tools": [call.name for call in answered.calls]}
        return _activity_event("model_answered", one, facts)

    def _started(self, id: str, at: float, one: Logged | None = None) -> ActivityEvent:
        turn = self._turn
        turn.started.add(id)
        facts = {"tool": turn.calls[id].name if id in turn.calls else "", "call": id}
        if one is None:
            return ActivityEvent("tool_started", at, turn.id, None, facts)
        return _activity_event("tool_started", one, facts)

    def _ended(self, one: Logged, ended: CallEnded) -> Iterator[ActivityEvent]:
        turn = self._turn
        call = turn.calls.get(ended.id)
        handed = ended.name in turn.clients
        ran = ended.seconds > 0 or ended.status in ("ok", "error")
        if ran and not handed and ended.id not in turn.started and (call is None or call.error is None):
            yield self._started(ended.id, one.at - ended.seconds)
        turn.calls.pop(ended.id, None)
        turn.due = not turn.calls and not handed
        facts: dict[str, Any] = {"tool": ended.name, "call": ended.id, "status": ended.status}
        facts |= {"seconds": ended.seconds, "size": len(ended.content)}
        facts |= _given(repeats=ended.repeats, untrusted=ended.untrusted, handed=handed)
        yield _activity_event("tool_ended", one, facts)
        if call is not None and call.error is not None:
            yield self._feedback(one.at, "arguments", call.error, ended)
        elif (kind := TELLS.get(ended.status)) is not None:
            yield self._feedback(one.at, kind, _advice(ended.content), ended)
        if ended.repeats:
            yield self._feedback(one.at, "repeat", with_notice("", ended.repeats).strip("\n[]"), ended)

    def _feedback(self, at: float, kind: str, text: str, ended: CallEnded | None = None) -> ActivityEvent:
        facts = {"kind": kind, "text": text}
        facts |= {"tool": ended.name, "call": ended.id} if ended is not None else {}
        return ActivityEvent("feedback", at, self._turn.id, None, facts)

    def _turn_ended(self, one: Logged, ended: TurnEnded) -> ActivityEvent:
        turn = self._turn
        facts = {"reason": ended.reason, "rounds": turn.rounds, "seconds": round(max(one.at - turn.began, 0.0), 4)}
        return _activity_event("turn_ended", one, facts | turn.tokens | _given(cost=turn.cost))

    def _names(self, ids: Sequence[str]) -> list[str]:
        return [self._turn.calls[id].name for id in ids if id in self._turn.calls]


def _activity_event(event: Event, one: Logged, facts: dict[str, Any]) -> ActivityEvent:
    return ActivityEvent(event, one.at, one.turn, one.seq, facts, one.entry)


def _given(**facts: Any) -> dict[str, Any]:
    """Return the facts that are set."""
    return {name: fact for name, fact in facts.items() if fact}


def _tokens(usage: Mapping[str, int]) -> dict[str, int]:
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "cached_tokens": "cached_tokens"}
    return {ours: usage[name] for name, ours in names.items() if name in usage}


def _advice(content: str) -> str:
    """Return the advice to the model in the result of a failed call."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content
    return str(body.get("advice") or body.get("message") or content) if isinstance(body, dict) else content
