"""codex and Claude Code, as installed from the npm registry, use the running server as their model.

They are set up as docs/clients.md says. Any connection beyond this machine fails at once: neither needs one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everloop.testing import call
from tests.support.drawing import drawn

from .environments import node_environment
from .processes import Served, bare_environment, until
from .test_page import MODEL, block

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(200, func_only=True)]
PICTURE = "data:image/png;base64," + base64.b64encode(drawn()).decode()
NOWHERE = "http://127.0.0.1:9"
OFFLINE = {"HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}
TOKEN = "EVERLOOP_TOKEN"


@dataclass
class Coder:
    """A person's coding agent in the project `folder`."""

    command: Sequence[str]
    folder: Path
    environment: dict[str, str]

    async def start(self, *arguments: str, **settings: str) -> Any:
        return await asyncio.create_subprocess_exec(
            *self.command, *arguments, cwd=self.folder, env={**self.environment, **settings},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def run(self, *arguments: str, code: int = 0, **settings: str) -> str:
        """Return its output; if the exit code is not 0, with its error messages."""
        process = await self.start(*arguments, **settings)
        try:
            out, err = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == code, (out + err).decode()
        return str((out + err if code else out).decode())

    async def is_stopped(self, server: Served, *arguments: str) -> None:
        """Interrupt it while the model answers, as with Ctrl-C."""
        process = await self.start(*arguments)
        try:
            await until(lambda: server.behind.requests)
            process.send_signal(signal.SIGINT)
            await until(lambda: server.behind.requests[-1].gone)
            await asyncio.wait_for(process.wait(), 30)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture(scope="module")
def packages() -> Path:
    return node_environment() / "node_modules"


@pytest.fixture
def codex(packages: Path, server: Served, tmp_path: Path) -> Coder:
    (program,) = packages.glob("@openai/codex-*/vendor/*/bin/codex")
    settings = block("model = ").replace(MODEL, server.model).replace("http://127.0.0.1:8002", server.url)
    home = tmp_path / "home" / ".codex"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(f'{settings}env_key = "{TOKEN}"\n')
    environment = bare_environment(tmp_path / "home", {**OFFLINE, TOKEN: server.token})
    return Coder([str(program), "exec", "--skip-git-repo-check"], project(tmp_path), environment)


@pytest.fixture
def claude(packages: Path, server: Served, tmp_path: Path) -> Coder:
    (program,) = packages.glob("@anthropic-ai/claude-code-*/claude")
    line = block("export ANTHROPIC").splitlines()[0].removeprefix("export ")
    settings = dict(pair.split("=", 1) for pair in line.split())
    assert settings == {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8002", "ANTHROPIC_AUTH_TOKEN": "none"}
    settings = {name: server.url if name.endswith("URL") else server.token for name in settings}
    environment = bare_environment(tmp_path / "home", {**OFFLINE, **settings})
    return Coder([str(program), "-p"], project(tmp_path), environment)


def project(folder: Path) -> Path:
    made = folder / "project"
    made.mkdir()
    (made / "picture.png").write_bytes(drawn())
    return made


def lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines()]


def pictures(server: Served) -> list[str]:
    contents = [message["content"] for message in server.asked if isinstance(message["content"], list)]
    parts = [part for content in contents for part in content]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


# ---------------------------------------------------------------------------------------------- codex


async def test_codex_runs_a_command_and_answers(codex: Coder, server: Served):
    server.behind.calls(call("exec_command", cmd="echo acted > canary.txt; echo seen"))
    server.behind.reply("Done.")
    said = lines(await codex.run("--json", "--dangerously-bypass-approvals-and-sandbox", "Write it."))
    assert (codex.folder / "canary.txt").read_text() == "acted\n"
    assert "seen" in server.asked[-1]["content"]
    items = [event["item"] for event in said if event["type"] == "item.completed"]
    assert (items[-1]["type"], items[-1]["text"]) == ("agent_message", "Done.")
    assert said[-1]["usage"]["input_tokens"] > 0


async def test_codex_continues_its_session(codex: Coder, server: Served):
    for prompt, answer in (("What needs doing?", "Water the beans."), ("And then?", "Rest.")):
        server.behind.reply(answer)
        resume = ["resume", "--last"] if prompt == "And then?" else []
        assert (await codex.run(*resume, prompt)).strip() == answer
    assert [message["content"] for message in server.asked[-3:]] == [
        "What needs doing?",
        "Water the beans.",
        "And then?",
    ]


async def test_codex_shows_a_picture(codex: Coder, server: Served):
    server.behind.reply("Red and blue.")
    assert (await codex.run("Which colours?", "-i", "picture.png")).strip() == "Red and blue."
    assert pictures(server) == [PICTURE]


async def test_codex_shows_why_it_was_refused(codex: Coder, server: Served):
    assert "unknown or revoked" in await codex.run("Hello.", code=1, **{TOKEN: "wrong"})
    assert server.behind.requests == []
    server.behind.fail(400)
    assert "the server's model call failed" in await codex.run("Hello.", code=1)


async def test_interrupting_codex_stops_the_model(codex: Coder, server: Served):
    server.behind.hang(50, after_chunks=2, text="one two three four")
    await codex.is_stopped(server, "Count.")


# ---------------------------------------------------------------------------------------------- Claude Code


async def test_claude_code_runs_its_tools_and_answers(claude: Coder, server: Served):
    canary = claude.folder / "canary.txt"
    server.behind.calls(
        call("Write", file_path=str(canary), content="acted"),
        call("Bash", command="echo seen", description="Say it"),
        call("Read", file_path=str(claude.folder / "picture.png")),
    )
    server.behind.reply("Done.")
    assert (await claude.run("Write it.", "--allowedTools", "Write,Bash,Read")).strip() == "Done."
    assert canary.read_text() == "acted"
    assert "seen" in [message["content"] for message in server.asked if message["role"] == "tool"]
    assert pictures(server) == [PICTURE]


async def test_claude_code_shows_the_answer_as_it_arrives(claude: Coder, server: Served):
    server.behind.reply("Water the beans, then rest.", token_delay=0.05)
    wanted = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")
    said = lines(await claude.run("What needs doing?", *wanted))
    events = [line["event"] for line in said if line["type"] == "stream_event"]
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == "Water the beans, then rest."
    assert len(pieces) >= 3
    assert (said[-1]["subtype"], said[-1]["result"]) == ("success", "Water the beans, then rest.")


async def test_claude_code_without_tools_leaves_them_to_the_agent(claude: Coder, server: Served):
    server.behind.calls(call("list_dir", path="."))
    server.behind.reply("Done.")
    assert (await claude.run("Look.", "--tools", "")).strip() == "Done."
    assert server.asked[-1]["role"] == "tool"


async def test_claude_code_continues_its_session(claude: Coder, server: Served):
    for prompt, answer in (("What needs doing?", "Water the beans."), ("And then?", "Rest.")):
        server.behind.reply(answer)
        resume = ["--continue"] if prompt == "And then?" else []
        assert (await claude.run(prompt, *resume)).strip() == answer
    said = [message["content"] for message in server.asked if message["role"] == "assistant"]
    assert said == ["Water the beans."]


async def test_claude_code_shows_why_it_was_refused(claude: Coder, server: Served):
    # By default it tries ten times, for minutes.
    wrong = {"ANTHROPIC_AUTH_TOKEN": "wrong", "CLAUDE_CODE_MAX_RETRIES": "0"}
    assert "unknown or revoked" in await claude.run("Hello.", code=1, **wrong)
    assert server.behind.requests == []


async def test_interrupting_claude_code_stops_the_model(claude: Coder, server: Served):
    server.behind.hang(50, after_chunks=2, text="one two three four")
    await claude.is_stopped(server, "Count.")
