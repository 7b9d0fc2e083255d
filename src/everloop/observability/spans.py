"""Turns as OpenTelemetry spans, following the semantic conventions for generative AI, and their exporter.

This is the only module that imports OpenTelemetry. It runs in a thread, one turn after another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from .._version import __version__
from ..activity import ActivityEvent, Timeline
from ..log import Call, CallEnded, Logged, ModelAnswered, TurnEnded, UserSaid, text_of

EXPORT_SECONDS = 5.0
AGENT = "everloop"
MAX_TEXT = 20_000  # characters of a message, if content is exported
GOOD_ENDS = frozenset({"answer", "handed", "cancelled", "replaced"})  # a stop by the user is not an error
Turn = tuple[str, str, str, Sequence[Logged]]  # session key, id, root, entries


class Exporter:
    """Converts turns to spans and sends them."""

    def __init__(self, endpoint: str, *, content: bool, provider: str, model: str) -> None:
        self._content = content
        self._common = {"gen_ai.provider.name": provider} if provider else {}
        self._model = model
        self._ids = _Ids()
        self._spans = _SpanBuffer()
        spans = TracerProvider(resource=_resource(), id_generator=self._ids, shutdown_on_exit=False)
        spans.add_span_processor(self._spans)
        self._tracer = spans.get_tracer("everloop", __version__)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        self._lock = threading.Lock()

    def send(self, turns: Iterable[Turn]) -> bool:
        """Send the traces of these turns. Return False if the collector did not accept them."""
        with self._lock:
            # HTTP instrumentation in this process must not trace the export itself.
            token = context.attach(context.set_value("suppress_instrumentation", True))
            _quiet.on = True
            try:
                for turn in turns:
                    self._turn(*turn)
                spans = self._spans.take()
                return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS
            finally:
                _quiet.on = False
                context.detach(token)

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------------------------ spans

    def _turn(self, key: str, id: str, root: str, logged: Sequence[Logged]) -> None:
        activity = list(Timeline().read(logged))
        if not activity or not isinstance(ended := logged[-1].entry, TurnEnded):
            return
        self._common["gen_ai.conversation.id"] = key
        facts = activity[-1].facts
        whole = self._start(f"invoke_agent {AGENT}", SpanKind.INTERNAL, logged[0].at, self._parent(id, root))
        whole.set_attributes(
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": AGENT,
                "everloop.turn.id": id,
                "everloop.turn.reason": ended.reason,
                "everloop.turn.rounds": facts["rounds"],
                **_usage(facts),
            }
        )
        if ended.reason not in GOOD_ENDS:
            _failed(whole, ended.reason)
        self._add_content(whole, "gen_ai.input.messages", lambda: [_said(one.entry) for one in logged if _is_said(one)])
        self._add_content(whole, "gen_ai.output.messages", lambda: [_message("assistant", [_text(ended.text)])])
        self._steps(activity, trace.set_span_in_context(whole), ended)
        whole.end(_ns(logged[-1].at))

    def _parent(self, id: str, root: str) -> context.Context:
        """Return the parent of a turn's span: none, or the root turn of a sub-agent."""
        self._ids.trace, self._ids.span = _number(id), _number(id) & (2**64 - 1)
        if not root or root == id:
            return context.Context()
        parent = SpanContext(_number(root), _number(root) & (2**64 - 1), True, TraceFlags(TraceFlags.SAMPLED))
        return trace.set_span_in_context(NonRecordingSpan(parent), context.Context())

    def _steps(self, activity: Sequence[ActivityEvent], under: context.Context, ended: TurnEnded) -> None:
        calls: dict[str, Call] = {}
        asked: ActivityEvent | None = None  # a model call without an answer yet
        for one in activity:
            match one.event, one.entry:
                case "model_called", _:
                    asked = one
                case "model_answered", ModelAnswered() as answered:
                    began = one.at - answered.seconds if answered.seconds or asked is None else asked.at
                    self._chat(one, answered, began, under)
                    calls.update((call.id, call) for call in answered.calls)
                    asked = None
                case "tool_ended", CallEnded() as result if "handed" not in one.facts:
                    self._tool(one, result, calls.get(result.id), under)
                case "turn_ended", _ if asked is not None:
                    span = self._start(_named("chat", self._model), SpanKind.CLIENT, asked.at, under)
                    span.set_attributes(self._of_chat(asked))
                    _failed(span, ended.reason)
                    span.end(_ns(one.at))

    def _of_chat(self, one: ActivityEvent) -> dict[str, Any]:
        model = {"gen_ai.request.model": self._model or one.facts.get("model", "")}
        facts = {"gen_ai.operation.name": "chat", "everloop.round": one.facts["round"]}
        return facts | {name: value for name, value in model.items() if value}

    def _chat(self, one: ActivityEvent, answered: ModelAnswered, began: float, under: context.Context) -> None:
        span = self._start(_named("chat", self._model or answered.model), SpanKind.CLIENT, began, under)
        span.set_attributes(self._of_chat(one) | _usage(one.facts))
        span.set_attribute("gen_ai.response.finish_reasons", [answered.finish_reason])
        if answered.model:
            span.set_attribute("gen_ai.response.model", answered.model)
        if answered.first_token:
            span.set_attribute("gen_ai.response.time_to_first_chunk", answered.first_token)
        if answered.finish_reason == "cancelled":
            _failed(span, "cancelled")
        parts = [
            {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
            for call in answered.calls
        ]
        self._add_content(
            span,
            "gen_ai.output.messages",
            lambda: [_message("assistant", [*([_text(answered.content)] if answered.content else []), *parts])],
        )
        span.end(_ns(one.at))

    def _tool(self, one: ActivityEvent, result: CallEnded, call: Call | None, under: context.Context) -> None:
        span = self._start(f"execute_tool {result.name}", SpanKind.INTERNAL, one.at - result.seconds, under)
        span.set_attributes(
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": result.name,
                "gen_ai.tool.call.id": result.id,
                "gen_ai.tool.type": "function",
            }
        )
        if result.status != "ok":
            _failed(span, result.status)
        self._add_content(span, "gen_ai.tool.call.arguments", lambda: call.arguments if call is not None else {})
        self._add_content(span, "gen_ai.tool.call.result", lambda: result.content)
        span.end(_ns(one.at))

    def _start(self, name: str, kind: SpanKind, at: float, under: context.Context) -> trace.Span:
        return self._tracer.start_span(name, under, kind, self._common, start_time=_ns(at))

    def _add_content(self, span: trace.Span, name: str, content: Any) -> None:
        """Add content, if the settings allow it."""
        if self._content:
            value = content()
            span.set_attribute(
                name, value[:MAX_TEXT] if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            )


