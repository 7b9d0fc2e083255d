"""The chat without a terminal: lines in, answers out."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from .. import events
from ..config import Config
from ..errors import EverloopError
from ..runtime.agent import AgentLoop
from ..text import one_line
from .chat import LEAVE, greeting, with_leaving
from .common import chat_of, left_behind, make_agent, seen_ending, show_messages, show_undelivered
from .interrupt import CtrlC
from .main import INTERRUPTED
from .output import Paper
from .render import View

LONGEST_LINE = 10_000_000  # bytes


async def plain_chat(config: Config, key: str, prompt: str) -> int:
    """Read lines and answer each, until the input ends. Status 1 when a turn did not end with an answer."""
    out = Paper(sys.stdout, colour=False)
    # With a person there, everything; over a pipe the answers alone, and the rest beside them.
    view = View(out) if prompt else _Answers(out)
    lines = Lines(0)
    failed = False
    async with make_agent(config) as agent:
        current = asyncio.current_task()
        assert current is not None
        ctrl_c = CtrlC(agent, key, current.cancel)
        others = await left_behind(agent.store, key)  # a store that cannot be used is an error before anything is asked
        if prompt:
            out.line("\n".join(filter(None, (greeting(config, key), others))))
        agent.watch(key, view)
        messages = asyncio.create_task(show_messages(agent.bus, view.paper, key))
        await show_undelivered(agent, key, view.paper)
        agent.subagents.waits = True  # the end of the input ends this process
        await agent.resume(key)
        if not view.asked and (question := await agent.question(key)):
            out.line(question)
        while not ctrl_c.pressed:
            if out.failed is not None:  # a turn goes on without whoever watches it: nobody reads the answers
                raise out.failed
            if prompt:
                out.fresh()
                out.put(prompt)
            waiting = asyncio.create_task(lines.next())
            ctrl_c.idle = waiting.cancel
            try:
                line = await waiting
            except asyncio.CancelledError:
                return INTERRUPTED
            finally:
                ctrl_c.idle = None
            if line is None or line.strip() in LEAVE:
                break
            if line.strip():
                failed |= not await _answer(agent, key, line, view, out)
        if not ctrl_c.pressed:
            await agent.resume(key)  # what waited behind a question that was answered last
            failed |= await agent.question(key) is not None
        messages.cancel()
    return INTERRUPTED if ctrl_c.pressed else int(failed)


async def _answer(agent: AgentLoop, key: str, line: str, view: View, out: Paper) -> bool:
    """Answer one line; False when its turn ended without an answer."""
    channel, chat_id = chat_of(key)
    with seen_ending(agent, key) as seen:
        text = await agent.process_direct(line, key, channel, chat_id, attended=True)
    if text not in seen:  # a command, or a turn that ran in another process
        out.line(with_leaving(line, text))
        await show_undelivered(agent, key, view.paper, shown=text)
        return True
    return view.asked or (view.ended is not None and view.ended.reason == "answer")


class _Answers(View):
    """Only the answers, as they come; a turn that ended without one is told on standard error."""

    def __init__(self, paper: Paper) -> None:
        super().__init__(paper, summary=False)
        self._beside = View(Paper(sys.stderr), text=False, summary=False) if sys.stderr.isatty() else None

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.Text() | events.TurnStarted(resumed=False) | events.Asked():
                super().__call__(event)
            case events.TurnEnded(reason="answer"):
                super().__call__(event)
            case events.TurnEnded():
                self.ended = event
                self.paper.fresh()
                print(f"everloop: {one_line(event.text, 500)}", file=sys.stderr)
            case events.TurnStarted():
                print("everloop: an earlier turn was cut off; it goes on now", file=sys.stderr)
            case events.ToolStarted():
                self._shown = False
                self.paper.fresh()
        if self._beside is not None:
            self._beside(event)


class Lines:
    """The lines of a file descriptor, read in threads of their own, which never keep the process from ending."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._searched = 0
        self._ended = False
        self._number = 0

    async def next(self) -> str | None:
        """The next line, or None at the end."""
        while (end := self._buffer.find(b"\n", self._searched)) < 0 and not self._ended:
            self._searched = len(self._buffer)
            if self._searched > LONGEST_LINE:
                raise EverloopError(f"line {self._number + 1} of the input is longer than {LONGEST_LINE} bytes")
            data = await self._read()
            self._ended = not data
            self._buffer += data
        if end < 0 and not self._buffer:
            return None
        line = bytes(self._buffer[: end if end >= 0 else None])
        del self._buffer[: len(line) + 1]
        self._searched = 0
        self._number += 1
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            where = f"line {self._number} of the input, byte {error.start}"
            raise EverloopError(f"{where}, is not UTF-8 text: write it in UTF-8") from None

    def _read(self) -> asyncio.Future[bytes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()

        def settle(data: bytes) -> None:
            if not future.done():
                future.set_result(data)

        def read() -> None:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # closed, or a terminal that is gone: the end of the input
                data = b""
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, data)

        threading.Thread(target=read, name="everloop-input", daemon=True).start()
        return future
