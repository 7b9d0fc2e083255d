"""`everloop doctor --model`: which of ten small checks a model passes, with the real command and a fake endpoint."""

from __future__ import annotations

from everloop.cli.model_checks import CODE, LINES
from everloop.testing import FakeOpenAI, call

from ..support.commands import Done, everloop
from ..support.places import DOCS

NAMES = [
    "answers", "streams", "counts tokens", "calls a tool", "right arguments", "reads results", "two calls",
    "no needless call", "exact text", "clean answers",
]  # fmt: skip


def failed(done: Done) -> list[str]:
    assert [check["name"] for check in done.json["checks"]] == NAMES
    return [check["name"] for check in done.json["checks"] if not check["ok"]]


def well(server: FakeOpenAI) -> None:
    """All answers of a good model."""
    server.reply("ready to go")
    server.calls(call("add", a=20517, b=48311))
    server.reply(f"The code is {CODE}.")
    server.calls(call("add", a=1, b=2), call("add", a=3, b=4))
    server.reply("Hello there.")
    server.calls(call("write_file", path="a.txt", content=LINES))


async def test_a_good_model_passes_every_check(server):
    well(server)
    done = await everloop("doctor", "--model", server=server)
    assert done.status == 0
    assert [line[:2] for line in done.lines[:-1]] == ["✓ "] * 10
    assert done.lines[-1] == "scripted: 10 of 10; it can work as an agent"
    assert {request.model for request in server.requests} == {"scripted"}
    result = server.requests[2].body["messages"][-1]
    assert (result["role"], CODE in result["content"]) == ("tool", True)


def test_the_models_page_explains_each_of_the_ten_checks():
    table = (DOCS / "models.md").read_text().partition("| check |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == NAMES


async def test_a_model_that_writes_calls_as_text_passes_and_its_dialect_is_named(server):
    server.reply("ready to go")
    server.reply("<|tool_call_start|>[add(a=20517, b=48311)]<|tool_call_end|>")
    server.reply(f"The code is {CODE}.")
    server.reply("<|tool_call_start|>[add(a=1, b=2), add(a=3, b=4)]<|tool_call_end|>")
    server.reply("<think>No tool.</think>Hello there.")
    server.reply(f"<|tool_call_start|>[write_file(path='a.txt', content={LINES!r})]<|tool_call_end|>")
    done = await everloop("doctor", "--model", "other", "--json", server=server)
    assert failed(done) == []
    assert done.json["model"] == "other"
    assert done.json["checks"][3]["found"] == "in its text: <|tool_call_start|>"
    assert {request.model for request in server.requests} == {"other"}


async def test_what_a_model_cannot_do_is_named_one_by_one(server):
    server.reply("ready to go")
    server.calls(call("add", a=1, b=2))
    server.reply("I do not know.")
    server.calls(call("add", a=1, b=2))
    server.calls(call("write_file", path="hello", content=""))
    server.calls(call("write_file", path="a.txt", content=LINES.rstrip()))
    done = await everloop("doctor", "--model", "--json", server=server)
    assert failed(done) == ["right arguments", "reads results", "two calls", "no needless call", "exact text"]
    assert (done.status, done.json["ok"], done.json["passed"]) == (1, False, 5)


async def test_a_model_that_never_calls_and_leaks_markers_cannot_be_an_agent(server):
    server.reply("ready to go")
    for _ in range(5):
        server.reply("I would [TOOL_CALLS] then.")
    done = await everloop("doctor", "--model", "--json", server=server)
    assert failed(done) == [
        "calls a tool",
        "right arguments",
        "reads results",
        "two calls",
        "exact text",
        "clean answers",
    ]
    assert done.status == 1


async def test_an_endpoint_that_refuses_is_reported_in_one_line(server):
    server.fail(401, "no such key")
    done = await everloop("doctor", "--model", server=server)
    assert done.status == 1
    first, last = done.lines
    assert first.startswith("✗ answers")
    assert "no such key" in first
    assert last == "scripted: 0 of 10; it can hardly work as an agent"


async def test_a_model_named_before_the_command_is_checked_without_prompting(server):
    done = await everloop("--model", "other", "doctor", "--json", server=server, EVERLOOP_PROVIDER="openai")
    assert "other" in str(done.json["checks"])
    assert server.requests == []
