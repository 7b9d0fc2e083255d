"""A stream on its way to a client: a turn's events go in, and whatever waits goes out in one write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any, Literal, NamedTuple

from .. import events
from ..messages import encode_json
from ..providers.sse import encode
from .responses import Chunks
from .resume import Place, Position

LONGEST_ARGUMENT = 200  # characters of a tool's arguments in a comment
MANY = 2048  # pieces that wait for a client; more are put together, so that a slow one costs no more than the text
RESTARTED = "\n\n[The answer was cut off and begins again.]\n\n"

Kind = Literal["text", "reasoning", "comment"]
KINDS: tuple[Kind, ...] = ("reasoning", "text")


class Piece(NamedTuple):
    """Something that waits to be written, and the line with the position after it."""

    kind: Kind
    text: str
    id: bytes


class Feed:
    """The bytes of a streamed answer. `show` is told the turn's events; the rest is for the one who writes.

    Where the client can come back, each text has its position, and one that does come back is shown what follows its
    own.
    """

    def __init__(
        self, chunks: Chunks, ping_seconds: float, resumable: bool = False, position: Position | None = None
    ) -> None:
        self.said = False  # whether something of the answer has gone out in the round that runs
        self._chunks = chunks
        self._ping_seconds = ping_seconds
        self._waiting: list[Piece] = []
        self._more = asyncio.Event()
        self._gap = False  # there was text before the tools that ran
        self._again = False  # what the client has is of another turn than what comes
        self._over = False
        self._place = Place() if resumable else None
        self._known = position  # up to here the client has everything
        self._known_text: list[str] = []  # of the round that the position is in

    def show(self, seq: int, event: events.Event) -> None:
        """Take in what happens in the round that began after this entry of the log."""
        if self._known is not None and seq > self._known.seq:
            self._leave_known(self._known)
        match event:
            case events.Text(text):
                self._say(seq, text)
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
        """What the client has is of a turn that was stopped, and what comes is of another one."""
        self._again, self._known = True, None

    def unsaid(self, text: str) -> bytes:
        """Words that no event has brought."""
        return self._chunks.text(f"\n\n{text}" if self._gap or self.said else text) if text else b""

    def end(self, run: asyncio.Future[Any]) -> None:
        """Nothing more comes: the turn is over, or has failed, of which whoever asks for its result is told."""
        if not run.cancelled():
            run.exception()
        self._over = True
        self._more.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is to be written, as it comes; in a long silence, signs of life."""
        while True:
            if not self._waiting and not self._over:
                self._more.clear()
                try:
                    async with asyncio.timeout(self._ping_seconds):
                        await self._more.wait()
                except TimeoutError:
                    yield self._encoded("comment", "ping")
                    continue
            if self._waiting:
                yield self._written()
            elif self._over:
                return

    # ------------------------------------------------------------------------------------------ what is new

    def _say(self, seq: int, text: str) -> None:
        gap, self._gap, self.said = self._gap, False, True
        if self._place is not None:
            self._place.add(seq, text)
        known = self._known
        if known is not None and seq <= known.seq:
            gap = gap and not known.chars
            text = self._rest(known, text) if seq == known.seq else ""
        if text:
            lead = RESTARTED if self._again else "\n\n" if gap else ""
            self._again = False
            self._put("text", lead + text)

    def _rest(self, known: Position, text: str) -> str:
        """What the client has not seen of the round that its position is in."""
        self._known_text.append(text)
        whole = "".join(self._known_text)
        if len(whole) < known.chars:
            return ""
        self._known = None
        # A round that was begun again after a crash may say something else.
        return whole[known.chars :] if known.fits(whole) else f"{RESTARTED}{whole}"

    def _leave_known(self, known: Position) -> None:
        """The round is over that the client's position is in, and has less text than the client."""
        self._known, whole = None, "".join(self._known_text)
        if known.chars and not known.ends(whole):
            self._put("text", f"{RESTARTED}{whole}")

    def _restart(self, seq: int) -> None:
        if self._place is not None:
            self._place.restart()
        self._known_text.clear()
        if self.said and (self._known is None or seq > self._known.seq):
            self._put("text", RESTARTED)

    def _is_known(self, seq: int) -> bool:
        """Whether the client has seen what happens there. What comes before a text was seen with it."""
        known = self._known
        return known is not None and (seq < known.seq or (seq == known.seq and known.chars > 0))

    # ------------------------------------------------------------------------------------------ what goes out

    def _comment(self, seq: int, what: str, facts: dict[str, object]) -> None:
        if not self._is_known(seq):
            self._put("comment", f"{what} {encode_json(facts).decode()}")

    def _put(self, kind: Kind, text: str) -> None:
        id = self._place.line() if kind == "text" and self._place is not None else b""
        self._waiting.append(Piece(kind, text, id))
        if len(self._waiting) > MANY:
            self._waiting = _together(self._waiting)
        self._more.set()

    def _written(self) -> bytes:
        """All that waits. With positions, texts that follow each other are one: few of them are enough."""
        waiting, self._waiting = self._waiting, []
        if self._place is not None:
            waiting = _together(waiting)
        return b"".join([piece.id + self._encoded(piece.kind, piece.text) for piece in waiting])

    def _encoded(self, kind: Kind, text: str) -> bytes:
        if kind == "comment":
            return self._chunks.comment(text, alone=self._place is None)
        return self._chunks.text(text) if kind == "text" else self._chunks.reasoning(text)


def _together(waiting: list[Piece]) -> list[Piece]:
    """The same in fewer pieces: between two comments one of thoughts and one of text."""
    found: list[Piece] = []
    for is_comment, group in groupby(waiting, lambda piece: piece.kind == "comment"):
        pieces = list(group)
        if is_comment:
            found += pieces
            continue
        for kind in KINDS:
            if some := [piece for piece in pieces if piece.kind == kind]:
                found.append(Piece(kind, "".join([piece.text for piece in some]), some[-1].id))
    return found
