"""The examples of docs/clients.md are run as written, except for the server's port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from .environments import ROOT, node_environment, python_environment
from .processes import Served, bare_environment, serving, until

pytestmark = pytest.mark.timeout(200, func_only=True)
in_session = pytest.mark.asyncio(loop_scope="session")
PAGE = (ROOT / "docs" / "clients.md").read_text()
MODEL = "qwen3:8b"
NAMED = {name: text for text, name in re.findall(r"^```\w+\n((?:#|//) (\w+\.\w+)\n.*?)^```$", PAGE, re.M | re.S)}
ENVIRONMENTS = {
    "ask_openai.py": "openai", "ask_langchain.py": "langchain-openai", "ask_litellm.py": "litellm",
    "ask_responses.py": "openai", "ask_anthropic.py": "anthropic", "ask_ollama.py": "ollama",
    "ask_openai.mjs": "node", "ask_ai.mjs": "node",
}  # fmt: skip
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def documented(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A server without tokens, as at the start of the page."""
    async with serving(tmp_path_factory.mktemp("documented"), MODEL, token="none") as served:
        yield served


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> Path:
    """The environment of an example, made before the test's time begins."""
    return node_environment() if request.param == "node" else python_environment(request.param)


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


async def run(*command: str | Path, folder: Path, **settings: str) -> str:
    async with started(*command, folder=folder, **settings) as process:
        out, err = await asyncio.wait_for(process.communicate(), 150)
        assert process.returncode == 0, err.decode()
        return str(out.decode())


def here(text: str, server: Served) -> str:
    assert MODEL in text
    return text.replace("http://127.0.0.1:8002", server.url)


def block(start: str) -> str:
    (found,) = re.findall(rf"^```\w+\n({re.escape(start)}.*?)^```$", PAGE, re.M | re.S)
    return str(found)


def test_every_program_of_the_page_has_an_environment():
    assert NAMED.keys() == ENVIRONMENTS.keys()


@in_session
@pytest.mark.parametrize(("name", "installed"), ENVIRONMENTS.items(), indirect=["installed"], ids=ENVIRONMENTS)
async def test_the_program_prints_the_answer(name: str, installed: Path, documented: Served, tmp_path: Path):
    documented.behind.reply("Water the beans.")
    (tmp_path / name).write_text(here(NAMED[name], documented))
    if name.endswith(".mjs"):
        (tmp_path / "node_modules").symlink_to(installed / "node_modules")
    said = await run("node" if name.endswith(".mjs") else installed, name, folder=tmp_path)
    assert said.strip() == "Water the beans."


@pytest.fixture
def llm(documented: Served, tmp_path: Path) -> Path:
    """The folder of a person who has set llm up as the page says."""
    settings = here(block("- model_id"), documented)
    (tmp_path / "home" / "extra-openai-models.yaml").write_text(settings)
    return tmp_path


@in_session
@pytest.mark.parametrize("installed", ["llm"], indirect=True)
async def test_llm_prints_the_answer(installed: Path, documented: Served, llm: Path):
    documented.behind.reply("Water the beans.")
    said = await run("sh", "-c", block("llm -m"), folder=llm, PATH=f"{installed.parent}:/usr/bin:/bin")
    assert said.strip() == "Water the beans."


@in_session
@pytest.mark.parametrize("installed", ["llm"], indirect=True)
async def test_interrupting_llm_stops_the_model(installed: Path, documented: Served, llm: Path):
    documented.behind.hang(50, after_chunks=2, text="one two three four")
    async with started(installed, "-u", "-m", "llm", "-m", "everloop", "Count.", folder=llm) as process:
        assert (await asyncio.wait_for(process.stdout.read(3), 40)) == b"one"
        process.send_signal(signal.SIGINT)
        await until(lambda: documented.behind.requests[-1].gone)
        await asyncio.wait_for(process.wait(), 30)


@in_session
@pytest.mark.parametrize("installed", ["aider"], indirect=True)
async def test_aider_edits_a_file(installed: Path, documented: Served, tmp_path: Path):
    documented.behind.reply(EDIT)
    (tmp_path / "hello.py").write_text('print("hello")\n')
    keep_aider_from_asking_for_prices(tmp_path / "home")
    settings = {
        "PATH": f"{installed.parent}:/usr/bin:/bin", "AIDER_EDIT_FORMAT": "diff", "AIDER_GIT": "false",
        "AIDER_CHECK_UPDATE": "false", "AIDER_ANALYTICS_DISABLE": "true", "AIDER_YES_ALWAYS": "true",
        "AIDER_SHOW_RELEASE_NOTES": "false", "AIDER_SHOW_MODEL_WARNINGS": "false",
    }  # fmt: skip
    await run("sh", "-c", here(block("export OPENAI"), documented), folder=tmp_path, **settings)
    assert (tmp_path / "hello.py").read_text() == 'print("goodbye")\n'


def keep_aider_from_asking_for_prices(home: Path) -> None:
    cache = home / ".aider" / "caches" / "model_prices_and_context_window.json"
    cache.parent.mkdir(parents=True)
    facts = {"max_tokens": 4096, "max_input_tokens": 32_000, "max_output_tokens": 4096, "litellm_provider": "openai"}
    cache.write_text(json.dumps({MODEL: facts, f"openai/{MODEL}": facts}))


def test_the_readmes_example_is_on_the_page():
    assert f"```python\n{NAMED['ask_openai.py']}```" in (ROOT / "README.md").read_text()
