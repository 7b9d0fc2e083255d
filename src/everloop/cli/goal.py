"""One goal taken to its end, and what came of it."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from .. import events
from ..commands import command_of, meant_by
from ..config import Config
from ..log import ModelAnswered
from ..store.base import Store
from .common import OWNER, chat_of, make_agent, show_messages
from .interrupt import CtrlC
from .output import Paper
from .render import View


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
        agent.subagents.waits = True  # when the answer is there, this process ends
        channel, chat_id = chat_of(key)
        agent.watch(key, _tell_of_earlier)
        messages = asyncio.create_task(show_messages(agent.bus, Paper(sys.stderr)))
        answer = asyncio.create_task(agent.process_direct(goal, key, channel, chat_id, on_event=watch))
        ctrl_c = CtrlC(agent, key, answer.cancel)
        try:
            result = await answer
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            messages.cancel()
        if ended is None and (command_of(goal) or meant_by(goal)):  # it began no turn
            outcome = _told(key, result, "answer" if command_of(goal) else "error")
        else:
            outcome = await _outcome(agent.store, key, result, ended)
    outcome["seconds"] = round(time.monotonic() - started, 3)
    return outcome, ctrl_c.pressed


def _tell_of_earlier(event: events.Event) -> None:
    if isinstance(event, events.TurnStarted) and event.resumed:
        print("everloop: an earlier turn of this session was cut off; it goes on first", file=sys.stderr)


async def _outcome(store: Store, key: str, result: str, ended: events.TurnEnded | None) -> dict[str, Any]:
    """What the log says of the turn."""
    if ended is not None:
        turn = (await store.turns(OWNER, prefix=ended.turn, limit=1))[0]
    else:  # another process had the session and ran the turn
        session = await store.session(OWNER, key)
        turn = (await store.turns(OWNER, session=session.id if session else None, limit=1))[0]
    answers = [
        logged.entry
        for logged in await store.read_turn(turn.session, turn.first_seq)
        if isinstance(logged.entry, ModelAnswered)
    ]
    usage: dict[str, int] = {}
    for answer in answers:
        for name, count in answer.usage.items():
            usage[name] = usage.get(name, 0) + count
    return {**_told(key, result, turn.reason), "turn": turn.id, "rounds": len(answers), "usage": usage}


def _told(key: str, result: str, reason: str | None) -> dict[str, Any]:
    return {
        "result": result,
        "reason": reason,
        "turn": None,
        "session": key,
        "rounds": 0,
        "usage": {},
        "seconds": 0.0,
    }
