"""A real HTTP server that speaks OpenAI's API and says what it is told: by queued replies, or by the model's name.

The model's name can be the script: `tools-RxP` makes R rounds of P calls at once and then answers `done:<marker>`,
the marker being the one of the last user message that has a `mark:<id>`. Options follow, each after a dash:
`d<ms>` before the first byte, `t<ms>` between two tokens, `n<count>` tokens in the answer, `f<name>` the tool
(default echo). A call's arguments are {"text": "<marker>/<round>/<index>"}, counted from 0. Where a turn stands is
read from its messages alone, so the server may be asked by many at once, and killed and started again.

    python -m everloop.testing.openai_server --port 0
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ..messages import encode_json
from ..providers.base import ToolCallRequest
from .conversation import check_conversation
from .scripted import words

MARK = re.compile(r"mark:([A-Za-z0-9_.-]+)")
SCRIPT = re.compile(r"(?:.*/)?tools-(\d+)x(\d+)((?:-[dtnf]\w+)*)")
MAX_REQUEST = 1 << 28


@dataclass(slots=True)
class Reply:
    """One answer of the server. The fields from `status` on break the contract on purpose."""

    text: str | None = None
    calls: list[ToolCallRequest] = field(default_factory=list)
    reasoning: str | None = None
    finish_reason: str | None = None
    tokens: list[str] | None = None  # the text's pieces when streamed; words if not given
    delay: float = 0.0  # seconds before the first byte
    token_delay: float = 0.0
    status: int = 200
    body: Any = None  # sent as it is (bytes) or as JSON
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None  # a streamed body, byte by byte as given
    piece: int = 0  # bytes of `raw` in one write; all at once if 0
    cut_after: int | None = None  # chunks after which the connection is cut
    hang_after: int | None = None  # chunks after which nothing comes for `hang` seconds
    hang: float = 0.0


@dataclass(slots=True)
class Seen:
    """One request as the server saw it."""

    time: float
    model: str
    stream: bool
    messages: int
    marker: str
    round: int
    problems: list[str]
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    gone: bool = False  # the client closed the connection before the answer's end


class FakeOpenAI:
    """The server, as an async context manager; `base_url` is set while it runs.

    Queued replies go first, one each request; then the model's name decides. `requests` is every request of
    `/chat/completions`; one whose conversation is not valid gets a 400 that names the problem.
    """

    def __init__(self, *, port: int = 0, keep_bodies: bool = True) -> None:
        self.requests: list[Seen] = []
        self.replies: deque[Reply] = deque()
        self.base_url = ""
        self._port = port
        self._keep_bodies = keep_bodies
        self._runner: web.AppRunner | None = None
        self._clients: set[Any] = set()

    async def __aenter__(self) -> FakeOpenAI:
        app = web.Application(client_max_size=MAX_REQUEST)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/_log", self._log)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def connections(self) -> int:
        """How many connections requests have come over."""
        return len(self._clients)

    @property
    def invalid(self) -> int:
        """How many requests had a conversation that breaks the contract."""
        return sum(1 for request in self.requests if request.problems)

    def reply(self, text: str, **options: Any) -> None:
        """Answer the next request with a text; `options` are further fields of `Reply`."""
        self.replies.append(Reply(text, **options))

    def calls(self, *calls: ToolCallRequest, **options: Any) -> None:
        self.replies.append(Reply(calls=list(calls), **options))

    def fail(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Refuse the next request; `body` is a text for OpenAI's error shape, bytes or JSON to send as it is."""
        if body is None or isinstance(body, str):
            body = error_body(body or "the server was told to fail")
        self.replies.append(Reply(status=status, body=body, headers=headers or {}))

    def cut(self, after_chunks: int, text: str = "cut in the middle of it", **options: Any) -> None:
        """Break the connection after so many chunks of the answer (the role's chunk is not counted)."""
        self.replies.append(Reply(text, cut_after=after_chunks, **options))

    def hang(self, seconds: float, after_chunks: int = 0, text: str = "late", **options: Any) -> None:
        """Say nothing for so long, before the answer or after so many chunks of it."""
        if not after_chunks:
            self.replies.append(Reply(text, delay=seconds, **options))
        else:
            self.replies.append(Reply(text, hang_after=after_chunks, hang=seconds, **options))

    def raw(self, data: bytes, *, content_type: str = "text/event-stream", piece: int = 0, **options: Any) -> None:
        """Answer the next request with these bytes."""
        self.replies.append(Reply(raw=data, headers={"Content-Type": content_type}, piece=piece, **options))

    def load(self, lines: str) -> None:
        """Queue replies from JSON lines, each an object with the fields of `Reply`."""
        for line in lines.splitlines():
            if line.strip():
                self.replies.append(msgspec.json.decode(line, type=Reply))

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": "tools-1x1", "object": "model", "owned_by": "everloop"}]})

    async def _log(self, request: web.Request) -> web.Response:
        return _json([asdict(replace(seen, body=None, headers={})) for seen in self.requests])

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self._clients.add(request.transport.get_extra_info("peername") if request.transport else None)
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.DecodeError as error:
            return _json(error_body(f"the body is not JSON: {error}"), 400)
        messages = body.get("messages") or []
        marker, round = read_state(messages)
        seen = Seen(
            time.time(), str(body.get("model")), bool(body.get("stream")), len(messages), marker, round,
            check_conversation(messages), body if self._keep_bodies else None, dict(request.headers),
        )  # fmt: skip
        self.requests.append(seen)
        if seen.problems:
            return _json(error_body("invalid conversation: " + "; ".join(seen.problems)), 400)
        try:
            reply = self.replies.popleft() if self.replies else follow_script(body, marker, round)
        except LookupError as error:
            return _json(error_body(str(error), "model_not_found"), 404)
        except ValueError as error:
            return _json(error_body(str(error)), 400)
        try:
            return await _answer(request, reply, body, len(raw))
        except (asyncio.CancelledError, ConnectionError):
            seen.gone = True
            raise


