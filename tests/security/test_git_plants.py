"""What commands and file tools plant in git repositories: the user's own git must never execute it.

Each attack refers to the attacker's program in a way that makes git run it. The program creates the canary, a file that
no command can create from inside the sandbox. `test_each_attack_would_work` runs the same attacks without a sandbox, so
that an attack that no longer works is noticed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from everloop import AgentLoop, MessageBus
from everloop.config import Config
from everloop.sandbox import repositories
from everloop.sandbox.folders import Part
from everloop.sandbox.git_config import safe_subset, unsafe_settings
from everloop.testing import ScriptedProvider, call
from everloop.tools.shell.shell import ShellSettings, shell_tools
from tests.support.commands import until

from .scene import Scene

LOOKS = (
    ("status",),
    ("diff",),
    ("log", "-p", "-1"),
    ("rev-parse", "--git-dir", "--is-inside-work-tree"),
)
PERSON = ("-c", "user.name=Person", "-c", "user.email=person@example.org")


def git(folder: Path, *arguments: str) -> str:
    """The user's own git, outside any sandbox."""
    done = subprocess.run(
        ["git", *PERSON, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
    )
    return done.stdout + done.stderr


def look_everywhere(workspace: Path) -> None:
    """Run git in the workspace and each of its folders, as a user or their shell prompt would."""
    for folder, names, _ in os.walk(workspace):
        if Path(folder).name in ("objects", "refs", "logs") and ".git" in folder:
            names.clear()
            continue
        names[:] = [name for name in names if not (Path(folder) / name).is_symlink()]
        for arguments in LOOKS:
            git(Path(folder), *arguments)


def make_repository(workspace: Path) -> None:
    git(workspace, "init", "-q", "-b", "main")
    (workspace / "file.txt").write_text("one\n")
    (workspace / "data.bin").write_text("one\n")
    git(workspace, "add", ".")
    git(workspace, "commit", "-qm", "one")
    (workspace / "file.txt").write_text("two\n")
    (workspace / "data.bin").write_text("two\n")


COMMIT = "git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m x"
# The workspace has no repository.
NEW = {
    "a monitor": "git init -q; git config core.fsmonitor '{evil}'; echo x > a; git add a",
    "a pager of one command": "git init -q; git config core.hooksPath hooks; mkdir hooks; "
    "printf '#!/bin/sh\\n{evil}' > hooks/post-index-change; chmod +x hooks/*; echo x > a; git add a; touch a",
    "a hook": "git init -q; printf '#!/bin/sh\\n{evil}' > .git/hooks/post-index-change; chmod +x .git/hooks/*; "
    "echo x > a; git add a; sleep 0.01; touch -d 2020-01-01 a",
    "a filter": "git init -q; echo x > a; git add a; git config filter.f.clean '{evil}; cat'; "
    "echo 'a filter=f' > .gitattributes; echo y > a",
    "a filter of info/attributes": "git init -q; echo x > a; git add a; git config filter.f.clean '{evil}; cat'; "
    "mkdir -p .git/info; echo 'a filter=f' > .git/info/attributes; echo y > a",
    "a textconv": "git init -q; echo x > a; git add a; git config diff.f.textconv '{evil}; cat'; "
    "echo 'a diff=f' > .gitattributes; echo y > a",
    "an external diff": "git init -q; echo x > a; git add a; git config diff.external '{evil}'; echo y > a",
    "an included file": "git init -q; git config -f more core.fsmonitor '{evil}'; git config include.path ../more",
    "a conditional include": "git init -q; git config -f more core.fsmonitor '{evil}'; "
    "git config includeIf.gitdir:/.path $PWD/more",
    "a line that goes on": "git init -q; "
    "printf '[user]\\n\\tname = a\\\\\\n[core]\\n[core]\\n\\tfsmonitor = {evil}\\n' >> .git/config",
    "a section and its key in one line": "git init -q; echo '[core] fsmonitor = {evil}' >> .git/config",
    "other letters": "git init -q; printf '[CORE]\\n\\tFSMonitor = {evil}\\n' >> .git/config",
    "a config that is a link": "git init -q; mv .git/config c; git config -f c core.fsmonitor '{evil}'; "
    "ln -s ../c .git/config",
    "hooks that are a link": "git init -q; rm -rf .git/hooks; mkdir h; printf '#!/bin/sh\\n{evil}' > "
    "h/post-index-change; chmod +x h/*; ln -s ../h .git/hooks; echo x > a; git add a; touch -d 2020-01-01 a",
    "a link for .git": "git init -q; git config core.fsmonitor '{evil}'; mv .git store; ln -s store .git",
    "a file for .git": "git init -q; git config core.fsmonitor '{evil}'; mv .git store; echo 'gitdir: store' > .git",
    "a file for .git in a folder": "git init -q store; git -C store config core.fsmonitor '{evil}'; mkdir -p a/b; "
    "mv store/.git a/store; echo 'gitdir: ../store' > a/b/.git",
    "a repository in a folder": "mkdir -p deep/er; cd deep/er; git init -q; git config core.fsmonitor '{evil}'",
    "a bare repository": "git init -q --bare store; git -C store config core.bare false; "
    "git -C store config core.worktree ..; git -C store config core.fsmonitor '{evil}'",
    "a bare repository at the top": "git init -q; git config core.bare false; git config core.worktree $PWD; "
    "git config core.fsmonitor '{evil}'; mv .git/* .; rmdir .git; sed -i s/x/x/ HEAD",
    "a monitor of a worktree": "git init -q; {commit}; git worktree add -q wt; "
    "git config extensions.worktreeConfig true; git -C wt config --worktree core.fsmonitor '{evil}'",
    "a worktree that leads elsewhere": "git init -q; {commit}; git worktree add -q wt; cp -r .git copy; "
    "git config -f copy/config core.fsmonitor '{evil}'; echo $PWD/copy > .git/worktrees/wt/commondir",
    "a folder that was prepared": "mkdir -p stage/objects stage/refs; "
    "git config -f stage/config core.fsmonitor '{evil}'; mv stage .git; echo 'ref: refs/heads/x' > .git/HEAD",
}
# It has one without hooks.
EXISTING = {
    "commondir": "cp -r .git copy; git config -f copy/config core.fsmonitor '{evil}'; echo ../copy > .git/commondir",
    "a gitlink to a repository": "git init -q nested; cd nested; {commit}; git config core.fsmonitor '{evil}'; cd ..; "
    "git add nested",
    "a submodule": "git init -q sub; cd sub; {commit}; cd ..; mkdir -p .git/modules; mv sub/.git .git/modules/sub; "
    "echo 'gitdir: ../.git/modules/sub' > sub/.git; git config -f .git/modules/sub/config core.worktree ../../../sub; "
    "git add sub; git config -f .git/modules/sub/config core.fsmonitor '{evil}'",
    "config.worktree": "git config -f .git/config.worktree core.fsmonitor '{evil}'",
    # A touched but unchanged file makes git rewrite the index, which runs this hook.
    "hooks that were missing": "git checkout -q file.txt; mkdir .git/hooks; "
    "printf '#!/bin/sh\\n{evil}' > .git/hooks/post-index-change; "
    "chmod +x .git/hooks/*; touch -d 2020-01-01 file.txt",
    "attributes for a filter of the person's": "mkdir -p .git/info; echo 'data.bin filter=mine' > .git/info/attributes",
    "hooks where the person keeps them": "git checkout -q file.txt; mkdir -p .hooks; "
    "printf '#!/bin/sh\\n{evil}' > .hooks/post-index-change; chmod +x .hooks/*; touch -d 2020-01-01 file.txt",
    "a link where the person keeps hooks": "git checkout -q file.txt; mkdir h; "
    "printf '#!/bin/sh\\n{evil}' > h/post-index-change; "
    "chmod +x h/*; ln -s h .hooks; touch -d 2020-01-01 file.txt",
    "the config itself": "git config core.fsmonitor '{evil}'; echo '[core] fsmonitor = {evil}' >> .git/config; "
    "mv .git away; cp -r away .git; git config core.fsmonitor '{evil}'",
}
ATTACKS = {
    **{f"new: {name}": text for name, text in NEW.items()},
    **{f"old: {name}": text for name, text in EXISTING.items()},
}


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def canary(scene: Scene) -> Path:
    return scene.outside / "canary"


def prepare(scene: Scene, how: str) -> None:
    if how.startswith("new"):
        return
    make_repository(scene.workspace)
    git(scene.workspace, "config", "extensions.worktreeConfig", "true")
    if "filter" in how:
        git(scene.workspace, "config", "filter.mine.clean", f"touch {scene.outside}/canary; cat")
    if "person keeps" in how:
        git(scene.workspace, "config", "core.hooksPath", ".hooks")
    if (scene.workspace / ".git/hooks").exists():
        for hook in (scene.workspace / ".git/hooks").iterdir():
            hook.unlink()
        (scene.workspace / ".git/hooks").rmdir()


def spelled(how: str, canary: Path) -> str:
    return ATTACKS[how].replace("{commit}", COMMIT).replace("{evil}", f"touch {canary}")


@pytest.mark.parametrize("how", ATTACKS)
async def test_each_attack_would_work(scene, canary, how):
    """Without a sandbox, the user's git runs the attacker's program."""
    prepare(scene, how)
    scene.tools = shell_tools(ShellSettings(mode="off", confine=False))
    await scene.run(call("exec", command=spelled(how, canary)), restrict_to_workspace=False)
    canary.unlink(missing_ok=True)  # the attacker's own git may have run it already
    await asyncio.to_thread(look_everywhere, scene.workspace)
    assert canary.exists()


@pytest.mark.parametrize("how", ATTACKS)
async def test_no_command_makes_the_users_git_run_a_program(scene, canary, backend, how):
    prepare(scene, how)
    await scene.run(call("exec", command=spelled(how, canary)), config=Config(sandbox=backend))
    await asyncio.to_thread(look_everywhere, scene.workspace)
    assert not canary.exists()


MONITOR = NEW["a monitor"]


@pytest.mark.parametrize("how", ["background", "kept", "daemon", "stopped", "failed"])
async def test_no_background_or_interrupted_command_makes_git_run_a_program(scene, canary, backend, how):
    plant = MONITOR.replace("{evil}", f"touch {canary}")
    daemon = "sleep 0.2; cd sub; " + plant.replace("'", '"')
    calls = {
        "background": [call("exec", command=f"{plant}; touch done; sleep 60", background=True)],
        "kept": [call("exec", command=f"{plant}; touch done; sleep 60", background=True, keep=True)],
        "daemon": [
            call("exec", command=f"mkdir sub; (setsid sh -c '{daemon}' &); sleep 0.6"),
        ],
        "stopped": [call("exec", command=f"{plant}; touch done; sleep 60", timeout=1)],
        "failed": [call("exec", command=f"{plant}; exit 3")],
    }[how]
    if how in ("background", "kept"):
        calls.append(call("exec", command="while [ ! -e done ]; do sleep 0.02; done"))
    model = ScriptedProvider([*calls, "done"])
    options = {"store": scene.root / "s.db", "config": Config(sandbox=backend), "restrict_to_workspace": True}
    async with AgentLoop(MessageBus(), model, scene.workspace, **options) as agent:
        await agent.process_direct("do it")
        await asyncio.to_thread(look_everywhere, scene.workspace)
        assert not canary.exists()
    await asyncio.to_thread(look_everywhere, scene.workspace)
    assert not canary.exists()


async def test_no_command_of_a_killed_runtime_makes_git_run_a_program(scene, canary, backend):
    """The next runtime cleans up before it does anything else."""
    home = scene.root / "home"
    program = f"""
        import asyncio
        from pathlib import Path
        from everloop import AgentLoop, MessageBus
        from everloop.config import Config
        from everloop.testing import ScriptedProvider, call

        async def main():
            plant = {MONITOR.replace("{evil}", f"touch {canary}")!r} + "; touch planted; sleep 60"
            model = ScriptedProvider([call("exec", command=plant), "done"])
            config = Config(sandbox={backend!r}, home=Path({str(home)!r}))
            options = dict(config=config, restrict_to_workspace=True, store={str(scene.root / "k.db")!r})
            async with AgentLoop(MessageBus(), model, {str(scene.workspace)!r}, **options) as agent:
                await agent.process_direct("do it")

        asyncio.run(main())
    """
    runtime = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(program))
    try:
        await until((scene.workspace / "planted").exists)
    finally:
        runtime.send_signal(signal.SIGKILL)
        await runtime.wait()
    config = scene.workspace / ".git/config"
    assert b"fsmonitor" in await asyncio.to_thread(config.read_bytes)
    options = {
        "store": scene.root / "s.db",
        "config": Config(sandbox=backend, home=home),
        "restrict_to_workspace": True,
    }
    async with AgentLoop(MessageBus(), ScriptedProvider([]), scene.workspace, **options):
        await until(lambda: config.exists() and b"fsmonitor" not in config.read_bytes())
    await asyncio.to_thread(look_everywhere, scene.workspace)
    assert not canary.exists()


