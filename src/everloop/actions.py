"""Decide the next step of a turn from its log alone.

Pure, so a crash, a replay and a test all take the same path.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    ModelAnswered,
    Noted,
    Reason,
    TurnEnded,
    UserSaid,
)
from .text import counted


class Limits(msgspec.Struct, frozen=True):
    """Limits that end a turn even if the model would continue."""

    rounds: int = 20
    calls: int = 64  # per answer; any further calls get an error result
    empty_answers: int = 2  # consecutive
    failures: int = 3  # consecutive failures of the same call, with nothing new in between
    kept: bool = True  # the conversation continues in later turns

    @property
    def rounds_notice(self) -> str:
        rounds = counted(self.rounds, "round")
        stopped = f"I stopped after {rounds}, the limit for one turn, without a final answer. "
        if self.kept:
            return stopped + "The work so far is kept: say “go on” to continue."
        return stopped + (
            "Changes made by the tools remain, but this request has no session, so its steps are not remembered: "
            "ask for less at a time, or send the header X-Session to be able to continue."
        )


DEFAULT_LIMITS = Limits()


class CallModel(msgspec.Struct, frozen=True):
    pass


class RunTools(msgspec.Struct, frozen=True):
    calls: tuple[Call, ...]


class Report(msgspec.Struct, frozen=True):
    """Report calls that were running when the process died. They are not repeated; the model is told."""

    calls: tuple[Call, ...]


class Refuse(msgspec.Struct, frozen=True):
    """Refuse calls that a person denied; the model is told, along with the person's note."""

    calls: tuple[Call, ...]
    note: str


class Park(msgspec.Struct, frozen=True):
    """Park the turn: nothing in this round runs until a person has answered the question."""

    calls: tuple[Call, ...]
    question: str


class Finish(msgspec.Struct, frozen=True):
    reason: Reason
    text: str


class Idle(msgspec.Struct, frozen=True):
    """No turn is open."""


class Hand(msgspec.Struct, frozen=True):
    """Hand calls of the client's own tools to the client, which returns the results with its next request."""

    calls: tuple[Call, ...]


Action = CallModel | RunTools | Hand | Report | Refuse | Park | Finish | Idle

EMPTY_NOTICE = "The model returned an empty answer. Try again, or rephrase your request."


def next_action(log: Sequence[Entry], limits: Limits = DEFAULT_LIMITS) -> Action:
    """Decide the next step of the open turn from its log alone."""
    progress = Progress()
    for entry in log:
        progress.read(entry)
    return progress.next_action(limits)


