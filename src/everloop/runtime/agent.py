"""AgentLoop: the agent behind a message bus. Observe, orient, decide, act."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from .. import events
from ..actions import Limits, Park, next_action
from ..bus import Busy, InboundMessage, MessageBus, OutboundMessage
from ..commands import answer_of, command_of, kind_of
from ..config import Config
from ..config.sources import DSN
from ..context.prompt import ContextBuilder
from ..context.window import weigh, weigh_tools
from ..engine import Left, Parked
from ..errors import StoreError
from ..log import Cleared, Entry, ModelAnswered, Reason, Request, TurnEnded, apology, tokens_of
from ..messages import Message
from ..providers.base import LLMProvider
from ..providers.factory import make_provider
from ..sandbox.reach import Workspace
from ..store.base import Claim, Incoming, Outgoing, Store
from ..store.location import own_path, store_at
from ..store.peers import ENDED, WORK
from ..store.sessions import SessionManager
from ..store.sqlite import SQLiteStore
from ..text import clean
from ..threads import BackgroundTasks, in_thread
from ..tools.builtin import builtin_tools
from ..tools.cron import CronTool
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry
from .api_requests import CLIENT_LEFT, PlainCalls, Requests, spec_of
from .budgets import Budgets
from .chat_commands import ChatCommands
from .compactor import Compactor
from .conversations import Conversations
from .dispatcher import Dispatcher
from .durable_bus import DurableBus
from .notices import notices_for
from .outbox import make_adapter, reply
from .owners import OWN, Owners, no_other
from .session import WAITS, HandedOff, Session, Stopped
from .streaming import TurnStreams
from .subagents import SpawnTool, SubagentManager
from .titles import SessionNamer
from .tool_calls import AgentCalls
from .turn_runner import Models, TurnRunner, TurnSpecs
from .turn_spec import TurnSpec

if TYPE_CHECKING:
    from ..cron.heartbeat import Heartbeat
    from ..cron.service import CronService
    from ..observability.tracing import Tracer
    from ..providers.transcription import Transcriber
    from ..tools.mcp.servers import McpServers

log = logging.getLogger(__name__)

PROVIDER_METHODS = ("chat", "get_default_model")
NEW_CONVERSATION = "This is a new conversation. The old one is kept in the log."


class AgentLoop:
    """Takes messages from the bus, runs a durable turn for each, and publishes the answers.

    Omitted arguments default to `config`, and without one to 20 rounds and an unrestricted workspace. `store` is where
    turns are kept: a path or a store; by default, one SQLite file per workspace in `EVERLOOP_HOME`. `busy` decides what
    happens to a message that arrives during a turn of its session: it is queued, passed to the turn at its next round
    (`steer`), or replaces it (`interrupt`). `context` builds the prompt: a `ContextBuilder` or a subclass. `owner`
    limits the agent to one owner's sessions; by default it serves every owner. `owners` is the `Owners` it shares with
    the agents of other owners; by default it gets its own.
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
        busy: Busy | None = None,
        on_event: Callable[[str, events.Event], None] | None = None,
        owner: str | None = None,
        owners: Owners | None = None,
        context: ContextBuilder | None = None,
    ) -> None:
        _check_kinds(provider, config, context, model)
        settings = config or Config()
        busy = _checked_busy(busy or settings.busy)
        if restrict_to_workspace is None:
            restrict_to_workspace = config is not None and config.restrict_to_workspace
        self.bus = bus
        self._settings = settings
        self.provider = provider
        self.workspace = Path(workspace).absolute()  # the program may change its own folder
        self.model = model = model or settings.model or None
        self.max_iterations = settings.max_iterations if max_iterations is None else _checked_rounds(max_iterations)
        self.restrict_to_workspace = restrict_to_workspace
        self.owner = owner
        self.store = open_store(store, config, self.workspace)
        self._policy = Policy(settings.policy, taint=settings.taint, addresses=settings.addresses)
        self._places = Workspace(self.workspace, settings.home, restrict_to_workspace, self.store.files)
        self._direct = AgentCalls(self._policy, self._places, owner or "me")
        self.tools = ToolRegistry(
            timeout=settings.tool_timeout,
            result_limit=settings.result_limit,
            direct=self._direct,
            hint=self._what_it_is,
        )
        self.context = context or self._default_context()
        self._mcp = mcp_servers(settings)
        self._transcriber = _transcriber(settings)
        self._tasks = BackgroundTasks()
        self._owners = owners or Owners(settings, self.store, provider, no_other)
        self.dispatcher = Dispatcher(self.store, self, busy=busy, owner=self.owner, runs=self._owners.runs)
        networks = frozenset(channel.name for channel in settings.channels)
        self._outbox = make_adapter(self._owners, self.store, bus, self.dispatcher, self._tasks, networks)
        self.subagents = SubagentManager(
            self.store, self.dispatcher, self.tools, settings, self._places.reach, self._owners.on_subagent
        )
        if cron_service is not None:
            self.cron_service = cron_service
        self._builtin_tools = partial(
            builtin_tools, settings, self.store.search, brave_api_key=brave_api_key, exec_config=exec_config
        )
        self._register_default_tools()
        self._budgets = Budgets(self.store, settings)
        self._compactor = Compactor(self.store, provider, model, self.tools, settings, settings.home, self._budgets)
        self._tracer = tracer(settings, self.store, self._compactor.model)
        withdraw = partial(self.dispatcher.withdraw, text=CLIENT_LEFT)
        self._streams = TurnStreams(self.store.relay, withdraw, on_event)
        self._turns = self._turn_runner()
        self._serving: asyncio.Task[None] | None = None
        self._feed: asyncio.Task[None] | None = None
        self._stopped = False
        self._owners.add(self)

    def _default_context(self) -> ContextBuilder:
        settings = self._settings
        return ContextBuilder(
            self.workspace,
            settings.name,
            self._places.reach,
            memory_limit=settings.memory_limit,
            skills_limit=settings.skills_limit,
            trusted=settings.trusted,
        )

    def _turn_runner(self) -> TurnRunner:
        settings = self._settings
        rounds, models = settings.server_rounds, settings.server_models
        limits = Limits(rounds=self.max_iterations)
        return TurnRunner(
            store=self.store,
            specs=TurnSpecs(self.store, self.tools, limits, self.subagents, rounds, models),
            models=Models(self.provider, self.model, self._budgets, self._compactor, settings.text_calls),
            tools=self.tools,
            policy=self._policy,
            context=self.context,
            workspace=self._places,
            outbox=self._outbox,
            notices=notices_for(channels) if (channels := self._owners.config.channels) else None,
            streams=self._streams,
            tasks=self._tasks,
            tracer=self._tracer,
            meters=self._owners.meters,
            transcriber=self._transcriber,
        )

    @classmethod
    def from_config(cls, bus: MessageBus | None = None, config: Config | None = None, **options: Any) -> Self:
        """Create the agent described by the settings, by default the user's: its provider, workspace and limits.

        `options` are constructor arguments and take precedence over the settings.
        """
        config = config or Config.load()
        if not (config.provider or config.base_url or config.api_key or config.model):
            config = dataclasses.replace(config, provider="local")
        provider = options.pop("provider", None)
        workspace = options.pop("workspace", None) or config.workspace
        return cls(bus or MessageBus(), provider or make_provider(config), workspace, config=config, **options)

    def _register_default_tools(self) -> None:
        """Register the tools that every agent has. A subclass may register others instead or in addition."""
        for built_in in self._builtin_tools():
            self.tools.register(built_in)
        if self._settings.subagents > 0:
            self.tools.register(SpawnTool(self.subagents))
        self.tools.register(CronTool(self))

    # Parts that only some agents need are created on first use.

    @cached_property
    def cron_service(self) -> CronService:
        """The scheduled jobs; its code is imported by agents that schedule or serve some."""
        from ..cron.service import CronService

        return CronService(self.store, owner=self.owner or "me", missed=self._settings.missed)

    @cached_property
    def _commands(self) -> ChatCommands:
        networks = [one.name for one in self._owners.config.channels]
        return ChatCommands(self.store, self.dispatcher, self._turns, self.subagents, str(self._places), networks)

    @cached_property
    def requests(self) -> Requests:
        """Runs the turns of API clients."""
        return Requests(self.store, self.dispatcher, self._commands, self._streams)

    @cached_property
    def conversations(self) -> Conversations:
        """Access to the sessions for clients that read their logs."""
        return Conversations(self.store, self.dispatcher, self._commands, self._streams)

    @cached_property
    def plain_calls(self) -> PlainCalls:
        """Runs API requests that are not turns."""
        return PlainCalls(self.provider, self._budgets)

    @cached_property
    def _namer(self) -> SessionNamer:
        return SessionNamer(self.store, self.provider, self.model or "", self._settings, self._budgets)

    @cached_property
    def _heartbeat(self) -> Heartbeat | None:
        from ..cron.heartbeat import Heartbeat

        return Heartbeat.of(self._settings, self.cron_service, self.context.heartbeat_file)

    def model_for(self, wish: str) -> str:
        """Return the name of the model that serves an API client's request for `wish`."""
        return self._turns.specs.allowed_model(wish) or self._compactor.model

    def request_spec(self, request: Request) -> TurnSpec:
        """Return the spec of an API client's request."""
        specs = self._turns.specs
        return spec_of(request, self.tools, specs.request_rounds, specs.allowed_model)

    def may_use(self, model: str) -> bool:
        """Return whether an API client may request this model by name."""
        return model == self._compactor.model or self._turns.specs.allowed_model(model) is not None

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[Message], model: str = "") -> int:
        """Estimate the tokens of a request to a model."""
        units = sum(map(weigh, messages)) + (weigh_tools(tools) if tools else 0)
        return self._compactor.measure(model or None).in_tokens(units)

    def window_of(self, model: str = "") -> int:
        """Return the size of a model's context window in tokens."""
        return self._compactor.measure(model or None).window

    @property
    def sessions(self) -> SessionManager:
        """The sessions in this loop's store, for synchronous code."""
        return SessionManager(store=self.store)

    # ------------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        """Take messages until `stop()`, after resuming what an earlier process left unfinished."""
        if not self._stopped:
            self.serve_cron()
            self._feed = asyncio.create_task(self._outbox.feed(self._take))
        try:
            if self._feed is not None:
                await self._feed
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            self._feed = None
            self._stopped = False
            await self._owners.rest()

    def serve_cron(self) -> None:
        """Fire scheduled work until the loop is stopped. `run` does this itself."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve_cron())
            self._serving.add_done_callback(_log_failure)

    def stop(self) -> None:
        """Make `run()` return promptly. Running turns stay open on disk; the next start resumes them."""
        self._stopped = True
        if self._feed is not None:
            self._feed.cancel()

    async def close(self) -> None:
        """Close everything: running turns, the store's file, the provider's connections."""
        await self._owners.close()

    async def release(self) -> None:
        """Close everything except the provider, which may be in use elsewhere. Open turns stay open on disk."""
        await self._owners.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve_cron(self) -> None:
        if self._heartbeat is not None:
            await self._heartbeat.start_with_retries()
        await self.cron_service.serve(self._fired)

    def _fired(self, owner: str, key: str) -> None:
        """Run a session into whose inbox a job has just put a message."""
        if self.owner in (None, owner):
            self.dispatcher.kick(owner, key)
        else:
            self._owners.on_fired(owner)

    async def rest(self) -> None:
        """Stop all work here. Called by the `Owners` that holds the agent; a program calls `stop` or `close`."""
        if self._serving is not None:
            serving, self._serving = self._serving, None
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        await self.dispatcher.stop()
        await self._compactor.close()
        await self.tools.close()
        await self._turns.flush_times.close()
        await self._tasks.finish(1.0)
        if self._tracer is not None:
            await self._tracer.close()

    async def end(self) -> None:
        """Stop for good. Called by the `Owners` that holds the agent."""
        if self._feed is not None:
            self.stop()
        await self._outbox.close()
        await self.rest()
        if self._mcp is not None:
            await self._mcp.close()
        if self._transcriber is not None:
            await self._transcriber.close()

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

        `attended` means that a person is there to answer questions. The result may then be a question; the next message
        answers it with "y", "n", "a" (always), "/approve" or "/deny", and returns the answer of the resumed turn.
        """
        return await self._take_direct(_direct(content, session_key, channel, chat_id, media, attended), on_event)

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
        """Run one turn as `process_direct` does, and return its full result.

        That is the answer, why the turn ended, its error and its usage.
        """
        return await self.take(_direct(content, session_key, channel, chat_id, media, attended), on_event)

    async def take(self, message: InboundMessage, on_event: events.Emit | None = None) -> TurnResult:
        """Run one turn for a message, as `ask` does.

        A message `id` is an idempotency key: if the message is submitted again, even after a crash, it gets the answer
        of its original turn.
        """
        message = message.addressed()
        message.id = message.id or f"ask:{secrets.token_hex(8)}"  # used to look up its turn, wherever it ran
        text = await self._take_direct(message, on_event)
        row = await self.store.find(message.owner, message.id)
        found = (row.turn, row.session, row.first_seq) if row is not None and row.turn and row.first_seq else None
        if found is None and answer_of(message.content) is not None:  # the turn that had asked has resumed
            info = await self.store.session(message.owner, message.session_key)
            turns = await self.store.turns(message.owner, session=info.id, limit=1) if info is not None else []
            found = (turns[0].id, turns[0].session, turns[0].first_seq) if turns else None
        if found is None:
            return TurnResult(text)
        return TurnResult.of(text, found[0], [one.entry for one in await self.store.read_turn(found[1], found[2])])

    async def _take_direct(self, message: InboundMessage, on_event: events.Emit | None) -> str:
        show = _without_place(on_event) if on_event is not None else None
        if (kind := kind_of(message)) == "urgent":
            return await self._commands.answer(message, show)
        if kind == "reply":
            if (told := await self._commands.reply(message, show)) is not None:
                return told
            kind = "message"
        return await (await self.dispatcher.submit(message, kind, show))

    async def resume(self, session_key: str = "cli:direct", owner: str = "me") -> None:
        """Resume what an earlier process left of a session: its open turn, its queued messages and its sub-agents."""
        await self.subagents.resume(owner, session_key)
        self.dispatcher.kick(owner, session_key)
        session = self.dispatcher.session(owner, session_key)
        if session is not None and session.task is not None:
            await asyncio.wait([session.task])

    async def name_session(self, session_key: str = "cli:direct", owner: str = "me") -> str:
        """Let the model name an idle session that has no title.

        Return the title; "" if there is none, or if the settings use a session's first words.
        """
        return await self._namer.name(owner, session_key)

    async def undelivered(self, channel: str, chat_id: str) -> list[Outgoing]:
        """Return messages to a chat that no process could send at the time, such as a job's answer.

        The caller must mark them as sent in the store, and there may be more after that.
        """
        return await self.store.take_outgoing(self.dispatcher.worker, chat=(channel, chat_id))

    async def question(self, session_key: str = "cli:direct", owner: str = "me") -> str | None:
        """Return the question of the session's parked turn; None if no turn is parked."""
        info = await self.store.session(owner, session_key)
        if info is None or info.open_turn is None:
            return None
        turns = await self.store.turns(owner, session=info.id, prefix=info.open_turn, limit=1)
        logged = await self.store.read_turn(info.id, turns[0].first_seq) if turns else []
        action = next_action([one.entry for one in logged])
        return action.question if isinstance(action, Park) else None

    async def context_use(self, session_key: str = "cli:direct", owner: str = "me") -> tuple[int, int]:
        """Return the estimated tokens of the session's conversation, and the size of the model's context window."""
        return (await self._turns.context_use(await self.store.session(owner, session_key)))[:2]

    def watch(self, session_key: str, emit: events.Emit, owner: str = "me") -> Callable[[], None]:
        """Call `emit` with the events of a session's turns, until the returned function is called."""
        return self._streams.watch(owner, session_key, _without_place(emit))

    async def _take(self, message: InboundMessage) -> None:
        """Take a message from the bus."""
        try:
            message = message.addressed()
        except Exception as error:  # not a valid message at all
            self._apologize(message, error)
            return
        if (kind := kind_of(message)) == "urgent":
            self._tasks.start(self._answer_urgent(message))
            return
        if kind == "reply":
            if await self._answers_question(message):
                return
            kind = "message"
        answer = await self.dispatcher.submit(message, kind)
        answer.add_done_callback(partial(self._report, message))

    async def look(self, ready: Sequence[tuple[str, str]], urgent: Sequence[Incoming]) -> None:
        """Work on these sessions and answer these commands."""
        for row in urgent:
            await self._answer_urgent(row)
        await self.dispatcher.take_up(ready)

    def _what_it_is(self, name: str) -> str:
        """Explain what a model mistook for a tool. Reads from disk: call it in a thread."""
        if path := self.context.skills.path(name, self._places.reach()):
            return f"{name} is a skill, not a tool: read_file {path}, then do what it says."
        if self.subagents.is_agent(name):
            return f'{name} is an agent, not a tool: spawn(task=…, agent="{name}") runs it.'
        return ""

    # ------------------------------------------------------------------------------------------ turns and commands

    async def run_claim(self, claim: Claim, session: Session) -> str:
        """Run the claimed turn or command to its end; the answer is being delivered when this returns."""
        if claim.command:
            return await self._run_command(claim, session)
        await self.subagents.tell_broken()
        if session.system is not None:
            await session.system  # this also loads the agent definitions
        await self.provide_tools()
        ended, session_log = await self._turns.run(claim, session)
        if isinstance(ended, Left):
            raise HandedOff
        await self.subagents.ended(claim, ended)
        for id, message in session_log.outgoing():
            await self._outbox.hand_out(id, message, session_log.announced)
        for follows in session_log.incoming:
            self.dispatcher.kick(follows.owner, follows.session_key)
        return ended.question if isinstance(ended, Parked) else ended.text

    async def provide_tools(self) -> None:
        """Register the tools that may have changed: those of MCP servers, and `spawn` with its list of agents."""
        if self._mcp is not None:
            await self._mcp.provide(self.tools)
        spawn, agents = self.tools.get("spawn"), self.subagents.catalogue.text
        if isinstance(spawn, SpawnTool) and spawn.agents != agents:
            self.tools.register(SpawnTool(self.subagents, agents))

    async def refuses(self, tool: str, channel: str, chat_id: str) -> str | None:
        """Return why an unattended call of a tool from this chat is always refused; None if some calls would run."""
        return await self._direct.refuses(tool, self.tools, channel, chat_id)

    async def _run_command(self, claim: Claim, session: Session) -> str:
        """Run a command that waits its turn in the session: `/new` or `/compact`."""
        entries: list[Entry] = [Cleared()]
        text = NEW_CONVERSATION
        if command_of(claim.message.content) == "compact":
            made, text = await self._turns.compact(claim, session)
            entries = [made] if made is not None else []
        outgoing = reply(claim.message, text)
        finished = await self.store.finish(claim, entries, outgoing, self._outbox.sender)
        session.again |= finished.more
        for id, message in zip(finished.outbox, outgoing, strict=True):
            await self._outbox.hand_out(id, message)
        return text

    async def _answers_question(self, message: InboundMessage) -> bool:
        """Answer the session's open question with this message, and confirm it to the person.

        Return False if there is none.
        """
        try:
            decided = await self._commands.decide(message, message)
        except StoreError as error:
            self._apologize(message, error)
            return True
        if decided is not None:
            self._tasks.start(self._tell(message, reply(message, decided[1])))
        return decided is not None

    async def _answer_urgent(self, row: Incoming | InboundMessage) -> None:
        message = row if isinstance(row, InboundMessage) else row.message
        await self._tell(row, reply(message, await self._commands.answer(message, word=row)))

    async def _tell(self, row: Incoming | InboundMessage, outgoing: Sequence[OutboundMessage]) -> None:
        """Complete an urgent message with its answer, and send that."""
        message = row if isinstance(row, InboundMessage) else row.message
        ids = await self.store.answer(row, outgoing, self._outbox.sender)
        if isinstance(row, Incoming) and not message.reply:  # its sender waits for the notice
            self._tell_others(ENDED, row.id)
        for id, answer in zip(ids, outgoing, strict=False):
            await self._outbox.hand_out(id, answer)

    # ------------------------------------------------------------------------------------------ answers

    @property
    def worker(self) -> str:
        """The worker id under which its sessions are leased."""
        return self._owners.worker

    def system_prompt(self) -> str:
        self.subagents.catalogue.read(self.workspace)
        return self.context.shared_prompt()

    def on_held(self, worker: str, awaited: bool) -> None:
        self._owners.on_held(worker, awaited)

    def on_handoff(self, session: int | None) -> None:
        self._tell_others(WORK, session)
        self._owners.on_awaited()

    def on_unclaimed_answer(self, row: int) -> None:
        self._tell_others(ENDED, row)

    def on_message_behind_question(self, message: InboundMessage) -> None:
        self._say(message, WAITS)

    def _tell_others(self, what: str, id: int | None = None) -> None:
        """Notify other processes of a change."""
        self._tasks.start(self.store.wake(what, [] if id is None else [id]))

    def _report(self, message: InboundMessage, done: asyncio.Future[str]) -> None:
        """Report an error to the chat that could not be written to the log."""
        if done.cancelled() or (error := done.exception()) is None or isinstance(error, Stopped) or not message.reply:
            return
        self._apologize(message, error)

    def _apologize(self, message: InboundMessage, error: BaseException) -> None:
        self._say(message, apology(clean(str(error)) or type(error).__name__))

    def _say(self, message: InboundMessage, text: str) -> None:
        """Send a chat message that need not survive a crash."""
        for answer in reply(message, text):
            self._tasks.start(self.bus.publish_outbound(answer))


