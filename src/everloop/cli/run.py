"""`everloop run`: one goal, one answer."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ..errors import EverloopError
from ..text import one_line, printable
from .common import chat_of, check_model, hush, is_trusted, load_config, prepare_workspace, session_key
from .folder import enter
from .main import INTERRUPTED
from .output import as_json
from .setup import with_model

if TYPE_CHECKING:
    from .. import events
    from ..config import Config
    from ..runtime.results import TurnResult


def command(options: argparse.Namespace) -> int:
    if options.agent is not None:
        from .run_agent import command as run_agent

        return run_agent(options)
    if len(options.goal) > 1:
        raise EverloopError('the goal is one argument: write it in quotes, like everloop run "list the files here"')
    goal = read_goal(*options.goal)
    key = session_key(options, f"run:{os.urandom(6).hex()}")
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    person = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    config = enter(config, person=person, trust=is_trusted(options))
    hush()
    import asyncio

    started = time.monotonic()
    result, interrupted = asyncio.run(run(config, goal, key, options.verbose or sys.stderr.isatty()))
    reason = _reason(goal, result)
    if options.json:
        print(as_json(_outcome(key, result, reason, time.monotonic() - started)))
    elif reason == "answer":
        print(printable(result.text) if sys.stdout.isatty() else result.text)
    if reason != "answer":
        print(f"everloop: {one_line(result.error or result.text, 500)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0 if reason == "answer" else 1


def read_goal(goal: str = "") -> str:
    """The goal as it was given, or from standard input."""
    if goal == "-":
        try:
            goal = sys.stdin.buffer.read().decode() if sys.stdin is not None else ""
        except UnicodeDecodeError as error:
            raise EverloopError(f"the goal on standard input is not UTF-8 text (byte {error.start})") from None
    if any("\ud800" <= character <= "\udfff" for character in goal):
        raise EverloopError("the goal is not UTF-8 text: write it in UTF-8")
    if not goal.strip():
        raise EverloopError('the goal is empty: say what to do, like everloop run "list the files here"')
    return goal


async def run(config: Config, goal: str, key: str, watched: bool) -> tuple[TurnResult, bool]:
    """Work on the goal until it ends; its result, and whether Ctrl-C ended it."""
    import asyncio

    from .. import events
    from .common import CtrlC, make_agent, show_messages
    from .output import Output
    from .render import Renderer

    view = Renderer(Output(sys.stderr), text=False, summary=False) if watched else None

    def watch(event: events.Event) -> None:
        if isinstance(event, events.TurnStarted) and ctrl_c.pressed:
            ctrl_c.stop()
        if view is not None:
            view(event)

    async with make_agent(config) as agent:
        agent.subagents.waits = True  # the process ends with the answer
        agent.watch(key, _tell_of_earlier)
        messages = asyncio.create_task(show_messages(agent.bus, Output(sys.stderr)))
        answer = asyncio.create_task(agent.ask(goal, key, *chat_of(key), on_event=watch))
        ctrl_c = CtrlC(agent, key, answer.cancel)
        try:
            return await answer, ctrl_c.pressed
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            messages.cancel()


def _tell_of_earlier(event: events.Event) -> None:
    from .. import events

    if isinstance(event, events.TurnStarted) and event.resumed:
        print("everloop: an earlier turn of this session was cut off; it goes on first", file=sys.stderr)


def _reason(goal: str, result: TurnResult) -> str:
    """Why the run ended. A command that exists was answered; a mistyped one was not."""
    from ..commands import command_of

    if result.reason == "command":
        return "answer" if command_of(goal) else "error"
    return result.reason


def _outcome(key: str, result: TurnResult, reason: str, seconds: float) -> dict[str, Any]:
    return {
        "result": result.text,
        "reason": reason,
        "turn": result.turn,
        "session": key,
        "rounds": result.rounds,
        "usage": result.usage,
        "seconds": round(seconds, 3),
    }
