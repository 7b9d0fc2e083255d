"""The running server keeps what its OpenAPI document promises: schemathesis makes requests up and looks at answers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.clients.environments import python_environment
from tests.clients.processes import bare_environment, serving

FOLDER = Path(__file__).parent / "contract"
EXAMPLES = 12  # an operation and a phase


@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing_that_the_document_does_not_say(tmp_path):
    command = python_environment("schemathesis").parent / "schemathesis"
    # Byte code is kept with its environment: to compile it takes longer than all requests.
    settings = {"PYTHONPATH": str(FOLDER), "PYTHONPYCACHEPREFIX": str(command.parents[1] / "pycache")}
    async with serving(tmp_path / "server") as server:
        process = await asyncio.create_subprocess_exec(
            command, "--no-color", "--config-file", FOLDER / "schemathesis.toml", "run", f"{server.url}/openapi.json",
            "-H", f"Authorization: Bearer {server.token}",
            "--max-examples", str(EXAMPLES), "--generation-deterministic",
            "--exclude-operation-id-regex", "^page_",  # tests of their own; a feed does not end
            cwd=tmp_path, env=bare_environment(tmp_path / "home", settings),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(200):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()
        assert re.search(r"\b21 selected / [0-9]+ total", said.decode())
        assert len(server.behind.requests) > 20  # many of its requests were answered by the model