async def test_a_concurrent_command_cannot_pass_its_plants_off_as_existing_files(scene, canary, backend):
    """The second command starts when the plant already exists, and plants it again after the first one is checked."""
    set_monitor = f"git config core.fsmonitor 'touch {canary}'"
    await scene.run(
        call("exec", command=f"git init -q; {set_monitor}; touch up; sleep 60", background=True),
        call("exec", command="while [ ! -e up ]; do sleep 0.02; done"),
        call("exec", command=f"touch .git/x; {set_monitor}; echo y > y"),
        call("process", action="kill", id="p1"),
        config=Config(sandbox=backend),
    )
    await asyncio.to_thread(look_everywhere, scene.workspace)
    assert not canary.exists()


async def test_a_link_swapped_in_during_the_check_leads_nowhere(scene, canary, backend):
    """A background command swaps the repository's folder for a link to the outside, which contains a config."""
    (scene.outside / "config").write_text(mine := "[core]\n\tfsmonitor = mine\n")
    swap = "while true; do git init -q a; git -C a config core.fsmonitor x; rm -rf a; ln -s ../outside a; rm a; done"
    swap2 = "while true; do mkdir -p b; ln -s ../../outside b/.git; rm b/.git; git init -q b; rm -rf b; done"
    await scene.run(
        call("exec", command=swap, background=True),
        call("exec", command=swap2, background=True),
        *(call("exec", command="sleep 0.05") for _ in range(8)),
        config=Config(sandbox=backend),
    )
    assert {path.name for path in scene.outside.iterdir()} == {"config", "secret.txt"}
    assert (scene.outside / "config").read_text() == mine


