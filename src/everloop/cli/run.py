"""`everloop run`: one goal, one answer."""

from __future__ import annotations

import argparse
import os
import sys

from ..errors import EverloopError
from ..text import one_line, printable
from .common import check_model, hush, load_config, prepare_workspace, session_key
from .main import INTERRUPTED
from .output import as_json
from .setup import with_model

APOLOGY = "Sorry, I encountered an error: "


def command(options: argparse.Namespace) -> int:
    goal = read_goal(options.goal)
    key = session_key(options, f"run:{os.urandom(6).hex()}")
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    hush()
    import asyncio

    from .goal import run

    watched = options.verbose or sys.stderr.isatty()
    outcome, interrupted = asyncio.run(run(config, goal, key, watched))
    reached = outcome["reason"] == "answer"
    if options.json:
        print(as_json(outcome))
    elif reached:
        print(printable(outcome["result"]) if sys.stdout.isatty() else outcome["result"])
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
