"""API requests: the specs of their turns, running them, and reading their outcomes from the log."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..actions import Limits
from ..bus import InboundMessage, StopRequest
from ..commands import answer_of, kind_of
from ..context.prompt import PARTING
from ..errors import StoreError
from ..events import Show
from ..log import Call, Entry, ModelAnswered, Request, TurnEnded, tokens_of
from ..providers.base import LLMProvider
from ..store.base import Claim, Store
from ..tools.context import CallContext
from ..tools.registry import ToolRegistry, ToolResult, error_result
from .budgets import Budgets
from .streaming import TurnStreams, TurnSubscriber
from .turn_spec import TurnSpec

if TYPE_CHECKING:  # both run turns, which depend on the specs below
    from .chat_commands import ChatCommands
    from .dispatcher import Dispatcher

log = logging.getLogger(__name__)
UNANSWERED = frozenset({"cancelled", "aborted", "replaced", "abandoned", "timeout", "error"})
CLIENT_LEFT = "Stopped: the client went away."
SPACES = 100  # characters of surrounding whitespace that may have been streamed and are not in the log
NOT_HERE = "Questions are answered where they were asked, on the web page, or over the API with a token."
PLAIN = "You are a helpful assistant."
TOGETHER = "Make it again, together with the corrected one."

# ---------------------------------------------------------------------------------------------- turns of requests


async def is_abandoned(store: Store, claim: Claim, request: Request) -> bool:
    """Return whether the client of a sessionless request has disconnected, because its server's process died."""
    if request.kept:
        return False
    server = request.via  # the server holds the client's connection, and runs no turns
    return not await store.is_alive(server) if server else claim.resumed


def brings_all(request: Request) -> bool:
    """Return whether the client brings its own prompt and tools, so that the agent only forwards them."""
    return bool(request.tools) or request.model_only


def spec_of(request: Request, tools: ToolRegistry, rounds: int, models: Callable[[str], str | None]) -> TurnSpec:
    """Return the spec of a request's turn.

    A client that brings its own tools is the agent, and we are only its model: it gets no system prompt but its own.
    Otherwise our agent works with its own tools, and the client's system message follows the agent's prompt, unless the
    request bypasses the agent, in which case it gets no tools.
    """
    limits = Limits(rounds=rounds, kept=request.kept)
    model = models(request.model)
    if brings_all(request):
        client = ClientTools(() if request.answer_only else request.tools)
        return TurnSpec(client, limits, model, lambda _: request.system or PLAIN, dated=False, options=request.options)
    tools = ToolRegistry() if request.answer_only else tools
    return TurnSpec(
        tools,
        limits,
        model,
        lambda standing: f"{standing}{PARTING}{request.system}" if request.system else standing,
        options=request.options,
    )


