"""The history of a family of agents, and the checker that reports where it breaks the promise.

The promise: each report and each slot arrives once, a call that must not be repeated is not, every turn ends, and
the model was shown what the log says.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop.context.compaction import conversation_of
from everloop.log import CallEnded, Cleared, Compacted, Logged, ModelAnswered, TurnEnded, UserSaid, messages_of
from everloop.testing import check_conversation

from .checker import at_rest, whole_logs
from .family import APPLES, BEANS, COUNTER, FOUND, JOB, START, TICKS
from .forge import Forge
from .history import History, Message, Place, lines, read
from .scene import KILLED, SWEEPS, Meets, places, sweep


@dataclass(slots=True)
class Kinship:
    """A history with the requests to the family's model."""

    history: History
    requests: list[list[dict[str, Any]]]
    summaries: int

    @property
    def places(self) -> Iterator[Place]:
        return itertools.chain.from_iterable(self.history.logs.values())

    @property
    def answers(self) -> int:
        return sum(isinstance(place.entry, ModelAnswered) for place in self.places)

    @property
    def compacted(self) -> int:
        return sum(isinstance(place.entry, Compacted) for place in self.places)

    @property
    def interrupted(self) -> int:
        return sum(isinstance(one.entry, CallEnded) and one.entry.status == "interrupted" for one in self.places)

    def called(self, prefix: str) -> list[Message]:
        return [message for message in self.history.messages if message.id.startswith(prefix)]


def read_kinship(folder: Path) -> Kinship:
    requests = [line["messages"] for line in lines(folder / "requests")]
    return Kinship(read(folder), requests, len(lines(folder / "summaries")))


# ---------------------------------------------------------------------------------------------- the checker


def broken(after: Kinship, before: Kinship | None = None) -> list[str]:
    """Return each broken promise as one line. `before` is the state on disk at the moment of the kill."""
    found = [*at_rest(after.history), *whole_logs(after.history), *_strict(after), *_answered(after), *_calls(after)]
    if any(message.content.startswith("family") for message in after.history.messages):
        found += _family(after)
    if any(message.content == "ticks" for message in after.history.messages):
        found += _ticks(after)
    found += _shown(after)
    if before is not None:
        found += _since(before, after)
    return found


def _strict(after: Kinship) -> Iterator[str]:
    """A log is a conversation that the strictest API accepts, with every message in order."""
    for session, log in after.history.logs.items():
        entries = [place.entry for place in log]
        if problems := check_conversation(list(messages_of(entries)), strict=True):
            yield f"session {session}: the log is no valid conversation: {problems}"
        texts = [entry.content for entry in entries if isinstance(entry, UserSaid)]
        said = Counter(texts)
        messages = after.history.messages
        expected = Counter(one.content for one in messages if one.session == session and one.kind == "message")
        if said != expected:
            yield f"session {session}: the log has {said}, the inbox {expected}"


def _answered(after: Kinship) -> Iterator[str]:
    history = after.history
    for message in history.messages:
        if message.state != "done":
            yield f"message {message.id} is {message.state}, not done"
    known = Counter(message.id for message in history.messages)
    if twice := [id for id, count in known.items() if count > 1]:
        yield f"messages were taken twice: {twice}"
    if lost := set(history.acknowledged) - known.keys():
        yield f"messages were acknowledged and are lost: {lost}"
    due = Counter({id: 1 for id in known if not id.startswith("spawn:")})
    in_outbox = Counter(reply_to or "" for _, reply_to, _ in history.answers)
    if in_outbox != due:
        yield f"the outbox has answers to {in_outbox}, and due are {due}"
    delivered: defaultdict[str, list[bool]] = defaultdict(list)
    for answer in history.delivered:
        delivered[answer["reply_to"]].append(answer["repeat"])
    if delivered.keys() != due.keys():
        yield f"delivered were answers to {set(delivered)}, and due are {set(due)}"
    for id, marks in delivered.items():
        if not all(marks[1:]):
            yield f"message {id} was answered twice without a mark"


