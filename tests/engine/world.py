"""A simulated environment of a turn that outlives its processes: log, inbox, tools and a model that follow a plan."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everloop import events
from everloop.actions import Limits, Park, next_action
from everloop.engine import Left, Parked, Review, Turn, run_turn
from everloop.log import (
    Call,
    CallEnded,
    CallsBegun,
    CallsDecided,
    Entry,
    ModelAnswered,
    TurnEnded,
    UserSaid,
    decode_entry,
    encode_entry,
    messages_of,
)
from everloop.messages import Conversation
from everloop.providers.base import LLMResponse, ToolCallRequest
from everloop.testing import check_conversation

HI = UserSaid("hi")
A, B = Call("a", "look"), Call("b", "send")
ASKED = ModelAnswered(calls=(A, B))


def done(call: Call) -> CallEnded:
    return CallEnded(call.id, call.name, "ok")


class Crash(Exception):
    """The process ends here."""


@dataclass
class World:
    """Everything that outlives a process: the log on disk, the inbox, and what really happened."""

    log: list[Entry] = field(default_factory=lambda: [HI])
    inbox: list[UserSaid] = field(default_factory=list)
    started: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    appends: int = 0
    crash_at: dict[int, bool] = field(default_factory=dict)  # append → whether it reached the disk
    sent: list[list[dict[str, Any]]] = field(default_factory=list)
    begun_on_disk: dict[str, bool] = field(default_factory=dict)
    left: int = 0  # number of handoffs to the next process


class WorldLog:
    """The log port of one process. It dies with the first crash."""

    def __init__(self, world: World, hops: int) -> None:
        self.world = world
        self.dead = False
        self.handed: set[Any] = set()  # messages steered into the turn, by text
        self._hops = hops

    def append(self, entries: Sequence[Entry], flush: bool = True) -> asyncio.Future[None]:
        future: asyncio.Future[None] = Uncancellable()
        entries = [decode_entry(encode_entry(entry)) for entry in entries]
        self._later(self._hops, lambda: self._settle(entries, future))
        return future

    def park(self, entries: Sequence[Entry], question: str) -> asyncio.Future[None]:
        return self.append(entries)

    def _later(self, hops: int, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._later, hops - 1, work) if hops else loop.call_soon(work)

    def _settle(self, entries: list[Entry], future: asyncio.Future[None]) -> None:
        try:
            self._write(entries)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _write(self, entries: list[Entry]) -> None:
        world = self.world
        if self.dead:
            raise Crash
        crash = world.crash_at.get(world.appends)
        world.appends += 1
        if crash is not False:
            world.log += entries
            check_log(world.log)
            for entry in entries:
                if isinstance(entry, UserSaid):
                    world.inbox.remove(entry)
        if crash is not None:
            self.dead = True
            raise Crash

    def steered(self) -> Sequence[UserSaid]:
        new = [said for said in self.world.inbox if said.content not in self.handed]
        self.handed |= {said.content for said in new}
        return new


class Uncancellable(asyncio.Future[None]):
    def cancel(self, msg: Any = None) -> bool:
        return False


def check_log(log: Sequence[Entry]) -> None:
    """Check that a log on disk is valid: only its last round may lack results."""
    messages = list(messages_of(log))
    if messages[-1].get("tool_calls"):
        messages.pop()
    assert check_conversation([{"role": "system", "content": ""}, *messages]) == []
    ended = Counter(entry.id for entry in log if isinstance(entry, CallEnded))
    assert not [id for id, times in ended.items() if times > 1]


@dataclass
class Result:
    content: str
    status: str = "ok"
    untrusted: bool = False
    images: tuple[str, ...] = ()
    own_files: bool = False


@dataclass(frozen=True)
class ToolPlan:
    parallel: bool
    safe: bool
    hops: int
    status: str
    verdict: str = "allow"


class WorldToolbox:
    def __init__(self, world: World, tools: dict[str, ToolPlan], log: WorldLog) -> None:
        self.world = world
        self.tools = tools
        self.log = log

    async def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
        said = {call.id: self.tools[call.name].verdict for call in calls}
        asked = tuple(id for id, verdict in said.items() if verdict == "ask")
        denied = {id: f"result of {id}" for id, verdict in said.items() if verdict == "deny"}
        return Review(asked, f"may I {', '.join(asked)}?" if asked else "", denied)

    def batch(self, calls: Sequence[Call]) -> Sequence[Call]:
        together: list[Call] = []
        for call in calls:
            if not self.tools[call.name].parallel:
                return together or [call]
            together.append(call)
        return together

    def replay_safe(self, name: str) -> bool:
        return self.tools[name].safe

    def read_only(self, name: str) -> bool:
        return False

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> Any:
        plan, world = self.tools[call.name], self.world
        decided = [entry for entry in world.log if isinstance(entry, CallsDecided) and call.id in entry.ids]
        assert approved == any(entry.allowed for entry in decided)
        assert plan.verdict == "allow" or approved, "a call runs without approval"
        assert call.id not in {entry.id for entry in world.log if isinstance(entry, CallEnded)}, (
            "run again after its result"
        )
        if not plan.safe:
            begun = {id for entry in world.log if isinstance(entry, CallsBegun) for id in entry.ids}
            assert call.id in begun, "an unsafe call runs before its intent is on disk"
            assert not world.started[call.id], "an unsafe call ran twice"
        world.started[call.id] += 1
        for _ in range(plan.hops):
            await asyncio.sleep(0)
        world.finished[call.id] += 1
        return Result(f"result of {call.id}", plan.status)


class WorldModel:
    """Gives planned answers, and checks that each request is exactly what the log contains."""

    def __init__(self, world: World, answers: list[tuple[Any, int]]) -> None:
        self.world = world
        self.answers = answers

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        assert list(conversation) == [SYSTEM, *messages_of(self.world.log)]
        assert check_conversation(list(conversation)) == []
        self.world.sent.append(list(conversation))
        said, hops = self.answers.pop(0) if self.answers else ("that is all", 0)
        for n in range(hops):
            if emit is not None:
                emit(events.Text(f"piece {n} "))
            await asyncio.sleep(0)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, list):
            return LLMResponse(None, [ToolCallRequest(*call) for call in said])
        return LLMResponse(said)


SYSTEM = {"role": "system", "content": "you are a test"}


@dataclass
class Plan:
    """Everything planned to happen to one turn."""

    tools: dict[str, ToolPlan]
    answers: list[tuple[Any, int]]
    happenings: list[tuple[int, str]]  # tick → stop, steer, leave or cancel
    crash_at: dict[int, bool]
    hops: int
    watched: bool
    limits: Limits
    words: list[bool] = field(default_factory=list)  # the user's reply to each question; yes once they are used up


async def live_through(plan: Plan) -> tuple[World, TurnEnded, list[events.Event]]:
    """Run the turn to its end, with a new process after every crash."""
    world = World(crash_at=dict(plan.crash_at))
    happenings = sorted(plan.happenings)
    seen: list[events.Event] = []
    model = WorldModel(world, list(plan.answers))
    ticks = steers = 0
    words = list(plan.words)
    for _life in range(len(plan.crash_at) + len(plan.happenings) + 1 + 20):
        if isinstance(parked := next_action(world.log, plan.limits), Park):  # the decision may come after a restart
            ids = tuple(call.id for call in parked.calls)
            world.log.append(CallsDecided(ids, words.pop(0) if words else True, note="as I like"))
        lost = {id: runs - world.finished[id] for id, runs in world.started.items()}  # by earlier processes
        log = WorldLog(world, plan.hops)
        turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log, seen.append if plan.watched else None)
        task = asyncio.ensure_future(run_turn(turn, model, WorldToolbox(world, plan.tools, log), plan.limits))
        while not task.done():
            while happenings and happenings[0][0] <= ticks:
                what = happenings.pop(0)[1]
                if what == "stop":
                    turn.stop("cancelled", "Stopped.")
                elif what == "leave":
                    turn.leave()
                elif what == "steer":
                    steers += 1
                    world.inbox.append(UserSaid(f"steered {steers}"))
                else:
                    task.cancel()
            await asyncio.sleep(0)
            ticks += 1
            assert ticks < 20_000, "the turn does not end"
        before = {id: runs for id, runs in world.started.items() if runs > world.finished[id]}
        if not task.cancelled() and task.exception() is None:
            ended = task.result()
            decided = turn.next_action(plan.limits)
            assert decided == next_action([*turn.entries, *turn.outcome], plan.limits), "read otherwise than at once"
            if isinstance(ended, Left):
                new = {id for id, runs in before.items() if runs - world.finished[id] > lost.get(id, 0)}
                assert not new, "a call that ran during the handoff was lost"
                world.left += 1
                continue
            if not isinstance(ended, Parked):
                return world, ended, seen
            assert isinstance(next_action(world.log, plan.limits), Park)
            assert not world.started.keys() & {call.id for call in last_calls(world.log)}, "ran before the decision"
        if not task.cancelled() and not isinstance(task.exception(), Crash):
            task.result()
        for _ in range(plan.hops + 2):  # writes that were in flight
            await asyncio.sleep(0)
        world.begun_on_disk.update(dict.fromkeys(before, True))
        if isinstance(world.log[-1], TurnEnded):  # it crashed right after its last write
            return world, world.log[-1], seen
    raise AssertionError("the turn never ended")


def last_calls(log: Sequence[Entry]) -> tuple[Call, ...]:
    return next(entry.calls for entry in reversed(log) if isinstance(entry, ModelAnswered))
