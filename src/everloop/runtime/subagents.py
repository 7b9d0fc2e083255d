"""Sub-agents: work handed to a turn in a session of its own, whose result comes back as a message.

A sub-agent is an ordinary session with the key `sub:ID`. Its task is a message in the inbox, and what follows from the
end of its turn, the report to whoever gave the task, is written with that end: so it is delivered once, whatever
crashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..actions import Limits
from ..bus import InboundMessage
from ..config import Config
from ..context.prompt import PARTING
from ..engine import Parked
from ..errors import StoreError
from ..goals import phases
from ..goals.definitions import AgentDefinition, DefinitionError
from ..goals.extraction import read_output
from ..goals.files import Definitions, read_definitions
from ..goals.phases import CHANNEL, HOW, LIMITS, report
from ..log import CallEnded, Reason, TurnEnded, UserSaid
from ..sandbox.reach import Reach
from ..store.base import Claim, Incoming, Store
from ..threads import in_thread
from ..tools.base import Output, ToolError
from ..tools.context import current_call
from ..tools.registry import ToolRegistry
from ..tools.trust import UNKNOWN
from .elsewhere import Sessions, runs_elsewhere, stop_elsewhere
from .turn_spec import Brief

log = logging.getLogger(__name__)

# What a sub-agent has no use for: it speaks to nobody but the agent that gave the task.
WITHHELD = frozenset({"message", "spawn", "cron", "remember"})
NOTE = """\
## Your task

