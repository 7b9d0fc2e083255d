"""A workspace for tests of skills."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from everloop.context.skills import Skills
from everloop.sandbox.reach import Reach


class Bench:
    """A workspace and its skills; shipped skills exist only if made."""

    def __init__(self, folder: Path, shipped: Path, **options: Any) -> None:
        self.folder = folder
        self.shipped = shipped
        self.now = 0.0
        self.skills = Skills(folder, shipped, clock=lambda: self.now, **options)
        self.reach = Reach(folder)

    def add(
        self, name: str, text: str = "", *, body: str = "How it is done.", shipped: bool = False, **keys: str
    ) -> Path:
        lines = {"name": name, "description": f"What {name} is for.", **keys}
        front = "".join(f"{key}: {value}\n" for key, value in lines.items() if value)
        file = (self.shipped if shipped else self.folder / "skills") / name / "SKILL.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(text or f"---\n{front}---\n\n{body}\n"))
        return file

    @property
    def blocks(self) -> list[str]:
        return self.skills.blocks(self.reach)

    @property
    def prompt(self) -> str:
        return "\n\n---\n\n".join(self.blocks)

    def load(self, name: str) -> str | None:
        return self.skills.load(name, self.reach)

    @property
    def problem(self) -> str:
        """Return the only one."""
        assert self.blocks
        (problem,) = self.skills.problems()
        assert problem in self.prompt
        return problem


def settle() -> None:
    """Let the file system's clock advance: files that have just changed are read again."""
    time.sleep(0.06)
