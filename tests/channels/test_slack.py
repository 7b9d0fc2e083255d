"""Slack, against a fake that speaks the Web API, Socket Mode and events over HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.text import MARK
from everloop.testing.channels import conform, running, storm

from .fake_slack import APP_TOKEN, BOT_TOKEN, ME, SIGNING, FakeSlack
from .says import Says, found, until

CHATS = ("D1", "D2")


@pytest.fixture
async def slack() -> AsyncIterator[FakeSlack]:
    async with FakeSlack().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: FakeSlack().running(), tmp_path, chats=CHATS, step=6)
    assert report.problems == []
    assert report.kills >= 2


@pytest.mark.timeout(300)
async def test_a_rough_network_and_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    chats = [f"D{number}" for number in range(1, 5)]
    report = await storm(lambda: FakeSlack(rough=True).running(), tmp_path, chats=chats, each=4, kills=3)
    assert report.problems == []
    assert report.kills >= 1


async def test_markdown_becomes_mrkdwn_without_mentions(slack: FakeSlack, tmp_path: Path) -> None:
    said = "# Plan\n\n- **one** & _two_ <!channel>\n\n```python\na < b\n```\n[site](https://example.org/?a=1&b=2)"
    async with running(slack.settings, tmp_path, Says(said)):
        await slack.say("D1", "hello")
        await until(lambda: slack.posted)
    assert slack.posted[0]["text"] == (
        "*Plan*\n\n• *one* &amp; _two_ &lt;!channel&gt;\n\n```\na &lt; b\n```\n<https://example.org/?a=1&amp;b=2|site>"
    )


async def test_slacks_brackets_are_removed_from_a_persons_text(slack: FakeSlack, tmp_path: Path) -> None:
    says = Says("ok")
    said = "see <https://example.org|example.org>, <#C1|garden> and <@U9>: a &lt; b"
    async with running(slack.settings, tmp_path, says):
        await slack.say("D1", said)
        await until(lambda: says.asked)
    assert says.asked == ["see https://example.org, #garden and @U9: a < b"]


async def test_a_mention_in_a_channel_is_answered_once_and_in_a_thread(slack: FakeSlack, tmp_path: Path) -> None:
    says = Says("yes?")
    async with running(slack.settings, tmp_path, says) as store:
        await slack.say("C1", "nobody is meant")
        await slack.say("C1", f"<@{ME}> what grows?")  # arrives as two events
        await slack.say("C1", f"<@{ME}> and I?", user="U9")
        await slack.say("C1", "hello", bot_id="B2")
        await slack.say("C1", "changed", subtype="message_changed")
        await slack.say("D1", "last")
        await until(lambda: len(slack.posted) == 2)
        keys = {info.key for info in await store.sessions("me")}
    thread = next(one["thread_ts"] for one in slack.posted if one["channel"] == "C1")
    assert sorted(says.asked) == ["Person U7: what grows?", "last"]
    assert keys == {f"slack:C1/{thread}", "slack:D1"}


async def test_a_connection_that_slack_ends_is_replaced_and_nothing_is_lost(slack: FakeSlack, tmp_path: Path) -> None:
    async with running(slack.settings, tmp_path):
        await until(lambda: slack.hellos == 1)
        await slack.drop()
        await slack.say("D1", "meanwhile")
        await until(lambda: slack.heard("D1") == ["re: meanwhile"])
        assert slack.hellos == 2


@pytest.mark.parametrize(
    ("status", "body", "headers", "heard"),
    [
        (429, {"ok": False, "error": "ratelimited"}, {"Retry-After": "0.1"}, "re: hello"),
        (200, {"ok": False, "error": "internal_error"}, {}, f"{MARK} re: hello"),
        (502, {}, {}, f"{MARK} re: hello"),
    ],
)
async def test_a_temporarily_refused_message_is_sent_again(
    slack: FakeSlack, tmp_path: Path, status: int, body: dict[str, Any], headers: dict[str, str], heard: str
) -> None:
    slack.fail = [(status, body, headers)]
    async with running(slack.settings, tmp_path):
        await slack.say("D1", "hello")
        await until(lambda: slack.heard("D1"))
    assert slack.heard("D1") == [heard]


async def test_a_message_to_an_archived_channel_becomes_a_dead_letter(slack: FakeSlack, tmp_path: Path) -> None:
    slack.archived.add("D1")
    async with running(slack.settings, tmp_path) as store:
        await slack.say("D1", "hello")
        (dead,) = await found(lambda: store.dead_letters("slack"))
    assert dead.reason == "chat.postMessage: is_archived"


async def test_events_over_http_are_accepted_only_with_slacks_signature(tmp_path: Path) -> None:
    async with FakeSlack(http=True).running() as slack:
        says = Says("hi")
        async with running(slack.settings, tmp_path, says):
            await slack.say("D1", "hello")
            await until(lambda: slack.heard("D1") == ["hi"])
            event = {"type": "message", "channel": "D1", "channel_type": "im", "user": "U7", "text": "x", "ts": "1.2"}
            forged = {"type": "event_callback", "event": event}
            assert await slack.post(forged, secret="another secret") == 401
            assert await slack.post(forged, at=time.time() - 3600) == 401
            assert await slack.post({"type": "url_verification", "challenge": "c-1"}) == 200
            assert b"c-1" in slack.body
            await slack.say("D1", "bye")
            await until(lambda: len(slack.heard("D1")) == 2)
        assert says.asked == ["hello", "bye"]


async def test_no_secret_is_in_a_log_or_a_status(
    slack: FakeSlack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    slack.settings["base_url"] = "http://127.0.0.1:1"
    async with running(slack.settings, tmp_path) as store:
        state = await found(lambda: store.channel_state("slack"))
    assert "channel slack" in caplog.text
    for secret in (BOT_TOKEN, APP_TOKEN, SIGNING):
        assert secret not in caplog.text
        assert secret not in str(state)
