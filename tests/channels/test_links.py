"""Chats of one person share a session by a code: who can link what, what is impossible, and how it is undone."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from everloop import InboundMessage, LLMResponse
from everloop.channels import links
from everloop.channels.access import PairedPeer
from everloop.channels.base import Can
from everloop.channels.links import Links, LinkStore
from everloop.config import Rule
from everloop.cron.service import CronService
from everloop.log import UserSaid
from everloop.store.base import Store
from everloop.store.peers import WORK
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import Forker, config_of, running

from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .hooks import HookNetwork
from .mail import MailNetwork
from .says import Recalls, Says, until
from .scene import Scene

CODE = re.compile(r"\b[A-HJKMNP-Z2-9]{8}\b")
ANNA, BERT, CARL, DORA, EVE = "anna", "bert", "carl", "dora", "eve"


@pytest.fixture
async def network() -> AsyncIterator[HookNetwork]:
    """Admitted people, each in a chat of their own, and Eve, who is not admitted."""
    async with HookNetwork().running() as made:
        made.settings["allow"] = [ANNA, BERT, CARL, DORA]
        yield made


async def tells(network: HookNetwork, who: str, text: str, chat: str = "", **more: Any) -> str:
    """A person writes; return the agent's answer in that chat."""
    chat = chat or who
    before = len(network.heard(chat))
    await network.say(chat, text, sender=who, name=who.title(), **more)
    await until(lambda: len(network.heard(chat)) > before)
    return network.heard(chat)[before]


async def code_of(network: HookNetwork, who: str) -> str:
    made = CODE.search(await tells(network, who, "/link"))
    assert made is not None
    return made[0]


async def linked(network: HookNetwork, who: str, other: str) -> str:
    """Link the chats of two accounts. Return the code."""
    code = await code_of(network, who)
    await joins(network, other, code, who)
    return code


async def joins(network: HookNetwork, other: str, code: str, who: str) -> None:
    """Let a chat join another's session by its code, and wait until both were told."""
    before = len(network.heard(who))
    assert (await tells(network, other, f"/link {code}")).startswith("This chat shares the session of ")
    await until(lambda: any("shares this session now" in text for text in network.heard(who)[before:]))


async def said_in(store: Store, session: str) -> list[str]:
    """Return what people said in a session."""
    info = await store.session("me", session)
    logged = await store.read_log(info.id) if info is not None else []
    return [str(one.entry.content) for one in logged if isinstance(one.entry, UserSaid)]


async def shared(store: Store, owner: str = "me") -> list[tuple[str, ...]]:
    found = await LinkStore(store, owner).read()
    return [tuple(member.account for member in one.members) for one in found.shared if one.is_shared]


# ---------------------------------------------------------------------------------------------- what works


async def test_a_chat_of_another_network_joins_a_session_by_a_code_and_leaves_it_again(tmp_path: Path) -> None:
    async with (
        FakeTelegram().running() as phone,
        FakeSlack().running() as desk,
        running([phone.settings, desk.settings], tmp_path, Says("ok")) as store,
    ):
        await phone.say("7", "from the phone")
        await desk.say("D7", "from the desk")
        await until(lambda: phone.heard("7") and desk.heard("D7"))
        await phone.say("7", "/link")
        await until(lambda: len(phone.heard("7")) == 2)
        code = CODE.search(phone.heard("7")[1])
        assert code is not None
        await desk.say("D7", f" /link {code[0].lower()}")  # Slack accepts a message with a slash after a space
        await until(lambda: len(desk.heard("D7")) == 2 and len(phone.heard("7")) == 3)
        assert desk.heard("D7")[1] == ("This chat shares the session of Person 7 (telegram:7) now. /unlink ends that.")
        assert phone.heard("7")[2].startswith("slack:U7 shares this session now.")
        await desk.say("D7", "joined")
        await until(lambda: len(desk.heard("D7")) == 3)
        await phone.say("7", "on the way")
        await until(lambda: len(phone.heard("7")) == 4)
        assert await said_in(store, "telegram:7") == ["from the phone", "joined", "on the way"]
        assert await said_in(store, "slack:D7") == ["from the desk"]  # still readable
        await desk.say("D7", "/unlink")
        await until(lambda: len(desk.heard("D7")) == 4)
        await desk.say("D7", "alone again")
        await until(lambda: len(desk.heard("D7")) == 5)
        assert await said_in(store, "slack:D7") == ["from the desk", "alone again"]
    assert desk.heard("D7")[3] == links.ALONE


