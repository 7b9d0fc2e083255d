"""A running turn as a person watches it: its events, as lines on paper."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .. import events
from ..text import one_line
from .output import Paper, mark_of, short_arguments, short_result


@dataclass(slots=True)
class Running:
    """A tool call under way."""

    text: str
    since: float


class View:
    """Writes what happens in a session's turns.

    `text` is off where the answer goes elsewhere; `live` says that calls under way are shown by somebody who redraws
    them, so that only their ends are written.
    """

    def __init__(self, paper: Paper, *, text: bool = True, live: bool = False, summary: bool = True) -> None:
        self.paper = paper
        self.ended: events.TurnEnded | None = None  # the latest turn that ended
        self.asked = False  # the latest turn waits for a person's word
        self.running: dict[str, Running] = {}
        self.busy_since: float | None = None
        self._text = text
        self._live = live
        self._summary = summary
        self._shown = False  # something of the answer that is being written
        self._reasoning = False
        self._tokens: dict[str, int] = {}

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.TurnStarted():
                self._start(event)
            case events.Text():
                self._answer(event.text)
            case events.Reasoning():
                self._think(event.text)
            case events.Restarted():
                self._shown = self._reasoning = False
                self.paper.line(f"↻ the answer begins again: {one_line(event.reason, 160)}", "bad")
            case events.ToolStarted():
                self._start_call(event)
            case events.ToolProgress():
                if event.call in self.running:
                    self.paper.line(f"  │ {one_line(event.text, 100)}", "dim")
            case events.ToolEnded():
                self._end_call(event)
            case events.Asked():
                self._ask(event)
            case events.Usage():
                for name, count in event.tokens.items():
                    self._tokens[name] = self._tokens.get(name, 0) + count
            case events.Steered():
                self._shown = False
                self.paper.line(f"→ handed to the running turn: {one_line(event.text, 100)}", "dim")
            case events.Compacting():
                self.paper.line(f"… the conversation is long: summarising {event.turns} earlier turns", "dim")
            case events.Compacted():
                self.paper.line(f"… about {event.before:,} tokens of conversation are now {event.after:,}", "dim")
            case events.Error():
                pass  # the turn's end says the same
            case events.TurnEnded():
                self._end(event)

    def _start(self, event: events.TurnStarted) -> None:
        self.busy_since = time.monotonic()
        self.asked = False
        self._tokens = {}
        self._shown = self._reasoning = False
        if event.resumed:
            self.paper.line("An earlier turn was cut off. It goes on now.", "bold")

    def _answer(self, text: str) -> None:
        if not self._text:
            return
        if self._reasoning:
            self._reasoning = False
            self.paper.fresh()
        self._shown = True
        self.paper.put(text)

    def _think(self, text: str) -> None:
        if not self._text:
            return
        if not self._reasoning:
            self.paper.fresh()
        self._reasoning = True
        self.paper.put(text, "dim")

    def _start_call(self, event: events.ToolStarted) -> None:
        self._shown = self._reasoning = False
        self.paper.fresh()
        call = f"{event.name}({short_arguments(event.arguments)})"
        self.running[event.call] = Running(call, time.monotonic())
        if not self._live:
            self.paper.line(f"• {call}", "dim")

    def _end_call(self, event: events.ToolEnded) -> None:
        known = self.running.pop(event.call, None)
        mark = mark_of(event.name, event.status, event.content)
        what = known.text if known is not None and self._live else event.name
        self.paper.fresh()
        self.paper.put(mark, "good" if mark == "✓" else "bad")
        status = "" if event.status in ("ok", "error") else f"{event.status}: "
        self.paper.line_end(f" {what}  {event.seconds:.1f} s  {status}{short_result(event.content, 80)}", "dim")

    def _ask(self, event: events.Asked) -> None:
        self.running.clear()
        self.asked = True
        self.busy_since = None
        self.paper.fresh()
        self.paper.line(event.question, "bold")

    def _end(self, event: events.TurnEnded) -> None:
        self.ended = event
        self.running.clear()
        self.paper.fresh()
        if self._text and event.reason == "answer" and not self._shown:
            self.paper.line(event.text)
        elif self._text and event.reason != "answer":
            self.paper.line(event.text, "bad")
        if self._summary and self.busy_since is not None:
            self.paper.line(f"— {time.monotonic() - self.busy_since:.1f} s{self._counted()}", "dim")
        self.busy_since = None

    def _counted(self) -> str:
        read, written = self._tokens.get("prompt_tokens"), self._tokens.get("completion_tokens")
        return f" · {read or 0} tokens read, {written or 0} written" if read or written else ""
