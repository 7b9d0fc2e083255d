"""Shell commands as a model runs them, with every wall and with none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from everloop.tools.base import Output, Plan, ToolError
from everloop.tools.context import CallContext, current
from everloop.tools.shell import processes
from everloop.tools.shell.shell import ShellSettings, shell_tools


class Desk:
    """A workspace and the two tools over it."""

    def __init__(self, folder: Path, settings: ShellSettings, **context: Any) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.context = CallContext("me", "s", "t", "c", "cli", "d", folder, True, "k", self.lines.append)
        self.context = replace(self.context, **context)
        self.tools = {tool.name: tool for tool in shell_tools(settings)}

    async def output(self, name: str, **arguments: Any) -> Output:
        token = current.set(self.context)
        try:
            result = await self.tools[name].execute(**arguments)
        finally:
            current.reset(token)
        assert isinstance(result, Output)
        return result

    async def __call__(self, command: str, **arguments: Any) -> str:
        return (await self.output("exec", command=command, **arguments)).text

    async def process(self, action: str, id: str = "", **arguments: Any) -> str:
        return (await self.output("process", action=action, id=id, **arguments)).text

    async def fails(self, command: str, **arguments: Any) -> str:
        with pytest.raises(ToolError) as caught:
            await self(command, **arguments)
        return str(caught.value)

    def plan(self, name: str = "exec", **arguments: Any) -> Plan:
        token = current.set(self.context)
        try:
            return self.tools[name].plan(arguments)
        finally:
            current.reset(token)

    async def start(self, command: str, **arguments: Any) -> str:
        """The id of a command in the background."""
        said = await self(command, background=True, **arguments)
        return next(word.rstrip(";") for word in said.split() if word.startswith("p") and word[1:2].isdigit())

    async def until(self, id: str, text: str) -> str:
        """What a background command says until it has said this."""
        said = ""
        async with asyncio.timeout(20):
            while text not in said:
                said += await self.process("poll", id, wait=5)
        return said

    async def close(self) -> None:
        for tool in self.tools.values():
            await tool.close()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    return place


@pytest_asyncio.fixture(params=["bubblewrap", "landlock", "off"])
async def desk(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    """With each wall in turn."""
    desk = Desk(folder, ShellSettings(mode=request.param))
    yield desk
    await desk.close()


@pytest_asyncio.fixture
async def one(folder: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """With the wall of this machine, where it makes no difference which."""
    desk = Desk(folder, ShellSettings(), outputs=tmp_path / "outputs")
    yield desk
    await desk.close()


async def gone(path: Path, seconds: float) -> bool:
    """Whether a file that a survivor would write stays away."""
    await asyncio.sleep(seconds)
    return not path.exists()


# --- running -------------------------------------------------------------------------------------------------------


async def test_both_streams_come_in_the_order_they_were_written(desk):
    assert await desk("echo one; echo two >&2; echo three; echo four >&2") == "one\ntwo\nthree\nfour"


async def test_a_command_is_read_by_bash_in_the_workspace(desk, folder):
    (folder / "sub").mkdir()
    assert await desk("[[ a == a ]] && pwd; echo $'tab\\tbed'; cat <(echo x)") == f"{folder}\ntab\tbed\nx"
    assert await desk("pwd", working_dir="sub") == f"{folder}/sub"
    assert await desk("pwd", working_dir=str(folder / "sub")) == f"{folder}/sub"


@pytest.mark.parametrize(
    ("command", "said"),
    [("exit 3", "[exit status 3]"), ("kill -TERM $$", "[exit status 143, SIGTERM]"), ("true", "(no output)"),
     ("echo out; exit 1", "out\n[exit status 1]"), ("exit 255", "[exit status 255]")],
)  # fmt: skip
async def test_how_a_command_ended_is_said(desk, command, said):
    output = await desk.output("exec", command=command)
    assert output == Output(said)


async def test_standard_input_is_empty(desk):
    assert await desk("cat; echo done") == "done"


async def test_files_are_made_changed_and_given_modes(desk, folder):
    await desk(
        "mkdir -p a/b; echo hi > a/b/c; chmod 700 a/b/c; ln -s c a/b/link; mv a/b/c a/b/d; touch -d 2001-01-01 a/e"
    )
    assert (folder / "a/b/d").read_text() == "hi\n"
    assert (folder / "a/b/d").stat().st_mode & 0o777 == 0o700
    assert await desk("printf '#!/bin/sh\\necho ran' > run; chmod +x run; ./run") == "ran"
    await desk("python3 -c \"import os; os.chmod('run', 0o644); os.fchmod(os.open('a/e', 0), 0o600)\"")
    assert [(folder / name).stat().st_mode & 0o777 for name in ("run", "a/e")] == [0o644, 0o600]


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


async def test_a_variable_that_is_named_is_let_through(folder, monkeypatch):
    monkeypatch.setenv("MY_SETTING", "blue")
    assert await Desk(folder, ShellSettings(environment=("MY_SETTING",)))("echo $MY_SETTING") == "blue"


async def test_the_home_folder_can_be_written_and_is_nobodys(desk):
    if desk.tools["exec"]._shell.settings.mode != "off":
        assert await desk("touch ~/x && ls ~") == "x"
        assert await desk("ls ~") == "(no output)"


@pytest.mark.parametrize("command", ["", "  \n", "echo a\0b"])
async def test_what_is_no_command_is_refused(one, command):
    assert "no command" in await one.fails(command)


async def test_a_command_too_long_for_the_system_is_explained(one):
    assert "write it to a file" in await one.fails("echo " + "x" * 200_000)


@pytest.mark.parametrize("where", ["/", "..", "../outside", "/etc/../root", "~", "link", "a\0b", "none", "file"])
async def test_a_folder_out_of_reach_is_refused(one, folder, where):
    (folder.parent / "outside").mkdir()
    (folder / "link").symlink_to("../outside")
    (folder / "file").touch()
    assert await one.fails("pwd", working_dir=where)


async def test_text_that_has_no_utf8_form_and_control_sequences_do_no_harm(one):
    assert await one("printf 'a\\xffb\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\x00end'") == "a\ufffdbredend"
    assert await one("printf '10%%\\r20%%\\r100%%\\ndone\\r\\n'") == "100%\ndone"
    assert await one("echo '\ud800'") == "?"


# --- limits --------------------------------------------------------------------------------------------------------


async def test_a_command_that_takes_too_long_is_stopped_and_what_it_said_is_kept(desk):
    began = time.monotonic()
    output = await desk.output("exec", command="echo before; sleep 30; echo after", timeout=0.5)
    assert time.monotonic() - began < 8
    assert output.failed
    assert output.text.startswith("before\n[")
    assert "after" not in output.text


async def test_a_command_is_asked_to_end_before_it_is_killed(desk, folder):
    output = await desk.output(
        "exec", command="trap 'echo cleaning; touch cleaned; exit' TERM; sleep 30 & wait", timeout=0.5
    )
    assert "cleaning" in output.text
    assert (folder / "cleaned").exists()


async def test_one_that_will_not_end_is_killed(desk, folder):
    began = time.monotonic()
    output = await desk.output(
        "exec", command="trap '' TERM; for i in $(seq 15); do sleep 0.1; done; touch late", timeout=0.3
    )
    assert output.failed
    assert time.monotonic() - began < 6
    assert await gone(folder / "late", 1)


async def test_no_call_gets_more_time_than_the_settings_allow(folder):
    desk = Desk(folder, ShellSettings(max_timeout=0.4))
    began = time.monotonic()
    assert (await desk.output("exec", command="sleep 30", timeout=1000)).failed
    assert time.monotonic() - began < 10


async def test_a_cancelled_turn_ends_the_command_and_all_it_started(desk, folder):
    command = "touch started; setsid sh -c 'sleep 1; touch survived' & sleep 1; touch survived"
    task = asyncio.create_task(desk(command))
    async with asyncio.timeout(20):
        while not (folder / "started").exists():
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(folder / "survived", 1.2)


async def test_a_daemon_does_not_outlive_its_command(desk, folder):
    forks = "[os.fork() and os._exit(0) or os.setsid() for _ in (1, 2)]"
    await desk(f"python3 -c \"import os, time; {forks}; time.sleep(1); open('survived', 'w')\"; true")
    await desk("setsid sh -c 'sleep 1; touch survived' & sleep 0.2; kill -9 0")
    assert await gone(folder / "survived", 1.2)


async def test_a_long_output_keeps_its_two_ends_and_is_saved_whole(one):
    said = await one("seq 1 20000")
    assert said.startswith("1\n2\n3\n")
    assert said.endswith("19999\n20000")
    assert 29_000 < len(said) < 31_000
    place = said.split("of them: ")[1].split(" …")[0]
    assert Path(place).read_text() == "".join(f"{number}\n" for number in range(1, 20001))
    assert await one(f"tail -n 1 {place}; touch {place} 2>/dev/null || echo closed") == "20000\nclosed"


async def test_an_output_that_fits_is_not_saved(one, tmp_path):
    assert len(await one("seq 1 5000")) < 30_000
    assert not (tmp_path / "outputs").exists()


async def test_only_so_much_is_saved_and_without_a_folder_nothing(folder, tmp_path):
    desk = Desk(folder, ShellSettings(output_limit=100, saved_limit=1000), outputs=tmp_path / "outputs")
    said = await desk("seq 1 20000")
    assert said.startswith("1\n2\n")
    assert said.endswith("20000")
    assert [path.stat().st_size for path in (tmp_path / "outputs").iterdir()] == [1000]
    without = await Desk(folder, ShellSettings(output_limit=100))("seq 1 20000")
    assert len(without) < 300
    assert "read_file" not in without


async def test_letters_of_several_bytes_are_counted_as_letters(folder):
    desk = Desk(folder, ShellSettings(output_limit=1000))
    assert await desk("for i in $(seq 900); do printf é; done") == "é" * 900
    said = await desk("for i in $(seq 1100); do printf é; done")
    assert said.count("é") == 1000
    assert "\ufffd" not in said


async def test_progress_is_shown_while_the_command_runs_and_not_too_often(one):
    await one("for i in $(seq 8); do echo line $i; sleep 0.1; done; seq 1 100000")
    assert one.lines[0] == "line 1"
    assert 2 <= len(one.lines) <= 12
    assert any(line.startswith("line") for line in one.lines[1:])


async def test_the_last_line_before_a_long_silence_is_shown(one):
    task = asyncio.create_task(one("echo one; echo two; sleep 20"))
    async with asyncio.timeout(10):
        while "two" not in one.lines:
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_lacks_the_network_is_told_how_to_get_it(folder):
    for mode in ("bubblewrap", "landlock"):
        desk = Desk(folder, ShellSettings(mode=mode))
        assert "network=true" in await desk("curl -sS http://no-such-host.invalid/")
        assert "network=true" not in await desk("exit 4")


async def test_a_command_with_network_reaches_a_server_and_its_output_is_untrusted(folder):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nfrom outside")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    for mode in ("bubblewrap", "landlock", "off"):
        desk = Desk(folder, ShellSettings(mode=mode))
        output = await desk.output("exec", command=f"curl -sS {url}", network=True)
        assert output == Output("from outside", untrusted=True)
        late = await desk.output("exec", command="sleep 9", network=True, timeout=0.2)
        assert late.untrusted
    server.close()


# --- when there is a wall ------------------------------------------------------------------------------------------


async def test_an_unrestricted_workspace_means_no_sandbox_unless_the_settings_want_one(folder):
    (folder.parent / "other.txt").write_text("there")
    free = Desk(folder, ShellSettings(), restricted=False)
    assert await free("cat ../other.txt") == "there"
    assert await free("pwd", working_dir="..") == str(folder.parent)
    confined = Desk(folder, ShellSettings(confine=True), restricted=False)
    assert "there" not in await confined("cat ../other.txt")
    loose = Desk(folder, ShellSettings(confine=False))
    assert await loose("cat ../other.txt") == "there"


def test_a_plan_says_exactly_what_will_run(folder):
    desk = Desk(folder, ShellSettings())
    plan = desk.plan(command="make test", working_dir="sub")
    assert plan == Plan(f"make test\n(in {folder}/sub, in the sandbox without network)", command="make test")
    networked = desk.plan(command="curl x", network=True, background=True, keep=True)
    assert (networked.network, networked.sends, networked.unconfined) == (True, True, False)
    assert "with network, in the background, and on after the turn" in networked.shown
    for free in (Desk(folder, ShellSettings(mode="off")), Desk(folder, ShellSettings(), restricted=False)):
        plan = free.plan(command="ls")
        assert (plan.network, plan.sends, plan.unconfined) == (False, True, True)


def test_the_flags_fit_what_the_tools_do(folder):
    tools = Desk(folder, ShellSettings(max_timeout=100)).tools
    assert {name: (tool.replay, tool.parallel) for name, tool in tools.items()} == {
        "exec": ("never", False), "process": ("never", True)
    }  # fmt: skip
    assert (tools["exec"].timeout or 0) > 100


# --- in the background ---------------------------------------------------------------------------------------------


async def test_a_background_command_is_polled_written_to_and_killed(desk):
    id = await desk.start("echo ready; while read line; do echo got $line; done; echo end; sleep 30")
    assert "ready" in await desk.until(id, "ready")
    await desk.process("write", id, text="one\ntwo\n")
    assert "got one" in await desk.until(id, "two")
    assert "got" not in await desk.process("poll", id)
    await desk.process("write", id)
    assert "end" in await desk.until(id, "end")
    with pytest.raises(ToolError):
        await desk.process("write", id, text="more")
    assert id in await desk.process("list")
    assert "SIGTERM" in await desk.process("kill", id)
    assert id not in await desk.process("list")
    with pytest.raises(ToolError):
        await desk.process("poll", id)


async def test_the_end_of_a_background_command_is_told(desk):
    id = await desk.start("echo bye; exit 7")
    said = await desk.until(id, "exit status 7")
    assert "bye" in said
    assert "exit status 7" in await desk.process("list")


async def test_polling_waits_for_news_only_as_long_as_asked(one):
    id = await one.start("sleep 0.5; echo news; sleep 30")
    began = time.monotonic()
    assert "running" in await one.process("poll", id)
    assert time.monotonic() - began < 0.4
    assert "news" in await one.process("poll", id, wait=20)
    assert time.monotonic() - began < 10
    assert "news" not in await one.process("poll", id, wait=0.1)


async def test_a_command_that_is_ended_while_its_sandbox_is_being_made_does_not_run_on(desk, folder):
    for number in range(12):
        await desk.start(f"sleep 0.6; touch survived{number}")
        await asyncio.sleep(number / 1000)
        await desk.tools["exec"].end_turn("t")
    await asyncio.sleep(0.7)
    assert list(folder.glob("survived*")) == []


async def test_background_commands_end_with_their_turn_unless_they_are_kept(desk, folder):
    mortal = (
        "(trap '' TERM; sleep 1; touch survived) & setsid sh -c 'sleep 1; touch survived' & sleep 1; touch survived"
    )
    await desk.start(mortal)
    kept = await desk.start("sleep 0.5; touch kept; sleep 30", keep=True)
    await desk.tools["exec"].end_turn("another turn")
    assert len((await desk.process("list")).splitlines()) == 2
    await desk.tools["exec"].end_turn("t")
    assert (await desk.process("list")).startswith(kept)
    assert await gone(folder / "survived", 1.2)
    assert (folder / "kept").exists()
    await desk.close()
    assert "Nothing" in await desk.process("list")


async def test_another_session_and_another_owner_see_nothing(one):
    id = await one.start("sleep 30")
    mine = one.context
    for other in (replace(mine, session="other"), replace(mine, owner="other")):
        one.context = other
        assert id not in await one.process("list")
        for action in ("poll", "write", "kill"):
            with pytest.raises(ToolError):
                await one.process(action, id, text="x")
    one.context = mine
    assert "running" in await one.process("poll", id)


async def test_there_are_only_so_many_at_once(folder):
    desk = Desk(folder, ShellSettings(session_background=2, total_background=3))
    first = await desk.start("sleep 30")
    await desk.start("sleep 30")
    assert "kill one" in await desk.fails("sleep 30", background=True)
    await desk.process("kill", first)
    done = await desk.start("true")
    await desk.until(done, "exit status 0")
    await desk.start("sleep 30")  # in the place of the one that is over
    desk.context = replace(desk.context, session="other")
    await desk.start("sleep 30")
    assert "kill one" in await desk.fails("sleep 30", background=True)
    await desk.close()


async def test_a_background_command_that_says_too_much_is_remembered_by_its_end(folder):
    desk = Desk(folder, ShellSettings(output_limit=1000))
    id = await desk.start("seq 1 100000; touch done; sleep 30")
    async with asyncio.timeout(20):
        while not (folder / "done").exists():
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    said = await desk.process("poll", id)
    assert len(said) < 1200
    assert "left out" in said
    assert "99999\n100000\n" in said
    await desk.close()


async def test_writing_to_a_command_with_network_could_send_data_off(folder):
    desk = Desk(folder, ShellSettings())
    quiet = await desk.start("cat")
    loud = await desk.start("cat", network=True)
    assert not desk.plan("process", action="write", id=quiet, text="x").sends
    assert desk.plan("process", action="write", id=loud, text="secret").sends
    assert "secret" in desk.plan("process", action="write", id=loud, text="secret").shown
    assert not desk.plan("process", action="poll", id=loud).sends
    assert (await desk.output("process", action="poll", id=loud)).untrusted
    await desk.close()


RUNTIME = """
import asyncio, sys
from pathlib import Path
from everloop.tools.context import CallContext, current
from everloop.tools.shell.shell import ShellSettings, shell_tools

async def main():
    run, _ = shell_tools(ShellSettings(mode=sys.argv[1]))
    folder = Path(sys.argv[2])
    current.set(CallContext("me", "s", "t", "c", "cli", "d", folder, True, "k", lambda text: None))
    late = "touch started{0}; (trap '' TERM; setsid sh -c 'sleep 1; touch survived{0}') & sleep 1; touch survived{0}"
    await run.execute(late.format(1), background=True, keep=True)
    await run.execute(late.format(2))

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["bubblewrap", "landlock", "off"])
async def test_nothing_survives_a_runtime_that_is_killed(folder, tmp_path, mode):
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME, mode, str(folder)], env=environment)
    try:
        async with asyncio.timeout(20):
            while not ((folder / "started1").exists() and (folder / "started2").exists()):
                await asyncio.sleep(0.02)
    finally:
        os.kill(runtime.pid, signal.SIGKILL)
        runtime.wait()
    await asyncio.sleep(1.2)
    assert sorted(path.name for path in folder.iterdir()) == ["started1", "started2"]
    assert list((tmp_path / "tmp").iterdir()) == []
