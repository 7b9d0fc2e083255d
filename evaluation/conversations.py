"""Conversations as the unit of the evaluation: several turns in one folder and one session, each judged by itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from everloop import AgentLoop
from everloop.config import Config
from everloop.errors import EverloopError
from everloop.log import CallEnded, Logged, ModelAnswered
from everloop.providers.base import LLMProvider
from everloop.providers.local.small.answers import leaked_text
from everloop.threads import in_thread

from .cases import HERE, Case, problem_of_judging
from .judge import Made, Run, World, judge
from .report import share, table
from .runner import OWNER, Desk, agent_of, closing, look_at
from .watched import watched

CONVERSATIONS = {name: HERE / f"{name}.toml" for name in ("talks", "talks_heldout", "first_things", "reminders")}
MEMORY = "memory/"  # the agent's own files are no strays


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation; the fields that a case has too mean the same."""

    request: str
    answer: str  # a right one, for the tests
    solution: list[dict[str, Any]] = field(default_factory=list)
    new: bool = False  # /new comes first
    talk: bool = False  # any call is wrong
    yes: bool = False  # the person is there, and says yes if asked
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    says: list[Any] = field(default_factory=list)
    never: list[str] = field(default_factory=list)
    honest: bool = False
    called: list[Any] = field(default_factory=list)

    def case(self, name: str) -> Case:
        """The turn as a case for the judge. An answer may be known from earlier turns, so no call is demanded."""
        shared = {name: getattr(self, name) for name in ("after", "jobs", "says", "never", "honest", "called")}
        return Case(name=name, category="talk", request=self.request, answer=self.answer, right=["none"], **shared)


@dataclass(frozen=True, slots=True)
class Conversation:
    name: str
    about: str
    files: dict[str, str]
    turns: tuple[Turn, ...]

    @property
    def stamp(self) -> str:
        facts = dataclasses.asdict(self)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(slots=True)
class TurnOutcome:
    """What came of one turn."""

    conversation: str
    about: str
    number: int
    right: bool
    problems: list[str]
    leaked: str  # what came out of the worked examples, or ""
    talk: bool
    request: str
    answer: str
    calls: list[dict[str, Any]]
    seconds: float
    first_token: float = 0.0  # seconds until the first piece of the answer, for talk


