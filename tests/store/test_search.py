"""Search over what was said: what is found, in which order, and what stays private."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everloop.log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Cleared,
    Compacted,
    Entry,
    ModelAnswered,
    Noted,
    TurnEnded,
    UserSaid,
)
from everloop.store.base import Found, Store

from .steps import begun, finish


def said(text: Any, role: str = "user") -> Noted:
    return Noted({"role": role, "content": text})


async def keep(store: Store, *entries: Entry | str, key: str = "test:1", owner: str = "me") -> None:
    """Put entries into a session; a text is a user's."""
    await store.note(owner, key, [said(one) if isinstance(one, str) else one for one in entries])


async def texts(store: Store, query: str, owner: str = "me", limit: int = 10) -> list[str]:
    return [found.text for found in await store.search(owner, query, limit)]


# ---------------------------------------------------------------------------------------------- what is found


async def test_a_message_is_found_with_its_place_and_time(store, me):
    before = time.time()
    claim = await begun(store, me, "Where do the beans grow?", chat="7")
    await finish(store, claim, "The beans grow behind the shed.")
    asked, answered = sorted(await store.search("me", "beans"), key=lambda found: found.seq)
    assert before <= asked.at <= answered.at <= time.time()
    assert asked == Found("test:7", claim.turn, asked.at, "user", "Where do the beans grow?", False, 1)
    assert answered == Found(
        "test:7", claim.turn, answered.at, "assistant", "The beans grow behind the shed.", False, 2
    )


async def test_only_what_people_and_the_model_said_is_found(store):
    await keep(
        store,
        UserSaid("beans one", "ann"),
        UserSaid([{"type": "image_url", "image_url": {"url": "beans"}}, {"type": "text", "text": "beans two"}]),
        ModelAnswered("beans three", (Call("a", "beans", {"beans": "beans"}),), reasoning="beans"),
        CallsBegun(("a",)),
        CallsAsked(("a",), "beans?"),
        CallsDecided(("a",), True, note="beans"),
        CallEnded("a", "beans", "beans"),
        ModelAnswered(None),
        TurnEnded("answer", "beans"),
        said("beans four"),
        said("beans five", "assistant"),
        said([{"type": "text", "text": "beans six"}]),
        said("beans", "system"),
        Noted({"role": "tool", "tool_call_id": "a", "content": "beans"}),
        Noted({"content": "beans"}),
        Noted({"role": ["user"], "content": "beans"}),
        said({"beans": "beans"}),
        said([{"type": "text", "text": 1}, "beans", None]),
        Compacted(3, "beans"),
    )
    everything = {found.text: found.role for found in await store.search("me", "beans", 50)}
    assert everything == {
        **dict.fromkeys(["beans one", "beans two", "beans four", "beans six"], "user"),
        **dict.fromkeys(["beans three", "beans five"], "assistant"),
    }


async def test_all_sessions_are_searched_including_earlier_conversations(store):
    await keep(store, "beans in one", Cleared(), "peas")
    await keep(store, "beans in two", key="mail:a")
    assert {(found.session, found.text) for found in await store.search("me", "beans")} == {
        ("test:1", "beans in one"),
        ("mail:a", "beans in two"),
    }


