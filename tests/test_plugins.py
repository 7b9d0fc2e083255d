"""Tools and providers of other packages, really installed and used by the real command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everloop import Config
from everloop.errors import ConfigError
from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI
from everloop.tools.builtin import plugin_tools
from tests.support.commands import everloop

PAGE = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text()
FILE = re.compile(r"^```\w+\n# ([\w.]+)\n(.*?)^```$", re.M | re.S)
FILES = dict(FILE.findall(PAGE))


@pytest.fixture(scope="session")
def garden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's example package, built and installed without a network into its own folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "everloop_garden.py"):
        (source / name).write_text(FILES[name])
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=120)
    return target


@pytest.fixture
async def server():
    async with FakeOpenAI() as running:
        yield running


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    folder = tmp_path / "own-home"
    folder.mkdir()
    return folder


def package(folder: Path, name: str, group: str, entry: str, code: str) -> None:
    """An installed package with one entry point, as pip would leave it."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")


# ---------------------------------------------------------------------------------------------- the page's example


async def test_a_tool_of_an_installed_package_is_offered_and_run(garden, server, own_home):
    (own_home / "config.toml").write_text(FILES["config.toml"])
    server.calls(call("ripe", plant="beans"), call("ripe", plant="peas"))
    server.reply("They are.")
    run: dict[str, Any] = {"EVERLOOP_HOME": str(own_home), "PYTHONPATH": str(garden)}
    done = await everloop("run", "Are the beans ripe?", server=server, **run)
    assert (done.status, done.out) == (0, "They are.\n"), done.err
    first, second = server.requests
    assert first.body is not None
    assert second.body is not None
    assert "ripe" in [one["function"]["name"] for one in first.body["tools"]]
    beans, peas = (message["content"] for message in second.body["messages"][-2:])
    assert beans == '{"plant":"beans","ripe":true}'
    assert '"status":"error"' in peas
    assert "there are no peas in workspace" in peas


async def test_a_provider_of_an_installed_package_answers_by_its_name(garden, own_home):
    run: dict[str, Any] = {"EVERLOOP_HOME": str(own_home), "PYTHONPATH": str(garden), "EVERLOOP_PROVIDER": "parrot"}
    done = await everloop("run", "hello", **run, EVERLOOP_MODEL="")
    assert (done.status, done.out) == (0, "parrot-1: hello\n"), done.err
    done = await everloop("run", "hello", **run, EVERLOOP_MODEL="grey")
    assert (done.status, done.out) == (0, "grey: hello\n"), done.err


async def test_a_plugin_that_is_not_named_is_never_imported(garden, server, own_home, tmp_path):
    canary = tmp_path / "canary"
    package(
        tmp_path, "everloop-canary", "everloop.tools", "canary = everloop_canary:tool", f"open({str(canary)!r}, 'w')"
    )
    server.reply("Hello.")
    run: dict[str, Any] = {"EVERLOOP_HOME": str(own_home), "PYTHONPATH": str(tmp_path)}
    done = await everloop("run", "hello", server=server, **run)
    assert done.status == 0, done.err
    assert not canary.exists()
    (own_home / "config.toml").write_text('[plugins]\ntools = ["canary"]\n')
    await everloop("run", "hello", server=server, **run)
    assert canary.exists()  # so it would have been noticed


# ---------------------------------------------------------------------------------------------- what goes wrong

TOOL = "from everloop import tool\n@tool\ndef {}(text: str) -> str:\n    '''Say it.'''\n    return text\n"