# For a folder that git treats as a repository because of its contents. Git needs the first line to honour it.
NOT_BARE = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tworktree = ..\n\tfsmonitor = touch {canary}\n"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (".git/config", "[core]\n\tfsmonitor = touch {canary}\n"),
        (".git/hooks/post-index-change", "#!/bin/sh\ntouch {canary}\n"),
        (".git/commondir", "../evil\n"),
        ("sub/.git", "gitdir: ../evil\n"),
        ("sub/.git/config", "[core]\n\tfsmonitor = touch {canary}\n"),
        ("bare/config", NOT_BARE),
        ("bare/hooks/post-index-change", "#!/bin/sh\ntouch {canary}\n"),
    ],
)
async def test_the_file_tools_write_nothing_that_git_runs(scene, canary, path, text):
    make_repository(scene.workspace)
    git(scene.workspace, "init", "-q", "--bare", "bare")
    git(scene.workspace, "init", "-q", "evil")
    git(scene.workspace / "evil", "config", "extensions.x", "y")
    text = text.replace("{canary}", str(canary))
    old = (scene.workspace / path).read_text() if (scene.workspace / path).is_file() else ""
    await scene.run(
        call("write_file", path=path, content=text),
        call("edit_file", path=path, old_text="[core]", new_text=text),
    )
    now = (scene.workspace / path).read_text() if (scene.workspace / path).is_file() else ""
    assert now == old