async def agent_of(owners: Owners, owner: str) -> AgentLoop:
    """Create an owner's agent for a server or worker.

    The agent of anyone but the machine's owner is restricted to a workspace of its own, and gets nothing that the
    machine's owner has opened up for their own agent, such as folders, keys, chats and hosts.
    """
    config = owners.config
    if owner != OWN:
        config = dataclasses.replace(
            config,
            workspace=await in_thread(_workspace, config.home, owner),
            trusted=True,  # only the owner and the owner's agent write there
            restrict_to_workspace=True,
            sandbox="auto" if config.sandbox == "off" else config.sandbox,
            readable=(),
            writable=(),
            environment=(),
            private_hosts=(),
            message_to=(),
            mcp=(),
            channels=tuple(dataclasses.replace(one, options={}) for one in config.channels if one.owner == owner),
            heartbeat_minutes=0.0,
        )
    bus = DurableBus(owners.store)
    return AgentLoop(
        bus, owners.provider, config.workspace, config=config, store=owners.store, owner=owner, owners=owners
    )


def _check_kinds(provider: object, config: object, context: object, model: object) -> None:
    if isinstance(provider, type) or not all(callable(getattr(provider, name, None)) for name in PROVIDER_METHODS):
        given = f"the class {provider.__name__}" if isinstance(provider, type) else type(provider).__name__
        raise TypeError(f"provider must be an LLMProvider, such as a subclass with a method chat, not {given}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a Config, such as Config.load(), not {type(config).__name__}")
    if context is not None and not isinstance(context, ContextBuilder):
        raise TypeError(f"context must be a ContextBuilder or a subclass of it, not {type(context).__name__}")
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model must be the name of a model, not {type(model).__name__}")


