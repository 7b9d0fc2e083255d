"""Sub-agents, and the tool `spawn` that starts them.

A task runs as a turn in a session of its own, and its result comes back as a message.

A sub-agent is an ordinary session with the key `sub:ID`. Its task is a message in the inbox. The report to the agent
that assigned the task is written in the same transaction as the end of its turn, so a crash neither loses nor
duplicates it. A run of `AgentExecutor` works the same way in a session `executor:NAME/ID`; the program that started it
reads the result.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import msgspec

from ..actions import Limits
from ..bus import EXECUTOR, PULLED, InboundMessage, SubagentTask
from ..config import Config
from ..context.prompt import PARTING
from ..engine import Parked
from ..errors import StoreError
from ..goals import phases
from ..goals.definitions import AgentDefinition, DefinitionError
from ..goals.files import Catalogue, Definitions, read_definitions, read_own_definitions
from ..goals.phases import CHANNEL, HOW, Outcome, report
from ..log import SAYS_ORIGIN, Logged, TurnEnded
from ..sandbox.reach import Reach
from ..store.base import Claim, Incoming, Store
from ..threads import in_thread
from ..tools.base import Output, Plan, Tool, ToolError
from ..tools.context import current_call
from ..tools.registry import ToolRegistry
from ..tools.trust import UNKNOWN
from .dispatcher import Dispatcher
from .turn_spec import TurnSpec

log = logging.getLogger(__name__)

# Tools that a sub-agent does not get: it only talks to the agent that assigned the task.
WITHHELD = frozenset({"message", "spawn", "cron", "remember"})
NOTE = """\
## Your task

You are a sub-agent. Another agent gives you one task; work on it alone with your tools, for nobody can be asked. Your
final answer goes to that agent: give the result, short and complete, with paths and sources, and say plainly what you
could not do or are not sure of."""
STOPPED = "The sub-agent was stopped before it had finished."
NO_ROUND = "This turn has no rounds left for a sub-agent: answer, or do it in your next turn."


class Running(msgspec.Struct, frozen=True):
    """A sub-agent that has not ended."""

    id: str
    label: str
    session: str
    parent: str  # the session that started it
    started: bool
    awaited: bool = False  # its result is returned by the call that started it, so it sends no report
    root: str = ""  # the turn at the root of the tree


class ParentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The turn that starts a sub-agent: its chat, and what the sub-agent inherits from it."""

    channel: str = "cli"
    chat_id: str = "direct"
    session: str | None = None  # None for the chat's own
    owner: str = "me"
    root: str = ""  # the turn at the root of the tree
    depth: int = 0
    caps: Mapping[str, int] = {}  # token caps of the agents above, by agent id
    rounds: int | None = None  # that it has left
    ends_at: float | None = None
    untrusted: bool = False  # it has read external content
    own_files: bool = False  # untrusted only because of files that the agent did not write
    attended: bool = True  # a person is in the chat

    @property
    def chat(self) -> str:
        return f"{self.channel}:{self.chat_id}"


# Adapts the spec of a run's turns: the steps of its program.
Adapt = Callable[[Claim, SubagentTask, TurnSpec], Awaitable[TurnSpec]]


def _ignore() -> None:
    """Do nothing; the default of `on_work`."""


