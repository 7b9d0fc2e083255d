"""Real clients and the real server as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop.testing.openai_server import FakeOpenAI
from tests.support.waiting import until as until

from .environments import node_environment, python_environment, source_environment

SCRIPTS = Path(__file__).parent / "scripts"
COMMAND = (sys.executable, "-m", "everloop")
ADDRESS = re.compile(rb"everloop: serving on (http://\S+)")
# For each client, its environment and its script.
CLIENTS = {
    "openai": ("openai", "run_openai.py"),
    "openai-node": ("node", "run_openai.mjs"),
    "ai-sdk": ("node", "run_ai.mjs"),
    "llm": ("llm", "run_llm.py"),
    "litellm": ("litellm", "run_litellm.py"),
    "langchain": ("langchain-openai", "run_langchain.py"),
}


# Clients of the other APIs, and their scripts' arguments.
OTHER_CLIENTS = {
    "responses": ("openai", "run_responses.py"),
    "responses-node": ("node", "run_responses.mjs"),
    "litellm-anthropic": ("litellm", "run_litellm.py", "anthropic"),
    "litellm-ollama": ("litellm", "run_litellm.py", "ollama_chat"),
    "anthropic": ("anthropic", "run_anthropic.py"),
    "ollama": ("ollama", "run_ollama.py"),
    "openai-agents": ("openai-agents", "run_agents.py"),
    "pydantic-ai": ("pydantic-ai", "run_pydantic.py"),
    "ai-sdk-openai": ("node", "run_ai.mjs", "openai"),
}


def bare_environment(home: Path, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """A person's environment with nothing set; no client reports home or fetches anything on its own."""
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it asks a host for prices when it is imported
        "AI_SDK_LOG_WARNINGS": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LLM_USER_PATH": str(home),
        **(settings or {}),
    }


class Client:
    """A client's script, which carries out one action after another on command."""

    def __init__(self, name: str, folder: Path) -> None:
        environment, script, *arguments = {**CLIENTS, **OTHER_CLIENTS}[name]
        self.name = name
        self._errors = folder / "stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*_command(environment, script, folder), *arguments], cwd=folder, env=bare_environment(folder / "home"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    async def does(self, action: str, server: Served, **asked: Any) -> Any:
        """Return the result of an action; the client's own exceptions are reported by name."""
        command = {"do": action, "base_url": f"{server.url}/v1", "key": server.token, "model": server.model, **asked}
        return await asyncio.wait_for(asyncio.to_thread(self._ask, command), 150)

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended: {self._errors.read_text()}"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _command(environment: str, script: str, folder: Path) -> Sequence[str]:
    if environment != "node":
        return [str(python_environment(environment)), str(SCRIPTS / script)]
    # Node.js looks for packages beside the script.
    for name in ("driver.mjs", script):
        shutil.copy(SCRIPTS / name, folder)
    (folder / "node_modules").symlink_to(node_environment() / "node_modules")
    return ["node", str(folder / script)]


@dataclass
class Served:
    """A running server, the model behind it, and the valid token."""

    url: str
    token: str
    model: str
    behind: FakeOpenAI
    environment: dict[str, str] = field(repr=False)

    @property
    def asked(self) -> list[Any]:
        """Return the messages of the last request to the model."""
        body = self.behind.requests[-1].body
        assert body is not None
        return list(body["messages"])


@contextlib.asynccontextmanager
async def serving(folder: Path, model: str = "tools-0x0", token: str = "") -> AsyncIterator[Served]:
    """`everloop serve` on a free port with a scripted model, and with a token unless one is given."""
    async with FakeOpenAI() as behind:
        workspace = folder / "workspace"
        workspace.mkdir(parents=True)
        environment = bare_environment(
            folder / "home",
            {
                "EVERLOOP_HOME": str(folder / "everloop"),
                "EVERLOOP_WORKSPACE": str(workspace),
                "EVERLOOP_BASE_URL": behind.base_url,
                "EVERLOOP_MODEL": model,
                **source_environment(),
            },
        )
        token = token or await _new_token(environment)
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "serve", "--port", "0", env=environment, cwd=workspace, stderr=asyncio.subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            url = await asyncio.wait_for(_address(process.stderr), 40)
            drain = asyncio.create_task(process.stderr.read())  # so that its log never fills the pipe
            yield Served(url, token, model, behind, environment)
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)
            assert b"Traceback" not in await drain
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _new_token(environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "token", "add", "clients", env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 0, err.decode()
    return out.decode().split()[0]


async def _address(lines: asyncio.StreamReader) -> str:
    seen = b""
    while line := await lines.readline():
        if found := ADDRESS.search(line):
            return found[1].decode()
        seen += line
    raise AssertionError(f"the server did not start: {seen.decode()}")
