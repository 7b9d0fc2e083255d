"""`everloop run`: one goal, one answer."""

from __future__ import annotations

import argparse
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import EverloopError
from ..text import one_line, printable
from .common import chat_of, check_model, hush, is_local, is_trusted, load_config, prepare_workspace, session_key
from .folder import enter
from .main import INTERRUPTED
from .output import as_json

if TYPE_CHECKING:
    from .. import events
    from ..config import Config
    from ..runtime.agent import TurnResult

PATIENCE = 2.0  # seconds after which it says that it waits for standard input


def command(options: argparse.Namespace) -> int:
    if options.agent is not None:
        from .run_agent import command as run_agent

        return run_agent(options)
    if len(options.goal) > 1:
        raise EverloopError('the goal is one argument: write it in quotes, like everloop run "list the files here"')
    goal = read_goal(*options.goal)
    config = load_config(options)
    if is_local(config):
        from .setup import with_model

        config = with_model(config)
    check_model(config)
    prepare_workspace(config.workspace)
    person = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    config = enter(config, person=person, trust=is_trusted(options))
    hush()
    import asyncio

    key = session_key(options, asyncio.run(chosen_session(config, options)) or f"run:{os.urandom(6).hex()}")
    output = "json" if options.json else options.output
    started = time.monotonic()
    tell = _tell_event if output == "jsonl" else None
    result, interrupted = asyncio.run(run(config, goal, key, options.verbose or sys.stderr.isatty(), tell))
    reason = _reason(goal, result)
    if output != "text":
        outcome = _outcome(key, result, reason, time.monotonic() - started)
        print(as_json({"event": "result", **outcome} if output == "jsonl" else outcome))
    elif reason == "answer":
        print(printable(result.text) if sys.stdout.isatty() else result.text)
    if reason != "answer":
        print(f"everloop: {one_line(result.error or result.text, 500)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0 if reason == "answer" else 1


def read_goal(goal: str = "-") -> str:
    """The goal as it was given, with what is piped in after it; without one, or for "-", only that."""
    if goal == "-":
        goal = _piped() if _is_piped() or sys.stdin is None or not sys.stdin.isatty() else ""
    elif goal.strip() and _is_piped() and (piped := _piped()).strip():
        goal = f"{goal}\n\n{piped}"
    if any("\ud800" <= character <= "\udfff" for character in goal):
        raise EverloopError("the goal is not UTF-8 text: write it in UTF-8")
    if not goal.strip():
        raise EverloopError('the goal is empty: say what to do, like everloop run "list the files here"')
    return goal


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, and not a terminal, a device or nothing."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _piped() -> str:
    """All of standard input."""
    if sys.stdin is None:
        return ""
    if _is_piped() and not select.select([0], [], [], PATIENCE)[0]:
        print("everloop: waiting for the end of standard input; pass </dev/null for none", file=sys.stderr, flush=True)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise EverloopError(f"the goal on standard input is not UTF-8 text (byte {error.start})") from None


async def chosen_session(config: Config, options: argparse.Namespace) -> str:
    """The session that --continue or --resume names; "" without them."""
    if not options.latest and options.resume is None:
        return ""
    if hasattr(options, "session"):
        raise EverloopError("give either --session, --continue or --resume")
    from .common import OWNER, reading
    from .sessions import find_session

    if options.resume is not None:
        return (await find_session(config, options.resume))[0].info.key
    async with reading(config) as store:
        latest = await store.sessions(OWNER, 1)
    if not latest:
        raise EverloopError("there is no session to continue yet")
    return latest[0].key


def _tell_event(event: events.Event) -> None:
    """Print an event as a line of JSON: its kind, and its fields."""
    from dataclasses import asdict

    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
    print(as_json({"event": kind, **asdict(event)}), flush=True)


async def run(
    config: Config, goal: str, key: str, watched: bool, tell: Callable[[events.Event], None] | None = None
) -> tuple[TurnResult, bool]:
    """Work on the goal until it ends; its result, and whether Ctrl-C ended it. `tell` is told of every event."""
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
        if tell is not None:
            tell(event)

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
        print("everloop: an earlier turn of this session was interrupted; it is finished first", file=sys.stderr)


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
