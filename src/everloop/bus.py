"""The message bus: messages from channels and to channels."""

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

INSIDE = frozenset({"system", "sub"})  # channels of messages that were not written by a person
EXECUTOR = "executor"  # the channel of runs of `AgentExecutor`
PULLED = frozenset({"api", EXECUTOR})  # channels whose clients fetch their answers: nothing can be sent to them
WEB = "web"  # the channel of clients that follow the log, such as the web page
# A command waits its turn in the session; an urgent one does not. A "reply" counts as urgent while its session has an
# open question, which it answers, and as a message otherwise.
Kind = Literal["message", "command", "urgent", "reply"]
Busy = Literal["queue", "steer", "interrupt"]  # what a message does if its session has a running turn
_MAY_NAME_A_SKILL = re.compile(r"\$[a-z0-9]")


class SubagentTask(msgspec.Struct, frozen=True, omit_defaults=True, tag="task"):
    """The task of a sub-agent or of an executor's run; each message to it carries the task."""

    id: str = ""  # of the agent; "" if it is the chat id
    label: str = ""
    origin: str = "cli:direct"  # the chat that the report belongs to
    parent: str = ""  # the session that started it
    root: str = ""  # the first turn of the chain, whose budget it uses
    depth: int = 1
    caps: dict[str, int] = {}  # tokens that it and the agents above it may use, by their ids
    rounds: int | None = None
    seconds: float | None = None  # that it may work; time without a process that runs it does not count
    ends_at: float | None = None  # its deadline, in tasks of an earlier version
    latest: float | None = None  # the deadline of the agent that started it, for all phases
    attended: bool = True  # a person is in the chat; the sub-agent itself asks no questions
    report: bool = True  # its result is sent to the chat as a message
    definition: dict[str, Any] | None = None  # the agent's definition at its start
    inputs: dict[str, Any] = {}
    phase: Literal["work", "extract", "grace"] = "work"  # of an agent with a definition
    tries: int = 0  # to get a valid result
    cut: str = ""  # why its work was cut short


# What a due job sends: the model's answer to its message, or the message itself.
Deliver = Literal["answer", "text"]


class CronOrigin(msgspec.Struct, frozen=True, omit_defaults=True, tag="cron"):
    """The scheduled job that a message comes from."""

    job: str
    may_schedule: bool = False  # its turn may add jobs
    note: str = ""  # a note for the model, after the message
    deliver: Deliver = "answer"


class StopRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag="stop"):
    """A stop from another process."""

    target: str | int | None = None  # the turn, by its id or by the inbox row that opens it; None for any
    chat_told: bool = False  # the chat is answered by its own /stop


Cause = SubagentTask | CronOrigin | StopRequest


@dataclass(slots=True)
class InboundMessage:
    """A message from a chat.

    A message with an `id` is accepted only once. `session` names a session other than the chat's own; `reply` says
    whether the answer is sent to the chat; `attended`, whether a person is there to answer questions. `metadata`
    belongs to the channel and is returned with the answer.
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
    request: Request | None = None  # what an API client sent with it
    parts: list[dict[str, Any]] | None = None  # its content if it is not only text: pictures in the request
    cause: Cause | None = None  # what made it, if that was the system itself
    untrusted: bool = False  # it contains text from outside; set by the system alone
    own_files: bool = False  # it is untrusted only because of files that the agent did not write
    busy: Busy | None = None  # what it does to a running turn; by default as in the settings
    restored: bool = False  # it comes from a backup and may have been answered before

    def __post_init__(self) -> None:
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
        """(channel, chat id) of the chat that the answer belongs to."""
        if self.channel != "system":
            return self.channel, self.chat_id
        channel, colon, chat_id = self.chat_id.partition(":")
        return (channel, chat_id) if colon else ("cli", self.chat_id)

    @property
    def by_a_person(self) -> bool:
        return self.channel not in INSIDE

    @property
    def plain(self) -> bool:
        """Whether it is only text: no attachments, and no named skill to be read first. Messages from inside the system
        load no skills."""
        if self.request is not None and (self.request.tools or self.request.model_only):
            return True
        if self.task is not None and self.task.definition is not None:  # it may have initial messages
            return False
        return not self.media and (
            "$" not in self.content or self.channel in INSIDE or not _MAY_NAME_A_SKILL.search(self.content)
        )

    def said(self, content: Content | None = None, now: str = "") -> UserSaid:
        """The log entry for this message; `content` includes its attachments."""
        inside = self.channel in INSIDE
        text = self.parts or (self.content if content is None else content)
        if self.cron is not None and self.cron.note and isinstance(text, str):
            text = f"{text}\n\n[{self.cron.note}]"  # marked as not the user's words
        # A client that sends the history itself would not send the time again with the next request.
        told = "" if self.request is not None and not self.request.kept else now
        # These fields can be believed only if the system itself set them.
        untrusted = (inside or self.request is not None) and self.untrusted
        own_files = untrusted and self.own_files
        return UserSaid(text, self.sender_id, told, inside, untrusted, request=self.request, own_files=own_files)

    def addressed(self) -> InboundMessage:
        """The message as it enters the inbox: with its session (its origin's if it is from inside the system), and with
        text that can be stored."""
        session = ":".join(self.origin) if self.channel == "system" else self.session_key
        return replace(self, content=clean(self.content), session=self.session or session)

    def opened(self) -> InboundMessage:
        """The message as the inbox keeps it after it has opened a turn: the request of an API client is in the log."""
        return self if self.request is None else replace(self, request=None, parts=None)


def _read_old_metadata(message: InboundMessage) -> None:
    """Set the cause of a message that an earlier version wrote to the inbox with its metadata."""
    facts, id = message.metadata, message.id or ""
    if message.channel == "sub" and id.startswith("spawn:"):
        with contextlib.suppress(msgspec.ValidationError):  # its turn fails and reports that
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
    """The question of a parked turn: its session, its position in the log, and the person that the turn works for."""

    session: str
    position: int
    sender: str


@dataclass(slots=True)
class OutboundMessage:
    """A message to a chat. `repeat` says that it may have been sent once before."""

    channel: str
    chat_id: str
    content: str
    reply_to: str | None = None
    media: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    repeat: bool = False
    question: Question | None = None  # that it asks


class MessageBus:
    """Two bounded queues in memory. A full one makes its publisher wait."""

    def __init__(self, size: int = 1000) -> None:
        self._inbound: asyncio.Queue[InboundMessage] = asyncio.Queue(size)
        self._outbound: asyncio.Queue[tuple[OutboundMessage, Callable[[], None] | None]] = asyncio.Queue(size)

    async def publish_inbound(self, message: InboundMessage) -> None:
        await self._inbound.put(message)

    async def consume_inbound(self) -> InboundMessage:
        return await self._inbound.get()

    async def publish_outbound(self, message: OutboundMessage, taken: Callable[[], None] | None = None) -> None:
        """Pass a message to the consumers; `taken` is called when one of them has received it."""
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