def load_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file; an error names the one that is wrong."""
    with path.open("rb") as file:
        try:
            document = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise EverloopError(f"{path.name}: not valid TOML: {error}") from None
    found = [_conversation(path.name, item) for item in document.get("conversation", [])]
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EverloopError(f"{path.name}: two conversations are called {', '.join(sorted(twice))}")
    return found


def _conversation(file: str, item: dict[str, Any]) -> Conversation:
    where = f"{file}: conversation {item.get('name', '?')!r}"
    try:
        turns = tuple(Turn(**turn) for turn in item["turns"])
        conversation = Conversation(item["name"], item["about"], item.get("files", {}), turns)
    except (KeyError, TypeError) as error:
        raise EverloopError(f"{where}: {error}") from None
    for number, turn in enumerate(turns, start=1):
        if problem := problem_of_judging(turn.case("turn")):
            raise EverloopError(f"{where}, turn {number} {problem}")
        if turn.talk and turn.solution:
            raise EverloopError(f"{where}, turn {number} is talk and has a solution with calls")
    return conversation


async def run_conversation(
    conversation: Conversation, provider: LLMProvider, config: Config, desk: Desk, limit: float = 120.0
) -> list[TurnOutcome]:
    """Take a conversation to its end; a turn that takes longer than `limit` seconds is stopped."""
    await in_thread(desk.lay_out, conversation.files)
    own = dataclasses.replace(
        config,
        home=desk.folder / "home",
        workspace=desk.workspace,
        store=desk.folder / "store.db",
        restrict_to_workspace=True,
    )
    agent = agent_of(own, watched(provider, _unobserved))
    outcomes: list[TurnOutcome] = []
    seen = [*conversation.files, *conversation.files.values()]
    async with closing(agent):
        for number, turn in enumerate(conversation.turns, start=1):
            seen.append(turn.request)
            outcomes.append(await _take(agent, conversation, number, turn, desk, limit, seen))
    return outcomes


async def _unobserved(_: int) -> None:
    """The world between the calls of a turn is not judged."""


async def _take(
    agent: AgentLoop, conversation: Conversation, number: int, turn: Turn, desk: Desk, limit: float, seen: Sequence[str]
) -> TurnOutcome:
    key = f"evaluation:{conversation.name}"
    if turn.new:
        await agent.process_direct("/new", key, "cli", "direct")
    known = len(await _log(agent, key))
    before = _visible(await look_at(agent, desk.workspace))
    loop = asyncio.get_running_loop()
    started = loop.time()
    reason, answer = await _answer(agent, key, turn, limit)
    seconds = loop.time() - started
    after = _visible(await look_at(agent, desk.workspace))
    logged = (await _log(agent, key))[known:]
    calls = _calls(logged, after)
    run = Run(str(desk.workspace), before, calls, after, answer, reason, seconds=seconds)
    run = dataclasses.replace(run, started=run.started - seconds)
    verdict = await in_thread(judge, turn.case(conversation.name), run)
    # Talk has no examples in its prompt, so what it says is from none.
    leaked = (
        ""
        if turn.talk and not calls
        else leaked_text([answer, *(json.dumps(dict(made.arguments), ensure_ascii=False) for made in calls)], seen)
    )
    problems = [*verdict.problems]
    if turn.talk and calls:
        problems.append("there was a call, and it was talk")
    if leaked:
        problems.append(f"it leaked {leaked}")
    return TurnOutcome(
        conversation=conversation.name,
        about=conversation.about,
        number=number,
        right=not problems,
        problems=problems,
        leaked=leaked,
        talk=turn.talk,
        request=turn.request,
        answer=answer,
        calls=[{"tool": made.tool, "arguments": dict(made.arguments), "ok": made.ok} for made in calls],
        seconds=round(seconds, 3),
        first_token=_first_token(logged) if turn.talk else 0.0,
    )


async def _answer(agent: AgentLoop, key: str, turn: Turn, limit: float) -> tuple[str, str]:
    """(why it ended, the answer) of a turn."""
    running = asyncio.create_task(_asked(agent, key, turn))
    done, _ = await asyncio.wait([running], timeout=limit)
    if not done:
        await agent.process_direct("/stop", key, "cli", "direct")
        with contextlib.suppress(Exception):
            await asyncio.wait_for(running, 30)
        return "timeout", ""
    if (error := running.exception()) is not None:
        return "error", str(error)
    return "answer", running.result()


async def _asked(agent: AgentLoop, key: str, turn: Turn) -> str:
    result = await agent.ask(turn.request, key, "cli", "direct", on_event=lambda event: None, attended=turn.yes)
    while result.reason == "question":
        result = await agent.ask("/approve", key, "cli", "direct", on_event=lambda event: None, attended=True)
    return result.text


async def _log(agent: AgentLoop, key: str) -> list[Logged]:
    session = await agent.store.session(OWNER, key)
    return await agent.store.read_log(session.id) if session is not None else []


def _calls(logged: Sequence[Logged], after: World) -> tuple[Made, ...]:
    ends = {one.entry.id: one.entry for one in logged if isinstance(one.entry, CallEnded)}
    return tuple(
        Made(call.name, call.arguments, call.id in ends and ends[call.id].status == "ok", after)
        for one in logged
        if isinstance(one.entry, ModelAnswered)
        for call in one.entry.calls
    )


def _first_token(logged: Sequence[Logged]) -> float:
    return next((round(one.entry.first_token, 3) for one in logged if isinstance(one.entry, ModelAnswered)), 0.0)


def _visible(world: World) -> World:
    files = {path: text for path, text in world.files.items() if not path.startswith(MEMORY)}
    return dataclasses.replace(world, files=files)


# ---------------------------------------------------------------------------------------------- the report

HEADS = ["about", "turns", "right", "leaks", "calls on talk", "median seconds", "first token of talk"]


def by_subject(outcomes: Sequence[TurnOutcome]) -> str:
    """One run, a line for each kind of conversation."""
    kinds = dict.fromkeys(outcome.about for outcome in outcomes)
    rows = [[kind, *figures([one for one in outcomes if one.about == kind])] for kind in kinds]
    return table(HEADS, [*rows, ["all", *figures(outcomes)]])


def figures(outcomes: Sequence[TurnOutcome]) -> list[str]:
    count = len(outcomes)
    right, leaks = sum(one.right for one in outcomes), sum(bool(one.leaked) for one in outcomes)
    on_talk = sum(one.talk and bool(one.calls) for one in outcomes)
    seconds = _median([one.seconds for one in outcomes])
    first = _median([one.first_token for one in outcomes if one.first_token])
    return [str(count), share(right, count), str(leaks), str(on_talk), seconds, first]


def _median(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f}" if seconds else "–"


def told(outcome: TurnOutcome) -> Iterator[str]:
    """The lines of one turn, for --verbose and for the log of a run."""
    mark = "right" if outcome.right else "WRONG"
    yield f"{outcome.conversation}/{outcome.number} {mark} {outcome.seconds:.1f} s  {outcome.request[:100]!r}"
    if not outcome.right:
        for call in outcome.calls:
            yield f"    {call['tool']}({call['arguments']}){'' if call['ok'] else ' failed'}"
        yield f"    answer: {outcome.answer[:300]!r}"
        yield f"    {'; '.join(outcome.problems)}"
