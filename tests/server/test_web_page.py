"""The web page in a real browser, with a real server behind it."""

from __future__ import annotations

import asyncio
import gzip
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from playwright.async_api import Browser, Route, expect

from everloop.config import Rule
from everloop.server import web_files
from everloop.testing.openai_server import FakeOpenAI

from .browser import Tab, chromium, link, tab
from .serving import Serving, call, process, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

ASK = (Rule(do="ask", tool="write_file", why="files are dear"),)
WORDS = [f"word{number} " for number in range(60)]
TEXT = "".join(WORDS).strip()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def texts(one: Tab) -> list[str]:
    """What the agent has said. Not the inner texts: a page in the background does not render all of it."""
    return [text.strip() for text in await one.log.locator(".markdown").all_text_contents()]


async def test_an_answer_streams_and_survives_a_reload_in_the_middle(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.reply(TEXT, tokens=WORDS, token_delay=0.05)
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        await one.say("Tell me **all**")
        await expect(one.log).to_contain_text("word3 ")
        await one.page.reload()
        await expect(one.log).to_contain_text("word6 ")
        await expect(one.log).to_contain_text("Tell me **all**")
        await expect(one.log).to_contain_text("word59")
        await expect(one.log.get_by_label("Agent", exact=True)).to_have_count(1)
        answer = one.log.get_by_label("Agent", exact=True).locator(".markdown")
        await expect(answer).to_have_text(TEXT)
        await expect(one.page.get_by_label("Sessions", exact=True).get_by_role("link", name="Tell me")).to_be_visible()
        assert "link=" not in one.page.url
        assert one.errors == []


async def test_a_killed_server_and_its_successor_show_every_word_once(browser: Browser, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    async with FakeOpenAI() as fake:
        fake.reply(TEXT, tokens=WORDS, token_delay=0.05)
        fake.reply(TEXT, tokens=WORDS, token_delay=0.02)
        async with process(fake, tmp_path, "--port", port) as (killed, url):
            await killed.stderr.readline()
            found = re.search(r"open (\S+)", (await killed.stderr.readline()).decode())
            assert found is not None
            async with tab(browser, found[1]) as one:
                await one.say("go")
                await expect(one.log).to_contain_text("word9 ")
                killed.send_signal(signal.SIGKILL)
                await killed.wait()
                await expect(one.page.get_by_text("The connection is lost")).to_be_visible()
                await expect(one.log).to_contain_text("word9 ")  # what was shown stays
                await one.shoot("lost")
                async with process(fake, tmp_path, "--port", port) as (_, again):
                    assert again == url
                    await expect(one.log.get_by_label("Agent", exact=True)).to_have_count(1)
                    assert await texts(one) == [TEXT]
                    await expect(one.page.get_by_text("The connection is lost")).to_be_hidden()
                    assert await one.log.get_by_label("You").count() == 1
                    assert re.fullmatch(r"[0-9]+-[0-9a-f]{8}\.[0-9]+\.[0-9a-f]{8}", one.resumed[0])


# Where words begin on the screen, from the left.
PLACES = """(element, words) => words.map((word) => {
  const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const at = node.data.indexOf(word);
    if (at < 0) continue;
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + 1);
    return range.getBoundingClientRect().left;
  }
  return null;
})"""


async def test_a_question_is_approved_or_denied_with_a_note(browser: Browser, tmp_path: Path):
    async with serving(tmp_path, policy=ASK) as server, tab(browser, await link(server)) as one:
        for name, answer in (("yes.txt", "Approve"), ("no.txt", "Deny")):
            server.fake.calls(call("write_file", id=f"c-{name}", path=name, content="# Garden\n\n- water\n- weed\n"))
            server.fake.reply("That is done.")
            await one.say(f"write {name}")
            question = one.page.get_by_role("group", name="The agent asks")
            await expect(question).to_contain_text(name)
            await expect(one.page).to_have_title("(1) Everloop")
            await expect(one.page.get_by_text("waiting for you")).to_be_visible()
            await one.shoot(f"question-{answer}".lower())
            await question.get_by_label("A note for the agent").fill("not on a Sunday")
            await question.get_by_role("button", name=answer).click()
            await expect(question).to_be_hidden()
            await expect(one.log.get_by_text("That is done.")).to_have_count(1 if answer == "Approve" else 2)
            await expect(one.page).to_have_title("Everloop")
        workspace = server.owners.config.workspace
        assert (workspace / "yes.txt").exists()
        assert not (workspace / "no.txt").exists()
        assert "not on a Sunday" in str(server.seen())
        await expect(one.log.get_by_text("Denied by user: not on a Sunday")).to_be_visible()
        await expect(one.log.locator(".tool .plus").get_by_text("- water")).to_have_count(2)


async def test_nothing_is_disguised_by_marks_of_direction_or_unseen_characters(browser: Browser, tmp_path: Path):
    rules = (Rule(do="ask", tool="write_file", why="dear \u202efiles\u200b"),)
    said = "Open [gnp\u202e\u2067](https://a.example) and then `x\u202e\u2067` as before. שלום عالم\n\nthe end"
    async with serving(tmp_path, policy=rules) as server, tab(browser, await link(server)) as one:
        server.fake.calls(
            call("exec", id="c1", command="echo \u202egnp; echo so\u200bup שלום می\u200cخواهم 👩\u200d🚀")
        )
        server.fake.calls(call("grep", id="c2", pattern="pa\u2060ss", path="b\u200f"))
        server.fake.calls(call("write_file", id="c3", path="a\u2066b.txt", content="one\u202ctwo\n"))
        server.fake.reply(said)
        await one.say("go")
        question = one.page.get_by_role("group", name="The agent asks")
        await expect(question).to_contain_text("a‹U+2066›b.txt")
        await expect(question).to_contain_text("dear ‹U+202E›files‹U+200B›)")
        await one.shoot("disguised-question")
        await question.get_by_role("button", name="Approve").click()
        await expect(one.log.get_by_text("the end")).to_be_visible()
        cards = one.log.locator(".tool")
        for card, words in (
            (0, "echo ‹U+202E›gnp; echo so‹U+200B›up שלום می\u200cخواهم 👩\u200d🚀"),
            (1, "pa‹U+2060›ss"),
            (1, "b‹U+200F›"),
            (2, "a‹U+2066›b.txt"),
            (2, "+ one‹U+202C›two"),
        ):
            await expect(cards.nth(card)).to_contain_text(words)
        shown = "".join(await cards.all_text_contents())
        assert not re.search("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069]", shown)
        # What follows a link and a piece of code in an answer is read from the left, and the words keep their order.
        places = await one.log.locator(".markdown p").first.evaluate(PLACES, ["Open", "and", "then", "as", "before"])
        assert places == sorted(places)
        await expect(one.log.locator(".markdown code").first).to_have_text("x‹U+202E›‹U+2067›")
        hebrew = await one.log.locator(".markdown p").first.evaluate(PLACES, ["ש", "ל", "ו", "ם"])
        assert hebrew == sorted(hebrew, reverse=True)
        await one.shoot("disguised")
        await one.page.locator("header").get_by_role("link", name="Timeline").click()
        steps = one.page.get_by_role("list", name="Steps").get_by_role("listitem")
        await steps.nth(2).get_by_role("button").first.click()
        await expect(steps.nth(2)).to_contain_text("echo ‹U+202E›gnp")
        assert one.errors == []


async def test_a_running_turn_is_steered_and_stopped(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.calls(call("exec", command="until [ -e go ]; do sleep 0.02; done"))
        server.fake.reply(TEXT, tokens=WORDS, token_delay=0.3)
        await one.say("work")
        await expect(one.log.locator(".tool")).to_contain_text("running")
        await one.say("look left")
        await expect(one.log.get_by_label("You, waiting")).to_contain_text("look left")
        (server.owners.config.workspace / "go").touch()
        await expect(one.log.get_by_label("You", exact=True)).to_have_count(2)
        assert "look left" in str(server.seen())
        await one.page.get_by_role("button", name="Stop").click()
        await expect(one.log.get_by_text("Stopped.")).to_be_visible()
        await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()


async def test_drafts_survive_a_reload_and_sessions_are_found(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.reply("Roses and **lavender**.")
        await one.say("What grows in the garden?")
        await expect(one.log.get_by_text("lavender")).to_be_visible()
        field = one.page.get_by_label("Message", exact=True)
        await field.fill("half a thou")
        await one.page.reload()
        await expect(field).to_have_value("half a thou")
        await one.page.get_by_role("link", name="New chat").click()
        await expect(field).to_have_value("")
        await one.page.get_by_label("Search all conversations").fill("lavender")
        await one.page.get_by_role("link", name=re.compile("Roses")).click()
        await expect(one.log.get_by_text("What grows")).to_be_visible()
        await expect(field).to_have_value("half a thou")
        await one.page.keyboard.press("Control+k")
        await expect(one.page.get_by_role("combobox", name="Go to a session or a view")).to_be_focused()
        await one.page.keyboard.type("new")
        await one.page.keyboard.press("Enter")
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        assert one.errors == []


async def test_text_typed_before_the_palette_opens_is_not_sent(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        asked, come = asyncio.Event(), asyncio.Event()

        async def late(route: Route) -> None:
            asked.set()
            await come.wait()
            await route.continue_()

        await one.page.route("**/palette.js", late)
        field = one.page.get_by_label("Message", exact=True)
        await field.fill("half a thou")
        await one.page.keyboard.press("Control+k")
        await asyncio.wait_for(asked.wait(), 30)
        await one.page.keyboard.type("new")
        await one.page.keyboard.press("Enter")
        come.set()
        await expect(one.page.get_by_role("combobox", name="Go to a session or a view")).to_be_focused()
        await one.page.keyboard.press("Escape")
        await expect(field).to_be_focused()
        await expect(field).to_have_value("half a thou")
        await expect(one.log.get_by_role("article")).to_have_count(0)


async def test_two_tabs_show_the_same_and_one_without_connection_catches_up(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.reply("first answer")
        await one.say("one")
        await expect(one.log.get_by_text("first answer")).to_be_visible()
        other = Tab(await one.page.context.new_page())
        await other.page.goto(one.page.url)
        await expect(other.log.get_by_text("first answer")).to_be_visible()
        await other.page.route("**/api/**", lambda route: route.abort())
        await other.page.reload()
        await expect(other.page.get_by_text("appears when the server is back")).to_be_visible()
        server.fake.reply(TEXT, tokens=WORDS, token_delay=0.01)
        await one.say("two")
        await expect(one.log.get_by_label("Agent", exact=True)).to_have_count(2)
        await other.page.unroute("**/api/**")
        await expect(other.log.get_by_label("Agent", exact=True)).to_have_count(2)
        shown = [await texts(each) for each in (one, other)]
        assert shown == [["first answer", TEXT]] * 2
        server.fake.reply("third answer")
        await other.say("three")
        await expect(one.log.get_by_text("third answer")).to_be_visible()


HOSTILE = (
    """\
<script>window.hacked = 1; fetch("CANARY/script")</script>
<img src="CANARY/img" onerror="window.hacked = 2; fetch('CANARY/onerror')">
<iframe src="CANARY/frame"></iframe><svg onload="window.hacked = 3"><style>@import "CANARY/css";</style>

[click](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>) [vb](vbscript:x)
[tab](java\tscript:window.hacked=6) <javascript:window.hacked=7> ![pic](CANARY/pic) ![x](javascript:window.hacked=8)

<a href="javascript:window.hacked=9">a</a> ![a](CANARY/a"onerror="window.hacked=10)

```html
<script>window.hacked = 11</script>
```

| a | b |
|---|---|
| <img src=x onerror=window.hacked=12> | `<script>` |

\u202egnp.exe\u202c snake_case_name """
    + "long" * 3_000
)


async def test_hostile_content_runs_nothing_and_sends_no_request(browser: Browser, tmp_path: Path):
    heard: list[str] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(request.path)
        return web.Response(headers={"Access-Control-Allow-Origin": "*"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hear)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    canary = f"http://127.0.0.1:{runner.addresses[0][1]}"
    hostile = HOSTILE.replace("CANARY", canary)
    pieces = [hostile[start : start + 7] for start in range(0, len(hostile), 7)]
    try:
        async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
            server.fake.reply(hostile, tokens=[*pieces[:150], "".join(pieces[150:])], token_delay=0.01)
            server.fake.replies[-1].calls = [call("exec", command=f"printf '%s' '{hostile[:300]}'")]
            server.fake.replies[-1].reasoning = hostile[:500]
            server.fake.reply(hostile, tokens=[*pieces[:150], "".join(pieces[150:])], token_delay=0.01)
            await one.say(hostile[:800])
            await expect(one.log.locator(".tool")).to_be_visible()
            await expect(one.log.get_by_label("Agent", exact=True)).to_have_count(2)
            await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()
            for name in ("click", "data", "tab", "vb"):
                for found in await one.log.get_by_text(name, exact=True).all():
                    await found.click(force=True)
            assert await one.page.evaluate("window.hacked") is None
            assert len(one.page.context.pages) == 1
            hrefs = await one.log.locator("a[href]").evaluate_all("all => all.map(one => one.protocol)")
            assert set(hrefs) <= {"http:", "https:", "mailto:"}
            assert await one.page.locator("#app script, #app iframe, #app style, .log img, .log svg").count() == 0
            own = [address for address in one.requests if not address.startswith((server.url, "data:"))]
            assert (own, heard) == ([], [])
            await expect(one.log.locator(".markdown").last).to_contain_text("snake_case_name")
            # The browser itself refuses HTML: the policy is in force.
            refused = "try { document.body.innerHTML = '<b>'; 'set' } catch (error) { error.name }"
            assert await one.page.evaluate(refused) == "TypeError"
            async with asyncio.timeout(20), aiohttp.ClientSession() as http:
                await http.get(f"{canary}/works")
            assert heard == ["/works"]
    finally:
        await runner.cleanup()


GARDEN = """\
## The garden

Three things to do, in this order:

1. **Water** the roses
2. Weed the `herb` bed
3. Plant [lavender](https://example.org/lavender)

```python
for bed in garden:
    bed.water(litres=3)
```

| bed | litres |
|---|---:|
| roses | 12 |
| herbs | 4 |

> Early in the morning is best.

- [x] roses
- [ ] herbs"""


async def filled(server: Serving, one: Tab) -> None:
    """A conversation with every kind of content."""
    server.fake.reply("I look at the beds first.")
    server.fake.replies[-1].calls = [
        call("exec", id="e", command="ls -l && echo done"),
        call("edit_file", id="f", path="garden.md", old_text="- roses\n- weeds\n", new_text="- roses\n- lavender\n"),
    ]
    server.fake.replies[-1].reasoning = "The person wants the garden in order."
    server.fake.reply(GARDEN)
    (server.owners.config.workspace / "garden.md").write_text("- roses\n- weeds\n")
    await one.say("What needs doing in the garden?")
    await expect(one.log.get_by_text("Early in the morning")).to_be_visible()
    await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()
    diff = one.log.locator(".diff")
    await expect(diff.locator("pre .minus")).to_have_text("- - weeds\n")
    await expect(diff.locator("pre .plus")).to_have_text("+ - lavender\n")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_has_no_accessibility_violations(browser: Browser, tmp_path: Path, theme: str):
    async with serving(tmp_path, policy=ASK) as server, tab(browser, server.url, color_scheme=theme) as one:
        await expect(one.page.get_by_label("Token")).to_be_visible()
        assert await one.axe() == []
        await one.shoot(f"login-{theme}")
        await one.page.goto(await link(server))
        await one.page.reload()
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        await one.shoot(f"empty-{theme}")
        assert await one.axe() == []
        await filled(server, one)
        await one.shoot(f"chat-{theme}")
        assert await one.axe() == []
        server.fake.calls(call("write_file", path="plan.md", content="# Plan\n"))
        await one.say("Write the plan")
        await expect(one.page.get_by_role("group", name="The agent asks")).to_be_visible()
        await expect(one.page.get_by_role("button", name="Approve")).to_be_in_viewport()  # the view follows
        assert await one.axe() == []
        await one.shoot(f"question-{theme}")
        await one.page.keyboard.press("Control+k")
        await expect(one.page.get_by_role("combobox", name="Go to a session or a view")).to_be_focused()
        assert await one.axe() == []
        await one.shoot(f"palette-{theme}")
        await one.page.keyboard.press("Escape")
        ground = "getComputedStyle(document.body).backgroundColor"
        before = await one.page.evaluate(ground)
        await one.page.get_by_role("button", name="Light or dark").click()
        after = await one.page.evaluate(ground)
        assert after != before
        assert await one.axe() == []
        await one.page.reload()
        await expect(one.page.get_by_role("group", name="The agent asks")).to_be_visible()
        assert await one.page.evaluate(ground) == after


async def test_the_page_fits_a_phone(browser: Browser, tmp_path: Path):
    phone = {"viewport": {"width": 320, "height": 640}, "has_touch": True, "is_mobile": True}
    async with serving(tmp_path) as server, tab(browser, await link(server), **phone) as one:
        await filled(server, one)
        assert await one.page.evaluate("document.documentElement.scrollWidth") == 320
        assert await one.axe() == []
        await one.shoot("phone")
        await one.page.get_by_role("button", name="Sessions").click()
        await expect(one.page.get_by_role("link", name="What needs doing")).to_be_visible()
        await one.shoot("phone-sessions")
        assert await one.axe() == []
        assert one.errors == []


async def test_the_first_load_is_small_and_all_of_it_is_listed(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, server.url) as one:
        await expect(one.page.get_by_label("Token")).to_be_visible()
        sizes = await one.page.evaluate(
            "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
            ".map(one => one.encodedBodySize)"
        )
        assert len(sizes) >= 15
        assert 20_000 < sum(sizes) <= 60_000
        assert one.errors == []
        await expect(one.page.locator(".starting")).to_have_count(0)
        await one.page.route("**/app.js", lambda route: route.abort())  # until the scripts have come
        await one.page.reload()
        await expect(one.page.get_by_text("Everloop", exact=True)).to_be_visible()
    unpacked = [gzip.decompress(file.gzipped) == file.body for file in web_files.files().values()]
    assert all(unpacked)
