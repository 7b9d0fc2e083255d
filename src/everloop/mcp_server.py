"""The agent as an MCP server over standard input and output: a client can ask it, list its sessions and search them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any, Literal

from mcp.server.elicitation import render_elicitation_schema
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult, ToolAnnotations
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, Field

from . import events
from ._version import __version__
from .bus import InboundMessage, is_inside, repeatable_id
from .commands import Answer, kind_of
from .runtime.agent import AgentLoop, TurnResult
from .runtime.attached import Decide, give_answer, place_of_question, sessions_of, take_turn
from .runtime.owners import OWN

CHANNEL = "mcp"
MAX_KEY = 200
MAX_MESSAGE = 1_000_000
MAX_FOUND = 100

Word = Literal["allow", "allow for this session", "refuse"]


class Reply(BaseModel):
    """The answer of a turn.

    `reason` is why the turn ended: "answer" if the model answered, "question" if a person must answer first.
    """

    answer: str
    session: str
    reason: str
    turn: str = ""


class Session(BaseModel):
    key: str
    title: str
    state: Literal["running", "waiting", "idle"]
    updated_at: float


class Match(BaseModel):
    session: str
    at: float
    role: str
    text: str


class Decision(BaseModel):
    """A person's answer to a question of the agent."""

    answer: Annotated[Word, Field(description="What the agent may do.")] = "refuse"
    note: Annotated[str, Field(description="A reason for the agent, if you refuse.")] = ""


def make_server(agent: AgentLoop) -> MCPServer[Any]:
    """Return an MCP server for the agent."""
    agent.subagents.wait_for_all()  # a report that arrives after the answer would reach no client
    server: MCPServer[Any] = MCPServer("everloop", version=__version__, instructions=_INSTRUCTIONS)
    tools, reads = _Tools(agent), ToolAnnotations(read_only_hint=True, open_world_hint=False)
    server.tool(annotations=ToolAnnotations(open_world_hint=True))(tools.ask)
    server.tool(annotations=reads)(tools.sessions)
    server.tool(annotations=reads)(tools.search)
    return server


class _Tools:
    """The tools of the server. The client sees their names, docstrings and parameters."""

    def __init__(self, agent: AgentLoop) -> None:
        self._agent = agent

    async def ask(
        self,
        context: Context[Any, Any],
        message: Annotated[str, Field(description="The question or task for the agent.")],
        session: Annotated[str, Field(description="The session to continue; a new one by default.")] = "",
        id: Annotated[str, Field(description="Idempotency key: a message is handled once per id.")] = "",
    ) -> Reply | InputRequiredResult:
        """Ask the agent. It works with its own tools in its own workspace, and answers when it is done."""
        earlier = _State.model_validate_json(context.request_state) if context.request_state else None
        key = checked(message, session, id) or (earlier and earlier.session) or f"{CHANNEL}:{secrets.token_hex(6)}"
        sent = InboundMessage(CHANNEL, "client", key, message, session=key, reply=False)
        if id:
            sent.id = repeatable_id(CHANNEL, key, id)
        if kind_of(sent) != "message":  # a program must not approve, stop or clear anything
            raise ToolError("commands and answers to questions are not accepted here: only a person may give them")
        result = await self._answer(context, sent, earlier)
        if result is None:
            return Reply(answer="The question was not answered here.", session=key, reason="question")
        if result.reason == "question" and _can_ask(context) and _is_modern(context):
            place = await place_of_question(self._agent, sent)
            return _required(result.text, _State(session=key, place=place))
        if result.reason == "error":
            raise ToolError(f"{result.error} (session {key})")
        return Reply(answer=result.text, session=key, reason=result.reason, turn=result.turn or "")

    async def sessions(
        self,
        limit: Annotated[int, Field(ge=1, le=MAX_FOUND, description="Maximum number of results.")] = 20,
    ) -> list[Session]:
        """List the agent's sessions, the latest first."""
        found = []
        for info, title in await sessions_of(self._agent.store, limit):
            state: Literal["running", "waiting", "idle"] = "idle"
            if info.open_turn is not None:
                state = "waiting" if info.parked else "running"
            found.append(Session(key=info.key, title=title, state=state, updated_at=info.updated_at))
        return found

    async def search(
        self,
        query: Annotated[str, Field(min_length=1, max_length=1_000, description="Words to look for.")],
        limit: Annotated[int, Field(ge=1, le=MAX_FOUND, description="Maximum number of results.")] = 10,
    ) -> list[Match]:
        """Search what was said in all sessions, best first."""
        found = await self._agent.store.search(OWN, query, limit)
        return [Match(session=one.session, at=one.at, role=one.role, text=one.text) for one in found]

    async def _answer(
        self, context: Context[Any, Any], sent: InboundMessage, earlier: _State | None
    ) -> TurnResult | None:
        """Run the turn and report its tools; with an `earlier` question, continue the turn that asked it.

        None if the person gave no answer, or had already given another one.
        """
        progress: asyncio.Queue[str] = asyncio.Queue()

        def watch(event: events.Event) -> None:
            if isinstance(event, events.ToolStarted):
                progress.put_nowait(event.name)

        told = asyncio.create_task(_report(context, progress))
        try:
            if earlier is None:
                return await take_turn(self._agent, sent, watch, _decider(context))
            answer = _answer_in(context)
            return await give_answer(self._agent, sent, earlier.place, answer, watch) if answer is not None else None
        finally:
            told.cancel()


