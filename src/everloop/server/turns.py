"""Requests of all APIs: each becomes a turn of the agent, and is answered whole or as a stream.

An API consists of a function that parses a body into a `ChatRequest`, and a `Wire` that writes the answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web
from msgspec import structs

from ..bus import InboundMessage, is_inside, repeatable_id
from ..commands import kind_of
from ..config import Agent
from ..errors import StoreError
from ..log import Content, ModelAnswered, Request, ResponseFacts, text_of
from ..messages import Message
from ..providers.base import honours
from ..runtime.agent import AgentLoop
from ..runtime.api_requests import Outcome
from ..runtime.owners import OWN, Owners
from ..store.base import Store
from ..text_cursor import Position
from ..threads import in_thread
from ..tools.registry import marked
from .agent_choice import agent_of, model_of
from .errors import ApiError, bad_request, failure_of, internal_error, too_many_requests, unavailable
from .guard import OWNER, TOKEN
from .requests import ChatRequest
from .sse import LAST_EVENT_ID, AnswerStream, Begin, Encoder, Write, position_of

log = logging.getLogger(__name__)
CHANNEL = "api"
SESSION = "X-Session"
IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_LENGTH = 200
LARGE = 100_000  # bytes of a body above which it is parsed in a thread
RATE, RATE_SECONDS = "requests", 60.0
# finish reasons of the model's API that are passed on to the client
FINISH_REASONS = frozenset({"length", "content_filter"})


@dataclass(slots=True, frozen=True)
class Known:
    """What is known about a request that its client can repeat."""

    key: str = ""  # what all its attempts have in common; "" if the request cannot be repeated
    attempt: int = 1  # a request whose turn ended without an answer is run again
    repeated: bool = False  # an earlier request has or gets the answer: no model call is made for this one
    stopped: bool = False  # the client resumed a stopped turn; a new one starts

    @property
    def is_repeatable(self) -> bool:
        return bool(self.key)

    def id_of(self, attempt: int) -> str:
        """Return the id of an attempt's message."""
        return f"{self.key}:{attempt}"


@dataclass(slots=True, frozen=True)
class StoredSession:
    """A stored session that a request continues or starts, other than through its header."""

    key: str
    is_new: bool  # the request brings the history
    facts: ResponseFacts | None  # None for a response that is not stored


@dataclass(slots=True, frozen=True)
class Asked:
    """A request that is being answered: the agent that answers it, and its message."""

    agent: AgentLoop
    message: InboundMessage
    chat: ChatRequest
    model: str
    id: str
    created: int
    known: Known
    position: Position | None = None  # where the client resumes the answer
    commands: bool = True  # text such as /stop is a command
    # It may answer a question of the agent. A sandboxed command with network access has no token, so it may not.
    may_answer: bool = False
    background: bool = False  # the turn continues after the client disconnects

    @property
    def is_model_only(self) -> bool:
        """Return whether it is answered without the agent's tools."""
        request = self.message.request
        return request is not None and bool(request.model_only or request.tools or request.answer_only)

    @property
    def is_counted(self) -> bool:
        """Return whether it counts against the rate limit. Repeated requests and session commands do not."""
        request = self.message.request
        command = (
            request is not None and request.kept and self.commands and kind_of(self.message) not in ("message", "reply")
        )
        return not command and not self.known.repeated


