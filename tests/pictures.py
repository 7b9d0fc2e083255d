"""Draws the pictures of the README from the real program: `make pictures`.

The chat runs at a pseudo-terminal against the scripted model server, and its screen becomes an SVG. The pictures of the
web page are made by its browser tests, with `EVERLOOP_SCREENSHOTS`.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI

from .support.commands import Terminal, terminal
from .support.places import ROOT

FIGURES = ROOT / "docs" / "figures"
COLUMNS, ROWS = 92, 40
TESTS = """\
import unittest

class Due(unittest.TestCase):
    def test_beans(self):
        self.assertTrue(True)
"""
ANSWER = """\
## The garden

Both are in **plan.md**, and `watering.py` says when:

| bed | litres | next |
|---|---|---|
| beans | 12 | today |
| herbs | 4 | Thursday |

```python
def due(bed: str, days: int) -> bool:
    return days >= INTERVALS[bed]
```

1. Water the beans before noon
2. Mend the fence
"""
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207),
     (177, 186, 196)],
    [(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255),
     (86, 212, 221), (255, 255, 255)],
)  # fmt: skip


async def chat() -> str:
    """Return the screen of a conversation as SVG."""
    async with FakeOpenAI() as server:
        server.calls(call("read_file", path="todo.txt"))
        server.calls(call("exec", command="python3 -m unittest -q watering"))
        server.calls(
            call("edit_file", path="plan.md", old_text="1. Rest", new_text="1. Water the beans\n2. Mend the fence")
        )
        server.reply(ANSWER)
        async with terminal(server=server, columns=COLUMNS, rows=ROWS, EVERLOOP_MODEL="qwen3:8b") as screen:
            await screen.ready()
            screen.type("What needs doing in the garden? Put it into plan.md.\r")
            await screen.shows("tokens read")
            await asyncio.sleep(0.5)  # until the status line is drawn
            return svg(screen)


def svg(screen: Terminal) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    lines = screen.lines
    for number, line in enumerate(lines):
        row = Text()
        for place in range(len(line)):
            character = screen.character(number, place)
            row.append(character.data, style=style_of(character))
        console.print(row, soft_wrap=True)
    return console.export_svg(title="everloop", theme=THEME)


def style_of(character: Any) -> Style:
    def colour(name: str) -> str | None:
        if name == "default":
            return None
        bright = name.startswith("bright")
        plain = {"brown": "yellow"}.get(name.removeprefix("bright"), name.removeprefix("bright"))
        if len(plain) == 6 and all(one in "0123456789abcdef" for one in plain):
            return f"#{plain}"
        return f"bright_{plain}" if bright else plain

    return Style(
        color=colour(character.fg),
        bgcolor=colour(character.bg),
        bold=character.bold,
        italic=character.italics,
        underline=character.underscore,
        reverse=character.reverse,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HOME": folder, "EVERLOOP_HOME": f"{folder}/.everloop"}
        workspace = Path(folder, ".everloop", "workspace")
        workspace.mkdir(parents=True)
        (workspace / "todo.txt").write_text("water the beans\nmend the fence\n")
        (workspace / "plan.md").write_text("# Plan\n\n1. Rest\n")
        (workspace / "watering.py").write_text(TESTS)
        # Without the fonts, which would be loaded from elsewhere.
        drawn = re.sub(r"@font-face \{.*?\}", "", asyncio.run(chat()), flags=re.S)
        (FIGURES / "chat.svg").write_text(drawn)
        files = ["tests/server/test_web_page.py", "tests/server/test_web_page_views.py"]
        tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
        subprocess.run(tests, cwd=ROOT, env={**os.environ, "EVERLOOP_SCREENSHOTS": folder}, check=True)
        pictures = {"chat-dark": "page-chat", "question-light": "page-question", "steps": "page-timeline"}
        for made, name in pictures.items():
            shutil.copy(Path(folder, f"{made}.png"), FIGURES / f"{name}.png")


if __name__ == "__main__":
    main()