async def test_mails_of_a_linked_person_join_the_session_and_are_answered_in_their_thread(tmp_path: Path) -> None:
    async with (
        HookNetwork().running() as hook,
        MailNetwork().running() as mail,
        running([hook.settings, mail.settings], tmp_path, Says("ok")) as store,
    ):
        code = await code_of(hook, ANNA)
        anna = "anna@example.org"
        for number, text in enumerate((f"/link {code}", "a first thread", "a second one"), 1):
            await mail.say(anna, text, References="")
            await until(lambda number=number: len(mail.heard(anna)) == number)  # type: ignore[misc]
        assert await said_in(store, "hook:anna") == ["a first thread", "a second one"]
    assert mail.mails[-1]["In-Reply-To"] == "<m3@example.org>"


async def test_mails_of_a_person_linked_by_the_settings_join_the_session(tmp_path: Path) -> None:
    people = {"anna": ("hook:anna", "email:Anna@example.org")}
    async with (
        HookNetwork().running() as hook,
        MailNetwork().running() as mail,
        running([hook.settings, mail.settings], tmp_path, Says("ok"), links=people) as store,
    ):
        await tells(hook, ANNA, "from the phone")
        await mail.say("anna@example.org", "from the desk")
        await until(lambda: mail.heard("anna@example.org"))
        assert await said_in(store, "link:anna") == ["from the phone", "from the desk"]


async def test_a_question_is_answered_from_the_other_chat(network: HookNetwork, tmp_path: Path) -> None:
    model = ScriptedProvider([call("write_file", path="canary.txt", content="x"), "Written."])
    async with running(network.settings, tmp_path, model, policy=(Rule(do="ask", tool="write_file"),)):
        await linked(network, ANNA, BERT)
        await tells(network, ANNA, "write it")
        assert await tells(network, BERT, "yes") == "Approved."
        await until(lambda: network.heard(ANNA)[-1] == "Written.")
    assert (tmp_path / "canary.txt").exists()


async def test_a_third_chat_joins_by_a_code_of_either_and_the_first_ends_it_for_all(
    network: HookNetwork, tmp_path: Path
) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await linked(network, ANNA, BERT)
        await linked(network, BERT, CARL)
        assert network.heard(BERT)[-1].endswith("If that is not you, send /unlink from hook:anna.")
        assert await shared(store) == [("hook:anna", "hook:bert", "hook:carl")]
        await tells(network, CARL, "the third")
        assert await said_in(store, "hook:anna") == ["the third"]
        assert await tells(network, BERT, "/unlink") == links.ALONE
        assert await shared(store) == [("hook:anna", "hook:carl")]
        assert await tells(network, ANNA, "/unlink") == links.ALONE
        assert await shared(store) == []
        for who in (ANNA, BERT, CARL):
            await tells(network, who, f"alone: {who}")
            assert (await said_in(store, f"hook:{who}"))[-1] == f"alone: {who}"
        await linked(network, CARL, ANNA)  # and vice versa
        await tells(network, ANNA, "at home with Carl")
        assert (await said_in(store, "hook:carl"))[-1] == "at home with Carl"


async def test_a_chat_of_a_person_linked_by_the_settings_can_be_joined(network: HookNetwork, tmp_path: Path) -> None:
    people = {"anna": ("hook:anna", "hook:bert")}
    async with running(network.settings, tmp_path, Says("ok"), links=people) as store:
        await linked(network, ANNA, CARL)
        await tells(network, CARL, "the third")
        assert await said_in(store, "link:anna") == ["the third"]
        code = await code_of(network, DORA)
        assert await tells(network, BERT, f"/link {code}") == links.BY_SETTINGS
        assert await tells(network, BERT, "/unlink") == links.ONLY_SETTINGS
        await tells(network, CARL, "alone")
        assert await said_in(store, "hook:carl") == ["alone"]


