"""The rules for multiple processes: responses to clients, ownership of leases, and scheduled work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from everloop.log import TurnEnded
from everloop.server.sse import RESTARTED
from everloop.store.peers import process_of

from .history import MARK, History, Message

LATE = 5.0  # seconds by which scheduled work may be late after an outage


def of_many(history: History) -> Iterator[str]:
    yield from history.complaints
    yield from _clients(history)
    yield from _fences(history)
    yield from _writers(history)
    yield from _slots(history)


def _clients(history: History) -> Iterator[str]:
    """A client gets what the log says, however often and wherever it asks."""
    ends = {place.turn: place.entry for log in history.logs.values() for place in log if _ended(place.entry)}
    by_mark: defaultdict[str, list[Message]] = defaultdict(list)
    for message in history.messages:
        for mark in MARK.findall(message.content):
            by_mark[mark].append(message)
    for asked in history.clients:
        yield from (f"{asked.mark}: {line}" for line in asked.refused)
        there = by_mark[asked.mark]
        answered = [end.text for one in there if isinstance(end := ends.get(one.turn), TurnEnded) and _good(end)]
        if not asked.answers and not asked.hung_up:
            yield f"{asked.mark}: its client got no answer"
        if asked.answers and not answered:
            yield f"{asked.mark} was answered to its client and is lost"
        if len(answered) > 1 or (len(there) > 1 and not asked.hung_up):
            yield f"{asked.mark}: a client asked once, and there are {len(there)} turns"
        for streamed, text in asked.answers:
            told = text.rpartition(RESTARTED)[2] if streamed else text
            if answered and told != answered[0]:
                yield f"{asked.mark}: its client was told {text!r}, the log says {answered[0]!r}"


def _ended(entry: object) -> bool:
    return isinstance(entry, TurnEnded)


def _good(end: TurnEnded) -> bool:
    return end.reason == "answer"


def _fences(history: History) -> Iterator[str]:
    """A lease changes hands with a higher fence, and only if it was released or its holder is dead."""
    last: dict[int, tuple[int, str | None]] = {}
    for lease in history.leases:
        where = f"session {lease.session}"
        if lease.fence < lease.fence_before:
            yield f"{where}: the fence fell from {lease.fence_before} to {lease.fence}"
        fence, holder = last.get(lease.session, (0, None))
        if (fence, holder) != (lease.fence_before, lease.before):
            yield f"{where}: the lease of {holder} ({fence}) became that of {lease.before} unseen"
        last[lease.session] = lease.fence, lease.after
        if lease.after is None or lease.after == lease.before:
            continue
        if lease.fence == lease.fence_before:
            yield f"{where}: {lease.after} took the lease and the fence is still {lease.fence}"
        robbed = process_of(lease.before) if lease.before is not None else None
        ours = robbed == process_of(lease.after)  # a process that continues under a new name
        if robbed is not None and lease.alive and not ours and lease.at < history.ended.get(robbed, float("inf")):
            yield f"{where}: {lease.after} took the lease of {lease.before}, which lived"


def _writers(history: History) -> Iterator[str]:
    """Only the process that holds the session writes entries of its turns."""
    changed: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for lease in history.leases:
        changed[lease.session, lease.transaction] |= {one for one in (lease.before, lease.after) if one}
    for write in history.writes:
        holders = changed[write.session, write.transaction] | ({write.holder} if write.holder else set())
        if write.writer not in {process_of(holder) for holder in holders}:
            yield f"session {write.session}: process {write.writer} wrote {write.what} under the lease of {holders}"


def _slots(history: History) -> Iterator[str]:
    """Each slot of a job fires once, and none is skipped while the store is available."""
    for job, every in history.jobs.items():
        ids = [message.id for message in history.messages if message.id.startswith(f"cron:{job}:")]
        slots = sorted(float(id.rpartition(":")[2]) for id in ids)
        if not slots:
            yield f"the job {job} never came"
        for before, after in pairwise(slots):
            if after == before:
                yield f"the job {job} came twice in the slot {after}"
            for missed in range(1, round((after - before) / every)):
                due = before + missed * every
                if not any(begin < due + every and due < end + LATE for begin, end in history.outages):
                    yield f"the job {job} did not come in the slot {due}"
