"""Bearer tokens in a store: kept as hashes, valid until revoked, each of one owner."""

from __future__ import annotations

import asyncio
import time

import pytest

from everloop.errors import EverloopError
from everloop.store.tokens import hash_of, new_token


async def test_a_token_is_found_by_its_hash_and_by_no_other(store):
    token, other = new_token(), new_token()
    made = await store.add_token("laptop", "anna", hash_of(token))
    assert await store.token(hash_of(token)) == made
    assert (made.name, made.owner, made.last_used_at, made.revoked_at) == ("laptop", "anna", None, None)
    for wrong in (other, token[:-1], token + "A", token.lower(), "", made.id, made.name, hash_of(token)):
        assert await store.token(hash_of(wrong)) is None
    assert await store.token(token) is None


async def test_a_tokens_tool_choice_is_kept(opened):
    here, there = await opened(), await opened()
    hashes = {agent: hash_of(new_token()) for agent in ("", "own", "client")}
    for agent, hash in hashes.items():
        assert (await here.add_token(f"t{agent}", "anna", hash, agent=agent)).agent == agent
    assert {agent: (await there.token(hash)).agent for agent, hash in hashes.items()} == {one: one for one in hashes}
    with pytest.raises(EverloopError, match="own or client"):
        await here.add_token("wrong", "anna", hash_of(new_token()), agent="both")


async def test_a_revoked_token_is_gone_at_once_even_for_another_process(opened):
    here, there = await opened(), await opened()
    hash = hash_of(new_token())
    made = await here.add_token("laptop", "anna", hash)
    assert await there.token(hash) == made
    assert await here.revoke_token(made.id)
    assert await there.token(hash) is None
    assert not await there.revoke_token(made.id)
    assert not await there.revoke_token("laptop")  # an id, not a name
    (listed,) = await there.tokens()
    assert listed.revoked_at is not None


async def test_a_revoked_token_keeps_its_revocation_time(store):
    made = await store.add_token("laptop", "anna", hash_of(new_token()))
    await store.revoke_token(made.id)
    before = await store.tokens()
    await store.revoke_token(made.id)
    assert await store.tokens() == before


async def test_a_name_is_unique_among_valid_tokens_only(store):
    first = await store.add_token("laptop", "anna", hash_of(new_token()))
    with pytest.raises(EverloopError, match="laptop"):
        await store.add_token("laptop", "berta", hash_of(new_token()))
    assert [token.owner for token in await store.tokens()] == ["anna"]
    await store.revoke_token(first.id)
    again = await store.add_token("laptop", "berta", hash_of(new_token()))
    assert [token.id for token in await store.tokens()] == [first.id, again.id]


async def test_of_many_that_want_one_name_at_once_one_gets_it(opened):
    stores = [await opened(), await opened()]
    tries = [stores[n % 2].add_token("laptop", "anna", hash_of(new_token())) for n in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(not isinstance(result, Exception) for result in results) == 1
    assert len(await stores[0].tokens()) == 1


async def test_an_owner_may_have_several_tokens_and_lists_only_its_own(store):
    for name, owner in (("a", "anna"), ("b", "berta"), ("c", "anna")):
        await store.add_token(name, owner, hash_of(new_token()))
    assert [token.name for token in await store.tokens("anna")] == ["a", "c"]
    assert [token.name for token in await store.tokens("berta")] == ["b"]
    assert await store.tokens("ann") == []
    assert await store.tokens("%") == []
    assert await store.tokens("") == []
    assert [token.name for token in await store.tokens()] == ["a", "b", "c"]


async def test_revoking_one_token_leaves_all_others_valid(store):
    hashes = {name: hash_of(new_token()) for name in ("a", "b", "c")}
    made = {name: await store.add_token(name, "anna" if name < "c" else "berta", hashes[name]) for name in hashes}
    await store.revoke_token(made["a"].id)
    assert await store.token(hashes["a"]) is None
    assert await store.token(hashes["b"]) == made["b"]
    assert await store.token(hashes["c"]) == made["c"]


async def test_the_last_use_is_noted_once_an_hour_and_only_for_that_token(store):
    hash, now = hash_of(new_token()), time.time()
    made = await store.add_token("laptop", "anna", hash)
    other = await store.add_token("other", "anna", hash_of(new_token()))

    async def last_used() -> float | None:
        found = await store.token(hash)
        assert found is not None
        return found.last_used_at

    await store.token_used(made.id, now)
    assert await last_used() == now
    await store.token_used(made.id, now + 3599)
    assert await last_used() == now
    await store.token_used(made.id, now + 3600)
    assert await last_used() == now + 3600
    await store.token_used(made.id, now)  # a clock that was set back
    assert await last_used() == now + 3600
    assert other in await store.tokens()


async def test_a_token_has_the_rights_it_was_given_and_use_alone_by_default(opened):
    here, there = await opened(), await opened()
    given = {"a": ["use"], "b": ["admin"], "c": ["use", "admin"], "d": None}
    for name, rights in given.items():
        hash = hash_of(new_token())
        made = await (here.add_token(name, "anna", hash, rights) if rights else here.add_token(name, "anna", hash))
        assert made.rights == frozenset(rights or ["use"])
        assert await there.token(hash) == made
    assert [token.rights for token in await there.tokens()] == [
        frozenset(rights or ["use"]) for rights in given.values()
    ]


@pytest.mark.parametrize("rights", [[], [""], ["root"], ["use", "root"], ["use,admin"], ["Admin"]])
async def test_unknown_rights_are_refused(store, rights):
    with pytest.raises(EverloopError, match="rights"):
        await store.add_token("laptop", "anna", hash_of(new_token()), rights)
    assert await store.tokens() == []


async def test_a_token_revoked_by_another_process_is_known_to_have_existed(opened):
    here, there = await opened(), await opened()
    assert not await here.tokens_exist()
    made = await there.add_token("laptop", "anna", hash_of(new_token()))
    assert await here.tokens_exist()
    await there.revoke_token(made.id)
    assert await here.tokens_exist()


async def test_a_writable_store_says_so_however_often_it_is_asked(opened):
    here, there = await opened(), await opened()
    await asyncio.gather(*(store.check_writable() for store in (here, there) for _ in range(5)))
    assert await here.admit("anna", "requests", 1, 60.0) == 0.0


@pytest.mark.parametrize("owner", ["", "Anna", "-a", "_a", "a b", "ä", "a" * 33, "a/b", "..", "a\n", "a:b", "*"])
async def test_an_ambiguous_owner_is_refused(store, owner):
    with pytest.raises(EverloopError):
        await store.add_token("laptop", owner, hash_of(new_token()))
    assert await store.tokens() == []


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a\n", "ä", "a" * 65, "a/b", "\x1b[31m"])
async def test_an_ambiguous_name_is_refused(store, name):
    with pytest.raises(EverloopError):
        await store.add_token(name, "anna", hash_of(new_token()))
    assert await store.tokens() == []
