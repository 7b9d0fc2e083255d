"""A real browser with the page in it, for the tests of its views."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Request, async_playwright, expect

from .serving import Serving

AXE = Path(__file__).parent / "axe" / "axe.min.js"
SHOTS = os.environ.get("EVERLOOP_SCREENSHOTS")  # a folder to put pictures of the page into
expect.set_options(timeout=30_000)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs chromium (scripts/system.sh dev)")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        await running.close()


class Tab:
    """A logged-in page, with a record of its requests and console errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.resumed: list[str] = []  # ids from which the page resumed
        self.errors: list[str] = []
        page.on("request", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def _note(self, request: Request) -> None:
        self.requests.append(request.url)
        if last_id := request.headers.get("last-event-id"):
            self.resumed.append(last_id)

    async def say(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).fill(text)
        await self.page.keyboard.press("Enter")

    @property
    def log(self) -> Any:
        return self.page.get_by_role("log")

    async def go(self, hash: str) -> None:
        """Change the address within the page."""
        await self.page.evaluate("hash => { location.hash = hash; }", hash)

    async def shoot(self, name: str) -> None:
        if SHOTS:
            await self.page.wait_for_timeout(300)
            await self.page.screenshot(path=f"{SHOTS}/{name}.png")

    async def axe(self) -> list[str]:
        """The violations of accessibility on the screen."""
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [f"{one['id']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]

    async def check(self, name: str) -> None:
        """No violations in either theme, a picture of both, and no wider than the screen."""
        for theme in ("dark", "light"):
            await self.page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
            found = await self.axe()
            assert not found, f"{name} in {theme}: {found}"
            await self.shoot(f"{name}-{theme}")
        size = self.page.viewport_size
        assert size is not None
        for width in (320, size["width"]):
            await self.page.set_viewport_size({"width": width, "height": size["height"]})
            wide = await self.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide at {width}"
            if width == 320:
                await self.shoot(f"{name}-phone")


@contextlib.asynccontextmanager
async def tab(browser: Browser, address: str, **options: Any) -> AsyncIterator[Tab]:
    usual = {"viewport": {"width": 1200, "height": 800}, "service_workers": "block"}
    context = await browser.new_context(**{**usual, **options})
    try:
        made = Tab(await context.new_page())
        await made.page.goto(address)
        yield made
    finally:
        await context.close()


async def link(server: Serving) -> str:
    return f"{server.url}/#link={await server.server.access.new_link()}"