class SubagentManager:
    """Starts, lists and stops sub-agents."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        tools: ToolRegistry,
        config: Config,
        reach: Callable[[], Reach],
        on_work: Callable[[], None] = _ignore,
    ) -> None:
        """`reach` returns which files may be read for definitions; it is called in a thread.

        `on_work` is called when a sub-agent starts working in this process.
        """
        self._store = store
        self._dispatcher = dispatcher
        self._tools = tools
        self._config = config
        self._reach = reach
        self._on_work = on_work
        self.waits = False
        self._waiting: dict[tuple[str, str], list[asyncio.Event]] = {}
        self._one_by_one = asyncio.Lock()
        self._told_broken = False
        self._at_work: dict[tuple[str, str], SubagentTask] = {}  # by session: the tasks of those that run here
        self._programs: dict[str, Adapt] = {}  # by id: the runs of programs in this process
        self.catalogue = Catalogue(self._definitions)

    def wait_for_all(self) -> None:
        """Wait for every sub-agent from now on, because the process, or its client, is gone before a report arrives."""
        self.waits = True

    async def start(
        self, task: str, agent: str, report: bool, tokens: int = 0, inputs: Mapping[str, Any] | None = None
    ) -> str:
        """Start a sub-agent for the running tool call, with a share of what its turn has left."""
        call = current_call()
        above = self._at_work.get((call.owner, call.session)) or SubagentTask(depth=0)
        if above.depth >= self._config.subagent_depth:
            raise ToolError("Sub-agents cannot be nested any deeper: do it yourself.")
        if call.rounds_left is not None and call.rounds_left < 1:
            raise ToolError(NO_ROUND)
        definition = await in_thread(self._defined, agent) if agent else None
        parent = ParentTurn(
            channel=call.channel,
            chat_id=call.chat_id,
            session=call.session,
            owner=call.owner,
            root=above.root or call.turn,
            depth=above.depth,
            caps=above.caps,
            rounds=call.rounds_left,
            ends_at=call.ends_at,
            untrusted=call.tainted,
            own_files=call.own_files,
            attended=call.attended,
        )
        key = call.idempotency_key
        return await self.spawn(
            task, parent, definition=definition, inputs=inputs, key=key, tokens=tokens, report=report
        )

    async def spawn(
        self,
        task: str,
        parent: ParentTurn | None = None,
        *,
        definition: AgentDefinition | None = None,
        inputs: Mapping[str, Any] | None = None,
        key: str = "",
        label: str = "",
        tokens: int = 0,
        report: bool = True,
    ) -> str:
        """Start a sub-agent and return its id. `key` is an idempotency key.

        With a definition, it runs that agent with these inputs; the task fills the missing input. Its result comes to
        the parent's chat as a message of the channel `system`, unless `report` is off. `tokens` caps the total usage of
        this agent and its descendants, within the caps of its ancestors.
        """
        parent = parent or ParentTurn()
        id = hashlib.sha256(f"{parent.owner}\0{key or time.time_ns()}".encode()).hexdigest()[:12]
        content, values = phases.begin(definition, task, inputs or {}) if definition is not None else (task, {})
        most, seconds = self._limits(definition, parent.rounds)
        message = InboundMessage(
            CHANNEL,
            "agent",
            id,
            content,
            id=f"spawn:{id}",
            owner=parent.owner,
            reply=False,
            attended=False,
            cause=SubagentTask(
                label=label or (definition.name if definition is not None else _first_words(task)),
                origin=parent.chat,
                parent=parent.session or parent.chat,
                root=parent.root,
                depth=parent.depth + 1,
                caps={**parent.caps, **({id: tokens} if tokens else {})},
                rounds=most,
                seconds=seconds,
                latest=parent.ends_at,
                attended=parent.attended,
                report=report,
                definition=asdict(definition) if definition is not None else None,
                inputs=values,
            ),
            untrusted=parent.untrusted,
            own_files=parent.own_files,
        ).addressed()
        async with self._one_by_one:  # so that two concurrent calls cannot both take the last free slot
            await self._make_room(message)
            await self._store.accept(message)
        self._dispatcher.kick(parent.owner, message.session_key)
        return id

    def _limits(self, definition: AgentDefinition | None, rounds: int | None) -> tuple[int, float]:
        """Return its limits in rounds and seconds, within what the parent has left."""
        minutes = definition.max_time_minutes if definition is not None else self._config.subagent_minutes
        most = definition.max_turns if definition is not None else self._config.subagent_rounds
        return most if rounds is None else min(most, rounds), 60 * minutes

    # ------------------------------------------------------------------------------------------ runs of programs

    async def run(self, message: InboundMessage, adapt: Adapt) -> list[Logged]:
        """Run an agent for a program in this process, and return the log of the run once it has ended.

        `message` starts the run, or belongs to an interrupted one. `adapt` adapts the spec of its turns.
        """
        owner, key, id = message.owner, message.session_key, phases.id_of(message)
        self._programs[id] = adapt
        try:
            await self._store.accept(message)
            await self.resume(owner, key)
            while rows := [row for row in await self.open_runs(owner) if phases.id_of(row.message) == id]:
                await self._dispatcher.follow(rows[0].id, rows[0].message)
        finally:
            del self._programs[id]
        first = await self._store.find(owner, f"spawn:{id}")
        if first is None or first.first_seq is None:
            return []
        return await self._store.read_log(first.session, first.first_seq - 1)

    async def open_runs(self, owner: str) -> list[Incoming]:
        """Return the messages of programs' runs that have not ended."""
        return await self._store.unfinished(owner, EXECUTOR)

    async def is_held(self, row: Incoming) -> bool:
        """Return whether another live worker holds the session of this message."""
        info = await self._store.session(row.message.owner, row.message.session_key)
        return await self._dispatcher.runs_elsewhere(info)

    async def result(self, id: str, owner: str = "me") -> str:
        """Wait for a sub-agent to end and return its answer; raise a `ToolError` if it failed."""
        return (await self.output(id, owner)).text

    async def output(self, id: str, owner: str = "me") -> Output:
        """Like `result`, but including whether the sub-agent has read external content."""
        key, done = f"{CHANNEL}:{id}", asyncio.Event()
        waiting = self._waiting.setdefault((owner, key), [])
        waiting.append(done)
        try:
            while True:
                done.clear()  # before looking, so that an end that comes meanwhile is not lost
                if (ended := await self._outcome(owner, id, key)) is not None:
                    return ended
                await done.wait()
        finally:
            waiting.remove(done)
            if not waiting:
                self._waiting.pop((owner, key), None)

    async def running(self, owner: str = "me", parent: str | None = None) -> list[Running]:
        """Return the sub-agents that have not ended, of one session or of all."""
        rows = await self._store.unfinished(owner, CHANNEL)
        found = [_running(row) for row in rows]
        return [one for one in found if parent is None or one.parent == parent]

    async def stop(self, owner: str, parent: str) -> int:
        """Stop all sub-agents of a session, and their own. Return how many."""
        stopped = 0
        for one in await self.running(owner, parent):
            stopped += await self._stop_one(owner, one)
            stopped += await self.stop(owner, one.session)
        return stopped

    async def _stop_one(self, owner: str, one: Running) -> bool:
        """Stop it here, or ask the process that runs it to do so."""
        info = await self._store.session(owner, one.session)
        if not self._dispatcher.runs or await self._dispatcher.runs_elsewhere(info):
            await self._dispatcher.stop_elsewhere(owner, one.session)
            return True
        self._dispatcher.kick(owner, one.session)
        return self._dispatcher.stop_turn(owner, one.session, "cancelled", STOPPED)

    async def resume(self, owner: str, parent: str) -> None:
        """Resume the sub-agents of a session that an earlier process left."""
        for one in await self.running(owner, parent):
            self._dispatcher.kick(owner, one.session)
            await self.resume(owner, one.session)

    async def ended(self, claim: Claim, ended: TurnEnded | Parked) -> None:
        """Handle the end of a turn: wake its waiters.

        If it was stopped, stop the sub-agents that it waited for, and start any that has not started yet: no other
        process knows about those.
        """
        owner, key = claim.owner, claim.key
        self._at_work.pop((owner, key), None)
        for event in self._waiting.get((owner, key), ()):
            event.set()
        if not isinstance(ended, TurnEnded) or ended.reason not in phases.STOPPED:
            return
        root = (task.root if (task := claim.message.task) is not None else "") or claim.turn
        try:
            for one in await self.running(owner, key):
                if one.root == root and (one.awaited or ended.reason == "cancelled"):
                    await self._stop_one(owner, one)
                elif one.root == root and not one.started:
                    self._dispatcher.kick(owner, one.session)
        except StoreError as error:  # they continue to run
            log.warning("%s", error)

    def look_again(self) -> None:
        """Check the awaited sub-agents, which may have ended in another process."""
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def turn_spec(self, claim: Claim) -> TurnSpec | None:
        """Return the spec for the turn of a sub-agent or of a program's run; None for any other turn."""
        message = claim.message
        if message.channel not in (CHANNEL, EXECUTOR):
            return None
        if (task := message.task) is None:
            raise ValueError(f"the task of the sub-agent {message.chat_id} cannot be read")
        self._at_work[claim.owner, claim.key] = task
        self._on_work()
        ends_at = await self._ends_at(claim, task)
        if (definition := phases.definition_of(task)) is not None:
            spec = phases.turn_spec(message, task, definition, self._tools, ends_at)
            adapt = self._programs.get(phases.id_of(message))
            return await adapt(claim, task, spec) if adapt is not None else spec
        return TurnSpec(
            tools=self._tools.only(lambda name: name not in WITHHELD),
            limits=Limits(rounds=self._config.subagent_rounds if task.rounds is None else task.rounds),
            system=lambda standing: f"{standing}{PARTING}{NOTE}",
            ends_at=ends_at,
            follow=lambda ended, untrusted: report(message, ended, untrusted),
        )

    async def _ends_at(self, claim: Claim, task: SubagentTask) -> float | None:
        """Return the deadline of a sub-agent's turn."""
        bounds = [bound for bound in (task.ends_at, task.latest) if bound is not None]
        if task.seconds is not None:
            first: int | None = claim.first_seq
            if task.phase == "extract":  # it gets the time that the work phase left over
                began = await self._store.find(claim.owner, f"spawn:{phases.id_of(claim.message)}")
                first = began.first_seq if began is not None else None
            logged = await self._store.read_log(claim.session, first - 1) if first and claim.next_seq > first else []
            bounds.append(time.time() + task.seconds - phases.worked(logged))
        return min(bounds, default=None)

    async def tell_broken(self) -> None:
        """Log the invalid definitions, once. Those of the package are valid."""
        if not self._told_broken:
            self._told_broken = True
            found = await in_thread(lambda: read_own_definitions(self._reach())) if self._config.trusted else None
            for problem in found.problems if found is not None else ():
                log.warning("%s", problem)

    def _definitions(self) -> Definitions:
        """Read the agent definitions from disk: call it in a thread."""
        return read_definitions(self._reach(), trusted=self._config.trusted)

    def is_agent(self, name: str) -> bool:
        """Return whether there is a definition of this name. Reads from disk: call it in a thread."""
        return name in self._definitions().known

    def _defined(self, name: str) -> AgentDefinition:
        try:
            found = self._definitions().get(name)
        except DefinitionError as error:
            raise ToolError(f"{error}.") from None
        if unknown := [tool for tool in found.tools if tool not in self._tools]:
            raise ToolError(f"The agent {name} names unknown tools: {', '.join(unknown)}. Tell the user.")
        return found

    async def _make_room(self, message: InboundMessage) -> None:
        """Raise a `ToolError` if too many are running. One that runs already is not started again anyway."""
        running = await self.running(message.owner)
        if any(one.id == message.chat_id for one in running):
            return
        if len(running) >= self._config.subagents:
            names = ", ".join(one.label for one in running[:8])
            raise ToolError(
                f"{len(running)} sub-agents are already running ({names}), which is the limit: wait until one of "
                "them has reported, or do it yourself."
            )

    async def _outcome(self, owner: str, id: str, key: str) -> Output | None:
        """Return how a sub-agent ended and its answer; None while it runs."""
        info = await self._store.session(owner, key)
        if info is None or any(row.session == info.id for row in await self._store.unfinished(owner, CHANNEL)):
            return None
        entries = [one.entry for one in await self._store.read_log(info.id)]
        ends = [entry for entry in entries if isinstance(entry, TurnEnded)]
        if not ends:
            return None
        untrusted = [entry for entry in entries if isinstance(entry, SAYS_ORIGIN) and entry.untrusted]
        own_files = bool(untrusted) and all(entry.own_files for entry in untrusted)
        began = await self._store.find(owner, f"spawn:{id}")
        # If its first turn failed, its definition may be unreadable.
        definition = phases.definition_of(began.message.task) if began is not None and len(ends) > 1 else None
        outcome = phases.outcome_of(definition, ends) if definition is not None else None
        output = _told(ends[-1], outcome, bool(untrusted))
        return replace(output, untrusted=False, contents=(UNKNOWN,)) if own_files else output


