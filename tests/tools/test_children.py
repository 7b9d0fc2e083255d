"""Child processes: what they inherit, and how they end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from everloop.sandbox import landlock
from everloop.tools.children import Child, beside_child

from ..support.commands import until


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def test_a_child_sees_nothing_of_our_environment(monkeypatch):
    monkeypatch.setenv("CANARY_KEY", "canary-value")
    ended = Child().run(python("import os; print(dict(os.environ), os.getcwd())"), most=10_000, seconds=20)
    assert ended.status == 0
    assert b"PATH" in ended.output
    assert b"canary" not in ended.output.lower()


def test_a_child_inherits_no_open_file(tmp_path):
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        ended = Child().run(python("import os; print(sorted(os.listdir('/proc/self/fd')))"), most=1_000, seconds=20)
    assert eval(ended.output) == ["0", "1", "2", "3"]  # the last one is the folder being listed


def test_too_much_output_ends_a_child():
    ended = Child().run(python("while True: print('x' * 1000)"), most=10_000, seconds=20)
    assert ended.cut
    assert not ended.late
    assert len(ended.output) == 10_000


@pytest.mark.parametrize("program", ["while True: pass", "import os\nos.close(1)\nos.close(2)\nwhile True: pass"])
def test_a_child_that_times_out_is_ended_and_its_output_kept(program):
    start = time.monotonic()
    ended = Child().run(python(f"print('begun', flush=True)\n{program}"), most=1_000, seconds=2)
    assert (ended.late, ended.status, ended.output) == (True, -9, b"begun\n")
    assert time.monotonic() - start < 20


def test_standard_error_is_kept_in_part():
    ended = Child().run(python("import sys; sys.stderr.write('e' * 100_000); sys.exit(7)"), most=10, seconds=20)
    assert (ended.status, ended.output) == (7, b"")
    assert 1_000 < len(ended.errors) < 10_000


def test_a_child_stopped_before_it_started_does_nothing(tmp_path):
    child = Child()
    child.stop()
    ended = child.run(python(f"import time; time.sleep(5); open({str(tmp_path / 'x')!r}, 'w')"), most=10, seconds=20)
    assert ended.status == -9
    assert not (tmp_path / "x").exists()


async def test_a_cancelled_wait_ends_the_child(tmp_path):
    place = tmp_path / "pid"
    program = f"import os, time\nwith open({str(place)!r}, 'w') as file: file.write(str(os.getpid()))\ntime.sleep(60)"
    task = asyncio.create_task(beside_child(lambda child: child.run(python(program), most=10, seconds=60)))
    while not (place.exists() and place.read_text()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not Path(f"/proc/{place.read_text()}").exists())


# --- read-only, by Landlock ----------------------------------------------------------------------------------------


def test_a_confined_child_reads_only_its_folder_and_the_parent_stays_unconfined(tmp_path):
    assert landlock.available(), "this kernel has no Landlock"
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.txt").write_text(f"text {folder.name}")
    (inside / "link").symlink_to(outside)
    descriptor = os.open(inside, os.O_RDONLY)
    try:
        for path in ("a.txt", "link/a.txt", str(outside / "a.txt"), "/etc/passwd", "/proc/self/environ"):
            ended = Child().run(
                ["/bin/cat", path], cwd=f"/proc/self/fd/{descriptor}", most=1_000, seconds=20,
                confine=partial(landlock.read_only, descriptor, os.path.realpath("/bin/cat")),
            )  # fmt: skip
            assert ended.output == (b"text inside" if path == "a.txt" else b"")
        ended = Child().run(
            ["/bin/touch", "new", "a.txt", str(outside / "new")], cwd=str(inside), most=1_000, seconds=20,
            confine=partial(landlock.read_only, descriptor, os.path.realpath("/bin/touch")),
        )  # fmt: skip
        assert ended.status == 1
    finally:
        os.close(descriptor)
    assert sorted(os.listdir(inside)) == ["a.txt", "link"]
    assert os.listdir(outside) == ["a.txt"]
    assert (outside / "a.txt").read_text() == "text outside"
    assert subprocess.run(["/bin/cat", outside / "a.txt"], capture_output=True, check=True).stdout == b"text outside"


def test_a_child_that_cannot_be_confined_is_not_started(tmp_path):
    def confine() -> None:
        raise OSError(1, "no")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no"):
        Child().run(["/bin/touch", str(tmp_path / "x")], most=10, seconds=20, confine=confine)
    assert not (tmp_path / "x").exists()
    assert set(threading.enumerate()) <= before  # a child of an earlier test may have ended meanwhile
