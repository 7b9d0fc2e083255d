"""A streamed answer on its way to an HTTP client: a turn's events go in, server-sent events come out.

The `id` of each event says how far the client has read; a client that reconnects sends it back as `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

from .. import events
from ..messages import encode_json
from ..providers.openai import encode
from ..text_cursor import Position, TextCursor, checksum
from .errors import bad_request

LAST_EVENT_ID = "Last-Event-ID"
_POSITION = re.compile(r"([0-9]{1,15})\.([0-9]{1,9})(?:\.([0-9a-f]{8}))?", re.ASCII)


class Place:
    """The position of a stream that is being written."""

    def __init__(self) -> None:
        self.seq = 0
        self.chars = 0
        self.sum = 0

    def resume(self, position: Position) -> None:
        """Go on where a client is."""
        self.seq, self.chars, self.sum = position.seq, position.chars, position.sum or 0

    def add(self, seq: int, text: str) -> None:
        if seq != self.seq:
            self.restart()
            self.seq = seq
        self.chars += len(text)
        self.sum = checksum(text, self.sum)

    def restart(self) -> None:
        """The round's text starts again."""
        self.chars = self.sum = 0

    def line(self) -> bytes:
        """The `id` line of the next event. A command shows nothing of the log, so its events have none."""
        return b"" if not self.seq else b"id: %d.%d.%08x\n" % (self.seq, self.chars, self.sum)


def position_of(headers: Mapping[str, str]) -> Position | None:
    """The position that a client resumes from, if it does."""
    given = headers.get(LAST_EVENT_ID)
    if given is None:
        return None
    found = _POSITION.fullmatch(given)
    if found is None:
        raise bad_request(
            f"{LAST_EVENT_ID}: is not a position in a stream; send the id of the last event that was read",
            LAST_EVENT_ID,
        )
    return Position(int(found[1]), int(found[2]), int(found[3], 16) if found[3] else None)


LONGEST_ARGUMENT = 200  # characters of a tool's arguments in a comment
MANY = 2048  # parts that wait for a client; more are joined, so that a slow one costs no more than the text
RESTARTED = "\n\n[The answer was interrupted and starts again.]\n\n"

Kind = Literal["text", "reasoning", "comment"]
KINDS: tuple[Kind, ...] = ("reasoning", "text")

Write = Callable[[bytes], Awaitable[None]]
Begin = Callable[[], Awaitable[Write]]  # starts a response, once


class Part(NamedTuple):
    """Something that waits to be written, and the `id` line with the position after it."""

    kind: Kind
    text: str
    id: bytes


class Encoder(Protocol):
    """How an API writes what a stream is made of."""

    def text(self, text: str, id: bytes = b"") -> bytes:
        """Write a text; `id` is the line with the position after it, which belongs to the event that has the text."""

    def reasoning(self, text: str) -> bytes: ...

    def comment(self, text: str, alone: bool = True) -> bytes: ...