async def test_new_messages_are_found_at_once_and_none_twice(store, me):
    for n in range(5):
        claim = await begun(store, me, f"beans {n}")
        assert len(await store.search("me", "beans", 50)) == n + 1  # while the turn runs
        await finish(store, claim, "yes")
        assert len(await store.search("me", "beans", 50)) == n + 1
        assert len(await store.search("me", "yes", 50)) == n + 1


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("We meet in 東京タワー tomorrow", "東京"),
        ("We meet in 東京タワー tomorrow", "京タワ"),
        ("東京都に住む", "東京都"),
        ("黒い猫がいる", "猫"),
        ("好きなのは猫", "猫"),
        ("회의는 세 시에", "회의"),
        ("내일회의", "회의"),
        ("カタカナ", "ｶﾀｶﾅ"),
        ("我们昨天开会讨论了预算", "预算"),
        ("我们昨天开会讨论了预算", "昨天的预算是多少"),
        ("สวัสดีครับ", "สวัสดี"),
        ("हिन्दी में", "हिन्दी"),
        ("Ｆｕｌｌ　Ｗｉｄｔｈ", "full width"),
        ("Crème brûlée", "creme BRULEE"),
        ("creme", "crème"),
        ("Straße", "STRASSE"),
        ("running shoes", "run shoe"),
        ("the beans", "bean"),
        ("ΑΘΗΝΑ", "αθηνα"),
        ("mail anna@example.org about config.toml", "anna@example.org"),
        ("mail anna@example.org about config.toml", "config.toml"),
        ("snake_case_name", "case_name"),
        ("𠮷野家", "𠮷野"),
    ],
)
async def test_scripts_cases_accents_and_endings_are_found(store, text, query):
    await keep(store, "nothing of that kind", text, "何もない", "아무것도")
    assert await texts(store, query) == [text]


@pytest.mark.parametrize(
    ("text", "query"),
    [("東大京都", "東京"), ("의회", "회의"), ("กขค", "ขก"), ("กิน", "กีน"), ("café", "cafeteria"), ("Python", "犬")],
)
async def test_merely_similar_words_are_not_found(store, text, query):
    await keep(store, text)
    assert await texts(store, query) == []


async def test_a_long_message_and_a_great_many_are_indexed(store):
    await keep(store, "filler " * 15_000 + "needle " + "filler " * 200_000)
    await keep(store, *(f"message {n} word{n}" for n in range(900)), key="test:2")
    assert await texts(store, "needle") == []  # beyond the indexed part of one message
    assert [found.session for found in await store.search("me", "filler")] == ["test:1"]
    for n in (0, 255, 256, 257, 511, 512, 899):
        assert await texts(store, f"word{n}") == [f"message {n} word{n}"]


# ---------------------------------------------------------------------------------------------- the order


async def test_texts_with_all_the_words_come_before_those_with_some(store):
    await keep(
        store,
        "beans beans beans beans",
        "a long story, in which there are also peas, and in the end beans",
        "peas peas",
    )
    assert (await texts(store, "beans peas"))[0].startswith("a long story")
    assert len(await texts(store, "beans peas")) == 3
    assert await texts(store, "beans peas", limit=1) == [(await texts(store, "beans peas"))[0]]
    assert await texts(store, "beans nowhere") == ["beans beans beans beans", (await texts(store, "beans peas"))[0]]


async def test_a_rare_word_counts_more_and_a_text_about_it_too(store):
    await keep(
        store, *["the common word"] * 20, "the saffron", "of the many things there one was saffron " + "x " * 200
    )
    found = await texts(store, "the saffron")
    assert [text[:11] for text in found[:2]] == ["the saffron", "of the many"]


async def test_of_equal_texts_the_newest_comes_first(store):
    for n in range(3):
        await keep(store, "beans", key=f"test:{n}")
        await asyncio.sleep(0.002)
    assert [found.session for found in await store.search("me", "beans")] == ["test:2", "test:1", "test:0"]
    assert [found.session for found in await store.search("me", "beans", 2)] == ["test:2", "test:1"]


# ---------------------------------------------------------------------------------------------- queries


@pytest.mark.parametrize("query", ["", " ", "?!", '"', "*", "\0", "-", "()", "🙂", "\u200b", "\ud800", "' OR 1"[:4]])
async def test_a_query_without_a_word_finds_nothing(store, query):
    await keep(store, "beans")
    assert await texts(store, query) == []
    assert await texts(store, "beans", limit=0) == []
    assert await texts(store, "beans", limit=-1) == []


