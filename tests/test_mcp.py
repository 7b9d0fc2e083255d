"""MCP servers that are programs: real ones, and ones that misbehave in every way we could think of."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, MessageBus
from everloop import events as ev
from everloop.config import McpServer
from everloop.log import Call
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Output, Tool
from everloop.tools.context import CallContext
from everloop.tools.mcp.servers import McpServers
from everloop.tools.registry import ToolRegistry

FOLDER = Path(__file__).parent / "mcp_servers"
NODE = FOLDER / "node_modules" / ".bin"


def odd(listing: str = "plain", start: str = "", *, name: str = "odd", **options: Any) -> McpServer:
    options.setdefault("connect_timeout", 10)
    arguments = (str(FOLDER / "odd.py"), listing, start)
    return McpServer(name=name, command=sys.executable, args=arguments, **options)


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    return {tool.name: tool for tool in tools}


@asynccontextmanager
async def connected(*servers: McpServer) -> AsyncIterator[tuple[McpServers, dict[str, Tool]]]:
    group = McpServers(servers)
    try:
        yield group, by_name(await group.ready())
    finally:
        await group.close()


async def run(tool: Tool, **arguments: Any) -> Output:
    output = await tool.execute(**arguments)
    assert isinstance(output, Output)
    assert output.untrusted, "whatever comes from a server is data"
    return output


async def text(tool: Tool, **arguments: Any) -> str:
    output = await run(tool, **arguments)
    assert not output.failed, output.text
    return output.text


async def failure(tool: Tool, **arguments: Any) -> str:
    output = await run(tool, **arguments)
    assert output.failed, output.text
    assert "\n" not in output.text
    assert "\x1b" not in output.text
    return output.text


async def seen(tools: dict[str, Tool]) -> Any:
    return json.loads(await text(tools["mcp_odd_seen"]))


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------------------------------------- real servers


def installed(name: str) -> str:
    path = NODE / name
    if not path.exists() or shutil.which("node") is None:
        pytest.fail(f"{name} is not installed: run sh scripts/node.sh", pytrace=False)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "beans.txt").write_text("water the beans\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[dict[str, Tool]]:
    """The tools of four servers from the registries, started once."""
    group = McpServers(
        [
            McpServer(name="time", command=sys.executable, args=("-m", "mcp_server_time"), tools=("get_*",)),
            McpServer(name="git", command=sys.executable, args=("-m", "mcp_server_git", "--repository", str(folder))),
            McpServer(name="files", command=installed("mcp-server-filesystem"), args=(str(folder),)),
            McpServer(name="everything", command=installed("mcp-server-everything")),
        ]
    )
    yield by_name(asyncio.run(group.ready()))
    asyncio.run(group.close())


async def test_a_real_server_tells_the_time(real):
    assert json.loads(await text(real["mcp_time_get_current_time"], timezone="Asia/Tokyo"))["timezone"] == "Asia/Tokyo"
    assert "Nowhere" in await failure(real["mcp_time_get_current_time"], timezone="Nowhere/Land")


async def test_only_tools_that_fit_the_patterns_of_their_server_exist(real):
    assert [name for name in real if name.startswith("mcp_time_")] == ["mcp_time_get_current_time"]


async def test_a_real_server_reads_and_writes_files_and_refuses_those_outside_its_folder(real, folder):
    assert "water the beans" in await text(real["mcp_files_read_text_file"], path=str(folder / "beans.txt"))
    await text(real["mcp_files_write_file"], path=str(folder / "peas.txt"), content="eat the peas")
    assert (folder / "peas.txt").read_text() == "eat the peas"
    assert "denied" in await failure(real["mcp_files_read_text_file"], path="/etc/passwd")


async def test_a_real_server_works_on_a_git_repository(real, folder):
    (folder / "seeds.txt").write_text("carrots")
    await text(real["mcp_git_git_add"], repo_path=str(folder), files=["seeds.txt"])
    assert "seeds.txt" in await text(real["mcp_git_git_status"], repo_path=str(folder))


async def test_what_a_tool_says_about_itself_decides_whether_it_sends_and_may_be_repeated(real):
    reading, adding, committing = (real[f"mcp_git_git_{name}"] for name in ("status", "add", "commit"))
    assert [tool.sends for tool in (reading, adding, committing)] == [False, True, True]
    assert [tool.replay for tool in (reading, adding, committing)] == ["safe", "safe", "never"]
    assert not reading.plan({}).sends
    assert committing.plan({}).sends
    assert all(tool.untrusted and tool.timeout == 60 for tool in real.values())


async def test_pictures_structured_content_and_resources_of_a_real_server_arrive(real):
    picture = await run(real["mcp_everything_get-tiny-image"])
    assert picture.images[0].startswith("data:image/png;base64,iVBOR")
    assert "logo" in picture.text
    weather = json.loads(await text(real["mcp_everything_get-structured-content"], location="Chicago"))
    assert "temperature" in weather
    assert "demo://" in await text(real["mcp_everything_get-resource-links"], count=2)
    assert "demo://" in await text(real["mcp_everything_get-resource-reference"], resourceType="Text", resourceId=1)


async def test_progress_of_a_real_server_is_shown_while_it_works(real):
    shown: list[str] = []
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", shown.append)
    registry = ToolRegistry(real.values())
    arguments = {"duration": 0.8, "steps": 4}
    result = await registry.run(Call("c", "mcp_everything_trigger-long-running-operation", arguments), context)
    assert result.status == "ok", result
    assert len(shown) >= 3


async def test_a_turn_of_the_whole_loop_uses_a_real_server(real, tmp_path, folder):
    name = "mcp_files_read_text_file"
    model = ScriptedProvider([call(name, path=str(folder / "beans.txt")), call(name, path="/etc/passwd"), "Watered."])
    ended: list[ev.ToolEnded] = []

    def show(event: ev.Event) -> None:
        if isinstance(event, ev.ToolEnded):
            ended.append(event)

    async with AgentLoop(MessageBus(), model, workspace=tmp_path) as agent:
        for tool in real.values():
            agent.tools.register(tool)
        assert await agent.process_direct("What is to do?", on_event=show) == "Watered."
    assert "water the beans" in ended[0].content
    assert "root:" not in ended[1].content


# ---------------------------------------------------------------------------------------------- getting ready


async def test_without_servers_nothing_is_loaded_or_started():
    program = (
        "import asyncio, sys, threading\n"
        "from everloop.tools.mcp.servers import McpServers\n"
        "servers = McpServers([])\n"
        "assert asyncio.run(servers.ready()) == []\n"
        "asyncio.run(servers.close())\n"
        "assert not {'mcp', 'anyio', 'pydantic', 'httpx2'} & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0


async def test_a_missing_sdk_is_one_line_that_says_what_to_install():
    program = (
        "import asyncio, sys\n"
        "sys.modules['mcp'] = None\n"
        "from everloop.config import McpServer\n"
        "from everloop.errors import EverloopError\n"
        "from everloop.tools.mcp.servers import McpServers\n"
        "async def main():\n"
        "    servers = McpServers([McpServer(name='a', command='true')])\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            await servers.ready()\n"
        "        except EverloopError as error:\n"
        "            print(error)\n"
        "    await servers.close()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ['MCP servers need the MCP SDK: pip install "everloop[mcp]"'] * 2


async def test_servers_that_fail_are_one_warning_each_and_the_others_work(caplog):
    caplog.set_level(logging.INFO)
    servers = (
        odd("plain", "slow"), odd("plain", "die", name="dying", env={"SERVER_KEY": "canary-key"}),
        odd("plain", "silent", name="silent", connect_timeout=1), odd("plain", "babble", name="babbling"),
        McpServer(name="missing", command="no-such-program"), McpServer(name="cat", command="cat"),
        odd("nothing", name="toolless"),
    )  # fmt: skip
    began = time.monotonic()
    async with connected(*servers) as (_, tools):
        assert time.monotonic() - began < 8
        assert await text(tools["mcp_odd_echo"], text="here") == "here"
        assert all(name.startswith("mcp_odd_") for name in tools)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5
    for name, said in {
        "dying": "no database", "silent": "Godot", "babbling": "Welcome", "missing": "no-such-program", "cat": "cat",
    }.items():  # fmt: skip
        (line,) = [line for line in lines if f"server {name}:" in line]
        assert said in line
        assert "\n" not in line
        assert "canary-key" not in line


async def test_being_ready_again_costs_nothing_and_gives_the_same_tools():
    async with connected(odd()) as (group, tools):
        began = time.monotonic()
        again = await group.ready()
        assert time.monotonic() - began < 0.2
        assert [id(tool) for tool in again] == [id(tool) for tool in tools.values()]


async def test_everybody_who_asks_at_the_start_waits_for_the_same_connection():
    group = McpServers([odd("plain", "slow")])
    first, second = await asyncio.gather(group.ready(), group.ready())
    assert first == second
    assert first
    await group.close()


async def test_giving_up_the_wait_does_not_end_the_connection_for_others():
    group = McpServers([odd("plain", "slow")])
    waiting = asyncio.create_task(group.ready())
    await asyncio.sleep(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    tools = by_name(await group.ready())
    assert await text(tools["mcp_odd_echo"], text="x") == "x"
    await group.close()


async def test_a_server_that_was_not_there_at_the_start_is_used_once_it_is(tmp_path):
    async with connected(odd("plain", "late", env={"MARK": str(tmp_path / "mark")})) as (group, tools):
        assert not tools
        async with asyncio.timeout(10):
            while not await group.ready():
                await asyncio.sleep(0.05)


async def test_after_closing_there_are_no_tools_and_calls_fail_without_a_crash():
    async with connected(odd()) as (group, tools):
        await group.close()
        assert await group.ready() == []
        result = await ToolRegistry(tools.values()).run(
            Call("c", "mcp_odd_echo", {"text": "x"}),
            CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", lambda text: None),
        )
        assert result.status == "error"


async def test_a_changed_list_of_tools_is_read_at_the_next_round():
    async with connected(odd()) as (group, tools):
        await text(tools["mcp_odd_change"])
        await asyncio.sleep(0.1)
        changed = by_name(await group.ready())
        assert set(changed) == {"mcp_odd_renamed", "mcp_odd_change"}
        await text(changed["mcp_odd_change"])
        await asyncio.sleep(0.1)
        assert set(by_name(await group.ready())) == set(tools)


async def test_a_registry_is_kept_in_step_and_left_alone_when_nothing_has_changed():
    async with connected(odd()) as (group, tools):
        registry = ToolRegistry()
        await group.provide(registry)
        assert set(registry.names) == set(tools)
        definitions = registry.get_definitions()
        await group.provide(registry)
        assert registry.get_definitions() is definitions
        await text(tools["mcp_odd_change"])
        await asyncio.sleep(0.1)
        await group.provide(registry)
        assert registry.names == ["mcp_odd_change", "mcp_odd_renamed"]


# ---------------------------------------------------------------------------------------------- names and schemas


async def test_ten_thousand_tools_are_cut_to_a_number_a_model_can_be_told(caplog):
    async with connected(odd("many"), odd("many", name="some", tools=("tool9?99", "tool7"))) as (_, tools):
        assert sum(name.startswith("mcp_odd_") for name in tools) == 500
        some = {name for name in tools if name.startswith("mcp_some_")}
        assert some == {"mcp_some_tool7"} | {f"mcp_some_tool9{digit}99" for digit in range(10)}
    assert len(caplog.records) == 1


async def test_a_list_that_never_ends_is_given_up(caplog):
    async with connected(odd("endless")) as (_, tools):
        assert 0 < len(tools) <= 500
    assert len(caplog.records) == 1


async def test_evil_names_descriptions_and_schemas_do_no_harm(caplog):
    async with connected(odd("evil")) as (group, tools):
        registry = ToolRegistry(tools.values())
        assert len(registry) == len(tools)
        named = {tool._tool.name: name for name, tool in tools.items()}  # type: ignore[attr-defined]
        assert named["a_b"] == "mcp_odd_a_b"
        assert len({named["a_b"], named["a.b"], named["a b"]}) == 3
        assert named["x" * 100] != named["x" * 101]
        assert all(len(name) <= 64 for name in tools)
        assert not {"", "y" * 1000, "array", "none", "wide"} & set(named)
        assert {"ünï", "deep", "slow", "told", "hidden"} <= set(named)
        assert len(tools[named["told"]].description) < 10_000
        assert tools[named["hidden"]].description == "Adds."
        began = time.monotonic()
        await registry.execute(named["slow"], {"text": "a" * 40 + "b"})  # its pattern would take years
        assert time.monotonic() - began < 5
        assert "(a+)+" in json.dumps(tools[named["slow"]].parameters)
        assert set(by_name(await group.ready())) == set(tools)
    assert all("\x1b" not in record.getMessage() for record in caplog.records)


async def test_a_server_cannot_take_the_names_of_another_one():
    servers = [odd("shadow", name="a"), odd("plain", name="a_b"), odd("plain", name="a.b"), odd("plain", name="a b")]
    async with connected(*servers) as (_, tools):
        assert tools["mcp_a_b_echo"]._connection.server.name == "a_b"  # type: ignore[attr-defined]
        echoes = [tool for tool in tools.values() if tool._tool.name.endswith("echo")]  # type: ignore[attr-defined]
        assert len(echoes) == 5
    async with connected(servers[0], replace(servers[1], command="no-such-program")) as (_, fewer):
        assert "mcp_a_b_echo" not in fewer, "also while the other one is away"
        assert set(fewer) < set(tools)


# ---------------------------------------------------------------------------------------------- calls


async def test_a_program_gets_the_environment_it_is_given_and_no_key_of_the_runtime(monkeypatch):
    for name in ("EVERLOOP_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "canary-of-the-runtime")
    monkeypatch.setenv("LC_TIME", "C")
    async with connected(odd(env={"SERVER_KEY": "its own"})) as (_, tools):
        environment = json.loads(await text(tools["mcp_odd_env"]))
    assert "canary-of-the-runtime" not in json.dumps(environment)
    assert environment["SERVER_KEY"] == "its own"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["LC_TIME"] == "C"


async def test_progress_is_shown_in_lines_that_cannot_drive_a_terminal():
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
        waiting = asyncio.create_task(run(tools["mcp_odd_wait"]))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        after = await seen(tools)
        assert after["pid"] == pid
        assert len(after["cancelled"]) == 1
        assert after["pinged"] == 1, "it had left a call without an answer, so it was asked whether it lives"
        assert (await seen(tools))["pinged"] == 1


async def test_calls_run_side_by_side_over_one_connection():
    async with connected(odd()) as (_, tools):
        said = await asyncio.gather(*(text(tools["mcp_odd_echo"], text=str(number)) for number in range(50)))
    assert said == [str(number) for number in range(50)]


async def test_a_server_that_dies_in_a_call_is_an_error_and_is_started_again(caplog):
    async with connected(odd(env={"SERVER_KEY": "canary-key"})) as (_, tools):
        pid = (await seen(tools))["pid"]
        said = await failure(tools["mcp_odd_die"])
        assert "status 3" in said
        assert "about to fall over" in said
        assert "canary-key" not in said
        after = await seen(tools)
        assert after["pid"] != pid
    assert "canary-key" not in caplog.text


async def test_a_server_that_dies_between_calls_is_not_noticed_by_the_next():
    async with connected(odd()) as (_, tools):
        pid = (await seen(tools))["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid))
        await asyncio.sleep(0.1)
        assert (await seen(tools))["pid"] != pid


async def test_a_server_that_always_dies_is_not_started_over_and_over():
    async with connected(odd()) as (_, tools):
        began = time.monotonic()
        said = [await failure(tools["mcp_odd_die"]) for _ in range(6)]
        assert time.monotonic() - began < 6
        assert any("tried again in" in line for line in said)


async def test_a_server_that_works_in_between_is_started_again_each_time():
    async with connected(odd()) as (_, tools):
        for number in range(4):
            assert "status 3" in await failure(tools["mcp_odd_die"])
            assert await text(tools["mcp_odd_echo"], text=str(number)) == str(number)


async def test_a_server_that_dies_is_noticed_also_when_a_child_of_it_holds_its_output_open(tmp_path):
    async with connected(odd("plain", "parent", env={"MARK": str(tmp_path / "mark")})) as (_, tools):
        async with asyncio.timeout(10):
            assert "status 3" in await failure(tools["mcp_odd_die"])


async def test_a_server_that_no_longer_answers_is_started_again_after_the_time_out():
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", Path(), False, "key", lambda text: None)
    async with connected(odd(timeout=0.5)) as (_, tools):
        pid = (await seen(tools))["pid"]
        result = await ToolRegistry(tools.values()).run(Call("c", "mcp_odd_wedge"), context)
        assert result.status == "error"
        assert alive(pid)
        tools["mcp_odd_seen"].timeout = 30
        assert (await seen(tools))["pid"] != pid
        assert not alive(pid)


async def test_a_server_that_only_speaks_the_newest_protocol_is_understood():
    async with connected(odd("plain", "modern")) as (_, tools):
        pid = (await seen(tools))["pid"]
        waiting = asyncio.create_task(run(tools["mcp_odd_wait"]))
        await asyncio.sleep(0.2)
        waiting.cancel()
        after = await seen(tools)
        assert after["pid"] == pid
        assert len(after["cancelled"]) == 1


async def test_garbage_between_messages_is_passed_over():
    async with connected(odd("plain", "greet")) as (_, tools):
        assert await text(tools["mcp_odd_garbage"]) == "after the garbage"


async def test_an_answer_that_is_no_result_is_an_error():
    async with connected(odd()) as (_, tools):
        await failure(tools["mcp_odd_wrong"])
        assert await text(tools["mcp_odd_echo"], text="still here") == "still here"


@pytest.mark.parametrize("name", ["flood", "spill"])
async def test_a_server_that_floods_is_ended_and_the_agent_is_not_held_up(name):
    async with connected(odd()) as (_, tools):
        pid = (await seen(tools))["pid"]
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        said = await failure(tools[f"mcp_odd_{name}"])
        ticking.cancel()
        assert "flood" in said or "MB" in said
        assert not alive(pid)
        assert max(later - earlier for earlier, later in itertools.pairwise(ticks)) < 1
        assert await text(tools["mcp_odd_echo"], text="back") == "back"


async def test_a_result_of_ten_megabytes_arrives():
    async with connected(odd()) as (_, tools):
        assert len(await text(tools["mcp_odd_big"])) == 10_000_000


async def test_structured_content_without_text_is_told_as_json():
    async with connected(odd()) as (_, tools):
        assert json.loads(await text(tools["mcp_odd_data"])) == {"beans": [1, 2]}


async def test_only_pictures_that_can_be_shown_are_and_the_rest_is_named():
    async with connected(odd()) as (_, tools):
        output = await run(tools["mcp_odd_pictures"])
    assert output.images == ("data:image/png;base64,AAAA",) * 8
    for said in ("svg", "too big", "audio/wav", "the notes", "application/zip", "file:///more", "Further."):
        assert said in output.text
    assert "<script>" not in output.text
    assert len(output.text) < 5000


# ---------------------------------------------------------------------------------------------- the end


async def test_closing_ends_even_a_program_that_does_not_want_to_and_what_it_started(tmp_path):
    mark = tmp_path / "mark"
    async with connected(odd("plain", "stubborn", env={"MARK": str(mark)})) as (_, tools):
        assert tools
        pids = [int(pid) for pid in mark.read_text().split()]
        assert all(map(alive, pids))
    await until(lambda: not any(map(alive, pids)))


async def test_a_program_that_overlooks_the_end_of_its_input_may_still_tidy_up(tmp_path):
    mark = tmp_path / "mark"
    async with connected(odd("plain", "tidy", env={"MARK": str(mark)})) as (_, tools):
        assert tools
    assert mark.read_text() == "tidied up"


async def test_closing_ends_what_a_program_has_left_behind(tmp_path):
    mark = tmp_path / "mark"
    async with connected(odd("plain", "parent", env={"MARK": str(mark)})) as (_, tools):
        assert tools
        child = int(mark.read_text().split()[1])
        assert alive(child)
    await until(lambda: not alive(child))


async def test_a_program_ends_when_the_runtime_is_killed(tmp_path):
    mark = tmp_path / "mark"
    server = odd("plain", "stubborn", env={"MARK": str(mark)})
    program = (
        "import asyncio\n"
        "from everloop.config import McpServer\n"
        "from everloop.tools.mcp.servers import McpServers\n"
        "async def main():\n"
        f"    servers = McpServers([McpServer(name='a', command={server.command!r}, args={server.args!r},"
        f" env={dict(server.env)!r})])\n"
        "    print(len(await servers.ready()), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    runtime = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert runtime.stdout is not None
    assert int(await runtime.stdout.readline()) > 0
    pid = int(mark.read_text().split()[0])
    assert alive(pid)
    runtime.kill()
    await runtime.wait()
    await until(lambda: not alive(pid), 5)
