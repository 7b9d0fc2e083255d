"""The chat without a full terminal: lines in, answers out."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from .. import events
from ..commands import with_how_to_answer
from ..config import Config
from ..errors import EverloopError
from ..runtime.agent import AgentLoop
from ..text import one_line
from .common import (
    LEAVE,
    CtrlC,
    chat_of,
    left_behind,
    make_agent,
    seen_ending,
    show_messages,
    show_undelivered,
    with_leaving,
)
from .local_commands import plain_refusal
from .main import INTERRUPTED
from .output import Output, Renderer

MAX_LINE = 10_000_000  # bytes


async def plain_chat(config: Config, key: str, greeting: str, prompt: str) -> int:
    """Read lines and answer each, until the input ends. Return status 1 if a turn did not end with an answer.

    With a `prompt` there is a user, who is greeted and shown everything.
    """
    out = Output(sys.stdout, colour=False)
    # A user is shown everything; over a pipe only the answers are on standard output.
    view = Renderer(out) if prompt else _Answers(out)
    lines = Lines(0)
    failed = False
    async with make_agent(config) as agent:
        current = asyncio.current_task()
        assert current is not None
        ctrl_c = CtrlC(agent, key, current.cancel)
        others = await left_behind(agent.store, key)  # an unusable store is an error before the first prompt
        if prompt:
            out.line("\n".join(filter(None, (greeting, others))))
        agent.watch(key, view)
        messages = asyncio.create_task(show_messages(agent.bus, view.output, key))
        await show_undelivered(agent, key, view.output)
        agent.subagents.wait_for_all()  # the process ends with its input
        await agent.resume(key)
        if not view.asked and (question := await agent.question(key)):
            out.line(with_how_to_answer(question))
        while not ctrl_c.pressed:
            if out.failed is not None:  # the reader of the answers is gone
                raise out.failed
            if prompt:
                out.fresh()
                out.put(prompt)
            waiting = asyncio.create_task(lines.next())
            try:
                with ctrl_c.idle(waiting):
                    line = await waiting
            except asyncio.CancelledError:
                return INTERRUPTED
            if line is None or line.strip() in LEAVE:
                break
            if (refusal := plain_refusal(line)) is not None:
                print(f"everloop: {refusal}", file=sys.stderr, flush=True)
                failed = True
            elif line.strip():
                failed |= not await _answer(agent, key, line, view, out)
        if not ctrl_c.pressed:
            await agent.resume(key)  # messages that waited behind the last question
            failed |= await agent.question(key) is not None
        messages.cancel()
    return INTERRUPTED if ctrl_c.pressed else int(failed)


async def _answer(agent: AgentLoop, key: str, line: str, view: Renderer, out: Output) -> bool:
    """Answer one line; return False when its turn ended without an answer."""
    channel, chat_id = chat_of(key)
    with seen_ending(agent, key) as seen:
        text = await agent.process_direct(line, key, channel, chat_id, attended=True)
    if text not in seen:  # a command, or a turn that ran in another process
        out.line(with_leaving(line, text))
        await show_undelivered(agent, key, view.output, shown=text)
        return True
    return view.asked or (view.ended is not None and view.ended.reason == "answer")


class _Answers(Renderer):
    """Writes only the answers, streamed; a turn that ended without one is reported on standard error."""

    def __init__(self, output: Output) -> None:
        super().__init__(output, summary=False)
        self._beside = Renderer(Output(sys.stderr), text=False, summary=False) if sys.stderr.isatty() else None

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.Text() | events.TurnStarted(resumed=False) | events.Asked():
                super().__call__(event)
            case events.TurnEnded(reason="answer"):
                super().__call__(event)
            case events.TurnEnded():
                self.ended = event
                self.output.fresh()
                print(f"everloop: {one_line(event.text, 500)}", file=sys.stderr)
            case events.TurnStarted():
                print("everloop: continuing an interrupted turn", file=sys.stderr)
            case events.ToolStarted():
                self._shown = False
                self.output.fresh()
        if self._beside is not None:
            self._beside(event)


class Lines:
    """Reads lines from a file descriptor in daemon threads, which do not keep the process from ending."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._searched = 0
        self._ended = False
        self._number = 0

    async def next(self) -> str | None:
        """Return the next line, or None at the end."""
        while (end := self._buffer.find(b"\n", self._searched)) < 0 and not self._ended:
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE:
                raise EverloopError(f"line {self._number + 1} of the input is longer than {MAX_LINE} bytes")
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