async def test_the_file_tools_cannot_build_a_repository_file_by_file(scene, canary):
    files = {
        "r/config": NOT_BARE.replace("{canary}", str(canary)),
        "r/objects/x": "x",
        "r/refs/x": "x",
        "r/HEAD": "ref: refs/heads/main\n",
    }
    for path, text in files.items():  # written by other means they work, so the attack is real
        (scene.outside / path).parent.mkdir(parents=True, exist_ok=True)
        (scene.outside / path).write_text(text)
    await asyncio.to_thread(look_everywhere, scene.outside)
    canary.unlink()
    for order in (files, dict(reversed(files.items()))):
        await scene.run(*(call("write_file", path=path, content=text) for path, text in order.items()))
        await asyncio.to_thread(look_everywhere, scene.workspace)
        assert not canary.exists()
        await scene.run(call("exec", command="rm -rf r"))


# ------------------------------------------------------------------------------------------------ it stays pleasant


async def test_the_user_can_continue_in_a_repository_that_an_agent_created(scene):
    commands = [
        "git init -q -b main && git config user.name Agent && git config user.email agent@example.org",
        "echo 'print(1)' > app.py && git add app.py && git -c user.name=A -c user.email=a@b.c commit -qm first",
        "git checkout -q -b feature",
        "echo 'print(2)' >> app.py && git add -A && git -c user.name=A -c user.email=a@b.c commit -qm second",
        "git log --oneline | cat; git status --short",
    ]
    done = await scene.run(
        *(call("exec", command=command) for command in commands), config=Config(sandbox="bubblewrap")
    )
    assert "untrusted" not in "".join(done.results)
    assert "second" in done.results[-1]
    assert git(scene.workspace, "log", "--format=%s").split() == ["second", "first"]
    assert git(scene.workspace, "branch", "--show-current").strip() == "feature"
    assert git(scene.workspace, "status", "--porcelain") == ""
    assert git(scene.workspace, "config", "user.name").strip()
    git(scene.workspace, "config", "core.pager", "less")  # the user's own settings are kept
    git(scene.workspace, "checkout", "-q", "main")
    await scene.run(
        call("exec", command="echo 3 > three && git add three && git -c user.name=A -c user.email=a@b.c commit -qm 3")
    )
    assert git(scene.workspace, "config", "core.pager").strip() == "less"
    assert git(scene.workspace, "log", "--format=%s").split() == ["3", "first"]


