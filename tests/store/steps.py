"""Messages, and the steps of a turn in a few words."""

from __future__ import annotations

from typing import Any

import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.errors import StoreError
from everloop.log import Entry, ModelAnswered, TurnEnded
from everloop.store.base import Claim, Store


def message(text: str = "hi", chat: str = "1", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", chat, text, **options).addressed()


def answer(text: str = "hello") -> OutboundMessage:
    return OutboundMessage("test", "1", text, metadata={"thread": 7})


def away_once(store: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next such call of the store fail as in an outage; the one after it does not."""
    call = getattr(store, name)

    async def away(*_: object) -> None:
        monkeypatch.setattr(store, name, call)
        raise StoreError("away")

    monkeypatch.setattr(store, name, away)


async def begun(store: Store, worker: str, text: str = "hi", chat: str = "1", **options: Any) -> Claim:
    claim = await store.begin(options.get("owner", "me"), f"test:{chat}", worker, message(text, chat, **options))
    assert claim is not None
    return claim


async def finish(store: Store, claim: Claim, text: str = "hello", **options: Any) -> Any:
    return await store.finish(claim, [ModelAnswered(text), TurnEnded("answer", text)], **options)


async def log_of(store: Store, key: str = "test:1", owner: str = "me") -> list[Entry]:
    info = await store.session(owner, key)
    return [one.entry for one in await store.read_log(info.id)] if info else []
