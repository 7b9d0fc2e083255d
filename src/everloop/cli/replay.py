"""`everloop replay`: run a recorded turn again and compare its steps."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from ..config import Config
from ..log import Cleared, Entry, Logged, TurnEnded, kind_of
from ..replay import Difference, Replayed, replay
from ..store.base import TurnInfo
from ..text import counted
from .common import find_turn, load_with_store, reading
from .format import described
from .output import Output


def command(options: argparse.Namespace) -> int:
    turn, logged, history = asyncio.run(_read(load_with_store(options), options.turn))
    entries = [one.entry for one in logged]
    result = asyncio.run(replay(entries, history))
    output = Output(sys.stdout)
    output.line(f"turn {turn.id} of session {turn.key}", "bold")
    for number, entry in enumerate(result.steps, start=1):
        output.line(_step(number, entry))
    if result.same and (damage := _damage(turn, logged)):
        output.line(f"different: {damage}", "bad")
        return 1
    return _verdict(output, result)


async def _read(config: Config, prefix: str) -> tuple[TurnInfo, list[Logged], list[Entry]]:
    """Return the turn, its entries, and the conversation before it."""
    async with reading(config) as store:
        turn = await find_turn(store, prefix)
        before = [one.entry for one in await store.read_log(turn.session, 0, turn.first_seq - 1)]
        cleared = [place for place, entry in enumerate(before) if isinstance(entry, Cleared)]
        return turn, await store.read_turn(turn.session, turn.first_seq), before[cleared[-1] + 1 if cleared else 0 :]


def _damage(turn: TurnInfo, logged: Sequence[Logged]) -> str:
    """Return what is wrong with the log itself: a missing entry, or an end that differs from the turn's row."""
    for expected, one in enumerate(logged, start=turn.first_seq):
        if one.seq != expected:
            return f"entry {expected} of the log is missing"
    last = logged[-1].entry if logged else None
    reason = last.reason if isinstance(last, TurnEnded) else None
    if reason != turn.reason:
        return f"the turn ended with “{turn.reason}”, and its log with “{reason or 'nothing'}”"
    return ""


def _verdict(output: Output, result: Replayed) -> int:
    if result.difference is not None:
        _show_difference(output, result.difference)
        return 1
    count = counted(len(result.steps), "step")
    cut = f", as far as the turn can be replayed: {result.cut}" if result.cut else ""
    output.line(f"same {count}{cut}", "good")
    return 0


def _show_difference(output: Output, difference: Difference) -> None:
    output.line(f"different at step {difference.step}: {difference.why}", "bad")
    for name, entry in (("recorded", difference.recorded), ("replayed", difference.replayed)):
        if entry is not None:
            output.line(f"  {name}: {_words(entry)}")


def _step(number: int, entry: Entry) -> str:
    return f"{number:>5}  {_words(entry)}"


def _words(entry: Entry) -> str:
    return f"{kind_of(entry):<7}  {described(entry)}"
