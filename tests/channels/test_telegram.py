"""Telegram, against a fake that speaks the Bot API."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.access import tell
from everloop.channels.text import MARK
from everloop.testing.channels import conform, running, storm

from .fake_telegram import TOKEN, FakeTelegram
from .says import Says, found, until


@pytest.fixture
async def telegram() -> AsyncIterator[FakeTelegram]:
    async with FakeTelegram().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: FakeTelegram().running(), tmp_path, step=3)
    assert report.problems == []
    assert report.kills >= 4


@pytest.mark.timeout(300)
async def test_a_rough_network_and_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    chats = [str(number) for number in range(1, 6)]
    report = await storm(lambda: FakeTelegram(rough=True).running(), tmp_path, chats=chats, each=6, kills=4)
    assert report.problems == []
    assert report.kills >= 2


@pytest.mark.timeout(300)
async def test_updates_can_arrive_as_requests_which_only_telegram_can_send(tmp_path: Path) -> None:
    async with FakeTelegram(http=True).running() as telegram:
        says = Says("hi")
        async with running(telegram.settings, tmp_path, says):
            await telegram.say("7", "hello")
            await until(lambda: telegram.heard("7") == ["hi"])
            forged = {"update_id": 5, "message": {"message_id": 99, "chat": {"id": 7}, "from": {"id": 7}, "text": "x"}}
            assert await telegram.post(forged, "") == 401
            assert await telegram.post(forged, "0" * 64) == 401
            assert await telegram.post(forged, "\u00e4" * 64) == 401
            assert TOKEN not in str(telegram.webhook)
            await telegram.say("7", "bye")
            await until(lambda: len(telegram.heard("7")) == 2)
        assert says.asked == ["hello", "bye"]
        for name in ("webhook_url", "port"):
            del telegram.settings[name]
        telegram._is_http = False
        async with running(telegram.settings, tmp_path, says):  # polling removes the webhook
            await telegram.say("7", "again")
            await until(lambda: len(telegram.heard("7")) == 3)
    report = await conform(lambda: FakeTelegram(http=True).running(), tmp_path / "kit", step=12)
    assert report.problems == []


async def test_markdown_becomes_telegrams_html(telegram: FakeTelegram, tmp_path: Path) -> None:
    said = (
        "# Plan\n\n- **one** & _two_\n- `a<b`\n\n```python\nif a < b: pass\n```\n[site](https://example.org/?a=1&b=2)"
    )
    async with running(telegram.settings, tmp_path, Says(said)):
        await telegram.say("7", "hello")
        await until(lambda: telegram.sent)
    assert telegram.sent[0]["text"] == (
        "<b>Plan</b>\n\n• <b>one</b> &amp; <i>two</i>\n• <code>a&lt;b</code>\n\n"
        '<pre><code class="language-python">if a &lt; b: pass</code></pre>\n'
        '<a href="https://example.org/?a=1&amp;b=2">site</a>'
    )


async def test_text_that_telegram_cannot_parse_is_sent_plain(telegram: FakeTelegram, tmp_path: Path) -> None:
    telegram.fail = [(400, "Bad Request: can't parse entities: something", {})]
    async with running(telegram.settings, tmp_path, Says("**bold**")):
        await telegram.say("7", "hello")
        await until(lambda: telegram.sent)
    assert telegram.sent[0]["text"] == "bold"
    assert "parse_mode" not in telegram.sent[0]


async def test_a_delay_requested_by_telegram_is_kept_and_nothing_is_marked(
    telegram: FakeTelegram, tmp_path: Path
) -> None:
    telegram.fail = [(429, "Too Many Requests: retry after 0", {"retry_after": 0.1})] * 2
    async with running(telegram.settings, tmp_path):
        await telegram.say("7", "hello")
        await until(lambda: telegram.heard("7"))
    assert telegram.heard("7") == ["re: hello"]


async def test_a_message_that_may_have_gone_out_is_repeated_with_a_mark(telegram: FakeTelegram, tmp_path: Path) -> None:
    telegram.fail = [(502, "Bad Gateway", {})]
    async with running(telegram.settings, tmp_path):
        await telegram.say("7", "hello")
        await until(lambda: telegram.heard("7"))
    assert telegram.heard("7") == [f"{MARK} re: hello"]


async def test_a_message_to_a_chat_that_blocked_the_bot_becomes_a_dead_letter_that_can_be_resent(
    telegram: FakeTelegram, tmp_path: Path
) -> None:
    telegram.blocked.add("7")
    async with running(telegram.settings, tmp_path) as store:
        await telegram.say("7", "hello")
        await telegram.say("8", "hello")  # another chat continues
        await until(lambda: telegram.heard("8"))
        dead = await found(lambda: store.dead_letters("telegram"))
        assert dead[0].reason == "403 Forbidden: bot was blocked by the user"
        telegram.blocked.clear()
        await store.revive([dead[0].id])
        await store.wake()
        await until(lambda: telegram.heard("7"))
    assert telegram.heard("7") == ["re: hello"]


@pytest.mark.parametrize(
    ("text", "more", "answered"),
    [
        ("hello", {}, False),
        ("@ever_bot hello", {}, True),
        ("so 👍 @Ever_Bot what now", {}, True),
        ("@other_bot hello", {}, False),
        ("/status@ever_bot", {}, True),
        ("hello", {"reply_to_message": {"message_id": 1, "from": {"id": 4242, "is_bot": True}}}, True),
    ],
)
async def test_in_a_group_only_mentions_of_and_replies_to_the_bot_cost_a_model_call(
    telegram: FakeTelegram, tmp_path: Path, text: str, more: dict[str, Any], answered: bool
) -> None:
    says = Says("yes?")
    async with running(telegram.settings, tmp_path, says):
        await telegram.say("-100", text, **more)
        await telegram.say("-100", "@ever_bot last")
        await until(lambda: says.asked and says.asked[-1].endswith("last"))
        await until(lambda: len(telegram.heard("-100")) == 1 + answered)
    assert len(says.asked) == 1 + (answered and not text.startswith("/"))
    assert telegram.sent[-1]["reply_parameters"]["message_id"] == 2
    assert says.asked[-1] == "Person 7: last"


async def test_a_thread_of_a_group_has_its_own_session(telegram: FakeTelegram, tmp_path: Path) -> None:
    async with running(telegram.settings, tmp_path) as store:
        for thread in (3, 4):
            await telegram.say("-100", "@ever_bot hi", message_thread_id=thread, is_topic_message=True)
        await until(lambda: len(telegram.sent) == 2)
        keys = {info.key for info in await store.sessions("me")}
    assert keys == {"telegram:-100/3", "telegram:-100/4"}
    assert sorted(one["message_thread_id"] for one in telegram.sent) == [3, 4]


async def test_the_token_is_in_no_log_and_no_status(
    telegram: FakeTelegram, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    telegram.settings["base_url"] = "http://127.0.0.1:1"
    async with running(telegram.settings, tmp_path) as store:
        state = await found(lambda: store.channel_state("telegram"))
    assert "ConnectionRefused" in state["status"] or "NoConnection" in state["status"]
    assert TOKEN not in caplog.text
    assert TOKEN not in str(state)
    assert "channel telegram" in caplog.text


async def test_a_reason_that_contains_the_token_is_kept_without_it(telegram: FakeTelegram, tmp_path: Path) -> None:
    telegram.fail = [(400, f"Bad Request: /bot{TOKEN}/sendMessage is wrong", {})]
    async with running(telegram.settings, tmp_path) as store:
        await telegram.say("7", "hello")
        (dead,) = await found(lambda: store.dead_letters("telegram"))
    assert dead.reason == "400 Bad Request: /bot…/sendMessage is wrong"


@pytest.mark.parametrize("chat", ["7/x", "7/٣", "--7", "@nobody/1 2"])
async def test_a_message_to_an_impossible_chat_becomes_a_dead_letter(
    telegram: FakeTelegram, tmp_path: Path, chat: str
) -> None:
    async with running(telegram.settings, tmp_path) as store:
        await tell(store, "telegram", "me", chat, "hello", "1")
        (dead,) = await found(lambda: store.dead_letters("telegram"))
    assert "number" in dead.reason or "chat not found" in dead.reason
