"""The installed page: its manifest, its service worker, and what it shows without the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect

from .browser import chromium, link, tab
from .serving import serving

pytestmark = [pytest.mark.timeout(120)]
ACTIVE = "navigator.serviceWorker.ready.then(ready => ready.active.scriptURL)"
KEPT = "caches.open('everloop').then(cache => cache.keys()).then(keys => keys.map(one => new URL(one.url).pathname))"


# No other policy can be made, and not that of the page once more.
POLICIES = """["other", "everloop-worker"].map(name => {
  try { return trustedTypes.createPolicy(name, {createHTML: text => text}).name; } catch (error) { return error.name; }
})"""


async def test_the_installed_page_opens_without_the_server_and_reconnects_to_it(tmp_path: Path):
    async with (
        chromium() as browser,
        serving(tmp_path) as server,
        tab(browser, await link(server), service_workers="allow") as one,
    ):
        server.fake.reply("Roses.")
        await one.say("What grows?")
        await expect(one.log.get_by_text("Roses.")).to_be_visible()
        assert await one.page.evaluate(ACTIVE) == f"{server.url}/web/offline.js"
        kept = await one.page.evaluate(KEPT)
        assert {"/", "/web/app.js", "/web/style.css", "/web/vendor/preact.js"} <= set(kept)
        assert not [path for path in kept if path.startswith("/api")]
        session = await one.page.context.new_cdp_session(one.page)
        manifest = await session.send("Page.getAppManifest")
        assert (manifest["url"], manifest["errors"]) == (f"{server.url}/web/manifest.webmanifest", [])
        assert one.errors == []
        assert await one.page.evaluate(POLICIES) == ["TypeError", "TypeError"]
        await one.page.context.set_offline(True)
        await one.page.reload()
        await expect(one.page.get_by_text("appears when the server is back")).to_be_visible()
        await expect(one.page.get_by_label("Message", exact=True)).to_be_visible()
        await one.check("offline")
        await one.page.get_by_label("Message", exact=True).fill("And what else?")
        await one.page.context.set_offline(False)
        await expect(one.log.get_by_text("Roses.")).to_be_visible()
        await expect(one.page.get_by_text("appears when the server is back")).to_be_hidden()
        await expect(one.page.get_by_label("Message", exact=True)).to_have_value("And what else?")
