"""The history checker: reads an entire store, and reports every violation of its invariants.

The checks need only the store: every log has no gaps and could be resumed from any of its entries, every turn ended
once with a result for each of its calls, turns of a session do not overlap, a call that needed approval ran after the
person's answer, and the inbox agrees with the log. A turn in progress is not a violation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..log import (
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Entry,
    ModelAnswered,
    TurnEnded,
    UserSaid,
    decode_entry,
)
from ..text import counted

# The tables and columns are the same in both stores.
# Without those that `everloop move` has copied here while another database still works on them.
SESSIONS = "SELECT id, owner, key FROM session WHERE substr(owner, 1, 9) <> 'arriving:' ORDER BY id"
LOG = "SELECT seq, turn, data FROM entry WHERE session = {session} ORDER BY seq"
MESSAGES = """SELECT id, state, turn, first_seq, ended_at, opened FROM inbox
    WHERE session = {session} AND damaged IS NULL ORDER BY id"""
DAMAGED = "SELECT count(*) FROM {table} WHERE damaged IS NOT NULL"
Rows = Callable[[str], Iterable[Sequence[Any]]]  # runs a query


@dataclass(slots=True)
class Checked:
    """Counts, and every violation, one line each."""

    sessions: int = 0
    turns: int = 0
    under_way: int = 0
    entries: int = 0
    violations: list[str] = field(default_factory=list)


def check_history(rows: Rows, progress: Callable[[int], None] = lambda sessions: None) -> Checked:
    """Check a whole store, session by session. `rows` must read a consistent snapshot."""
    found = Checked()
    for id, owner, key in list(rows(SESSIONS)):
        name = f"session {key}" if owner == "me" else f"session {key} of {owner}"
        found.violations += [f"{name}: {line}" for line in _check_session(rows, id, found)]
        found.sessions += 1
        progress(found.sessions)
    for table in ("inbox", "outbox"):
        if damaged := next(iter(rows(DAMAGED.format(table=table))))[0]:
            rows_are = f"{counted(damaged, 'row')} of the {table} {'is' if damaged == 1 else 'are'}"
            found.violations.append(f"{rows_are} damaged and set aside: `everloop doctor`")
    return found


def _check_session(rows: Rows, id: int, found: Checked) -> Iterator[str]:
    log: list[tuple[int, str | None, Entry]] = []
    for seq, turn, data in rows(LOG.format(session=id)):
        try:
            log.append((seq, turn, decode_entry(data)))
        except (msgspec.MsgspecError, UnicodeError) as error:
            yield f"entry {seq} cannot be decoded: {error}"
    found.entries += len(log)
    yield from gaps([seq for seq, _, _ in log])
    yield from resumable([(seq, entry) for seq, _, entry in log])
    yield from decided_first(entry for _, _, entry in log)
    turns = turns_of((turn, entry) for _, turn, entry in log)
    yield from overlaps(turn for _, turn, _ in log)
    first = {turn: seq for seq, turn, _ in reversed(log)}
    messages = list(rows(MESSAGES.format(session=id)))
    running = {turn for _, state, turn, _, _, _ in messages if turn is not None and state != "done"}
    for turn, entries in turns.items():
        found.turns += 1
        if turn in running:
            found.under_way += 1
        else:
            yield from (f"turn {turn} {line}" for line in ended_once(entries))
    for number, state, turn, first_seq, ended_at, opened in messages:
        if turn is not None and turn not in turns and opened:
            yield f"message {number} opened turn {turn}, which has no log entries"
        elif opened and ended_at is not None and state == "done" and not _is_over(turns[turn]):
            yield f"turn {turn} is marked as ended, but its log has no end"
        elif opened and first_seq is not None and first[turn] != first_seq:
            yield f"turn {turn} does not start at entry {first_seq}"


# ---------------------------------------------------------------------------------------------- one log


def gaps(seqs: Sequence[int]) -> Iterator[str]:
    if list(seqs) != list(range(1, len(seqs) + 1)):
        missing = next((n for n, seq in enumerate(seqs, 1) if n != seq), len(seqs))
        yield f"the log has gaps: entry {missing} is missing"


def resumable(log: Iterable[tuple[int, Entry]]) -> Iterator[str]:
    """Check that the log could be resumed from any of its entries."""
    pending: set[str] = set()
    for seq, entry in log:
        match entry:
            case CallEnded(id=id):
                if id not in pending:
                    yield f"entry {seq} is a result without an open call"
                pending.discard(id)
            case UserSaid() | ModelAnswered() | TurnEnded() if pending:
                yield f"entry {seq} precedes the results of {sorted(pending)}"
        if isinstance(entry, ModelAnswered):
            pending |= {call.id for call in entry.calls}


def decided_first(log: Iterable[Entry]) -> Iterator[str]:
    """Check that calls which needed approval ran after the answer, and that each answer was taken once."""
    asked, decided = Counter[str](), Counter[str]()
    for entry in log:
        match entry:
            case CallsAsked(ids=ids):
                asked.update(ids)
            case CallsDecided(ids=ids):
                decided.update(ids)
            case CallsBegun(ids=ids):
                yield from (
                    f"the call {id} started before a person approved it" for id in ids if asked[id] > decided[id]
                )
    if wrong := {id: count for id, count in decided.items() if count > max(asked[id], 1)}:
        yield f"decided more than once: {wrong}"


def overlaps(turns: Iterable[str | None]) -> Iterator[str]:
    """Check that the turns of a session do not overlap."""
    runs = [turn for turn, _ in itertools.groupby(turn for turn in turns if turn is not None)]
    yield from (f"turn {turn} overlaps with another" for turn, count in Counter(runs).items() if count > 1)


def turns_of(log: Iterable[tuple[str | None, Entry]]) -> dict[str, list[Entry]]:
    turns: dict[str, list[Entry]] = {}
    for turn, entry in log:
        if turn is not None:
            turns.setdefault(turn, []).append(entry)
    return turns


def ended_once(entries: Sequence[Entry]) -> Iterator[str]:
    """Check that a finished turn has one end, which is its last entry, and one result per call."""
    calls = Counter(call.id for entry in entries if isinstance(entry, ModelAnswered) for call in entry.calls)
    ended = Counter(entry.id for entry in entries if isinstance(entry, CallEnded))
    if calls != ended or any(count > 1 for count in calls.values()):
        yield f"has calls {dict(calls)} and results {dict(ended)}"
    ends = sum(isinstance(entry, TurnEnded) for entry in entries)
    if ends != 1 or not _is_over(entries):
        yield f"has {ends} ends"


def _is_over(entries: Sequence[Entry]) -> bool:
    return isinstance(entries[-1], TurnEnded)
