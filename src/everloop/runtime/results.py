"""What a program is told of a turn: its answer, why it ended, what went wrong and what it used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..log import Entry, ModelAnswered, Reason, TurnEnded


@dataclass(slots=True, frozen=True)
class TurnResult:
    """The outcome of `AgentLoop.ask`.

    `reason` is why the turn ended, "answer" where the model answered; "question" while the turn waits for a person's
    approval, and "command" for a command such as /status, which begins no turn. `error` is None unless the turn failed.
    """

    text: str
    reason: Reason | Literal["question", "command"] = "command"
    error: str | None = None
    usage: dict[str, int] = field(default_factory=dict)  # tokens of all its model calls
    turn: str | None = None
    rounds: int = 0

    @classmethod
    def of(cls, text: str, turn: str | None, entries: Sequence[Entry]) -> TurnResult:
        """Read the result from the turn's log; `text` is what the caller was answered."""
        answers = [entry for entry in entries if isinstance(entry, ModelAnswered)]
        usage: dict[str, int] = {}
        for answer in answers:
            for name, count in answer.usage.items():
                usage[name] = usage.get(name, 0) + count
        ended = next((entry for entry in reversed(entries) if isinstance(entry, TurnEnded)), None)
        if ended is None:
            return cls(text, "question", None, usage, turn, len(answers))
        error = (ended.error or ended.text) if ended.reason == "error" else None
        return cls(text, ended.reason, error, usage, turn, len(answers))