def _checked_rounds(rounds: int) -> int:
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f"max_iterations must be a whole number, not {type(rounds).__name__}")
    if rounds < 1:
        raise ValueError(f"max_iterations must be at least 1, not {rounds}")
    return rounds


def _checked_busy(busy: Busy) -> Busy:
    if busy not in ("queue", "steer", "interrupt"):
        raise ValueError(f'busy must be "queue", "steer" or "interrupt", not {busy!r}')
    return busy


def _transcriber(settings: Config) -> Transcriber | None:
    """Return the transcriber of voice messages; its code is only imported if the settings name a model for it."""
    if not settings.transcription_model:
        return None
    from ..providers.transcription import make_transcriber

    return make_transcriber(settings)


def _workspace(home: Path, owner: str) -> Path:
    folder = home / "owners" / owner / "workspace"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _direct(
    content: str, session_key: str, channel: str, chat_id: str, media: list[str] | None, attended: bool
) -> InboundMessage:
    """Return a message whose answer is returned to its caller instead of being sent to its chat."""
    return InboundMessage(
        channel, "user", chat_id, content, media or [], session=session_key, reply=False, attended=attended
    ).addressed()


def _without_place(emit: events.Emit) -> events.Show:
    """Adapt `emit` to receive events without their log positions."""
    return lambda _, event: emit(event)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s", error)


