"""`everloop run`: one goal, one answer."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from typing import Any

from .. import events
from ..config import Config
from ..errors import EverloopError
from ..log import ModelAnswered
from ..store.base import Store
from .common import (
    OWNER,
    CtrlC,
    chat_of,
    check_model,
    find_turn,
    hush,
    load_config,
    make_agent,
    prepare_workspace,
    session_key,
    turn_entries,
)
from .main import INTERRUPTED
from .paper import Paper, as_json, harmless, one_line
from .view import View

APOLOGY = "Sorry, I encountered an error: "


def command(options: argparse.Namespace) -> int:
    goal = read_goal(options.goal)
    key = session_key(options, f"run:{secrets.token_hex(6)}")
    config = load_config(options)
    check_model(config)
    prepare_workspace(config.workspace)
    hush()
    watched = options.verbose or sys.stderr.isatty()
    outcome, interrupted = asyncio.run(run(config, goal, key, watched))
    reached = outcome["reason"] == "answer"
    if options.json:
        print(as_json(outcome))
    elif reached:
        print(harmless(outcome["result"]) if sys.stdout.isatty() else outcome["result"])
    if not reached:
        print(f"everloop: {one_line(outcome['result'].removeprefix(APOLOGY), 500)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0 if reached else 1


def read_goal(goal: str) -> str:
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


async def run(config: Config, goal: str, key: str, watched: bool) -> tuple[dict[str, Any], bool]:
    """Take the goal to its end; what came of it, and whether Ctrl-C ended it."""
    started = time.monotonic()
    view = View(Paper(sys.stderr), text=False, summary=False) if watched else None
    ended: events.TurnEnded | None = None

    def watch(event: events.Event) -> None:
        nonlocal ended
        if isinstance(event, events.TurnEnded):
            ended = event
        elif isinstance(event, events.TurnStarted) and ctrl_c.pressed:
            ctrl_c.stop()
        if view is not None:
            view(event)

    async with make_agent(config) as agent:
        channel, chat_id = chat_of(key)
        answer = asyncio.create_task(agent.process_direct(goal, key, channel, chat_id, on_event=watch))
        ctrl_c = CtrlC(agent, key, answer.cancel)
        try:
            result = await answer
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        outcome = await _outcome(agent.store, key, result, ended)
    outcome["seconds"] = round(time.monotonic() - started, 3)
    return outcome, ctrl_c.pressed


async def _outcome(store: Store, key: str, result: str, ended: events.TurnEnded | None) -> dict[str, Any]:
    """What the log says of the turn."""
    if ended is not None:
        turn = await find_turn(store, ended.turn)
    else:  # another process had the session and ran the turn
        session = await store.session(OWNER, key)
        turn = (await store.turns(OWNER, session=session.id if session else None, limit=1))[0]
    answers = [logged.entry for logged in await turn_entries(store, turn) if isinstance(logged.entry, ModelAnswered)]
    usage: dict[str, int] = {}
    for answer in answers:
        for name, count in answer.usage.items():
            usage[name] = usage.get(name, 0) + count
    return {
        "result": result,
        "reason": turn.reason,
        "turn": turn.id,
        "session": key,
        "rounds": len(answers),
        "usage": usage,
        "seconds": 0.0,
    }
