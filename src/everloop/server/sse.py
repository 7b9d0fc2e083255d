"""Streamed answers for HTTP clients: converts a turn's events to server-sent events.

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


class WritePosition:
    """How far a stream has been written."""

    def __init__(self) -> None:
        self.seq = 0
        self.chars = 0
        self.sum = 0

    def resume(self, position: Position) -> None:
        """Continue from a client's position."""
        self.seq, self.chars, self.sum = position.seq, position.chars, position.sum or 0

    def add(self, seq: int, text: str) -> None:
        if seq != self.seq:
            self.advance(seq)
        self.chars += len(text)
        self.sum = checksum(text, self.sum)

    def advance(self, seq: int) -> None:
        """Move to the round that began after this log entry, of which no text is written yet."""
        self.seq = seq
        self.restart()

    def restart(self) -> None:
        """Start the round's text over."""
        self.chars = self.sum = 0

    def line(self) -> bytes:
        """Return the `id` line of the next event. A command is not in the log, so its events have none."""
        return b"" if not self.seq else b"id: %d.%d.%08x\n" % (self.seq, self.chars, self.sum)


def position_of(headers: Mapping[str, str]) -> Position | None:
    """Return the position that a client resumes from, if any."""
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


MAX_ARGUMENT = 200  # characters of a tool's arguments in a comment
MANY = 2048  # parts queued for a client; beyond that they are joined, so that a slow client costs no more than the text
RESTARTED = "\n\n[The answer was interrupted and starts again.]\n\n"

Kind = Literal["text", "reasoning", "comment"]
KINDS: tuple[Kind, ...] = ("reasoning", "text")

Write = Callable[[bytes], Awaitable[None]]
Begin = Callable[[], Awaitable[Write]]  # starts a response, once


class Part(NamedTuple):
    """A part that waits to be written, and the `id` line with the position after it."""

    kind: Kind
    text: str
    id: bytes


class Encoder(Protocol):
    """How an API encodes the parts of a stream."""

    def text(self, text: str, id: bytes = b"") -> bytes:
        """Encode a text; `id` is the line with the position after it, and belongs to the event with the text."""

    def reasoning(self, text: str) -> bytes: ...

    def comment(self, text: str, alone: bool = True) -> bytes: ...


class AnswerStream:
    """The bytes of one streamed answer. `show` receives the turn's events; `write_to` writes them to a response.

    In a `resumable` stream, each text carries its position, and a client that reconnects with a `position` gets what
    follows it.
    """

    def __init__(
        self, chunks: Encoder, ping_seconds: float, resumable: bool = False, position: Position | None = None
    ) -> None:
        self.said = False  # some text of the running round was shown
        self._chunks = chunks
        self._ping_seconds = ping_seconds
        self._waiting: list[Part] = []
        self._more = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._written_at = 0.0
        self._gap = False  # there was text before the tools that ran
        self._again = False  # the client has text of another turn
        self._over = False
        self._written = WritePosition() if resumable else None
        self._known = position  # the client has everything up to here
        self._cursor = TextCursor(position)  # positioned in the round of that position

    def show(self, seq: int, event: events.Event) -> None:
        """Take an event of the round that began after log entry `seq`."""
        if self._known is not None and seq > self._known.seq:
            self._leave_known(self._known)
        match event:
            case events.Text(text):
                gap, self._gap, self.said = self._gap, False, True
                if self._written is not None:
                    self._written.add(seq, text)
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
                shown = encode(arguments).decode()[:MAX_ARGUMENT]
                self._comment(seq, "tool", {"call": call, "name": name, "status": "started", "arguments": shown})
            case events.ToolEnded(call, name, _, status, seconds):
                self._comment(seq, "tool", {"call": call, "name": name, "status": status, "seconds": seconds})
            case events.Compacting(turns):
                self._comment(seq, "compacting", {"turns": turns})
            case events.Reasoning(text) if not self._is_known(seq):
                self._put("reasoning", text)

    def begin_again(self) -> None:
        """Start over: the client resumed a stopped turn, and a new one follows."""
        self._again, self._known = True, None

    def unsaid(self, text: str) -> bytes:
        """Encode text that no event has delivered."""
        return self._chunks.text(f"\n\n{text}" if self._gap or self.said else text) if text else b""

    def end(self, run: asyncio.Future[Any]) -> None:
        """Finish the stream at the end of the turn. Its result, or its error, is read from the future."""
        if not run.cancelled():
            run.exception()
        self._over = True
        self._more.set()
        if self._timer is not None:
            self._timer.cancel()

    async def write_to(self, begin: Begin, start: bytes) -> bytes:
        """Write the answer as it streams, with pings during long silences.

        `begin` is called once there is something to write, and `start` precedes it. Return the start if it was not
        written.
        """
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
            # In a resumable stream, adjacent texts are joined, which needs fewer positions.
            for kind, text, id in waiting if self._written is None else _joined(waiting):
                if kind == "text":
                    written.append(self._chunks.text(text, id))
                elif kind == "reasoning":
                    written.append(self._chunks.reasoning(text))
                else:
                    written.append(self._chunks.comment(text, alone=self._written is None))
            if any(written):
                if write is None:
                    write = await begin()
                    written.insert(0, start)
                await write(b"".join(written))
            self._written_at = clock()
        return start if write is None else b""

    # ------------------------------------------------------------------------------------------ what is new

    def _unseen(self, known: Position, seq: int, text: str) -> str:
        """Return the part of a text that a client with everything up to `known` has not seen."""
        if seq < known.seq:
            return ""
        new = self._cursor.feed(text)
        if new is None:  # a round that ran again after a crash may differ
            new = f"{RESTARTED}{self._cursor.restart()}"
        if not self._cursor.is_behind:
            self._known = None
        return new

    def _leave_known(self, known: Position) -> None:
        """Handle a round that ended before the client's position in it."""
        self._known, whole = None, self._cursor.text
        if known.chars and not known.is_all_of(whole):
            self._put("text", f"{RESTARTED}{whole}")

    def _restart(self, seq: int) -> None:
        if self._written is not None:
            self._written.restart()
        self._cursor.begin()
        if self.said and (self._known is None or seq > self._known.seq):
            self._put("text", RESTARTED)

    def _is_known(self, seq: int) -> bool:
        """Return whether the client has seen the events of this round. Events that precede a text were seen with it."""
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
        """Return the `id` line of a text that is queued now."""
        return self._written.line() if self._written is not None else b""

    def _wake(self) -> None:
        if len(self._waiting) > MANY:
            self._waiting = _joined(self._waiting)
        self._more.set()

    def _ping(self) -> None:
        """Queue a ping if nothing was written for too long.

        A single timer, rarely rescheduled, adds no cost per text.
        """
        if self._over:
            return
        loop = asyncio.get_running_loop()
        due = self._written_at + self._ping_seconds
        if due <= loop.time():
            if not self._waiting:  # otherwise the client is slow
                self._put("comment", "ping")
            due = loop.time() + self._ping_seconds
        self._timer = loop.call_at(due, self._ping)


def _joined(waiting: list[Part]) -> list[Part]:
    """Return the same in fewer parts: between two comments, at most one of reasoning and one of text."""
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
