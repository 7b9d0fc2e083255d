"""The checker, which reports where a history breaks the promise.

The promise: an acknowledged message is answered once, or again with a repeat mark, and in order; no finished step
runs again; an interrupted call that must not be repeated is reported to the model; the log is complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
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
    messages_of,
)
from everloop.store.history_check import ended_once, gaps, overlaps, resumable, turns_of
from everloop.testing import check_conversation

from .company_checker import of_many
from .history import MARK, History, Message, Place

UNSAFE = {"never", "slow", "long", "alone", "fatal_never", "asked"}
LEFT = ("replaced", "cancelled")  # turns that may end without an answer because a user asked for it


def violations(history: History, before: History | None = None) -> list[str]:
    """Return each broken promise as one line. `before` is the state on disk at the moment of the kill."""
    found = [*at_rest(history), *_answers(history), *_order(history), *whole_logs(history), *_nothing_twice(history)]
    found += [*_asked(history), *_said(history), *of_many(history)]
    if before is not None:
        found += _since(before, history)
    return found


def at_rest(history: History) -> Iterator[str]:
    if history.integrity != "ok":
        yield f"the database is damaged: {history.integrity}"
    yield from history.broken
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
        if openers.get(message.turn or "", message) is message and message.turn not in replaced and message.reply
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
    """A call that needs approval ran only after the decision, and each question was answered once."""
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
    """Messages of a session are taken and answered in the order they arrived."""
    hung_up = history.hung_up
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
        # The text is followed by an attachment.
        said = [str(entry.content).partition("\n")[0] for entry in entries if isinstance(entry, UserSaid)]
        expected = [message.content for message in messages if message.kind == "message"]
        # The next request of a client that disconnected may overtake its last one.
        said, expected = (_without(hung_up, contents) for contents in (said, expected))
        if said != expected:
            yield f"session {session}: the log has {said}, the inbox {expected}"
        replies = [reply_to for owner, reply_to, _ in history.answers if owner == session]
        place = {message.id: n for n, message in enumerate(messages)}
        order = [place.get(reply or "", -1) for reply in replies]
        if order != sorted(order):
            yield f"session {session}: answered in the order {replies}"


def _without(hung_up: set[str], contents: list[str]) -> list[str]:
    return [content for content in contents if not hung_up.intersection(MARK.findall(content))]


def whole_logs(history: History) -> Iterator[str]:
    """Each log is a valid conversation of complete, separate turns, with exactly the answers the model gave."""
    answered = {reply_to: content for _, reply_to, content in history.answers}
    opener = {message.turn: message for message in reversed(history.messages) if message.turn}
    hung_up = history.hung_up
    for session, log in history.logs.items():
        yield from (f"session {session}: {line}" for line in gaps([place.seq for place in log]))
        conversation: list[Entry] = []
        for place in log:
            conversation = [] if isinstance(place.entry, Cleared) else [*conversation, place.entry]
        try:
            problems = check_conversation(list(messages_of(conversation))) if conversation else []
        except LookupError as error:
            problems = [f"a result of no call: {error}"]
        if problems:
            yield f"session {session}: the log is no valid conversation: {problems}"
        yield from (f"session {session}: {line}" for line in resumable((place.seq, place.entry) for place in log))
        yield from (f"session {session}: {line}" for line in overlaps(place.turn for place in log))
        for turn, entries in turns_of((place.turn, place.entry) for place in log).items():
            first = opener.get(turn)
            left = first is not None and bool(hung_up.intersection(MARK.findall(first.content)))
            answer = answered.get(first.id) if first is not None else None
            if first is not None and not first.reply and isinstance(end := entries[-1], TurnEnded):
                answer = end.text
            yield from _turn(turn, entries, answer, left)


def _turn(turn: str, entries: list[Entry], answer: str | None, left: bool) -> Iterator[str]:
    yield from (f"turn {turn} {line}" for line in ended_once(entries))
    if not isinstance(end := entries[-1], TurnEnded):
        return
    if end.reason == "replaced" or (left and end.reason == "cancelled"):
        return
    if end.reason != "answer":
        yield f"turn {turn} ended with {end.reason}: {end.text}"
    said = [mark for entry in entries if isinstance(entry, UserSaid) for mark in MARK.findall(str(entry.content))]
    if said and f"done:{said[-1]} " not in f"{answer} ":
        yield f"turn {turn} was asked {said} and answered {answer!r}"


def _nothing_twice(history: History) -> Iterator[str]:
    """A step logged as finished did not start again; a call that must not be repeated started once."""
    begun = {id for place in _places(history) if isinstance(place.entry, CallsBegun) for id in place.entry.ids}
    robbed, hung_up = history.robbed, history.hung_up
    finished: dict[str, tuple[int, Place]] = {}  # by the call's idempotency key
    answered: dict[tuple[str, int], tuple[int, float]] = {}
    for session, log in history.logs.items():
        marker, round = "", 0
        for place in log:
            match place.entry:
                case UserSaid(content=content):
                    marker, round = (MARK.findall(str(content)) or [""])[-1], 0
                case ModelAnswered():
                    answered[marker, round] = session, place.at
                    round += 1
                case CallEnded():
                    finished[f"{place.turn}/{place.entry.id}"] = session, place
    yield from _asked_again(history, answered)
    starts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    keys: defaultdict[str, set[str]] = defaultdict(set)
    for run in history.runs:
        if run["what"] == "start":
            starts[run["key"]].append(run)
            keys[run["text"]].add(run["key"])
    for key, tries in starts.items():
        text = tries[0]["text"]
        if key not in finished:
            yield f"the call {text} ran and is not in the log"
            continue
        session, place = finished[key]
        ended = place.entry
        assert isinstance(ended, CallEnded)
        # A worker that was frozen while it lost its session does not know it yet when it wakes.
        aware = [run for run in tries if (session, run["pid"]) not in robbed]
        if ended.status == "ok" and aware and aware[-1]["at"] > place.at:
            yield f"the call {text} ran again after its result was on disk"
        if ended.name in UNSAFE:
            if len(tries) > 1:
                yield f"the call {text} must not be repeated and ran {len(tries)} times"
            if ended.id not in begun:
                yield f"the call {text} ran without its intent on disk"
    for text, several in keys.items():
        if len(several) > 1 and text.split("/")[0] not in hung_up:
            yield f"the call {text} had more than one idempotency key"
    yield from _results(history, starts)


def _asked_again(history: History, answered: dict[tuple[str, int], tuple[int, float]]) -> Iterator[str]:
    hung_up = history.hung_up
    robbed = {session: at for (session, _), at in sorted(history.robbed.items(), reverse=True, key=lambda one: one[1])}
    for request in history.requests:
        session, at = answered.get((request["marker"], request["round"]), (0, float("inf")))
        stale = request["time"] > robbed.get(session, float("inf"))  # a worker that has not noticed it yet may ask
        if request["time"] > at and not stale and request["marker"] not in hung_up:
            yield f"{request['marker']}: round {request['round']} was asked again after its answer was on disk"


def _results(history: History, starts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    ends = Counter(run["key"] for run in history.runs if run["what"] == "end")
    left = {place.turn for place in _places(history) if _reason(place.entry) in LEFT}
    robbed = history.robbed
    for session, log in history.logs.items():
        for place in log:
            entry = place.entry
            if not isinstance(entry, CallEnded):
                continue
            text, key = _text(entry.id), f"{place.turn}/{entry.id}"
            if entry.status == "interrupted":
                lived = [run for run in starts.get(key, ()) if (session, run["pid"]) not in robbed]
                if entry.name not in UNSAFE:
                    yield f"the call {text} may be repeated and was reported as interrupted"
                if history.killed is not None and any(run["pid"] not in history.killed for run in lived):
                    yield f"the call {text} was reported as interrupted though its process lived"
                if "outcome unknown" not in entry.content:
                    yield f"the call {text} was interrupted and the model is not told so: {entry.content!r}"
            elif entry.status == "cancelled" and place.turn in left:
                continue
            elif entry.status != "ok":
                yield f"the call {text} ended with {entry.status}: {entry.content}"
            elif entry.name != "message" and (not starts.get(key) or not ends[key]):
                yield f"the call {text} has a result and did not run"


def _since(before: History, history: History) -> Iterator[str]:
    """Everything on disk at the kill is unchanged, and none of it ran again."""
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
    """The planned position of a call: marker/round/number."""
    return "/".join(id.rsplit("_", 2))
