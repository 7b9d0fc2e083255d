"""The views of the page beside the chat, in a real browser with a real server behind it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from everloop.config import Price

from .browser import Tab, chromium, link, tab
from .serving import Serving, call, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
PRICES = (Price(model="scripted", input=10.0, output=20.0, cached=1.0),)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def talked(server: Serving, one: Tab) -> None:
    """A turn with a tool call."""
    server.fake.calls(call("exec", id="e", command="echo watered <b>roses</b>"))
    server.fake.reply("The roses are watered.")
    await one.say("Water the roses")
    await expect(one.log.get_by_text("The roses are watered.")).to_be_visible()
    await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()


async def test_the_timeline_shows_steps_and_the_request_that_was_sent(browser: Browser, tmp_path: Path):
    async with serving(tmp_path, prices=PRICES) as server, tab(browser, await link(server)) as one:
        await talked(server, one)
        assert not [address for address in one.requests if address.endswith("/web/timeline.js")]  # on demand
        await one.page.get_by_role("link", name="Timeline").click()
        steps = one.page.get_by_role("list", name="Steps").get_by_role("listitem")
        await expect(steps).to_have_count(5)
        await expect(steps.locator(".kind")).to_have_text(["Message", "Model", "Tool", "Model", "End"])
        await expect(one.page.get_by_text("Idle, cut out")).to_be_visible()
        await steps.nth(2).get_by_role("button").click()
        await expect(steps.nth(2)).to_contain_text("watered")
        await expect(steps.nth(2)).to_contain_text("echo watered <b>roses</b>")
        await steps.nth(1).get_by_role("button").click()
        await expect(steps.nth(1)).to_contain_text("First token")
        await expect(steps.nth(1)).to_contain_text("$0.")
        await steps.nth(1).get_by_role("button", name="Show the request").click()
        sent = steps.nth(1).locator("figure pre")
        await expect(sent).to_contain_text("Water the roses")
        shown = json.loads(await sent.inner_text())
        assert (shown["messages"], shown["model"]) == (server.seen(0), "scripted")
        await expect(steps.nth(1).get_by_text("as it is now")).to_be_visible()
        await one.check("timeline")
        await one.page.get_by_role("link", name="Back to the chat").click()
        await expect(one.log.get_by_text("The roses are watered.")).to_be_visible()
        assert one.errors == []
        assert not re.search(r"#link", one.page.url)
