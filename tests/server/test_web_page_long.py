"""Long sessions and long answers on the page: what is in the document, and how often it is drawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route, expect

from .browser import chromium, link, tab
from .long_sessions import KEY, fill
from .serving import serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
MESSAGES = 1_000
MAX_MESSAGES = 160  # messages in the document: a few screens of them
# Counts how often the text of the running answer is changed.
COUNT = """() => {
  window.drawn = 0;
  new MutationObserver(changes => {
    const elements = changes.map(({target}) => target.closest ? target : target.parentElement);
    window.drawn += elements.filter(element => element?.closest(".is-live .markdown")).length;
  }).observe(document, {childList: true, subtree: true, characterData: true});
}"""
UP = "one => new Promise(done => { one.scrollTop -= 1000; requestAnimationFrame(done); })"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def test_only_the_part_of_a_long_session_near_the_screen_is_in_the_document(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await fill(server.store, MESSAGES)
        await one.go(f"#/s/{KEY}")
        messages = one.log.locator(".message")
        await expect(one.log.get_by_text(f"Message {MESSAGES - 1} of")).to_be_in_viewport()
        assert await messages.count() <= MAX_MESSAGES
        await one.shoot("long")
        seen = 0
        scroller = one.page.locator(".scroller")
        for number in (801, 501, 1):
            # Each of these is scrolled to from the one before it, over what must be loaded meanwhile.
            text = one.log.get_by_text(f"Message {number} of the day.", exact=True)
            while not await text.count():
                await scroller.evaluate(UP)
            await text.scroll_into_view_if_needed()
            await expect(text).to_be_in_viewport()
            seen = max(seen, await messages.count())
        assert seen <= MAX_MESSAGES
        await expect(one.log.get_by_text("Question 0", exact=True).first).to_be_attached()
        await scroller.evaluate("one => { one.scrollTop = one.scrollHeight; }")
        await expect(one.log.get_by_text(f"Message {MESSAGES - 1} of")).to_be_in_viewport()
        assert one.errors == []


async def test_the_visible_part_stays_in_place_while_earlier_messages_load(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await fill(server.store, 600)
        may_load = asyncio.Event()

        async def hold(route: Route) -> None:
            await may_load.wait()
            await route.continue_()

        await one.page.route("**/log?*", hold)
        await one.go(f"#/s/{KEY}")
        await expect(one.log.get_by_text("Message 599 of")).to_be_in_viewport()
        top = one.log.locator(".message").first
        while await one.page.locator(".scroller").evaluate("one => one.scrollTop"):
            await one.page.locator(".scroller").evaluate(UP)
        await expect(top).to_be_in_viewport()
        words = await top.inner_text()
        place = "one => one.getBoundingClientRect().top"
        before = await top.evaluate(place)
        may_load.set()
        await expect(top).not_to_have_text(words)  # an earlier one is in the document
        same = one.log.locator(".message", has_text=words.splitlines()[0]).first
        await expect(same).to_be_in_viewport()
        assert abs(await same.evaluate(place) - before) < 3


async def test_an_answer_in_many_pieces_is_drawn_in_few_steps(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        tokens = [f"word{number} " for number in range(1_500)]
        server.fake.reply("".join(tokens), tokens=tokens, token_delay=0.001)
        await expect(one.page.get_by_label("Message", exact=True)).to_be_visible()
        await one.page.evaluate(COUNT)
        await one.say("go")
        answer = one.log.get_by_label("Agent", exact=True)
        await expect(answer).to_contain_text("word1499")
        drawn = await one.page.evaluate("window.drawn")
        assert 0 < drawn <= len(tokens) / 3
        assert (await answer.locator(".markdown").inner_text()).split() == [token.strip() for token in tokens]
