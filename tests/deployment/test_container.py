"""Commands of an agent in a container that cannot make namespaces: Landlock confines them, without being configured."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.testing import FakeOpenAI, call

from ..support.commands import COMMAND, Done, environment

# No namespace can be made inside, as under Docker's default filter.
CONTAINER = ["bwrap", "--unshare-user", "--disable-userns", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
CANARY = "canary-of-the-home"


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


@pytest.fixture
def container(tmp_path: Path) -> list[str]:
    if shutil.which("bwrap") is None or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make such a container")
    return [*CONTAINER, "--bind", str(tmp_path), str(tmp_path)]  # which may be in /dev/shm


async def inside(container: list[str], *arguments: str, env: dict[str, str]) -> Done:
    process = await asyncio.create_subprocess_exec(
        *container, *COMMAND, *arguments, env=env, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(50):
        out, err = await process.communicate()
    return Done(process.returncode or 0, out.decode(), err.decode())


@pytest.mark.platform("needs user namespaces to take them away")
async def test_in_a_container_without_namespaces_landlock_confines_commands(
    container: list[str], fake: FakeOpenAI, tmp_path: Path
):
    home, workspace = tmp_path / "state", tmp_path / "state" / "workspace"
    workspace.mkdir(parents=True)
    (home / "secret").write_text(CANARY)
    env = environment(fake, EVERLOOP_HOME=str(home), EVERLOOP_WORKSPACE=str(workspace), PGPASSWORD=CANARY)
    looked = await inside(container, "doctor", env=env)
    assert "landlock works here" in looked.out, looked.out
    fake.calls(call("exec", command=f"cat {home}/secret; env; cat /proc/*/environ; echo made > made.txt; echo ran"))
    fake.reply("finished")
    fake.reply("finished")
    done = await inside(container, "run", "go", env=env)
    assert done.status == 0, done.err
    assert await asyncio.to_thread((workspace / "made.txt").read_text) == "made\n"
    seen = b"".join(request.raw for request in fake.requests).decode()
    assert "ran" in seen
    assert CANARY not in seen