_INSTRUCTIONS = (
    "An agent that works in a workspace of its own and remembers its sessions. `ask` starts or continues a "
    "session; `sessions` lists them and `search` finds what was said."
)


def checked(message: str, session: str, id: str) -> str:
    """Validate the arguments. Return the session's key, or raise a ToolError."""
    if not message.strip() or len(message) > MAX_MESSAGE:
        raise ToolError(f"message: must have 1 to {MAX_MESSAGE:,} characters")
    if id and not session:
        raise ToolError("id: give the session too, because messages are looked up by both")
    for name, text in (("session", session), ("id", id)):
        if text and (not text.strip() or not text.isprintable() or len(text) > MAX_KEY):
            raise ToolError(f"{name}: must have at most {MAX_KEY} printable characters")
    if is_inside(session):
        raise ToolError(f"session: {session.partition(':')[0]}: is reserved for internal sessions")
    return session


async def _report(context: Context[Any, Any], names: asyncio.Queue[str]) -> None:
    number = 0
    while True:
        name = await names.get()
        number += 1
        await context.report_progress(number, message=name)


# ------------------------------------------------------------------------------- questions to a person


class _State(BaseModel):
    """State that the client returns with the person's answer (since protocol 2026-07-28): the question's position."""

    session: str
    place: int


def _can_ask(context: Context[Any, Any]) -> bool:
    """Return whether the client can ask a person a question."""
    offered = context.client_capabilities
    return offered is not None and offered.elicitation is not None


def _is_modern(context: Context[Any, Any]) -> bool:
    """Return whether a question is a result that the client follows up on, rather than a request to the client."""
    return context.session.protocol_version in MODERN_PROTOCOL_VERSIONS


def _decider(context: Context[Any, Any]) -> Decide | None:
    """Return the callback that asks a person while the turn waits; None if no person can be asked."""
    if not _can_ask(context):
        return None

    async def decide(question: str, calls: tuple[str, ...]) -> Answer | None:
        if _is_modern(context):
            return None
        said = await context.elicit(question, Decision)
        return _answer(said.action, said.data if said.action == "accept" else None)

    return decide


def _required(question: str, state: _State) -> InputRequiredResult:
    form = ElicitRequestFormParams(message=question, requested_schema=render_elicitation_schema(Decision))
    return InputRequiredResult(
        input_requests={"decision": ElicitRequest(params=form)}, request_state=state.model_dump_json()
    )


def _answer_in(context: Context[Any, Any]) -> Answer | None:
    given = (context.input_responses or {}).get("decision")
    if not isinstance(given, ElicitResult):
        return None
    return _answer(given.action, Decision.model_validate(given.content or {}) if given.action == "accept" else None)


def _answer(action: str, decision: Decision | None) -> Answer | None:
    """Return the person's answer; None if there was none, which leaves the question open."""
    if action == "decline":
        return Answer(False)
    if decision is None:
        return None
    if decision.answer == "refuse":
        return Answer(False, note=" ".join(decision.note.split()))
    return Answer(True, always=decision.answer != "allow")
