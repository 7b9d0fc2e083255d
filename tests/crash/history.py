"""What a run left behind, and the checker that says where it breaks the promise.

The promise: what was acknowledged is answered, once, or again with a repeat mark; in order; nothing that had finished
is done again; what must not be repeated is not, and the model is told of it; the log is whole.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop.log import (
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Entry,
    ModelAnswered,
    TurnEnded,
    UserSaid,
    decode_entry,
    messages_of,
)
from everloop.testing import check_conversation

MARK = re.compile(r"mark:(\S+)")
UNSAFE = {"never", "slow", "long", "alone", "fatal_never", "asked"}
# What is said besides answers: questions, what comes of a person's word, and messages of the tool `message`.
ASIDE = re.compile(r"May I do|Approved\.|Nothing waits|I am still waiting|said:")


@dataclass(slots=True)
class Message:
    """A row of the inbox."""

    id: str
    session: int
    kind: str
    state: str
    turn: str | None
    content: str


@dataclass(slots=True)
class Place:
    """An entry of a log with its place and time."""

    seq: int
    turn: str | None
    at: float
    entry: Entry


@dataclass(slots=True)
class History:
    messages: list[Message] = field(default_factory=list)
    logs: dict[int, list[Place]] = field(default_factory=dict)
    answers: list[tuple[int, str | None, str]] = field(default_factory=list)  # outbox: session, reply_to, content
    unsent: int = 0
    held: list[tuple[int, str]] = field(default_factory=list)
    open_turns: list[str] = field(default_factory=list)
    integrity: str = "ok"
    takeovers: int = 0
    # seen from outside
    acknowledged: list[str] = field(default_factory=list)
    published: dict[str, list[str]] = field(default_factory=dict)  # chat → ids in the order they were published
    delivered: list[dict[str, Any]] = field(default_factory=list)
    asides: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    killed: set[int] | None = None  # the processes that were, where that is known
    requests: list[dict[str, Any]] = field(default_factory=list)  # marker, round, time, problems

    @property
    def interrupted(self) -> int:
        return sum(
            isinstance(place.entry, CallEnded) and place.entry.status == "interrupted"
            for log in self.logs.values()
            for place in log
        )

    @property
    def repeats(self) -> int:
        return sum(bool(answer["repeat"]) for answer in self.delivered)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of notes; a line that was cut off by the kill was not written."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in whole]


def read(folder: Path, requests: Iterable[Any] = ()) -> History:
    """Everything that the run in this folder left behind."""
    sent = lines(folder / "answers")
    history = History(
        asides=[line for line in sent if ASIDE.match(line["content"])],
        acknowledged=[line["id"] for line in lines(folder / "acknowledged")],
        delivered=[line for line in sent if not ASIDE.match(line["content"])],
        runs=lines(folder / "runs"),
        requests=[_request(seen) for seen in requests],
    )
    if not (folder / "store.db").exists():
        return history
    db = sqlite3.connect(folder / "store.db", isolation_level=None)
    try:
        history.integrity = db.execute("PRAGMA integrity_check").fetchone()[0]
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            return history
        _read_store(db, history)
    finally:
        db.close()
    return history


def _request(seen: Any) -> dict[str, Any]:
    if isinstance(seen, dict):
        return seen
    return {"marker": seen.marker, "round": seen.round, "time": seen.time, "problems": seen.problems}


def _read_store(db: sqlite3.Connection, history: History) -> None:
    for id, session, kind, state, turn, data in db.execute(
        "SELECT message_id, session, kind, state, turn, data FROM inbox ORDER BY id"
    ):
        if (content := json.loads(data)["content"]) != "/approve":
            history.messages.append(Message(id, session, kind, state, turn, content))
    for session, seq, turn, at, data in db.execute(
        "SELECT session, seq, turn, at, data FROM entry ORDER BY session, seq"
    ):
        history.logs.setdefault(session, []).append(Place(seq, turn, at, decode_entry(data)))
    for session, data, sent_at in db.execute("SELECT session, data, sent_at FROM outbox ORDER BY id"):
        message = json.loads(data)
        if not ASIDE.match(message["content"]):
            history.answers.append((session, message["reply_to"], message["content"]))
        history.unsent += sent_at is None
    history.held = db.execute("SELECT id, worker FROM session WHERE worker IS NOT NULL").fetchall()
    history.open_turns = [id for (id,) in db.execute("SELECT id FROM turn WHERE ended_at IS NULL")]
    begun = db.execute("SELECT coalesce(sum(fence), 0) FROM session").fetchone()[0]
    turns = db.execute("SELECT count(*) FROM turn").fetchone()[0]
    commands = db.execute("SELECT count(*) FROM inbox WHERE kind = 'command'").fetchone()[0]
    history.takeovers = begun - turns - commands


# ---------------------------------------------------------------------------------------------- the checker


def violations(history: History, before: History | None = None) -> list[str]:
    """Every broken promise, one line each. `before` is what stood on disk at the instant of the kill."""
    found = [*at_rest(history), *_answers(history), *_order(history), *whole_logs(history), *_nothing_twice(history)]
    found += [*_asked(history), *_said(history)]
    if before is not None:
        found += _since(before, history)
    return found


def at_rest(history: History) -> Iterator[str]:
    if history.integrity != "ok":
        yield f"the database is damaged: {history.integrity}"
    for session, worker in history.held:
        yield f"session {session} is still held by {worker}"
    for turn in history.open_turns:
        yield f"turn {turn} is still open"
    if history.unsent:
        yield f"{history.unsent} answers were not sent"
    for request in history.requests:
        if request["problems"]:
            yield f"{request['marker']}: an invalid conversation was sent: {request['problems']}"


def _answers(history: History) -> Iterator[str]:
    known = {message.id for message in history.messages}
    for id in history.acknowledged:
        if id not in known:
            yield f"message {id} was acknowledged and is lost"
    openers: dict[str, Message] = {}
    for message in history.messages:
        if message.state != "done":
            yield f"message {message.id} is {message.state}, not done"
        if message.turn is not None:
            openers.setdefault(message.turn, message)
    replaced = {place.turn for place in _places(history) if _reason(place.entry) == "replaced"}
    due = {
        message.id
        for message in history.messages
        if openers.get(message.turn or "", message) is message and message.turn not in replaced
    }
    in_outbox = Counter(reply_to for _, reply_to, _ in history.answers)
    for id in due:
        if in_outbox[id] != 1:
            yield f"message {id} has {in_outbox[id]} answers in the outbox"
    delivered: defaultdict[str, list[bool]] = defaultdict(list)
    for answer in history.delivered:
        delivered[answer["reply_to"]].append(answer["repeat"])
    for id in due - delivered.keys():
        yield f"message {id} got no answer"
    for id, marks in delivered.items():
        if id not in due:
            yield f"an answer to {id} was delivered, which is no message that is due one"
        if not all(marks[1:]):
            yield f"message {id} was answered twice without a repeat mark"


def _asked(history: History) -> Iterator[str]:
    """What a person must be asked for ran after the word, and what was asked was answered once."""
    for session, log in history.logs.items():
        asked, decided = Counter[str](), Counter[str]()
        for place in log:
            match place.entry:
                case CallsAsked(ids=ids):
                    asked.update(ids)
                case CallsDecided(ids=ids):
                    decided.update(ids)
                case CallsBegun(ids=ids) | CallEnded(id=str() as ids):
                    for id in (ids,) if isinstance(ids, str) else ids:
                        if asked[id] and not decided[id]:
                            yield f"session {session}: the call {id} went on before a person's word"
                case ModelAnswered(calls=calls):
                    asked.update(call.id for call in calls if call.name == "asked")
        wrong = {id: count for id, count in decided.items() if count != 1}
        if wrong:
            yield f"session {session}: decided more than once: {wrong}"


def _said(history: History) -> Iterator[str]:
    """A message of the tool `message` is sent once, or again with a mark."""
    said: defaultdict[str, list[bool]] = defaultdict(list)
    for aside in history.asides:
        if aside["content"].startswith("said:"):
            said[aside["content"].removeprefix("said:")].append(aside["repeat"])
    for text, marks in said.items():
        if not all(marks[1:]):
            yield f"the message of {text} was sent twice without a mark"
    for place in _places(history):
        entry = place.entry
        if isinstance(entry, CallEnded) and entry.name == "message" and not said[_text(entry.id)]:
            yield f"the message of {_text(entry.id)} was not sent"


def _order(history: History) -> Iterator[str]:
    """Messages of a session are taken in the order they came, and answered in it."""
    by_session: defaultdict[int, list[Message]] = defaultdict(list)
    for message in history.messages:
        by_session[message.session].append(message)
    for chat, ids in history.published.items():
        known = set(ids)
        taken = [message.id for message in history.messages if message.id in known]
        there = set(taken)
        if taken != [id for id in ids if id in there]:
            yield f"chat {chat}: taken as {taken}, published as {ids}"
    for session, messages in by_session.items():
        entries = [place.entry for place in history.logs.get(session, ())]
        # What follows the text is an attachment.
        said = [str(entry.content).partition("\n")[0] for entry in entries if isinstance(entry, UserSaid)]
        expected = [message.content for message in messages if message.kind == "message"]
        if said != expected:
            yield f"session {session}: the log has {said}, the inbox {expected}"
        replies = [reply_to for owner, reply_to, _ in history.answers if owner == session]
        place = {message.id: n for n, message in enumerate(messages)}
        order = [place.get(reply or "", -1) for reply in replies]
        if order != sorted(order):
            yield f"session {session}: answered in the order {replies}"


def whole_logs(history: History) -> Iterator[str]:
    """Each log is a valid conversation, its turns whole and apart, and its answers the ones the model gave."""
    answered = {reply_to: content for _, reply_to, content in history.answers}
    opener = {message.turn: message.id for message in reversed(history.messages) if message.turn}
    for session, log in history.logs.items():
        if [place.seq for place in log] != list(range(1, len(log) + 1)):
            yield f"session {session}: the log has gaps"
        conversation: list[Entry] = []
        for place in log:
            conversation = [] if isinstance(place.entry, Cleared) else [*conversation, place.entry]
        try:
            problems = check_conversation(list(messages_of(conversation))) if conversation else []
        except LookupError as error:
            problems = [f"a result of no call: {error}"]
        if problems:
            yield f"session {session}: the log is no valid conversation: {problems}"
        turns: dict[str, list[Entry]] = {}
        last = None
        for place in log:
            if place.turn is None:
                continue
            if place.turn != last and place.turn in turns:
                yield f"session {session}: turn {place.turn} is mixed up with another"
            turns.setdefault(place.turn, []).append(place.entry)
            last = place.turn
        for turn, entries in turns.items():
            yield from _turn(turn, entries, answered.get(opener.get(turn)))


def _turn(turn: str, entries: list[Entry], answer: str | None) -> Iterator[str]:
    calls = Counter(call.id for entry in entries if isinstance(entry, ModelAnswered) for call in entry.calls)
    ended = Counter(entry.id for entry in entries if isinstance(entry, CallEnded))
    if calls != ended or any(count > 1 for count in calls.values()):
        yield f"turn {turn}: calls {dict(calls)}, results {dict(ended)}"
    ends = [entry for entry in entries if isinstance(entry, TurnEnded)]
    if len(ends) != 1 or entries[-1] is not ends[0]:
        yield f"turn {turn} has {len(ends)} ends"
        return
    if ends[0].reason == "replaced":
        return
    if ends[0].reason != "answer":
        yield f"turn {turn} ended with {ends[0].reason}: {ends[0].text}"
    said = [mark for entry in entries if isinstance(entry, UserSaid) for mark in MARK.findall(str(entry.content))]
    if said and f"done:{said[-1]} " not in f"{answer} ":
        yield f"turn {turn} was asked {said} and answered {answer!r}"


def _nothing_twice(history: History) -> Iterator[str]:
    """What is in the log as finished was not begun again afterwards; what may not be repeated never was."""
    begun = {id for place in _places(history) if isinstance(place.entry, CallsBegun) for id in place.entry.ids}
    finished: dict[str, Place] = {}
    answered: dict[tuple[str, int], float] = {}
    for log in history.logs.values():
        marker, round = "", 0
        for place in log:
            match place.entry:
                case UserSaid(content=content):
                    marker, round = (MARK.findall(str(content)) or [""])[-1], 0
                case ModelAnswered():
                    answered[marker, round] = place.at
                    round += 1
                case CallEnded():
                    finished[_text(place.entry.id)] = place
    for request in history.requests:
        if request["time"] > answered.get((request["marker"], request["round"]), float("inf")):
            yield f"{request['marker']}: round {request['round']} was asked again after its answer was on disk"
    starts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in history.runs:
        if run["what"] == "start":
            starts[run["text"]].append(run)
    for text, tries in starts.items():
        if text not in finished:
            yield f"the call {text} ran and is not in the log"
            continue
        ended = finished[text].entry
        assert isinstance(ended, CallEnded)
        if ended.status == "ok" and tries[-1]["at"] > finished[text].at:
            yield f"the call {text} ran again after its result was on disk"
        if len({run["key"] for run in tries}) > 1:
            yield f"the call {text} had more than one idempotency key"
        if ended.name in UNSAFE:
            if len(tries) > 1:
                yield f"the call {text} must not be repeated and ran {len(tries)} times"
            if ended.id not in begun:
                yield f"the call {text} ran without its intent on disk"
    yield from _results(history, starts)


def _results(history: History, starts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    ends = Counter(run["text"] for run in history.runs if run["what"] == "end")
    replaced = {place.turn for place in _places(history) if _reason(place.entry) == "replaced"}
    for place in _places(history):
        entry = place.entry
        if not isinstance(entry, CallEnded):
            continue
        text = _text(entry.id)
        if entry.status == "interrupted":
            if entry.name not in UNSAFE:
                yield f"the call {text} may be repeated and was reported as interrupted"
            if history.killed is not None and any(run["pid"] not in history.killed for run in starts.get(text, ())):
                yield f"the call {text} was reported as interrupted though its process lived"
            if "outcome unknown" not in entry.content:
                yield f"the call {text} was interrupted and the model is not told so: {entry.content!r}"
        elif entry.status == "cancelled" and place.turn in replaced:
            continue
        elif entry.status != "ok":
            yield f"the call {text} ended with {entry.status}: {entry.content}"
        elif entry.name != "message" and (not starts.get(text) or not ends[text]):
            yield f"the call {text} has a result and did not run"


def _since(before: History, history: History) -> Iterator[str]:
    """What was on disk at the kill is there unchanged, and none of it was done again."""
    known = {message.id for message in history.messages}
    for message in before.messages:
        if message.id not in known:
            yield f"message {message.id} was on disk and is gone"
    for session, log in before.logs.items():
        after = history.logs.get(session, [])
        if [place.entry for place in log] != [place.entry for place in after[: len(log)]]:
            yield f"session {session}: what was in the log has changed"
    asked = Counter((request["marker"], request["round"]) for request in before.requests)
    asked_after = Counter((request["marker"], request["round"]) for request in history.requests)
    for log in before.logs.values():
        marker, round = "", 0
        for place in log:
            if isinstance(place.entry, UserSaid):
                marker, round = (MARK.findall(str(place.entry.content)) or [""])[-1], 0
            elif isinstance(place.entry, ModelAnswered):
                if asked_after[marker, round] != asked[marker, round]:
                    yield f"{marker}: round {round} had answered before the kill and was asked again"
                round += 1
    started = Counter(run["text"] for run in before.runs if run["what"] == "start")
    started_after = Counter(run["text"] for run in history.runs if run["what"] == "start")
    for place in _places(before):
        if (
            isinstance(place.entry, CallEnded)
            and started_after[_text(place.entry.id)] != started[_text(place.entry.id)]
        ):
            yield f"the call {_text(place.entry.id)} had finished before the kill and ran again"
    on_disk = {mark for message in before.messages for mark in MARK.findall(message.content)}
    for marker in {marker for marker, _ in asked} - on_disk:
        yield f"{marker}: the model was asked before the message was on disk"


def _places(history: History) -> Iterator[Place]:
    for log in history.logs.values():
        yield from log


def _reason(entry: Entry) -> str:
    return entry.reason if isinstance(entry, TurnEnded) else ""


def _text(id: str) -> str:
    """The place that the plan gave a call: marker/round/number."""
    return "/".join(id.rsplit("_", 2))
