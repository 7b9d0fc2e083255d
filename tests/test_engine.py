"""The turn engine: each decision, and that no order of answers, tools, stops, steering and crashes breaks a log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop import events
from everloop.actions import CallModel, Finish, Idle, Limits, Park, Refuse, Report, RunTools, next_action
from everloop.engine import Parked, Review, Turn, end_turn, run_turn
from everloop.log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Entry,
    ModelAnswered,
    Noted,
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


# ---------------------------------------------------------------------------------------------- next_action


@pytest.mark.parametrize(
    ("log", "action"),
    [
        ([], Idle()),
        ([HI, ModelAnswered("yes"), TurnEnded("answer", "yes")], Idle()),
        ([HI, TurnEnded("error"), Noted({"role": "user", "content": "x"})], Idle()),
        ([HI], CallModel()),
        ([TurnEnded("answer"), HI], CallModel()),
        ([HI, ModelAnswered("yes")], Finish("answer", "yes")),
        ([HI, ASKED], RunTools((A, B))),
        ([HI, ASKED, CallsBegun(("b",))], Report((B,))),
        ([HI, ASKED, CallsBegun(("b",)), done(B)], RunTools((A,))),
        ([HI, ASKED, CallsBegun(("a", "b")), done(A)], Report((B,))),
        ([HI, ASKED, done(B), done(A)], CallModel()),
        ([HI, ModelAnswered("yes"), UserSaid("and this")], CallModel()),
        ([HI, ModelAnswered("  ")], CallModel()),
        ([HI, ModelAnswered(None), ModelAnswered("")], Finish("empty", "")),
        ([HI, ModelAnswered(None), ASKED, done(A), done(B), ModelAnswered(None)], CallModel()),
        ([HI, ASKED, CallsAsked(("b",), "may I?")], Park((B,), "may I?")),
        ([HI, ASKED, CallsAsked(("b",), "may I?"), CallsDecided(("b",), True)], RunTools((A, B))),
        ([HI, ASKED, CallsAsked(("b",), "may I?"), CallsDecided(("b",), False, note="no")], Refuse((B,), "no")),
        ([HI, ASKED, CallsAsked(("b",), "may I?"), CallsDecided(("b",), True), CallsBegun(("a",))], Report((A,))),
    ],
)
def test_the_log_alone_decides_what_happens_next(log, action):
    found = next_action(log)
    if isinstance(found, Finish) and found.reason == "empty":
        found = Finish("empty", "")
    assert found == action


def test_a_turn_ends_with_a_notice_at_its_last_round_but_never_drops_a_call_or_an_answer():
    limits = Limits(rounds=1)
    assert next_action([HI, ASKED], limits) == RunTools((A, B))
    assert next_action([HI, ASKED, done(A), done(B)], limits) == Finish("max_rounds", limits.rounds_notice)
    assert next_action([HI, ModelAnswered("yes")], limits) == Finish("answer", "yes")
    assert "1 rounds" in limits.rounds_notice


# ---------------------------------------------------------------------------------------------- doubles


class Crash(Exception):
    """The process ends here."""


@dataclass
class World:
    """All that outlives a process: the log on disk, the inbox, and what really happened."""

    log: list[Entry] = field(default_factory=lambda: [HI])
    inbox: list[UserSaid] = field(default_factory=list)
    started: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    appends: int = 0
    crash_at: dict[int, bool] = field(default_factory=dict)  # append → whether it got to disk
    sent: list[list[dict[str, Any]]] = field(default_factory=list)
    begun_on_disk: dict[str, bool] = field(default_factory=dict)


class WorldLog:
    """The log port of one process. It dies with the first crash."""

    def __init__(self, world: World, hops: int) -> None:
        self.world = world
        self.dead = False
        self._hops = hops

    def append(self, entries: Sequence[Entry]) -> asyncio.Future[None]:
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
        taken = getattr(self, "taken", 0)
        self.taken = len(self.world.inbox)
        return self.world.inbox[taken:]


class Uncancellable(asyncio.Future[None]):
    def cancel(self, msg: Any = None) -> bool:
        return False


def check_log(log: Sequence[Entry]) -> None:
    """A log on disk is valid at every instant: only its last round may lack results."""
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

    def review(self, calls: Sequence[Call], conversation: Conversation) -> Review:
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

    async def run(self, call: Call, progress: Callable[[str], None], approved: bool) -> Any:
        plan, world = self.tools[call.name], self.world
        decided = [entry for entry in world.log if isinstance(entry, CallsDecided) and call.id in entry.ids]
        assert approved == any(entry.allowed for entry in decided)
        assert plan.verdict == "allow" or approved, "a call runs that nobody allowed"
        assert call.id not in {entry.id for entry in world.log if isinstance(entry, CallEnded)}, "run after its result"
        if not plan.safe:
            begun = {id for entry in world.log if isinstance(entry, CallsBegun) for id in entry.ids}
            assert call.id in begun, "an unsafe call runs before its intent is on disk"
            assert not world.started[call.id], "an unsafe call is run twice"
        world.started[call.id] += 1
        for _ in range(plan.hops):
            await asyncio.sleep(0)
        world.finished[call.id] += 1
        return Result(f"result of {call.id}", plan.status)


class WorldModel:
    """Says what it was told to, and checks that it is sent just what the log holds."""

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
    """Everything that will happen to one turn."""

    tools: dict[str, ToolPlan]
    answers: list[tuple[Any, int]]
    happenings: list[tuple[int, str]]  # tick → stop, steer or cancel
    crash_at: dict[int, bool]
    hops: int
    watched: bool
    limits: Limits
    words: list[bool] = field(default_factory=list)  # what the person says to each question; then yes


async def live_through(plan: Plan) -> tuple[World, TurnEnded, list[events.Event]]:
    """Run the turn to its end, with a new process after every crash."""
    world = World(crash_at=dict(plan.crash_at))
    happenings = sorted(plan.happenings)
    seen: list[events.Event] = []
    model = WorldModel(world, list(plan.answers))
    ticks = steers = 0
    words = list(plan.words)
    for _life in range(len(plan.crash_at) + len(plan.happenings) + 1 + 20):
        if isinstance(parked := next_action(world.log, plan.limits), Park):  # the word may come after a restart
            ids = tuple(call.id for call in parked.calls)
            world.log.append(CallsDecided(ids, words.pop(0) if words else True, note="as I like"))
        log = WorldLog(world, plan.hops)
        turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log, seen.append if plan.watched else None)
        task = asyncio.ensure_future(run_turn(turn, model, WorldToolbox(world, plan.tools, log), plan.limits))
        while not task.done():
            while happenings and happenings[0][0] <= ticks:
                what = happenings.pop(0)[1]
                if what == "stop":
                    turn.stop("cancelled", "Stopped.")
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
            if not isinstance(ended := task.result(), Parked):
                return world, ended, seen
            assert isinstance(next_action(world.log, plan.limits), Park)
            assert not world.started.keys() & {call.id for call in last_calls(world.log)}, "ran before the word"
        if not task.cancelled() and not isinstance(task.exception(), Crash):
            task.result()
        for _ in range(plan.hops + 2):  # writes that were under way
            await asyncio.sleep(0)
        world.begun_on_disk.update(dict.fromkeys(before, True))
        if isinstance(world.log[-1], TurnEnded):  # it crashed right after its last write
            return world, world.log[-1], seen
    raise AssertionError("the turn never ended")


def last_calls(log: Sequence[Entry]) -> tuple[Call, ...]:
    return next(entry.calls for entry in reversed(log) if isinstance(entry, ModelAnswered))


tool_plans = st.builds(
    ToolPlan,
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
    st.sampled_from(["ok", "ok", "error", "denied"]),
    st.sampled_from(["allow", "allow", "ask", "deny"]),
)
call_ids = st.sampled_from(["c1", "c2", "c3", "", "t1_1", "t1_2", "t1_3", "\ud800"])
calls = st.lists(st.tuples(call_ids, st.sampled_from(["x", "y", "z"]), st.just({"n": 1})), min_size=1, max_size=5)
answers = st.one_of(
    st.sampled_from(["done", "fine", "", "   ", None]), calls, calls, st.just(ValueError("the model is down"))
)
plans = st.builds(
    Plan,
    tools=st.fixed_dictionaries({"x": tool_plans, "y": tool_plans, "z": tool_plans}),
    answers=st.lists(st.tuples(answers, st.integers(0, 4)), max_size=7),
    happenings=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(["stop", "steer", "steer", "cancel"])), max_size=4
    ),
    crash_at=st.dictionaries(st.integers(0, 14), st.booleans(), max_size=3),
    hops=st.integers(0, 4),
    watched=st.booleans(),
    limits=st.builds(Limits, rounds=st.integers(1, 5), calls=st.integers(1, 6)),
    words=st.lists(st.booleans(), max_size=3),
)


@pytest.mark.may_block  # hypothesis reads files when it explains a failure
@settings(max_examples=300)
@given(plan=plans)
def test_whatever_happens_the_log_is_valid_and_the_turn_ends(plan):
    world, ended, seen = asyncio.run(live_through(plan))
    log = world.log
    check_log(log)
    assert log[-1] == ended
    assert sum(isinstance(entry, TurnEnded) for entry in log) == 1
    assert check_conversation([SYSTEM, *messages_of(log)]) == []
    assert sum(isinstance(entry, ModelAnswered) for entry in log) <= plan.limits.rounds
    asked = [call for entry in log if isinstance(entry, ModelAnswered) for call in entry.calls]
    results = {entry.id: entry for entry in log if isinstance(entry, CallEnded)}
    assert {call.id for call in asked} == set(results)
    for call in asked:
        result, runs = results[call.id], world.started[call.id]
        refused = call.id in {
            id for entry in log if isinstance(entry, CallsDecided) and not entry.allowed for id in entry.ids
        }
        if refused or plan.tools[call.name].verdict == "deny":
            assert not runs
            assert result.status in ("denied", "cancelled")
        elif result.status in ("ok", "error", "denied"):
            assert world.finished[call.id] >= 1
            assert result.content == f"result of {call.id}"
        if not plan.tools[call.name].safe:
            assert runs <= 1
            if runs and not (world.finished[call.id] and result.status not in ("interrupted", "cancelled")):
                assert "outcome unknown" in result.content
        if result.status == "interrupted":
            assert not plan.tools[call.name].safe
    order_of_results(log)
    steered_messages_are_kept(world, ended)
    if plan.watched and not plan.crash_at and "cancel" not in [what for _, what in plan.happenings]:
        assert [event for event in seen if isinstance(event, events.TurnEnded)] == [
            events.TurnEnded("t1", ended.reason, ended.text)
        ]


def order_of_results(log: Sequence[Entry]) -> None:
    waiting: list[str] = []
    for message in messages_of(log):
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
        elif message.get("tool_calls"):
            waiting = [call["id"] for call in message["tool_calls"]]


def steered_messages_are_kept(world: World, ended: TurnEnded) -> None:
    """Each one is in the log, in order, or still in the inbox; and one that was taken was shown to the model."""
    said = [entry.content for entry in world.log if isinstance(entry, UserSaid)]
    everything = [*said[1:], *(message.content for message in world.inbox)]
    assert everything == [f"steered {n + 1}" for n in range(len(everything))]
    if ended.reason in ("answer", "empty", "max_rounds"):
        assert {"role": "user", "content": said[-1]} in world.sent[-1]


# ---------------------------------------------------------------------------------------------- one at a time


def plan_of(*answers: Any, tools: dict[str, ToolPlan] | None = None, **options: Any) -> Plan:
    plan = Plan({"x": ToolPlan(True, False, 0, "ok")}, [(answer, 0) for answer in answers], [], {}, 0, False, Limits())
    plan.tools.update(tools or {})
    for name, value in options.items():
        setattr(plan, name, value)
    return plan


async def test_a_call_that_was_cut_off_is_reported_not_repeated():
    # append 0: answer and intent; append 1: the result, which never gets to disk
    world, ended, _ = await live_through(plan_of([("c", "x", {})], "sorry", crash_at={1: False}))
    assert world.started == {"c": 1}
    assert world.log[-3] == CallEnded("c", "x", "interrupted, outcome unknown: check before you retry", "interrupted")
    assert ended == TurnEnded("answer", "sorry")


async def test_a_safe_call_that_was_cut_off_is_simply_run_again():
    safe = {"x": ToolPlan(True, True, 0, "ok")}
    # append 0: the answer; append 1: the result, which never gets to disk
    world, ended, _ = await live_through(plan_of([("c", "x", {})], "good", tools=safe, crash_at={1: False}))
    assert world.started == {"c": 2}
    assert not [entry for entry in world.log if isinstance(entry, CallsBegun)]
    assert ended.text == "good"


async def test_a_model_call_that_had_answered_is_not_repeated():
    world, ended, _ = await live_through(plan_of([("c", "x", {})], "good", crash_at={0: True}))
    assert len(world.sent) == 2
    assert ended.text == "good"


async def test_calls_with_the_same_id_or_none_are_told_apart():
    same: list[Any] = [("c", "x", {}), ("c", "x", {}), ("", "x", {})]
    world, _, _ = await live_through(plan_of(same, [("c", "x", {})], "ok"))
    ids = [call.id for entry in world.log if isinstance(entry, ModelAnswered) for call in entry.calls]
    assert len(set(ids)) == 4
    assert ids[0] == "c"
    assert all(ids)


async def test_a_made_up_id_never_meets_one_that_the_model_gives():
    world, _, _ = await live_through(plan_of([("c", "x", {}), ("t1_2", "x", {}), ("c", "x", {})], "ok"))
    ids = [call.id for entry in world.log if isinstance(entry, ModelAnswered) for call in entry.calls]
    assert len(set(ids)) == 3


async def test_more_calls_than_the_limit_are_answered_and_not_run():
    calls: list[Any] = [(f"c{n}", "x", {}) for n in range(5)]
    world, _, _ = await live_through(plan_of(calls, "ok", limits=Limits(calls=2)))
    errors = [call.error for entry in world.log if isinstance(entry, ModelAnswered) for call in entry.calls]
    assert errors[:2] == [None, None]
    assert all(error and "at most 2 calls" in error for error in errors[2:])


@pytest.mark.parametrize("answer", ["", [("c", "x", {})]])
async def test_a_steered_message_that_no_round_is_left_for_waits_for_the_next_turn(answer):
    plan = plan_of(answer, answer, answer, limits=Limits(rounds=2), happenings=[(0, "steer")])
    plan.happenings = [(n, "steer") for n in range(40)]
    world, ended, _ = await live_through(plan)
    said = [entry.content for entry in world.log if isinstance(entry, UserSaid)]
    assert {"role": "user", "content": said[-1]} in world.sent[-1]
    assert isinstance(ended, TurnEnded)


async def test_an_answer_in_the_last_round_is_given_even_when_a_message_was_steered_in_behind_it():
    world, ended, _ = await live_through(
        plan_of("the answer", limits=Limits(rounds=1), happenings=[(n, "steer") for n in range(1, 9)], hops=2)
    )
    assert ended == TurnEnded("answer", "the answer")
    assert world.inbox


async def test_a_turn_that_is_stopped_keeps_the_text_that_had_come():
    world, ended, seen = await live_through(
        plan_of(*[], answers=[("never said", 4)], happenings=[(3, "stop")], watched=True)
    )
    assert world.log[1] == ModelAnswered("piece 0 piece 1 piece 2 ", finish_reason="cancelled")
    assert ended == TurnEnded("cancelled", "Stopped.")
    assert seen[-1] == events.TurnEnded("t1", "cancelled", "Stopped.")


async def test_a_turn_stopped_before_it_runs_does_nothing():
    world = World()
    log = WorldLog(world, 0)
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    turn.stop("cancelled", "Stopped.")
    await run_turn(turn, WorldModel(world, []), WorldToolbox(world, {}, log))
    assert world.log == [HI, TurnEnded("cancelled", "Stopped.")]
    assert list(turn.conversation) == [SYSTEM, *messages_of(world.log)]


async def test_a_turn_that_is_not_running_can_be_ended_in_any_state():
    world = World(log=[HI, ASKED, CallsBegun(("b",))])
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), WorldLog(world, 0))
    await end_turn(turn, "error", "Sorry")
    check_log(world.log)
    assert [entry.status for entry in world.log if isinstance(entry, CallEnded)] == ["cancelled", "cancelled"]
    assert world.log[-1] == TurnEnded("error", "Sorry")


async def test_a_turn_without_an_open_entry_is_a_fault_of_the_caller():
    world = World(log=[HI, TurnEnded("answer")])
    turn = Turn("t1", [], Conversation([SYSTEM]), WorldLog(world, 0))
    with pytest.raises(ValueError, match="no open entries"):
        await run_turn(turn, WorldModel(world, []), WorldToolbox(world, {}, WorldLog(world, 0)))


async def test_a_model_that_cancels_itself_ends_the_turn_with_an_error():
    class Odd:
        async def __call__(self, conversation, emit):
            raise asyncio.CancelledError

    world = World()
    log = WorldLog(world, 0)
    ended = await run_turn(
        Turn("t1", list(world.log), Conversation([SYSTEM]), log), Odd(), WorldToolbox(world, {}, log)
    )
    assert isinstance(ended, TurnEnded)
    assert ended.reason == "error"


@pytest.mark.parametrize(
    "response",
    [
        LLMResponse("hi", usage={"prompt_tokens": 1, "details": {"cached": 1}, "cost": 0.1, "none": None}),  # type: ignore[dict-item]
        LLMResponse("hi", finish_reason=None),  # type: ignore[arg-type]
        LLMResponse(None, None),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest(None, "x", {})]),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest(7, "x", None)]),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest("c", "x", "{}")]),  # type: ignore[arg-type]
        LLMResponse(None, [ToolCallRequest("c", "x", {"text": "\ud800"})]),
        LLMResponse(None, [ToolCallRequest("c", "x", {"n": 10**30, "f": float("nan")})]),
        LLMResponse(None, [ToolCallRequest("c", "x", {"odd": object()})]),
        LLMResponse(None, [ToolCallRequest("c", "no such tool, \x00 at all" * 9, {})]),
        LLMResponse(None, [ToolCallRequest("c", "", {})]),
        LLMResponse("\ud800", reasoning="\udfff"),
    ],
    ids=range(12),
)
async def test_a_sloppy_provider_cannot_write_a_log_that_is_not_readable_again(response):
    class Sloppy:
        asked = 0

        async def __call__(self, conversation, emit):
            assert check_conversation(list(conversation)) == []
            self.asked += 1
            return response if self.asked == 1 else LLMResponse("over")

    class Anything(WorldToolbox):
        def batch(self, calls):
            return calls

        def replay_safe(self, name):
            return True

        def review(self, calls, conversation):
            return Review()

        async def run(self, call, progress, approved):
            return Result(call.error or "ran")

    world = World()
    log = WorldLog(world, 0)  # encodes and decodes every entry, as a store does
    turn = Turn("t1", list(world.log), Conversation([SYSTEM]), log)
    ended = await run_turn(turn, Sloppy(), Anything(world, {}, log))
    check_log(world.log)
    assert isinstance(ended, TurnEnded)
    assert ended.reason == "answer" or (response.tool_calls is None and ended.reason in ("empty", "answer"))
