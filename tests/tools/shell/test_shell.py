"""A command's environment, and how its end is reported."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest

from everloop.tools.base import Output
from everloop.tools.shell.shell import ShellSettings

from ...support.in_memory import MEMORY
from .desks import Desk


async def test_both_streams_arrive_in_the_order_they_were_written(desk):
    assert await desk("echo one; echo two >&2; echo three; echo four >&2") == "one\ntwo\nthree\nfour"


async def test_a_command_is_run_by_bash_in_the_workspace(desk, folder):
    (folder / "sub").mkdir()
    assert await desk("[[ a == a ]] && pwd; echo $'tab\\tbed'; cat <(echo x)") == f"{folder}\ntab\tbed\nx"
    assert await desk("pwd", working_dir="sub") == f"{folder}/sub"
    assert await desk("pwd", working_dir=str(folder / "sub")) == f"{folder}/sub"


@pytest.mark.parametrize(
    ("command", "said"),
    [("exit 3", "[exit status 3]"), ("kill -TERM $$", "[exit status 143, SIGTERM]"), ("true", "(no output)"),
     ("echo out; exit 1", "out\n[exit status 1]"), ("exit 255", "[exit status 255]")],
)  # fmt: skip
async def test_the_way_a_command_ended_is_reported(desk, command, said):
    output = await desk.output("exec", command=command)
    assert output == Output(said)


async def test_missing_space_is_reported_with_the_place(desk, monkeypatch):
    elsewhere = (
        r"\[the disk of the workspace has [0-9.]+ [KMG]B free: another place that the command wrote to is full\]"
    )
    assert re.search(rf"No space left on device\n\[exit status 1\]\n{elsewhere}$", await desk("echo x > /dev/full"))
    assert "[the disk" not in await desk("echo No space left on device")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
    assert "[the disk of the workspace is full: free some space]" in await desk("echo x > /dev/full")


async def test_standard_input_is_empty(desk):
    assert await desk("cat; echo done") == "done"


async def test_files_can_be_created_changed_and_given_modes(desk, folder):
    await desk(
        "mkdir -p a/b; echo hi > a/b/c; chmod 700 a/b/c; ln -s c a/b/link; mv a/b/c a/b/d; touch -d 2001-01-01 a/e"
    )
    assert (folder / "a/b/d").read_text() == "hi\n"
    assert (folder / "a/b/d").stat().st_mode & 0o777 == 0o700
    assert await desk("printf '#!/bin/sh\\necho ran' > run; chmod +x run; ./run") == "ran"
    await desk("python3 -c \"import os; os.chmod('run', 0o644); os.fchmod(os.open('a/e', 0), 0o600)\"")
    assert [(folder / name).stat().st_mode & 0o777 for name in ("run", "a/e")] == [0o644, 0o600]


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no such folder")
@pytest.mark.platform("only Linux has this folder")
async def test_a_workspace_below_dev_is_changed_and_a_device_is_not():
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        desk = Desk(Path(folder), ShellSettings(mode="landlock"))
        assert await desk("touch -d 2001-01-01 a && chmod 700 a && stat -c %a,%Y a") == "700,978307200"
        assert "Operation not permitted" in await desk("chmod 666 /dev/null")
        await desk.close()


async def test_ordinary_programs_work(desk):
    author = "-c user.name=a -c user.email=a@b"
    said = await desk(f"git init -q . && git {author} commit -q --allow-empty -m x; git log --format=%s")
    assert said.splitlines()[-1] == "x"
    assert (
        await desk("python3 -c 'import ssl, json, multiprocessing, tempfile; print(tempfile.mkstemp()[0] > 0)'")
        == "True"
    )
    assert await desk("node -e 'console.log(1 + 1)'") == "2"
    assert (
        await desk("seq 3 | sort -r | xargs echo; echo $((2**40)); mktemp -d >/dev/null && echo made")
        == "3 2 1\n1099511627776\nmade"
    )
    assert await desk("timeout 0.2 sleep 5; echo $?") == "124"


async def test_nothing_of_the_runtimes_environment_is_passed_on(desk, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "canary-123")
    monkeypatch.setenv("LC_TIME", "C")
    said = await desk("env")
    assert "canary-123" not in said
    assert "LC_TIME=C" in said
    assert "TERM=dumb" in said


async def test_an_allowlisted_variable_is_passed_on(folder, monkeypatch):
    monkeypatch.setenv("MY_SETTING", "blue")
    assert await Desk(folder, ShellSettings(environment=("MY_SETTING",)))("echo $MY_SETTING") == "blue"


async def test_the_home_folder_is_writable_and_empty(desk):
    if desk.tools["exec"]._shell.settings.mode != "off":
        assert await desk("touch ~/x && ls ~") == "x"
        assert await desk("ls ~") == "(no output)"


@pytest.mark.parametrize(("command", "why"), [("", "empty"), ("  \n", "empty"), ("echo a\0b", "zero byte")])
async def test_an_invalid_command_is_refused(one, command, why):
    assert why in await one.fails(command)


async def test_a_command_too_long_for_the_system_is_explained(one):
    assert "write it to a file" in await one.fails("echo " + "x" * 200_000)


@pytest.mark.parametrize("where", ["/", "..", "../outside", "/etc/../root", "~", "link", "a\0b", "none", "file"])
async def test_a_folder_out_of_reach_is_refused(one, folder, where):
    (folder.parent / "outside").mkdir()
    (folder / "link").symlink_to("../outside")
    (folder / "file").touch()
    assert await one.fails("pwd", working_dir=where)


async def test_unencodable_text_and_control_sequences_are_handled(one):
    assert await one("printf 'a\\xffb\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\x00end'") == "a\ufffdbredend"
    assert await one("printf '10%%\\r20%%\\r100%%\\ndone\\r\\n'") == "100%\ndone"
    assert await one("touch x; echo \ud800 \ud83d\ude00; rm x") == "\ufffd 😀"  # "?" would match the file