@pytest.mark.parametrize("command", [["run", "hello"], ["serve", "--port", "0"], ["worker"], []], ids=str)
async def test_a_broken_plugin_is_a_one_line_error_that_names_its_package(command, server, own_home, tmp_path):
    package(tmp_path, "everloop-broken", "everloop.tools", "broken = everloop_broken:tool", "import no_such_module\n")
    (own_home / "config.toml").write_text('[plugins]\ntools = ["broken"]\n')
    run: dict[str, Any] = {"EVERLOOP_HOME": str(own_home), "PYTHONPATH": str(tmp_path)}
    done = await everloop(*command, server=server, **run)
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "everloop-broken" in line
    assert "no_such_module" in line


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (TOOL.format("exec"), 'there is a tool "exec" already'),
        (TOOL.format("spawn"), 'there is a tool "spawn" already'),
        (TOOL.format("mcp_x"), 'there is a tool "mcp_x" already'),
        ("made = 3", "it must be a Tool"),
        ("made = lambda config: ['x']", "it must be a Tool"),
        ("made = lambda config: []", "it must be a Tool"),
        ("def made(config): raise SystemExit('no license')", "no license"),
        ("def made(config): return config.no_such_key", "no_such_key"),
    ],
)
async def test_a_plugin_that_cannot_be_used_is_refused(code, said, server, own_home, tmp_path):
    name = re.findall(r"def (\w+)", code) if "@tool" in code else ["made"]
    package(tmp_path, "everloop-odd", "everloop.tools", f"odd = everloop_odd:{name[0]}", code)
    (own_home / "config.toml").write_text('[plugins]\ntools = ["odd"]\n')
    done = await everloop("run", "x", server=server, EVERLOOP_HOME=str(own_home), PYTHONPATH=str(tmp_path))
    assert (done.status, done.out, server.requests) == (2, "", [])
    (line,) = done.err.splitlines()
    assert "everloop-odd" in line
    assert said in line


def test_a_tool_a_class_and_a_function_are_all_accepted(tmp_path, monkeypatch):
    code = TOOL.format("say") + (
        "from everloop import Tool\n"
        "class Shout(Tool):\n    name, description = 'shout', 'Shouts.'\n    async def execute(self): return 'HEY'\n"
        "made = Shout()\n"
        "def both(config): return (Shout(), say)\n"
    )
    for number, what in enumerate(("say", "Shout", "made", "both")):
        folder = tmp_path / what
        folder.mkdir()
        package(folder, f"everloop-p{number}", "everloop.tools", f"{what} = everloop_p{number}:{what}", code)
        monkeypatch.syspath_prepend(folder)
    names = [[tool.name for tool in plugin_tools(Config(plugin_tools=(what,)))] for what in ("say", "Shout", "made")]
    assert names == [["say"], ["shout"], ["shout"]]
    assert [tool.name for tool in plugin_tools(Config(plugin_tools=("both",)))] == ["shout", "say"]
    with pytest.raises(ConfigError, match='"shout" already'):
        plugin_tools(Config(plugin_tools=("made", "Shout")))


def test_a_name_that_is_not_installed_is_reported_with_those_that_are(tmp_path, monkeypatch):
    package(tmp_path, "everloop-say", "everloop.tools", "garden = everloop_say:say", TOOL.format("say"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r'no plugin "gardn" \(did you mean "garden"\?\)'):
        plugin_tools(Config(plugin_tools=("gardn",)))
    other = tmp_path / "other"
    other.mkdir()
    package(other, "everloop-too", "everloop.tools", "garden = everloop_too:say", TOOL.format("say"))
    monkeypatch.syspath_prepend(other)
    with pytest.raises(ConfigError, match="everloop-say and everloop-too both"):
        plugin_tools(Config(plugin_tools=("garden",)))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('half')", "half"),
        ("made = 3", "subclass of LLMProvider"),
        ("made = lambda config: 3", "LLMP"),
    ],
)
async def test_a_broken_provider_is_a_one_line_error_that_names_its_package(code, said, own_home, tmp_path):
    package(tmp_path, "everloop-poll", "everloop.providers", "poll = everloop_poll:made", code)
    run: dict[str, Any] = {"EVERLOOP_HOME": str(own_home), "PYTHONPATH": str(tmp_path), "EVERLOOP_PROVIDER": "poll"}
    done = await everloop("run", "x", **run)
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "everloop-poll" in line
    assert said in line


async def test_an_unknown_provider_names_those_of_plugins_too(garden, own_home):
    run: dict[str, Any] = {"EVERLOOP_HOME": str(own_home), "PYTHONPATH": str(garden), "EVERLOOP_PROVIDER": "parot"}
    done = await everloop("run", "x", **run)
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert "parrot" in line


def test_without_plugins_no_metadata_is_searched():
    program = (
        "import sys; from everloop.cli.main import parser; parser(); from everloop import AgentLoop, Config\n"
        "from everloop.tools.builtin import builtin_tools; builtin_tools(Config(), None)\n"
        "assert 'everloop.plugins' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
