"""Clients attached to this process: an editor, or a program that started the agent as its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from .. import events
from ..bus import InboundMessage, is_inside
from ..commands import Answer
from ..config import Config
from ..log import UserSaid, text_of
from ..providers.factory import make_provider
from ..store.base import SessionInfo, Store
from ..store.location import store_at
from ..text import one_line
from .agent import AgentLoop, TurnResult, agent_of
from .owners import OWN, Owners

# asks a person about these calls, and returns the answer
Decide = Callable[[str, tuple[str, ...]], Awaitable[Answer | None]]
TITLE = 80  # characters


@asynccontextmanager
async def working(config: Config) -> AsyncIterator[AgentLoop]:
    """Run the agent of the configured workspace on its store; it resumes what an earlier process left."""
    store = store_at(config.store, config)
    try:
        await store.workers()  # opens the store, so that an unusable one fails at once
    except BaseException:
        await store.close()
        raise
    owners = Owners(config, store, make_provider(config), agent_of)
    work = asyncio.create_task(owners.run())
    try:
        yield await owners.agent(OWN)
    finally:
        store.hurry()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await owners.close()


async def take_turn(
    agent: AgentLoop, message: InboundMessage, on_event: events.Emit, decide: Decide | None
) -> TurnResult:
    """Run a turn whose questions a person at the client answers.

    A question that `decide` cannot answer stays open. Without `decide`, calls that need approval are refused.
    """
    calls: tuple[str, ...] = ()

    def watch(event: events.Event) -> None:
        nonlocal calls
        if isinstance(event, events.Asked):
            calls = event.calls
        on_event(event)

    result = await agent.take(replace(message, attended=decide is not None), watch)
    while result.reason == "question" and decide is not None:
        place = await place_of_question(agent, message)
        answer = await decide(result.text, calls)
        gone_on = await give_answer(agent, message, place, answer, watch) if answer is not None else None
        if gone_on is None:
            return result
        result = gone_on
    return result


async def place_of_question(agent: AgentLoop, message: InboundMessage) -> int:
    """Return the log position of the open question in the message's session; 0 if there is none."""
    info = await agent.store.session(message.owner, message.session_key)
    return info.entries if info is not None and info.parked else 0


async def give_answer(
    agent: AgentLoop, message: InboundMessage, place: int, answer: Answer, on_event: events.Emit
) -> TurnResult | None:
    """Answer the question at this position and resume its turn; None if it is no longer open."""
    if not place or await place_of_question(agent, message) != place:
        return None
    word = f"/approve{' always' if answer.always else ''}" if answer.allowed else f"/deny {answer.note}".strip()
    said = replace(message, content=word, media=[], parts=None, id=None, attended=True)
    return await agent.take(said, on_event)


async def sessions_of(store: Store, limit: int, offset: int = 0) -> list[tuple[SessionInfo, str]]:
    """Return the owner's sessions with their titles, most recent first, without internal ones."""
    infos = [info for info in await store.sessions(OWN, 3 * (offset + limit)) if not is_inside(info.key)]
    return [(info, await title_of(store, info)) for info in infos[offset : offset + limit]]


async def title_of(store: Store, info: SessionInfo) -> str:
    """Return the session's title, or else its first words."""
    if info.title:
        return info.title
    for one in await store.read_log(info.id, 0, 3):
        if isinstance(one.entry, UserSaid) and not one.entry.inside and (said := one_line(text_of(one.entry.content))):
            return said[:TITLE]
    return info.key
