"""A real HTTP server that speaks OpenAI's API and returns queued replies, or follows a script in the model's name.

The model's name can be the script: `tools-RxP` makes R rounds of P concurrent calls and then answers `done:<marker>`,
where the marker comes from the last user message that contains `mark:<id>`. Options follow, each after a dash: `d<ms>`
before the first byte, `t<ms>` between two tokens, `n<count>` tokens in the answer, `f<name>` the tool (default echo). A
call's arguments are {"text": "<marker>/<round>/<index>"}, counted from 0. The state of a turn is read from its messages
alone, so the server can handle concurrent requests, and be killed and restarted.

    python -m everloop.testing.openai_server --port 0
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from ..messages import encode_json
from .conversation import check_conversation
from .replies import Reply, written
from .scripted import words
from .server import FakeServer, Seen, as_json, run

__all__ = ["FakeOpenAI", "Reply", "Seen"]


class FakeOpenAI(FakeServer):
    """The server: a request takes the next queued reply; without one, the model's name decides."""

    root = "/v1"
    path = "/v1/chat/completions"

    endpoints = frozenset({"embeddings", "completions"})  # endpoints that are served; others are not found
    forwarded: list[tuple[str, Any]]  # requests to them

    def add_routes(self, router: web.UrlDispatcher) -> None:
        self.forwarded = []
        router.add_post("/v1/embeddings", self._embeddings)
        router.add_post("/v1/completions", self._completions)

    async def _embeddings(self, request: web.Request) -> web.Response:
        """Return a vector for each text: its length, and its index."""
        body = await self._taken(request, "embeddings")
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [{"index": at, "embedding": [float(len(str(text))), float(at)]} for at, text in enumerate(texts)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return as_json({"object": "list", "data": data[::-1], "model": body.get("model"), "usage": usage})

    async def _completions(self, request: web.Request) -> web.Response:
        """Return each prompt followed by three dots."""
        body = await self._taken(request, "completions")
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        choices = [{"index": at, "text": f"{text}...", "finish_reason": "stop"} for at, text in enumerate(prompts)]
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        return as_json({**_head(body), "object": "text_completion", "choices": choices, "usage": usage})

    async def _taken(self, request: web.Request, name: str) -> Any:
        if name not in self.endpoints:
            raise web.HTTPNotFound
        body = await request.json()
        self.forwarded.append((name, body))
        return body

    def check(self, body: dict[str, Any]) -> list[str]:
        return check_conversation(body.get("messages") or [])

    def plain(self, body: dict[str, Any]) -> list[Any]:
        return body.get("messages") or []

    def offered(self, body: dict[str, Any]) -> dict[str, Any]:
        functions = [tool["function"] for tool in body.get("tools") or ()]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    def error(self, message: str, status: int = 400, code: str | None = None) -> Any:
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}

    def models(self) -> Any:
        return {"object": "list", "data": [{"id": "tools-1x1", "object": "model", "owned_by": "everloop"}]}

    def events(self, reply: Reply, tokens: list[str], body: dict[str, Any], size: int) -> list[bytes]:
        """Yield chunks in the format that every client accepts; the first one carries the role."""
        head = {**_head(body), "object": "chat.completion.chunk"}

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
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(encode_json({**head, "choices": [], "usage": _usage(reply, tokens, size)}))
        return [b"data: %b\n\n" % data for data in (*events, b"[DONE]")]

    def whole(self, reply: Reply, tokens: list[str], body: dict[str, Any], size: int) -> Any:
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
        usage = _usage(reply, tokens, size)
        return {**_head(body), "object": "chat.completion", "choices": [choice], "usage": usage}


def _head(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-fake", "created": int(time.time()), "model": body.get("model")}


def _usage(reply: Reply, tokens: list[str], size: int) -> dict[str, int]:
    said = written(reply, tokens)
    return {"prompt_tokens": size // 4, "completion_tokens": said, "total_tokens": size // 4 + said}


def _finish(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.calls else "stop")


def main(arguments: Sequence[str] | None = None) -> int:
    return run(FakeOpenAI, "openai_server", "A fake OpenAI API.", arguments)


if __name__ == "__main__":
    sys.exit(main())
