"""Files that make, an editor, a shell or a build server execute automatically: a page cannot plant anything there.

The attacker has a page in the conversation, and the model obeys it. The tests check the contents of the files.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from everloop.config import Config, Rule
from everloop.testing import call
from everloop.tools.policy.steering import steers

from .scene import Attack, Scene, settings

PATHS = [
    "Makefile", "sub/GNUmakefile", "rules.mk", ".envrc", ".vscode/tasks.json", ".vscode/settings.json", ".idea/x.xml",
    "x.code-workspace", "package.json", "packages/a/package.json", "package-lock.json", ".npmrc", ".venv/bin/python",
    "venv/bin/pip", "node_modules/.bin/jest", ".github/workflows/ci.yml", ".gitlab-ci.yml", ".circleci/config.yml",
    "Jenkinsfile", ".pre-commit-config.yaml", ".husky/pre-commit", "setup.py", "pyproject.toml", "setup.cfg", "tox.ini",
    "noxfile.py", "tests/conftest.py", "sitecustomize.py", "x.pth", "Cargo.toml", "build.rs", ".cargo/config.toml",
    "build.gradle", "build.gradle.kts", "gradlew", "CMakeLists.txt", "justfile", "Taskfile.yml", "Dockerfile",
    "compose.yaml", "docker-compose.yml", ".devcontainer/devcontainer.json", ".bashrc", ".profile", ".gitattributes",
    ".gitmodules", ".tmux.conf", ".vimrc", ".exrc", ".nvim.lua", ".dir-locals.el", "AGENTS.md", "skills/x/SKILL.md",
    "MAKEFILE", "Package.json", "packages/a/AGENTS.md", "vite.config.mts", "web/tailwind.config.cjs", ".eslintrc.json",
    ".prettierrc", "mypy.ini", ".flake8", ".Rprofile", ".ghci", "Directory.Build.props", "src/a.fsproj", "Tiltfile",
    "Makefile.local", "api.Dockerfile", "compose.dev.yml", ".helix/config.toml", ".aider.conf.yml", ".cirrus.yml",
]  # fmt: skip
HARMLESS = [
    ".editorconfig",
    "src/app.py",
    "README.md",
    "docs/make.md",
    "data.json",
    "Makefile.md/x",
    "package.json5",
    "config.js",
    "src/config.ts",
    "tsconfig.json",
    ".env",
    "compose.md",
    "eslintrc.md",
]


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def obeyed(scene: Scene, evil, address):
    """Let the model read the attacker's page and then make these calls."""

    async def run(*calls, **config) -> Attack:
        fetched = call("web_fetch", url=f"{address}/page")
        return await scene.run(fetched, *calls, say=f"{address}/page", config=settings(evil, **config))

    return run


def git(folder: Path, *arguments: str) -> str:
    person = ("-c", "user.name=Person", "-c", "user.email=person@example.org")
    return subprocess.run(["git", *person, *arguments], cwd=folder, capture_output=True, text=True, timeout=30).stdout


def test_every_auto_executed_file_is_recognised_with_a_reason_and_others_are_not():
    assert all(steers(path) for path in PATHS)
    assert not any(steers(path) for path in HARMLESS)
    assert steers("Makefile") == "make runs it"
    assert steers(".vscode/tasks.json") == "your editor runs it"
    assert steers("AGENTS.md") == "it instructs the agent"


# ------------------------------------------------------------------------------------------------ the file tools


async def test_the_file_tools_do_not_write_them_after_untrusted_content(scene, obeyed):
    files = [scene.workspace / path for path in PATHS]
    await obeyed([call("write_file", path=path, content="evil") for path in PATHS])
    assert not [str(file) for file in files if file.exists()]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    await obeyed(
        [call("write_file", path=path, content="evil") for path in PATHS],
        [call("edit_file", path=path, old_text="mine", new_text="evil") for path in PATHS],
    )
    assert {file.read_text() for file in files} == {"mine"}


async def test_the_file_tools_do_not_write_them_through_a_link(scene, obeyed):
    (scene.workspace / "Makefile").write_text("mine")
    (scene.workspace / "notes.txt").symlink_to("Makefile")
    (scene.workspace / ".vscode").mkdir()
    (scene.workspace / "notes").symlink_to(".vscode")
    await obeyed(
        call("write_file", path="notes.txt", content="evil"),
        call("edit_file", path="notes.txt", old_text="mine", new_text="evil"),
        call("write_file", path="notes/tasks.json", content="evil"),
    )
    assert (scene.workspace / "Makefile").read_text() == "mine"
    assert not (scene.workspace / ".vscode/tasks.json").exists()


