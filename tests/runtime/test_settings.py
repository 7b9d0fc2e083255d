"""What an `AgentLoop` takes from its arguments, from `config=` and from the environment."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from everloop import AgentLoop, Config, ContextBuilder, LLMResponse, MessageBus, Tool
from everloop.config import Rule
from everloop.testing import ScriptedProvider, call
from everloop.testing.openai_server import FakeOpenAI


@pytest.fixture
def settings() -> Config:
    return Config.load()


def made(workspace: Path, *script: Any, **options: Any) -> AgentLoop:
    workspace.mkdir(parents=True, exist_ok=True)
    return AgentLoop(MessageBus(), ScriptedProvider(list(script)), workspace, **options)


async def test_omitted_arguments_come_from_the_config(tmp_path):
    config = Config(model="named", max_iterations=3, busy="steer", restrict_to_workspace=True)
    async with made(tmp_path / "w", "hi", config=config) as agent:
        assert (agent.model, agent.max_iterations, agent.restrict_to_workspace) == ("named", 3, True)
        assert agent.dispatcher._worker.busy == "steer"
        await agent.process_direct("hello")
        assert agent.provider.requests[0].model == "named"  # type: ignore[attr-defined]


def test_the_workspace_does_not_change_with_the_current_folder(tmp_path, monkeypatch):
    for folder in ("garden", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "garden" / "AGENTS.md").write_text("Water the beans.")
    monkeypatch.chdir(tmp_path / "garden")
    model = ScriptedProvider([call("write_file", path="x", content="1"), "done"])
    agent = AgentLoop(MessageBus(), model, ".", store="own.db", context=ContextBuilder("."))
    monkeypatch.chdir(tmp_path / "elsewhere")

    async def used() -> str:
        async with agent:
            return await agent.process_direct("go")

    assert asyncio.run(used()) == "done"
    assert "Water the beans." in str(model.requests[0].messages[0])
    assert os.listdir(tmp_path / "elsewhere") == []
    assert {"x", "own.db"} <= set(os.listdir(tmp_path / "garden"))


async def test_an_argument_wins_over_the_config(tmp_path):
    config = Config(model="named", max_iterations=3, restrict_to_workspace=True)
    options: dict[str, Any] = {"model": "other", "max_iterations": 5, "restrict_to_workspace": False}
    async with made(tmp_path / "w", config=config, **options) as agent:
        assert {name: getattr(agent, name) for name in options} == options


async def test_without_a_config_the_documented_defaults_hold(tmp_path):
    async with made(tmp_path / "w") as agent:
        assert (agent.model, agent.max_iterations, agent.restrict_to_workspace) == (None, 20, False)


async def test_a_loop_with_the_users_settings_is_restricted_accordingly(tmp_path, settings):
    outside = tmp_path / "outside.txt"
    write = call("write_file", path=str(outside), content="x")
    async with made(tmp_path / "w", write, "done", config=settings) as agent:
        await agent.process_direct("write it")
    assert not outside.exists()


def test_what_is_no_provider_is_refused_with_what_one_is(tmp_path):
    for wrong, given in ((None, "NoneType"), ("openai", "str"), (ScriptedProvider, "the class ScriptedProvider")):
        with pytest.raises(TypeError, match=f"provider must be an LLMProvider, .* not {given}"):
            AgentLoop(MessageBus(), wrong, tmp_path)  # type: ignore[arg-type]


class Duck:
    """No subclass, and only the two methods that every provider has."""

    async def chat(self, messages, tools=None, model=None):
        return LLMResponse("quack")

    def get_default_model(self):
        return "duck"


async def test_an_object_with_the_methods_of_a_provider_is_one(tmp_path):
    mock = MagicMock()
    mock.chat = AsyncMock(return_value=LLMResponse("quack"))
    mock.get_default_model.return_value = "mock"
    for number, provider in enumerate((Duck(), mock)):
        for on_event in (None, lambda session, event: None):  # a mock has a `stream`, which yields nothing
            workspace = tmp_path / str(number)
            async with AgentLoop(MessageBus(), provider, workspace, on_event=on_event) as agent:  # type: ignore[arg-type]
                assert await agent.process_direct("say something") == "quack"
    assert mock.close.call_count == 2


@pytest.mark.parametrize("config", [{"model": "m"}, "config.toml", object()])
async def test_an_invalid_config_is_refused(tmp_path, config):
    with pytest.raises(TypeError, match="config must be a Config"):
        made(tmp_path, config=config)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"max_iterations": "5"}, TypeError, "max_iterations must be a whole number, not str"),
        ({"max_iterations": 2.5}, TypeError, "max_iterations must be a whole number, not float"),
        ({"max_iterations": True}, TypeError, "max_iterations must be a whole number, not bool"),
        ({"max_iterations": -1}, ValueError, "max_iterations must be at least 1, not -1"),
        ({"model": 5}, TypeError, "model must be the name of a model, not int"),
        ({"exec_config": "timeout=5"}, TypeError, "exec_config must be a mapping .*, not str"),
    ],
)
async def test_a_wrong_argument_is_refused_when_the_agent_is_made(tmp_path, wrong, error, says):
    with pytest.raises(error, match=says):
        made(tmp_path, **wrong)


async def test_two_workspaces_with_one_config_share_no_history(tmp_path, settings):
    async with made(tmp_path / "one", "first", config=settings) as one:
        await one.process_direct("I am one")
    async with made(tmp_path / "two", "second", config=settings) as two:
        assert await two.process_direct("who am I?") == "second"
        assert "I am one" not in str(two.provider.requests[0].messages)  # type: ignore[attr-defined]
        assert one.store.path != two.store.path  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [None, Config(), Config(policy=(Rule(do="deny", tool="exec"),))])
async def test_the_home_of_the_environment_holds_the_store_with_and_without_a_config(tmp_path, monkeypatch, config):
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path / "elsewhere"))
    if config is not None:  # the home is read when the settings are created
        config = Config(policy=config.policy)
    async with made(tmp_path / "w", "hi", config=config) as agent:
        await agent.process_direct("hello")
        path = agent.store.path  # type: ignore[attr-defined]
    assert path.is_relative_to(tmp_path / "elsewhere")
    assert path.exists()


async def test_a_store_that_the_config_names_is_used(tmp_path):
    async with made(tmp_path / "w", "hi", config=Config(store=tmp_path / "named.db")) as agent:
        await agent.process_direct("hello")
    assert (tmp_path / "named.db").exists()


async def test_the_home_workspace_has_the_store_of_the_command_line(settings):
    async with made(settings.workspace, "hi", config=settings) as agent:
        await agent.process_direct("hello")
        assert agent.store.path == settings.store == settings.home / "everloop.db"  # type: ignore[attr-defined]


async def test_from_config_builds_the_agent_that_the_settings_describe(tmp_path, monkeypatch):
    async with FakeOpenAI() as server:
        server.reply("hello from the settings")
        monkeypatch.setenv("EVERLOOP_BASE_URL", server.base_url)
        monkeypatch.setenv("EVERLOOP_MODEL", "scripted")
        monkeypatch.setenv("EVERLOOP_WORKSPACE", str(tmp_path))
        async with await asyncio.to_thread(AgentLoop.from_config, max_iterations=2) as agent:
            assert (agent.workspace, agent.restrict_to_workspace, agent.max_iterations) == (tmp_path, True, 2)
            assert await agent.process_direct("hi") == "hello from the settings"
        assert server.requests[0].model == "scripted"


class Shout(Tool):
    name = "shout"
    description = "Say it loud."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    async def execute(self, **_: Any) -> str:
        return "HEY"


async def test_a_subclass_may_register_its_own_default_tools(tmp_path):
    class Only(AgentLoop):
        def _register_default_tools(self) -> None:
            self.tools.register(Shout())

    class More(AgentLoop):
        def _register_default_tools(self) -> None:
            super()._register_default_tools()
            self.tools.register(Shout())

    async with Only(MessageBus(), ScriptedProvider([call("shout"), "it said HEY"]), tmp_path) as agent:
        assert [tool["function"]["name"] for tool in agent.tools.get_definitions()] == ["shout"]
        assert await agent.process_direct("shout") == "it said HEY"
    async with More(MessageBus(), ScriptedProvider([]), tmp_path) as more:
        names = {tool["function"]["name"] for tool in more.tools.get_definitions()}
        assert {"shout", "read_file", "exec", "spawn", "cron"} <= names


# ------------------------------------------------------------------------------------------------ context


class Pirate(ContextBuilder):
    def build_system_prompt(self, began: float | None = None) -> str:
        return "You are a pirate."


class Framed(ContextBuilder):
    """Puts a note before each message, and shows only the last turn."""

    def build_messages(self, history: Any, current_message: str, media: Any = None) -> list[dict[str, Any]]:
        system = {"role": "system", "content": self.build_system_prompt()}
        return [system, *history[-2:], {"role": "user", "content": f"[note] {current_message}"}]


async def test_the_prompt_of_a_subclass_is_what_the_model_is_sent(tmp_path):
    provider = ScriptedProvider([call("list_dir"), "Arr.", "Arr again."])
    async with AgentLoop(MessageBus(), provider, tmp_path, context=Pirate(tmp_path)) as agent:
        assert await agent.process_direct("hi") == "Arr."
        assert await agent.process_direct("again") == "Arr again."
        assert "pirate" in agent.context.build_system_prompt()
    assert [seen.messages[0]["content"] for seen in provider.requests] == ["You are a pirate."] * 3


async def test_the_messages_of_a_subclass_are_what_the_model_is_sent(tmp_path):
    provider = ScriptedProvider(["one", "two", call("list_dir"), "three"])
    async with AgentLoop(MessageBus(), provider, tmp_path, context=Framed(tmp_path)) as agent:
        for text in ("a", "b", "c"):
            await agent.process_direct(text)
    sent = [[message["content"] for message in seen.messages[1:]] for seen in provider.requests]
    assert sent[0] == ["[note] a"]
    assert sent[1] == ["a", "one", "[note] b"]
    assert sent[2] == ["b", "two", "[note] c"]
    assert sent[3][:3] == sent[2]  # the rounds of a turn share their prefix
    assert [message["role"] for message in provider.requests[3].messages[4:]] == ["assistant", "tool"]


async def test_a_plain_builder_keeps_the_prefix_and_something_else_is_refused(tmp_path):
    provider = ScriptedProvider([call("list_dir"), "one", "two"])
    (tmp_path / "AGENTS.md").write_text("Be kind.")
    async with AgentLoop(MessageBus(), provider, tmp_path, context=ContextBuilder(tmp_path, "Ada")) as agent:
        await agent.process_direct("a")
        await agent.process_direct("b")
    first, second, third = [seen.messages for seen in provider.requests]
    assert first[0]["content"].startswith("# Ada")
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    with pytest.raises(TypeError, match="ContextBuilder"):
        AgentLoop(MessageBus(), provider, tmp_path, context="a prompt")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ a missing workspace


async def test_a_missing_workspace_is_one_clear_line(tmp_path, caplog):
    (tmp_path / "file").touch()
    for path, what in (("file", "is not a folder"), ("a/b", "cannot be created (No such file or directory)")):
        async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path / path, store=tmp_path / "s.db") as agent:
            result = await agent.ask("hi")
        assert result.error == f"the workspace {tmp_path}/{path} {what}: create the folder, or configure another one"
    assert "Traceback" not in caplog.text
    assert not (tmp_path / "a").exists()


async def test_a_missing_workspace_is_created_in_an_existing_folder(tmp_path):
    async with AgentLoop(MessageBus(), ScriptedProvider(["hello"]), tmp_path / "new", store=tmp_path / "s.db") as agent:
        assert await agent.process_direct("hi") == "hello"
    assert (tmp_path / "new").is_dir()


async def test_a_workspace_that_is_deleted_meanwhile_is_named_by_the_tools(tmp_path):
    folder = tmp_path / "w"
    provider = ScriptedProvider(["hi", call("exec", command="ls"), "gone"])
    async with made(folder, config=None, store=tmp_path / "s.db") as agent:
        agent.provider = agent._turns.models.provider = provider
        await agent.process_direct("hello")
        os.rmdir(folder)
        await agent.process_direct("look")
    result = provider.requests[2].messages[-1]["content"]
    assert "the workspace is not a folder" in result