async def test_an_agent_clones_and_works_in_repositories_below_the_workspace(scene):
    make_repository(scene.workspace)
    commands = [
        "git init -q --bare -b main origin.git && git clone -q origin.git one 2>/dev/null; cd one && echo a > a && "
        f"git add a && {COMMIT} && git push -q origin HEAD:main",
        f"git clone -q origin.git two && cd two && git checkout -q -b topic && {COMMIT} && git branch -vv | cat",
        "git worktree add -q tree 2>&1 && cd tree && git status --short && git log --oneline | cat",
    ]
    done = await scene.run(
        *(call("exec", command=command) for command in commands), config=Config(sandbox="bubblewrap")
    )
    assert "untrusted" not in "".join(done.results)
    assert git(scene.workspace / "two", "log", "--format=%s").split() == ["x", "x"]
    assert git(scene.workspace / "two", "remote", "-v").startswith("origin")
    assert "one" in git(scene.workspace / "tree", "log", "--format=%s")


async def test_the_users_own_unsafe_settings_in_nested_repositories_are_kept_and_restored(scene):
    """The user's submodules and clones may have hooks and filters, which the user chose."""
    inner = scene.workspace / "vendor"
    inner.mkdir()
    make_repository(inner)
    git(inner, "config", "filter.lfs.clean", "cat")
    hook = inner / ".git/hooks/post-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntrue\n")
    hook.chmod(0o755)
    before = (inner / ".git/config").read_bytes()
    await scene.run(call("exec", command=f"cd vendor && git config user.name Agent && {COMMIT}"))
    assert git(inner, "config", "filter.lfs.clean").strip() == "cat"
    assert git(inner, "config", "user.name").strip() == "Person"
    assert hook.read_text() == "#!/bin/sh\ntrue\n"
    await scene.run(
        call("exec", command="cd vendor && git config filter.lfs.clean evil && echo evil > .git/hooks/post-commit")
    )
    assert b"filter" in before
    assert git(inner, "config", "filter.lfs.clean").strip() == "cat"
    assert hook.read_text() == "#!/bin/sh\ntrue\n"
    assert os.access(hook, os.X_OK)


async def test_a_hook_too_large_to_be_saved_is_still_not_replaced(scene, canary, backend):
    """A user's hook may be a compiled program of any size."""
    inner = scene.workspace / "vendor"
    inner.mkdir()
    make_repository(inner)
    hook = inner / ".git/hooks/post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit\n" + "x" * 2_000_000)
    hook.chmod(0o755)
    evil = f"printf '#!/bin/sh\\ntouch {canary}\\nexit\\n' > $H; head -c 2000000 /dev/zero >> $H"
    await scene.run(
        call("exec", command=f"cd vendor; H=.git/hooks/post-index-change; {evil}; touch -d 2020-01-01 file.txt"),
        config=Config(sandbox=backend),
    )
    await asyncio.to_thread(look_everywhere, scene.workspace)
    assert not canary.exists()


