"""What Discord's gateway and REST API send, as far as the channel reads it."""

from __future__ import annotations

import msgspec


class User(msgspec.Struct):
    id: str
    username: str = ""
    global_name: str | None = None
    bot: bool = False


class Member(msgspec.Struct):
    nick: str | None = None
    user: User | None = None


class Replied(msgspec.Struct):
    author: User | None = None


class File(msgspec.Struct):
    filename: str = "file"
    size: int | None = None
    url: str = ""


class Message(msgspec.Struct):
    id: str
    channel_id: str
    author: User
    content: str = ""
    type: int = 0
    guild_id: str | None = None
    webhook_id: str | None = None
    mentions: list[User] = []
    attachments: list[File] = []
    member: Member | None = None
    referenced_message: Replied | None = None


class Pressed(msgspec.Struct):
    custom_id: str = ""


class Interaction(msgspec.Struct):
    id: str
    token: str
    type: int
    channel_id: str = ""
    guild_id: str | None = None
    user: User | None = None
    member: Member | None = None
    message: SentMessage | None = None
    data: Pressed = msgspec.field(default_factory=Pressed)


class SentMessage(msgspec.Struct):
    id: str


class Frame(msgspec.Struct):
    """A frame of the gateway."""

    op: int
    d: msgspec.Raw = msgspec.Raw(b"null")
    s: int | None = None
    t: str | None = None


class Hello(msgspec.Struct):
    heartbeat_interval: float


class Ready(msgspec.Struct):
    session_id: str
    resume_gateway_url: str
    user: User


class Gateway(msgspec.Struct):
    url: str


class Failure(msgspec.Struct):
    message: str = ""
    code: int = 0
    retry_after: float | None = None
