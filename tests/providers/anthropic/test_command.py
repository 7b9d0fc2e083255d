"""The command line with Anthropic's API, against a real server."""

from __future__ import annotations

import pytest

from everloop.testing import call
from tests.support.commands import Done, everloop

from .streams import SECRET


async def run(*arguments: str, url: str, stdin: bytes = b"", workspace: str = "") -> Done:
    return await everloop(
        *arguments, stdin=stdin, EVERLOOP_PROVIDER="anthropic", EVERLOOP_API_KEY=SECRET, EVERLOOP_BASE_URL=url,
        EVERLOOP_WORKSPACE=workspace,
    )  # fmt: skip


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_a_goal_is_reached_over_the_api(server, folder, base):
    (folder / "todo.txt").write_text("water the beans")
    server.calls(call("read_file", path="todo.txt"), call("list_dir", path="."), text="Let me look.")
    server.reply("Water the beans.")
    done = await run("run", "what is to do?", url=server.base_url + base, workspace=str(folder))
    assert (done.status, done.out) == (0, "Water the beans.\n")
    first, second = (request.body for request in server.requests)
    assert second["system"] == first["system"]
    assert second["tools"] == first["tools"]
    results = [block for block in second["messages"][-1]["content"] if block["type"] == "tool_result"]
    assert len(results) == 2
    assert "water the beans" in results[0]["content"]
    assert server.invalid == 0


async def test_a_refused_key_is_one_line_that_does_not_show_it(server):
    server.fail(401, f"invalid x-api-key {SECRET}")
    done = await run("run", "hi", url=server.base_url)
    assert done.status != 0
    assert "EVERLOOP_API_KEY" in done.err
    assert SECRET not in done.out + done.err


async def test_without_a_key_the_public_api_is_not_asked():
    done = await everloop("run", "hi", EVERLOOP_PROVIDER="anthropic")
    assert done.status == 2
    assert "EVERLOOP_API_KEY" in done.err


async def test_an_answer_is_streamed_into_the_chat(server):
    server.reply("Hello there.")
    done = await run("--session", "cli:a", url=server.base_url, stdin=b"hi\n")
    assert "Hello there." in done.out
