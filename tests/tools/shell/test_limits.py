"""Limits of time and output."""

from __future__ import annotations

import asyncio
import time
from asyncio.base_subprocess import BaseSubprocessTransport
from pathlib import Path

import pytest

from everloop.tools.shell import processes
from everloop.tools.shell.shell import ShellSettings
from tests.support.commands import until

from .desks import Desk, beats, silent


async def test_a_command_that_takes_too_long_is_stopped_and_its_output_kept(desk):
    began = time.monotonic()
    output = await desk.output("exec", command="echo before; sleep 50; echo after", timeout=2)
    assert time.monotonic() - began < 25
    assert output.failed
    assert output.text.startswith("before\n[")
    assert "after" not in output.text


async def test_a_command_is_terminated_before_it_is_killed(desk, folder, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 20)  # one that obeys uses none of the grace period
    output = await desk.output(
        "exec", command="trap 'echo cleaning; touch cleaned; exit' TERM; sleep 30 & wait", timeout=2
    )
    assert "cleaning" in output.text
    assert (folder / "cleaned").exists()


async def test_a_command_that_ignores_termination_is_killed(desk, folder):
    began = time.monotonic()
    output = await desk.output("exec", command=f"trap '' TERM; {beats('late')}", timeout=1)
    assert output.failed
    assert time.monotonic() - began < 20
    assert await silent(folder)


async def test_no_call_gets_more_time_than_the_settings_allow(folder):
    desk = Desk(folder, ShellSettings(max_timeout=0.4))
    began = time.monotonic()
    assert (await desk.output("exec", command="sleep 50", timeout=1000)).failed
    assert time.monotonic() - began < 25


async def test_a_cancelled_turn_ends_the_command_and_all_it_started(desk, folder):
    task = asyncio.create_task(desk(f"setsid sh -c '{beats('one')}' & {beats('two')}"))
    await until(lambda: (folder / "one").exists() and (folder / "two").exists())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await silent(folder)


async def test_a_daemon_does_not_outlive_its_command(desk, folder):
    forks = "[os.fork() and os._exit(0) or os.setsid() for _ in (1, 2)]"
    beat = "[open('one', 'a').write('.') and time.sleep(0.05) for _ in range(600)]"
    await desk(f'python3 -c "import os, time; {forks}; {beat}"; true')
    await desk(f"setsid sh -c '{beats('two')}' & sleep 0.2; kill -9 0")
    assert await silent(folder)


async def test_a_long_output_keeps_its_start_and_end_and_is_saved_in_full(one):
    said = await one("seq 1 20000")
    assert said.startswith("1\n2\n3\n")
    assert said.endswith("19999\n20000")
    assert 29_000 < len(said) < 31_000
    place = said.split("of them: ")[1].split(" …")[0]
    assert Path(place).read_text() == "".join(f"{number}\n" for number in range(1, 20001))
    assert await one(f"tail -n 1 {place}; touch {place} 2>/dev/null || echo closed") == "20000\nclosed"


async def test_a_slow_disk_loses_nothing_from_the_end_of_a_long_output(one, monkeypatch):
    append = processes.Capture._append

    def slowly(self: processes.Capture, data: bytes) -> None:
        time.sleep(0.6)  # for each of several chunks
        append(self, data)

    monkeypatch.setattr(processes.Capture, "_append", slowly)
    assert (await one("seq 1 200000")).endswith("199999\n200000")


async def test_an_output_that_fits_is_not_saved(one, tmp_path):
    assert len(await one("seq 1 5000")) < 30_000
    assert not (tmp_path / "outputs").exists()


async def test_saved_output_is_limited_and_nothing_is_saved_without_a_folder(folder, tmp_path):
    desk = Desk(folder, ShellSettings(output_limit=100, saved_limit=1000), outputs=tmp_path / "outputs")
    said = await desk("seq 1 20000")
    assert said.startswith("1\n2\n")
    assert said.endswith("20000")
    assert [path.stat().st_size for path in (tmp_path / "outputs").iterdir()] == [1000]
    without = await Desk(folder, ShellSettings(output_limit=100))("seq 1 20000")
    assert len(without) < 300
    assert "read_file" not in without


async def test_multibyte_characters_count_as_characters(folder):
    desk = Desk(folder, ShellSettings(output_limit=1000))
    assert await desk("for i in $(seq 900); do printf é; done") == "é" * 900
    said = await desk("for i in $(seq 1100); do printf é; done")
    assert said.count("é") == 1000
    assert "\ufffd" not in said


async def test_progress_is_shown_while_the_command_runs_and_not_too_often(one, folder):
    wait = "while [ ! -e go{} ]; do sleep 0.02; done"
    lines = "for i in $(seq 2 8); do echo line $i; sleep 0.1; done"
    began = time.monotonic()
    task = asyncio.create_task(one(f"echo line 1; {wait.format(1)}; {lines}; {wait.format(2)}; seq 1 100000"))
    await until(lambda: one.lines == ["line 1"])
    (folder / "go1").touch()
    await until(lambda: one.lines[-1] == "line 8")
    (folder / "go2").touch()
    await task
    assert len(one.lines) <= 2 + (time.monotonic() - began) / processes._PROGRESS_SECONDS


async def test_the_last_line_before_a_long_silence_is_shown(one):
    task = asyncio.create_task(one("echo one; echo two; sleep 50"))
    await until(lambda: "two" in one.lines)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_call_that_is_cancelled_while_its_command_is_being_started_leaves_nothing(desk, folder, monkeypatch):
    """A busy loop may be slow to notice a new process, which does not wait for it."""
    gate, original = asyncio.Event(), BaseSubprocessTransport._connect_pipes

    async def late(transport, waiter):
        await gate.wait()
        await original(transport, waiter)

    await desk("true")  # the backend that works here has been detected by now
    monkeypatch.setattr(BaseSubprocessTransport, "_connect_pipes", late)
    call = asyncio.create_task(desk(f"setsid sh -c '{beats('one')}' & {beats('two')}"))
    await until(lambda: all((folder / name).exists() for name in ("one", "two")))
    call.cancel()
    asyncio.get_running_loop().call_later(0.2, gate.set)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await silent(folder)
