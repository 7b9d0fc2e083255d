"""Crowds of clients that disconnect at any moment leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from pathlib import Path

from everloop.server.sse import AnswerStream
from everloop.tools.context import CallContext, current
from everloop.tools.shell.shell import ShellSettings, shell_tools

from .serving import CHAT, Serving, call, serving
from .test_life import until

BODY = json.dumps({"messages": [{"role": "user", "content": "go"}], "stream": True}).encode()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def come_and_go(server: Serving, number: int) -> None:
    """Connect, send part of a request, and disconnect: cleanly or not, at once or a little later."""
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(BODY)}"]
    if number % 3 == 0:
        lines += ["X-Session: crowd", f"Idempotency-Key: {number}"]
    said = "\r\n".join([*lines, "", ""]).encode() + BODY
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(said if number % 8 else said[: random.randrange(len(said))])
    await asyncio.sleep(random.choice([0, 0.02, 0.1]) * random.random())
    if number % 2:
        writer.transport.abort()
    else:
        writer.close()


async def test_many_clients_that_disconnect_leave_nothing_behind(tmp_path: Path):
    async with serving(tmp_path) as server:
        agent = await server.owners.agent("me")
        before = 0
        for _ in range(3):
            for number in range(150):
                if number % 2:
                    server.fake.calls(call("exec", command="sleep 1; touch survived"))
                else:
                    server.fake.reply("word " * 20, delay=0.05)
            for first in range(0, 240, 40):
                await asyncio.gather(*(come_and_go(server, first + number) for number in range(40)))
            guard, dispatcher = server.server._guard, agent.dispatcher
            assert guard is not None
            await until(lambda guard=guard: not guard.running)
            await until(lambda dispatcher=dispatcher: not dispatcher._sessions)
            assert not list(dispatcher._waiters)
            assert not dispatcher._taking
            assert not agent._streams._topics
            assert await server.store.ready("nobody") == []
            await until(lambda: descriptors() < 60)
            server.fake.replies.clear()
            before = before or descriptors()
        assert descriptors() < before + 30
        gc.collect()
        assert sum(isinstance(one, AnswerStream) for one in gc.get_objects()) < 30
        await asyncio.sleep(1.2)  # a command that went on would be done by now
        assert not (server.owners.config.workspace / "survived").exists()
        server.fake.reply("still here")
        assert (await server.stream("hello")).text == "still here"


async def test_a_command_that_is_cancelled_during_its_preparation_leaves_no_file_open(tmp_path: Path):
    exec_tool = shell_tools(ShellSettings())[0]
    context = CallContext("me", "s", "t", "c", "cli", "direct", tmp_path, True, "k", lambda text: None)
    current.set(context)
    await exec_tool.execute(command="true")  # finds out what sandbox there is
    before = descriptors()
    for number in range(30):
        running = asyncio.create_task(exec_tool.execute(command="sleep 5"))
        await asyncio.sleep(number / 5_000)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await until(lambda: descriptors() <= before + 5)
