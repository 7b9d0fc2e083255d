"""The message bus: inbound messages from the channels, and outbound messages to them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from .log import Content, Request, UserSaid
from .text import clean

INSIDE = frozenset({"system", "sub"})  # channels of messages that the system itself creates
EXECUTOR = "executor"  # the channel of `AgentExecutor` runs
PULLED = frozenset({"api", EXECUTOR})  # channels whose clients fetch their answers: there is nowhere to send them
WEB = "web"  # the channel of clients that follow the log, such as the web page
# A command waits its turn in the session; an urgent one does not. A "reply" is stored as urgent if the session has an
# open question, which it answers, and as a message otherwise.
Kind = Literal["message", "command", "urgent", "reply"]
Busy = Literal["queue", "steer", "interrupt"]  # what a message does to a turn already running in its session
_MAY_NAME_A_SKILL = re.compile(r"\$[a-z0-9]")


class SubagentTask(msgspec.Struct, frozen=True, omit_defaults=True, tag="task"):
    """The task of a sub-agent or of an executor's run; attached to every message sent to it."""

    id: str = ""  # the agent's id; "" if it is the chat id
    label: str = ""
    origin: str = "cli:direct"  # the chat that gets the report
    parent: str = ""  # the session that started it
    root: str = ""  # the turn at the root of the tree; its budget applies
    depth: int = 1
    caps: dict[str, int] = {}  # token caps of this agent and of the agents above it, by agent id
    rounds: int | None = None
    seconds: float | None = None  # working time allowed; time during which no process runs it does not count
    ends_at: float | None = None  # deadline, in tasks written by an earlier version
    latest: float | None = None  # the parent agent's deadline, which no phase may exceed
    attended: bool = True  # a person is in the chat; a sub-agent itself never asks
    report: bool = True  # send the result to the chat as a message
    definition: dict[str, Any] | None = None  # snapshot of the agent's definition, taken when it started
    inputs: dict[str, Any] = {}
    phase: Literal["work", "extract", "grace"] = "work"  # for agents with a definition
    tries: int = 0  # attempts at a valid result
    cut: str = ""  # why the work was cut short


HEARTBEAT = "heartbeat"  # the id of the heartbeat's timer, which is not a job
NOTHING_TO_SAY = "HEARTBEAT_OK"  # an answer to the heartbeat that is only this is not delivered
_MARKS = "`*_.!\"' \n\t"

# What a due job delivers: the model's answer to its message, or the message itself.
Deliver = Literal["answer", "text"]


class CronOrigin(msgspec.Struct, frozen=True, omit_defaults=True, tag="cron"):
    """The scheduled job that a message comes from."""

    job: str
    may_schedule: bool = False  # the turn may add jobs
    note: str = ""  # shown to the model with the message
    deliver: Deliver = "answer"

    def is_silent(self, answer: str) -> bool:
        """Return whether an answer to the heartbeat only says that there is nothing to report."""
        return self.job == HEARTBEAT and answer.strip(_MARKS) == NOTHING_TO_SAY


class StopRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag="stop"):
    """A request from another process to stop a turn."""

    target: str | int | None = None  # the turn's id, or the inbox row that opens it; None for any turn
    chat_told: bool = False  # the chat gets the answer to its own /stop


Cause = SubagentTask | CronOrigin | StopRequest


def is_inside(key: str) -> bool:
    """Return whether a session is internal to the system."""
    return key.partition(":")[0] in INSIDE


def repeatable_id(channel: str, session: str, key: str) -> str:
    """Return the id of a message that its client names with a key: sent again, it is the same message."""
    return f"{channel}:{len(session)}:{session}:{key}"  # the length is included because both may contain colons


