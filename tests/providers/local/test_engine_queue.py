"""The order in which requests get the model."""

from __future__ import annotations

import asyncio

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.local.queue import FairQueue


async def order_of(queue: FairQueue, sessions: str) -> str:
    """Make one request per letter while the slot is taken, and return the order in which they were served."""
    served = []

    async def ask(session: str) -> None:
        await queue.enter(session)
        served.append(session)
        await asyncio.sleep(0)
        queue.leave(session)

    await asyncio.gather(*map(ask, sessions))
    return "".join(served)


async def test_sessions_take_turns():
    assert await order_of(FairQueue(1, 100), "aaaabbc") == "abcabaa"


async def test_a_session_that_was_served_before_comes_after_one_that_was_not():
    queue = FairQueue(1, 100)
    assert await order_of(queue, "b") == "b"
    assert await order_of(queue, "cba") == "cab"


async def test_a_session_with_work_in_progress_waits_for_those_without():
    queue = FairQueue(2, 100)
    await queue.enter("a")
    await queue.enter("c")
    queue.leave("c")  # it was served after the other, which is still in progress
    await queue.enter("b")
    more = asyncio.create_task(queue.enter("a"))
    await asyncio.sleep(0)
    other = asyncio.create_task(queue.enter("c"))
    await asyncio.sleep(0)
    queue.leave("b")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert other.done()
    assert not more.done()
    queue.leave("a")
    await more


async def test_a_full_queue_is_reported_as_temporary():
    queue = FairQueue(1, 2)
    await queue.enter("a")
    waiting = [asyncio.create_task(queue.enter(session)) for session in "bc"]
    await asyncio.sleep(0)
    with pytest.raises(ProviderError) as caught:
        await queue.enter("d")
    assert caught.value.retryable
    assert caught.value.retry_after
    for session in "abc":
        queue.leave(session)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    await queue.enter("d")


async def test_a_cancelled_request_leaves_the_queue_and_its_slot():
    queue = FairQueue(1, 2)
    await queue.enter("a")
    waiting = asyncio.create_task(queue.enter("b"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert queue.waiting == 0
    queue.leave("a")
    await asyncio.wait_for(queue.enter("c"), 20)


async def test_a_slot_granted_to_a_request_that_is_cancelled_at_the_same_moment_is_not_lost():
    queue = FairQueue(1, 2)
    await queue.enter("a")
    waiting = asyncio.create_task(queue.enter("b"))
    await asyncio.sleep(0)
    queue.leave("a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(queue.enter("c"), 20)


async def test_a_slot_is_not_granted_to_a_request_that_was_just_cancelled():
    queue = FairQueue(1, 3)
    await queue.enter("a")
    waiting = [asyncio.create_task(queue.enter(session)) for session in "bc"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    queue.leave("a")  # before the cancelled one could report it
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await asyncio.wait_for(waiting[1], 20)
    queue.leave("c")
    await asyncio.wait_for(queue.enter("d"), 20)
    assert queue.waiting == 0
