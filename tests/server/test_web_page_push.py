"""Notifications in a real browser: asked for by a click, encrypted by the server, shown by the service worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, expect

from everloop.channels.push import Subscriptions

from ..support.push_service import push_service
from .browser import Tab, chromium, link, tab
from .test_page_push import pushing

WORDS = [f"word{number} " for number in range(60)]
pytestmark = pytest.mark.timeout(120)

# A browser without network cannot subscribe at its maker's push service: this is the part of it that does so.
SUBSCRIBE = """given => {
  const plain = text => atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = text => Uint8Array.from(plain(text), one => one.charCodeAt(0)).buffer;
  const subscription = {
    endpoint: given.endpoint,
    getKey: name => bytes(given[name]),
    unsubscribe: async () => { sessionStorage.removeItem("subscribed"); return true; },
  };
  window.asked = 0;
  const request = Notification.requestPermission.bind(Notification);
  Notification.requestPermission = () => { window.asked += 1; return request(); };
  PushManager.prototype.getSubscription = async () => sessionStorage.getItem("subscribed") ? subscription : null;
  PushManager.prototype.subscribe = async options => {
    const key = btoa(String.fromCharCode(...new Uint8Array(options.applicationServerKey)));
    sessionStorage.setItem("subscribed", key.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, ""));
    return options.userVisibleOnly ? subscription : Promise.reject(new Error("not shown"));
  };
}"""
SHOWN = """async () => {
  const { getNotifications } = ServiceWorkerRegistration.prototype;
  const found = await getNotifications.call(await navigator.serviceWorker.ready);
  return found.map(one => ({title: one.title, body: one.body, tag: one.tag, session: one.data}));
}"""


async def deliver(context: BrowserContext, url: str, payload: str) -> None:
    """Hand the service worker what its browser has decrypted, with no page of it open."""
    page = await context.new_page()
    session = await context.new_cdp_session(page)
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note(event: dict[str, list[dict[str, str]]]) -> None:
        for one in event["registrations"]:
            if one["scopeURL"].startswith(url) and not found.done():
                found.set_result(one["registrationId"])

    session.on("ServiceWorker.workerRegistrationUpdated", note)
    await session.send("ServiceWorker.enable")
    registration = await asyncio.wait_for(found, 30)
    told = {"origin": url, "registrationId": registration, "data": payload}
    await session.send("ServiceWorker.deliverPushMessage", told)
    await page.close()


async def test_notifications_are_enabled_by_a_click_and_arrive_when_no_page_is_visible(tmp_path: Path):
    async with (
        chromium() as browser,
        push_service() as service,
        pushing(tmp_path, service) as server,
        tab(browser, "about:blank", service_workers="allow", permissions=["notifications"]) as first,
    ):
        context, phone = first.page.context, service.browser()
        await context.add_init_script(
            f"if (location.protocol !== 'about:') ({SUBSCRIBE})({json.dumps(phone.subscription)})"
        )
        one = Tab(await context.new_page())
        await one.page.goto(await link(server))
        await one.page.get_by_role("link", name="Channels").click()
        card = one.page.get_by_label("Notifications")
        await expect(card.get_by_text("nothing that was said")).to_be_visible()
        assert await one.page.evaluate("window.asked") == 0
        await card.get_by_role("button", name="Turn on").click()
        await expect(card.get_by_text("on", exact=True)).to_be_visible()
        assert await one.page.evaluate("window.asked") == 1
        service.key = await one.page.evaluate("sessionStorage.getItem('subscribed')")
        await one.check("notifications")
        server.fake.reply("seen", delay=0.2)
        await one.page.get_by_role("link", name="New chat").click()
        async with one.page.expect_response("**/api/push/visible", timeout=60_000):
            await one.page.evaluate(
                "document.dispatchEvent(new Event('visibilitychange'))"
            )  # told anew, on a slow machine
        await one.say("Is it seen?")
        await expect(one.log.get_by_text("seen", exact=True)).to_be_visible()
        assert phone.told == []
        server.fake.reply(" ".join(WORDS), tokens=WORDS, token_delay=1.0)
        streamed = server.fake.replies[-1]
        await one.say("Water the beans")
        await expect(one.page.get_by_role("button", name="Stop")).to_be_visible()
        await one.page.close()
        async with asyncio.timeout(30):
            while await Subscriptions(server.store).is_looking("me"):
                await asyncio.sleep(0.02)
        streamed.token_delay = 0.0  # the turn ends now
        (told,) = await phone.has(1)
        assert (told["title"], told["session"].partition(":")[0]) == ("A turn has ended", "web")
        await first.page.close()
        await deliver(context, server.url, json.dumps(told))
        await deliver(context, server.url, json.dumps(told))  # once more, as after a crash
        again = Tab(await context.new_page())
        await again.page.goto(f"{server.url}/#/channels")
        async with asyncio.timeout(30):
            while not (shown := await again.page.evaluate(SHOWN)):
                await asyncio.sleep(0.05)
        assert shown == [{name: told[name] for name in ("title", "body", "tag", "session")}]
        await again.page.get_by_role("button", name="Turn off").click()
        await expect(again.page.get_by_label("Notifications").get_by_text("off", exact=True)).to_be_visible()
        assert [*one.errors, *again.errors] == []