def _told(last: TurnEnded, outcome: Outcome | None, untrusted: bool) -> Output:
    """Return the output for the waiting agent, from the last turn and the outcome of an agent with a definition."""
    reason, text = str(last.reason), last.text
    if outcome is not None and outcome.reason in phases.CUT:
        reason = "max_rounds" if outcome.reason == "max_turns" else outcome.reason
    elif outcome is not None and outcome.reason == "error" and reason == "answer":
        reason, text = "error", f"{outcome.error} What it said last:\n\n{text}"
    if reason != "answer":
        text = f"The sub-agent {HOW.get(reason, 'ended')}. {text}"
    if reason == "error" and not untrusted:
        raise ToolError(text)
    return Output(text, untrusted, failed=reason == "error")


def _running(row: Incoming) -> Running:
    task = row.message.task or SubagentTask()
    return Running(
        row.message.chat_id,
        task.label,
        row.message.session_key,
        task.parent,
        started=row.turn is not None,
        awaited=not task.report,
        root=task.root,
    )


def _first_words(task: str) -> str:
    words = " ".join(task.split())
    return words if len(words) <= 60 else f"{words[:59].rstrip()}…"


# ---------------------------------------------------------------------------------------------- the tool

PARAMETERS = {
    "type": "object",
    "properties": {
        "task": {
            "type": "string",
            "minLength": 1,
            "description": "What to do, with all that must be known for it: the sub-agent sees nothing else.",
        },
        "agent": {
            "type": "string",
            "description": "investigator (reads code), researcher (reads the web), or one of agents/.",
        },
        "inputs": {"type": "object", "description": "The inputs of the agent by name, where it has several."},
        "wait": {"type": "boolean", "description": "Wait for the result, instead of being told later."},
        "tokens": {"type": "integer", "minimum": 1, "description": "The most tokens that it may use."},
    },
}


