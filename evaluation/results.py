"""The results' file: one JSON line a case, so that a run that was cut off goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everloop.errors import EverloopError

from .cases import Case
from .runner import Outcome


@dataclass(frozen=True, slots=True)
class Label:
    """What a result is a result of."""

    set: str
    provider: str
    model: str
    settings: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return ", ".join([self.model, *self.settings])


class Results:
    """The results of one run, in a file if there is one. What the file has of other runs stays."""

    def __init__(self, label: Label, cases: Iterable[Case], file: Path | None) -> None:
        self.label = label
        self.outcomes: dict[str, Outcome] = {}
        self._file = file
        stamps = {case.name: case.stamp for case in cases}
        for found, outcome in read([file]) if file is not None and file.exists() else ():
            if found == label and stamps.get(outcome.case) == outcome.stamp:
                self.outcomes[outcome.case] = outcome

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.case] = outcome
        if self._file is not None:
            line = json.dumps({**asdict(self.label), **asdict(outcome)}, ensure_ascii=False)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def read(files: Iterable[Path]) -> Iterator[tuple[Label, Outcome]]:
    """What files hold. A last line that was cut off is left out; its case is run again."""
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise EverloopError(f"{path}: cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            try:
                yield _read_line(json.loads(line))
            except (ValueError, TypeError, KeyError):
                if number < len(lines):
                    raise EverloopError(f"{path}: line {number} is no result: name a file that --json wrote") from None


def _read_line(line: dict[str, Any]) -> tuple[Label, Outcome]:
    label = Label(line.pop("set"), line.pop("provider"), line.pop("model"), tuple(line.pop("settings")))
    return label, Outcome(**{**line, "problems": tuple(line["problems"])})