@pytest.mark.parametrize(
    "query",
    [
        'beans"', '"beans', "beans*", "beans AND", "NOT beans", "NEAR(beans, 2)", "text:beans", "owner:beans",
        "{text}: beans", "beans ^", "(beans", "beans)", "beans + ", "-beans", "beans\0AND", "\ud800 beans",
        "beans\ud800", "beans '; DROP TABLE entry; --", 'x" OR owner : "o" OR "beans',
    ],
)  # fmt: skip
async def test_a_query_is_words_and_never_syntax(store, query):
    await keep(store, "beans", "peas")
    assert await texts(store, query) == ["beans"]


async def test_a_very_long_query_is_answered(store):
    await keep(store, "beans", "豆")
    assert await texts(store, "beans " + "x y z " * 5_000) == ["beans"]
    assert await texts(store, "豆" * 50_000) == []
    assert await texts(store, "beans" + '"*(' * 50_000) == ["beans"]


TEXT = st.text(st.sampled_from("ab*\"'():-^+{}\0é東京は猫회의ำก \n_,.ANDORTNE") | st.characters(), max_size=20)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, query=TEXT)
async def test_no_query_fails_and_every_text_finds_itself(store, text, query):
    await store.search("me", query)
    word = secrets.token_hex(8)
    written = text.encode("utf-8", "replace").decode()
    await keep(store, f"{written} {word}", key=f"test:{word}")
    assert f"{written} {word}" in await texts(store, f"{text} {word}")


# ---------------------------------------------------------------------------------------------- owners

OWNERS = ["me", "me2", "ME", "mé", "me\u0301", "m e", "me ", "", "ｍｅ", '"me"', "me OR you", "*", "o", "我", "我们"]


async def test_nothing_of_another_owner_is_ever_found(store):
    canaries = {owner: secrets.token_hex(12) for owner in OWNERS}
    for owner, canary in canaries.items():
        await keep(store, f"shared beans {canary}", f"豆猫 {canary}", key="test:1", owner=owner)
    for _ in range(2):
        for owner in OWNERS:
            for query in (
                "shared",
                "beans",
                "豆",
                "猫",
                *canaries.values(),
                *OWNERS,
                "owner",
                " ".join(canaries.values()),
            ):
                seen = json.dumps(await texts(store, query, owner, 100))
                assert [other for other in OWNERS if other != owner and canaries[other] in seen] == []
            assert len(await texts(store, "shared", owner)) == 1
            assert len(await texts(store, canaries[owner], owner)) == 2
    assert await texts(store, "shared", "nobody") == []


async def test_many_hits_of_others_displace_none_of_mine(store):
    await keep(store, *["beans"] * 300, owner="you")
    await keep(store, "a long text about this and that and also about beans, which are mentioned at its end")
    await keep(store, *["beans"] * 300, owner="you", key="test:2")
    await store.search("you", "beans")
    assert len(await texts(store, "beans", limit=2)) == 1


# ---------------------------------------------------------------------------------------------- trust


def outside(id: str = "a") -> CallEnded:
    return CallEnded(id, "web_fetch", "page", untrusted=True)


async def trust(store: Store, key: str = "test:1") -> dict[str, bool]:
    found = await store.search("me", "beans", 100)
    return {one.text.removeprefix("beans "): one.untrusted for one in found if one.session == key}


async def test_an_answer_is_untrusted_after_outside_content_until_a_new_conversation(store):
    answered = [ModelAnswered(f"beans {name}") for name in "abcdefg"]
    await keep(
        store, answered[0], CallEnded("x", "read_file", "mine"), answered[1], outside(), "beans user",
        answered[2], TurnEnded("answer"), said("beans noted", "assistant"), answered[3], Cleared(), answered[4],
        Compacted(3, "summary"), answered[5], Compacted(4, "summary", untrusted=True), answered[6],
    )  # fmt: skip
    wanted = dict.fromkeys("abef", False) | dict.fromkeys("cdg", True) | {"user": False, "noted": True}
    assert await trust(store) == wanted