class _Ids(RandomIdGenerator):
    """Uses a turn's id as the id of its trace, so that each can be found by the other; other spans get random ids."""

    trace = 0
    span = 0

    def generate_trace_id(self) -> int:
        return self.trace or super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self.span = self.span, 0
        return given or super().generate_span_id()


class _SpanBuffer(SpanProcessor):
    """Collects spans until they are sent."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        taken, self._spans = self._spans, []
        return taken


class _Quiet(threading.local, logging.Filter):
    """Suppresses the exporter's own log records during an export: the tracer logs one line instead."""

    on = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.on


_quiet = _Quiet()
logging.getLogger(OTLPSpanExporter.__module__).addFilter(_quiet)


def _resource() -> Resource:
    """Return the resource from OpenTelemetry's environment variables, with the default service name everloop."""
    configured = Resource.create({"service.version": __version__})
    if not str(configured.attributes.get("service.name", "")).startswith("unknown_service"):
        return configured
    return configured.merge(Resource({"service.name": AGENT}))


def _failed(span: trace.Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def _usage(facts: dict[str, Any]) -> dict[str, int]:
    names = {
        "input_tokens": "gen_ai.usage.input_tokens",
        "output_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    }
    return {name: facts[ours] for ours, name in names.items() if ours in facts}


def _is_said(one: Logged) -> bool:
    return isinstance(one.entry, UserSaid)


def _said(entry: object) -> dict[str, Any]:
    assert isinstance(entry, UserSaid)
    return _message("user", [_text(text_of(entry.with_note()))])


def _message(role: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "parts": parts}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text[:MAX_TEXT]}


def _named(operation: str, model: str) -> str:
    return f"{operation} {model}" if model else operation


def _ns(at: float) -> int:
    return int(at * 1_000_000_000)


def _number(turn: str) -> int:
    """Return a turn's id as a 128-bit number."""
    try:
        return int(turn, 16) & (2**128 - 1) or 1
    except ValueError:
        return int.from_bytes(hashlib.sha256(turn.encode()).digest()[:16])
