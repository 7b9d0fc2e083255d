"""Path attacks on every file tool. The tests check the canary, never the wording of a message.

Each attack goes through the whole loop with its policy, and then directly to the tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from everloop.sandbox.reach import OutOfReach, Reach
from everloop.testing import call
from everloop.tools.files import find
from tests.support.desk import Desk

from .scene import Scene, canary

ROOT = Path(__file__).parents[2]
MARK = canary("overwritten")  # what the attacker writes
# Each operation on a file and on a folder. The text that edit_file looks for stands in every secret.
FILE: dict[str, dict[str, Any]] = {
    "read_file": {},
    "write_file": {"content": MARK},
    "edit_file": {"old_text": "-", "new_text": MARK, "replace_all": True},
    "grep": {"pattern": ".", "context": 2},
}
FOLDER: dict[str, dict[str, Any]] = {"list_dir": {}, "find_files": {"pattern": "*"}, "grep": {"pattern": "."}}


class Outside:
    """The folder next to the workspace, whose contents must be neither read nor changed."""

    def __init__(self, scene: Scene, folder: Path | None = None) -> None:
        self.folder = folder or scene.outside
        self.folder.mkdir(exist_ok=True)
        self.secret, self.name = canary("secret"), canary("name")
        (self.folder / "secret.txt").write_text(self.secret)
        (self.folder / self.name).write_text(self.secret)
        self.before = self.state()

    def state(self) -> dict[str, tuple[bytes, int, int]]:
        found = {}
        for place in sorted(self.folder.rglob("*")):
            info = place.lstat()
            content = place.read_bytes() if stat.S_ISREG(info.st_mode) else b""
            found[str(place)] = (content, info.st_ino, info.st_mtime_ns)
        return found

    def check(self, seen: str) -> None:
        assert self.secret not in seen, "a secret was read"
        assert self.name not in seen, "a folder was listed"
        assert self.state() == self.before, "something outside was changed"


@pytest.fixture
def outside(scene: Scene) -> Outside:
    return Outside(scene)


async def results_of(scene: Scene, calls: list[Any], **options: Any) -> list[str]:
    """Return the results of one round of calls through the whole loop."""
    attack = await scene.run(calls, **options)
    assert len(attack.results) >= len(calls)  # the session's earlier ones come first
    return attack.results[-len(calls) :]


async def attack(scene: Scene, name: str, paths: Iterable[str], more: dict[str, Any]) -> str:
    """Return everything the model sees when it tries a tool on each path, through the loop and then directly."""
    tried = list(paths)
    assert len(tried) >= 1
    through_the_loop = await results_of(scene, [call(name, path=path, **more) for path in tried])
    desk = Desk(scene.workspace)
    results = [(await desk.run(name, path=path, **more)).content for path in tried]
    return "\n".join([*through_the_loop, *results])


Operation = tuple[str, dict[str, Any], str]  # a tool, its further arguments, and what of a folder it is tried on
OPERATIONS: list[Operation] = [(name, more, "/secret.txt") for name, more in FILE.items()]
OPERATIONS += [(name, more, "") for name, more in FOLDER.items()]


@pytest.fixture(params=OPERATIONS, ids=lambda each: f"{each[0]}{' of a file' if each[2] else ''}")
def operation(request: pytest.FixtureRequest) -> Operation:
    found: Operation = request.param
    return found


async def test_an_attack_that_succeeds_is_noticed(scene, outside, operation):
    name, more, leaf = operation
    seen = (await Desk(scene.workspace, restricted=False).run(name, path=f"../outside{leaf}", **more)).content
    with pytest.raises(AssertionError):
        outside.check(seen)


# ---------------------------------------------------------------------------------------------- path traversal


def spellings(scene: Scene) -> list[str]:
    """Ways to spell the path of the outside folder."""
    there, here, up = str(scene.outside), str(scene.workspace), "../outside"
    relative = os.path.relpath(there, os.environ["HOME"])
    return [
        up, f"./{up}", f"{up}/", f"{up}//", f"{up}/.", ".././outside/./", "..//outside", ".//..//outside",
        f"sub/../{up}", f"sub/nothing/../../{up}", f"sub/deeper/../../{up}", "sub/" * 60 + "../" * 60 + up,
        "../" * 60 + there[1:], there, f"/{there}", f"//{there}", f"/.{there}", f"/../..{there}", f"{here}/{up}",
        f"{here}/sub/../{up}",
        f"{here}/../workspace/{up}", f"~/{relative}", f"~//{relative}", f"~/./{relative}", f" {up}",
        f"{up} ", f"\t{there}",
        "%2e%2e/outside", "..%2foutside", "%2e%2e%2foutside", "..%252foutside", "%c0%ae%c0%ae/outside",
        "..\\outside", "..\\/outside", "．．/outside", "..∕outside", f"{up}\0", f"sub\0/../{up}", f"\0{there}",
        "\udc2e\udc2e/outside", "\ud800/../../outside", f"\ud800{there}", f"file://{there}", f"file:{up}",
        f"/proc/self/root{there}", f"/proc/self/cwd/{os.path.relpath(there)}", f"/proc/self/cwd/{up}",
        f"/proc/{os.getpid()}/root{there}", f"/proc/{os.getpid()}/cwd/{up}", f"/proc/thread-self/root{there}",
        f"/proc/self/task/{os.getpid()}/root{there}", "$HOME/../scene/outside", "~root/../" + there[1:],
        "*/../../outside",
        f"{here}-evil/../outside", "..;/outside", "....//outside", "..//..//" + there[1:],
    ]  # fmt: skip


async def test_path_traversal_in_every_spelling(scene, outside, operation):
    name, more, leaf = operation
    (scene.workspace / "sub/deeper").mkdir(parents=True)
    paths = [f"{path}{leaf}" for path in spellings(scene)]
    assert len(paths) > 50
    outside.check(await attack(scene, name, paths, more))


async def test_an_open_descriptor_gives_no_way_out(scene, outside, operation):
    name, more, leaf = operation
    folder, file = os.open(outside.folder, os.O_RDONLY), os.open(outside.folder / "secret.txt", os.O_RDWR)
    try:
        ways = [f"{base}/{folder}{leaf}" for base in ("/proc/self/fd", "/dev/fd", f"/proc/{os.getpid()}/fd")]
        ways += [f"{base}/{file}" for base in ("/proc/self/fd", "/dev/fd", f"/proc/{os.getpid()}/fd")]
        (scene.workspace / "descriptor").symlink_to(f"/proc/self/fd/{folder}")
        (scene.workspace / "file").symlink_to(f"/proc/self/fd/{file}")
        outside.check(await attack(scene, name, [*ways, f"descriptor{leaf}", "file"], more))
    finally:
        os.close(folder)
        os.close(file)


async def test_a_folder_whose_name_starts_like_the_workspace_is_outside(scene, operation):
    name, more, leaf = operation
    evil = Outside(scene, scene.root / "workspace-evil")
    (scene.workspace / "link").symlink_to(evil.folder)
    paths = [f"../workspace-evil{leaf}", f"{evil.folder}{leaf}", f"{scene.workspace}-evil{leaf}", f"link{leaf}"]
    evil.check(await attack(scene, name, paths, more))


# ---------------------------------------------------------------------------------------------- links


def links(scene: Scene) -> Iterator[str]:
    """All kinds of links in the workspace to the outside folder; each path leads to that folder."""
    there, here = str(scene.outside), scene.workspace
    (here / "deep/er").mkdir(parents=True)
    for name, target in {
        "relative": "../outside", "absolute": there, "deep/relative": "../../outside", "deep/er/up": "../../..",
        "root": "/", "process": f"/proc/self/root{there}", "chain": "relative", "chained": "chain/.",
        "self": "deep/../relative",
        "odd": "deep/er/../../relative/", "back": f"{there}/../workspace/../outside", "parent": "..",
    }.items():  # fmt: skip
        (here / name).symlink_to(target)
    yield from ("relative", "absolute", "deep/relative", "deep/er/up/outside", f"root{there}", "process", "chain")
    yield from ("chained", "self", "odd", "back", "parent/outside", "relative/.", "relative/", f"{here}/relative")


async def test_a_link_as_an_ancestor_leads_nowhere(scene, outside, operation):
    name, more, leaf = operation
    paths = [f"{path}{leaf}" for path in links(scene)]
    if name == "write_file":
        paths += [path.replace("/secret.txt", new) for path in paths for new in ("/new.txt", "/new/new.txt")]
    outside.check(await attack(scene, name, paths, more))


@pytest.mark.parametrize("name", FILE)
async def test_a_link_as_the_leaf_leads_nowhere(scene, outside, name):
    for link, target in {
        "relative": "../outside/secret.txt", "absolute": outside.folder / "secret.txt", "chain": "relative",
        "process": f"/proc/self/root{outside.folder}/secret.txt", "new": "../outside/new.txt",
        "newer": outside.folder / "newer.txt",
    }.items():  # fmt: skip
        (scene.workspace / link).symlink_to(target)
    paths = ["relative", "absolute", "chain", "process", "new", "newer", "./relative", f"{scene.workspace}/chain"]
    outside.check(await attack(scene, name, paths, FILE[name]))


@pytest.mark.parametrize("name", FOLDER)
@pytest.mark.parametrize("engine", ["ripgrep", "python"])
async def test_a_walk_over_the_workspace_enters_no_link(scene, outside, name, engine, monkeypatch):
    list(links(scene))
    (scene.workspace / "leaf").symlink_to(outside.folder / "secret.txt")
    if engine == "python":
        monkeypatch.setenv("PATH", str(scene.root))
    outside.check(await attack(scene, name, [".", "", "deep", "deep/er", str(scene.workspace)], FOLDER[name]))


# ---------------------------------------------------------------------------------------------- a race

SWAP = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
told, swaps = [], 0
signal.signal(signal.SIGTERM, lambda *_: told.append("to end"))
print("begun", flush=True)
while not told:
    for one, other in ((b"swap", b"link"), (b"near", b"far"), (b"tree/in", b"tree/out")):
        libc.renameat2(-100, one, -100, other, 2)  # exchange the two in one step
        swaps += 1
print(swaps)
"""


