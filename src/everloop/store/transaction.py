"""The transactions that both stores run in the same way, from what they read to what they write.

`claims.py` decides what follows from the rows; a store adds the statements that read and write them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..bus import InboundMessage, Kind, OutboundMessage
from ..log import CallsAsked, Compacted, Entry, decode_entry
from . import claims
from .base import Claim, Incoming, Timer
from .claims import Begun, Damaged, Held, LogRows, Parked, SessionState


class SessionRow(NamedTuple):
    """The row of a session, which no other transaction changes before this one ends."""

    id: int
    worker: str | None
    fence: int
    history_from: int
    compacted: int
    updated_at: float


class ParkedTurn(NamedTuple):
    """A turn that waits for a person's answer."""

    row: int  # of the inbox: the message that opened it
    session: int
    turn: str
    first_seq: int


class Transaction(ABC):
    """A transaction in progress. All of its writes take effect, or none."""

    __slots__ = ()

    # ------------------------------------------------------------------------------------------ the same in both stores

    def begin(self, owner: str, key: str, worker: str, message: InboundMessage | None, kind: Kind) -> Begun:
        """Take the lease of a session and its next work: an interrupted turn, else the oldest pending message."""
        state = self.read_state(owner, key, worker, create=message is not None)
        if state is None or isinstance(state, Held):
            return Begun(state)
        claim, accepted = state.claim(owner, key), None
        if message is not None:
            new_turn = state.new_turn(kind)
            accepted = self.accept(message, kind, state.id, (new_turn, state.next_seq) if new_turn else None)
            claims.note_accepted(claim, message, accepted, new_turn)
        damaged: list[Damaged] = []
        while isinstance(work := self._take_up(state, claim, accepted), Damaged):
            damaged.append(work)
            if accepted is not None and work.id == accepted.id:
                accepted = None  # it is set aside, like any other
            state = self.reread_state(state, owner, key)
            claim = state.claim(owner, key, claim.accepted)
        if isinstance(work, Claim):
            self.take_lease(work, worker)
        return Begun(work, damaged)

    def _take_up(
        self, state: SessionState, claim: Claim, accepted: Incoming | None
    ) -> Claim | Held | Parked | Damaged | None:
        """Take up a session's next work, or set it aside if it is damaged."""
        match claims.next_work(state, claim, accepted):
            case Held() | Parked() | None as nothing:
                return nothing
            case claims.Resume(turn):
                messages = self.messages_of_turn(state.id, turn)
                log = self.read_entries(state.id, messages[0][2])
                claim.entries = [decode_entry(data) for _, data, _ in log]
                if (damaged := claims.resumed(claim, turn, messages)) is not None:
                    if claim.entries:  # otherwise the turn has left nothing in the log
                        end = claims.abandoned(claim.entries)
                        self.insert_entries(state.id, turn, claims.rows_from(claim.next_seq, end))
                    self.abandon(state.id, turn, damaged)
                    return damaged
            case claims.Open():
                self._write_first_entry(claim, state.now)
            case claims.Take(row):
                if (damaged := claims.took(claim, row, *self.pending_message(row))) is not None:
                    self.set_aside([damaged])
                    return damaged
                if not claim.command:
                    self.open_turn(claim, row)
                    self._write_first_entry(claim, state.now)
        return claim

    def _write_first_entry(self, claim: Claim, now: float) -> None:
        if (rows := claims.first_entry(claim, now)) is not None:
            self.insert_entries(claim.session, claim.turn, rows)

    def decide(
        self,
        owner: str,
        key: str,
        allowed: bool | None,
        by: str,
        note: str,
        word: Incoming | InboundMessage | None,
        always: bool,
    ) -> tuple[int, CallsAsked | None] | None:
        """Write a person's answer to the log of the parked turn, with its grants, and reopen the turn."""
        if (parked := self.parked_turn(owner, key)) is None:
            return None
        if isinstance(word, InboundMessage):
            word = self.accept(word, "urgent", parked.session) if word.id is not None else None
        answer = self.read_answer(word.id) if word is not None else None
        log = self.read_entries(parked.session, parked.first_seq)
        decision = claims.decision(log, answer, allowed, by, note, always)
        if decision is None:
            return None
        if decision.rows is not None:
            self.insert_entries(parked.session, parked.turn, decision.rows)
            self.grant(owner, key, decision.granted)
            if word is not None:
                self.use_answer(word.id, decision.rows.seqs[0])
        self.reopen(parked.session)
        return parked.row, decision.asked

    def note(self, owner: str, key: str, entries: Sequence[Entry]) -> int | Held:
        """Append entries outside of a turn, and return the position of the last one."""
        while (session := self.session(owner, key)) is None:
            self.new_session(owner, key)
        return self._append_outside(session, entries)

    def compact(self, owner: str, key: str, entry: Compacted) -> bool:
        """Append a compaction, if the session is idle and still shows what the compaction builds on."""
        session = self.session(owner, key)
        if session is None or not claims.builds_on(entry, session.history_from, session.compacted):
            return False
        return not isinstance(self._append_outside(session, [entry]), Held)

    def _append_outside(self, session: SessionRow, entries: Sequence[Entry]) -> int | Held:
        if session.worker is not None and self.is_alive(session.worker):
            return Held(session.worker, None)
        if self.has_open_turn(session.id):
            return Held(claims.INTERRUPTED, None)
        last = self.last_seq(session.id)
        self.insert_entries(session.id, None, claims.rows_from(last + 1, entries))
        self.touch(session.id)
        return last + len(entries)

    def fork(self, owner: str, key: str, until: int | None, new_key: str) -> None:
        """Copy the log up to a position to a new session."""
        if (source := self.session(owner, key)) is None:
            raise claims.no_session(key)
        rows = self.read_log(source.id, until if until is not None else 2**62)
        claims.check_fork(rows, key, until)
        if (new := self.new_session(owner, new_key)) is None:
            raise claims.session_exists(new_key)
        copy = claims.fork_of(rows, owner, new_key)
        self.copy_entries(new, copy.rows)
        if copy.message is not None:
            self.accept(copy.message, "message", new, copy.opens)
        self.show_from(new, copy.history_from, copy.compacted)

    def answer(
        self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage], sender: str | None
    ) -> list[int]:
        """Mark an urgent row as done, together with its answer; return the outbox rows."""
        if isinstance(row, InboundMessage):
            row = self.accept(row, "urgent")
        if row.done or not self.mark_answered(row.id):
            return []
        return self.send(row.message.owner, row.session, None, outgoing, sender)

    def fire_timer(self, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
        """Put a timer's message into the inbox and advance the timer; False if another worker has done so."""
        if not self.advance_timer(timer, next_due):
            return False
        self.accept(message, "message")
        return True

    def _known(self, row: Sequence[Any], message: InboundMessage) -> Incoming:
        """Return a message that was accepted before. If its row is damaged, it is repaired."""
        if not claims.readable([row])[1]:
            return claims.incoming(row)
        state = self.repair(row[0], claims.inbox_data(message, None))
        return replace(claims.incoming(row, message), done=state == "done")

    # ------------------------------------------------------------------------------------------ sessions

    @abstractmethod
    def session(self, owner: str, key: str) -> SessionRow | None: ...

    @abstractmethod
    def new_session(self, owner: str, key: str) -> int | None:
        """Create a session; None if it exists."""

    @abstractmethod
    def read_state(self, owner: str, key: str, worker: str, create: bool) -> SessionState | Held | None:
        """Read everything that determines what a session does next.

        Unless it may be created, return None if it does not exist; and `Held` rather than wait for another transaction.
        """

    @abstractmethod
    def reread_state(self, state: SessionState, owner: str, key: str) -> SessionState:
        """Read the state again, after this transaction has set something aside."""

    @abstractmethod
    def take_lease(self, claim: Claim, worker: str) -> None: ...

    @abstractmethod
    def is_alive(self, worker: str) -> bool: ...

    @abstractmethod
    def has_open_turn(self, session: int) -> bool: ...

    @abstractmethod
    def touch(self, session: int) -> None:
        """Set the time of the session's last activity."""

    @abstractmethod
    def show_from(self, session: int, history_from: int, compacted: int) -> None:
        """Set where a copied session's conversation starts, and its latest compaction."""

    # ------------------------------------------------------------------------------------------ the log

    @abstractmethod
    def last_seq(self, session: int) -> int: ...

    @abstractmethod
    def read_entries(self, session: int, first_seq: int) -> Iterable[Sequence[Any]]:
        """Return (seq, data, at) of the entries from this one on."""

    @abstractmethod
    def read_log(self, session: int, until: int) -> Sequence[Sequence[Any]]:
        """Return (seq, turn, kind, data, at) of the entries up to this one."""

    @abstractmethod
    def insert_entries(self, session: int, turn: str | None, rows: LogRows) -> None:
        """Append to the log of a session that no worker writes to."""

    @abstractmethod
    def copy_entries(self, session: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write rows of `read_log` to the log of a new session."""

    # ------------------------------------------------------------------------------------------ messages

    @abstractmethod
    def accept(
        self, message: InboundMessage, kind: Kind, session: int | None = None, opens: tuple[str, int] | None = None
    ) -> Incoming:
        """Put a message into the inbox, unless its id is already there.

        With `opens`, a turn and the position of its first entry, it is taken at once and opens that turn.
        """

    @abstractmethod
    def repair(self, row: int, data: str) -> str:
        """Rewrite a damaged row of the inbox with a message that was delivered again, and return the row's state."""

    @abstractmethod
    def pending_message(self, row: int) -> tuple[str | bytes, str]:
        """Return (data, kind) of a message that no turn has taken."""

    @abstractmethod
    def messages_of_turn(self, session: int, turn: str) -> Sequence[Sequence[Any]]:
        """Return (id, data, first_seq) of the messages that a turn has taken, the one that opened it first."""

    @abstractmethod
    def open_turn(self, claim: Claim, row: int) -> None:
        """Note that the message opens the claim's turn."""

    @abstractmethod
    def abandon(self, session: int, turn: str, damaged: Damaged) -> None:
        """Mark the messages of an interrupted turn as done, because one of them is damaged."""

    @abstractmethod
    def set_aside(self, damaged: Iterable[Damaged]) -> list[Damaged]:
        """Remove pending rows that cannot be decoded from the inbox; return those that were there."""

    @abstractmethod
    def mark_answered(self, row: int) -> bool:
        """Mark a pending message as done. Return False if it was not pending."""

    @abstractmethod
    def send(
        self,
        owner: str,
        session: int,
        turn: str | None,
        messages: Sequence[OutboundMessage],
        sender: str | None,
        key: str | None = None,
    ) -> list[int]:
        """Put messages into the outbox; with a sender, they count as tried once."""

    # ------------------------------------------------------------------------------------------ questions

    @abstractmethod
    def parked_turn(self, owner: str, key: str) -> ParkedTurn | None: ...

    @abstractmethod
    def read_answer(self, row: int) -> Sequence[Any]:
        """Return (state, first_seq, at) of a message that may answer the question."""

    @abstractmethod
    def use_answer(self, row: int, seq: int) -> None:
        """Note which entry a message became, so that it answers no other question."""

    @abstractmethod
    def grant(self, owner: str, key: str, names: Sequence[str]) -> None: ...

    @abstractmethod
    def reopen(self, session: int) -> None:
        """Let a parked turn be resumed, and raise the fence: the worker that parked it can no longer write to it."""

    # ------------------------------------------------------------------------------------------ timers

    @abstractmethod
    def advance_timer(self, timer: Timer, next_due: float | None) -> bool:
        """Set when a timer is due next, or delete it; return False unless it is still due when it was."""
