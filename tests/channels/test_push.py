"""Web push across kills: no notification is lost, and one that is repeated replaces the first in the browser."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from everloop import InboundMessage
from everloop.channels.push import Subscription, Subscriptions
from everloop.store.sqlite import SQLiteStore
from everloop.testing.channels import Child, Forker
from tests.support.push_service import Browser, PushService, push_service

SESSIONS = ("web:1", "web:2")  # each with a message, whose turn ends with a notification
MAX_WRITES, MIN_WRITES = 60, 8  # of a run
SECONDS = 60.0  # time limit for a process to finish its work


@dataclass
class Told:
    """What a browser was told in a run whose process was killed at one place."""

    place: str
    kills: int
    payloads: list[dict[str, Any]]


@pytest.mark.timeout(300)
async def test_a_notification_is_lost_at_no_kill_and_a_repeated_one_is_shown_once(tmp_path: Path) -> None:
    runs = []
    async with Forker() as forker:
        for number in range(1, MAX_WRITES):  # until a process is done before it reaches the write
            places = [(number, when) for when in ("before", "after")]
            pair = [run(forker, tmp_path / f"{when}-{number}", (number, when)) for _, when in places]
            runs += await asyncio.gather(*pair)
            if not runs[-1].kills and not runs[-2].kills:
                break
    for one in runs:
        check(one)
    assert not runs[-1].kills
    assert sum(one.kills for one in runs) >= MIN_WRITES


async def test_a_notification_whose_process_is_killed_before_its_mark_is_repeated_with_its_tag(tmp_path: Path) -> None:
    async with Forker() as forker:
        told = await run(forker, tmp_path / "told", "told")
    assert told.kills == 1
    assert len(told.payloads) > len(SESSIONS)
    check(told)


def check(one: Told) -> None:
    """Every turn is notified; repeats equal the first, so that a browser shows one notification for each tag."""
    tags = Counter(payload["tag"] for payload in one.payloads)
    assert {payload["session"] for payload in one.payloads} == set(SESSIONS), one
    assert len(tags) == len(SESSIONS), one
    assert sum(tags.values()) - len(tags) <= one.kills * len(SESSIONS), one
    assert all(one.payloads.count(payload) == tags[payload["tag"]] for payload in one.payloads), one


async def run(forker: Forker, folder: Path, die_at: tuple[int, str] | Literal["told"]) -> Told:
    """Let a process run the turns and notify a browser; kill it at a write, or when the browser is told, and start it
    again."""
    await asyncio.to_thread(folder.mkdir)
    kills = 0
    async with push_service() as service:  # it checks each signature and decrypts each message
        browser = await subscribed(service, folder / "store.db")
        settings = {
            "name": "push",
            "contact": "mailto:me@example.org",
            "private_hosts": [service.origin.removeprefix("http://")],
        }
        while True:
            place = die_at if isinstance(die_at, tuple) and not kills else None
            child = await asyncio.to_thread(forker.start, settings, folder, place)
            browser.on_told = child.kill if die_at == "told" and not kills else None
            try:
                done = await is_done(child, folder / "store.db")
                if done:
                    await child.stop()
                    break
            finally:
                child.kill()
            assert child.status == -signal.SIGKILL
            kills += 1
        headers = {(one["Content-Encoding"], one["Topic"]) for one in browser.headers}
        assert len(headers) == len(SESSIONS)
        assert all(encoding == "aes128gcm" for encoding, _ in headers)
    await asyncio.to_thread(shutil.rmtree, folder)
    return Told(folder.name, kills, browser.told)


async def subscribed(service: PushService, path: Path) -> Browser:
    """Subscribe a browser with the server's key, and put a message into each session."""
    store, browser = SQLiteStore(path), service.browser()
    try:
        subscriptions = Subscriptions(store)
        service.key = await subscriptions.public_key()
        given = browser.subscription
        await subscriptions.add(Subscription("me", given["endpoint"], given["p256dh"], given["auth"], 0.0))
        for session in SESSIONS:
            message = InboundMessage("web", "user", session.removeprefix("web:"), "hello", id=session, session=session)
            await store.accept(message.addressed())
    finally:
        await store.close()
    return browser


async def is_done(child: Child, path: Path) -> bool:
    """Wait until every turn has ended and everything is sent; return False if the process is killed before that."""
    async with asyncio.timeout(SECONDS):
        while not child.ended.is_set():
            if await asyncio.to_thread(is_quiet, path):
                return True
            await asyncio.sleep(0.02)
    return False


def is_quiet(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as db:
        try:
            (turns,) = db.execute("SELECT count(*) FROM inbox WHERE state <> 'done'").fetchone()
            (unsent,) = db.execute("SELECT count(*) FROM outbox WHERE sent_at IS NULL").fetchone()
        except sqlite3.OperationalError:  # the store is locked
            return False
        return not turns and not unsent
