"""Channels in the real commands: `everloop worker` and `everloop serve` run them, `everloop channels` shows them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.links import LinkStore, Requester, join, offer
from everloop.channels.runner import STATUS, Status
from everloop.messages import encode_json
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import environment, everloop, start

from .fake_telegram import TOKEN, FakeTelegram
from .says import until

pytestmark = pytest.mark.timeout(180)  # several processes each


@pytest.fixture
async def telegram() -> AsyncIterator[FakeTelegram]:
    async with FakeTelegram().running() as made:
        yield made


@pytest.fixture
async def model() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as running:
        yield running


def settings(home: Path, telegram: FakeTelegram, more: str = "") -> dict[str, Any]:
    home.mkdir(exist_ok=True)
    base = telegram.settings["base_url"]
    (home / "config.toml").write_text(
        f'[channels.telegram]\nallow = ["7"]\npairing = true\nbase_url = "{base}"\n{more}', encoding="utf-8"
    )
    return {"EVERLOOP_HOME": str(home), "EVERLOOP_CHANNEL_TELEGRAM_TOKEN": TOKEN}


async def test_one_worker_polls_an_account_and_another_takes_over_when_it_is_killed(
    telegram: FakeTelegram, model: FakeOpenAI, tmp_path: Path
) -> None:
    run = settings(tmp_path / "own", telegram)
    model.reply("first answer")
    model.reply("second answer")
    workers = [await start("worker", env=environment(model, **run))]
    try:
        await until(lambda: telegram.polls == 1)
        workers.append(await start("worker", env=environment(model, **run)))
        line = await workers[1].stderr.readline()
        assert b"is ready" in line
        await telegram.say("7", "one")
        await until(lambda: telegram.heard("7") == ["first answer"])
        done = await everloop("channels", "status", "--json", **run)
        assert done.json["process"] == workers[0].pid
        assert telegram.calls.count("getMe") == 1  # the second one waits for the lease
        workers[0].kill()
        await workers[0].wait()
        await telegram.say("7", "two")
        await until(lambda: len(telegram.heard("7")) == 2)
        assert telegram.heard("7") == ["first answer", "second answer"]
        assert (telegram.calls.count("getMe"), telegram.conflicts) == (2, 0)
        workers[1].send_signal(signal.SIGTERM)
        assert await workers[1].wait() == 0
        err = (await workers[1].stderr.read()).decode()
        assert "Traceback" not in err
        assert TOKEN not in err
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def test_channels_shows_pairs_and_resends(telegram: FakeTelegram, model: FakeOpenAI, tmp_path: Path) -> None:
    run = settings(tmp_path / "own", telegram)
    telegram.blocked.add("7")
    model.reply("hello")
    worker = await start("worker", env=environment(model, **run))
    try:
        await telegram.say("9", "let me in", sender=9)
        await until(lambda: telegram.heard("9"))
        await telegram.say("7", "hi")
        await until(lambda: telegram.calls.count("sendMessage") == 2)
        done = await everloop("channels", "--json", **run)
        assert done.status == 2  # a flag of its actions
        done = await everloop("channels", "status", "--json", **run)
        facts = json.loads(done.out)
        assert (facts["process"] is not None, facts["error"], facts["repeats"]) == (True, "", "none")
        code = facts["pending"][0]["code"]
        assert code in telegram.heard("9")[0]
        done = await everloop("channels", "pair", code, **run)
        assert done.out == "Paired Person 9 (telegram:9).\n"
        await until(lambda: len(telegram.heard("9")) == 2)
        done = await everloop("channels", "pair", code, **run)
        assert done.status == 2
        assert "no valid code" in done.err
        done = await everloop("channels", "dead", "--json", **run)
        assert done.json["reason"] == "403 Forbidden: bot was blocked by the user"
        done = await everloop("doctor", "--json", **run)
        check = next(one for one in done.json["checks"] if one["name"] == "channel telegram")
        assert (check["ok"], check["found"]) == (False, "1 could not be delivered")
        telegram.blocked.clear()
        done = await everloop("channels", "resend", "--all", **run)
        assert done.out == "1 will be sent again.\n"
        await until(lambda: telegram.heard("7") == ["hello"])
        done = await everloop("channels", "test", "telegram", **run)
        assert done.out == "telegram: connected as @ever_bot.\n"
    finally:
        worker.kill()
        await worker.wait()


async def test_channels_shows_who_shares_a_session_and_ends_it(
    telegram: FakeTelegram, model: FakeOpenAI, tmp_path: Path
) -> None:
    run = settings(tmp_path / "own", telegram)
    path = tmp_path / "own" / "config.toml"
    path.write_text(path.read_text().replace('["7"]', '["7", "8"]'), encoding="utf-8")
    worker = await start("worker", env=environment(model, **run))
    try:
        await telegram.say("7", "/link")
        await until(lambda: telegram.heard("7"))
        code = telegram.heard("7")[0].split("/link ")[1][:8]
        await telegram.say("8", f"/link {code}", sender=8)
        await until(lambda: telegram.heard("8"))
        done = await everloop("channels", "status", "--json", **run)
        assert done.json["linked"] == [
            {"sender": "7", "session": "telegram:7", "with": ["telegram:8"]},
            {"sender": "8", "session": "telegram:7", "with": ["telegram:7"]},
        ]
        done = await everloop("channels", **run)
        assert "  8 shares the session telegram:7 with telegram:7: everloop channels unlink telegram 8\n" in done.out
        done = await everloop("channels", "unlink", "telegram", "8", **run)
        assert done.out == "8 shares no session any more in telegram.\n"
        done = await everloop("channels", "unlink", "telegram", "8", **run)
        assert (done.status, "8 shares no session by a code" in done.err) == (2, True)
        done = await everloop("channels", "status", "--json", **run)
        assert done.json["linked"] == []
    finally:
        worker.kill()
        await worker.wait()


async def test_the_command_shown_for_a_person_can_be_pasted_whatever_their_id_is(
    telegram: FakeTelegram, tmp_path: Path
) -> None:
    run = settings(tmp_path / "own", telegram)
    store = SQLiteStore(tmp_path / "own" / "everloop.db")
    asks, joins = (Requester(f"telegram:{id}", "", id, f"telegram:{id}", id) for id in ("7", "$(touch x)!"))
    links = LinkStore(store, "me")
    await links.change(lambda kept: offer(kept, asks, "AAAAAAAA", time.time()))
    await links.change(lambda kept: join(kept, "AAAAAAAA", joins, time.time(), busy=False))
    await store.close()
    done = await everloop("channels", **run)
    assert "everloop channels unlink telegram '$(touch x)!'\n" in done.out
    done = await everloop("channels", "unlink", "telegram", "$(touch x)!", **run)
    assert done.status == 0


async def test_invalid_settings_stop_the_start_in_one_line_without_the_secret(
    telegram: FakeTelegram, model: FakeOpenAI, tmp_path: Path
) -> None:
    run = settings(tmp_path / "own", telegram, more="tokn = 5\n")
    done = await everloop("worker", server=model, **run)
    assert done.status == 2
    assert done.err.startswith("everloop: [channels.telegram] tokn is unknown; allowed: base_url, ")
    assert len(done.err.splitlines()) == 1
    run = settings(tmp_path / "own", telegram) | {"EVERLOOP_CHANNEL_TELEGRAM_TOKEN": f"{TOKEN} x"}
    done = await everloop("worker", server=model, **run)
    assert (done.status, TOKEN in done.err) == (2, False)


async def test_doctor_names_a_channel_that_does_not_work_and_how_to_look_into_it(
    telegram: FakeTelegram, tmp_path: Path
) -> None:
    run = settings(tmp_path / "own", telegram)
    store = SQLiteStore(tmp_path / "own" / "everloop.db")
    status = encode_json(Status(time.time(), "401 Unauthorized")).decode()
    await store.set_channel_state("telegram", STATUS, status)
    await store.close()
    wrong = {"EVERLOOP_CHANNEL_TELEGRAM_TOKEN": f"{TOKEN} x"}
    for more, found in (({}, "401 Unauthorized"), (wrong, "[channels.telegram] token has characters")):
        done = await everloop("doctor", "--json", **run | more)
        check = next(one for one in done.json["checks"] if one["name"] == "channel telegram")
        assert (check["ok"], check["found"][: len(found)]) == (False, found)
        assert "everloop channels test telegram" in check["fix"]
        assert TOKEN not in done.out
