"""Traces of turns, received by a real OTLP receiver."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everloop import AgentLoop, Config, InboundMessage, LLMResponse, MessageBus, tool
from everloop.bus import SubagentTask
from everloop.errors import ConfigError
from everloop.observability import tracing
from everloop.observability.tracing import Tracer, traces_url
from everloop.providers.base import ProviderError
from everloop.store.base import Claim
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from tests.support.waiting import until as until

CANARY = "canary-9c41"
OK, ERROR = 1, 2  # status codes; 0 is unset


class Span:
    """A span as received."""

    def __init__(self, span: Any) -> None:
        self.name: str = span.name
        self.kind: int = span.kind
        self.id: bytes = span.span_id
        self.trace: bytes = span.trace_id
        self.parent: bytes = span.parent_span_id
        self.seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        self.start: int = span.start_time_unix_nano
        self.end: int = span.end_time_unix_nano
        self.status: int = span.status.code
        self.facts = {one.key: _value(one.value) for one in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class Receiver:
    """Receives traces over HTTP like a collector."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        self.refused = 0
        self.headers: list[dict[str, str]] = []
        self.port = 0

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )

        body = await request.read()
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            self.refused += 1
            return web.Response(status=self.status)
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({one.key: _value(one.value) for one in resource.resource.attributes})
            self.spans += [Span(span) for scope in resource.scope_spans for span in scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def gets(self, count: int) -> list[Span]:
        await until(lambda: len(self.spans) >= count)
        return self.spans


@asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[Receiver]:
    app = web.Application()
    app.router.add_post("/{path:.*}", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", receiver.port)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving(Receiver()) as running:
        yield running


class Traced:
    """A loop whose turns are traced once they have ended."""

    def __init__(self, folder: Path, endpoint: str, *steps: Any, **options: Any) -> None:
        self.store = SQLiteStore(folder / "store.db")
        self.agent = AgentLoop(MessageBus(), ScriptedProvider(steps), folder, store=self.store)
        self.tracer = Tracer(self.store, endpoint, **{"provider": "openai", "model": "m-1", **options})

    async def say(self, text: str, key: str = "my:one", root: str = "") -> str:
        """Run one turn; return its id."""
        await self.agent.process_direct(text, session_key=key)
        turn = (await self.store.turns("me", limit=1))[0]
        claim = Claim(turn.owner, turn.session, turn.key, 1, turn.id, 0, 0, turn.first_seq)
        claim.message = InboundMessage("cli", "user", "direct", text, cause=SubagentTask(root=root) if root else None)
        self.tracer.ended(claim)
        return turn.id

    async def __aenter__(self) -> Traced:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tracer.close()
        await self.agent.close()


async def test_a_turn_is_a_trace_with_its_model_calls_and_tools_below_it(receiver, tmp_path):
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 4}
    steps = LLMResponse(None, [call("list_dir", path=".")], usage=usage), LLMResponse("done", usage=usage, model="m-2")
    async with Traced(tmp_path, receiver.endpoint, *steps) as traced:
        turn = await traced.say("look")
        spans = {span.name: span for span in await receiver.gets(4)}
    assert len(receiver.spans) == 4
    assert receiver.paths == ["/v1/traces"]
    whole = spans["invoke_agent everloop"]
    assert whole.trace.hex() == turn.zfill(32)
    assert len({span.id for span in receiver.spans}) == 4
    assert (whole.parent, whole.kind, whole.status) == (b"", 1, 0)
    below = [span for span in receiver.spans if span is not whole]
    assert all(span.parent == whole.id and span.trace == whole.trace for span in below)
    assert all(whole.start <= span.start <= span.end <= whole.end for span in below)
    common = {"gen_ai.provider.name": "openai", "gen_ai.conversation.id": "my:one"}
    assert all(common.items() <= span.facts.items() for span in receiver.spans)
    assert whole.facts == common | {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "everloop", "everloop.turn.id": turn,
        "everloop.turn.reason": "answer", "everloop.turn.rounds": 2, "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 4, "gen_ai.usage.cache_read.input_tokens": 8,
    }  # fmt: skip
    chats = [span for span in receiver.spans if span.name == "chat m-1"]
    assert [span.facts["everloop.round"] for span in chats] == [1, 2]
    assert chats[1].kind == 3
    assert chats[1].facts == common | {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m-1", "gen_ai.response.model": "m-2",
        "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 2, "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ["stop"], "everloop.round": 2,
    }  # fmt: skip
    listed = spans["execute_tool list_dir"].facts
    assert listed.pop("gen_ai.tool.call.id").startswith("call_")
    assert listed == common | {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "list_dir", "gen_ai.tool.type": "function",
    }  # fmt: skip
    assert receiver.resources[0]["service.name"] == "everloop"


async def test_spans_last_as_long_as_their_steps(receiver, tmp_path):
    async def slow(messages: Any, tools: Any) -> str:
        await asyncio.sleep(0.2)
        return "done"

    @tool
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(0.1)
        return "waited"

    async with Traced(tmp_path, receiver.endpoint, call("wait"), slow) as traced:
        traced.agent.tools.register(wait)
        await traced.say("look")
        _, chat, waited, whole = sorted(await receiver.gets(4), key=lambda span: (span.name, span.start))
    assert 0.2 <= chat.seconds <= whole.seconds - 0.1 < 10
    assert 0.1 <= waited.seconds < 10
    assert abs(whole.end / 1e9 - time.time()) < 30


async def test_no_message_content_is_exported_by_default(receiver, tmp_path):
    (tmp_path / f"{CANARY}.txt").write_text(f"the file has {CANARY}-file")
    steps = (
        LLMResponse(f"I say {CANARY}", [call("read_file", path=f"{CANARY}.txt")], reasoning=f"think {CANARY}"),
        call("read_file", path=f"missing-{CANARY}.txt"),
        ProviderError(f"the server said {CANARY}", retryable=False),
    )
    async with Traced(tmp_path, receiver.endpoint, *steps) as traced:
        await traced.say(f"ask {CANARY}")
        await receiver.gets(6)
    assert CANARY.encode() not in b"".join(receiver.bodies)
    assert receiver.bodies


async def test_message_content_is_exported_if_so_configured(receiver, tmp_path):
    (tmp_path / "a.txt").write_text("the file")
    steps = LLMResponse("I look", [call("read_file", path="a.txt")]), "the answer"
    async with Traced(tmp_path, receiver.endpoint, *steps, content=True) as traced:
        await traced.say("the question")
        await receiver.gets(4)
    spans = {span.name: span.facts for span in receiver.spans}
    whole = spans["invoke_agent everloop"]
    assert json.loads(whole["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "the question"}]}
    ]
    assert json.loads(whole["gen_ai.output.messages"])[0]["parts"][0]["content"] == "the answer"
    first = next(span.facts for span in receiver.spans if span.facts.get("everloop.round") == 1)
    parts = json.loads(first["gen_ai.output.messages"])[0]["parts"]
    assert [part["type"] for part in parts] == ["text", "tool_call"]
    assert parts[1]["arguments"] == {"path": "a.txt"}
    read = spans["execute_tool read_file"]
    assert json.loads(read["gen_ai.tool.call.arguments"]) == {"path": "a.txt"}
    assert "the file" in read["gen_ai.tool.call.result"]


async def test_a_failure_is_recorded_by_its_kind(receiver, tmp_path):
    steps = call("no_such_tool"), ProviderError("down", retryable=False)
    async with Traced(tmp_path, receiver.endpoint, *steps) as traced:
        await traced.say("look")
        spans = await receiver.gets(4)
    found = sorted((span.name, span.facts.get("error.type", ""), span.status) for span in spans)
    assert found == [
        ("chat m-1", "", 0),
        ("chat m-1", "error", ERROR),
        ("execute_tool no_such_tool", "error", ERROR),
        ("invoke_agent everloop", "error", ERROR),
    ]


async def test_a_sub_agents_turn_is_a_child_of_the_turn_that_spawned_it(receiver, tmp_path):
    async with Traced(tmp_path, receiver.endpoint, "one", "two") as traced:
        first = await traced.say("work")
        await traced.say("part of it", "sub:1", root=first)
        await receiver.gets(4)
    above, below = (span for span in receiver.spans if span.name == "invoke_agent everloop")
    assert below.trace == above.trace
    assert below.parent == above.id


@pytest.mark.parametrize("status", [503, 404])
async def test_an_unavailable_receiver_delays_nothing_and_gets_everything_later(
    receiver, tmp_path, monkeypatch, status
):
    monkeypatch.setattr(tracing, "BATCH", 1)
    receiver.status = status
    async with Traced(tmp_path, receiver.endpoint, *["done"] * 8) as traced:
        for _ in range(4):
            began = time.monotonic()
            await traced.say("x")
            assert time.monotonic() - began < 4  # waiting for the receiver would take five seconds
        await until(lambda: receiver.refused > 0)
        receiver.status = 200
        spans = await receiver.gets(8)
    assert len({span.trace for span in spans if span.name.startswith("invoke")}) == 4
    assert len(spans) == 8


async def test_a_missing_receiver_is_reported_once_and_does_not_delay_shutdown(tmp_path, caplog):
    silent = Receiver()
    async with receiving(silent):
        pass  # an unused port
    caplog.set_level(logging.WARNING)
    traced = Traced(tmp_path, silent.endpoint, "done", "done")
    await traced.say("x")
    await traced.say("x")
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await traced.tracer.close()
    assert time.monotonic() - began < 4.5  # waiting for the receiver would take five seconds
    await traced.agent.close()
    assert [record.name for record in caplog.records] == ["everloop.observability.tracing"]


async def test_the_queue_for_an_unavailable_receiver_is_bounded(tmp_path, monkeypatch, receiver):
    monkeypatch.setattr(tracing, "MAX_QUEUED", 2)
    receiver.status = 503
    async with Traced(tmp_path, receiver.endpoint, *["done"] * 5) as traced:
        turns = [await traced.say("x") for _ in range(5)]
        receiver.status = 200
        await until(lambda: set(turns[-2:]) <= {span.facts.get("everloop.turn.id") for span in receiver.spans})
    spans = receiver.spans
    kept = {span.facts["everloop.turn.id"] for span in spans if "everloop.turn.id" in span.facts}
    assert set(turns[-2:]) <= kept
    assert len(kept) < 5


async def test_closing_sends_queued_traces_and_allows_reuse(receiver, tmp_path):
    async with Traced(tmp_path, receiver.endpoint, "one", "two") as traced:
        await traced.say("x")
        await traced.tracer.close()
        assert len(receiver.spans) == 2
        await traced.say("x")
        await traced.tracer.close()
        assert len(receiver.spans) == 4


async def test_headers_for_the_receiver_come_from_the_environment(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "garden")
    async with Traced(tmp_path, receiver.endpoint + "/custom/path", "one") as traced:
        await traced.say("x")
        await receiver.gets(2)
    assert receiver.paths == ["/custom/path"]
    assert receiver.headers[0].get("authorization", receiver.headers[0].get("Authorization")) == "Bearer abc"
    assert receiver.resources[0]["service.name"] == "garden"


def test_an_endpoint_that_is_not_a_url_is_refused():
    assert traces_url("http://127.0.0.1:4318/") == "http://127.0.0.1:4318/v1/traces"
    assert traces_url("https://host/v1/traces") == "https://host/v1/traces"
    for wrong in ("127.0.0.1:4318", "ftp://host", "http://", "x"):
        with pytest.raises(ConfigError, match="endpoint"):
            traces_url(wrong)


PROGRAM = """
import sys
from everloop.observability.tracing import Tracer
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "loaded too early"
import everloop.runtime.agent
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
from everloop.errors import ConfigError
if sys.argv[1:] == ["missing"]:
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "opentelemetry":
                raise ModuleNotFoundError(name)
    sys.meta_path.insert(0, Hidden())
try:
    Tracer(None, "http://127.0.0.1:1")
    print("made", "opentelemetry.sdk.trace" in sys.modules)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", [True, False])
def test_nothing_is_loaded_before_use_and_a_missing_extra_is_one_clear_line(missing):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(["missing"] if missing else [])],
        capture_output=True, text=True, env=os.environ, timeout=50,
    )  # fmt: skip
    assert done.stderr == ""
    if missing:
        assert len(done.stdout.splitlines()) == 1
        assert "everloop[otel]" in done.stdout
    else:
        assert done.stdout == "made False\n"


async def test_turns_of_a_loop_go_to_the_configured_collector(receiver, tmp_path):
    config = Config(home=tmp_path, telemetry_endpoint=receiver.endpoint)
    model = ScriptedProvider([call("list_dir", path="."), f"nothing but {CANARY}"])
    async with AgentLoop(MessageBus(), model, tmp_path, config=config, store=tmp_path / "s.db") as agent:
        await agent.process_direct("what is here?")
        spans = await receiver.gets(4)
    assert sorted(span.name.partition(" ")[0] for span in spans) == ["chat", "chat", "execute_tool", "invoke_agent"]
    assert CANARY.encode() not in b"".join(receiver.bodies)
