"""The message bus: what comes in from the channels and what goes out to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .log import Content, Request, UserSaid
from .text import clean

INSIDE = frozenset({"system", "sub"})  # channels of messages that no person wrote
PULLED = frozenset({"api"})  # channels whose clients fetch their answers: nothing can be sent there
# A command waits for its place in the session; an urgent one does not. A "reply" is stored as an urgent one while a
# question is open in its session, which it answers, and as a message otherwise.
Kind = Literal["message", "command", "urgent", "reply"]
_MAY_NAME_A_SKILL = re.compile(r"\$[a-z0-9]")


@dataclass(slots=True)
class InboundMessage:
    """A message from a chat.

    `id`, where the channel has one, makes sure that it is taken only once; `session` names another session than
    the chat's own; `reply` says whether the answer is sent to the chat; `attended` whether somebody is there who can
    be asked.
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
    parts: list[dict[str, Any]] | None = None  # what was said where text is not all of it: pictures in the request

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
        """Whether its text is all there is to it: nothing attached, no skill named that would have to be read
        first. What comes from inside the system loads nothing."""
        if self.request is not None and self.request.tools:
            return True
        return not self.media and (
            "$" not in self.content or self.channel in INSIDE or not _MAY_NAME_A_SKILL.search(self.content)
        )

    def said(self, content: Content | None = None, now: str = "") -> UserSaid:
        """The entry that it becomes; `content` has what was attached to it."""
        inside = self.channel in INSIDE
        text = self.parts or (self.content if content is None else content)
        if self.metadata.get("cron") and (note := self.metadata.get("note")) and isinstance(text, str):
            text = f"{text}\n\n[{note}]"  # or the model would take it for the word of somebody who is there
        # A client that sends the history itself never sends the time along: told here, no prefix would stay the same.
        told = "" if self.request is not None and not self.request.kept else now
        # Only what the system itself says of a message is to be believed; all of these are.
        untrusted = (inside or self.request is not None) and bool(self.metadata.get("untrusted"))
        own_files = untrusted and bool(self.metadata.get("own_files"))
        return UserSaid(text, self.sender_id, told, inside, untrusted, request=self.request, own_files=own_files)

    def addressed(self) -> InboundMessage:
        """The message as it enters the inbox: with its session (one from inside the system works in its
        origin's), and with text that can be written down."""
        session = ":".join(self.origin) if self.channel == "system" else self.session_key
        return replace(self, content=clean(self.content), session=self.session or session)

    def opened(self) -> InboundMessage:
        """The message as the inbox keeps it once it has opened a turn: what an API client sent is in the log."""
        return self if self.request is None else replace(self, request=None, parts=None)


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
        """Hand a message to whoever consumes; `taken` is called when somebody has it."""
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