class AnswerStream:
    """The bytes of one streamed answer. `show` is told the turn's events; `write_to` writes them to a response.

    In a `resumable` stream each text carries its position, and a client that reconnects with a `position` is sent what
    follows it.
    """

    def __init__(
        self, chunks: Encoder, ping_seconds: float, resumable: bool = False, position: Position | None = None
    ) -> None:
        self.said = False  # whether some text of the running round was shown
        self._chunks = chunks
        self._ping_seconds = ping_seconds
        self._waiting: list[Part] = []
        self._more = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._written_at = 0.0
        self._gap = False  # there was text before the tools that ran
        self._again = False  # the client has text of another turn than this one
        self._over = False
        self._place = Place() if resumable else None
        self._known = position  # the client has everything up to here
        self._cursor = TextCursor(position)  # in the round that the position is in

    def show(self, seq: int, event: events.Event) -> None:
        """Take an event of the round that began after this entry of the log."""
        if self._known is not None and seq > self._known.seq:
            self._leave_known(self._known)
        match event:
            case events.Text(text):
                gap, self._gap, self.said = self._gap, False, True
                if self._place is not None:
                    self._place.add(seq, text)
                if self._known is not None:
                    gap, text = gap and not self._known.chars, self._unseen(self._known, seq, text)
                if text:
                    lead, self._again = RESTARTED if self._again else "\n\n" if gap else "", False
                    self._waiting.append(Part("text", lead + text, self._id()))
                    self._wake()
            case events.Restarted():
                self._restart(seq)
            case events.ToolStarted(call, name, arguments):
                self._gap, self.said = self._gap or self.said, False
                shown = encode(arguments).decode()[:LONGEST_ARGUMENT]
                self._comment(seq, "tool", {"call": call, "name": name, "status": "started", "arguments": shown})
            case events.ToolEnded(call, name, _, status, seconds):
                self._comment(seq, "tool", {"call": call, "name": name, "status": status, "seconds": seconds})
            case events.Compacting(turns):
                self._comment(seq, "compacting", {"turns": turns})
            case events.Reasoning(text) if not self._is_known(seq):
                self._put("reasoning", text)

    def begin_again(self) -> None:
        """The client resumed a stopped turn; a new one follows."""
        self._again, self._known = True, None

    def unsaid(self, text: str) -> bytes:
        """Encode text that no event has brought."""
        return self._chunks.text(f"\n\n{text}" if self._gap or self.said else text) if text else b""

    def end(self, run: asyncio.Future[Any]) -> None:
        """The turn has ended. Its result, or its error, is read from the future."""
        if not run.cancelled():
            run.exception()
        self._over = True
        self._more.set()
        if self._timer is not None:
            self._timer.cancel()

    async def write_to(self, begin: Begin, start: bytes) -> bytes:
        """Write the answer as it comes; during a long silence, pings. `begin` is called when there is something to say,
        and `start` precedes it. Return the start if it was not written."""
        write: Write | None = None
        clock = asyncio.get_running_loop().time
        self._written_at = clock()
        self._ping()
        while self._waiting or not self._over:
            if not self._waiting:
                self._more.clear()
                await self._more.wait()
                continue
            waiting, self._waiting = self._waiting, []
            written: list[bytes] = []
            # In a resumable stream adjacent texts are joined: it needs fewer positions.
            for kind, text, id in waiting if self._place is None else _joined(waiting):
                if kind == "text":
                    written.append(self._chunks.text(text, id))
                elif kind == "reasoning":
                    written.append(self._chunks.reasoning(text))
                else:
                    written.append(self._chunks.comment(text, alone=self._place is None))
            if any(written):
                if write is None:
                    write = await begin()
                    written.insert(0, start)
                await write(b"".join(written))
            self._written_at = clock()
        return start if write is None else b""

    # ------------------------------------------------------------------------------------------ what is new

    def _unseen(self, known: Position, seq: int, text: str) -> str:
        """What a client that has everything up to `known` has not seen of a text."""
        if seq < known.seq:
            return ""
        new = self._cursor.feed(text)
        if new is None:  # a round that ran again after a crash may say something else
            new = f"{RESTARTED}{self._cursor.restart()}"
        if not self._cursor.is_behind:
            self._known = None
        return new

    def _leave_known(self, known: Position) -> None:
        """The round that the client's position is in has ended before that position."""
        self._known, whole = None, self._cursor.text
        if known.chars and not known.is_all_of(whole):
            self._put("text", f"{RESTARTED}{whole}")

    def _restart(self, seq: int) -> None:
        if self._place is not None:
            self._place.restart()
        self._cursor.begin()
        if self.said and (self._known is None or seq > self._known.seq):
            self._put("text", RESTARTED)

    def _is_known(self, seq: int) -> bool:
        """Whether the client has seen the events of this round. It saw what comes before a text with the text."""
        known = self._known
        return known is not None and (seq < known.seq or (seq == known.seq and known.chars > 0))

    # ------------------------------------------------------------------------------------------ what goes out

    def _comment(self, seq: int, what: str, facts: dict[str, object]) -> None:
        if not self._is_known(seq):
            self._put("comment", f"{what} {encode_json(facts).decode()}")

    def _put(self, kind: Kind, text: str) -> None:
        self._waiting.append(Part(kind, text, self._id() if kind == "text" else b""))
        self._wake()

    def _id(self) -> bytes:
        """The `id` line of a text that is put now."""
        return self._place.line() if self._place is not None else b""

    def _wake(self) -> None:
        if len(self._waiting) > MANY:
            self._waiting = _joined(self._waiting)
        self._more.set()

    def _ping(self) -> None:
        """Put a ping if nothing was written for too long. One timer, seldom rescheduled, costs a text nothing."""
        if self._over:
            return
        loop = asyncio.get_running_loop()
        due = self._written_at + self._ping_seconds
        if due <= loop.time():
            if not self._waiting:  # else the client is slow
                self._put("comment", "ping")
            due = loop.time() + self._ping_seconds
        self._timer = loop.call_at(due, self._ping)


def _joined(waiting: list[Part]) -> list[Part]:
    """The same in fewer parts: between two comments one of reasoning and one of text."""
    found: list[Part] = []
    for is_comment, group in groupby(waiting, lambda part: part.kind == "comment"):
        parts = list(group)
        if is_comment:
            found += parts
            continue
        for kind in KINDS:
            if some := [part for part in parts if part.kind == kind]:
                found.append(Part(kind, "".join([part.text for part in some]), some[-1].id))
    return found