def read_state(messages: Sequence[Any]) -> tuple[str, int]:
    """The marker of the turn that is open, and how many rounds of it are done."""
    rounds, since_user = 0, -1
    for message in reversed(messages):
        if not isinstance(message, dict):
            continue
        if message.get("role") == "assistant" and message.get("tool_calls"):
            rounds += 1
        elif message.get("role") == "user":
            if since_user < 0:
                since_user = rounds
            if marks := MARK.findall(_text(message.get("content"))):
                return marks[-1], rounds
    return "?", max(since_user, 0)


def follow_script(body: dict[str, Any], marker: str, round: int) -> Reply:
    """What a model whose name is a script says at this point of the turn."""
    name = str(body.get("model"))
    script = SCRIPT.fullmatch(name)
    if script is None:
        raise LookupError(f"the model {name!r} does not exist: queue a reply, or name a script like tools-2x1")
    rounds, width = int(script[1]), int(script[2])
    options = {option[0]: option[1:] for option in script[3].split("-")[1:]}
    reply = Reply(delay=int(options.get("d", 0)) / 1000, token_delay=int(options.get("t", 0)) / 1000)
    offered = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    if round >= rounds or not offered:
        reply.tokens = [f"done:{marker}", *[" token"] * (int(options.get("n", 1)) - 1)]
        reply.text = "".join(reply.tokens)
        return reply
    tool = options.get("f", "echo")
    if tool not in offered:
        raise ValueError(f"the model wants to call {tool}, and is offered only {', '.join(offered)}")
    place = len(body["messages"])
    reply.calls = [
        ToolCallRequest(f"call_{marker}_{place}_{i}", tool, _arguments(offered[tool], f"{marker}/{round}/{i}"))
        for i in range(width)
    ]
    return reply


