"""A running turn, shown to all who watch: whoever started it, and followers in this process and in others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .. import events
from ..log import Call, ModelAnswered
from ..store.base import Claim
from ..store.relays import Audience, Relay
from ..text import clean
from .session import Live

log = logging.getLogger(__name__)
LONGEST = 500  # characters of what goes in and out of a tool, for those who watch from elsewhere
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        events.TurnStarted,
        events.Text,
        events.Reasoning,
        events.Restarted,
        events.ToolStarted,
        events.ToolProgress,
        events.ToolEnded,
        events.Asked,
        events.Usage,
        events.Steered,
        events.Compacting,
        events.Compacted,
        events.Error,
        events.TurnEnded,
    )
}


@dataclass(slots=True, frozen=True)
class Batch:
    """Events of a turn, and their place in it: the log's last entry before them, which try of the round they belong to,
    and how many characters of its text stand before them."""

    turn: str
    seq: int
    attempt: str
    chars: int
    events: list[events.Event]


Follow = Callable[[Batch], None]


def encode(batch: Batch) -> bytes:
    """One line of JSON."""
    try:
        return msgspec.json.encode(_wire(batch))
    except UnicodeEncodeError:  # half a letter, as some models send it
        return clean(msgspec.json.encode(_wire(_cleaned(batch))).decode()).encode()


def decode(data: bytes) -> Batch:
    """What `encode` has made. Kinds of events that are not known here are left out."""
    turn, seq, attempt, chars, told = _decoder.decode(data)
    known = [msgspec.json.decode(raw, type=_KINDS[name]) for name, raw in told if name in _KINDS]
    return Batch(turn, seq, attempt, chars, known)


_decoder = msgspec.json.Decoder(tuple[str, int, str, int, list[tuple[str, msgspec.Raw]]])


class Showing:
    """Tells those who watch what happens in one turn. Of places it keeps only the one where the turn is now."""

    def __init__(
        self,
        claim: Claim,
        live: Live,
        watchers: Callable[[], Iterable[events.Emit]],
        followers: list[Follow],
        relay: Relay | None,
        told: Callable[[bytes], None],
    ) -> None:
        self._claim = claim
        self._live = live
        self._watchers = watchers
        self._followers = followers
        self._tries = 0
        self._at = 0
        self._chars = 0
        self._gathered: list[Batch] = []  # for those elsewhere
        self._audience: Audience | None = None
        if relay is not None:
            self._audience = relay.serve(claim.owner, claim.key, self._asked, told)

    @property
    def seq(self) -> int:
        """The log's last entry."""
        return self._claim.next_seq - 1

    @property
    def followed(self) -> bool:
        """Whether anybody follows it, here or elsewhere, who has not started it."""
        return bool(self._followers) or self.followed_elsewhere

    @property
    def followed_elsewhere(self) -> bool:
        return self._audience is not None and self._audience.there

    def __call__(self, event: events.Event) -> None:
        for watcher in self._watchers():
            try:
                watcher(event)
            except Exception:  # a watcher's fault is no fault of the turn
                log.exception("a watcher of %s failed", self._claim.key)
        if self.seq != self._at:
            self._at, self._chars = self.seq, 0
        if isinstance(event, events.Restarted):
            self._tries, self._chars = self._tries + 1, 0
        if self.followed:
            batch = self._batch(self._chars, [event])
            for follow in self._followers:
                follow(batch)
            if self.followed_elsewhere:
                self._gather(batch)
        if isinstance(event, events.Text):
            self._chars += len(event.text)

    def show_to(self, follow: Follow) -> None:
        """Tell a newcomer where the turn is; all that happens from now on is told as well."""
        turn = self._live.turn
        if turn is None:
            return  # it is about to begin
        if turn.emit is None:
            turn.emit = self
        so_far: list[events.Event] = [events.Text("".join(turn.partial))] if turn.partial else []
        so_far += [
            events.ToolStarted(call.id, call.name, call.arguments) for call in _running(turn.entries, turn.running)
        ]
        follow(self._batch(0, so_far))

    def close(self) -> None:
        """The turn is over here."""
        self._flush()
        if self._audience is not None:
            self._audience.close()
            self._audience = None

    def _batch(self, chars: int, told: list[events.Event]) -> Batch:
        return Batch(self._claim.turn, self.seq, f"{self._claim.fence}.{self._tries}", chars, told)

    def _asked(self, address: str) -> None:
        """Somebody elsewhere begins to follow, or has missed something."""
        audience = self._audience
        if audience is not None:
            self.show_to(lambda batch: audience.say(encode(batch), address))

    def _gather(self, batch: Batch) -> None:
        """Keep it until all that happens within a moment is sent."""
        (event,) = batch.events
        last = self._gathered[-1] if self._gathered else None
        if last is None or (last.seq, last.attempt) != (batch.seq, batch.attempt):
            if last is None and self._audience is not None:
                self._audience.soon(self._flush)
            self._gathered.append(replace(batch, events=[_short(event)]))
        elif isinstance(event, events.Text) and isinstance(before := last.events[-1], events.Text):
            last.events[-1] = events.Text(before.text + event.text)
        else:
            last.events.append(_short(event))

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self._audience is not None:
            for batch in gathered:
                self._audience.say(encode(batch))


def _running(entries: Iterable[object], running: Iterable[str]) -> list[Call]:
    calls = {call.id: call for entry in entries if isinstance(entry, ModelAnswered) for call in entry.calls}
    return [calls[id] for id in running if id in calls]


def _short(event: events.Event) -> events.Event:
    """What others need of an event: the log has all of it."""
    match event:
        case events.ToolStarted(arguments=arguments):
            return replace(event, arguments={name: _cut(value) for name, value in arguments.items()})
        case events.ToolEnded(content=content):
            return replace(event, content=content[:LONGEST])
        case events.ToolProgress(text=text) | events.TurnEnded(text=text):
            return replace(event, text=text[:LONGEST])
        case _:
            return event


def _cut(value: object) -> object:
    if isinstance(value, str):
        return value[:LONGEST]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:LONGEST]


def _wire(batch: Batch) -> Any:
    told = [(type(event).__name__, event) for event in batch.events]
    return batch.turn, batch.seq, batch.attempt, batch.chars, told


def _cleaned(batch: Batch) -> Batch:
    """The same without what cannot be written. Only texts can hold such: all else has been in the log."""
    texts = (events.Text, events.Reasoning, events.ToolProgress)
    return replace(
        batch,
        events=[
            replace(event, text=clean(event.text)) if isinstance(event, texts) else event for event in batch.events
        ],
    )
