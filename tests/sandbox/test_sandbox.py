"""The parts of the sandbox: what is visible, what is hidden, what is limited, and what happens without a backend."""

from __future__ import annotations

import asyncio
import os
import re
import struct
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everloop.sandbox import bubblewrap, landlock, launch, resources, seccomp
from everloop.sandbox.confinement import Confinement, Limits, command_environment, confinement
from everloop.sandbox.launch import Backend, NoSandbox, choose_backend, prepare
from everloop.sandbox.reach import within
from everloop.sandbox.system import System, system, without
from everloop.tools.base import ToolError
from everloop.tools.context import CallContext, current
from everloop.tools.shell.processes import Process
from everloop.tools.shell.shell import ShellSettings, shell_tools
from tests.support.places import DOCS

BACKENDS: list[Backend] = ["bubblewrap", "landlock"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    return place


async def run(backend: Backend, world: Confinement, command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command in a backend and return its output."""
    said = bytearray()

    async def listen(data: bytes) -> bool:
        said.extend(data)
        return False

    outer = environment or {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    process = Process(await asyncio.to_thread(prepare, backend, world, world.workspace, command, outer=outer))
    try:
        await process.start(listen)
        async with asyncio.timeout(30):
            await process.wait()
    finally:
        await process.end(0)
    return said.decode()


async def look(folder: Path, **options: Any) -> Confinement:
    """The reach of a command in this folder."""
    return await asyncio.to_thread(confinement, str(folder), **options)


# --- the choice of the backend ----------------------------------------------------------------------------------------


def test_both_backends_work_on_this_machine():
    assert choose_backend("bubblewrap") == "bubblewrap"
    assert choose_backend("landlock") == "landlock"
    assert choose_backend("auto") == "bubblewrap"
    assert choose_backend("off") == "off"


def test_without_bubblewrap_landlock_is_used(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_CANDIDATES", ("/nowhere/bwrap",))
    assert choose_backend("auto") == "landlock"
    with pytest.raises(NoSandbox, match="apt install bubblewrap"):
        choose_backend("bubblewrap")


def test_a_bubblewrap_that_cannot_create_namespaces_is_not_used(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "_CANDIDATES", (str(broken),))
    assert choose_backend("auto") == "landlock"
    with pytest.raises(NoSandbox, match="No permissions to create new namespace"):
        choose_backend("bubblewrap")


@pytest.mark.parametrize("version", [0, 1, 2])
def test_without_a_backend_nothing_runs_and_one_line_says_what_to_do(monkeypatch, version):
    monkeypatch.setattr(bubblewrap, "_CANDIDATES", ())
    monkeypatch.setattr(landlock, "abi", lambda: version)
    with pytest.raises(NoSandbox) as refused:
        choose_backend("auto")
    assert "\n" not in str(refused.value)
    assert "apt install bubblewrap" in str(refused.value)
    assert '"off"' in str(refused.value)


# --- what is visible -----------------------------------------------------------------------------------------------


def test_programs_in_a_home_are_visible_with_only_what_they_need(tmp_path):
    home = tmp_path / "home"
    for name in (".pyenv/shims", ".pyenv/versions/3/bin", ".cargo/bin", ".local/bin", ".local/share/keyrings", "bin"):
        (home / name).mkdir(parents=True, exist_ok=True)
    (home / ".cargo/credentials.toml").write_text("token")
    (tmp_path / "opt/tool/bin").mkdir(parents=True)
    (tmp_path / "opt/tool/data").mkdir()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (home / ".pyenv/versions/3/bin/python").touch()
    (tmp_path / "venv/bin/python").symlink_to(home / ".pyenv/versions/3/bin/python")
    entries = [home / ".pyenv/shims", home / ".cargo/bin", home / ".local/bin", home / "bin", tmp_path / "opt/tool/bin"]
    search = ":".join(
        str(entry) for entry in [*entries, tmp_path / "venv/bin", "relative", "/usr/bin", tmp_path / "none"]
    )
    found = system(search, str(home))
    shown = {path for path in found.paths if within(path, str(tmp_path))}
    assert shown == {
        str(home / ".pyenv"), str(home / ".cargo/bin"), str(home / ".local/bin"),
        str(home / "bin"), str(tmp_path / "opt/tool"), str(tmp_path / "venv"),
    }  # fmt: skip
    assert found.search == ":".join(str(entry) for entry in [*entries, tmp_path / "venv/bin", "/usr/bin"])


def test_a_visible_prefix_exposes_nothing_hidden(tmp_path):
    workspace = tmp_path / "work"
    paths = [str(tmp_path / "keys/bin"), str(tmp_path / "tools"), str(workspace / "venv")]
    assert without(paths, [str(tmp_path / "keys")], str(workspace)) == [str(tmp_path / "tools")]


def test_private_keys_of_the_system_are_not_visible_among_its_settings():
    shown = system("/usr/bin", "").paths
    assert "/usr" in shown
    for secret in ("/etc/shadow", "/etc/ssl/private", "/etc/ssh", "/root", "/home", "/var", "/run", "/etc", "/"):
        assert not any(within(secret, path) for path in shown)


def test_a_command_gets_only_allowlisted_variables():
    outer = {"PATH": "/x", "LANG": "C", "LC_ALL": "C", "API_KEY": "k", "LD_PRELOAD": "evil", "BASH_ENV": "evil"}
    outer |= {"https_proxy": "http://proxy:1", "HTTP_PROXY": "http://user:password@proxy:1", "MINE": "m"}
    quiet = command_environment(outer, (), network=False, search="/usr/bin")
    assert {name for name in quiet if name in outer} == {"PATH", "LANG", "LC_ALL"}
    assert quiet["PATH"] == "/usr/bin"
    networked = command_environment(outer, ("MINE", "ABSENT"), network=True, search="/usr/bin")
    assert {name for name in networked if name in outer} == {"PATH", "LANG", "LC_ALL", "https_proxy", "MINE"}


# --- what is hidden ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
async def test_protected_files_are_invisible_even_inside_the_workspace(folder, backend):
    state = folder / "deep/state"
    state.mkdir(parents=True)
    (state / "key").write_text("canary")
    (folder / "store.db").write_text("canary")
    (folder / "store.db-wal").write_text("canary")
    (folder / "deep/free.txt").write_text("free")
    world = await look(folder, protected=[str(state), str(folder / "store.db")])
    said = await run(
        backend, world, "cat deep/free.txt; cat deep/state/key store.db*; cat deep/*/*; mv deep away; cat away/*/key"
    )
    assert said.startswith("free")
    assert "canary" not in said
    await run(
        backend, world, "echo evil > deep/state/key; echo evil > store.db; rm -rf deep/state store.db store.db-wal"
    )
    assert [path.read_text() for path in (state / "key", folder / "store.db", folder / "store.db-wal")] == [
        "canary"
    ] * 3
    said = await run(backend, world, "cp -r deep copy; mv deep/state elsewhere; cat copy/state/* elsewhere/* deep/*/*")
    assert "canary" not in said


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_workspace_and_outputs_inside_a_protected_folder_are_visible(tmp_path, backend):
    home = tmp_path / "runtime"
    workspace, outputs, others = home / "workspace", home / "outputs/mine", home / "outputs/others"
    for place in (workspace, outputs, others):
        place.mkdir(parents=True)
        (place / "text").write_text(f"of {place.name}\n")
    (home / "config.toml").write_text("canary")
    world = await look(workspace, protected=[str(home)], outputs=str(outputs))
    said = await run(
        backend, world, f"cat text {outputs}/text; cat {others}/text {home}/config.toml ../config.toml; echo new > new"
    )
    assert said.startswith("of workspace\nof mine\n")
    assert "canary" not in said
    assert "of others" not in said
    assert (workspace / "new").read_text() == "new\n"
    await run(backend, world, f"echo evil > {outputs}/text; rm {outputs}/text")
    assert (outputs / "text").read_text() == "of mine\n"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_additional_paths_can_be_made_readable_and_writable(folder, tmp_path, backend):
    for name in ("lib", "cache", "cache/secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    places = {"readable": [str(tmp_path / "lib")], "writable": [str(tmp_path / "cache")]}
    world = await look(folder, **places, protected=[str(tmp_path / "cache/secret")])
    said = await run(
        backend, world, f"cat {tmp_path}/lib/text; cat {tmp_path}/cache/secret/text; echo evil > {tmp_path}/lib/text"
    )
    assert said.startswith("lib")
    assert "cache/secret" not in said.replace(f"{tmp_path}/cache/secret", "")
    assert (tmp_path / "lib/text").read_text() == "lib"
    open_world = await look(folder, **places)
    await run(backend, open_world, f"echo new > {tmp_path}/cache/text")
    assert (tmp_path / "cache/text").read_text() == "new\n"


async def test_a_link_that_replaces_a_file_at_the_last_moment_gives_no_access(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("canary")
    (folder / ".git").mkdir()
    world = await look(folder)
    assert world.held == (str(folder / ".git"),)
    (folder / ".git").rmdir()
    (folder / ".git").symlink_to(tmp_path / "outside")
    said = await run("bubblewrap", world, "cat .git/secret; touch .git/evil; touch ran")
    assert "canary" not in said
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["secret"]
    assert not (folder / "ran").exists()


async def test_a_sandbox_with_wrong_mounts_is_not_used(folder):
    """bwrap follows links when it mounts, so its mounts are verified before the command starts."""
    for name in (".git", "sub"):
        (folder / name).mkdir()
    world = await look(folder)
    ready = await asyncio.to_thread(prepare, "bubblewrap", world, str(folder), "touch ran", outer=dict(os.environ))
    ready.world = replace(world, held=(*world.held, str(folder / "sub")))
    process = Process(ready)

    async def listen(data: bytes) -> bool:
        return False

    with pytest.raises(ToolError):
        await process.start(listen)
    await process.end(0)
    assert not (folder / "ran").exists()


def test_a_wrong_mount_is_seen_in_the_mount_table():
    world = Confinement("/home/a b", held=("/home/a b/.git",), frozen=("/home/a b/.git/hooks",))
    top = "70 65 254:0 /disk/a\\040b /home/a\\040b rw - ext4 /dev/vda rw"
    git = "71 70 254:0 /disk/a\\040b/.git /home/a\\040b/.git rw - ext4 /dev/vda rw"
    hooks = "72 71 254:0 /disk/a\\040b/.git/hooks /home/a\\040b/.git/hooks ro - ext4 /dev/vda rw"
    assert bubblewrap.misplaced("\n".join((top, git, hooks)), world) is None
    assert bubblewrap.misplaced("\n".join((top, git)), world) == "/home/a b/.git/hooks"
    elsewhere = git.replace("254:0 /disk/a\\040b/.git", "254:0 /disk/outside")
    assert bubblewrap.misplaced("\n".join((top, elsewhere, hooks)), world) == "/home/a b/.git"
    other_disk = hooks.replace("254:0", "254:1")
    assert bubblewrap.misplaced("\n".join((top, git, other_disk)), world) == "/home/a b/.git/hooks"


async def test_landlock_grants_nothing_through_a_link_that_replaces_a_file(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("canary")
    (folder / "AGENTS.md").touch()
    (folder / "sub/deep").mkdir(parents=True)
    world = await look(folder)
    outer = {"PATH": os.defpath}
    command = "cat sub/secret sub/deep/secret; echo x > sub/new"
    process = Process(await asyncio.to_thread(prepare, "landlock", world, world.workspace, command, outer=outer))
    (folder / "sub/deep").rmdir()
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to(tmp_path / "outside")
    said = bytearray()

    async def listen(data: bytes) -> bool:
        said.extend(data)
        return False

    await process.start(listen)
    await process.wait()
    await process.end(0)
    assert b"canary" not in said
    assert not (tmp_path / "outside/new").exists()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_instruction_file_that_is_a_link_gives_no_access(folder, tmp_path, backend):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("canary")
    for name in (".git", "skills", "AGENTS.md"):
        (folder / name).symlink_to(tmp_path / "outside")
    said = await run(
        backend, await look(folder), "cat .git/secret skills/secret AGENTS.md/secret; touch .git/new; echo ran"
    )
    assert "canary" not in said
    assert "ran" in said
    assert not (tmp_path / "outside/new").exists()


async def test_unusual_folder_names_are_handled(tmp_path):
    folder = tmp_path / "a b\\040'\"\té;$(x)"
    (folder / ".git/hooks").mkdir(parents=True)
    for backend in BACKENDS:
        said = await run(backend, await look(folder), "pwd; touch .git/hooks/x && echo evil; touch ok; ls")
        assert said.startswith(str(folder))
        assert "evil" not in said


# --- system calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        seccomp.namespaced_filter(),
        seccomp.shared_filter(network=True, signals=True),
        seccomp.shared_filter(network=False, signals=False),
    ],
)
def test_every_jump_of_a_seccomp_filter_stays_inside_it(program):
    code = list(struct.iter_unpack("=HBBI", program))
    assert code[-1][0] == 0x06
    for place, (operation, yes, no, _) in enumerate(code):
        if operation & 7 == 5:
            assert place + 1 + max(yes, no) < len(code)


def test_a_commands_folder_is_removed_with_the_runtime_however_soon_the_launcher_notices(folder):
    """The pipe of a killed runtime closes shortly before its children are reparented."""
    world = Confinement(str(folder), readable=system(os.defpath, "").paths)
    made = prepare("landlock", world, world.workspace, "sleep 60", outer={"PATH": os.defpath})
    child = subprocess.Popen(made.arguments, env=made.environment, pass_fds=made.passed)
    assert made.private is not None
    assert os.path.exists(made.private)
    made.close()
    child.wait(30)
    assert not os.path.exists(made.private)
    made.clean_up()


async def test_where_signals_are_not_scoped_none_can_be_sent_at_all(folder, monkeypatch):
    """An older Landlock does not scope signals, so the seccomp filter blocks them."""
    monkeypatch.setattr(landlock, "abi", lambda: 5)
    victim = subprocess.Popen(["sleep", "30"])
    try:
        said = await run("landlock", await look(folder), f"kill -9 {victim.pid}; kill -0 $$ || echo none; echo alive")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert said.endswith("none\nalive\n")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_no_capability_of_root_remains(folder, backend):
    program = "import ctypes, struct; library = ctypes.CDLL(None); held = ctypes.create_string_buffer(24); "
    program += "library.capget(struct.pack('Ii', 0x20080522, 0), held); print(any(held.raw), "
    program += "sum(library.prctl(23, number, 0, 0, 0) for number in range(40)) > 0)"
    held, may_be_gained = (await run(backend, await look(folder), f'python3 -c "{program}"')).split()
    assert held == "False"
    assert may_be_gained == "False" or os.geteuid() != 0  # only root can drop capabilities or gain them


@pytest.mark.parametrize("backend", BACKENDS)
async def test_no_setuid_file_can_be_created(folder, backend):
    program = "import os; os.close(os.open('b', os.O_CREAT | os.O_WRONLY, 0o4755)); os.mkdir('c', 0o2755)"
    await run(backend, await look(folder), f'cp /bin/true a; chmod 4755 a; chmod g+s a; python3 -c "{program}"')
    assert (folder / "a").exists()
    assert not any(path.stat().st_mode & 0o6000 for path in folder.iterdir())


async def test_the_mode_of_a_device_cannot_be_changed(folder):
    mode = Path("/dev/null").stat().st_mode
    said = await run("landlock", await look(folder), f"chmod {mode & 0o777:o} /dev/null && echo changed")
    assert "changed" not in said
    assert Path("/dev/null").stat().st_mode == mode


# --- control groups ------------------------------------------------------------------------------------------------


def test_the_cgroup_is_created_where_the_controllers_are_delegated(tmp_path):
    for name in ("", "/slice", "/slice/own"):
        (tmp_path / name.strip("/")).mkdir(exist_ok=True)
        handed = "" if name == "/slice/own" else "cpu memory pids"
        Path(f"{tmp_path}{name}/cgroup.subtree_control").write_text(handed)
    mounts = [["cgroup2", str(tmp_path), "cgroup2", "rw,relatime"]]
    assert resources.find_parent([["0", "", "/slice/own"]], mounts) == f"{tmp_path}/slice"
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    (tmp_path / "slice/cgroup.subtree_control").write_text("cpu")
    assert resources.find_parent([["0", "", "/slice/own"]], mounts) is None


def test_a_cgroup_has_the_limits_and_stale_ones_are_removed(folder):
    (folder / f"{resources._PREFIX}4194305-1").mkdir()  # of a runtime that has ended
    assert resources.find_parent([["5", "pids", "/"]], [["cgroup", str(folder), "cgroup", "rw,pids"]]) == str(folder)
    assert list(folder.iterdir()) == []
    group = resources.make_group(str(folder), Limits(processes=7))
    assert group is not None
    assert Path(group, "pids.max").read_text() == "7"


async def test_no_cgroup_and_no_folder_is_left_behind(folder):
    parent = await asyncio.to_thread(resources.parent_group)
    for backend in BACKENDS:
        process = Process(
            await asyncio.to_thread(prepare, backend, await look(folder), str(folder), "true", outer=dict(os.environ))
        )
        launched = process._launch

        async def listen(data: bytes) -> bool:
            return False

        await process.start(listen)
        await process.wait()
        await process.end(0)
        assert parent is None or launched.group is not None
        for path in (launched.group, launched.private):
            assert path is None or not os.path.exists(path)


def test_the_launcher_does_not_import_the_package():
    text = Path(launch.LAUNCHER).read_text()
    assert "from ." not in text
    assert "everloop." not in text.replace("everloop: ", "")
    assert isinstance(system("/usr/bin", ""), System)


# --- the page ------------------------------------------------------------------------------------------------------

PAGE = DOCS / "sandbox.md"


def page_blocks(language: str) -> str:
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S))


async def test_commands_in_the_docs_print_what_the_docs_show(folder):
    parts = re.split(r"^\$ (.*)\n", page_blocks("console"), flags=re.M)
    examples = list(zip(parts[1::2], parts[2::2], strict=True))
    assert len(examples) >= 8
    run_command, _ = shell_tools(ShellSettings(mode="bubblewrap"))
    context = CallContext("me", "s", "t", "c", "cli", "d", folder, True, "k", lambda text: None)
    token = current.set(context)
    try:
        for command, expected in examples:
            said = (await run_command.execute(command=command)).text
            pattern = ".*".join(re.escape(piece) for piece in expected.rstrip("\n").split("…"))
            assert re.fullmatch(pattern, said), f"the page says\n{expected}\nbut {command} printed\n{said}"
    finally:
        current.reset(token)


def test_the_settings_in_the_docs_exist():
    keys = tomllib.loads(page_blocks("toml"))["sandbox"]
    known = {field.name: field.default for field in fields(ShellSettings)}
    assert set(keys) <= set(known)
    for name in ("mode", "timeout", "memory_mb", "processes"):
        assert keys[name] == known[name]
