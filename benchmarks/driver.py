"""One side of one measurement, in a process of its own: `driver.py raw|everloop SCENARIO BASE_URL [N] [SIZE]`.

`raw` is the lower bound: a hand-written loop on aiohttp with no framework, no validation and no disk. `everloop` is a
durable turn. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL = {"type": "function", "function": {"name": "echo", "description": "Echo the text.", "parameters": SCHEMA}}
SYSTEM = {"role": "system", "content": "You are a benchmark agent. Use the tools, then answer."}
JSON = {"Content-Type": "application/json"}
WORK = [{"role": "user", "content": "some words of a message " * 5, "number": n, "part": n / 3} for n in range(40)]
FILLER = "the quick brown fox jumps over the lazy dog and looks at the harbour while the tide is out " * 2


async def echo(text: str) -> str:
    """Echo the text."""
    return "echo:" + text


def prompt(mark: str) -> str:
    return f"Please run the tools and answer. mark:{mark} bench:{mark}"


def pair(number: int) -> tuple[str, str]:
    return f"question {number}: {FILLER}?", f"answer {number}: {FILLER}."


class Raw:
    """The hand-written loop."""

    def __init__(self, base_url: str, model: str) -> None:
        import aiohttp

        self.url, self.model = base_url + "/chat/completions", model
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.stored: dict[str, list[dict[str, Any]]] = {}

    async def turn(self, session: str, text: str) -> str:
        messages = self.stored.setdefault(session, [SYSTEM])
        messages.append({"role": "user", "content": text})
        while True:
            body = {"model": self.model, "messages": messages, "tools": [TOOL]}
            async with self.http.post(self.url, json=body) as response:
                message = (await response.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for call in message["tool_calls"]:
                result = await echo(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def stream(self, session: str, text: str, on_text: Callable[[], None]) -> str:
        body = {"model": self.model, "messages": [SYSTEM, {"role": "user", "content": text}], "stream": True}
        parts = []
        async with self.http.post(self.url, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if piece := choice["delta"].get("content"):
                            on_text()
                            parts.append(piece)
        return "".join(parts)

    async def seed(self, session: str, messages: int) -> None:
        history = self.stored.setdefault(session, [SYSTEM])
        for number in range(messages // 2):
            user, assistant = pair(number)
            history += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    async def close(self) -> None:
        await self.http.close()


class Everloop:
    """The same turn, durable."""

    read_only = True  # what the calls are: they change nothing

    def __init__(self, base_url: str, model: str) -> None:
        from everloop import AgentLoop, Config, MessageBus, tool
        from everloop.providers.openai import OpenAIProvider

        self.folder = tempfile.TemporaryDirectory()
        provider = OpenAIProvider(base_url, None, model)
        config = Config(window=100_000_000)  # what is measured is a history that is sent whole
        store = f"{self.folder.name}/bench.db"
        self.agent = AgentLoop(MessageBus(), provider, self.folder.name, config=config, store=store)
        for name in list(self.agent.tools.names):
            self.agent.tools.unregister(name)
        self.agent.tools.register(tool(read_only=self.read_only)(echo))

    async def turn(self, session: str, text: str) -> str:
        return await self.agent.process_direct(text, session_key=session)

    async def stream(self, session: str, text: str, on_text: Callable[[], None]) -> str:
        from everloop.events import Text

        def watch(event: object) -> None:
            if isinstance(event, Text):
                on_text()

        return await self.agent.process_direct(text, session_key=session, on_event=watch)

    async def seed(self, session: str, messages: int) -> None:
        sessions = self.agent.sessions
        stored = sessions.get_or_create(session)
        for number in range(messages // 2):
            user, assistant = pair(number)
            stored.add_message("user", user)
            stored.add_message("assistant", assistant)
        await asyncio.to_thread(sessions.save, stored)

    async def close(self) -> None:
        await self.agent.close()
        self.folder.cleanup()


class Effects(Everloop):
    """Its calls have effects, so each answer with one is flushed to the disk."""

    read_only = False


class Bytes(Raw):
    """Only sends, four times a turn, a body encoded beforehand. What is left is the cost of the bytes."""

    def __init__(self, base_url: str, model: str) -> None:
        super().__init__(base_url, model)
        self.bodies: dict[str, bytes] = {}

    async def turn(self, session: str, text: str) -> str:
        if session not in self.bodies:
            messages = [*self.stored.get(session, [SYSTEM]), {"role": "user", "content": text}]
            self.bodies[session] = json.dumps({"model": self.model, "messages": messages, "tools": [TOOL]}).encode()
        for _ in range(4):
            async with self.http.post(self.url, data=self.bodies[session], headers=JSON) as response:
                answer = (await response.json())["choices"][0]["message"]
        return str(answer)


Side = Raw | Everloop | Effects | Bytes
SIDES: dict[str, type[Side]] = {"raw": Raw, "everloop": Everloop, "effects": Effects, "bytes": Bytes}


def fixed_work() -> float:
    """CPU seconds of a piece of work that is always the same.

    The same work costs up to half more CPU time when the machine is in another mood (clock, neighbours). Measured next
    to every turn, this takes most of the mood out again.
    """
    started = time.thread_time()
    for _ in range(4):
        for message in json.loads(json.dumps(WORK)):
            message["content"].split()
    return time.thread_time() - started


def check(answer: str, mark: str) -> None:
    if f"done:{mark}" not in answer:
        raise SystemExit(f"wrong answer to {mark}: {answer[:200]!r}")


async def turns(side: Side, n: int, size: int) -> dict[str, float]:
    """CPU and wall milliseconds of a turn, one after another, each in a session of its own."""
    for i in range(10):
        check(await side.turn(f"bench:w{i}", prompt(f"w{i}")), f"w{i}")
    gc.collect()
    cpu, wall, work = [], [], []
    for i in range(n):
        c, w = time.process_time(), time.perf_counter()
        answer = await side.turn(f"bench:t{i}", prompt(f"t{i}"))
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
        work.append(fixed_work())
        check(answer, f"t{i}")
    return {
        "cpu_ms": statistics.median(cpu) * 1e3,
        "wall_ms": statistics.median(wall) * 1e3,
        "relative": statistics.median(cpu) / statistics.median(work),
    }


async def at_once(side: Side, n: int, size: int) -> dict[str, float]:
    """Wall seconds of n sessions at once, one turn each."""
    check(await side.turn("bench:w", prompt("w")), "w")
    c, w = time.process_time(), time.perf_counter()
    answers = await asyncio.gather(*(side.turn(f"bench:c{i}", prompt(f"c{i}")) for i in range(n)))
    wall, cpu = time.perf_counter() - w, time.process_time() - c
    for i, answer in enumerate(answers):
        check(answer, f"c{i}")
    return {"wall_s": wall, "cpu_s": cpu}


async def history(side: Side, n: int, size: int) -> dict[str, float]:
    """CPU milliseconds of a turn in a session that already holds `size` messages."""
    for i in range(5):
        await side.turn("bench:warm", prompt(f"w{i}"))
    await side.seed("bench:long", size)
    await side.turn("bench:long", prompt("first"))
    cpu = []
    for i in range(n):
        c = time.process_time()
        await side.turn("bench:long", prompt(f"h{i}"))
        cpu.append(time.process_time() - c)
    return {"cpu_ms": statistics.median(cpu) * 1e3}


async def first_token(side: Side, n: int, size: int) -> dict[str, float]:
    """Milliseconds from the call to the first text at the caller."""
    waits = []
    for i in range(n + 5):
        seen: list[float] = []
        started = time.perf_counter()
        answer = await side.stream(f"bench:s{i}", prompt(f"s{i}"), lambda seen=seen: seen.append(time.perf_counter()))  # type: ignore[misc]
        check(answer, f"s{i}")
        waits.append(seen[0] - started)
    return {"first_text_ms": statistics.median(waits[5:]) * 1e3}


Scenario = Callable[[Side, int, int], Awaitable[dict[str, float]]]
SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "turn": ("tools-3x1", turns),
    "at_once": ("tools-3x1-d200", at_once),
    "history": ("tools-3x1", history),
    "first_token": ("tools-0x0-n20", first_token),
}


async def main() -> None:
    name, scenario, base_url, *rest = sys.argv[1:]
    n, size = (*map(int, rest), 100, 0)[:2] if len(rest) < 2 else map(int, rest[:2])
    model, measure = SCENARIOS[scenario]
    side = SIDES[name](base_url, model)
    print(json.dumps(await measure(side, n, size)))
    await side.close()


if __name__ == "__main__":
    asyncio.run(main())
