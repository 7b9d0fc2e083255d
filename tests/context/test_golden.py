"""Complete requests as readable files: a change of any word sent to a model shows up here.

`GOLDEN=write make test ARGS=tests/context/test_golden.py` rewrites them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, Config, MessageBus
from everloop.context.skills import SHIPPED
from everloop.testing import ScriptedProvider, call

from ..support.drawing import PIXEL

HERE = Path(__file__).parent / "golden"
FILES = {
    "AGENTS.md": "# How to work\n\nAsk before you delete anything.",
    "SOUL.md": "You are calm and brief.",
    "USER.md": "The user is a gardener in Ghent.",
    "TOOLS.md": "The greenhouse answers at 10.0.0.7.",
    "IDENTITY.md": "Your name is Fern.",
    "memory/MEMORY.md": "- 2026-03-01: The roses are cut in March.",
    "skills/watering/SKILL.md": "---\nname: watering\ndescription: When to water.\nalways: true\n---\nWater at dawn.",
    "skills/pruning/SKILL.md": "---\nname: pruning\ndescription: How roses are cut.\n---\nCut above an eye.",
    "skills/weather/SKILL.md": (
        "---\nname: weather\ndescription: The forecast.\nrequires: {bins: [no-such-program], env: [NO_KEY]}\n---\nx"
    ),
    "skills/broken/SKILL.md": "---\nname: broken\ndescripton: A slip of the pen.\n---\nx",
    "report.txt": "".join(f"bed {n}: dry\n" for n in range(800)),
}


@pytest.fixture(autouse=True)
def _brussels(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Brussels")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def agent(tmp_path: Path, model: Any, **settings: Any) -> AgentLoop:
    config = Config(
        home=tmp_path / "home", name="Fern" if (tmp_path / "work/SOUL.md").exists() else "Everloop", **settings
    )
    return AgentLoop(MessageBus(), model, tmp_path / "work", config=config, store=tmp_path / "store.db")


def plant(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "work").mkdir()
    for name, text in files.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def readable(request: Any, tmp_path: Path) -> str:
    """A request as readable text, with machine-dependent parts replaced by placeholders."""
    parts = []
    for message in request.messages:
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(json.dumps(part)[:90] if part["type"] != "text" else part["text"] for part in content)
        head = message["role"] + (f", result of {message['tool_call_id']}" if message["role"] == "tool" else "")
        calls = [
            f"→ {one['id']}: {one['function']['name']} {one['function']['arguments']}"
            for one in message.get("tool_calls", ())
        ]
        parts.append("\n".join([f"════ {head} ════", *([content] if content else []), *calls]))
    text = "\n\n".join(parts) + "\n"
    places = {str(SHIPPED): "<package>/skills", str(tmp_path / "work"): "<workspace>", str(tmp_path / "home"): "<home>"}
    for place, name in places.items():
        text = text.replace(place, name)
    text = text.replace(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}", "<runtime>")
    text = re.sub(r"outputs/[0-9a-f]{24}", "outputs/<session>", text)
    text = re.sub(r"[A-Z][a-z]+day, \d{4}-\d\d-\d\d \d\d:\d\d", "<weekday, date time>", text)
    text = re.sub(r"[A-Z][a-z]+day, \d{4}-\d\d-\d\d", "<weekday, date>", text)
    text = re.sub(r"\[20\d\d-\d\d-\d\d \d\d:\d\d\]", "[<date time>]", text)
    text = re.sub(r"(CES?T) \(UTC\+0[12]00\)", "<zone>", text)
    return re.sub(r"(untrusted data from \w+, |end of untrusted data )[0-9a-f]{12}", r"\1<mark>", text)


def compare(name: str, text: str) -> None:
    path = HERE / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), (
        f"the request differs from {path.name}: review it, then rewrite it with GOLDEN=write"
    )


async def test_the_first_message_in_an_empty_workspace(tmp_path):
    plant(tmp_path, {})
    model = ScriptedProvider(["hello"])
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("hi")
    compare("empty_workspace", readable(model.requests[0], tmp_path))


async def test_a_workspace_with_everything(tmp_path):
    plant(tmp_path, FILES)
    (tmp_path / "rose.png").write_bytes(PIXEL)
    step = call("list_dir", path="memory")
    step.id = "call_1"
    model = ScriptedProvider([step, "It is there.", "A rose.", "Done."])
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("Is there a memory?")
        await loop.process_direct("What is this?", media=[str(tmp_path / "rose.png")])
    with sqlite3.connect(tmp_path / "store.db") as store:
        store.execute("UPDATE session SET updated_at = updated_at - 7200")
    store.close()
    async with agent(tmp_path, model) as loop:
        await loop.process_direct("Cut it as in $pruning.")
    compare("everything", readable(model.requests[-1], tmp_path).replace(str(tmp_path), "<folder>"))


async def test_a_conversation_that_was_compacted(tmp_path):
    plant(tmp_path, {"report.txt": FILES["report.txt"]})
    steps = [call("read_file", path="report.txt") for _ in range(2)]
    for number, step in enumerate(steps):
        step.id = f"call_{number}"
    summary = "- The user waters the garden at dawn.\n- report.txt lists 800 beds, all dry."
    model = ScriptedProvider(["Good.", steps[0], "All dry.", steps[1], "Still dry.", "Yes.", summary, "At dawn."])
    async with agent(tmp_path, model) as loop:
        for text in ("I water at dawn.", "Read the report.", "Again.", "Sure?"):
            await loop.process_direct(text)
        assert "now a summary" in await loop.process_direct("/compact when to water")
        await loop.process_direct("When do I water?")
    compare("summary_request", readable(model.requests[-2], tmp_path))
    compare("compacted", readable(model.requests[-1], tmp_path))


async def test_long_results_that_became_pointers(tmp_path):
    plant(tmp_path, {"report.txt": FILES["report.txt"]})
    step = call("read_file", path="report.txt")
    step.id = "call_0"
    model = ScriptedProvider([step, "All dry.", "One.", "Two.", "Three."])
    async with agent(tmp_path, model, window=14_000, compact_at=0.3) as loop:
        for text in ("Read the report.", "one", "two", "three"):
            await loop.process_direct(text)
            for note in loop._compactor._notes.values():
                if note.task is not None:
                    await note.task
    compare("put_aside", readable(model.requests[-1], tmp_path))