@dataclass(slots=True)
class InboundMessage:
    """A message from a chat.

    `id`, if the channel has one, is an idempotency key. `session` overrides the chat's own session. `reply` sends the
    answer to the chat. `attended` means that a person is there to answer questions. `metadata` belongs to the channel
    and comes back with the answer.
    """

    channel: str
    sender_id: str
    chat_id: str
    content: str
    media: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    owner: str = "me"
    session: str | None = None
    reply: bool = True
    attended: bool = True
    request: Request | None = None  # the API client's request
    parts: list[dict[str, Any]] | None = None  # the content if it is more than text, such as images in the request
    cause: Cause | None = None  # what created the message, if the system did
    untrusted: bool = False  # contains external content; only trusted on the system's own messages
    own_files: bool = False  # untrusted only because of files that the agent did not write
    busy: Busy | None = None  # what to do if a turn is running; None for the configured default
    restored: bool = False  # restored from a backup, so it may have been answered before

    def __post_init__(self) -> None:
        for name in ("channel", "sender_id", "chat_id", "id", "session"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in ("id", "session")):
                # chat networks have numbers
                if not isinstance(value, int):
                    raise TypeError(f"InboundMessage: {name} must be a text, not {type(value).__name__}")
                setattr(self, name, str(value))
        self.media, self.metadata = self.media or [], self.metadata or {}  # programs also pass None for nothing
        if self.metadata and self.cause is None:
            _read_old_metadata(self)

    @property
    def task(self) -> SubagentTask | None:
        return self.cause if isinstance(self.cause, SubagentTask) else None

    @property
    def cron(self) -> CronOrigin | None:
        return self.cause if isinstance(self.cause, CronOrigin) else None

    @property
    def session_key(self) -> str:
        return self.session or f"{self.channel}:{self.chat_id}"

    @property
    def origin(self) -> tuple[str, str]:
        """Return (channel, chat id) of the chat that the answer belongs to."""
        if self.channel != "system":
            return self.channel, self.chat_id
        channel, colon, chat_id = self.chat_id.partition(":")
        return (channel, chat_id) if colon else ("cli", self.chat_id)

    @property
    def by_a_person(self) -> bool:
        return self.channel not in INSIDE

    @property
    def plain(self) -> bool:
        """Return whether the text needs no preparation: no attachments and no named skill to load.

        Messages from inside the system load nothing.
        """
        if self.request is not None and (self.request.tools or self.request.model_only):
            return True
        # initial messages, or a step of the program itself
        if self.task is not None and self.task.definition is not None:
            return False
        return not self.media and (
            "$" not in self.content or self.channel in INSIDE or not _MAY_NAME_A_SKILL.search(self.content)
        )

    def said(self, content: Content | None = None, now: str = "") -> UserSaid:
        """Return the log entry of the message; `content` includes its attachments."""
        inside = self.channel in INSIDE
        text = self.parts or (self.content if content is None else content)
        # A client that sends the history itself never sends the time back: adding it here would change every prefix.
        told = "" if self.request is not None and not self.request.kept else now
        # The flag is only trusted on messages that the system itself created or took in through the API, as these are.
        untrusted = (inside or self.request is not None) and self.untrusted
        own_files = untrusted and self.own_files
        job, note = ("", "") if self.cron is None else (self.cron.job, self.cron.note)
        return UserSaid(
            text,
            self.sender_id,
            told,
            inside,
            untrusted,
            job=job,
            note=note,
            request=self.request,
            own_files=own_files,
        )

    def addressed(self) -> InboundMessage:
        """Return the message as it enters the inbox: with its session resolved and with storable text.

        An internal message belongs to its origin's session.
        """
        if not isinstance(self.content, str):
            raise TypeError(f"the content of a message must be a text, not {type(self.content).__name__}")
        session = ":".join(self.origin) if self.channel == "system" else self.session_key
        return replace(self, content=clean(self.content), session=self.session or session)

    def opened(self) -> InboundMessage:
        """Return the message as the inbox keeps it after its turn has opened: without the API request, which is in the
        log."""
        return self if self.request is None else replace(self, request=None, parts=None)


def _read_old_metadata(message: InboundMessage) -> None:
    """Set the cause of a message that an earlier version wrote to the inbox with the data in its metadata."""
    facts, id = message.metadata, message.id or ""
    if message.channel == "sub" and id.startswith("spawn:"):
        with contextlib.suppress(msgspec.ValidationError):  # its turn fails and reports the error
            message.cause = msgspec.convert(facts, SubagentTask)
    elif id.startswith("cron:") and "cron" in facts:
        note, may_schedule = str(facts.get("note", "")), bool(facts.get("may_schedule"))
        message.cause = CronOrigin(str(facts["cron"]), may_schedule, note)
    elif message.channel == "system" and id.startswith("stop:"):
        message.cause = StopRequest(facts.get("stops"), bool(facts.get("told")))
    if message.request is not None and isinstance(via := facts.get("via"), str):
        message.request = msgspec.structs.replace(message.request, via=via)
    if message.channel in INSIDE or message.request is not None:
        message.untrusted = message.untrusted or bool(facts.get("untrusted"))
        message.own_files = message.own_files or bool(facts.get("own_files"))


class Question(msgspec.Struct, frozen=True):
    """The question of a parked turn: its session, its position in the log, and the sender that the turn works for."""

    session: str
    position: int
    sender: str


@dataclass(slots=True)
class OutboundMessage:
    """A message to a chat. `repeat` means that it may have been sent before."""

    channel: str
    chat_id: str
    content: str
    reply_to: str | None = None
    media: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    repeat: bool = False
    question: Question | None = None  # the question that the message asks, if any


class MessageBus:
    """Two bounded in-memory queues. Publishing to a full queue waits."""

    def __init__(self, size: int = 1000) -> None:
        self._inbound: asyncio.Queue[InboundMessage] = asyncio.Queue(size)
        self._outbound: asyncio.Queue[tuple[OutboundMessage, Callable[[], None] | None]] = asyncio.Queue(size)

    async def publish_inbound(self, message: InboundMessage) -> None:
        if not isinstance(message, InboundMessage):
            raise TypeError(f"publish_inbound() takes an InboundMessage, not {type(message).__name__}")
        await self._inbound.put(message)

    async def consume_inbound(self) -> InboundMessage:
        return await self._inbound.get()

    async def publish_outbound(self, message: OutboundMessage, taken: Callable[[], None] | None = None) -> None:
        """Hand a message to the consumers; `taken` is called once a consumer has it."""
        await self._outbound.put((message, taken))

    async def consume_outbound(self) -> OutboundMessage:
        message, taken = await self._outbound.get()
        if taken is not None:
            taken()
        return message

    @property
    def inbound_size(self) -> int:
        return self._inbound.qsize()

    @property
    def outbound_size(self) -> int:
        return self._outbound.qsize()