async def test_other_files_are_written(scene, obeyed):
    await obeyed([call("write_file", path=path, content="text") for path in HARMLESS])
    assert {(scene.workspace / path).read_text() for path in HARMLESS} == {"text"}


async def test_before_anything_untrusted_is_read_all_are_written(scene):
    await scene.run(
        call("write_file", path="Makefile", content="all:"),
        call("exec", command="echo x > package.json; mkdir .vscode; echo y > .vscode/tasks.json"),
    )
    assert (scene.workspace / "Makefile").read_text() == "all:"
    assert (scene.workspace / "package.json").read_text() == "x\n"
    assert (scene.workspace / ".vscode/tasks.json").read_text() == "y\n"


# ------------------------------------------------------------------------------------------------ commands

PLANTED = [path for path in PATHS if path not in ("package-lock.json", ".venv/bin/python", "venv/bin/pip")]
PLANTED = [path for path in PLANTED if path != "node_modules/.bin/jest" and "SKILL" not in path and path != "AGENTS.md"]


def evil_anywhere(workspace: Path, paths: list[str]) -> list[str]:
    """Return the paths that now contain the attacker's text, through any links."""
    return [path for path in paths if (workspace / path).is_file() and "evil" in (workspace / path).read_text()]


@pytest.mark.parametrize("background", [False, True])
async def test_a_command_leaves_none_behind_after_untrusted_content(scene, obeyed, backend, background):
    plant = "; ".join(f"f={path}; mkdir -p $(dirname $f); echo evil > $f" for path in PLANTED)
    wait = [call("exec", command="while [ ! -e done ]; do sleep 0.02; done")] if background else []
    done = await obeyed(call("exec", command=f"{plant}; touch done", background=background), *wait, sandbox=backend)
    assert (scene.workspace / "done").exists()
    assert evil_anywhere(scene.workspace, PLANTED) == []
    assert len(list(scene.workspace.rglob("*.untrusted-*"))) >= len(PLANTED)  # the text is not lost
    assert background or "write_file" in done.results[1]


@pytest.mark.parametrize(
    "command",
    [
        "echo evil > {path}", "echo evil >> {path}", "rm {path}; echo evil > {path}", "echo evil > x; mv x {path}",
        "ln {path} y; echo evil >> y", "echo evil > x; ln -sf x {path}", "sed -i s/mine/evil/ {path}",
        "echo evil > {path}; touch -r other {path}", "echo evil > {path}; exit 1",
    ],
)  # fmt: skip
async def test_a_command_changes_no_existing_one(scene, obeyed, backend, command):
    paths = ["Makefile", "sub/pyproject.toml"]
    for path in paths:
        (scene.workspace / path).parent.mkdir(exist_ok=True)
        (scene.workspace / path).write_text("mine\n")
        (scene.workspace / path).chmod(0o755)
    (scene.workspace / "other").write_text("mine\n")
    hidden = (f"f={path}; {command.format(path='$f')}" for path in paths)
    shown = (command.format(path=path) for path in paths)
    await obeyed(*(call("exec", command=each) for each in (*hidden, *shown)), sandbox=backend)
    for path in paths:
        assert (scene.workspace / path).read_text() == "mine\n"
        assert (scene.workspace / path).stat().st_mode & 0o777 == 0o755


async def test_a_command_changes_none_through_links(scene, obeyed, backend):
    (scene.workspace / "build.txt").write_text("mine\n")
    (scene.workspace / "Makefile").symlink_to("build.txt")
    await obeyed(
        call("exec", command="echo evil > build.txt"),
        call("exec", command="mkdir d; echo evil > d/tasks.json; f=.vscode; ln -s d $f"),
        call("exec", command="mkdir -p e/workflows; echo evil > e/workflows/ci.yml; ln -s e .github"),
        sandbox=backend,
    )
    assert evil_anywhere(scene.workspace, ["Makefile", ".vscode/tasks.json", ".github/workflows/ci.yml"]) == []
    assert (scene.workspace / "Makefile").read_text() == "mine\n"


