"""What a process knows of a session that it works on, and of the messages on their way to a turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import events
from ..bus import InboundMessage, Kind
from ..engine import Turn
from ..log import Reason, UserSaid, Written

VIA = "via"  # in a message's metadata: the worker whose process has the client's connection


@dataclass(slots=True)
class Item:
    """A message on its way to a turn, and who waits for the answer."""

    message: InboundMessage
    kind: Kind
    answer: asyncio.Future[str]
    emit: events.Emit | None = None
    elsewhere: Callable[[int], None] | None = None  # told of its row when its turn is none that begins here now
    withdrawn: str | None = None  # why its turn ends when it begins: nobody waits for it any more

    @property
    def place(self) -> tuple[str, str]:
        """Owner and key of its session."""
        return self.message.owner, self.message.session_key

    def is_elsewhere(self, row: int) -> None:
        """Whoever waits must look for its turn where it runs, or ran; here it is told nothing."""
        elsewhere, self.elsewhere = self.elsewhere, None
        if elsewhere is not None:
            self.emit = None
            elsewhere(row)


@dataclass(slots=True)
class Live:
    """A session that this process is working on."""

    owner: str
    key: str
    fresh: deque[Item] = field(default_factory=deque)  # handed in, not on disk yet
    item: Item | None = None  # the one on its way to disk
    steer: list[tuple[int, UserSaid]] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)  # inbox rows that have steered the running turn
    behind: dict[int, Kind] = field(default_factory=dict)  # inbox rows that wait for the running turn to end
    emit: list[events.Emit] = field(default_factory=list)  # who watches the running turn
    turn: Turn | None = None
    rows: Sequence[int] = ()  # of the inbox, that the running turn was opened by
    stopped: tuple[Reason, str] | None = None  # a stop that came before the turn was there
    chat_told: bool = False  # the command that stopped the turn is answered in its chat, so the turn says nothing there
    meant: str | int | None = None  # the turn that it is for, or the inbox row that opens it; None for any
    system: Written[str] | None = None  # the system prompt of the turn that is being begun
    running: bool = False
    changes: int = 0  # of `running`: what was read of the inbox before one is not true after it
    leaves: bool = False  # another process is to go on with the turn that runs, or that is about to
    again: bool = False  # there may be more in the inbox
    task: asyncio.Task[None] | None = None
    command: asyncio.Future[Any] | None = None  # a command under way that can be stopped
    message: str | None = None  # the id of the message whose turn runs

    def knows(self, row: int) -> bool:
        """Whether it is settled already what becomes of this row of the inbox."""
        return row in self.behind or row in self.taken or any(row == id for id, _ in self.steer)

    def begins(self) -> None:
        self.running = True
        self.changes += 1

    def ends(self) -> None:
        """The turn is over; what came too late for it waits for the next."""
        self.behind.update((id, "message") for id, _ in self.steer)
        self.steer.clear()
        self.taken.clear()
        self.emit.clear()
        self.running, self.turn, self.stopped, self.meant, self.message = False, None, None, None, None
        self.rows = ()
        self.chat_told = False
        self.changes += 1

    def stop(self, reason: Reason, text: str, meant: str | int | None = None) -> None:
        """Stop the turn that runs, or that is about to; where one is `meant`, no other."""
        if self.turn is not None:
            if meant in (None, self.turn.id, *self.rows):
                self.turn.stop(reason, text)
        elif self.command is not None:
            self.command.cancel()
        else:
            self.stopped, self.meant = (reason, text), meant

    def runs(self, turn: Turn) -> None:
        """The turn is there, and hears what was to be done to it."""
        self.turn = turn
        if self.stopped is not None:
            turn.stop(*self.stopped)
        if self.leaves:
            turn.leave()

    def leave(self) -> None:
        """Let another process go on with the turn that runs, or that is about to, from its next step on."""
        self.leaves = True
        if self.turn is not None:
            self.turn.leave()
