"""Calls, and servers that misbehave during calls in every way we could think of."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from everloop.log import Call
from everloop.tools.context import CallContext
from everloop.tools.mcp import servers
from everloop.tools.registry import ToolRegistry
from tests.support.commands import until

from .servers import alive, cancel_a_call, connected, failure, odd, run, seen, text


async def test_a_server_process_gets_its_configured_environment_and_no_key_of_the_runtime(monkeypatch):
    for name in ("EVERLOOP_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "canary-of-the-runtime")
    monkeypatch.setenv("LC_TIME", "C")
    async with connected(odd(env={"SERVER_KEY": "its own"})) as (_, tools):
        environment = json.loads(await text(tools["mcp_odd_env"]))
    assert "canary-of-the-runtime" not in json.dumps(environment)
    assert environment["SERVER_KEY"] == "its own"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["LC_TIME"] == "C"


async def test_progress_is_shown_in_lines_that_cannot_control_a_terminal(monkeypatch):
    monkeypatch.setattr(servers, "PROGRESS_SECONDS", 0.0)  # including late updates and several at once
    shown: list[str] = []
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", shown.append)
    async with connected(odd()) as (_, tools):
        result = await ToolRegistry(tools.values()).run(Call("c", "mcp_odd_steps"), context)
    assert result.status == "ok"
    assert [line.replace("[2J", "") for line in shown] == ["step 1", "step 2", "step 3"]
    assert "\x1b" not in "".join(shown)


async def test_a_cancelled_call_is_cancelled_at_the_server_and_the_connection_stays():
    async with connected(odd()) as (_, tools):
        pid = (await seen(tools))["pid"]
        await cancel_a_call(tools)
        after = await seen(tools)
        assert after["pid"] == pid
        assert len(after["cancelled"]) == 1
        assert after["pinged"] == 1, "it had not answered a call, so it was pinged"
        assert (await seen(tools))["pinged"] == 1


async def test_calls_run_concurrently_over_one_connection():
    async with connected(odd()) as (_, tools):
        said = await asyncio.gather(*(text(tools["mcp_odd_echo"], text=str(number)) for number in range(50)))
    assert said == [str(number) for number in range(50)]


async def test_a_server_that_dies_during_a_call_causes_an_error_and_is_restarted(caplog):
    async with connected(odd(env={"SERVER_KEY": "canary-key"})) as (_, tools):
        pid = (await seen(tools))["pid"]
        said = await failure(tools["mcp_odd_die"])
        assert "status 3" in said
        assert "about to fall over" in said
        assert "canary-key" not in said
        after = await seen(tools)
        assert after["pid"] != pid
    assert "canary-key" not in caplog.text


async def test_a_server_that_dies_between_calls_is_restarted_before_the_next(caplog):
    async with connected(odd()) as (_, tools):
        pid = (await seen(tools))["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: caplog.records)  # the log says that it has ended
        assert (await seen(tools))["pid"] != pid


async def test_a_server_that_always_dies_is_not_restarted_endlessly():
    async with connected(odd()) as (_, tools):
        began = time.monotonic()
        said = [await failure(tools["mcp_odd_die"]) for _ in range(6)]
        assert time.monotonic() - began < 20  # waiting each time would take longer than half a minute
        assert any("next attempt is in" in line for line in said)


async def test_a_server_that_works_in_between_is_restarted_each_time():
    async with connected(odd()) as (_, tools):
        for number in range(4):
            assert "status 3" in await failure(tools["mcp_odd_die"])
            assert await text(tools["mcp_odd_echo"], text=str(number)) == str(number)


async def test_a_servers_death_is_noticed_even_if_a_child_keeps_its_output_open(tmp_path):
    async with connected(odd("plain", "parent", env={"MARK": str(tmp_path / "mark")})) as (_, tools):
        async with asyncio.timeout(30):
            assert "status 3" in await failure(tools["mcp_odd_die"])


async def test_a_server_that_stops_answering_is_restarted_after_the_timeout():
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", lambda text: None)
    async with connected(odd(timeout=0.5)) as (_, tools):
        pid = (await seen(tools))["pid"]
        result = await ToolRegistry(tools.values()).run(Call("c", "mcp_odd_wedge"), context)
        assert result.status == "error"
        assert alive(pid)
        assert (await seen(tools))["pid"] != pid
        await until(lambda: not alive(pid))


async def test_a_server_that_only_speaks_the_newest_protocol_is_understood():
    async with connected(odd("plain", "modern")) as (_, tools):
        pid = (await seen(tools))["pid"]
        await cancel_a_call(tools)
        after = await seen(tools)
        assert after["pid"] == pid
        assert len(after["cancelled"]) == 1


async def test_garbage_between_messages_is_skipped():
    async with connected(odd("plain", "greet")) as (_, tools):
        assert await text(tools["mcp_odd_garbage"]) == "after the garbage"


async def test_an_answer_that_is_not_a_result_is_an_error():
    async with connected(odd()) as (_, tools):
        await failure(tools["mcp_odd_wrong"])
        assert await text(tools["mcp_odd_echo"], text="still here") == "still here"


@pytest.mark.parametrize("name", ["flood", "spill"])
async def test_a_server_that_floods_is_ended_without_blocking_the_agent(name):
    async with connected(odd()) as (_, tools):
        pid = (await seen(tools))["pid"]
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                # time of this thread alone, since a busy machine may delay any process
                ticks.append(time.thread_time())
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        said = await failure(tools[f"mcp_odd_{name}"])
        ticking.cancel()
        assert "flood" in said or "MB" in said
        await until(lambda: not alive(pid))
        assert max(later - earlier for earlier, later in itertools.pairwise(ticks)) < 1
        assert await text(tools["mcp_odd_echo"], text="back") == "back"


async def test_a_result_of_ten_megabytes_arrives():
    async with connected(odd()) as (_, tools):
        assert len(await text(tools["mcp_odd_big"])) == 10_000_000


async def test_structured_content_without_text_is_shown_as_json():
    async with connected(odd()) as (_, tools):
        assert json.loads(await text(tools["mcp_odd_data"])) == {"beans": [1, 2]}


async def test_structured_content_that_reports_a_failure_is_a_failed_call():
    async with connected(odd()) as (_, tools):
        assert not (await run(tools["mcp_odd_data"])).failed
        refused = await run(tools["mcp_odd_refused"])
    assert refused.failed
    assert "no beans" in refused.text


async def test_supported_pictures_are_shown_and_the_rest_is_named():
    async with connected(odd()) as (_, tools):
        output = await run(tools["mcp_odd_pictures"])
    assert output.images == ("data:image/png;base64,AAAA",) * 8
    for said in ("svg", "too big", "audio/wav", "the notes", "application/zip", "file:///more", "Further."):
        assert said in output.text
    assert "<script>" not in output.text
    assert len(output.text) < 5000