async def test_help_lists_the_commands_in_chat_networks_only(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")):
        lines = (await tells(network, ANNA, "/help")).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["/link", "/unlink"]


# ---------------------------------------------------------------------------------------------- what does not


async def test_a_chat_shares_one_session_at_a_time_and_none_with_itself(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        code = await code_of(network, ANNA)
        assert await tells(network, ANNA, f"/link {code}") == links.OTHER_CHAT
        assert await tells(network, ANNA, f"/link {code}", chat="a second chat") == links.OTHER_CHAT
        await joins(network, BERT, code, ANNA)
        code = await code_of(network, CARL)
        assert await tells(network, BERT, f"/link {code}") == links.UNLINK_FIRST
        assert await tells(network, ANNA, f"/link {code}") == links.UNLINK_FIRST
        assert await tells(network, ANNA, f"/link {await code_of(network, BERT)}") == links.ALREADY
        assert await shared(store) == [("hook:anna", "hook:bert")]
        await tells(network, BERT, "/unlink")
        assert (await tells(network, BERT, f"/link {code}")).startswith("This chat shares")  # still valid


async def test_two_chats_cannot_swap_their_sessions(network: HookNetwork, tmp_path: Path) -> None:
    """The codes of an account become void when it joins another's session."""
    async with running(network.settings, tmp_path, Says("ok")) as store:
        annas, berts = await code_of(network, ANNA), await code_of(network, BERT)
        assert (await tells(network, ANNA, f"/link {berts}")).startswith("This chat shares")
        assert await tells(network, CARL, f"/link {annas}") == links.NO_CODE
        assert await shared(store) == [("hook:bert", "hook:anna")]


async def test_a_chat_with_an_open_question_joins_no_other_session(network: HookNetwork, tmp_path: Path) -> None:
    """Its `yes` would answer the other session's question."""
    model = ScriptedProvider([call("write_file", path="canary.txt", content="x"), "Not written."])
    async with running(network.settings, tmp_path, model, policy=(Rule(do="ask", tool="write_file"),)):
        code = await code_of(network, ANNA)
        await tells(network, BERT, "write it")
        assert await tells(network, BERT, f"/link {code}") == links.BUSY
        await tells(network, BERT, "no")
        await until(lambda: network.heard(BERT)[-1] == "Not written.")
        assert (await tells(network, BERT, f"/link {code}")).startswith("This chat shares")


async def test_a_group_shares_no_session_even_if_it_was_a_direct_chat_before(
    network: HookNetwork, tmp_path: Path
) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await linked(network, ANNA, BERT)
        await tells(network, BERT, "a secret")
        group: dict[str, Any] = {"group": True, "mentioned": True}
        await tells(network, ANNA, "a third person is here now", **group)
        await tells(network, CARL, "so I am alone in her chat", chat=ANNA)
        await tells(network, BERT, "in a group", chat="team", **group)
        await tells(network, BERT, "in a thread", chat="t", thread="t1")
        assert await said_in(store, "hook:anna") == ["a secret"]
        assert await said_in(store, "hook:team") == ["Bert: in a group"]
        await tells(network, ANNA, "/unlink")
        await tells(network, ANNA, "still here", **group)  # what was shared remains closed to them
        await tells(network, ANNA, "mine")
        assert await said_in(store, "hook:anna") == ["a secret", "mine"]
        assert (await said_in(store, "link:apart:hook:anna"))[-1] == "Anna: still here"


async def test_a_shared_session_of_separated_people_is_closed_to_a_group(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await linked(network, ANNA, BERT)
        code = CODE.search(await tells(network, CARL, "/link", chat=ANNA))
        assert code is not None
        await tells(network, DORA, f"/link {code[0]}")
        await tells(network, DORA, "a secret of Dora and Carl")
        await tells(network, ANNA, "now it is a group", chat=ANNA, group=True, mentioned=True)
        assert await said_in(store, "link:apart:hook:anna") == ["a secret of Dora and Carl"]


async def test_an_account_cannot_fill_the_store_with_shared_sessions(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        for number in range(links.MAX_SESSIONS + 1):
            code = CODE.search(await tells(network, ANNA, "/link", chat=f"room {number}"))
            assert code is not None
            said = await tells(network, BERT, f"/link {code[0]}")
            await tells(network, BERT, "/unlink")
        assert said == links.TOO_MANY_SESSIONS
        assert len((await LinkStore(store, "me").read()).shared) == links.MAX_SESSIONS
        await linked(network, BERT, ANNA)


async def test_text_that_only_starts_like_the_command_is_a_message(network: HookNetwork, tmp_path: Path) -> None:
    says = Says("ok")
    async with running(network.settings, tmp_path, says):
        for text in ("/links to the garden page", "/linked", "unlink it", "link"):
            await tells(network, ANNA, text)
    assert says.asked == ["/links to the garden page", "/linked", "unlink it", "link"]


async def test_words_after_a_command_are_refused_and_no_code_reaches_the_model(
    network: HookNetwork, tmp_path: Path
) -> None:
    says = Says("ok")
    network.settings["pairing"] = True
    async with running(network.settings, tmp_path, says) as store:
        code = await code_of(network, ANNA)
        for text in (f"/link {code} please", f"/link please {code}", f"/link@agent {code[:4]} {code[4:]}"):
            assert await tells(network, BERT, text) == links.HOW_TO_LINK
        assert await tells(network, BERT, f"/unlink {code}") == links.HOW_TO_UNLINK
        assert (await LinkStore(store, "me").read()).guesses == ()
        asked = await tells(network, EVE, "hello")
        pairing = CODE.search(asked)
        assert pairing is not None
        assert "no valid code" in await tells(network, ANNA, f"/pair {pairing[0]} please")
        await joins(network, BERT, code, ANNA)  # none of it has used up the code
        code = await code_of(network, CARL)
        await network.say("team", f"/link {code} please", sender=BERT, group=True)
        assert await tells(network, DORA, f"/link {code}") == links.NO_CODE
    assert says.asked == []


# ---------------------------------------------------------------------------------------------- attacks


async def test_a_stranger_gets_nothing_for_a_valid_code_and_does_not_use_it_up(
    network: HookNetwork, tmp_path: Path
) -> None:
    says = Says("ok")
    async with running(network.settings, tmp_path, says) as store:
        code = await code_of(network, ANNA)
        for text in ("/link", f"/link {code}", "/unlink"):
            await network.say("e", text, sender=EVE)
            await network.say("team", text, sender=EVE, group=True, mentioned=True)
        assert (await tells(network, BERT, f"/link {code}")).startswith("This chat shares")
        assert await shared(store) == [("hook:anna", "hook:bert")]
    assert network.heard("e") == network.heard("team") == says.asked == []


async def test_a_code_does_not_admit_a_person_who_waits_to_be_paired(network: HookNetwork, tmp_path: Path) -> None:
    network.settings["pairing"] = True
    async with running(network.settings, tmp_path, Says("ok")) as store:
        code = await code_of(network, ANNA)
        assert (await tells(network, EVE, f"/link {code}")).startswith("Your pairing code is")
        await network.say(EVE, f"/link {code}", sender=EVE)
        pairing = CODE.search(network.heard(EVE)[0])
        assert pairing is not None
        assert await tells(network, BERT, f"/link {pairing[0]}") == links.NO_CODE  # a code of a different kind
        assert (await tells(network, ANNA, f"/pair {code}")).startswith("no valid code")
        assert await shared(store) == []
        await tells(network, ANNA, f"/pair {pairing[0]}")
        await until(lambda: len(network.heard(EVE)) == 2)
        assert (await tells(network, EVE, f"/link {code}")).startswith("This chat shares")  # once paired, she may


async def test_people_admitted_only_because_everyone_is_cannot_link(network: HookNetwork, tmp_path: Path) -> None:
    network.settings["allow"] = [ANNA, "*"]
    async with running(network.settings, tmp_path, Says("ok")) as store:
        code = await code_of(network, ANNA)
        assert await tells(network, EVE, "/link") == links.NOT_KNOWN
        assert await tells(network, EVE, f"/link {code}") == links.NOT_KNOWN
        assert await tells(network, EVE, "/link AAAAAAAA", chat="t", thread="t1") == links.NOT_KNOWN
        assert (await LinkStore(store, "me").read()).guesses == ()  # all people of a network could fill the store
        assert await shared(store) == []


async def test_a_group_gives_and_accepts_no_code_and_a_code_shown_there_is_void(
    network: HookNetwork, tmp_path: Path
) -> None:
    network.settings["groups"] = ["open"]
    says = Says("ok")
    async with running(network.settings, tmp_path, says) as store:
        group: dict[str, Any] = {"group": True, "mentioned": True}
        assert await tells(network, ANNA, "/link", chat="team", **group) == links.DIRECT_ONLY
        assert await tells(network, ANNA, "/link", chat="t", thread="t1") == links.DIRECT_ONLY
        code = await code_of(network, ANNA)
        assert await tells(network, BERT, f"/link {code}", chat="team", **group) == links.DIRECT_ONLY
        assert await tells(network, BERT, f"/link {code}") == links.NO_CODE
        code = await code_of(network, ANNA)
        assert await tells(network, EVE, f"/link {code}", chat="open", **group) == "ok"  # a member's message
        assert await shared(store) == []
        assert (await LinkStore(store, "me").read()).codes
    assert says.asked == [f"eve: /link {code}".replace("eve", "Eve")]


async def test_a_name_that_looks_like_a_link_is_shown_as_it_is(network: HookNetwork, tmp_path: Path) -> None:
    name = "[*Your* bank](https://evil.example)"
    async with (
        FakeTelegram().running() as phone,
        running([network.settings, phone.settings | {"pairing": True}], tmp_path, Says("ok")),
    ):
        await phone.say("7", "/link")
        await until(lambda: phone.heard("7"))
        code = CODE.search(phone.heard("7")[0])
        assert code is not None
        await network.say(BERT, f"/link {code[0]}", sender=BERT, name=name)
        await until(lambda: len(phone.heard("7")) == 2)
        assert phone.heard("7")[1].startswith(f"{name} (hook:bert) shares this session now.")
        more: dict[str, Any] = {"from": {"id": 66, "is_bot": False, "first_name": name}}
        await phone.say("66", "hello", **more)
        await until(lambda: phone.heard("66"))
        await phone.say("7", f"/pair {phone.heard('66')[0].split()[4][:8]}")
        await until(lambda: len(phone.heard("7")) == 3)
        assert phone.heard("7")[2] == f"Paired {name} (telegram:66)."


async def test_a_code_shown_in_a_group_is_void_even_if_the_agent_was_not_mentioned(
    network: HookNetwork, tmp_path: Path
) -> None:
    says = Says("ok")
    async with running(network.settings, tmp_path, says) as store:
        code = await code_of(network, ANNA)
        await network.say("team", f"/link {code}", sender=EVE, group=True)  # of a stranger, whose words count nothing
        await network.say("team", "/link AAAAAAAA", sender=BERT, group=True)
        assert len((await LinkStore(store, "me").read()).codes) == 1
        await network.say("team", f"/link {code}", sender=BERT, group=True)
        assert await tells(network, CARL, f"/link {code}") == links.NO_CODE
        assert await shared(store) == []
        assert [one.account for one in (await LinkStore(store, "me").read()).guesses] == ["hook:carl"]
    assert network.heard("team") == says.asked == []


async def test_a_code_works_once_and_a_new_one_replaces_it(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        old, new = await code_of(network, ANNA), await code_of(network, ANNA)
        assert await tells(network, BERT, f"/link {old}") == links.NO_CODE
        assert (await tells(network, BERT, f"/link {new}")).startswith("This chat shares")
        assert await tells(network, CARL, f"/link {new}") == links.NO_CODE
        await tells(network, BERT, "/unlink")
        assert await tells(network, BERT, f"/link {new}") == links.NO_CODE
        assert await shared(store) == []


async def test_a_code_expires_after_an_hour(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        code = await code_of(network, ANNA)

        def age(found: Links) -> tuple[Links, None]:
            (one,) = found.codes
            return msgspec.structs.replace(found, codes=(msgspec.structs.replace(one, at=one.at - 3601),)), None

        await LinkStore(store, "me").change(age)
        assert await tells(network, BERT, f"/link {code}") == links.NO_CODE
        assert await shared(store) == []


async def test_another_owners_code_is_invalid(network: HookNetwork, tmp_path: Path) -> None:
    async with HookNetwork().running() as other:
        other.settings |= {"name": "hers", "owner": "ada", "path": "/hook"}
        async with running([network.settings, other.settings], tmp_path, Says("ok")) as store:
            code = await code_of(other, ANNA)
            assert await tells(network, BERT, f"/link {code}") == links.NO_CODE
            assert await shared(store) == await shared(store, "ada") == []


async def test_a_thousand_guesses_find_nothing_cost_nothing_and_stop_nobody_else(
    network: HookNetwork, tmp_path: Path
) -> None:
    says = Says("ok")
    async with running(network.settings, tmp_path, says) as store:
        code = await code_of(network, ANNA)
        writes = 0

        def count(what: str) -> None:
            nonlocal writes
            writes += what == "before"

        for number in range(1000):
            if number == 100:  # late writes of earlier answers are not counted
                await until(lambda: len(network.heard(EVE)) == links.MAX_WRONG)
                await tells(network, CARL, "/status")
                unhook = store.writer.commit_hooks.add(count)
            await network.say(EVE, f"/link {number:08}", sender=DORA)
        assert writes <= 2
        unhook()
        await network.say(EVE, f"/link {code}", sender=DORA)  # correct, but too late
        assert (await tells(network, BERT, f"/link {code}")).startswith("This chat shares")
        assert await shared(store) == [("hook:anna", "hook:bert")]
        guesses = (await LinkStore(store, "me").read()).guesses
        assert [(one.account, one.wrong) for one in guesses] == [("hook:dora", links.MAX_WRONG)]
    assert network.heard(EVE) == [links.NO_CODE] * (links.MAX_WRONG - 1) + [links.TOO_MANY]
    assert says.asked == []


async def test_a_person_who_is_no_longer_answered_shares_nothing(network: HookNetwork, tmp_path: Path) -> None:
    """Neither at once nor after being paired again."""
    network.settings["allow"] = [ANNA]
    async with running(network.settings, tmp_path, Says("ok")) as store:
        peer = msgspec.json.encode(PairedPeer(BERT, "Bert", time.time())).decode()
        await store.set_channel_state("hook", "peer:bert", peer)
        await linked(network, ANNA, BERT)
        code = await code_of(network, BERT)
        assert await links.unpair(store, config_of(network.settings), Can(), BERT)
        await network.say(BERT, "am I in?", sender=BERT)
        assert await tells(network, ANNA, f"/link {code}") == links.NO_CODE
        await store.set_channel_state("hook", "peer:bert", peer)
        await tells(network, BERT, "and now?")
        assert await said_in(store, "hook:bert") == ["and now?"]
        assert await said_in(store, "hook:anna") == []


async def test_a_person_is_unpaired_before_their_link_is_ended(network: HookNetwork, tmp_path: Path) -> None:
    """A message between the two could link them again."""
    network.settings["allow"] = [ANNA]
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await store.set_channel_state("hook", "peer:bert", msgspec.json.encode(PairedPeer(BERT, "", 0.0)).decode())
        await linked(network, ANNA, BERT)
        seen: list[tuple[bool, bool]] = []  # after each commit, whether they are paired, and whether they are linked

        def look(what: str) -> None:
            if what == "after":
                with closing(sqlite3.connect(tmp_path / "store.db")) as db:
                    kept = dict(db.execute("SELECT key, value FROM channel_state WHERE channel IN ('hook', 'link')"))
                known = msgspec.json.decode(kept["me"], type=Links)
                seen.append(("peer:bert" in kept, known.of("hook:bert") is not None))

        unhook = store.writer.commit_hooks.add(look)
        assert await links.unpair(store, config_of(network.settings), Can(), BERT)
        unhook()
        assert await shared(store) == []
    assert (False, True) in seen
    assert (True, False) not in seen


async def test_a_person_removed_from_the_settings_shares_nothing_even_if_everyone_is_answered(
    network: HookNetwork, tmp_path: Path
) -> None:
    async with running(network.settings, tmp_path, Says("ok")):
        await linked(network, ANNA, BERT)
    network.settings["allow"] = [ANNA, "*"]
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await tells(network, BERT, "am I in?")
        assert await said_in(store, "hook:anna") == []
        assert await said_in(store, "hook:bert") == ["am I in?"]


class Holds(Recalls):
    """Answers with everything that was said in its session, once it may."""

    def __init__(self) -> None:
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        self.asked.set()
        await self.goes_on.wait()
        return await super().chat(messages, tools, model)


@pytest.mark.parametrize("leaver", [ANNA, BERT])
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "running"])
async def test_a_chat_that_left_a_session_gets_no_answer_of_it_to_what_it_asked_before(
    network: HookNetwork, leaver: str, waits: bool, tmp_path: Path
) -> None:
    model = Holds()
    async with running(network.settings, tmp_path, model) as store:
        await linked(network, ANNA, BERT)
        if waits:
            await network.say(ANNA, "a secret", sender=ANNA)
            await model.asked.wait()
        await network.say(BERT, "what does Anna say?", sender=BERT)
        await model.asked.wait()
        assert await tells(network, leaver, "/unlink") == links.ALONE
        before = len(network.heard(BERT))
        model.goes_on.set()
        await until(lambda: len(network.heard(BERT)) > before)
        assert network.heard(BERT)[before:] == [links.LEFT]
        assert await tells(network, BERT, "alone") == "alone"
        assert await tells(network, ANNA, "mine") == " | ".join(await said_in(store, "hook:anna"))


async def test_an_answer_that_could_not_be_sent_before_its_chat_left_a_session_is_not_sent_after_it(
    network: HookNetwork, tmp_path: Path
) -> None:
    async with running(network.settings, tmp_path, Recalls()) as store:
        await linked(network, ANNA, BERT)
        before, got = len(network.heard(BERT)), len(network.got)
        network.status = [(503, {})]
        await network.say(BERT, "what does Anna say?", sender=BERT)
        await until(lambda: len(network.got) > got)  # it is tried again in half a second or later
        await network.say(BERT, "/unlink", sender=BERT)
        await until(lambda: len(network.heard(BERT)) == before + 2)
        assert network.heard(BERT)[before:] == [links.LEFT, links.ALONE]
        assert await said_in(store, "hook:anna") == ["what does Anna say?"]


async def test_a_report_for_a_chat_that_left_a_session_tells_nothing_of_it(
    network: HookNetwork, tmp_path: Path
) -> None:
    """An answer that no message of the chat has asked for."""
    async with running(network.settings, tmp_path, Recalls()) as store:
        await linked(network, ANNA, BERT)
        await tells(network, BERT, "hello")
        await tells(network, BERT, "/unlink")
        await tells(network, ANNA, "a secret")
        before = len(network.heard(BERT))
        report = InboundMessage("system", "sub", "hook:bert", "it is done", session="hook:anna")
        row = await store.accept(report.addressed(), "message")
        await store.wake(WORK, [row.session])
        await until(lambda: len(network.heard(BERT)) > before)
        assert network.heard(BERT)[before:] == [links.LEFT]


async def test_a_chat_that_left_a_session_cannot_answer_its_question(tmp_path: Path) -> None:
    model = ScriptedProvider([call("write_file", path="canary.txt", content="x"), "Written."])
    async with (
        FakeTelegram().running() as phone,
        running(phone.settings | {"allow": ["7", "8"]}, tmp_path, model, policy=(Rule(do="ask", tool="write_file"),)),
    ):
        await phone.say("7", "/link")
        await until(lambda: phone.heard("7"))
        await phone.say("8", f"/link {phone.heard('7')[0].split()[4][:8]}", sender=8)
        await until(lambda: len(phone.heard("7")) == 2)
        await phone.say("8", "write it", sender=8)
        await until(lambda: any("reply_markup" in one for one in phone.sent))
        await phone.say("8", "/unlink", sender=8)
        await until(lambda: phone.heard("8")[-1] == links.ALONE)
        await phone.press("Approve", sender=8)
        await phone.say("8", "/status", sender=8)  # button presses are handled in order
        await until(lambda: "session: telegram:8" in phone.heard("8")[-1])
        assert not (tmp_path / "canary.txt").exists()
        await phone.say("7", "yes")
        await until(lambda: (tmp_path / "canary.txt").exists())
        await until(lambda: phone.heard("8")[-1] == links.LEFT)


async def test_a_job_of_a_person_who_left_a_session_tells_nothing_of_it(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Recalls()) as store:
        await linked(network, ANNA, BERT)
        await tells(network, BERT, "schedule")
        await tells(network, ANNA, "schedule")
        assert [job.session_key for job in await CronService(store).list()] == ["hook:anna", "hook:anna"]
        await tells(network, ANNA, "/unlink")
        await tells(network, ANNA, "a secret")
        told = len(network.heard(BERT)), len(network.heard(ANNA))
        for job in await CronService(store).list():
            await CronService(store).run(job.id)
        await until(lambda: len(network.heard(BERT)) > told[0] and len(network.heard(ANNA)) > told[1])
    assert "a secret" in network.heard(ANNA)[-1]
    assert network.heard(BERT)[-1].startswith("recall\n\n[This is scheduled work")


async def test_jobs_of_a_person_who_is_no_longer_answered_do_not_run(network: HookNetwork, tmp_path: Path) -> None:
    network.settings["allow"] = [ANNA]
    async with running(network.settings, tmp_path, Recalls()) as store:
        peer = msgspec.json.encode(PairedPeer(BERT, "Bert", time.time())).decode()
        await store.set_channel_state("hook", "peer:bert", peer)
        await tells(network, BERT, "schedule")
        await tells(network, ANNA, "schedule")
        await CronService(store).add("of the operator", every="1h", channel="hook", chat_id=BERT)
        assert await links.unpair(store, config_of(network.settings), Can(), BERT)
        jobs = await CronService(store).list()
        assert sorted((job.chat_id, job.paused) for job in jobs) == [(ANNA, False), (BERT, True), (BERT, True)]


# ---------------------------------------------------------------------------------------------- crashes


async def test_a_command_repeated_after_a_restart_is_not_run_again(network: HookNetwork, tmp_path: Path) -> None:
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await linked(network, ANNA, BERT)
        await tells(network, BERT, "/unlink", id="parted")
        await linked(network, ANNA, BERT)
        await tells(network, CARL, "/link AAAAAAAA", id="wrong")
        made = CODE.search(await tells(network, CARL, "/link", id="asked"))
        assert made is not None
        kept = await LinkStore(store, "me").read()
    async with running(network.settings, tmp_path, Says("ok")) as store:
        await network.say(BERT, "/unlink", sender=BERT, id="parted")
        await network.say(CARL, "/link AAAAAAAA", sender=CARL, id="wrong")
        await network.say(CARL, "/link", sender=CARL, id="asked")
        await tells(network, BERT, "still with Anna")
        assert await LinkStore(store, "me").read() == kept
        assert await said_in(store, "hook:anna") == ["still with Anna"]
    assert len(network.heard(CARL)) == 2


class LinkScene(Scene):
    """Two accounts link their chats, talk and part."""

    settings: ClassVar = {"allow": [ANNA, BERT]}

    async def check_store(self, store: Store, what: str) -> None:
        assert await said_in(store, "hook:anna") == ["one", "two", "three"], what
        assert await said_in(store, "hook:bert") == ["alone"], what
        kept = await LinkStore(store, "me").read()
        assert (kept.codes, kept.guesses, await shared(store)) == ((), (), []), what

    async def talk(self, network: HookNetwork) -> None:
        await tells(network, ANNA, "one")
        code = await code_of(network, ANNA)
        await tells(network, BERT, f"/link {code}")
        await tells(network, BERT, "two")
        await tells(network, ANNA, "three")
        await until(lambda: len(network.heard(ANNA)) == 4)
        await tells(network, BERT, "/unlink")
        await tells(network, BERT, "alone")

    def check(self, network: HookNetwork) -> None:
        """Each was told once what a run without a kill tells."""
        one, code, *told = network.heard(ANNA)
        assert (one, CODE.sub("CODE", code)[:22]) == ("re: one", "Your link code is CODE")
        assert sorted(told) == [
            "Bert (hook:bert) shares this session now. If that is not you, send /unlink.",
            "re: three",
        ]
        assert network.heard(BERT) == [
            "This chat shares the session of Anna (hook:anna) now. /unlink ends that.",
            "re: two",
            links.ALONE,
            "re: alone",
        ]


@pytest.mark.timeout(300)
async def test_chats_are_linked_once_and_parted_once_whichever_write_is_the_last(step: int, tmp_path: Path) -> None:
    async with Forker() as forker:
        kills = await LinkScene(forker, tmp_path).kill_at_writes(1 if step == 1 else 8)
    # The writes of a busy machine share commits, so that a run may end before the last ones are reached.
    assert sum(kills) >= 0.8 * len(kills)
