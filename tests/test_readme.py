"""The README's transcript, typed and killed as it says, and its other promises."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from everloop.config import Config
from everloop.providers.factory import make_provider
from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import Terminal, everloop, terminal, until

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
VARIES = re.compile(r"[⠀-⣿]|\d+\.\d s|[\d,]+(?= tokens)")  # the spinner, seconds, tokens


def transcript() -> list[list[str]]:
    """Return the lines of each start of the program, without the command itself."""
    block = re.search(r"^```text\n(\$ everloop\n.*?)^```$", README, re.M | re.S)
    assert block is not None
    return [part.splitlines() for part in block[1].split("$ everloop\n")[1:]]


async def sees(screen: Terminal, line: str, place: int) -> int:
    """Wait for a line, whatever its numbers are; return where it ends.

    A line that is redrawn may never be written in one piece, so the screen is searched too.
    """
    pieces, end = [], 0
    for found in VARIES.finditer(line):
        pieces += [re.escape(line[end : found.start()]), "[⠀-⣿]" if ord(found[0][0]) >= 0x2800 else r"[\d.,]+(?: s)?"]
        end = found.end()
    pattern = re.compile("".join([*pieces, re.escape(line[end:])]))
    try:
        await until(lambda: pattern.search(screen.text, place) or pattern.search("\n".join(screen.lines)))
    except TimeoutError:
        raise AssertionError(f"never saw {line!r} in {screen.text[place:]!r}") from None
    seen = pattern.search(screen.text, place)
    return seen.end() if seen is not None else place


async def test_the_transcript_is_what_happens():
    first, second = transcript()
    assert first[-1] == "Killed"
    workspace = Path(os.environ["EVERLOOP_HOME"]) / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "todo.txt").write_text("water the beans\nmend the fence\n")
    async with FakeOpenAI() as server:
        server.calls(call("read_file", path="todo.txt"))
        server.hang(30)
        async with terminal(server=server) as screen:
            place = 0
            for line in first[:-1]:
                if line.startswith("> "):
                    await screen.ready()
                    screen.type(f"{line[2:]}\r")
                else:
                    place = await sees(screen, line, place)
            await until(lambda: len(server.requests) == 2)
            screen.process.kill()
            await screen.process.wait()
        server.calls(call("write_file", path="plan.md", content="1. Water\n2. Mend\n"))
        server.reply(second[-2])
        async with terminal(server=server) as screen:
            place = 0
            for line in second:
                place = await sees(screen, line, place)
            screen.type("/exit\r")
            assert await screen.ends() == 0
        roles = [[message["role"] for message in seen.body["messages"][1:]] for seen in server.requests if seen.body]
    assert roles[1] == roles[2] == ["user", "assistant", "tool"]  # nothing from before the kill was requested again
    assert (workspace / "plan.md").read_text() == "1. Water\n2. Mend\n"


def settings_for(provider: str) -> dict[str, str]:
    """Return the variables of the line that connects a provider."""
    line = next(line for line in README.splitlines() if line.startswith(f"EVERLOOP_PROVIDER={provider} "))
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


@pytest.mark.parametrize(
    ("provider", "where"),
    [("ollama", "127.0.0.1:11434"), ("openai", "api.openai.com"), ("anthropic", "api.anthropic.com")],
)
def test_the_settings_for_a_provider_lead_to_it(provider: str, where: str):
    made = make_provider(Config.load(env={**settings_for(provider), "EVERLOOP_HOME": os.environ["EVERLOOP_HOME"]}))
    endpoint = made._providers[0][0]._endpoint  # type: ignore[attr-defined] # nothing may connect there
    assert endpoint.where == where


async def test_the_settings_for_ollama_reach_its_server():
    async with FakeOpenAI() as server:
        server.reply("Hello.")
        settings: Any = {**settings_for("ollama"), "EVERLOOP_BASE_URL": server.base_url}
        assert (await everloop("run", "Say hello.", **settings)).out == "Hello.\n"
        assert server.requests[0].model == "qwen3:8b"


@pytest.mark.parametrize("target", ["chat", "test", "bench"])
def test_the_makefile_has_what_the_readme_names(target):
    assert f"make {target}" in README
    assert re.search(rf"^{target}: ", (ROOT / "Makefile").read_text(), re.M)


def test_the_measured_table_can_be_filled_in():
    assert re.search(
        r"<!-- bench:begin -->\n\| what \|.*\n\|---.*\n(\|.*\n)*<!-- bench:end -->",
        (ROOT / "docs" / "benchmarks.md").read_text(),
    )


def test_the_changelog_has_the_version_of_the_package():
    from everloop import __version__

    assert re.search(rf"^## {re.escape(__version__)} — \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
