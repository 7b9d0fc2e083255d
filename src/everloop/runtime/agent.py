"""AgentLoop: the agent behind a message bus. Observe, orient, decide, act."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from .. import events
from ..actions import Limits, Park, next_action
from ..bus import InboundMessage, MessageBus, OutboundMessage
from ..commands import answer_of, command_of, kind_of
from ..config import Config
from ..config.dsn import DSN
from ..context.prompt import ContextBuilder
from ..cron.heartbeat import Heartbeat
from ..cron.service import CronService
from ..engine import Left, Parked
from ..errors import StoreError
from ..goals.phases import CHANNEL as SUBAGENTS
from ..log import Cleared, Entry, apology
from ..providers.base import LLMProvider
from ..providers.factory import make_provider
from ..store.base import Claim, Incoming, Outgoing, Store
from ..store.news import ENDED, SENDING, WORK
from ..store.sessions import PlainStore, SessionManager
from ..text import clean
from ..tools.builtin import builtin_tools
from ..tools.cron import CronTool
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry
from ..tools.spawn import SpawnTool
from .api_requests import Requests
from .budgets import Budgets
from .chat_commands import Urgent
from .compactor import Compactor
from .direct_calls import AgentCalls
from .dispatcher import RETRY_SECONDS, WAITS, Dispatcher, Leaves
from .durable_bus import DurableBus
from .listening import House, Listening
from .parts import allowed, mcp_servers, open_store, tracer
from .peers import wake_all
from .ports import reply
from .results import TurnResult
from .session import Live
from .subagents import SubagentManager
from .turn_runner import TurnRunner
from .waiters import Stopped

log = logging.getLogger(__name__)

NEW_CONVERSATION = "This is a new conversation. The old one is kept in the log."


class AgentLoop:
    """Takes messages from the bus, runs a durable turn for each, and publishes the answers.

    Arguments that are left out come from `config`, and without one from the defaults: 20 rounds, and no restriction to
    the workspace. `store` is where turns are kept (a path or a store; by default one SQLite file for each workspace, in
    `EVERLOOP_HOME`). `busy` says what happens to a message that arrives during a turn of its session: it is queued,
    handed to the turn at its next round (`steer`), or replaces it (`interrupt`). `context` builds the prompt: a
    `ContextBuilder` or a subclass. `owner` is the one whose sessions it works in, by default anybody's. In a `house` it
    lives with the agents of other owners: the store and the provider are theirs too, and left open at the end.
    """

    def __init__(
        self,
        bus: MessageBus,
        provider: LLMProvider,
        workspace: str | Path,
        model: str | None = None,
        max_iterations: int | None = None,
        brave_api_key: str | None = None,
        exec_config: Any = None,
        cron_service: Any = None,
        restrict_to_workspace: bool | None = None,
        config: Config | None = None,
        *,
        store: Store | str | Path | DSN | None = None,
        busy: Literal["queue", "steer", "interrupt"] | None = None,
        on_event: Callable[[str, events.Event], None] | None = None,
        owner: str | None = None,
        house: House | None = None,
        context: ContextBuilder | None = None,
    ) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config must be a Config, such as Config.load(), not {type(config).__name__}")
        if context is not None and not isinstance(context, ContextBuilder):
            raise TypeError(f"context must be a ContextBuilder or a subclass of it, not {type(context).__name__}")
        settings = config or Config()
        if restrict_to_workspace is None:
            restrict_to_workspace = config is not None and config.restrict_to_workspace
        busy = busy or settings.busy
        if busy not in ("queue", "steer", "interrupt"):
            raise ValueError(f'busy must be "queue", "steer" or "interrupt", not {busy!r}')
        self.bus = bus
        self.provider = provider
        self.workspace = Path(workspace)
        self.model = model = model or settings.model or None
        self.max_iterations = settings.max_iterations if max_iterations is None else max_iterations
        self.restrict_to_workspace = restrict_to_workspace
        self.owner = owner
        self._house = house
        self.store = open_store(store, config, self.workspace)
        own_home = settings.home
        self._policy = Policy(settings.policy, taint=settings.taint, addresses=settings.addresses)
        direct = AgentCalls(
            self._policy,
            self.workspace,
            own_home,
            self.store,
            restricted=self.restrict_to_workspace,
            owner=owner or "me",
        )
        self.tools = ToolRegistry(timeout=settings.tool_timeout, result_limit=settings.result_limit, direct=direct)
        self.context = context or ContextBuilder(
            self.workspace,
            settings.name,
            lambda: self._turns.reach(),
            memory_limit=settings.memory_limit,
            skills_limit=settings.skills_limit,
            trusted=settings.trusted,
        )
        self._mcp = mcp_servers(settings)
        self._dispatcher = self._dispatch(busy)
        self.subagents = self._family(settings)
        if cron_service is None:
            cron_service = CronService(self.store, owner=owner or "me", missed=settings.missed)
        self.cron_service = cron_service
        self._builtin_tools = partial(
            builtin_tools, settings, self.store.search, brave_api_key=brave_api_key, exec_config=exec_config
        )
        self._spawns = settings.subagents > 0
        self._register_default_tools()
        self._heartbeat = Heartbeat.of(settings, cron_service, self.context.heartbeat_file)
        self._serving: asyncio.Task[None] | None = None
        budgets = Budgets(self.store, settings)
        self._compactor = Compactor(self.store, provider, model, self.tools, settings, own_home, budgets)
        self._tracer = tracer(settings, self.store, self._compactor.model)
        self._turns = self._turn_runner(settings, own_home, budgets, on_event)
        place = f"{self.workspace}{' (restricted)' if self.restrict_to_workspace else ''}"
        self._urgent = Urgent(self.store, self._dispatcher, self._turns, self.subagents, place)
        self._listening = Listening(
            self.store, self._dispatcher, self.subagents, self._answer_urgent, self._spawn, house
        )
        self.requests = Requests(self.store, self._dispatcher, self._urgent, self._turns)
        self._feed: asyncio.Task[None] | None = None
        self._stopped = False
        self._background: set[asyncio.Task[None]] = set()
        self._handed_out: set[int] = set()  # rows of the outbox that wait on the bus to be taken

    @classmethod
    def from_config(cls, bus: MessageBus | None = None, config: Config | None = None, **options: Any) -> Self:
        """The agent that the settings describe, by default those of the user: its provider, workspace and limits.

        `options` are arguments of the constructor, and win over the settings.
        """
        config = config or Config.load()
        if not (config.provider or config.base_url or config.api_key or config.model):
            config = dataclasses.replace(config, provider="local")
        provider = options.pop("provider", None)
        workspace = options.pop("workspace", None) or config.workspace
        return cls(bus or MessageBus(), provider or make_provider(config), workspace, config=config, **options)

    def _dispatch(self, busy: str) -> Dispatcher:
        house = self._house
        made = Dispatcher(
            self.store,
            self._run_claim,
            lambda: self.context.shared_prompt(),
            busy=busy,
            owner=self.owner,
            worker=house.worker if house is not None else None,
            runs=house is None or house.runs,
        )
        made.on_held = lambda worker, awaited: self._listening.held(worker, awaited)
        made.on_waiting = lambda message: self._say(message, WAITS)
        made.on_stranger = lambda row: self._tell_others(ENDED, row)
        made.on_left = self._leave_to_others
        return made

    def _family(self, settings: Config) -> SubagentManager:
        made = SubagentManager(self.store, self._dispatcher, self.tools, settings, lambda: self._turns.reach())
        made.on_work = lambda: self._listening.listen()
        self.tools.hint = self._what_it_is
        return made

    def _register_default_tools(self) -> None:
        """Register the tools that every agent has. A subclass may register others instead, or add to them."""
        for built_in in self._builtin_tools():
            self.tools.register(built_in)
        if self._spawns:
            self.tools.register(SpawnTool(self.subagents))
        self.tools.register(CronTool(self.cron_service))

    def _turn_runner(
        self,
        settings: Config,
        own_home: Path,
        budgets: Budgets,
        on_event: Callable[[str, events.Event], None] | None,
    ) -> TurnRunner:
        return TurnRunner(
            store=self.store,
            provider=self.provider,
            tools=self.tools,
            policy=self._policy,
            context=self.context,
            workspace=self.workspace,
            home=own_home,
            restricted=self.restrict_to_workspace,
            model=self.model,
            limits=Limits(rounds=self.max_iterations),
            compactor=self._compactor,
            budgets=budgets,
            brief=self.subagents.brief,
            sender=None if isinstance(self.bus, DurableBus) else self._dispatcher.worker,
            hand_out=lambda id, message: self._spawn(self._hand_out(id, message)),
            awaited=self._dispatcher.awaits,
            on_event=on_event,
            request_rounds=settings.server_rounds,
            allowed_model=partial(allowed, settings.server_models),
            tracer=self._tracer,
            meters=self._house.meters if self._house is not None else None,
            text_calls=settings.text_calls,
        )

    def model_for(self, wish: str) -> str:
        """The name of the model that answers an API client who asks for this one."""
        return self._turns.allowed_model(wish) or self._compactor.model

    @property
    def sessions(self) -> SessionManager:
        """The sessions of this loop's store, for plain code."""
        if not isinstance(self.store, PlainStore):
            raise TypeError("this store has nothing for plain code")
        return SessionManager(store=self.store)

    # ------------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        """Take messages until `stop()`. First of all, go on with what an earlier process left unfinished."""
        if not self._stopped:
            if self._house is None:
                self.serve_cron()
            feed = self._feed_durable(self.bus) if isinstance(self.bus, DurableBus) else self._feed_memory()
            self._feed = asyncio.create_task(feed)
        try:
            if self._feed is not None:
                await self._feed
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            self._feed = None
            self._stopped = False
            await self._quiet()

    def serve_cron(self) -> None:
        """Fire scheduled work from now on, until the loop is stopped. `run` does it by itself."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve_cron())
            self._serving.add_done_callback(self._ended)

    def stop(self) -> None:
        """End `run()` promptly. Turns under way stay open on disk; the next start goes on with them."""
        self._stopped = True
        if self._feed is not None:
            self._feed.cancel()

    def drain(self) -> None:
        """Leave turns that nobody here waits for to other processes, each after the step that runs."""
        self._dispatcher.drain(f"{SUBAGENTS}:")

    async def leave(self, seconds: float) -> None:
        """Begin no more turns, and leave those that run to other processes, each after the step that runs, for which it
        waits no longer than this. What comes in meanwhile is for others too."""
        await self._dispatcher.leave(seconds)

    async def close(self) -> None:
        """Let go of everything: turns under way, the store's file, the provider's connections."""
        if self._feed is not None:
            self.stop()
        if isinstance(self.bus, DurableBus):
            await self.bus.close()
        await self._quiet()
        if self._mcp is not None:
            await self._mcp.close()
        self._dispatcher.retire()
        if self._house is None and (close := getattr(self.provider, "close", None)) is not None:
            await close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve_cron(self) -> None:
        if self._heartbeat is not None:
            await self._heartbeat.insist()
        await self.cron_service.serve(self._fired)

    def _fired(self, owner: str, key: str) -> None:
        """A job has put a message into the inbox of a session."""
        if self.owner in (None, owner):
            self._dispatcher.kick(owner, key)
        elif self._house is not None:
            self._house.changed()
        else:
            self._tell_others(WORK)

    async def _quiet(self) -> None:
        if self._serving is not None:
            serving, self._serving = self._serving, None
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        await self._dispatcher.stop()
        await self._compactor.close()
        await self.tools.close()
        await self._listening.leave()
        if self._background:
            _, stuck = await asyncio.wait(self._background, timeout=1.0)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
            await self._listening.leave()  # one of them may have come to join only now
        if self._tracer is not None:
            await self._tracer.close()
        if self._house is None:
            await self.store.close()
        self._dispatcher.renew()  # answers that were not handed out any more are sent at the next start
        if self._turns.sender is not None:
            self._turns.sender = self._dispatcher.worker

    # ------------------------------------------------------------------------------------------ taking messages

    async def process_direct(
        self,
        content: str,
        session_key: str = "cli:direct",
        channel: str = "cli",
        chat_id: str = "direct",
        *,
        media: list[str] | None = None,
        on_event: events.Emit | None = None,
        attended: bool = False,
    ) -> str:
        """Run one turn without the bus and return its answer.

        `attended` says that somebody is there who can be asked: then what comes back may be a question, and
        "y", "n", "a" (always), "/approve" or "/deny" as the next message gives the answer of the turn that goes on.
        """
        message = InboundMessage(
            channel, "user", chat_id, content, media or [], session=session_key, reply=False, attended=attended
        ).addressed()
        return await self._process(message, on_event)

    async def ask(
        self,
        content: str,
        session_key: str = "cli:direct",
        channel: str = "cli",
        chat_id: str = "direct",
        *,
        media: list[str] | None = None,
        on_event: events.Emit | None = None,
        attended: bool = False,
    ) -> TurnResult:
        """Run one turn as `process_direct` does, and return all that is known of it: its answer, why it ended, what
        went wrong and what it used."""
        message = InboundMessage(
            channel, "user", chat_id, content, media or [], session=session_key, reply=False, attended=attended
        ).addressed()
        message.id = f"ask:{secrets.token_hex(8)}"  # by which its turn is found, wherever it ran
        text = await self._process(message, on_event)
        row = await self.store.find(message.owner, message.id)
        found = (row.turn, row.session, row.first_seq) if row is not None and row.turn and row.first_seq else None
        if found is None and answer_of(message.content) is not None:  # the turn that asked has gone on
            info = await self.store.session(message.owner, message.session_key)
            turns = await self.store.turns(message.owner, session=info.id, limit=1) if info is not None else []
            found = (turns[0].id, turns[0].session, turns[0].first_seq) if turns else None
        if found is None:
            return TurnResult(text)
        return TurnResult.of(text, found[0], [one.entry for one in await self.store.read_turn(found[1], found[2])])

    async def _process(self, message: InboundMessage, on_event: events.Emit | None) -> str:
        if (kind := kind_of(message)) == "urgent":
            return await self._urgent.answer(message, on_event)
        if kind == "reply":
            if (told := await self._urgent.reply(message, on_event)) is not None:
                return told
            kind = "message"
        return await (await self._dispatcher.submit(message, kind, on_event))

    async def resume(self, session_key: str = "cli:direct", owner: str = "me") -> None:
        """Go on with a session's open turn, and with what waits behind it, if an earlier process left any; and with its
        sub-agents, beside it."""
        await self.subagents.resume(owner, session_key)
        self._dispatcher.kick(owner, session_key)
        live = self._dispatcher.live(owner, session_key)
        if live is not None and live.task is not None:
            await asyncio.wait([live.task])

    async def undelivered(self, channel: str, chat_id: str) -> list[Outgoing]:
        """What was said in a chat while nobody was there to send it, a job's answer say. The store must be told when it
        is sent, and may have more then."""
        return await self.store.take_outgoing(self._dispatcher.worker, chat=(channel, chat_id))

    async def question(self, session_key: str = "cli:direct", owner: str = "me") -> str | None:
        """What the session's parked turn asks for; None when it waits for nobody."""
        info = await self.store.session(owner, session_key)
        if info is None or info.open_turn is None:
            return None
        turns = await self.store.turns(owner, session=info.id, prefix=info.open_turn, limit=1)
        logged = await self.store.read_turn(info.id, turns[0].first_seq) if turns else []
        action = next_action([one.entry for one in logged])
        return action.question if isinstance(action, Park) else None

    def watch(self, session_key: str, emit: events.Emit, owner: str = "me") -> Callable[[], None]:
        """Tell `emit` what happens in a session's turns, until the function that comes back is called."""
        self._turns.watch(self._dispatcher.live(owner, session_key), owner, session_key, emit)
        return lambda: self._turns.unwatch(owner, session_key, emit)

    async def _feed_memory(self) -> None:
        await self._dispatcher.scan()
        while rows := await self.store.take_outgoing(self._dispatcher.worker):
            for row in rows:
                if row.id not in self._handed_out:
                    self._spawn(self._hand_out(row.id, row.message))
        while True:
            message = await self.bus.consume_inbound()
            try:
                message = message.addressed()
            except Exception as error:  # one that is no message at all
                self._apologize(message, error)
                continue
            if (kind := kind_of(message)) == "urgent":
                self._spawn(self._answer_urgent(message))
                continue
            if kind == "reply":
                if await self._answers_question(message):
                    continue
                kind = "message"
            answer = await self._dispatcher.submit(message, kind)
            answer.add_done_callback(partial(self._report, message))

    async def _feed_durable(self, bus: DurableBus) -> None:
        changed = asyncio.Event()
        if self._house is not None:  # which looks into the store for all
            bus.arrived = self._house.changed
            await changed.wait()
        bus.arrived = changed.set
        await self._listening.join(lambda _: changed.set(), takes=True)
        while True:
            changed.clear()  # before looking: what comes in meanwhile sets it again
            try:
                worker = self._dispatcher.worker
                await self.look(await self.store.ready(worker, self.owner), await self.store.urgent(worker, self.owner))
                await self.settle(await self.store.over(self.waits()))
                self.subagents.look_again()
                self.cron_service.changed()  # whoever woke us may have added a job
            except StoreError as error:  # a full or locked disk ends no worker
                log.error("%s", error)
                asyncio.get_running_loop().call_later(RETRY_SECONDS, changed.set)
            await changed.wait()

    async def look(self, ready: Sequence[tuple[str, str]], urgent: Sequence[Incoming]) -> None:
        """Take up these sessions and answer these commands."""
        for row in urgent:
            await self._answer_urgent(row)
        await self._dispatcher.take_up(ready)

    def waits(self) -> list[int]:
        """Rows of the inbox whose answers other processes give to somebody who waits here."""
        return self._dispatcher.waits()

    async def settle(self, rows: Sequence[int]) -> None:
        """These rows of the inbox are done."""
        await self._dispatcher.settle(rows)

    def _what_it_is(self, name: str) -> str:
        """What a model has taken for a tool. It looks at the disk: call it in a thread."""
        if path := self.context.skills.path(name, self._turns.reach()):
            return f"{name} is a skill, not a tool: read_file {path}, then do what it says."
        if self.subagents.is_agent(name):
            return f'{name} is an agent, not a tool: spawn(task=…, agent="{name}") runs it.'
        return ""

    # ------------------------------------------------------------------------------------------ turns and commands

    async def _run_claim(self, claim: Claim, live: Live) -> str:
        """Take what was claimed to its end; the answer is on its way when this returns."""
        if claim.command:
            return await self._run_command(claim, live)
        await self.subagents.tell_broken()
        if self._mcp is not None:
            await self._mcp.provide(self.tools)
        ended, session_log = await self._turns.run(claim, live)
        if isinstance(ended, Left):
            raise Leaves
        await self.subagents.ended(claim, ended)
        for id, message in session_log.outgoing():
            await self._hand_out(id, message)
        for follows in session_log.incoming:
            self._dispatcher.kick(follows.owner, follows.session_key)
        return ended.question if isinstance(ended, Parked) else ended.text

    async def _run_command(self, claim: Claim, live: Live) -> str:
        """A command that waits for its place in the session: `/new` or `/compact`."""
        entries: list[Entry] = [Cleared()]
        text = NEW_CONVERSATION
        if command_of(claim.message.content) == "compact":
            made, text = await self._turns.compact(claim, live)
            entries = [made] if made is not None else []
        outgoing = reply(claim.message, text)
        finished = await self.store.finish(claim, entries, outgoing, self._turns.sender)
        live.again |= finished.more
        for id, message in zip(finished.outbox, outgoing, strict=True):
            await self._hand_out(id, message)
        return text

    async def _answers_question(self, message: InboundMessage) -> bool:
        """Whether a message of the bus answered the open question of its session; the person is told so."""
        try:
            decided = await self._urgent.decide(message, message)
        except StoreError as error:
            self._apologize(message, error)
            return True
        if decided is not None:
            self._spawn(self._tell(message, reply(message, decided[1])))
        return decided is not None

    async def _answer_urgent(self, row: Incoming | InboundMessage) -> None:
        message = row if isinstance(row, InboundMessage) else row.message
        await self._tell(row, reply(message, await self._urgent.answer(message, word=row)))

    async def _tell(self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage]) -> None:
        """Close an urgent message with its answer, and send that."""
        message = row if isinstance(row, InboundMessage) else row.message
        ids = await self.store.answer(row, outgoing, self._turns.sender)
        if isinstance(row, Incoming) and not message.reply:  # whoever said it waits for that
            self._tell_others(ENDED, row.id)
        for id, answer in zip(ids, outgoing, strict=False):
            await self._hand_out(id, answer)

    # ------------------------------------------------------------------------------------------ answers

    async def _hand_out(self, id: int, message: OutboundMessage) -> None:
        """Give an answer to the bus; it counts as sent when somebody has taken it."""
        if isinstance(self.bus, DurableBus):
            self.bus.more_outgoing()
            await wake_all(self.store, SENDING)
            return
        self._handed_out.add(id)
        try:
            await self.bus.publish_outbound(message, partial(self._taken, id))
        except asyncio.CancelledError:
            self._handed_out.discard(id)
            raise

    def _leave_to_others(self, session: int | None) -> None:
        self._tell_others(WORK, session)
        if self._house is not None:
            self._house.awaits()

    def _tell_others(self, what: str, id: int | None = None) -> None:
        """Tell other processes what has changed, and where."""
        self._spawn(wake_all(self.store, what, [] if id is None else [id]))

    def _taken(self, id: int) -> None:
        self._handed_out.discard(id)
        self._spawn(self.store.sent([id]))

    def _report(self, message: InboundMessage, done: asyncio.Future[str]) -> None:
        """Tell the chat of an error that could not be written down."""
        if done.cancelled() or (error := done.exception()) is None or isinstance(error, Stopped) or not message.reply:
            return
        self._apologize(message, error)

    def _apologize(self, message: InboundMessage, error: BaseException) -> None:
        self._say(message, apology(clean(str(error)) or type(error).__name__))

    def _say(self, message: InboundMessage, text: str) -> None:
        """Say something in a chat that need not survive a crash."""
        for answer in reply(message, text):
            self._spawn(self.bus.publish_outbound(answer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s", error)