class ClientTools(ToolRegistry):
    """The tools of an API client: offered to the model but never run here."""

    def __init__(self, definitions: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._definitions = list(definitions)
        self._client = [tool["function"]["name"] for tool in definitions]

    @property
    def names(self) -> list[str]:
        return list(self._client)

    async def run(self, call: Call, context: CallContext) -> ToolResult:
        """Answer calls that cannot be handed to the client: invalid ones, and those made alongside an invalid one."""
        if call.name in self._client and call.error is None:
            why = f"{call.name} was not run: another call of the answer was wrong."
            return ToolResult(error_result(why, TOGETHER), "error")
        return await super().run(call, context)


# ---------------------------------------------------------------------------------------------- running them


class Earlier(msgspec.Struct, frozen=True):
    """An earlier request with the same id."""

    said: str
    unanswered: bool  # it ended without an answer, so it may be run again


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a request: the answer and the turn's entries. A command has no turn."""

    text: str
    entries: Sequence[Entry] = ()

    @property
    def reason(self) -> str:
        last = self.entries[-1] if self.entries else None
        return last.reason if isinstance(last, TurnEnded) else "answer"

    @property
    def left(self) -> bool:
        """Return whether the turn was stopped because its client disconnected."""
        last = self.entries[-1] if self.entries else None
        return isinstance(last, TurnEnded) and last.reason == "cancelled" and last.text == CLIENT_LEFT

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls that the client has to run."""
        answer = self._last_answer()
        return answer.calls if answer is not None and self.reason == "handed" else ()

    @property
    def finish_reason(self) -> str:
        """The finish reason reported by the model's API."""
        answer = self._last_answer()
        return answer.finish_reason if answer is not None else "stop"

    @property
    def reasoning(self) -> str:
        return "\n\n".join(one.reasoning for one in self._answers() if one.reasoning)

    @property
    def logprobs(self) -> tuple[dict[str, Any], ...]:
        answer = self._last_answer()
        return answer.logprobs if answer is not None else ()

    @property
    def model(self) -> str:
        answer = self._last_answer()
        return answer.model if answer is not None else ""

    @property
    def usage(self) -> dict[str, int]:
        """The total tokens of the turn's model calls."""
        return tokens_of(self.entries)

    def _answers(self) -> list[ModelAnswered]:
        return [entry for entry in self.entries if isinstance(entry, ModelAnswered)]

    def _last_answer(self) -> ModelAnswered | None:
        return next(reversed(self._answers()), None)


class Requests:
    """Runs the turns of an agent's API clients."""

    def __init__(self, store: Store, dispatcher: Dispatcher, commands: ChatCommands, streams: TurnStreams) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._commands = commands
        self._streams = streams
        # requests that wait in this process, by the message's owner and id
        self._waiting: Counter[tuple[str, str]] = Counter()
        # in-flight removals of messages whose clients have disconnected
        self._dropping: set[asyncio.Task[None]] = set()

    async def run(
        self, message: InboundMessage, show: Show | None = None, commands: bool = True, answers: bool = False
    ) -> Outcome:
        """Run a request's turn, in whichever process, and return its outcome.

        A request with a known id is not run again; its outcome is returned. `show` receives every event of the turn
        from its start, with its log position. Without `commands`, text such as /stop goes to the model; with `answers`,
        it may answer a question of the agent.

        Cancelling this only stops waiting; `withdraw` stops the turn.
        """
        id, kept = message.id, message.request is not None and message.request.kept
        assert id is not None
        kind = kind_of(message) if kept and commands else "message"
        if message.request is not None and message.request.model_only and answer_of(message.content) is not None:
            kind = "message"  # it must not answer a question that the agent asked a person
        message = message.addressed()
        shown = _without_place(show) if show is not None else None
        if kind == "urgent":
            refused = not answers and answer_of(message.content) is not None
            return Outcome(NOT_HERE if refused else await self._commands.answer(message, shown))
        if kind == "reply":
            if answers and (replied := await self._commands.reply(message, shown)) is not None:
                return Outcome(replied)
            kind = "message"
        self._waiting[message.owner, id] += 1
        where = (message.owner, message.session_key)
        subscriber = TurnSubscriber(self._store, self._streams, *where, show) if show is not None else None
        try:
            if subscriber is None:
                answer = await self._dispatcher.submit(message, kind)
            else:
                answer = await self._dispatcher.submit(message, kind, subscriber.on_event, subscriber.follow)
            text = await answer
        finally:
            self._waiting[message.owner, id] -= 1
            self._waiting += Counter()  # drops the zeros
            if subscriber is not None:
                subscriber.close()
        found = await self._store.turn_of(message.owner, id)
        if found is None:
            return Outcome(text)
        session, first = found
        follows = subscriber is not None and subscriber.is_following
        # The first entry is the user's message, which may be very long: only a subscriber that followed the turn needs
        # it.
        logged = await self._store.read_turn(session, first if follows else first + 1)
        if subscriber is not None:
            subscriber.finish(logged)
        return Outcome(text, [one.entry for one in logged])

    async def enqueue(self, message: InboundMessage) -> None:
        """Enqueue a request whose answer is fetched later.

        It is on disk when this returns, and runs without a waiter.
        """
        message = message.addressed()
        await self._store.accept(message, "message")
        self._dispatcher.kick(message.owner, message.session_key)

    async def cancel(self, owner: str, id: str) -> None:
        """Stop a request's turn, wherever it runs; if it has not started, it never will."""
        row = await self._store.find(owner, id)
        if row is None or row.done:
            return
        stop = InboundMessage(
            row.message.channel, row.message.sender_id, row.message.chat_id, "/stop", owner=owner,
            session=row.message.session_key, reply=False, cause=StopRequest(row.id),
        )  # fmt: skip
        if row.turn is None:
            await self._store.answer(row, [])
            await self._dispatcher.settle([row.id])
        await self._commands.answer(stop)

    async def earlier(self, owner: str, id: str) -> Earlier | None:
        """Return the earlier request with this id, if there was one."""
        row = await self._store.find(owner, id)
        if row is None:
            return None
        if not row.done or row.first_seq is None:
            return Earlier(row.message.content, False)
        logged = await self._store.read_turn(row.session, row.first_seq)
        last = logged[-1].entry if logged else None
        return Earlier(row.message.content, isinstance(last, TurnEnded) and last.reason in UNANSWERED)

    async def holds(self, owner: str, id: str, seq: int, chars: int) -> bool:
        """Return whether this position exists in the request's turn.

        A position is a log entry followed by at least `chars` characters of text.
        """
        row = await self._store.find(owner, id)
        if row is None or row.first_seq is None:
            return False
        logged = await self._store.read_turn(row.session, row.first_seq)
        if not logged or not row.first_seq <= seq <= logged[-1].seq or (logged[-1].seq == seq and row.done):
            return False
        after = next((one.entry for one in logged if one.seq == seq + 1), None)
        if after is None:
            return True  # the answer is not there yet
        said = after.content or "" if isinstance(after, ModelAnswered) else ""
        return chars <= len(said) + (SPACES if isinstance(after, ModelAnswered) else 0)

    def withdraw(self, message: InboundMessage, known: bool = True) -> None:
        """Handle a disconnected client: stop its turn, now or as soon as it starts.

        The turn continues if another client waits for it, here or in another process. A request that cannot be repeated
        (not `known`) no longer starts anywhere.
        """
        assert message.id is not None
        where = (message.owner, message.session_key)
        session, publisher = self._dispatcher.session(*where), self._streams.publisher(*where)
        here = session is not None and session.state.message == message.id
        if here and publisher is not None and publisher.is_followed_elsewhere:
            return
        self._dispatcher.withdraw(*where, message.id, CLIENT_LEFT)
        if not here and not self._waiting[message.owner, message.id]:
            self._streams.tell_withdrawn(*where, message.id)
        if not known and session is None:
            task = asyncio.get_running_loop().create_task(self._drop(message))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, message: InboundMessage) -> None:
        try:
            row = await self._store.find(message.owner, message.id or "")
            if row is not None and row.turn is None:
                await self._store.answer(row, [])
                await self._dispatcher.settle([row.id])
        except StoreError as error:  # it will run in vain
            log.warning("%s", error)


class PlainCalls:
    """Forwards requests that are not turns, such as embeddings, to the provider, within the owner's budget."""

    def __init__(self, provider: LLMProvider, budgets: Budgets) -> None:
        self._provider = provider
        self._budgets = budgets

    @property
    def endpoints(self) -> frozenset[str]:
        return getattr(self._provider, "endpoints", frozenset())

    async def ask(self, owner: str, endpoint: str, body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """Return an endpoint's response; `tokens` is an estimate of the request's size.

        Raises ProviderError or BudgetReached.
        """
        model = str(body.get("model") or self._provider.get_default_model())
        await self._budgets.check_day(owner, model, tokens)
        answer = await self._provider.forward(endpoint, body)
        usage = answer.get("usage")
        counted = usage.items() if isinstance(usage, dict) else ()
        await self._budgets.record_day(owner, model, {name: n for name, n in counted if type(n) is int}, tokens)
        return answer


def _without_place(show: Show) -> Show:
    """Return `show` without log positions: a client cannot resume a command."""
    return lambda _, event: show(0, event)
