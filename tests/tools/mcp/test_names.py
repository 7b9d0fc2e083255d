"""Harmful names, descriptions and schemas."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from everloop.tools.registry import ToolRegistry

from .servers import by_name, connected, odd


async def test_ten_thousand_tools_are_cut_to_a_number_that_fits_a_model(caplog):
    async with connected(odd("many"), odd("many", name="some", tools=("tool9?99", "tool7"))) as (_, tools):
        assert sum(name.startswith("mcp_odd_") for name in tools) == 500
        some = {name for name in tools if name.startswith("mcp_some_")}
        assert some == {"mcp_some_tool7"} | {f"mcp_some_tool9{digit}99" for digit in range(10)}
    assert len(caplog.records) == 1


async def test_an_endless_tool_list_is_abandoned(caplog):
    async with connected(odd("endless")) as (_, tools):
        assert 0 < len(tools) <= 500
    assert len(caplog.records) == 1


async def test_malicious_names_descriptions_and_schemas_are_made_harmless(caplog):
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
        await registry.execute(named["slow"], {"text": "a" * 40 + "b"})  # matching its pattern would take years
        assert time.monotonic() - began < 30
        assert "(a+)+" in json.dumps(tools[named["slow"]].parameters)
        assert set(by_name(await group.ready())) == set(tools)
    assert all("\x1b" not in record.getMessage() for record in caplog.records)


async def test_a_server_cannot_take_another_servers_names():
    servers = [odd("shadow", name="a"), odd("plain", name="a_b"), odd("plain", name="a.b"), odd("plain", name="a b")]
    async with connected(*servers) as (_, tools):
        assert tools["mcp_a_b_echo"]._connection.server.name == "a_b"  # type: ignore[attr-defined]
        echoes = [tool for tool in tools.values() if tool._tool.name.endswith("echo")]  # type: ignore[attr-defined]
        assert len(echoes) == 5
    async with connected(servers[0], replace(servers[1], command="no-such-program")) as (_, fewer):
        assert "mcp_a_b_echo" not in fewer, "even while the other one is unavailable"
        assert set(fewer) < set(tools)