async def test_trust_does_not_depend_on_searches_in_between(store):
    log: list[Entry] = [
        ModelAnswered("beans a"), outside(), ModelAnswered("beans b"), said("beans user"), ModelAnswered("beans c"),
        Cleared(), ModelAnswered("beans d"), outside("b"), TurnEnded("answer"), ModelAnswered("beans e"),
    ]  # fmt: skip
    for entry in log:
        await keep(store, entry)
        await store.search("me", "beans")
    await keep(store, *log, key="test:2")
    assert await trust(store) == await trust(store, "test:2")
    assert await trust(store) == {"a": False, "b": True, "user": False, "c": True, "d": False, "e": True}


async def test_one_session_does_not_taint_another(store):
    await keep(store, outside(), ModelAnswered("beans a"))
    await keep(store, ModelAnswered("beans b"), key="test:2")
    assert (await trust(store), await trust(store, "test:2")) == ({"a": True}, {"b": False})


# ---------------------------------------------------------------------------------------------- forks, many at once


@pytest.mark.parametrize("searched_before", [False, True])
async def test_what_a_fork_copied_is_found_once_and_what_it_adds_too(store, me, searched_before):
    await keep(store, "beans first", outside(), ModelAnswered("beans second"))
    await finish(store, await begun(store, me, "beans third"), "beans fourth")
    if searched_before:
        await store.search("me", "beans")
    for n in range(3):
        await store.fork("me", "test:1", None, f"fork:{n}")
        await keep(store, ModelAnswered(f"beans of fork {n}"), key=f"fork:{n}")
    await keep(store, "beans later")
    found = await store.search("me", "beans", 100)
    assert sorted((one.session, one.text) for one in found) == [
        *((f"fork:{n}", f"beans of fork {n}") for n in range(3)),
        *(("test:1", f"beans {which}") for which in ("first", "fourth", "later", "second", "third")),
    ]
    assert all(one.untrusted for one in found if one.session.startswith("fork"))  # the copy had read it too


async def test_the_same_text_said_again_is_found_again(store):
    for _ in range(2):
        await keep(store, "beans", "beans")
    await keep(store, "beans", key="test:2")
    assert len(await texts(store, "beans")) == 5


async def test_many_searches_at_once_index_everything_once(opened):
    stores = [await opened() for _ in range(3)]
    for n in range(40):
        await keep(stores[0], *(f"beans {n} {m}" for m in range(20)), key=f"test:{n}")
    counts = await asyncio.gather(*(texts(store, "beans", limit=2_000) for store in stores * 3))
    assert [len(found) for found in counts] == [800] * 9
    assert len(set(await texts(stores[0], "beans", limit=2_000))) == 800


async def test_turns_continue_while_a_search_reads_the_past(store, me):
    for n in range(20):
        await keep(store, *(f"beans {n} {m}" for m in range(200)), key=f"past:{n}")
    search = asyncio.create_task(texts(store, "beans", limit=5_000))
    turns = 0
    while not search.done():
        await finish(store, await begun(store, me, f"peas {turns}"), "yes")
        turns += 1
    assert len(await search) == 4_000
    assert turns >= 3
    assert len(await texts(store, "peas", limit=5_000)) == turns


async def test_a_sub_agents_report_is_no_message_of_the_user_and_keeps_its_taint(store):
    said = [
        UserSaid("the person wrote heron"),
        UserSaid("the sub-agent found a heron", inside=True),
        ModelAnswered("so there is a heron"),
        UserSaid("the other one read a heron on a page", inside=True, untrusted=True),
        ModelAnswered("a heron it is"),
        UserSaid("heron, I say"),
    ]
    await store.note("me", "test:1", said)
    found = {one.seq: (one.role, one.untrusted) for one in await store.search("me", "heron", 10)}
    assert found == {
        1: ("user", False),
        2: ("assistant", False),
        3: ("assistant", False),
        4: ("assistant", True),
        5: ("assistant", True),
        6: ("user", False),
    }
