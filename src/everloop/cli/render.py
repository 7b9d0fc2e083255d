"""Renders the events of a running turn for a person, as lines of text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .. import events
from ..text import one_line
from .output import Output, mark_of, short_arguments, short_result


@dataclass(slots=True)
class Running:
    """A running tool call."""

    text: str
    since: float


class Renderer:
    """Writes the events of a session's turns.

    Without `text` the answer is left out, because it goes elsewhere. With `live` the caller redraws running calls, so
    only their ends are written.
    """

    def __init__(self, output: Output, *, text: bool = True, live: bool = False, summary: bool = True) -> None:
        self.output = output
        self.ended: events.TurnEnded | None = None  # the latest turn that ended
        self.asked = False  # the latest turn waits for an approval
        self.running: dict[str, Running] = {}
        self.busy_since: float | None = None
        self._text = text
        self._live = live
        self._summary = summary
        self._shown = False  # part of the current answer is on the screen
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
                self.output.line(f"↻ the answer starts again: {one_line(event.reason, 160)}", "bad")
            case events.ToolStarted():
                self._start_call(event)
            case events.ToolProgress():
                if event.call in self.running:
                    self.output.line(f"  │ {one_line(event.text)}", "dim")
            case events.ToolEnded():
                self._end_call(event)
            case events.Asked():
                self._ask(event)
            case events.Usage():
                for name, count in event.tokens.items():
                    self._tokens[name] = self._tokens.get(name, 0) + count
            case events.Steered():
                self._shown = False
                self.output.line(f"→ passed to the running turn: {one_line(event.text)}", "dim")
            case events.Compacting():
                self.output.line(f"… the conversation is long: summarising {event.turns} earlier turns", "dim")
            case events.Compacted():
                self.output.line(f"… about {event.before:,} tokens of conversation are now {event.after:,}", "dim")
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
            self._tell_resumed()

    def _tell_resumed(self) -> None:
        self.output.line("Continuing an interrupted turn.", "bold")

    def _answer(self, text: str) -> None:
        if not self._text:
            return
        if self._reasoning:
            self._reasoning = False
            self.output.fresh()
        self._shown = True
        self.output.answer(text)

    def _think(self, text: str) -> None:
        if not self._text:
            return
        if not self._reasoning:
            self.output.fresh()
        self._reasoning = True
        self.output.put(text, "dim")

    def _start_call(self, event: events.ToolStarted) -> None:
        self._shown = self._reasoning = False
        self.output.fresh()
        call = f"{event.name}({short_arguments(event.arguments)})"
        self.running[event.call] = Running(call, time.monotonic())
        if not self._live:
            self.output.line(f"• {call}", "dim")

    def _end_call(self, event: events.ToolEnded) -> None:
        known = self.running.pop(event.call, None)
        mark = mark_of(event.name, event.status, event.content)
        what = known.text if known is not None and self._live else event.name
        self.output.fresh()
        self.output.put(mark, "good" if mark == "✓" else "bad")
        status = "" if event.status in ("ok", "error") else f"{event.status}: "
        self.output.line_end(f" {what}  {event.seconds:.1f} s  {status}{short_result(event.content, 80)}", "dim")

    def _ask(self, event: events.Asked) -> None:
        self.running.clear()
        self.asked = True
        self.busy_since = None
        self.output.fresh()
        self.output.line(event.question, "bold")

    def _end(self, event: events.TurnEnded) -> None:
        self.ended = event
        self.running.clear()
        self.output.fresh()
        if self._text and event.reason == "answer" and not self._shown:
            self.output.answer(event.text)
            self.output.fresh()
        elif self._text and event.reason != "answer":
            self.output.line(event.text, "bad")
        if self._summary and self.busy_since is not None:
            self.output.line(f"— {time.monotonic() - self.busy_since:.1f} s{self._counted()}", "dim")
        self.busy_since = None

    def _counted(self) -> str:
        read, written = self._tokens.get("prompt_tokens", 0), self._tokens.get("completion_tokens", 0)
        return f" · {tokens_in_words(read, self._tokens.get('cached_tokens', 0), written)}" if read or written else ""


def tokens_in_words(read: int, cached: int, written: int) -> str:
    """1,200 tokens read (900 cached), 80 written."""
    share = f" ({cached:,} cached)" if cached else ""
    return f"{read:,} tokens read{share}, {written:,} written"
