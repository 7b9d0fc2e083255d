"""The web page in Firefox: what a person does first, from the one-time link to the palette."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from everloop.config import Rule

from ..clients.environments import BROWSERS, node_environment
from .browser import link
from .serving import call, serving

pytestmark = pytest.mark.timeout(180)
SCRIPT = Path(__file__).parent / "firefox.mjs"
ASK = (Rule(do="ask", tool="write_file", why="files are dear"),)
WORDS = [f"word{number} " for number in range(60)]


@pytest.fixture(scope="module")
def puppeteer() -> Path:
    """What drives the browser, made before the time of the test begins."""
    folder = node_environment(BROWSERS) / "node_modules" / "puppeteer-core"
    return folder / "lib" / "esm" / "puppeteer" / "puppeteer-core.js"


async def test_a_person_logs_in_sends_reloads_approves_and_opens_other_views(puppeteer: Path, tmp_path: Path):
    firefox = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
    if firefox is None:
        pytest.skip("needs firefox-esr (scripts/system.sh dev)")
    async with serving(tmp_path, policy=ASK) as server:
        server.fake.reply("".join(WORDS), tokens=WORDS, token_delay=1.5)
        streamed = server.fake.replies[-1]
        server.fake.calls(call("write_file", path="plan.md", content="# Plan\n"))
        server.fake.reply("It is written.")
        profile = tmp_path / "profile"
        profile.mkdir()
        process = await asyncio.create_subprocess_exec(
            "node", SCRIPT, puppeteer, firefox, await link(server), profile,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        told = []
        try:
            async with asyncio.timeout(150):
                assert process.stdout is not None
                assert process.stderr is not None
                while line := (await process.stdout.readline()).decode().rstrip("\n"):
                    told.append(line)
                    if line == "reloaded":
                        streamed.token_delay = 0.0  # the rest comes at once
                failed = (await process.stderr.read()).decode()
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        assert told == [
            "logged in: ",
            "streamed: true",
            "reloaded",
            f"answer: {''.join(WORDS).strip()}",
            "approved",
            "palette: #/new",
            "errors: []",
        ], failed
        assert (server.owners.config.workspace / "plan.md").read_text() == "# Plan\n"
        keys = [info.key for info in await server.store.sessions("me", 10)]
        assert len(keys) == 1