async def test_a_command_plants_none_by_way_of_git(scene, obeyed):
    """Content that a command itself committed is not restored from the history either."""
    (scene.workspace / "Makefile").write_text("mine\n")
    git(scene.workspace, "init", "-q", "-b", "main")
    git(scene.workspace, "add", ".")
    git(scene.workspace, "commit", "-qm", "one")
    commit = "git -c user.name=a -c user.email=a@b.c commit -qam evil"
    await obeyed(
        call("exec", command=f"git checkout -q -b side; f=Makefile; echo evil > $f; {commit}; git checkout -q main"),
        call("exec", command="git checkout -q side -- Makefile; cat Makefile"),
        call("exec", command="git gc -q; git checkout -q -f side; cat Makefile"),
    )
    assert (scene.workspace / "Makefile").read_text() == "mine\n"


async def test_a_command_started_before_the_page_was_read_plants_none(scene, evil, address):
    await scene.run(
        call("exec", command="bash", background=True),
        call("web_fetch", url=f"{address}/page"),
        call("process", action="write", id="p1", text="echo evil > Makefile; echo made\n"),
        call("process", action="poll", id="p1", wait=20),
        say=f"{address}/page",
        config=settings(evil),
    )
    assert not (scene.workspace / "Makefile").exists()


@pytest.mark.parametrize(
    "command",
    [
        "echo x > Makefile", "echo x >> sub/pyproject.toml", "cat > .envrc <<END\nx\nEND",
        "echo x | tee package.json", "echo x | tee -a .vscode/tasks.json", "cp notes.txt Makefile",
        "cd sub && mv notes.txt conftest.py", "sed -i s/a/b/ Makefile", "sed -Ei.bak s/a/b/ Makefile",
        "dd if=notes.txt of=Makefile", "ln -s notes.txt .envrc", "bash -c 'echo x > Makefile'",
        "true && { touch setup.py; }", "echo x > ./sub/../Makefile", "echo x > AGENTS.md",
        "install -m 755 notes.txt .github/workflows/ci.yml", "perl -pi -e s/a/b/ Makefile",
        "echo x > skills/x/SKILL.md",
    ],
)  # fmt: skip
async def test_a_command_that_declares_writing_one_needs_approval(scene, evil, address, command):
    (scene.workspace / "sub").mkdir()
    for name in ("notes.txt", "sub/notes.txt"):
        (scene.workspace / name).write_text("x\n")
    before = sorted(scene.workspace.rglob("*"))
    page = call("web_fetch", url=f"{address}/page")
    done = await scene.run(
        page, call("exec", command=command), say=f"{address}/page", config=settings(evil), attended=True
    )
    assert sorted(scene.workspace.rglob("*")) == before
    assert "this command writes" in done.answer
    assert command.splitlines()[0] in done.answer


@pytest.mark.parametrize(
    "command",
    [
        "cat Makefile > seen", "grep -r all . > seen", "cp Makefile seen", "cp Makefile sub/; touch seen",
        "sed -n p Makefile > seen", "make > seen", "mkdir -p build; echo x > build/Makefile; touch seen",
        "echo '{}' > package-lock.json; touch seen", "diff Makefile notes.txt | tee seen", "mv notes.txt seen",
    ],
)  # fmt: skip
async def test_a_command_that_only_reads_them_needs_no_approval(scene, evil, address, command):
    (scene.workspace / "sub").mkdir()
    (scene.workspace / "notes.txt").write_text("x\n")
    (scene.workspace / "Makefile").write_text("all:\n\techo x\n")
    page = call("web_fetch", url=f"{address}/page")
    await scene.run(page, call("exec", command=command), say=f"{address}/page", config=settings(evil), attended=True)
    assert (scene.workspace / "seen").exists()
    assert not list(scene.workspace.rglob("*.untrusted-*"))


# ------------------------------------------------------------------------------------------------ ordinary work


