"""The timeline of a turn for the page: its steps on a time axis without idle time, and the requests that were sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from ..activity import ActivityEvent
from ..activity import Timeline as Activity
from ..config import Config
from ..config.prices import cost_of, price_of
from ..context.compaction import conversation_of
from ..log import (
    CallEnded,
    CallsAsked,
    Cleared,
    Compacted,
    Logged,
    ModelAnswered,
    Request,
    TurnEnded,
    UserSaid,
    text_of,
)
from ..messages import encode_json
from ..providers.base import extra_of
from ..runtime.agent import AgentLoop
from ..runtime.api_requests import brings_all
from ..runtime.owners import Owners
from ..store.base import RequestText, SessionInfo, TurnInfo
from ..text import clean, one_line
from ..threads import in_thread
from .errors import bad_request, not_found
from .feed import read_number
from .guard import OWNER
from .page_routes import Parameter, json_response, operation, session_in

Kind = Literal["said", "model", "tool", "question", "compacted", "retry", "takeover", "end"]
TURNS = 50
SHOWN = 4_000  # characters of a step's text
WORDS = 100  # characters of the message that opened a turn
TAKEOVER = "The worker that ran this turn was lost, and another one continued here."
HANDOVER = "This worker continued the turn here."
PROMPT_OF_NOW = "The original system prompt is not stored: this is the one that would be sent now."
TOOLS_OF_NOW = "The original tools are not stored: these are the ones that would be offered now."
SUBAGENT = "A sub-agent has a note about its task in its prompt, and fewer tools."
OTHER_FORM = "The provider sends this in its own format."
IDLE = 0.5  # gaps of more seconds without a step are cut out

# ---------------------------------------------------------------------------------------------- responses


class TurnItem(msgspec.Struct):
    id: str
    session: str
    started_at: float
    ended_at: float | None
    reason: str | None
    title: str  # the first words of the message that opened it


class TurnList(msgspec.Struct):
    turns: list[TurnItem]


class Step(msgspec.Struct):
    """Something that took time, or marks a point in time."""

    kind: Kind
    name: str  # of the model or the tool
    at: float  # when it started
    seconds: float
    offset: float  # seconds on the axis, which omits idle time
    seq: int | None  # its entry in the log; None while it runs
    status: str
    call: str  # the id of a tool call
    first_token: float  # seconds; 0 if the answer was not streamed
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None  # in dollars; None if no price is known
    arguments: dict[str, Any]
    text: str
    flushed: float  # seconds that the turn waited for flushes before the step
    flushed_after: float = 0.0  # and after the last step, when the turn was closed or parked


class Gap(msgspec.Struct):
    """Idle time that was cut out of the axis."""

    offset: float
    seconds: float


class TurnTimeline(msgspec.Struct):
    id: str
    session: str
    started_at: float
    ended_at: float | None
    reason: str | None
    seconds: float  # on the axis
    idle: float  # seconds that were cut out
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None
    flushed: float  # seconds that it waited for flushes
    steps: list[Step]
    gaps: list[Gap]


class SentRequest(msgspec.Struct):
    """The request of a model call."""

    body: str  # the JSON that was sent, without the fields that request a stream
    notes: list[str]  # sentences about possible differences from the original request; empty if it is exact


# ---------------------------------------------------------------------------------------------- the timeline


def cost_by(config: Config, model: str, usage: Mapping[str, int]) -> float | None:
    """Return the cost of a model's tokens; None if no price is known, and for a model on this machine."""
    if config.provider == "local" or (price := price_of(model, config.prices)) is None:
        return None
    return cost_of(price, usage)


def timeline_of(turn: TurnInfo, logged: Sequence[Logged], config: Config, now: float) -> TurnTimeline:
    """Build the timeline of a turn from its entries. `now` is the end of steps still in progress."""

    def cost(model: str, usage: Mapping[str, int]) -> float | None:
        return cost_by(config, model or config.model, usage)

    collected = _Steps()
    for one in Activity(cost).read(logged):
        collected.add(one)
    steps = collected.until(now)
    if steps and turn.flushed:
        steps[-1].flushed_after = turn.flushed
    gaps = _place(steps)
    costs = [step.cost for step in steps if step.cost is not None]
    busy = max((step.offset + step.seconds for step in steps), default=0.0)
    return TurnTimeline(
        turn.id,
        turn.key,
        turn.started_at,
        turn.ended_at,
        turn.reason,
        busy,
        sum(gap.seconds for gap in gaps),
        sum(step.input_tokens for step in steps),
        sum(step.cached_tokens for step in steps),
        sum(step.output_tokens for step in steps),
        sum(costs) if costs else None,
        sum(step.flushed + step.flushed_after for step in steps),
        steps,
        gaps,
    )