@contextmanager
def swapping(workspace: Path) -> Iterator[Callable[[], int]]:
    """Swap folders and links in another process as fast as possible; the function ends it and returns the count."""
    process = subprocess.Popen([sys.executable, "-I", "-c", SWAP, workspace], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    def count() -> int:
        process.terminate()
        return int(process.communicate(timeout=60)[0])

    try:
        process.stdout.readline()  # it has started
        yield count
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("engine", ["ripgrep", "python"])
async def test_constantly_swapped_links_leak_nothing(scene, outside, engine, monkeypatch):
    """A folder trades places with a link to the outside, a link with a link, and a folder inside a walked tree."""
    if engine == "python":
        monkeypatch.setenv("PATH", str(scene.root))
    workspace = scene.workspace
    for folder in ("swap", "tree/in", "inside"):
        (workspace / folder).mkdir(parents=True)
        for number in range(40):
            (workspace / folder / f"{number}.txt").write_text("harmless-text\n")
    for number in range(40):
        (outside.folder / f"{number}.txt").write_text(outside.secret)
    outside.before = outside.state()
    (workspace / "link").symlink_to("../outside")
    (workspace / "near").symlink_to("inside")
    (workspace / "far").symlink_to(outside.folder)
    (workspace / "tree/out").symlink_to(outside.folder)
    attempts = worked = refused = 0
    with swapping(workspace) as count:
        # Enough rounds to be conclusive, however long a busy machine takes.
        while not (attempts > 200 and worked > 10 and refused > 10):
            steps = [step for number in range(8) for step in _steps(number, attempts)]
            results = await results_of(scene, steps, store=scene.root / f"{attempts}.db")
            outside.check("\n".join(results))
            failed = sum(result.startswith('{"status":"error"') for result in results)
            attempts, worked, refused = attempts + len(results), worked + len(results) - failed, refused + failed
        swaps = count()
    assert swaps > attempts, "hardly anything was swapped"
    outside.check("")


async def test_thousands_of_opens_during_swaps_leak_nothing(scene, outside):
    """The same race without a model and a loop between the opens, which allows many more of them."""
    (scene.workspace / "swap").mkdir()
    (scene.workspace / "inside").mkdir()
    (scene.workspace / "link").symlink_to("../outside")
    (scene.workspace / "near").symlink_to("inside")
    (scene.workspace / "far").symlink_to(outside.folder)
    for folder in ("swap", "inside"):
        (scene.workspace / folder / "secret.txt").write_text("harmless")
    with swapping(scene.workspace) as count:
        leaks, attempts = await asyncio.to_thread(_opens, Reach(scene.workspace), outside.secret.encode(), 5_000)
        assert count() > attempts, "hardly anything was swapped"
    assert leaks == 0
    outside.check("")


def _opens(reach: Reach, secret: bytes, least: int) -> tuple[int, int]:
    """Read, and make folders and files, through paths that are being swapped, until it was often on both sides."""
    leaks = attempts = worked = 0
    while not (attempts >= least and attempts // 50 < worked < attempts - attempts // 50):
        for path in ("swap/secret.txt", "near/secret.txt"):
            attempts += 2
            with suppress(OutOfReach, OSError), reach.open(path) as opened:
                leaks += secret in os.read(opened.descriptor, 1000)
                worked += 1
            with suppress(OutOfReach, OSError), reach.target(f"{path[:4]}/new-{attempts % 50}/file") as target:
                os.close(os.open(target.name, os.O_CREAT | os.O_WRONLY, dir_fd=target.folder))
                worked += 1
    return leaks, attempts


def _steps(number: int, attempt: int) -> Iterator[Any]:
    for way in ("swap", "near", "tree/in"):
        yield call("read_file", path=f"{way}/{number}.txt")
        yield call("write_file", path=f"{way}/{number + 10}.txt", content=f"harmless-{attempt}-{MARK}")
        yield call("write_file", path=f"{way}/new-{number}/new.txt", content=MARK)
        yield call("edit_file", path=f"{way}/{number + 20}.txt", old_text="harmless", new_text=f"harmless {attempt}")
        yield call("list_dir", path=f"{way}/.")
        yield call("grep", pattern=f"-|{number}", path=f"{way}/{number + 30}.txt")
    if number % 4 == 0:
        yield call("grep", pattern=f"-|{number}", path="tree")
        yield call("grep", pattern=f"-|{number}", path="swap")
        yield call("find_files", pattern=f"{'[a-z0-9]' if number else '*'}*", path="tree")


# ---------------------------------------------------------------------------------------------- special and huge files


def peak() -> int:
    """The peak memory of this process since the last reset, in kilobytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


async def test_pipes_devices_and_huge_files_are_refused_quickly_with_flat_memory(scene):
    os.mkfifo(scene.workspace / "pipe")
    (scene.workspace / "linked-pipe").symlink_to("pipe")
    (scene.workspace / "zero").symlink_to("/dev/zero")
    (scene.workspace / "terminal").symlink_to("/dev/tty")
    if os.geteuid() == 0:
        os.mknod(scene.workspace / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    with (scene.workspace / "huge").open("wb") as file:
        file.truncate(10 * 1024**3)
    with (scene.workspace / "huge.pdf").open("wb") as file:
        file.write(b"%PDF-1.7")
        file.truncate(10 * 1024**3)
    before = sorted((each.name, each.lstat().st_mode, each.lstat().st_size) for each in scene.workspace.iterdir())
    paths = ["pipe", "linked-pipe", "zero", "terminal", "huge", "huge.pdf", "pipe/x", "/dev/zero", "/dev/tty"]
    paths += ["device"] if os.geteuid() == 0 else []
    calls = {**FILE, "list_dir": {}, "find_files": {"pattern": "*"}}
    del calls["write_file"]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    start, low = time.monotonic(), peak()
    for name, more in calls.items():
        for result in await results_of(scene, [call(name, path=path, **more) for path in paths]):
            assert result.startswith('{"status":"error"')
    for name, more in FOLDER.items():
        await scene.run(call(name, path=".", **more))
    writes = [call("write_file", path=path, content=MARK) for path in paths if "huge" not in path]
    assert all(result.startswith('{"status":"error"') for result in await results_of(scene, writes))
    assert time.monotonic() - start < 40  # of ten gigabytes, and endless
    assert peak() - low < 50_000, "memory grew with the size of a file"
    assert before == sorted(
        (each.name, each.lstat().st_mode, each.lstat().st_size) for each in scene.workspace.iterdir()
    )


async def test_an_endless_proc_file_that_says_it_is_empty_is_not_read_without_limit(scene):
    desk = Desk(scene.workspace, restricted=False)
    async with asyncio.timeout(40):
        for path in ("/proc/self/maps", "/proc/kpagecount", "/proc/self/pagemap"):
            assert len((await desk.run("read_file", path=path)).content) < 200_000


# ---------------------------------------------------------------------------------------------- killed in the middle

KILLS = 100
KILLED = """
import asyncio, json, os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.desk import Desk

folder, place = Path(sys.argv[1]), Path(sys.argv[1]) / "a.txt"
texts = [letter * 100_000 for letter in "ab"]
place.write_text(texts[0])

async def write_for_ever(number):
    desk = Desk(folder)
    while True:
        for text, other in (texts, texts[::-1]):
            if number % 2:
                await desk("write_file", path="a.txt", content=text)
            else:
                await desk("read_file", path="a.txt")
                now = place.read_text()[0]
                await desk("edit_file", path="a.txt", old_text=now * 100_000, new_text=texts[now == "a"])
            os.write(wrote, b"!")

partial, versions = [], {place.stat().st_mtime_ns}
for number in range(int(sys.argv[3])):
    heard, wrote = os.pipe()
    pid = os.fork()
    if pid == 0:
        asyncio.run(write_for_ever(number))
    os.read(heard, 1)  # it has written once and goes on
    time.sleep(random.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status
    os.close(heard)
    os.close(wrote)
    versions.add(place.stat().st_mtime_ns)
    if place.read_text() not in texts:
        partial.append(number)
left = [each.name for each in folder.iterdir() if each != place]
print(json.dumps({"partial": partial, "replaced": len(versions), "left": left}))
"""


async def test_a_writer_that_is_killed_a_hundred_times_never_leaves_a_partial_file(scene):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(scene.workspace), str(ROOT), str(KILLS), stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(out)
    assert found["partial"] == []
    assert found["replaced"] > KILLS // 2, "it was hardly ever killed during a write"
    # A temporary file has a name only for an instant before the rename. If it had one from the start, about half would
    # be left over.
    assert len(found["left"]) < KILLS // 5, "unnamed files disappear with their writer"


# ---------------------------------------------------------------------------------------------- the runtime's own files


@pytest.mark.parametrize("engine", ["ripgrep", "python"])
async def test_the_runtimes_own_files_inside_the_workspace_are_neither_read_nor_written(scene, engine, monkeypatch):
    if engine == "python":
        monkeypatch.setenv("PATH", str(scene.root))
    home = scene.workspace / ".everloop"
    monkeypatch.setenv("EVERLOOP_HOME", str(home))
    own = Outside(scene, home)
    (home / "config.toml").write_text(f'api_key = "{own.secret}"')
    own.before = own.state()
    (scene.workspace / "way").symlink_to(".everloop")
    (scene.workspace / "leaf").symlink_to(".everloop/config.toml")
    (scene.workspace / "sub").mkdir()
    (scene.workspace / "sub/up").symlink_to("../.everloop")
    folders = [".everloop", "./.everloop/", "way", "sub/up", "sub/../way", str(home), f"{scene.workspace}/way/."]
    files = ["leaf", *(f"{folder}/{name}" for folder in folders for name in ("config.toml", "secret.txt"))]
    seen = ""
    for name, more in FILE.items():
        seen += "\n".join(await results_of(scene, [call(name, path=path, **more) for path in files]))
    for name, more in FOLDER.items():
        seen += "\n".join(await results_of(scene, [call(name, path=path, **more) for path in [*folders, "."]]))
    new = [f"{folder}/{name}" for folder in folders for name in ("new.toml", "skills/new/SKILL.md")]
    seen += "\n".join(await results_of(scene, [call("write_file", path=path, content=MARK) for path in new]))
    kept = {path: state for path, state in own.state().items() if "/outputs" not in path}
    assert own.secret not in seen
    assert own.name not in seen
    assert kept == own.before


async def test_a_store_inside_the_workspace_is_neither_read_nor_written(scene):
    store = scene.workspace / "everloop.db"
    said = canary("said")
    await scene.run(say=said, store=store)
    assert said.encode() in b"".join(place.read_bytes() for place in scene.workspace.glob("everloop.db*"))
    for name, more in {**FILE, **FOLDER}.items():
        paths = ["everloop.db", "everloop.db-wal", "everloop.db-shm"] if name in FILE else ["."]
        results = await results_of(scene, [call(name, path=path, **more) for path in paths], store=store)
        assert said not in "\n".join(results)
    again = await scene.run(say="still there?", store=store)
    assert said in again.seen, "the conversation was lost"


# ---------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize("engine", ["ripgrep", "python"])
async def test_a_pattern_or_glob_cannot_lead_out(scene, outside, engine, monkeypatch):
    if engine == "python":
        monkeypatch.setenv("PATH", str(scene.root))
    patterns = ["../outside/*", "../**", "/**", f"{outside.folder}/**"]
    patterns += ["**/../outside/*", "{..,.}/outside/*", "[.][.]/outside/*"]
    options = ["-f../outside/secret.txt", "--file=../outside/secret.txt", "--follow", "--pre=cat"]
    calls = [call("find_files", pattern=pattern) for pattern in patterns]
    calls += [call("grep", pattern="secret", glob=pattern) for pattern in patterns]
    calls += [call("grep", pattern=pattern) for pattern in options]
    outside.check("\n".join(await results_of(scene, calls)))


async def test_a_hostile_pattern_times_out(scene, monkeypatch):
    monkeypatch.setattr(find, "SECONDS", 1.0)
    monkeypatch.setenv("PATH", str(scene.root))
    (scene.workspace / "a.txt").write_text("a" * 50 + "!\n")
    async with asyncio.timeout(40):
        await scene.run([call("grep", pattern="(a|aa)+$"), call("find_files", pattern="*a" * 50 + "b")])
