"""Wake-ups by NOTIFY. What is said of a session goes to the worker that has it, or to any one of those that take work:
a message costs the same, however many workers there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...log import Written
from ..news import WORK, written
from .pulse import CHANNEL
from .reading import NOTIFY
from .rows import FRESH

if TYPE_CHECKING:
    from .connecting import Connection

T = TypeVar("T")
TAKES, HEARS = "work", "ear"  # the addresses of workers: those that take any work, and those that only want to hear
AT_ONCE = 300  # ids in one notice, which may have 8,000 bytes
DIRECTED = f"""SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, told.what) FROM (
    SELECT 'w ' || worker || ' ' || string_agg(id::text, ',') AS what FROM (
        SELECT i.id, coalesce(
            (SELECT s.worker FROM session s JOIN worker w ON w.id = s.worker WHERE s.id = i.id AND {FRESH}),
            (SELECT w.id FROM worker w WHERE w.address = '{TAKES}' AND {FRESH} AND i.id > 0 ORDER BY random() LIMIT 1),
            '') AS worker
        FROM unnest(%s::bigint[]) AS i (id)) AS picked
    GROUP BY worker) AS told"""


@dataclass(slots=True)
class Notice:
    """What is to be said and has not gone out yet."""

    ids: set[int] = field(default_factory=set)
    all: bool = False  # it is not known of which
    sent: Written[None] | None = None


class Waking:
    """Says what has changed; many who say the same at once are one."""

    def __init__(self, reader: Callable[[Callable[[Connection], None]], Written[None]], lease: float) -> None:
        self._reader = reader
        self._lease = lease
        self._notices: dict[str, Notice] = {}
        self._lock = threading.Lock()

    async def say(self, what: str, ids: Iterable[int]) -> None:
        ids = set(ids)
        with self._lock:
            notice = self._notices.get(what)
            if notice is None:
                notice = self._notices[what] = Notice()
                notice.sent = self._reader(partial(self._send, what=what, notice=notice))
            notice.ids |= ids
            notice.all |= not ids
        assert notice.sent is not None
        try:
            await notice.sent
        except Exception:  # it never got to its connection: the next one must not wait for it
            with self._lock:
                if self._notices.get(what) is notice:
                    del self._notices[what]
            raise

    def seal(self) -> None:
        """Something else is said now: what comes is said after it, and not with what is already on its way."""
        with self._lock:
            self._notices.clear()

    def _send(self, db: Connection, what: str, notice: Notice) -> None:
        with self._lock:  # whoever comes now has written something that this one may be too early for
            if self._notices.get(what) is notice:
                del self._notices[what]
        if notice.all:
            db.execute(NOTIFY, (CHANNEL, what))
            return
        ids = sorted(notice.ids)
        for some in (ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)):
            if what == WORK:
                db.execute(DIRECTED, (CHANNEL, self._lease, self._lease, some))
            else:
                db.execute(NOTIFY, (CHANNEL, written(what, "", some)))
