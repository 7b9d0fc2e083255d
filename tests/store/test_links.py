"""The codes and links of chats, in both stores: what several workers do at once is done once."""

from __future__ import annotations

import asyncio
import time

from everloop.bus import InboundMessage
from everloop.channels.access import Access, Pairings
from everloop.channels.base import Can, Received
from everloop.channels.links import (
    ALONE,
    BUSY,
    NO_CODE,
    ChatLinks,
    Joined,
    LinkStore,
    Requester,
    command_in,
    join,
    leave,
    offer,
)
from everloop.config import ChannelConfig

from .steps import finish


def sender(name: str, message: str = "") -> Requester:
    return Requester(f"hook:{name}", name, name, f"hook:{name}", message or name)


async def offered(links: LinkStore, name: str, code: str, message: str = "") -> str:
    made = await links.change(lambda kept: offer(kept, sender(name, message), code, time.time()))
    return made.code


async def joined(links: LinkStore, name: str, code: str, message: str = "") -> Joined | str:
    return await links.change(lambda kept: join(kept, code, sender(name, message), time.time(), busy=False))


async def test_a_code_is_used_once_by_workers_that_take_it_at_once(opened):
    workers = [LinkStore(await opened(), "me") for _ in range(2)]
    for number in range(5):
        anna, code = f"anna{number}", f"AAAAAAA{number + 2}"
        assert await offered(workers[0], anna, code) == code
        results = await asyncio.gather(*(joined(workers[n % 2], f"b{number}-{n}", code) for n in range(6)))
        assert [one for one in results if one != NO_CODE] == [one for one in results if isinstance(one, Joined)]
        assert sum(isinstance(one, Joined) for one in results) == 1
        winner = f"hook:b{number}-{next(n for n, one in enumerate(results) if isinstance(one, Joined))}"
        shared = (await workers[1].read()).of(winner)
        assert shared is not None
        assert [one.account for one in shared.members] == [f"hook:{anna}", winner]
    assert (await workers[0].read()).codes == ()


async def test_a_command_that_two_workers_take_is_one_command(opened):
    workers = [LinkStore(await opened(), "me") for _ in range(2)]
    codes = await asyncio.gather(*(offered(one, "anna", f"AAAAAAA{n + 2}", "m1") for n, one in enumerate(workers)))
    assert codes[0] == codes[1]
    results = await asyncio.gather(*(joined(one, "bert", codes[0], "m2") for one in workers))
    assert all(isinstance(one, Joined) for one in results)
    assert results[0] == results[1]
    assert await joined(workers[0], "bert", codes[0], "m3") == NO_CODE
    assert await asyncio.gather(*(one.leave("hook:bert") for one in workers)) != [True, True]
    assert (await workers[0].read()).of("hook:bert") is None


async def test_links_made_by_owners_at_once_are_all_kept(opened):
    workers = [LinkStore(await opened(), owner) for owner in ("me", "ada") for _ in range(2)]
    await asyncio.gather(*(offered(one, f"p{n}", f"AAAAAAA{n + 2}") for n, one in enumerate(workers)))
    kept = [{one.account for one in (await workers[n].read()).codes} for n in (0, 2)]
    assert kept == [{"hook:p0", "hook:p1"}, {"hook:p2", "hook:p3"}]


async def test_the_commands_work_in_both_stores_and_wait_for_an_open_turn(store, me):
    config = ChannelConfig(name="hook", allow=("anna", "bert"))
    access = Access(config, Can(), Pairings(store, "hook"))
    chats = ChatLinks(store, config, Can(), access, {})

    async def told(who: str, text: str, id: str) -> str:
        command = command_in(text)
        assert command is not None
        return (await chats.answer(command, Received(chat=who, sender=who, text=text), who, f"hook:{who}", id)).text

    async def session_of(who: str) -> str:
        return await chats.session_of(Received(chat=who, sender=who, text="hi"), f"hook:{who}")

    code = (await told("anna", "/link", "m1")).partition("/link ")[2][:8]
    work = InboundMessage("hook", "bert", "bert", "work", id="hook:m2").addressed()
    await store.accept(work)
    assert await told("bert", f"/link {code}", "m3") == BUSY  # it waits
    claim = await store.begin("me", "hook:bert", me)
    assert await told("bert", f"/link {code}", "m4") == BUSY  # its turn is open
    await finish(store, claim)
    assert await session_of("bert") == "hook:bert"
    assert (await told("bert", f"/link {code}", "m5")).startswith("This chat shares")
    assert await session_of("bert") == "hook:anna"
    assert await told("anna", "/unlink", "m6") == ALONE
    assert await session_of("bert") == "hook:bert"


async def test_the_code_of_a_person_who_was_just_unlinked_is_for_their_own_session(store):
    links = LinkStore(store, "me")
    await offered(links, "anna", "AAAAAAA2")
    assert isinstance(await joined(links, "bert", "AAAAAAA2"), Joined)
    bert = sender("bert", "m9")
    await links.change(lambda kept: leave(kept, "hook:bert"))  # after his command was received, and before it ran
    made = await links.change(lambda kept: offer(kept, bert, "AAAAAAA3", time.time()))
    assert made.session == "hook:bert"


async def test_a_pairing_code_is_confirmed_once_by_workers_that_take_it_at_once(opened):
    workers = [Pairings(await opened(), "hook") for _ in range(2)]
    for number in range(5):
        eve = f"eve{number}"
        code = await workers[0].new_code(Received(chat=eve, sender=eve, text="hi", id=f"m{number}"), eve)
        assert code is not None
        tries = [workers[n % 2].confirm(code, "me", message=f"pair{n}") for n in range(6)]
        (paired,) = [one for one in await asyncio.gather(*tries) if one is not None]
        assert paired.sender == eve
        assert await workers[1].confirm(code, "me", message=paired.message) == paired  # it comes again
        assert await workers[1].confirm(code, "me", message="another") is None
        assert set(await workers[1].peers()) == {f"eve{n}" for n in range(number + 1)}
        assert await workers[1].pending() == []
