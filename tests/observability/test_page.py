"""The page at /metrics: one store query serves concurrent scrapes, and without the store it shows the process's
metrics."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.log import CallEnded, ModelAnswered, TurnEnded, UserSaid
from everloop.observability.metrics import FRESH_SECONDS, Meters, Page
from everloop.store.base import Claim
from everloop.store.overview import Overview
from everloop.store.peers import new_worker, retire
from everloop.store.sqlite import SQLiteStore
from tests.store.steps import answer, begun, finish, message
from tests.support.places import DOCS

from .reading import Family, read, value

DOCS = DOCS / "metrics.md"
CANARY = "canary-0d41f7"


class Slow(SQLiteStore):
    """A store that counts its queries, and answers once it is allowed to."""

    looks = 0
    error: Exception | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may = asyncio.Event()
        self.may.set()

    async def overview(self) -> Overview:
        self.looks += 1
        await self.may.wait()
        if self.error is not None:
            raise self.error
        return await super().overview()


@pytest.fixture
async def store(tmp_path):
    made = Slow(tmp_path / "store.db")
    yield made
    await made.close()


@pytest.fixture
def worker():
    name = new_worker()
    yield name
    retire(name)


async def scraped(page: Page) -> dict[str, Family]:
    return read((await page.text()).decode())


async def test_the_stores_metrics_match_its_overview(store, worker):
    await store.join(worker, "/run/me")
    await begun(store, worker, chat=CANARY, owner=CANARY)
    await finish(store, await begun(store, worker, chat="2"), outgoing=[answer(), answer()])
    await store.accept(message("hi", CANARY, owner=CANARY))
    await store.accept(message(CANARY, "3"))
    page = Page(store, Meters())
    text = (await page.text()).decode()
    assert CANARY not in text
    assert worker not in text
    found = read(text)
    numbers = {
        "everloop_store_up": 1,
        "everloop_workers": 1,
        "everloop_sessions": 3,
        "everloop_sessions_held": 1,
        "everloop_sessions_unheld": 1,
        "everloop_sessions_stuck": 0,
        "everloop_messages_waiting": 2,
        "everloop_turns_open": 1,
        "everloop_turns_parked": 0,
        "everloop_outbox_unsent": 2,
    }
    assert {name: value(found, name) for name in numbers} == numbers
    assert 0 < value(found, "everloop_oldest_message_age_seconds") < 60
    assert 0 < value(found, "everloop_oldest_unsent_age_seconds") < 60


async def test_concurrent_and_closely_following_scrapes_cost_one_query(store, monkeypatch):
    monkeypatch.setattr("everloop.observability.metrics.FRESH_SECONDS", 60.0)
    page = Page(store, Meters())
    store.may.clear()
    asked = [asyncio.create_task(scraped(page)) for _ in range(50)]
    await asyncio.sleep(0.05)
    asked[0].cancel()  # a scraper that disconnects does not affect the others
    await asyncio.sleep(0)
    store.may.set()
    answers = await asyncio.gather(*asked[1:])
    assert all(value(found, "everloop_store_up") == 1 for found in answers)
    await scraped(page)
    assert store.looks == 1


async def test_a_cached_overview_expires_soon(store, monkeypatch):
    monkeypatch.setattr("everloop.observability.metrics.FRESH_SECONDS", 0.05)
    page = Page(store, Meters())
    assert value(await scraped(page), "everloop_messages_waiting") == 0
    await store.accept(message())
    await asyncio.sleep(0.1)
    assert value(await scraped(page), "everloop_messages_waiting") == 1
    assert FRESH_SECONDS <= 2.0


async def test_without_its_store_a_process_still_exposes_its_own_metrics(store):
    store.error = StoreError(f"{CANARY} is away")
    meters = Meters()
    meters.refused()
    text = (await Page(store, meters).text()).decode()
    assert CANARY not in text
    found = read(text)
    assert value(found, "everloop_store_up") == 0
    assert value(found, "everloop_stale_writes_total") == 1
    assert "everloop_messages_waiting" not in found


async def test_an_unresponsive_store_blocks_no_scraper_and_is_not_queried_again_meanwhile(store, monkeypatch):
    monkeypatch.setattr("everloop.observability.metrics.LOOK_SECONDS", 0.05)
    page = Page(store, Meters())
    store.may.clear()
    async with asyncio.timeout(20):
        for _ in range(3):
            assert value(await scraped(page), "everloop_store_up") == 0
    assert store.looks == 1
    store.may.set()
    monkeypatch.setattr("everloop.observability.metrics.LOOK_SECONDS", 5.0)
    assert value(await scraped(page), "everloop_store_up") == 1


def test_a_worker_without_metrics_loads_none_of_it():
    code = """
import sys
import everloop.cli.serve, everloop.runtime.owners, everloop.store.sqlite
sys.exit(any(name.startswith("everloop.observability.metrics") for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0


# ---------------------------------------------------------------------------------------------- the documentation


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(), re.M | re.S)


async def test_the_docs_list_exactly_the_metrics_with_type_and_labels(store):
    meters = Meters()
    meters.ran(*_turn())
    meters.requested("/healthz", 200)
    meters.channels.add("telegram", "taken")
    found = read((await Page(store, meters).text()).decode())
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", DOCS.read_text(), re.M)
    told = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert told == {
        name: (family.kind, frozenset(label for _, labels in family.samples for label, _ in labels) - {"le"})
        for name, family in found.items()
    }


def _turn() -> Any:
    claim = Claim("me", 1, "test:1", 1, "turn", 0, 1, 1)
    claim.message, claim.entries = InboundMessage("test", "me", "1", "hi"), [UserSaid("hi")]
    further = [CallEnded("c1", "exec", "x"), ModelAnswered("x", usage={"prompt_tokens": 1}), TurnEnded("answer")]
    return claim, [*claim.entries, *further], {"exec"}


async def test_prometheus_accepts_the_rules_and_scrape_settings_in_the_docs(store):
    names = set(read((await Page(store, Meters()).text()).decode()))
    files = [yaml.safe_load(text) for text in blocks("yaml")]
    scrapes = [job for file in files for job in file.get("scrape_configs", ())]
    rules = [rule for file in files for group in file.get("groups", ()) for rule in group["rules"]]
    assert scrapes
    assert all({"job_name", "static_configs"} <= job.keys() for job in scrapes)
    assert len(rules) >= 2
    for rule in rules:
        assert {"alert", "expr", "for", "annotations"} <= rule.keys()
        used = set(re.findall(r"\b(?:everloop|process)_\w+", rule["expr"]))
        assert used
        assert {re.sub(r"_(?:bucket|sum|count)$", "", name) if name not in names else name for name in used} <= names