You are a sub-agent. Another agent gives you one task; work on it alone with your tools, for nobody can be asked. Your
final answer goes to that agent: give the result, short and complete, with paths and sources, and say plainly what you
could not do or are not sure of."""
STOPPED = "The sub-agent was stopped before it had finished."


NO_ROUND = "No round of this turn is left that a sub-agent could have: answer, or do it in your next turn."


@dataclass(slots=True, frozen=True)
class Running:
    """A sub-agent that has not ended."""

    id: str
    label: str
    session: str
    parent: str  # the session that it was started in
    started: bool
    awaited: bool = False  # its result is that of the call that started it: it reports to nobody
    root: str = ""  # the turn that began it all


class SubagentManager:
    """Starts sub-agents, knows those that run, and stops them."""

    def __init__(
        self, store: Store, sessions: Sessions, tools: ToolRegistry, config: Config, reach: Callable[[], Reach]
    ) -> None:
        """`reach` says which files may be read for definitions; it is asked off the event loop."""
        self._store = store
        self._sessions = sessions
        self._tools = tools
        self._config = config
        self._reach = reach
        self.waits = False  # whether every sub-agent is waited for, because nobody will be there for a report
        self._waiting: dict[tuple[str, str], list[asyncio.Event]] = {}
        self._one_by_one = asyncio.Lock()
        self._told_broken = False
        self.on_work: Callable[[], None] | None = None  # told when one works in this process
        self._at_work: dict[tuple[str, str], dict[str, Any]] = {}  # by session: the facts of what runs here

    async def start(self, task: str, agent: str, report: bool, tokens: int = 0) -> str:
        """Start a sub-agent for the tool call that is running, with a part of what its turn has left."""
        call = current_call()
        facts = self._at_work.get((call.owner, call.session), {})
        depth = int(facts.get("depth", 0)) + 1
        if depth > self._config.subagent_depth:
            raise ToolError("A sub-agent cannot start further ones from here: do it yourself.")
        if call.rounds_left is not None and call.rounds_left < 1:
            raise ToolError(NO_ROUND)
        definition = await in_thread(self._defined, agent) if agent else None
        return await self.spawn(
            task,
            definition=definition,
            channel=call.channel,
            chat_id=call.chat_id,
            session=call.session,
            owner=call.owner,
            key=call.idempotency_key,
            depth=depth,
            rounds=call.rounds_left,
            ends_at=call.ends_at,
            tokens=tokens,
            caps=facts.get("caps"),
            root=str(facts.get("root") or call.turn),
            untrusted=call.tainted,
            own_files=call.own_files,
            attended=call.attended,
            report=report,
        )

    async def spawn(
        self,
        task: str,
        *,
        definition: AgentDefinition | None = None,
        channel: str = "cli",
        chat_id: str = "direct",
        session: str | None = None,
        owner: str = "me",
        key: str = "",
        label: str = "",
        depth: int = 1,
        rounds: int | None = None,
        ends_at: float | None = None,
        tokens: int = 0,
        caps: Mapping[str, int] | None = None,
        root: str = "",
        untrusted: bool = False,
        own_files: bool = False,
        attended: bool = True,
        report: bool = True,
    ) -> str:
        """Start a sub-agent and give its id; the same `key` starts one only once.

        With a definition it is that agent, and the task is its input. Its result comes to the chat as a message of the
        channel `system`, unless `report` is off. `rounds` and `ends_at` are what is left to whoever starts it; `tokens`
        is the most that it may use with all that it starts, within the same `caps` of those above it.
        """
        id = hashlib.sha256(f"{owner}\0{key or time.time_ns()}".encode()).hexdigest()[:12]
        parent = session or f"{channel}:{chat_id}"
        content, terms = phases.begin(definition, task) if definition is not None else (task, {})
        message = InboundMessage(
            CHANNEL,
            "agent",
            id,
            content,
            id=f"spawn:{id}",
            owner=owner,
            reply=False,
            attended=False,
            metadata={
                **terms,
                "label": label or (definition.name if definition is not None else _first_words(task)),
                "origin": f"{channel}:{chat_id}",
                "parent": parent,
                "depth": depth,
                "caps": {**(caps or {}), **({id: tokens} if tokens else {})},
                **self._limits(definition, rounds, ends_at),
                "root": root,  # the turn whose budget it uses
                "untrusted": untrusted,
                **({"own_files": True} if own_files else {}),
                "attended": attended,  # of the chat: a sub-agent itself asks nobody
                "report": report,
            },
        ).addressed()
        async with self._one_by_one:  # so that two at once do not both find the last free place
            await self._make_room(message)
            await self._store.accept(message)
        self._sessions.kick(owner, message.session_key)
        return id

    def _limits(
        self, definition: AgentDefinition | None, rounds: int | None, ends_at: float | None
    ) -> dict[str, int | float | None]:
        """Its own limits, within what is left to whoever starts it."""
        minutes = definition.max_time_minutes if definition is not None else self._config.subagent_minutes
        most = definition.max_turns if definition is not None else self._config.subagent_rounds
        until = time.time() + 60 * minutes
        return {
            "rounds": most if rounds is None else min(most, rounds),
            "ends_at": min(until, ends_at or until),
            "latest": ends_at,  # no phase of it may go on for longer
        }

    async def result(self, id: str, owner: str = "me") -> str:
        """Wait for a sub-agent to end; what it says. One that failed is a ToolError that tells why."""
        return (await self.output(id, owner)).text

    async def output(self, id: str, owner: str = "me") -> Output:
        """The same, and whether it had read something from outside."""
        key, done = f"{CHANNEL}:{id}", asyncio.Event()
        waiting = self._waiting.setdefault((owner, key), [])
        waiting.append(done)
        try:
            while True:
                done.clear()  # before looking: an end that comes meanwhile sets it again
                if (ended := await self._outcome(owner, id, key)) is not None:
                    return ended
                await done.wait()
        finally:
            waiting.remove(done)
            if not waiting:
                self._waiting.pop((owner, key), None)

    async def running(self, owner: str = "me", parent: str | None = None) -> list[Running]:
        """The sub-agents that have not ended, of a session or of all."""
        rows = await self._store.unfinished(owner, CHANNEL)
        found = [_running(row) for row in rows]
        return [one for one in found if parent is None or one.parent == parent]

    async def stop(self, owner: str, parent: str) -> int:
        """End all sub-agents of a session, and theirs; how many."""
        stopped = 0
        for one in await self.running(owner, parent):
            stopped += await self._stop_one(owner, one)
            stopped += await self.stop(owner, one.session)
        return stopped

    async def _stop_one(self, owner: str, one: Running) -> bool:
        """Stop it here, or have it stopped where it runs."""
        info = await self._store.session(owner, one.session)
        if not self._sessions.runs or await runs_elsewhere(self._store, self._sessions, info):
            await stop_elsewhere(self._store, self._sessions, owner, one.session, wait=False)
            return True
        self._sessions.kick(owner, one.session)
        return self._sessions.stop_turn(owner, one.session, "cancelled", STOPPED)

    async def resume(self, owner: str, parent: str) -> None:
        """Go on with the sub-agents of a session that an earlier process left."""
        for one in await self.running(owner, parent):
            self._sessions.kick(owner, one.session)
            await self.resume(owner, one.session)

    async def ended(self, claim: Claim, ended: TurnEnded | Parked) -> None:
        """A turn has ended: whoever waits for it looks again. If it was stopped, nobody waits any more for those that
        it has started; and one that was on its way then, nobody else knows of."""
        owner, key = claim.owner, claim.key
        self._at_work.pop((owner, key), None)
        for event in self._waiting.get((owner, key), ()):
            event.set()
        if not isinstance(ended, TurnEnded) or ended.reason not in phases.STOPPED:
            return
        root = str(claim.message.metadata.get("root") or claim.turn)
        try:
            for one in await self.running(owner, key):
                if one.root == root and (one.awaited or ended.reason == "cancelled"):
                    await self._stop_one(owner, one)
                elif one.root == root and not one.started:
                    self._sessions.kick(owner, one.session)
        except StoreError as error:  # then they go on
            log.warning("%s", error)

    def look_again(self) -> None:
        """Something may have ended in another process."""
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def brief(self, claim: Claim) -> Brief | None:
        """What the turn of a sub-agent works with; None for any other."""
        message = claim.message
        if message.channel != CHANNEL:
            return None
        self._at_work[claim.owner, claim.key] = message.metadata
        if self.on_work is not None:
            self.on_work()
        if (definition := phases.definition_of(message)) is not None:
            return phases.brief(message, definition, self._tools)
        return Brief(
            tools=self._tools.only(lambda name: name not in WITHHELD),
            limits=Limits(rounds=int(message.metadata.get("rounds", self._config.subagent_rounds))),
            system=lambda standing: f"{standing}{PARTING}{NOTE}",
            ends_at=message.metadata.get("ends_at"),
            follow=lambda ended, untrusted: report(message, ended, untrusted),
        )

    async def tell_broken(self) -> None:
        """Tell whoever runs the agent, once, which definitions cannot be used."""
        if not self._told_broken:
            self._told_broken = True
            for problem in await in_thread(lambda: self._definitions().problems):
                log.warning("%s", problem)

    def _definitions(self) -> Definitions:
        """The agents there are. It looks at the disk: call it in a thread."""
        return read_definitions(self._reach(), trusted=self._config.trusted)

    def is_agent(self, name: str) -> bool:
        """Whether there is a definition of this name. It looks at the disk: call it in a thread."""
        return name in self._definitions().known

    def _defined(self, name: str) -> AgentDefinition:
        try:
            found = self._definitions().get(name)
        except DefinitionError as error:
            raise ToolError(f"{error}.") from None
        if unknown := [tool for tool in found.tools if tool not in self._tools]:
            raise ToolError(f"The agent {name} names tools that are not there: {', '.join(unknown)}. Tell the user.")
        return found

    async def _make_room(self, message: InboundMessage) -> None:
        """Refuse one too many. One that is there already is started only once anyway."""
        running = await self.running(message.owner)
        if any(one.id == message.chat_id for one in running):
            return
        if len(running) >= self._config.subagents:
            names = ", ".join(one.label for one in running[:8])
            raise ToolError(
                f"{len(running)} sub-agents are at work already ({names}), and that is the most: wait until one of "
                "them has reported, or do it yourself."
            )

    async def _outcome(self, owner: str, id: str, key: str) -> Output | None:
        """How a sub-agent ended, and what it said; None while it has not."""
        info = await self._store.session(owner, key)
        if info is None or any(row.session == info.id for row in await self._store.unfinished(owner, CHANNEL)):
            return None
        entries = [one.entry for one in await self._store.read_log(info.id)]
        ends = [entry for entry in entries if isinstance(entry, TurnEnded)]
        if not ends:
            return None
        untrusted = [entry for entry in entries if isinstance(entry, CallEnded | UserSaid) and entry.untrusted]
        own_files = bool(untrusted) and all(entry.own_files for entry in untrusted)
        reason, text = next((end.reason for end in ends if end.reason in LIMITS), ends[-1].reason), ends[-1].text
        if reason == "answer" and (began := await self._store.find(owner, f"spawn:{id}")) is not None:
            definition = phases.definition_of(began.message)
            if definition is not None and (problem := read_output(definition, text)[1]):
                reason, text = "error", f"No result of it fits: {problem} What it said last:\n\n{text}"
        output = _told(reason, text, bool(untrusted))
        return replace(output, untrusted=False, contents=(UNKNOWN,)) if own_files else output


def _told(reason: Reason, text: str, untrusted: bool) -> Output:
    """What the agent that waited is told."""
    if reason != "answer":
        text = f"The sub-agent {HOW.get(reason, 'ended')}. {text}"
    if reason == "error" and not untrusted:
        raise ToolError(text)
    return Output(text, untrusted, failed=reason == "error")


def _running(row: Incoming) -> Running:
    facts = row.message.metadata
    label, parent = str(facts.get("label", "")), str(facts.get("parent", ""))
    awaited, root = not facts.get("report", True), str(facts.get("root", ""))
    return Running(row.message.chat_id, label, row.message.session_key, parent, row.turn is not None, awaited, root)


def _first_words(task: str) -> str:
    words = " ".join(task.split())
    return words if len(words) <= 60 else f"{words[:59].rstrip()}…"
