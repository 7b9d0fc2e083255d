"""What a conversation can do without when it outgrows the model's window. Pure: it decides and changes nothing.

Long results of older turns go first: a pointer to a file is left of them. If that is not enough, whole turns, the
oldest first, are to be summarised. Only what does not fit otherwise is taken from the turn under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..log import CallEnded, Compacted, Entry, Logged, ModelAnswered, Noted, UserSaid
from .view import can_be_trimmed, messages_shown, pointer
from .window import PICTURE, weigh

LONG = 1_500  # units: a result that weighs so much more than a pointer to it is worth putting aside
PLACE = "x" * 100  # about as long as the name of a file
KEPT_TURNS = 2  # the newest ones, which stay whole as long as they fit


@dataclass(slots=True, frozen=True)
class Room:
    """How much a request may weigh, in units of `tokens.weigh`."""

    fixed: int  # what every request has: system prompt, tools, and a summary of the usual length
    target: int  # how much is to be left, so that there is room for some time
    limit: int  # what still fits


@dataclass(slots=True)
class Plan:
    """What is to be left out, besides what was before."""

    until: int  # everything up to here is to be summarised
    gone: list[Logged] = field(default_factory=list)
    turns: int = 0  # in `gone`
    aside: list[CallEnded] = field(default_factory=list)
    trimmed: int = 0  # up to here pictures and long arguments are not shown any more
    units: int = 0  # what a request then weighs

    def entry(self, before: Compacted | None, follows: int, summary: str, places: dict[str, str]) -> Compacted:
        """The entry of the log that does it; `places` are the files of what is put aside."""
        gone = {one.entry.id for one in self.gone if isinstance(one.entry, CallEnded)}
        older = before or Compacted(0)
        untrusted = any(isinstance(one.entry, CallEnded | UserSaid) and one.entry.untrusted for one in self.gone)
        return Compacted(
            until=self.until,
            summary=summary or older.summary,
            turns=older.turns + self.turns,
            aside={id: place for id, place in older.aside.items() if id not in gone} | places,
            trimmed=max(self.trimmed, older.trimmed),
            untrusted=older.untrusted or untrusted,
            stopgap=older.stopgap and not summary,
            follows=follows,
        )


@dataclass(slots=True)
class _Group:
    """A turn, or messages that were noted without one. It begins with a user's message, so a cut before it is valid."""

    logged: list[Logged]
    units: int = 0  # as it is shown now
    savings: dict[str, int] = field(default_factory=dict)  # by call: what putting its result aside would save
    aside: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # that were put aside before
    trimmed: int = 0  # up to here

    @property
    def last(self) -> int:
        return self.logged[-1].seq


def plan(
    logged: Sequence[Logged],
    before: Compacted | None,
    room: Room,
    *,
    after: int = 0,
    open_from: int | None = None,
    kept_turns: int = KEPT_TURNS,
) -> Plan | None:
    """What to leave out of the entries that are shown now; None when there is nothing that could be.

    `after` is where they begin, `open_from` where the turn under way does; of that only results are put aside, and
    those of its last round last.
    """
    groups = _groups(logged, before)
    under_way = [group for group in groups if open_from is not None and group.logged[0].seq >= open_from]
    if groups and isinstance(groups[-1].logged[-1].entry, Noted):  # whoever notes may not be done
        under_way = groups[-1:]
    closed = groups[: len(groups) - len(under_way)]
    split = max(len(closed) - kept_turns, 0)
    old, recent = closed[:split], closed[split:]
    work = _Work(room.fixed + sum(group.units for group in groups))
    for group in old:
        work.shrink(group)
    gone = work.drop(old, room.target)
    if work.units > room.limit:  # then also what is rather kept, the oldest first, and enough for some time
        spare = _last_round(under_way)
        for group in (*recent, *under_way):
            work.shrink(group, room.target, spare=spare)
        gone += work.drop(recent, room.limit)
        for group in under_way:
            if work.units > room.limit:
                work.trim(group, spare)
        for group in (*recent, *under_way):
            work.shrink(group, room.limit)
    return _plan_of(groups, gone, before, after, work.units)