def open_store(store: Store | str | Path | DSN | None, config: Config | None, workspace: Path) -> Store:
    """Return the given store, else the one named by the settings or `EVERLOOP_STORE`, else the workspace's own."""
    if not store:
        store = config.store if config is not None and config.store_named else os.environ.get("EVERLOOP_STORE")
    if not store:
        flush_always = config is not None and config.flush == "always"
        # The path is resolved later, off the event loop, because that reads the disk.
        return SQLiteStore(partial(_default_store, workspace, config), flush_always=flush_always)
    return store_at(store, config) if isinstance(store, str | Path | DSN) else store


def _default_store(workspace: Path, config: Config | None) -> Path:
    if config is None:
        return own_path(workspace)
    if isinstance(config.store, Path) and config.is_home_workspace(workspace):
        return config.store
    return own_path(workspace, config.home)


def mcp_servers(settings: Config) -> McpServers | None:
    """Return the configured MCP servers. Without any, no MCP code is imported."""
    if not settings.mcp:
        return None
    from ..tools.mcp.servers import McpServers

    return McpServers(settings.mcp)


def tracer(settings: Config, store: Store, model: str) -> Tracer | None:
    """Return the exporter of turns as spans. Without an endpoint, its code is not imported."""
    if not settings.telemetry_endpoint:
        return None
    from ..observability.tracing import Tracer

    provider = settings.provider or "openai"
    return Tracer(
        store, settings.telemetry_endpoint, content=settings.telemetry_content, provider=provider, model=model
    )


@dataclass(slots=True, frozen=True)
class TurnResult:
    """The outcome of `AgentLoop.ask`.

    `reason` is why the turn ended: "answer" if the model answered, "question" while the turn waits for a person's
    approval, and "command" for a command such as /status, which opens no turn. `error` is None unless the turn failed.
    """

    text: str
    reason: Reason | Literal["question", "command"] = "command"
    error: str | None = None
    usage: dict[str, int] = field(default_factory=dict)  # total of all its model calls
    turn: str | None = None
    rounds: int = 0

    @classmethod
    def of(cls, text: str, turn: str | None, entries: Sequence[Entry]) -> TurnResult:
        """Build the result from the turn's log; `text` is the answer that the caller got."""
        usage, rounds = tokens_of(entries), sum(isinstance(entry, ModelAnswered) for entry in entries)
        ended = next((entry for entry in reversed(entries) if isinstance(entry, TurnEnded)), None)
        if ended is None:
            return cls(text, "question", None, usage, turn, rounds)
        error = (ended.error or ended.text) if ended.reason == "error" else None
        return cls(text, ended.reason, error, usage, turn, rounds)