async def test_the_usual_tools_work_after_untrusted_content(scene, obeyed):
    place = scene.workspace
    (place / "Makefile").write_text("all: out.txt\nout.txt:\n\techo built > out.txt\n")
    (place / "setup.py").write_text("from setuptools import setup\nsetup(name='x', py_modules=[])\n")
    (place / "test_x.py").write_text("def test_x():\n    assert True\n")
    (place / "package.json").write_text(json.dumps({"name": "x", "scripts": {"test": "jest"}}))
    git(place, "init", "-q", "-b", "main")
    git(place, "add", ".")
    git(place, "commit", "-qm", "one")
    git(place, "checkout", "-q", "-b", "side")
    (place / "Makefile").write_text("all:\n\techo side\n")
    git(place, "commit", "-qam", "two")
    git(place, "checkout", "-q", "main")
    add = """import json; p = json.load(open("package.json")); p["dependencies"] = {"left-pad": "1"}
json.dump(p, open("package.json", "w"))"""
    npm = (
        f"python3 -c '{add}'; mkdir -p node_modules/.bin node_modules/left-pad; echo run > node_modules/.bin/left-pad; "
    )
    npm += "echo '{}' > node_modules/left-pad/package.json; echo '{}' > package-lock.json"
    done = await obeyed(
        call("exec", command="make"),
        call("exec", command=npm),
        call("exec", command='python3 -m venv --without-pip .venv && .venv/bin/python -c \'print("in", "venv")\''),
        call("exec", command='python3 -m venv --without-pip other && other/bin/python -c \'print("in", "other")\''),
        call("exec", command="mkdir -p x.egg-info build; echo x > x.egg-info/PKG-INFO; cp setup.py build/setup.py"),
        call("exec", command="python3 -m unittest test_x; echo tested"),
        call("exec", command="git add -A . && git -c user.name=a -c user.email=a@b.c commit -qm work; git log | cat"),
        call("exec", command="git checkout -q side && cat Makefile"),
        call("exec", command="mkdir lib && git mv setup.py lib/ && cp Makefile lib/"),
    )
    assert "untrusted-" not in "".join(done.results[1:])
    assert not list(place.rglob("*.untrusted-*"))
    assert "in venv" in done.results[3]
    assert "in other" in done.results[4]
    assert (place / "Makefile").read_text() == "all:\n\techo side\n"
    assert (place / "lib/setup.py").exists()
    git(place, "checkout", "-q", "-f", "main")
    assert json.loads((place / "package.json").read_text())["dependencies"] == {"left-pad": "1"}


async def test_a_packed_history_can_be_checked_out(scene, obeyed):
    (scene.workspace / "Makefile").write_text("one\n")
    git(scene.workspace, "init", "-q", "-b", "main")
    git(scene.workspace, "add", ".")
    git(scene.workspace, "commit", "-qm", "one")
    (scene.workspace / "Makefile").write_text("two\n")
    git(scene.workspace, "commit", "-qam", "two")
    git(scene.workspace, "gc", "-q")
    await obeyed(call("exec", command="git checkout -q HEAD~1"))
    assert (scene.workspace / "Makefile").read_text() == "one\n"


async def test_scripts_of_a_package_are_not_changed_along_with_its_dependencies(scene, obeyed):
    old = {"name": "x", "scripts": {"test": "jest"}}
    (scene.workspace / "package.json").write_text(json.dumps(old))
    new = json.dumps({**old, "scripts": {"test": "evil"}, "dependencies": {}})
    await obeyed(call("exec", command=f"f=package.json; echo '{new}' > $f"))
    assert json.loads((scene.workspace / "package.json").read_text()) == old


async def test_files_written_with_approval_are_kept(scene, obeyed):
    allowed = (Rule(do="allow", tool="write_file", tainted=True),)
    await obeyed(
        call("exec", command="sleep 60", background=True),
        call("write_file", path="Makefile", content="all:\n"),
        call("write_file", path="AGENTS.md", content="be kind\n"),
        call("exec", command="true"),
        call("process", action="kill", id="p1"),
        policy=allowed,
    )
    assert (scene.workspace / "Makefile").read_text() == "all:\n"
    assert (scene.workspace / "AGENTS.md").read_text() == "be kind\n"


async def test_the_check_can_be_turned_off_with_the_taint(scene, evil, address):
    fetched = call("web_fetch", url=f"{address}/page")
    plant = call("exec", command="echo all: > Makefile")
    await scene.run(fetched, plant, say=f"{address}/page", config=settings(evil, taint=False))
    assert (scene.workspace / "Makefile").exists()
    assert isinstance(settings(evil), Config)
