"""The web page in Chromium: a session of 10,000 messages, and an answer of 8,000 words, by the time of the main thread.

`python benchmarks/page.py` prints one line for each measure, and fails if one is over its bound.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.async_api import CDPSession, expect
from tests.server.browser import Tab, chromium, link, tab
from tests.server.long_sessions import KEY, fill, message
from tests.server.serving import serving

MESSAGES, WORDS, LOADS = 10_000, 8_000, 5
FIRST_PAINT, LONGEST_TASK, STREAMING = 500.0, 100.0, 2_000.0  # milliseconds

# Notes when the newest message is painted.
OBSERVE = """newest => {
  window.painted = 0;
  new MutationObserver((_, observer) => {
    if (!document.querySelector(".log")?.textContent.includes(newest)) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => { window.painted = performance.now(); }));
  }).observe(document, {childList: true, subtree: true, characterData: true});
}"""
# Scrolls up a screen and a half at each frame, until the first message is there.
SCROLL = """first => new Promise((resolve, reject) => {
  const scroller = document.querySelector(".scroller");
  const give_up = performance.now() + 240000;
  const step = () => {
    if (document.querySelector(".log").textContent.includes(first)) resolve(document.querySelectorAll(".log *").length);
    else if (performance.now() > give_up) reject(new Error("the first message never came"));
    else { scroller.scrollTop -= 1200; requestAnimationFrame(step); }
  };
  step();
})"""


async def main_thread(session: CDPSession) -> float:
    """Milliseconds of CPU that the page's main thread has used."""
    metrics: dict[str, Any] = await session.send("Performance.getMetrics")
    return 1000 * float(next(one["value"] for one in metrics["metrics"] if one["name"] == "TaskDuration"))


def longest_task(trace: bytes) -> float:
    """Milliseconds of CPU of the longest task in the main thread of a page."""
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    threads = {
        (one["pid"], one["tid"])
        for one in events
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        one["tdur"] / 1000
        for one in events
        if one["name"].endswith("RunTask") and (one["pid"], one["tid"]) in threads and "tdur" in one
    ]
    return max(tasks)


async def long_session(one: Tab, url: str) -> tuple[list[float], float, int]:
    """Milliseconds to the paint of the newest message in some loads, of the longest task while scrolling, and how
    many nodes there are at the end."""
    browser = one.page.context.browser
    assert browser is not None
    newest = f"Message {MESSAGES - 1} of the day."
    await one.page.add_init_script(f"({OBSERVE})({newest!r})")
    painted = []
    for number in range(LOADS):
        await one.page.goto(f"{url}/?load={number}#/s/{KEY}")
        await one.page.wait_for_function("window.painted > 0", timeout=60_000)
        painted.append(float(await one.page.evaluate("window.painted")))
    await browser.start_tracing(page=one.page, categories=["toplevel"])
    nodes = int(await one.page.evaluate(SCROLL, "Message 1 of the day."))
    return painted, longest_task(await browser.stop_tracing()), nodes


async def measure() -> bool:
    text = "".join(f"{message(number)} " for number in range(WORDS // 16))
    words = text.split(" ")[:WORDS]
    tokens = [f"{word} " for word in words]
    with tempfile.TemporaryDirectory() as folder:
        async with chromium() as browser, serving(Path(folder)) as server, tab(browser, await link(server)) as one:
            await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
            session = await one.page.context.new_cdp_session(one.page)
            await session.send("Performance.enable", {"timeDomain": "threadTicks"})
            server.fake.reply("".join(tokens), tokens=tokens, token_delay=0.002)
            before = await main_thread(session)
            await one.say("go")
            await expect(one.log.get_by_label("Agent", exact=True)).to_have_count(1, timeout=300_000)
            streaming = await main_thread(session) - before
            await fill(server.store, MESSAGES)
            painted, longest, nodes = await long_session(one, server.url)
    shown = ", ".join(f"{one:.0f}" for one in painted)
    rows = [
        (f"{WORDS:,} streamed words, main thread", streaming, STREAMING),
        (f"{MESSAGES:,} messages, the newest painted, median of {shown}", statistics.median(painted), FIRST_PAINT),
        (f"{MESSAGES:,} messages scrolled through ({nodes:,} nodes at the end), longest task", longest, LONGEST_TASK),
    ]
    for name, value, bound in rows:
        print(f"{name}: {value:.0f} ms (at most {bound:.0f})")
    return all(value <= bound for _, value, bound in rows)


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(measure()) else 1)
