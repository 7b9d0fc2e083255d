"""Sessions with thousands of messages, for the tests and the measures of the page."""

from __future__ import annotations

from everloop.bus import InboundMessage
from everloop.log import Entry, ModelAnswered, TurnEnded, UserSaid
from everloop.store.base import Store

KEY = "web:long"


def message(number: int) -> str:
    return f"Message {number} of the day.\n\n- one **thing**\n- another `thing`\n\nThat is all about {number}."


async def fill(store: Store, messages: int, key: str = KEY) -> None:
    """A session with so many messages, half of them answers."""
    for start in range(0, messages, 500):
        opened = InboundMessage("web", "user", key, f"Question {start}", owner="me", session=key)
        claim = await store.begin("me", key, "bench", opened)
        assert claim is not None
        entries: list[Entry] = []
        for number in range(start, min(start + 500, messages), 2):
            entries += [UserSaid(f"Question {number}", "user"), ModelAnswered(message(number + 1), model="scripted")]
        await store.finish(claim, [*entries, TurnEnded("answer", "")])