class _Steps:
    """Collects the steps of a turn from its activity."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._asked: ActivityEvent | None = None  # the model call in progress
        self._running: dict[str, ActivityEvent] = {}  # tools, by call
        self._question: Step | None = None
        self._arguments: dict[str, dict[str, Any]] = {}  # by call

    def add(self, one: ActivityEvent) -> None:
        """Add the step of an event, or note its start."""
        facts, entry, steps = one.facts, one.entry, self._steps
        match one.event:
            case "request" | "steered" if isinstance(entry, UserSaid):
                steps.append(_step("said", one.at, seq=one.seq, status=one.event, text=text_of(entry.with_note())))
            case "model_called":
                self._asked = one
            case "model_answered" if isinstance(entry, ModelAnswered):
                self._add_answer(one, entry)
            case "tool_started":
                self._running[facts["call"]] = one
            case "feedback" if facts["kind"] == "empty":
                steps.append(_step("retry", one.at, text=facts["text"]))
            case "tool_ended" if isinstance(entry, CallEnded):
                self._add_result(one, entry)
            case "asked" if isinstance(entry, CallsAsked):
                self._question = _step("question", one.at, seq=one.seq, status="waiting", text=entry.question)
                steps.append(self._question)
            case "decided" if self._question is not None:
                self._question.status = "allowed" if facts["allowed"] else "denied"
                self._question = None
            case "compacted":
                steps.append(_step("compacted", one.at, seq=one.seq))
            case "turn_ended" if isinstance(entry, TurnEnded):
                text = entry.error or ("" if entry.reason == "answer" else entry.text)
                steps.append(_step("end", one.at, seq=one.seq, status=entry.reason, text=text))

    def until(self, now: float) -> list[Step]:
        """Return the steps in their order; those still in progress last until `now`."""
        return sorted([*self._steps, *self._in_progress(now)], key=lambda step: step.at)

    def _add_answer(self, one: ActivityEvent, entry: ModelAnswered) -> None:
        began = one.at - one.facts["seconds"] if self._asked is None or entry.worker else self._asked.at
        self._asked = None
        self._arguments |= {call.id: call.arguments for call in entry.calls}
        self._add_handover(entry, began)
        self._steps += [
            _step("retry", began + failed.began, seconds=failed.seconds, status="failed", text=failed.error)
            for failed in entry.failures
        ]
        self._steps.append(_model_step(began, one, entry))

    def _add_result(self, one: ActivityEvent, entry: CallEnded) -> None:
        if entry.status == "interrupted" and not (self._steps and self._steps[-1].status == "interrupted"):
            self._steps.append(_step("takeover", one.at, seq=one.seq, text=TAKEOVER))
        started = self._running.pop(entry.id, None)
        began = one.at - entry.seconds if entry.seconds or started is None else started.at
        self._add_handover(entry, began)
        self._steps.append(
            _step(
                "tool",
                began,
                name=entry.name,
                seconds=entry.seconds or max(one.at - began, 0.0),
                seq=one.seq,
                status=entry.status,
                call=entry.id,
                arguments=self._arguments.get(entry.id, {}),
                text=entry.content,
                flushed=entry.flushed,
            )
        )

    def _add_handover(self, entry: ModelAnswered | CallEnded, began: float) -> None:
        """Add a step for a worker that resumed the turn before the step of an entry, if one did."""
        if not entry.worker:
            return
        last = next((step for step in reversed(self._steps) if step.kind in ("takeover", "model")), None)
        if last is not None and last.kind == "takeover":  # recognised by the interrupted call
            last.name = entry.worker
        else:
            self._steps.append(_step("takeover", began, name=entry.worker, text=HANDOVER))

    def _in_progress(self, now: float) -> Iterator[Step]:
        asked = self._asked
        if asked is not None and not any(step.kind == "end" for step in self._steps):
            name = str(asked.facts.get("model", ""))
            yield _step("model", asked.at, name=name, seconds=max(now - asked.at, 0.0), status="running")
        for id, one in self._running.items():
            name, given = str(one.facts["tool"]), self._arguments.get(id, {})
            seconds = max(now - one.at, 0.0)
            yield _step("tool", one.at, name=name, seconds=seconds, status="running", call=id, arguments=given)


def _model_step(began: float, one: ActivityEvent, entry: ModelAnswered) -> Step:
    facts = one.facts
    return _step(
        "model",
        began,
        name=entry.model,
        seconds=facts["seconds"],
        seq=one.seq,
        status=entry.finish_reason,
        first_token=entry.first_token,
        input_tokens=facts.get("input_tokens", 0),
        cached_tokens=facts.get("cached_tokens", 0),
        output_tokens=facts.get("output_tokens", 0),
        cost=facts.get("cost"),
        text=entry.content or "",
        flushed=entry.flushed,
    )


def _step(
    kind: Kind,
    at: float,
    *,
    name: str = "",
    seconds: float = 0.0,
    seq: int | None = None,
    status: str = "",
    call: str = "",
    first_token: float = 0.0,
    input_tokens: int = 0,
    cached_tokens: int = 0,
    output_tokens: int = 0,
    cost: float | None = None,
    arguments: dict[str, Any] | None = None,
    text: str = "",
    flushed: float = 0.0,
) -> Step:
    tokens = (input_tokens, cached_tokens, output_tokens)
    return Step(
        kind,
        name,
        at,
        seconds,
        0.0,
        seq,
        status,
        call,
        first_token,
        *tokens,
        cost,
        arguments or {},
        clean(text)[:SHOWN],
        flushed,
    )


def _place(steps: Sequence[Step]) -> list[Gap]:
    """Place steps, which are in order, on the axis without idle time. Return the gaps."""
    gaps: list[Gap] = []
    if not steps:
        return gaps
    cut, end = steps[0].at, steps[0].at
    for step in steps:
        if step.at - end > IDLE:
            gaps.append(Gap(end - cut, step.at - end))
            cut += step.at - end
        step.offset = max(step.at - cut, 0.0)
        end = max(end, step.at + step.seconds)
    return gaps


# ---------------------------------------------------------------------------------------------- requests


async def request_at(agent: AgentLoop, info: SessionInfo, seq: int) -> SentRequest | None:
    """Return the request whose answer is the entry at this position; None if there is none.

    The conversation is in the log. The system prompt and the tools are in the store under the hashes that the answer
    names; if they are missing, they are rebuilt from the current state.
    """
    after = info.history_from if seq > info.history_from else 0
    logged = await agent.store.read_log(info.id, after, seq)
    if not logged or logged[-1].seq != seq or not isinstance(answered := logged[-1].entry, ModelAnswered):
        return None
    before = logged[:-1]
    cleared = [place for place, one in enumerate(before) if isinstance(one.entry, Cleared)]
    before = before[cleared[-1] + 1 if cleared else 0 :]
    compactions = [one.entry for one in before if isinstance(one.entry, Compacted)]
    compacted = compactions[-1] if compactions else None
    shown = [one for one in before if compacted is None or one.seq > compacted.until]
    said = next((one.entry for one in reversed(before) if _opens(one, logged[-1].turn)), None)
    request = said.request if isinstance(said, UserSaid) else None
    kept = await agent.store.request_texts(info.owner, [answered.prompt, answered.tools]) if answered.prompt else {}
    began = before[0].at if before else info.created_at
    standing = await _standing(agent, info, request, answered, kept, began)
    conversation = conversation_of(standing.system, compacted, shown)
    model, options = answered.model or agent.model or "", request.options if request is not None else {}
    body_of = getattr(agent.provider, "request_body", None)  # a custom provider may be anything
    body = body_of and body_of(conversation, standing.tools, model, options, standing.extra)
    if body is not None:
        return SentRequest(body.decode(), standing.notes)
    fields = {"model": model, "messages": [dict(message) for message in conversation], "tools": standing.tools}
    return SentRequest(encode_json(fields).decode(), [*standing.notes, OTHER_FORM])


class Kept(msgspec.Struct):
    """The tools and other fields of a request, as stored."""

    tools: list[dict[str, Any]]
    extra: dict[str, Any]


class Standing(NamedTuple):
    """The parts of a request that are not in the log."""

    system: str
    tools: list[dict[str, Any]]
    extra: Mapping[str, Any]
    notes: list[str]


async def _standing(
    agent: AgentLoop,
    info: SessionInfo,
    request: Request | None,
    answered: ModelAnswered,
    kept: Mapping[str, RequestText],
    began: float,
) -> Standing:
    extra = extra_of(agent.provider)
    spec = agent.request_spec(request) if request is not None else None
    if request is not None and spec is not None and brings_all(request):
        return Standing(spec.system(""), [*spec.tools.get_definitions()], extra, [])
    notes = []
    prompt, tools = kept.get(answered.prompt), kept.get(answered.tools)
    if prompt is None:
        system = await in_thread(agent.context.shared_prompt)
    else:
        system = msgspec.json.decode(prompt.data, type=str)
    if prompt is None or not prompt.key:  # otherwise it is the whole prompt of a task
        system = spec.system(system) if spec is not None else system
        system = agent.context.conversation_prompt(system, began)
    if prompt is None:
        notes += [PROMPT_OF_NOW, SUBAGENT] if info.key.startswith("sub:") else [PROMPT_OF_NOW]
    if tools is not None:
        found = msgspec.json.decode(tools.data, type=Kept)
        return Standing(system, found.tools, found.extra, notes)
    registry = spec.tools if spec is not None else agent.tools
    return Standing(system, [*registry.get_definitions()], extra, [*notes, TOOLS_OF_NOW])


def _opens(one: Logged, turn: str | None) -> bool:
    return one.turn == turn and isinstance(one.entry, UserSaid) and one.entry.request is not None


# ---------------------------------------------------------------------------------------------- handlers


class TimelineApi:
    """The turns of a session, their timelines, and the requests of their model calls."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._store = owners.store

    @operation(
        "GET",
        "/api/turns",
        "requests_log",
        "The latest turns of all sessions.",
        TurnList,
        None,
        Parameter("limit", "How many turns.", "integer"),
    )
    async def all_turns(self, request: web.Request) -> web.Response:
        found = await self._store.turns(request[OWNER], limit=read_number(request, "limit", TURNS, TURNS))
        return json_response(TurnList([await self._item(turn) for turn in found]))

    @operation(
        "GET",
        "/api/sessions/{key}/turns",
        "turns",
        "The latest turns of a session.",
        TurnList,
        None,
        Parameter("limit", "How many turns.", "integer"),
    )
    async def turns(self, request: web.Request) -> web.Response:
        info = await session_in(self._store, request)
        found = await self._store.turns(info.owner, session=info.id, limit=read_number(request, "limit", TURNS, TURNS))
        return json_response(TurnList([await self._item(turn) for turn in found]))

    @operation("GET", "/api/sessions/{key}/turns/{turn}", "timeline", "The steps of a turn in time.", TurnTimeline)
    async def timeline(self, request: web.Request) -> web.Response:
        info, wanted = await session_in(self._store, request), request.match_info["turn"]
        found = await self._store.turns(info.owner, session=info.id, prefix=wanted, limit=1)
        if not found or found[0].id != wanted:
            raise not_found("there is no such turn", code="turn_not_found")
        logged = await self._store.read_turn(info.id, found[0].first_seq)
        now = (await self._store.overview()).at if found[0].ended_at is None else 0.0
        return json_response(timeline_of(found[0], logged, self._owners.config, now))

    @operation(
        "GET", "/api/sessions/{key}/requests/{seq}", "request", "The request that an answer came from.", SentRequest
    )
    async def request(self, request: web.Request) -> web.Response:
        info, seq = await session_in(self._store, request), request.match_info["seq"]
        if not seq.isascii() or not seq.isdecimal() or len(seq) > 15:
            raise bad_request("the position must be a number", "seq")
        sent = await request_at(await self._owners.agent(info.owner), info, int(seq))
        if sent is None:
            raise not_found("there is no model answer at this position", code="answer_not_found")
        return json_response(sent)

    async def _item(self, turn: TurnInfo) -> TurnItem:
        first = await self._store.read_log(turn.session, turn.first_seq - 1, turn.first_seq)
        entry = first[0].entry if first else None
        title = one_line(text_of(entry.content), WORDS) if isinstance(entry, UserSaid) else ""
        return TurnItem(turn.id, turn.key, turn.started_at, turn.ended_at, turn.reason, title)