class Wire(Encoder, Protocol):
    """How an API writes one answer."""

    content_type: str  # for streams

    def start(self) -> bytes:
        """Return the first bytes of a stream."""

    def end(self, outcome: Outcome) -> bytes:
        """Return the last bytes of a stream: calls for the client, the finish reason, the usage."""

    def error(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream whose answer fails after it has started."""

    def whole(self, outcome: Outcome) -> bytes:
        """Return the answer as a single body."""


B = TypeVar("B")
Read = Callable[[bytes], ChatRequest]
MakeWire = Callable[["Asked"], Wire]


class RateLimit:
    """Limits the requests per minute of an owner, over all server processes of a store.

    Each accepted request costs one write; without a limit nothing is written. An owner at the limit is cached until the
    minute is over, so that a flood of requests costs the store nothing.
    """

    def __init__(self, store: Store, per_minute: int) -> None:
        self._store = store
        self._most = per_minute
        self._blocked: dict[str, float] = {}  # by owner: when the block ends

    async def check(self, owner: str) -> None:
        """Count a request, or refuse it."""
        if not self._most:
            return
        clock = asyncio.get_running_loop().time
        left = self._blocked.get(owner, 0.0) - clock()
        if left <= 0:
            self._blocked.pop(owner, None)
            left = await self._store.admit(owner, RATE, self._most, RATE_SECONDS)
        if left > 0:
            self._blocked[owner] = clock() + left
            raise too_many_requests(
                f"Rate limit reached: at most {self._most:,} requests a minute; try again in {left:.1f} s", left
            )


class Turns:
    """Answers the requests of all APIs."""

    def __init__(
        self,
        owners: Owners,
        *,
        messages_limit: int,
        ping_seconds: float,
        per_minute: int = 0,
        agent: Agent = "own",
    ) -> None:
        self._owners = owners
        self._agent: Agent = agent
        self._rate_limit = RateLimit(owners.store, per_minute)
        self._ping_seconds = ping_seconds
        self.messages_limit = messages_limit
        self.honours = honours(owners.provider)
        self._is_stopping = False

    @property
    def is_stopping(self) -> bool:
        """Return whether the server is shutting down: unfinished turns stay open on disk."""
        return self._is_stopping

    def stop(self) -> None:
        """Keep the turns of requests that end from now on, because the server is shutting down."""
        self._is_stopping = True

    async def answer(self, request: web.Request, read: Read, wire: MakeWire, prefix: str) -> web.StreamResponse:
        """Answer a request whose body `read` parses. The answer's id starts with the prefix."""
        asked = await self.ask(request, await self.read(request, read), new_id(prefix))
        return await self.respond(request, asked, wire)

    async def respond(self, request: web.Request, asked: Asked, wire: MakeWire) -> web.StreamResponse:
        """Run the turn and write its answer."""
        if asked.is_counted:
            await self._count(asked)
        writer = wire(asked)
        if asked.chat.stream:
            return await self._stream(request, [asked], [writer])
        return json_response(writer.whole(await self._run(asked)), asked.chat)

    async def run_all(self, asked: Sequence[Asked]) -> list[Outcome]:
        """Run several turns at once. The first failure cancels the others."""
        for one in asked:
            await self._count(one)
        runs = [asyncio.ensure_future(self._run(one)) for one in asked]
        try:
            return list(await asyncio.gather(*runs))
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def enqueue(self, asked: Asked) -> None:
        """Enqueue a request that runs in the background."""
        await self._count(asked)
        try:
            await asked.agent.requests.enqueue(asked.message)
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot write its log") from error

    async def read(self, request: web.Request, read: Callable[[bytes], B]) -> B:
        body = await request.read()
        return await in_thread(partial(read, body)) if len(body) > LARGE else read(body)

    async def agent(self, request: web.Request) -> AgentLoop:
        """Return the agent of the request's owner."""
        return await self._owners.agent(request[OWNER])

    async def ask(self, request: web.Request, chat: ChatRequest, id: str, stored: StoredSession | None = None) -> Asked:
        """Convert a request to a message for its owner's agent."""
        agent = await self.agent(request)
        header, position = session_of(request.headers), position_of(request.headers)
        session = stored.key if stored is not None else header
        has_history = session is not None and not (stored is not None and stored.is_new)
        said, parts, before = said_in(chat.messages, kept=has_history)
        known = await self._known(agent, request, header, text_of(said), position) if stored is None else Known()
        if position is not None and not (known.is_repeatable and chat.stream):
            raise bad_request(
                f"{LAST_EVENT_ID}: only allowed for a stream that is repeated with its {IDEMPOTENCY_KEY}", LAST_EVENT_ID
            )
        token, model = request[TOKEN], model_of(chat.model)
        chosen = agent_of(chat, request.headers, token.agent if token is not None else "", self._agent)
        message = InboundMessage(
            CHANNEL,
            token.name if token is not None else "client",
            session or id,
            text_of(said),
            untrusted=any(one["role"] == "tool" for one in chat.messages),
            id=known.id_of(known.attempt) if known.is_repeatable else id,
            owner=request[OWNER],
            session=session or f"{CHANNEL}:{id}",
            reply=False,
            attended=False,
            request=Request(
                before=tuple(before),
                system=chat.system,
                tools=tuple(chat.tools),
                options=chat.options,
                model=model,
                metadata=chat.metadata,
                kept=session is not None,
                answer_only=chat.answer_only,
                model_only=chosen == "client",
                response=stored.facts if stored is not None else None,
            ),
            parts=parts,
        )
        return Asked(
            agent,
            message,
            chat,
            agent.model_for(model),
            id,
            int(time.time()),
            known,
            position,
            commands=stored is None or header is not None,
            may_answer=token is not None,
            background=stored is not None and stored.facts is not None and stored.facts.background,
        )

    async def _count(self, asked: Asked) -> None:
        await self.count(asked.message.owner)

    async def count(self, owner: str) -> None:
        """Count a request of an owner, or refuse it."""
        try:
            await self._rate_limit.check(owner)
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot check the rate limit now; try again") from error

    async def _known(
        self, agent: AgentLoop, request: web.Request, session: str | None, said: str, position: Position | None
    ) -> Known:
        """Find the earlier request with the same key. One that ended without an answer is run again."""
        key, owner = checked_key(request.headers, IDEMPOTENCY_KEY), request[OWNER]
        if key is None or session is None:
            return Known()
        known, resumed = Known(repeatable_id(CHANNEL, session, key)), 0
        while (earlier := await agent.requests.earlier(owner, id := known.id_of(known.attempt))) is not None:
            if earlier.said != said:  # otherwise the client would get the answer to a different message
                raise bad_request(
                    f"{IDEMPOTENCY_KEY}: was used for another message in this session",
                    IDEMPOTENCY_KEY,
                    "idempotency_key_reused",
                )
            if position is not None and await agent.requests.holds(owner, id, position.seq, position.least):
                resumed = known.attempt
            if not earlier.unanswered:
                break
            known = replace(known, attempt=known.attempt + 1)
        if position is not None and not resumed:
            raise bad_request(f"{LAST_EVENT_ID}: the answer to this request has no such position", LAST_EVENT_ID)
        return replace(known, repeated=earlier is not None, stopped=0 < resumed < known.attempt)

    async def stream_all(
        self,
        request: web.Request,
        asked: Sequence[Asked],
        wires: Sequence[Wire],
        end: Callable[[Sequence[Outcome]], bytes],
    ) -> web.StreamResponse:
        """Stream the answers of several concurrent turns as they arrive. One that fails stops the others."""
        for one in asked:
            await self._count(one)
        return await self._stream(request, asked, wires, end)

    async def _stream(
        self,
        request: web.Request,
        asked: Sequence[Asked],
        wires: Sequence[Wire],
        end: Callable[[Sequence[Outcome]], bytes] = lambda outcomes: b"",
    ) -> web.StreamResponse:
        """Stream answers, and then what `end` returns for their outcomes.

        Nothing is sent until there is something to say, so that an error can still have its own status.
        """
        headers = {"Content-Type": wires[0].content_type, "X-Accel-Buffering": "no", **_warning(asked[0].chat)}
        response = web.StreamResponse(headers=headers)
        begin = _beginning(response, request)
        runs = [asyncio.ensure_future(self._write(one, wire, begin)) for one, wire in zip(asked, wires, strict=True)]
        try:
            last = end(await asyncio.gather(*runs))
        except ApiError as error:
            if not response.prepared:
                raise
            last = wires[0].error(error)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        if last:
            await response.write(last)
        await response.write_eof()
        return response

    async def _write(self, asked: Asked, wire: Wire, begin: Begin) -> Outcome:
        """Run a turn and write its answer from start to end."""
        stream = AnswerStream(wire, self._ping_seconds, asked.known.is_repeatable, asked.position)
        if asked.known.stopped:
            stream.begin_again()
        run = asyncio.ensure_future(self._run(asked, stream))
        run.add_done_callback(stream.end)
        try:
            start = await stream.write_to(begin, wire.start())
            outcome = run.result()
            await (await begin())(start + _last(wire, stream, outcome))
            return outcome
        finally:
            run.cancel()

    async def _run(self, asked: Asked, stream: AnswerStream | None = None) -> Outcome:
        """Run the turn and return its outcome; raise an ApiError if it has no answer.

        Cancellation means that the client disconnected.
        """
        own, message, show = asked.message.owner == OWN, asked.message, stream.show if stream is not None else None
        known, attempt = asked.known, asked.known.attempt
        try:
            outcome = await asked.agent.requests.run(message, show, asked.commands, asked.may_answer)
            # the earlier client was just disconnecting, while this one is connected
            while outcome.left and known.is_repeatable:
                await self._count(asked)
                attempt += 1
                message = replace(message, id=known.id_of(attempt))
                if stream is not None:
                    stream.begin_again()
                outcome = await asked.agent.requests.run(message, show)
        except asyncio.CancelledError:
            if not self._is_stopping and not asked.background:
                asked.agent.requests.withdraw(message, known=known.is_repeatable)
            raise
        except ApiError:
            raise
        except StoreError as error:
            log.error("%s", error)
            raise unavailable(f"the server cannot write its log{f': {error}' if own else ''}") from error
        except Exception as error:
            log.exception("request %s failed", asked.id)
            raise internal_error(asked.id) from error
        if (failure := failure_of(outcome, own)) is not None:
            raise failure
        return _renamed(outcome, asked.chat.names)


# ---------------------------------------------------------------------------------------------- the session


def checked_key(headers: Mapping[str, str], header: str) -> str | None:
    """Return the key in a header, if there is one."""
    key = headers.get(header)
    if key is not None and (not key.strip() or len(key) > MAX_KEY_LENGTH or not key.isprintable()):
        raise bad_request(f"{header}: must be 1 to {MAX_KEY_LENGTH} printable characters", header)
    return key


def session_of(headers: Mapping[str, str]) -> str | None:
    """Return the session that the request continues; None for a request that brings its whole history."""
    key = checked_key(headers, SESSION)
    if key is not None and is_inside(key):
        raise bad_request(f"{SESSION}: {key.partition(':')[0]}: is reserved for internal sessions", SESSION)
    return key


def said_in(messages: Sequence[Message], kept: bool) -> tuple[Content, list[dict[str, Any]] | None, list[Message]]:
    """Return (the user's message, its parts if it is more than text, the messages before it) of a request.

    A stored session has the history: only the last message of the request counts, and results of the client's tools.
    """
    without_reminders = [message for message in messages if message["role"] != "system"]
    conversation = without_reminders if kept else messages
    last = conversation[-1]
    said: Content = last["content"] if last["role"] == "user" else ""
    before = list(conversation[:-1] if last["role"] == "user" else conversation)
    if kept:
        before = _results(before)
    return said, said if isinstance(said, list) else None, before


def _results(messages: Sequence[Message]) -> list[Message]:
    """Return the trailing tool results as one user message, because in the log their calls have ended.

    It is marked as untrusted, because nothing in it was said by the user.
    """
    start = len(messages)
    while start and messages[start - 1]["role"] == "tool":
        start -= 1
    if start == len(messages):
        return []
    called = messages[start - 1].get("tool_calls") or () if start else ()
    names = {call["id"]: call["function"]["name"] for call in called}
    texts = [
        f"[Result of {names.get(one['tool_call_id']) or one.get('name') or 'a tool'}]\n{text_of(one['content'])}"
        for one in messages[start:]
    ]
    return [{"role": "user", "content": marked("\n\n".join(texts), "the client's tools")}]


# ---------------------------------------------------------------------------------------------- the answer


def finish_of(outcome: Outcome) -> str:
    """Return why an answer ended, in OpenAI's terms.

    A turn that reached a limit says so in its text, and returns "stop".
    """
    if outcome.reason == "handed":
        return "tool_calls"
    return outcome.finish_reason if outcome.reason == "answer" and outcome.finish_reason in FINISH_REASONS else "stop"


def _renamed(outcome: Outcome, names: Mapping[str, str]) -> Outcome:
    """Return the outcome with the client's own names for its tools."""
    if not names or not outcome.calls:
        return outcome
    entries = [
        structs.replace(
            one, calls=tuple(structs.replace(call, name=names.get(call.name, call.name)) for call in one.calls)
        )
        if isinstance(one, ModelAnswered)
        else one
        for one in outcome.entries
    ]
    return Outcome(outcome.text, entries)


def _last(wire: Wire, stream: AnswerStream, outcome: Outcome) -> bytes:
    """Return the end of a stream: text that was not streamed, then the API's last bytes."""
    said = b"" if stream.said and outcome.reason in ("answer", "handed") else stream.unsaid(outcome.text)
    return said + wire.end(outcome)


def _beginning(response: web.StreamResponse, request: web.Request) -> Begin:
    """Return a function that starts the response once, even if several answers are written concurrently."""
    starting = asyncio.Lock()

    async def begin() -> Write:
        async with starting:
            await response.prepare(request)
        return response.write

    return begin


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def json_response(body: bytes, chat: ChatRequest | None = None) -> web.Response:
    headers = _warning(chat) if chat is not None else {}
    return web.Response(body=body, content_type="application/json", headers=headers)


def _warning(chat: ChatRequest) -> dict[str, str]:
    """Return the header that names the parameters without effect."""
    return {"Warning": f'299 everloop "no effect: {", ".join(chat.ignored)}"'} if chat.ignored else {}
