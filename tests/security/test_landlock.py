"""What the kernel's Landlock does not cover, and commands that attack the launcher."""

from __future__ import annotations

from everloop.config import Config
from everloop.testing import call
from tests.support.commands import until

from .scene import canary, running

LANDLOCK = Config(sandbox="landlock")


async def test_times_of_files_outside_are_not_changed_and_those_inside_are(scene):
    secret, own = scene.outside / "secret.txt", scene.workspace / "own"
    before = secret.stat().st_mtime_ns, scene.outside.stat().st_mtime_ns
    own.write_text("")
    (scene.workspace / "link").symlink_to(secret)
    targets = [str(secret), str(scene.outside), "link", "/proc/self/cwd/../outside/secret.txt"]
    await scene.run(
        call("exec", command=f"for path in {' '.join(targets)}; do touch -d 2001-01-01 $path; touch $path; done; true"),
        call(
            "exec",
            command=f"python3 -c 'import os\nfor p in {targets}:\n try: os.utime(p, (1, 1))\n except OSError: 0'",
        ),
        call(
            "exec",
            command="touch -d @1000000000 own; touch -h -d @5 link; python3 -c 'import os; os.utime(\".\", (7, 7))'",
        ),
        config=LANDLOCK,
    )
    assert (secret.stat().st_mtime_ns, scene.outside.stat().st_mtime_ns) == before
    assert own.stat().st_mtime == 1_000_000_000
    assert (scene.workspace / "link").lstat().st_mtime == 5
    assert scene.workspace.stat().st_mtime == 7


async def test_no_memory_outlives_a_command(scene):
    made = await scene.run(
        call("exec", command="ipcmk -M 4096; ipcmk -S 1; ipcmk -Q; true"),
        config=LANDLOCK,
    )
    assert "id:" not in made.results[0]


async def test_a_command_cannot_bring_down_the_launcher_and_outlive_it(scene, monkeypatch):
    monkeypatch.setattr("everloop.sandbox.resources.parent_group", lambda: None)  # which would also end them
    name = canary("survivor")
    wild = "import ctypes; s = ctypes.CDLL(None).syscall; s({number}, ctypes.c_ulong(2**64 - 1), 511)"
    calls = "; ".join(wild.format(number=number) for number in (90, 52))
    await scene.run(
        call("exec", command=f"setsid bash -c 'sleep 60; : {name}' & python3 -c '{calls}'; sleep 0.2", timeout=20),
        config=LANDLOCK,
    )
    await until(lambda: not running(name))
