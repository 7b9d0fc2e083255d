"""Tests LiteLLMProvider with the real package, as one program: it needs an environment that has litellm.

python litellm_scenes.py RESULTS writes what each scene observed, as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONTACTED: list[str] = []


def watch_network(event: str, arguments: Any) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        CONTACTED.append(f"{event} {arguments[1:] if event == 'socket.connect' else arguments[:2]}")


sys.addaudithook(watch_network)

from everloop import AgentLoop, MessageBus  # noqa: E402 - the network is watched from the first import on
from everloop.errors import EverloopError  # noqa: E402
from everloop.providers.base import LLMResponse, ProviderError  # noqa: E402
from everloop.providers.factory import make_provider  # noqa: E402
from everloop.providers.http import Timeouts  # noqa: E402
from everloop.providers.litellm import LiteLLMProvider  # noqa: E402
from everloop.testing import FakeOpenAI, call  # noqa: E402

ASK = [{"role": "user", "content": "hello"}]
ECHO = [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}]
PICTURE = "data:image/png;base64,iVBORw0KGgo="
Scene = Callable[[FakeOpenAI, Callable[..., LiteLLMProvider]], Awaitable[Any]]


def told(answer: LLMResponse) -> dict[str, Any]:
    return {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "finish": answer.finish_reason,
        "usage": answer.usage,
        "calls": [[made.name, made.arguments, made.error, bool(made.id)] for made in answer.tool_calls],
    }


async def watched(provider: Any, *asked: Any, **more: Any) -> dict[str, Any]:
    shown, answer = [], None
    async for item in provider.stream(*asked, **more):
        if isinstance(item, LLMResponse):
            answer = item
        else:
            shown.append([item.text, item.reasoning])
    assert answer is not None
    return {**told(answer), "shown": shown}


async def failure(asking: Awaitable[Any]) -> dict[str, Any]:
    try:
        return {"answer": str(await asking)}
    except ProviderError as error:
        keys = ("retryable", "retry_after", "status")
        return {"error": str(error), **{key: getattr(error, key) for key in keys}}


async def first_use(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    """The first request imports the package; the event loop keeps running."""
    gaps, running = [0.0], True

    async def tick() -> None:
        last = time.monotonic()
        while running:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    server.reply("good day", reasoning="be polite")
    started = time.monotonic()
    answer = await make().chat(ASK)
    running = False
    await ticking
    took = time.monotonic() - started
    return {**told(answer), "took": took, "gap": max(gaps), "headers": dict(server.requests[0].headers)}


async def streamed(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.reply("one two three", reasoning="think first")
    return await watched(make(), ASK)


async def tools(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    for _ in range(2):
        server.calls(call("echo", text="a"), call("echo", text="é\n"))
    whole, pieces = told(await make().chat(ASK, ECHO)), await watched(make(), ASK, ECHO, "openai/other")
    bodies = [request.body or {} for request in server.requests]
    return {"whole": whole, "pieces": pieces, "tools": [body["tools"] for body in bodies], "model": bodies[1]["model"]}


async def picture(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.reply("a dot")
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    asked = [{"role": "user", "content": content}]
    before = json.dumps(asked)
    await make().chat(asked)
    return {"sent": (server.requests[0].body or {})["messages"], "untouched": json.dumps(asked) == before}


async def options(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    chosen = {
        "temperature": 0.1, "top_p": 0.5, "max_tokens": 5, "stop": ["x"], "seed": 3, "tool_choice": "required",
        "parallel_tool_calls": False, "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"1": 2},
        "response_format": {"type": "json_object"}, "service_tier": "flex", "safety_identifier": "s",
        "reasoning_effort": "low",
    }  # fmt: skip
    server.reply("ok")
    await make(temperature=0.9, max_tokens=99).chat(ASK, ECHO, options=chosen)
    return {"chosen": chosen, "sent": server.requests[0].body}


async def settings(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.reply("ok")
    config = SimpleNamespace(provider="litellm", model="openai/m", base_url=server.base_url, api_key="k")
    config.temperature, config.answer_tokens = 0.25, 77
    provider = make_provider(config)
    answer = await provider.chat(ASK)
    await provider.close()
    return {**told(answer), "sent": server.requests[0].body}


async def refused(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    names = ("user", "metadata", "verbosity")
    seen = {name: await failure(make().chat(ASK, options={name: "x"})) for name in names}
    return {**seen, "requests": len(server.requests)}


async def errors(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    seen = {}
    for status in (400, 401, 404, 429, 500, 503):
        for how in ("chat", "stream"):
            server.fail(status, headers={"Retry-After": "3"})
            provider = make()
            seen[f"{how} {status}"] = await failure(provider.chat(ASK) if how == "chat" else watched(provider, ASK))
    return {"seen": seen, "requests": len(server.requests)}


async def broken(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.reply("one two three", cut_after=2)
    cut = await failure(watched(make(), ASK))
    nobody = await failure(make(base_url="http://127.0.0.1:1/v1").chat(ASK))
    nonsense = await failure(make(model="no-such-api/model", base_url=None).chat(ASK))
    return {"cut": cut, "nobody": nobody, "nonsense": nonsense}


async def late(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.hang(30)
    server.hang(30, after_chunks=2, text="one two three")
    server.hang(30)
    started = time.monotonic()
    first = await failure(watched(make(timeouts=Timeouts(first_token=0.3)), ASK))
    between = await failure(watched(make(timeouts=Timeouts(first_token=30, token=0.3)), ASK))
    whole = await failure(make(timeouts=Timeouts(total=0.3)).chat(ASK))
    return {"first": first, "between": between, "whole": whole, "took": time.monotonic() - started}


async def left(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    """A subscriber leaves, and a caller cancels: the server notices both at once."""
    server.reply("a b c", token_delay=30)
    stream = make().stream(ASK)
    await anext(stream)
    await stream.aclose()
    server.reply("a b c", delay=30)
    task = asyncio.create_task(make().chat(ASK))
    while len(server.requests) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(20):
        while not all(request.gone for request in server.requests):
            await asyncio.sleep(0.01)
    return {"cancelled": task.cancelled()}


async def no_key(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.reply("ok")
    await make(api_key=None).chat(ASK)
    return {"headers": dict(server.requests[0].headers)}


async def agent(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    server.calls(call("list_dir", path="."))
    server.reply("It is there.")
    folder = Path("agent")
    folder.mkdir()
    (folder / "note.txt").write_text("hello")
    async with AgentLoop(MessageBus(), make(), workspace=folder) as loop:
        said = await loop.process_direct("What is here?")
    return {"said": said, "result": (server.requests[1].body or {})["messages"][-1], "invalid": server.invalid}


async def half_installed(server: FakeOpenAI, make: Callable[..., LiteLLMProvider]) -> Any:
    """litellm is installed, but not what it needs for tools."""
    for name in [name for name in sys.modules if name == "mcp" or name.startswith("mcp.")]:
        del sys.modules[name]
    gone = [name for name in sys.modules if name.startswith("litellm.responses.mcp") or "mcp_server" in name]
    for name in gone:
        del sys.modules[name]
    sys.modules["mcp"] = None  # type: ignore[assignment]
    try:
        return await failure(make().chat(ASK, ECHO))
    finally:
        del sys.modules["mcp"]


async def play(scene: Scene) -> Any:
    made = []

    async with FakeOpenAI() as server:

        def make(model: str = "openai/m", **more: Any) -> LiteLLMProvider:
            provider = LiteLLMProvider(model, **{"api_key": "my-key", "base_url": server.base_url, **more})
            made.append(provider)
            return provider

        try:
            return await scene(server, make)
        finally:
            for provider in made:
                await provider.close()


SCENES: list[Scene] = [
    first_use, streamed, tools, picture, options, settings, refused, errors, broken, late, left, no_key, agent,
    half_installed,
]  # fmt: skip


def main(results: str) -> None:
    seen: dict[str, Any] = {}
    for scene in SCENES:
        try:
            seen[scene.__name__] = asyncio.run(asyncio.wait_for(play(scene), 90))
        except (Exception, EverloopError) as error:
            seen[scene.__name__] = {"failed": f"{type(error).__name__}: {error}"}
    seen["contacted"] = sorted(set(CONTACTED))
    seen["dotenv"] = os.environ.get("FROM_DOTENV")
    seen["threads"] = sum("litellm" in thread.name for thread in threading.enumerate())
    Path(results).write_text(json.dumps(seen, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
