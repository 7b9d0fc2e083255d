"""The engine's child as the operating system sees it: what ends it, what can reach it, what it receives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everloop
from everloop.providers.base import ProviderError
from everloop.providers.local.engine import Engine, Settings

from .real import TINY, weights
from .real import found_tiny as found_tiny
from .test_engine import SHORT, alive, gone

pytestmark = [pytest.mark.timeout(300), pytest.mark.may_block]

PROGRAM = [sys.executable, "-m", "tests.providers.local.engine_program"]
SECRET = "canary-5f1c9a"


@contextlib.contextmanager
def program(window: int = 512) -> Any:
    process = subprocess.Popen([*PROGRAM, str(weights(TINY)), str(window)], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ended(process: subprocess.Popen[bytes]) -> int:
    """Return how a process ends by itself."""
    try:
        return process.wait(30)
    finally:
        process.kill()
        process.wait()


def heard(process: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


@contextlib.asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[tuple[Engine, int]]:
    made = Engine(Settings(weights(TINY), **{"window": 512, "slots": 1, "threads": 1, **settings}))
    try:
        await made.start()
        assert made.pid is not None
        yield made, made.pid
    finally:
        await made.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ------------------------------------------------------------------------------------------------------ ends


async def test_a_child_ends_at_once_when_its_parent_is_killed():
    with program() as process:
        pid = heard(process)["pid"]
        assert "delta" in heard(process)  # it is in the middle of an answer that takes many seconds
        process.kill()
        assert await gone(pid, 5)


async def test_even_a_stopped_child_ends_with_its_parent():
    with program() as process:
        pid = heard(process)["pid"]
        os.kill(pid, signal.SIGSTOP)
        process.kill()
        try:
            assert await gone(pid, 20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_a_child_ends_when_its_parent_is_killed_while_the_model_loads():
    with program() as process:
        while not (found := children_of(process.pid)):
            await asyncio.sleep(0.005)
        process.kill()
        assert await gone(found[0], 5)


async def test_a_child_ends_when_its_input_does():
    read, write = os.pipe()
    command = [sys.executable, "-m", "everloop.providers.local.child", str(os.getpid())]
    process = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL)
    os.close(read)
    os.close(write)
    assert ended(process) == 0


async def test_a_child_with_another_parent_does_nothing():
    command = [sys.executable, "-m", "everloop.providers.local.child", "1"]
    read, write = os.pipe()  # never prints and never ends
    process = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL)
    try:
        assert ended(process) == 0
    finally:
        os.close(read)
        os.close(write)


async def test_closing_while_the_model_loads_leaves_no_process():
    made = Engine(Settings(weights(TINY), window=512))
    starting = asyncio.create_task(made.start())
    while not (found := [pid for pid in children_of(os.getpid()) if "local.child" in _command(pid)]):
        await asyncio.sleep(0.005)
    await made.close()
    assert not any(map(alive, found))
    with pytest.raises((ProviderError, asyncio.CancelledError)):
        await starting


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


async def test_the_sockets_of_killed_children_are_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with started() as (made, pid):
        os.kill(pid, signal.SIGKILL)
        while made.pid is not None:  # until it is detected
            await asyncio.sleep(0.01)
        left = set(tmp_path.glob("everloop-engine-*"))
        assert left
        await made.complete(SHORT)
        assert not left & set(tmp_path.glob("everloop-engine-*"))


# ------------------------------------------------------------------------------------------------------ reach


def _listening_ports(pid: int) -> list[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6", "udp", "udp6")]
    lines = [line for table in tables for line in table.splitlines()[1:]]
    return [line for line in lines if f"socket:[{line.split()[9]}]" in inodes]


async def test_the_model_opens_no_port():
    async with started() as (_, pid):
        assert _listening_ports(pid) == []


async def test_other_processes_reach_neither_the_model_nor_its_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with started() as (made, _):
        await made.complete({**SHORT, "prompt": f"The word is {SECRET}."})
        [folder] = tmp_path.glob("everloop-engine-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        # Even we, who may enter the folder, get nothing without the key.
        for path in ("/slots", "/props", "/v1/models/../slots", "/metrics"):
            assert SECRET.encode() not in await asyncio.to_thread(_get, folder / "s.sock", f"GET {path}")
        body = json.dumps({"prompt": "Hello", "n_predict": 3})
        answer = await asyncio.to_thread(_get, folder / "s.sock", "POST /completion", body)
        assert b" 401 " in answer.split(b"\r\n")[0]
        assert b"content" not in answer.partition(b"\r\n\r\n")[2]


def _get(path: Path, what: str, body: str = "") -> bytes:
    here = os.getcwd()
    os.chdir(path.parent)  # the path may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path.name)
            client.sendall(f"{what} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            found = b""
            while data := client.recv(65_536):
                found += data
            return found
    finally:
        os.chdir(here)


async def test_the_child_gets_no_secrets(monkeypatch):
    monkeypatch.setenv("EVERLOOP_API_KEY", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    async with started() as (_, pid):
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


async def test_when_memory_is_short_the_kernel_kills_the_model_and_not_the_agent():
    async with started() as (_, pid):
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


# ------------------------------------------------------------------------------------------------------ no model


async def test_weights_that_cannot_be_loaded_are_one_clear_line_and_no_process(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(weights(TINY).read_bytes()[:3_000_000])
    made = Engine(Settings(broken, window=512))
    with pytest.raises(ProviderError) as caught:
        await made.start()
    assert not caught.value.retryable
    assert "\n" not in str(caught.value)
    assert made.pid is None
    await made.close()


async def test_too_little_memory_is_reported_before_anything_is_started():
    made = Engine(Settings(weights(TINY), window=50_000_000))
    with pytest.raises(ProviderError) as caught:
        await made.start()
    assert not caught.value.retryable
    assert "GB" in str(caught.value)
    assert made.pid is None
    await made.close()


def _without_llama(tmp_path: Path) -> dict[str, str]:
    """Return an environment with only the packages that the engine imports."""
    (tmp_path / "few").mkdir()
    found = msgspec.__file__
    assert found is not None
    (tmp_path / "few" / "msgspec").symlink_to(Path(found).parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(everloop.__file__).parents[1]), str(tmp_path / "few")]),
    }


def _error_of(env: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-S", "-m", "tests.providers.local.engine_program", str(weights(TINY)), "512"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_without_llama_cpp_the_error_says_what_to_do(tmp_path):
    error = _error_of(_without_llama(tmp_path))
    assert 'pip install "everloop[local]"' in error["error"]
    assert not error["retryable"]


async def test_a_llama_cpp_that_cannot_be_imported_counts_as_missing(tmp_path):
    env = _without_llama(tmp_path)
    (tmp_path / "few" / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1 is not there')\n")
    error = _error_of(env)
    assert "everloop[local]" in error["error"]
    assert "libgomp.so.1" in error["error"]