class Progress:
    """How far a log is, read entry by entry: what each step decides does not read the whole log again.

    Calls that began and have no result count as interrupted: the runner only asks when none of its own calls are in
    flight.
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_begun",
        "_clients",
        "_empty",
        "_failures",
        "_last",
        "_pending",
        "_repeated",
        "_succeeded",
        "rounds",
    )

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._asked: dict[str, CallsAsked | CallsDecided] = {}
        self._answer: ModelAnswered | None = None
        self._succeeded = False  # a call of this round
        self._repeated = ""  # name of the call that failed most often in a row
        self._close()

    def _close(self) -> None:
        """No turn is open."""
        self._pending: dict[str, Call] = {}
        self._last: Entry | None = None
        self._clients: frozenset[str] = frozenset()  # names of the client's tools
        self.rounds = self._empty = self._failures = 0

    def read(self, entry: Entry) -> None:
        """Take in the next entry of the log."""
        match entry:
            case CallEnded():
                self._pending.pop(entry.id, None)
                if entry.status in FAILED and entry.repeats + 1 >= self._failures:
                    self._failures, self._repeated = entry.repeats + 1, entry.name
                self._succeeded |= entry.status == "ok"
            case ModelAnswered():
                self.rounds += 1
                self._empty = self._empty + 1 if entry.empty else 0
                self._pending = {call.id: call for call in entry.calls}
                self._failures, self._succeeded = 0, False
                self._answer = entry
            case UserSaid():
                if entry.request is not None:
                    self._clients = entry.request.client_tools
            case CallsBegun():
                self._begun.update(entry.ids)
                return
            case Compacted():
                return
            case CallsAsked() | CallsDecided():
                self._asked.update(dict.fromkeys(entry.ids, entry))
                return
            case TurnEnded() | Noted() | Cleared():  # any open turn is over
                self._close()
                return
        self._last = entry

    def next_action(self, limits: Limits = DEFAULT_LIMITS) -> Action:
        """Decide the next step of the open turn."""
        last = self._last
        if last is None:
            return Idle()
        if self._clients and isinstance(last, ModelAnswered | CallEnded):
            answer = self._answer
            if answer is not None and _for_client(answer, self._clients):
                return Hand(tuple(self._pending.values())) if self._pending else Finish("handed", answer.content or "")
        if self._pending:
            return _next_of_round(self._pending, self._begun, self._asked)
        if isinstance(last, ModelAnswered) and not last.empty:
            return Finish("answer", last.content or "")
        if self._empty >= limits.empty_answers:
            return Finish("empty", EMPTY_NOTICE)
        if self._failures >= limits.failures and not self._succeeded and isinstance(last, CallEnded):
            return Finish("repeating", _repeating_notice(self._repeated, self._failures))
        if self.rounds >= limits.rounds:
            return Finish("max_rounds", limits.rounds_notice)
        return CallModel()

    def has_round_for_message(self, limits: Limits = DEFAULT_LIMITS) -> bool:
        """Return whether the model would be called if a message were the next entry of the turn."""
        return not self._pending and self._empty < limits.empty_answers and self.rounds < limits.rounds


def _for_client(answer: ModelAnswered, clients: frozenset[str]) -> bool:
    """Return whether the client can run every call of an answer.

    Otherwise none is handed over, and the model is told why.
    """
    return bool(answer.calls) and all(call.name in clients and call.error is None for call in answer.calls)


def _next_of_round(
    pending: dict[str, Call], begun: set[str], asked: dict[str, CallsAsked | CallsDecided]
) -> Report | Refuse | Park | RunTools:
    """Return the next step for the calls of a round that have no result yet."""
    if cut_off := tuple(call for call in pending.values() if call.id in begun):
        return Report(cut_off)
    for call in pending.values():
        match asked.get(call.id):
            case CallsDecided(allowed=False) as refused:
                return Refuse(tuple(pending[id] for id in refused.ids if id in pending), refused.note)
            case CallsAsked() as question:
                return Park(tuple(pending[id] for id in question.ids if id in pending), question.question)
    return RunTools(tuple(pending.values()))


# ---------------------------------------------------------------------------------------------- calls that keep failing

FAILED = frozenset({"error", "denied"})


def failed_before(log: Sequence[Entry], call: Call) -> int:
    """Count how often this same call has failed since a call last succeeded for the first time in this turn."""
    calls: dict[str, Call] = {}
    worked: list[Call] = []
    count = 0
    for entry in log:
        match entry:
            case ModelAnswered():
                calls.update((one.id, one) for one in entry.calls)
            case CallEnded() if (ended := calls.get(entry.id)) is not None:
                if entry.status in FAILED:
                    count += _same(ended, call)
                elif entry.status == "ok" and not any(_same(ended, one) for one in worked):
                    worked.append(ended)
                    count = 0
            case TurnEnded() | Noted() | Cleared():
                calls, worked, count = {}, [], 0
    return count


def _same(one: Call, other: Call) -> bool:
    return one.name == other.name and one.arguments == other.arguments and one.error == other.error


def _repeating_notice(name: str, failures: int) -> str:
    return (
        f"I stopped because the same call of {name} failed {failures} times and nothing else was tried in between. "
        "The work so far is kept: tell me what to do differently, or say “go on”."
    )