def _calls(after: Kinship) -> Iterator[str]:
    """A call that must not be repeated ran at most once; if its outcome is unknown, the model was told."""
    runs = Counter(run["key"] for run in after.history.runs)
    if twice := [key for key, count in runs.items() if count > 1]:
        yield f"these calls must not be repeated and ran again: {twice}"
    for place in after.places:
        entry = place.entry
        if not isinstance(entry, CallEnded):
            continue
        ran = runs[f"{place.turn}/{entry.id}"]
        may_be_cut_off = entry.name in ("count", "dig")
        if entry.status == "interrupted" and may_be_cut_off:
            if "outcome unknown" not in entry.content:
                yield f"the call {entry.id} was cut off and the model is not told so: {entry.content!r}"
        elif entry.id == "tick_0_0" and "There is no job" in entry.content:
            continue  # a repeated removal finds no job, and says so
        elif entry.status != "ok":
            yield f"the call {entry.id} of {entry.name} ended with {entry.status}: {entry.content}"
        elif may_be_cut_off and ran != 1:
            yield f"the call {entry.id} has a result and ran {ran} times"
        elif entry.name == "dig" and not entry.content.endswith(FOUND):
            yield f"the call {entry.id} is not whole in the log"


def _family(after: Kinship) -> Iterator[str]:
    """Two sub-agents, one report, one waited result and one slot of the job."""
    slots = after.called("cron:")
    if len(slots) != 1 or slots[0].content != JOB:
        yield f"the job came in the slots {[slot.id for slot in slots]}"
    told = after.called("spawn:")
    phases = [message.id.split(":", 2)[2] for message in told if message.id.count(":") > 1]
    begun = {message.content: message for message in told if message.id.count(":") == 1}
    if len(told) != 4 or begun.keys() != {APPLES, BEANS} or phases != ["extract:0", "extract:1"]:
        yield f"there are sub-agents {begun} and phases {phases}, in all {len(told)}"
        return
    (parent,) = (message for message in after.history.messages if message.content.startswith("family"))
    apples, beans = begun[APPLES], begun[BEANS]
    waited, reported = (apples, beans) if parent.content.endswith("apples") else (beans, apples)
    entries = [place.entry for place in after.history.logs[parent.session]]
    results = [one.content for one in entries if isinstance(one, CallEnded) and one.id.endswith(_CALLS[waited.content])]
    if results != [_said(after, waited)]:
        yield f"the sub-agent said {_said(after, waited)!r}, and the call that waited for it has {results}"
    reports = [entry for entry in entries if isinstance(entry, UserSaid) and entry.inside]
    senders = [report.sender for report in reports]
    if senders != [f"sub:{reported.id.removeprefix('spawn:')}"]:
        yield f"the reports are of {senders}"
    elif _said(after, reported) not in str(reports[0].content):
        yield f"the sub-agent said {_said(after, reported)!r}, and its report is {reports[0].content!r}"
    if _said(after, beans) != '{"count": 7}':
        yield f"the result that was asked for is {_said(after, beans)!r}"


_CALLS = {APPLES: "_0_1", BEANS: "_0_2"}  # the ends of the calls' ids


def _said(after: Kinship, told: Message) -> str:
    """The last words of a sub-agent."""
    ends = [place.entry.text for place in after.history.logs[told.session] if isinstance(place.entry, TurnEnded)]
    return ends[-1]


def _ticks(after: Kinship) -> Iterator[str]:
    """Each slot of the job until its end, in order."""
    slots = [message.id.rpartition(":")[2] for message in after.called("cron:")]
    if slots != [str(int(START + 60 * n)) for n in range(1, TICKS + 1)]:
        yield f"the job came in the slots {slots}"


def _shown(after: Kinship) -> Iterator[str]:
    """Each request matches the log, including its compactions, and each answer has such a request."""
    if not after.requests:
        return
    views: list[Any] = []
    for log in after.history.logs.values():
        for number, place in enumerate(log):
            view = _view(log[:number])
            views.append(view)
            if isinstance(place.entry, ModelAnswered) and view not in [request[1:] for request in after.requests]:
                yield f"what the log says before {place.entry} was not what the model was shown"
        views.append(_view(log))
    for request in after.requests:
        if request[1:] not in views:
            yield f"the model was shown what is not in the log: {str(request[1:])[:2000]}"


def _view(log: list[Place]) -> list[dict[str, Any]]:
    """The conversation that a log yields, without the system prompt."""
    start, compacted = 0, None
    for place in log:
        if isinstance(place.entry, Cleared):
            start, compacted = place.seq, None
        elif isinstance(place.entry, Compacted):
            compacted = place.entry
    start = max(start, compacted.until if compacted is not None else 0)
    logged = [Logged(place.seq, place.turn, place.at, place.entry) for place in log[start:]]
    return list(conversation_of("", compacted, logged))[1:]


