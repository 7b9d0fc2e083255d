"""Rows of the outbox: their address, and what happens to one that cannot be decoded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ..bus import OutboundMessage
from .base import DeadLetter, Delivery, Outgoing, SentPart

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(OutboundMessage).decode
_decode_parts = msgspec.json.Decoder(list[tuple[str, int]]).decode


class Outbound(NamedTuple):
    """An outgoing message as a row keeps it."""

    data: str
    channel: str
    chat_id: str


class Address(NamedTuple):
    """The channel and chat of a row that an older version wrote without them."""

    id: int
    channel: str
    chat_id: str


@dataclass(slots=True)
class Taken:
    """The rows that a worker took from the outbox."""

    rows: list[Outgoing] = field(default_factory=list)
    damaged: list[tuple[int, str]] = field(default_factory=list)  # row and reason, to be set aside

    def log_damaged(self) -> None:
        """Warn of each damaged row, once: it is not read again."""
        for id, why in self.damaged:
            log.warning(
                "outbox row %d cannot be decoded (%s) and was set aside; the other messages are sent. Once repaired, "
                "it is sent after UPDATE outbox SET damaged = NULL WHERE id = %d",
                id,
                why,
                id,
            )


def encoded(messages: Iterable[OutboundMessage]) -> list[Outbound]:
    return [
        Outbound(_encode(message).decode(), column(message.channel), column(message.chat_id)) for message in messages
    ]


def column(text: str) -> str:
    """A channel or chat id as a column has it: PostgreSQL keeps no NUL."""
    return text.replace("\0", "\ufffd")


def addresses(rows: Iterable[Sequence[Any]], taken: Taken) -> list[Address]:
    """The addresses of rows (id, data) that have none yet."""
    found = []
    for id, data in rows:
        if (message := _message(id, data, taken)) is not None:
            found.append(Address(id, column(message.channel), column(message.chat_id)))
    return found


def take(rows: Iterable[Sequence[Any]], limit: int, taken: Taken) -> None:
    """Decode rows (id, data, turn, tries) up to a limit."""
    for id, data, turn, tries in rows:
        if len(taken.rows) >= limit:
            return
        if (message := _message(id, data, taken)) is not None:
            message.repeat = message.repeat or tries > 0
            taken.rows.append(Outgoing(id, message, turn))


def _message(id: int, data: str, taken: Taken) -> OutboundMessage | None:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        taken.damaged.append((id, str(error)))
        return None


def encoded_parts(parts: Iterable[SentPart]) -> str:
    return _encode([(column(part.id), part.end) for part in parts]).decode()


def delivery(at: float, parts: str | None) -> Delivery:
    return Delivery(at, tuple(SentPart(*part) for part in _decode_parts(parts)) if parts else ())


def dead_letter(row: Sequence[Any]) -> DeadLetter:
    """A row (id, at, channel, chat, reason, data) as a dead letter."""
    id, at, channel, chat_id, reason, data = row
    return DeadLetter(id, at, channel, chat_id, reason, _decode(data).content)
