"""Programs of the command line that are clients: llm and aider, run as a person runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.testing import call

from .environments import python_environment
from .processes import Served, bare_environment, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60, func_only=True)]
EDIT = """I change it.

hello.py
```python
<<<<<<< SEARCH
print("hello")
=======
print("goodbye")
>>>>>>> REPLACE
```
"""


@pytest.fixture
def llm() -> Path:
    return python_environment("llm")


@pytest.fixture
def aider() -> Path:
    return python_environment("aider")


@contextlib.asynccontextmanager
async def started(*command: str | Path, folder: Path, **settings: str) -> AsyncIterator[Any]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=bare_environment(folder / "home", settings),
        stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def output(*command: str | Path, folder: Path, **settings: str) -> str:
    async with started(*command, folder=folder, **settings) as process:
        out, err = await asyncio.wait_for(process.communicate(), 50)
        assert process.returncode == 0, err.decode()
        return str(out.decode())


def write_llm_settings(folder: Path, server: Served) -> None:
    """As docs/clients.md says."""
    settings = (
        f"- model_id: everloop\n  model_name: {server.model}\n  api_base: {server.url}/v1\n  api_key_name: everloop\n"
    )
    (folder / "home" / "extra-openai-models.yaml").write_text(settings)
    (folder / "home" / "keys.json").write_text(json.dumps({"everloop": server.token}))


async def test_llm_prints_the_answer(llm, server: Served, tmp_path):
    write_llm_settings(tmp_path, server)
    server.behind.calls(call("list_dir", path="."))
    server.behind.reply("Nothing is there.")
    said = await output(llm, "-m", "llm", "-m", "everloop", "What is there?", folder=tmp_path)
    assert said.strip() == "Nothing is there."


async def test_a_person_who_interrupts_llm_stops_the_model(llm, server: Served, tmp_path):
    write_llm_settings(tmp_path, server)
    server.behind.hang(50, after_chunks=2, text="one two three four")
    async with started(llm, "-u", "-m", "llm", "-m", "everloop", "Count.", folder=tmp_path) as process:
        assert (await asyncio.wait_for(process.stdout.read(3), 40)) == b"one"
        process.send_signal(signal.SIGINT)
        await until(lambda: server.behind.requests[-1].gone)
        await asyncio.wait_for(process.wait(), 10)


async def test_aider_edits_a_file(aider, server: Served, tmp_path):
    (tmp_path / "hello.py").write_text('print("hello")\n')
    keep_aider_from_asking_for_prices(tmp_path / "home", server.model)
    server.behind.reply(EDIT)
    await output(
        aider, "-m", "aider", "--model", f"openai/{server.model}", "--edit-format", "diff", "--no-git",
        "--no-show-model-warnings", "--no-check-update", "--no-show-release-notes", "--analytics-disable",
        "--yes-always", "--map-tokens", "0", "--message", "Say goodbye.", "hello.py",
        folder=tmp_path, OPENAI_API_BASE=f"{server.url}/v1", OPENAI_API_KEY=server.token,
    )  # fmt: skip
    assert (tmp_path / "hello.py").read_text() == 'print("goodbye")\n'
    assert len(server.behind.requests) == 1


def keep_aider_from_asking_for_prices(home: Path, model: str) -> None:
    cache = home / ".aider" / "caches" / "model_prices_and_context_window.json"
    cache.parent.mkdir(parents=True)
    facts = {"max_tokens": 4096, "max_input_tokens": 32_000, "max_output_tokens": 4096, "litellm_provider": "openai"}
    cache.write_text(json.dumps({model: facts, f"openai/{model}": facts}))