def _since(before: Kinship, after: Kinship) -> Iterator[str]:
    """Everything on disk at the kill is unchanged, and no answered model call was repeated."""
    known = {message.id for message in after.history.messages}
    if gone := [message.id for message in before.history.messages if message.id not in known]:
        yield f"messages were on disk and are gone: {gone}"
    for session, log in before.history.logs.items():
        if log != after.history.logs.get(session, [])[: len(log)]:
            yield f"session {session}: what was in the log has changed"
    asked, answered = len(after.requests) - len(before.requests), after.answers - before.answers
    if asked != answered:
        yield f"after the kill the model was asked {asked} times for {answered} answers"


# ---------------------------------------------------------------------------------------------- the scene


@dataclass(slots=True)
class FamilyScene:
    """A family that is killed and resumed. Each run starts with a copy of the folder `made`."""

    forge: Forge
    folder: Path
    messages: list[dict[str, Any]]
    bus: str = "memory"
    then: str = "memory"
    settings: dict[str, Any] = field(default_factory=dict)
    plant: str = ""
    made: Path | None = None
    again: tuple[int, ...] = ()  # it is killed again after the restart, at one of its first commits
    steps: bool = False  # the clock for jobs advances with completed work
    step: int = 2  # the step between the commits at which it is killed

    def named(self, name: str) -> Path:
        folder = self.folder / name
        if self.made is not None:
            shutil.copytree(self.made, folder)
        else:
            (folder / "agents").mkdir(parents=True)
            (folder / "agents" / "counter.md").write_text(COUNTER)
        return folder

    async def run(self, folder: Path, **options: Any) -> int:
        born = (folder / "agents").stat().st_ctime  # the clock for its jobs continues from here
        shared = {"settings": self.settings, "plant": self.plant, "steps": self.steps}
        return await self.forge.run("family", folder=str(folder), born=born, **shared, **options)

    async def undisturbed(self, name: str = "whole") -> tuple[Path, Kinship]:
        """Run it without a kill."""
        folder = self.named(name)
        assert await self.run(folder, bus=self.bus, messages=self.messages) == 0
        after = read_kinship(folder)
        assert after.interrupted == after.history.repeats == 0
        return folder, after

    async def killed(self, number: int, when: str, name: str = "") -> tuple[Kinship, Kinship]:
        """Kill it at a commit and resume it; return the state before and after."""
        folder = self.named(f"{name}{when}{number}")
        await self.die(folder, messages=self.messages, die_at=(number, when))
        for again in self.again:
            await self.die(folder, die_at=(1 + number % again, when))
        return await self.go_on(folder)

    async def die(self, folder: Path, **how: Any) -> None:
        """Run it until it is killed, or to its end if it needs fewer commits this time."""
        status = await self.run(folder, bus=self.bus, **how)
        assert status in (0, KILLED), f"{folder.name}: the program ended with {status}"

    async def go_on(self, folder: Path) -> tuple[Kinship, Kinship]:
        """Return the current state, and the state after it has resumed and ended."""
        before = read_kinship(folder)
        status = await self.run(folder, bus=self.then)
        assert status == 0, f"{folder.name}: the resumed program ended with {status}"
        return before, read_kinship(folder)

    async def everywhere(
        self, *instants: str, meets: Sequence[Meets[Kinship]] = ()
    ) -> tuple[list[tuple[Kinship, Kinship]], list[str]]:
        """Kill it before or after its commits until the kills have hit all required positions; return the states and
        every broken promise."""
        folder, whole = await self.undisturbed()
        found = [f"undisturbed: {line}" for line in broken(whole)]
        commits = int(lines(folder / "commits")[-1]["count"])

        async def one(sweep: int, number: int, when: str) -> tuple[Kinship, Kinship]:
            before, after = await self.killed(number, when, f"{sweep}-")
            found.extend(f"killed {when} commit {number} of {commits}: {line}" for line in broken(after, before))
            return before, after

        def at(step: int) -> list[tuple[int, str]]:
            return [place for place in places(commits, step, self.then) if not instants or place[1] in instants]

        return await sweep(one, at, self.step, meets), found

    async def unseen(self, *signs: str) -> set[str]:
        """Kill it at one position after another until the checker has found these kinds of broken promises; return
        those not found. The order of commits depends on timing, so missed ones are searched for again at every
        commit."""
        folder, _ = await self.undisturbed()
        commits = int(lines(folder / "commits")[-1]["count"])
        unseen = set(signs)
        for again in range(SWEEPS):
            for number, when in places(commits, 1 if again else self.step, self.then):
                before, after = await self.killed(number, when, f"{again}-")
                unseen -= {sign for sign in unseen for line in broken(after, before) if sign in line}
                if not unseen:
                    return unseen
        return unseen