class SpawnTool(Tool):
    """Starts a sub-agent, exactly once per call even if a crash interrupts the call."""

    name = "spawn"
    description = (
        "Give a task to a sub-agent that works beside you, with its own tools and without seeing this conversation. "
        "You are told its result by a later message; with wait, it is the result of this call. Good for work that "
        "takes long or reads much, and for several independent pieces at once."
    )
    parameters = PARAMETERS
    replay = "safe"  # the same call starts the same sub-agent
    timeout = math.inf  # a sub-agent has a time limit of its own

    def __init__(self, manager: SubagentManager, agents: str = "") -> None:
        """`agents` tells the model the agents of the workspace."""
        self._manager = manager
        self.agents = agents
        self.description = f"{type(self).description}\n\n{agents}" if agents else type(self).description

    async def execute(
        self,
        task: str = "",
        agent: str = "",
        inputs: dict[str, Any] | None = None,
        wait: bool = False,
        tokens: int = 0,
    ) -> str | Output:
        wait = wait or self._manager.waits or current_call().channel in PULLED  # which receive no later messages
        id = await self._manager.start(task, agent, not wait, tokens, inputs or {})
        if not wait:
            return f"The sub-agent {id} is at work. Its result comes as a later message; do not wait for it."
        return await self._manager.output(id, current_call().owner)

    def plan(self, arguments: dict[str, Any]) -> Plan:
        task, agent, inputs = arguments.get("task", ""), arguments.get("agent", ""), arguments.get("inputs") or {}
        if not task.strip() and not (agent and inputs):
            raise ToolError("There is no task.")
        if inputs and not agent:
            raise ToolError("Only an agent with a name has inputs: name it, or put everything into the task.")
        given = "\n".join([task, *(f"{name}: {value}" for name, value in inputs.items())]).strip()
        return Plan(shown=f"spawn {agent or 'a sub-agent'}:\n{given}")
