"""What the processes of a store tell each other, so that nobody looks for what another one has or does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ANY = "a"  # whatever there is may have changed
WORK = "w"  # there is something in the inbox of sessions
ENDED = "e"  # messages were answered that somebody elsewhere may wait for
SENDING = "o"  # there is something in the outbox
TIMERS = "t"  # there are other timers


class News(NamedTuple):
    """What has changed. Without ids, it is not said of which sessions (or, of what has ended, which inbox rows)."""

    what: str = ANY
    to: str = ""  # the worker that is to see to it; without one, all are
    ids: tuple[int, ...] = ()


def written(what: str, to: str, ids: Iterable[int]) -> str:
    """As it travels."""
    return f"{what} {to} {','.join(map(str, ids))}"


def read(word: str) -> News:
    """What `written` has written, or a bare word. What is not understood, of another version say, may be anything."""
    what, _, rest = word.partition(" ")
    to, _, ids = rest.partition(" ")
    known = what in (WORK, ENDED, SENDING, TIMERS)
    try:
        return News(what, to, tuple(int(id) for id in ids.split(",") if id)) if known else News()
    except ValueError:
        return News()
