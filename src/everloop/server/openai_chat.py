"""A chat completion: from a client's request to an agent's turn, and back as one body or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from aiohttp import web

from ..bus import InboundMessage
from ..commands import kind_of
from ..errors import StoreError
from ..log import Request, text_of
from ..providers.base import honours
from ..runtime.agent import AgentLoop
from ..runtime.api_requests import Outcome
from ..runtime.owners import OWN, Owners
from ..threads import in_thread
from .answers import Chunks, completion
from .errors import ApiError, bad_request, internal_error, unavailable
from .guard import OWNER, TOKEN
from .outcomes import failure_of, finish_of
from .rates import Rates
from .requests import ChatRequest, read_chat
from .resume import HEADER as LAST_ID
from .resume import Position, position_of
from .sessions import checked_key, said_in, session_of
from .sse import AnswerStream

log = logging.getLogger(__name__)
CHANNEL = "api"
KEY = "Idempotency-Key"
LARGE = 100_000  # bytes of a body that is read in a thread


class Known(NamedTuple):
    """Under which id a request is known when it is repeated, if it can be."""

    id: str | None = None
    repeated: bool = False  # it came before: nothing is asked of a model for it
    stopped: bool = False  # what the client has of the answer is of a turn that was stopped: this is another one


@dataclass(slots=True, frozen=True)
class Asked:
    """A request on its way: the agent that answers it, and the message that it is."""

    agent: AgentLoop
    message: InboundMessage
    chat: ChatRequest
    model: str
    id: str
    created: int
    known: Known
    position: Position | None = None  # up to which the client has the answer

    @property
    def asks_model(self) -> bool:
        """Whether it counts as a request: what a client says again, and a command of its session, does not."""
        request = self.message.request
        command = request is not None and request.kept and kind_of(self.message) not in ("message", "reply")
        return not command and not self.known.repeated


class ChatHandler:
    """`POST /v1/chat/completions`."""

    def __init__(self, owners: Owners, *, messages_limit: int, ping_seconds: float, per_minute: int = 0) -> None:
        self._owners = owners
        self._rates = Rates(owners.store, per_minute)
        self._messages_limit = messages_limit
        self._ping_seconds = ping_seconds
        self._honours = honours(owners.provider)
        self.stopping = False  # the server is: turns that are not over are left open on disk

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request)
        if asked.asks_model:
            await self._count(asked)
        if asked.chat.stream:
            return await self._stream(request, asked)
        outcome = await self._run(asked)
        return web.Response(body=_whole(asked, outcome), content_type="application/json")

    async def _read(self, request: web.Request) -> Asked:
        body = await request.read()
        read = partial(read_chat, body, honours=self._honours, messages_limit=self._messages_limit)
        chat = await in_thread(read) if len(body) > LARGE else read()
        agent = await self._owners.agent(request[OWNER])
        id = f"chatcmpl-{secrets.token_hex(12)}"
        session, position = session_of(request.headers), position_of(request.headers)
        said, parts, before = said_in(chat.messages, kept=session is not None)
        known = await self._known(agent, request, session, text_of(said), position)
        if position is not None and not (known.id and chat.stream):
            raise bad_request(f"{LAST_ID}: is only for a stream that is asked for again by its {KEY}", LAST_ID)
        message = InboundMessage(
            CHANNEL,
            token.name if (token := request[TOKEN]) is not None else "client",
            session or id,
            text_of(said),
            untrusted=any(one["role"] == "tool" for one in chat.messages),
            id=known.id or id,
            owner=request[OWNER],
            session=session or f"{CHANNEL}:{id}",
            reply=False,
            attended=False,
            request=Request(
                before=tuple(before),
                system=chat.system,
                tools=tuple(chat.tools),
                options=chat.options,
                model=chat.model or "",
                metadata=chat.metadata,
                kept=session is not None,
                answer_only=chat.answer_only,
            ),
            parts=parts,
        )
        return Asked(agent, message, chat, agent.model_for(chat.model or ""), id, int(time.time()), known, position)

    async def _count(self, asked: Asked) -> None:
        try:
            await self._rates.check(asked.message.owner)
        except StoreError as error:
            log.error("%s", error)
            raise unavailable("the server cannot count requests just now; try again") from error

    async def _known(
        self, agent: AgentLoop, request: web.Request, session: str | None, said: str, position: Position | None
    ) -> Known:
        """What is known of a request that can be repeated: one whose answer never came is run again."""
        key, owner = checked_key(request.headers, KEY), request[OWNER]
        if key is None or session is None:
            return Known()
        about = f"{CHANNEL}:{len(session)}:{session}:{key}"  # with the length, or a colon in one could be the other's
        number, place = 1, ""
        while (earlier := await agent.requests.earlier(owner, id := f"{about}:{number}")) is not None:
            if earlier.said != said:  # its answer would be taken for the answer to this
                raise bad_request(f"{KEY}: was used for another message of this session", KEY, "idempotency_key_reused")
            if position is not None and await agent.requests.holds(owner, id, position.seq, position.least):
                place = id
            if not earlier.unanswered:
                break
            number += 1
        if position is not None and not place:
            raise bad_request(f"{LAST_ID}: there is no such place in the answer to this request", LAST_ID)
        return Known(id, earlier is not None, bool(place) and place != id)

    async def _stream(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Nothing is sent before there is something to say: until then an error still has its own status."""
        chunks = Chunks(asked.id, asked.created, asked.model, asked.chat.include_usage)
        stream = AnswerStream(chunks, self._ping_seconds, asked.known.id is not None, asked.position)
        if asked.known.stopped:
            stream.begin_again()
        run = asyncio.ensure_future(self._run(asked, stream))
        run.add_done_callback(stream.end)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        try:
            async for data in stream.chunks():
                if not response.prepared:
                    await response.prepare(request)
                    data = chunks.role() + data
                await response.write(data)
            last = _last(chunks, stream, run.result())
        except ApiError as error:
            if not response.prepared:
                raise
            last = chunks.error(error)
        finally:
            run.cancel()
        if not response.prepared:
            await response.prepare(request)
            last = chunks.role() + last
        await response.write(last)
        await response.write_eof()
        return response

    async def _run(self, asked: Asked, stream: AnswerStream | None = None) -> Outcome:
        """What came of the turn; an ApiError if it has no answer. Cancelled, the client is gone."""
        own, message, show = asked.message.owner == OWN, asked.message, stream.show if stream is not None else None
        try:
            outcome = await asked.agent.requests.run(message, show)
            while outcome.left and asked.known.id:  # who asked before was just leaving, and this one is there
                await self._count(asked)
                message = replace(message, id=_next(message.id or ""))
                if stream is not None:
                    stream.begin_again()
                outcome = await asked.agent.requests.run(message, show)
        except asyncio.CancelledError:
            if not self.stopping:
                asked.agent.requests.withdraw(message, known=asked.known.id is not None)
            raise
        except ApiError:
            raise
        except StoreError as error:
            log.error("%s", error)
            raise unavailable(f"the server cannot keep its log{f': {error}' if own else ''}") from error
        except Exception as error:
            log.exception("request %s failed", asked.id)
            raise internal_error(asked.id) from error
        if (failure := failure_of(outcome, own)) is not None:
            raise failure
        return outcome


def _next(id: str) -> str:
    about, _, number = id.rpartition(":")
    return f"{about}:{int(number) + 1}"


def _last(chunks: Chunks, stream: AnswerStream, outcome: Outcome) -> bytes:
    """What ends a stream: words that were not streamed, calls for the client, the reason, the tokens."""
    said = b"" if stream.said and outcome.reason in ("answer", "handed") else stream.unsaid(outcome.text)
    finish = chunks.finish(finish_of(outcome))
    usage = chunks.usage(outcome.usage) if chunks.include_usage else b""
    return b"".join((said, chunks.calls(outcome.calls), finish, usage, chunks.done()))


def _whole(asked: Asked, outcome: Outcome) -> bytes:
    return completion(
        asked.id,
        asked.created,
        outcome.model or asked.model,
        content=None if outcome.calls and not outcome.text else outcome.text,
        finish_reason=finish_of(outcome),
        calls=outcome.calls,
        reasoning=outcome.reasoning,
        usage=outcome.usage,
    )