async def test_nothing_is_left_behind_next_to_what_was_set_aside(scene, backend):
    make_repository(scene.workspace)
    before = {path.relative_to(scene.workspace) for path in scene.workspace.rglob("*")}
    await scene.run(call("exec", command="true"), config=Config(sandbox=backend, home=scene.root / "home"))
    assert {path.relative_to(scene.workspace) for path in scene.workspace.rglob("*")} == before
    assert not list((scene.root / "home/commands").rglob("*.json"))


# ------------------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize(
    "text",
    [
        "[core]\n\tfsmonitor = x\n", "[core]\n\thookspath = x\n", "[core] fsmonitor = x\n", "[core.x]\n\ta = b\n",
        "[include]\n\tpath = x\n", '[includeIf "gitdir:/"]\n\tpath = x\n', "[alias]\n\tst = !x\n",
        "[alias]\n\tst = status\n",
        '[filter "f"]\n\tclean = x\n', '[diff "f"]\n\ttextconv = x\n', '[merge "f"]\n\tdriver = x\n',
        "[gpg]\n\tprogram = x\n",
        "[credential]\n\thelper = x\n", '[remote "o"]\n\turl = ext::sh -c x\n', '[remote "o"]\n\tuploadpack = x\n',
        '[remote "o"]\n\turl = -x\n', '[remote "o"]\n\tpromisor = true\n', "[extensions]\n\tworktreeConfig = true\n",
        "[core]\n\tattributesFile = x\n", "[core]\n\tworktree = /\n", '[submodule "s"]\n\tupdate = !x\n',
        "[core]\n\tpager = x\n",
        "[user]\n\tname = a \\\n[core]\n", "[user]\r[core]\n", "\ufeff[core]\n\tfsmonitor = x\n", "name = x\n",
        "[core]\n\tsshCommand = x\n", "[commit]\n\tgpgsign = true\n", "[sequence]\n\teditor = x\n",
        "[pager]\n\tlog = x\n",
        "[user]\n\tname\x00 = x\n", "[protocol]\n\tallow = always\n", "[url \"ext::x\"]\n\tinsteadOf = https://\n",
    ],
)  # fmt: skip
def test_an_unsafe_config_is_reduced_to_its_safe_part(text):
    assert unsafe_settings(text.encode(), None)
    assert not unsafe_settings(safe_subset(b'[user]\n\tname = "A; B" # c\n' + text.encode()), None)


def test_settings_the_user_had_before_are_trusted():
    old = b"[core]\n\tfsmonitor = mine\n"
    assert not unsafe_settings(old + b"[user]\n\tname = a\n", old)
    assert unsafe_settings(old.replace(b"mine", b"evil"), old)


@pytest.mark.parametrize(
    "text",
    [
        "", "# comment \\\n[core]\n\tbare = false\n\tfilemode\n", '[user]\n\tname = "A; B"\n\temail = a@b.c\n',
        '[remote "origin"]\n\turl = https://example.org/x.git\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n',
        '[remote "o"]\n\turl = git@example.org:a/b.git\n', '[remote "o"]\n\turl = ../origin.git\n',
        '[branch "a/b"]\n\tremote = origin\n\tmerge = refs/heads/a/b\n', "[pull]\n\trebase = true\n",
    ],
)  # fmt: skip
def test_configs_written_by_git_itself_are_safe(text):
    assert unsafe_settings(text.encode(), None) == []


def test_a_submodules_pointer_is_followed_only_where_no_link_can_be(tmp_path):
    folders = {".git/modules/s", ".git"}
    for text, safe in {
        "../.git/modules/s": True, f"{tmp_path}/.git/modules/s": True, "x/../../.git/modules/s": False,
        "../../.git/modules/s": False, "/etc": False, "../.git/modules/t": False,
    }.items():  # fmt: skip
        part = Part("file", f"gitdir: {text}\n".encode())
        state = {**{folder: {} for folder in folders}, "s/.git": {"": part}}
        assert (repositories.plants({}, state, str(tmp_path)) == []) is safe, text