def error_body(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


async def _answer(request: web.Request, reply: Reply, body: dict[str, Any], size: int) -> web.StreamResponse:
    if reply.delay:
        await asyncio.sleep(reply.delay)
    if reply.status != 200 or reply.body is not None:
        if isinstance(reply.body, bytes):
            return web.Response(body=reply.body, status=reply.status, headers=reply.headers)
        return _json(reply.body, reply.status, reply.headers)
    if reply.raw is not None:
        return await _send(request, reply, _cut_up(reply.raw, reply.piece), framed=False)
    tokens = reply.tokens if reply.tokens is not None else words(reply.text)
    written = len(tokens) + 8 * len(reply.calls)
    usage = {"prompt_tokens": size // 4, "completion_tokens": written, "total_tokens": size // 4 + written}
    head = {"id": "chatcmpl-fake", "created": int(time.time()), "model": body.get("model")}
    if not body.get("stream"):
        await asyncio.sleep(reply.token_delay * written)
        return await _send_whole(request, reply, head, usage)
    head["object"] = "chat.completion.chunk"
    asked = (body.get("stream_options") or {}).get("include_usage")
    return await _send(request, reply, _chunks(head, reply, tokens, usage if asked else None), framed=True)


def _chunks(head: dict[str, Any], reply: Reply, tokens: list[str], usage: dict[str, int] | None) -> list[bytes]:
    """The answer as a stream's events, in the shape that every client takes; the first is the role's."""

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return encode_json({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    events = [event({"role": "assistant", "content": ""})]
    events += [event({"reasoning_content": word}) for word in words(reply.reasoning)]
    events += [event({"content": token}) for token in tokens]
    for index, call in enumerate(reply.calls):
        function = {"name": call.name, "arguments": ""}
        events.append(
            event({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
        )
        text = encode_json(call.arguments).decode()
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            events.append(event({"tool_calls": [{"index": index, "function": {"arguments": part}}]}))
    events.append(event({}, _finish(reply)))
    if usage is not None:
        events.append(encode_json({**head, "choices": [], "usage": usage}))
    events.append(b"[DONE]")
    return events


async def _send(request: web.Request, reply: Reply, parts: list[bytes], *, framed: bool) -> web.StreamResponse:
    """Write a stream, with whatever breaks it on the way."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reply.headers})
    await response.prepare(request)
    for count, part in enumerate(parts, start=0 if framed else 1):
        await response.write(b"data: %b\n\n" % part if framed else part)
        if count == reply.cut_after:
            await asyncio.sleep(0.01)  # lets the client see what was written before the end
            assert request.transport is not None
            request.transport.abort()
            return response
        if count == reply.hang_after:
            await asyncio.sleep(reply.hang)
        if reply.token_delay and count:
            await asyncio.sleep(reply.token_delay)
        elif reply.piece:
            await asyncio.sleep(0)
    await response.write_eof()
    return response


async def _send_whole(
    request: web.Request, reply: Reply, head: dict[str, Any], usage: dict[str, int]
) -> web.StreamResponse:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": encode_json(call.arguments).decode()},
            }
            for call in reply.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply)}
    completion = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    if reply.cut_after is None and reply.hang_after is None:
        return _json(completion, headers=reply.headers)
    data = encode_json(completion)
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(reply.hang)
    assert request.transport is not None
    request.transport.abort()
    return response


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(value), status=status, headers=headers, content_type="application/json")


def _finish(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.calls else "stop")


def _cut_up(data: bytes, piece: int) -> list[bytes]:
    return [data[at : at + piece] for at in range(0, len(data), piece)] if piece else [data]


def _arguments(function: dict[str, Any], tag: str) -> dict[str, str]:
    """The tag under `text`, or under every required name of a tool that has no `text`."""
    schema = function.get("parameters") or {}
    known, required = schema.get("properties") or {}, schema.get("required") or ()
    if "text" in known or not (known or required):
        return {"text": tag}
    return dict.fromkeys(required, tag)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


async def serve(port: int, script: str = "") -> None:
    """Run until the process is told to end; the first line printed is the base URL."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with FakeOpenAI(port=port, keep_bodies=False) as server:
        server.load(script)
        print(server.base_url, flush=True)
        await stop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m everloop.testing.openai_server", description="A fake OpenAI API.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--script", type=Path, help="a file of replies to give first, one JSON object a line")
    options = parser.parse_args(arguments)
    asyncio.run(serve(options.port, options.script.read_text() if options.script else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