class _Work:
    """What a request weighs while things are taken out of it."""

    def __init__(self, units: int) -> None:
        self.units = units

    def shrink(self, group: _Group, until: int = -1, spare: frozenset[str] = frozenset()) -> None:
        """Put aside the long results of a group, all of them or until enough is saved."""
        for id, saved in group.savings.items():
            if self.units > until and id not in spare and id not in group.aside:
                group.aside.add(id)
                group.units -= saved
                self.units -= saved
        if until < 0:
            self.trim(group)

    def trim(self, group: _Group, spare: frozenset[str] = frozenset()) -> None:
        """Leave pictures and long arguments of a group out, but for those of the round that is spared."""
        own = [one for one in group.logged if not _of_round(one.entry, spare)]
        if not any(can_be_trimmed(one.entry) for one in own):
            return
        group.trimmed = own[-1].seq
        shown = Compacted(0, aside=dict.fromkeys((*group.aside, *group.known), PLACE), trimmed=group.trimmed)
        self.units -= group.units
        group.units = sum(map(weigh, messages_shown(group.logged, shown)))
        self.units += group.units

    def drop(self, groups: list[_Group], until: int) -> list[_Group]:
        """Take whole groups out, the oldest first, until enough is saved."""
        gone: list[_Group] = []
        while groups and self.units > until:
            gone.append(groups.pop(0))
            self.units -= gone[-1].units
        return gone


def _plan_of(groups: list[_Group], gone: list[_Group], before: Compacted | None, after: int, units: int) -> Plan | None:
    made = Plan(gone[-1].last if gone else after, units=units)
    made.gone = [one for group in gone for one in group.logged]
    made.turns = len(gone)
    for group in groups[len(gone) :]:
        results = [one.entry for one in group.logged if isinstance(one.entry, CallEnded)]
        made.aside += [result for result in results if result.id in group.aside]
        made.trimmed = max(made.trimmed, group.trimmed)
    known = before.trimmed if before else 0
    return made if made.gone or made.aside or made.trimmed > known else None


def _groups(logged: Sequence[Logged], before: Compacted | None) -> list[_Group]:
    """The turns that are shown, each with its weight and what could be saved in it."""
    groups: list[_Group] = []
    turn: str | None = None
    for one in logged:
        if not groups or _opens(one, turn):
            groups.append(_Group([]))
        groups[-1].logged.append(one)
        turn = one.turn
    for group in groups:
        group.units = sum(map(weigh, messages_shown(group.logged, before)))
        for one in group.logged:
            if isinstance(ended := one.entry, CallEnded):
                saved = _weight(ended.content) - _weight(pointer(ended, PLACE))
                if before is not None and ended.id in before.aside:
                    group.known.add(ended.id)
                elif saved > LONG:
                    group.savings[ended.id] = saved + PICTURE * len(ended.images)
    return groups


def _of_round(entry: Entry, calls: frozenset[str]) -> bool:
    """Whether an entry belongs to the round of these calls, or to what was said after it."""
    match entry:
        case ModelAnswered():
            return any(call.id in calls for call in entry.calls)
        case CallEnded():
            return entry.id in calls
        case _:
            return False


def _weight(text: str) -> int:
    return weigh({"role": "tool", "content": text})


def _opens(one: Logged, turn: str | None) -> bool:
    """Whether a new group begins here: with the first message of a turn, or with a user's message that was noted."""
    match one.entry:
        case UserSaid():
            return one.turn is None or one.turn != turn
        case Noted(message=message):
            return message.get("role") == "user"
        case _:
            return False


def _last_round(under_way: list[_Group]) -> frozenset[str]:
    """The calls of the newest answer of the turn under way: the model has not seen their results yet."""
    for group in under_way:
        for one in reversed(group.logged):
            if isinstance(one.entry, ModelAnswered):
                return frozenset(call.id for call in one.entry.calls)
    return frozenset()
