"""Messages and sessions on the page: retry, edit, fork, uploads, completion, archive, export; in a real browser."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route, expect

from .browser import Tab, chromium, link, tab
from .serving import Serving, call, serving
from .test_page_files import PIXEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
CODE = '```python\n# water <b>them</b>\nfor bed in garden:\n    bed.water(litres=3, why="dry")\n```\n'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def talked(server: Serving, one: Tab, text: str, answer: str) -> None:
    server.fake.reply(answer)
    await one.say(text)
    await expect(one.log.get_by_text(answer)).to_be_visible()
    await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()


async def test_a_message_is_retried_edited_and_forked_into_new_sessions(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await talked(server, one, "Name a rose", "Peace.")
        await talked(server, one, "Name a bean", "Borlotti.")
        first = one.page.url
        server.fake.reply("Runner.")
        await one.log.get_by_role("button", name="Retry").last.click()
        await expect(one.log.get_by_text("Runner.")).to_be_visible()
        await expect(one.log.get_by_text("Peace.")).to_be_visible()
        await expect(one.log.get_by_text("Borlotti.")).to_be_hidden()
        assert one.page.url != first
        assert [message["content"] for message in server.seen()[1:]] == ["Name a rose", "Peace.", "Name a bean"]
        await one.page.goto(first)
        await expect(one.log.get_by_text("Borlotti.")).to_be_visible()
        await one.log.get_by_role("button", name="Edit").last.click()
        field = one.page.get_by_label("Message", exact=True)
        await expect(field).to_have_value("Name a bean")
        await expect(one.log.get_by_text("Borlotti.")).to_be_hidden()
        await talked(server, one, "Name a pea", "Kelvedon.")
        assert [message["content"] for message in server.seen()[1:]] == ["Name a rose", "Peace.", "Name a pea"]
        await one.page.goto(first)
        await one.log.get_by_role("button", name="Fork from here").first.click()
        await expect(one.log.get_by_text("Borlotti.")).to_be_hidden()
        await expect(one.log.get_by_text("Peace.")).to_be_visible()
        await one.page.goto(first)
        await one.log.get_by_role("button", name="Edit").first.click()  # nothing stands before it
        await expect(field).to_have_value("Name a rose")
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        assert one.errors == []


DROP = """([data, type]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], type + ".png", { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const event = type === "paste" ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
    : new DragEvent("drop", { ...options, dataTransfer: transfer });
  document.querySelector("textarea").dispatchEvent(event);
}"""


async def test_files_are_dropped_pasted_and_chosen_and_pictures_are_drawn(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        attached = one.page.get_by_role("list", name="Attached").get_by_role("listitem")
        await expect(one.page.get_by_label("Message", exact=True)).to_be_visible()
        for kind in ("drop", "paste"):
            await one.page.evaluate(DROP, [base64.b64encode(PIXEL).decode(), kind])
            await expect(attached.filter(has_text=f"{kind}.png")).to_be_visible()
        (tmp_path / "notes.txt").write_text("roses")
        await one.page.get_by_label("Files to attach").set_input_files(tmp_path / "notes.txt")
        await expect(attached).to_have_count(3)
        await one.page.get_by_role("button", name="Remove paste.png").click()
        await expect(attached).to_have_count(2)
        uploads = sorted((server.owners.config.workspace / "uploads").iterdir())
        path = next(path for path in uploads if "drop" in path.name)
        server.fake.calls(call("read_file", path=f"uploads/{path.name}"))
        server.fake.reply("A pixel.")
        await one.say("What is it?")
        await expect(one.log.get_by_text("A pixel.")).to_be_visible()
        await expect(attached).to_have_count(0)
        await expect(one.log.get_by_label("You").locator("canvas[data-drawn]")).to_have_count(1)
        await expect(one.log.locator(".tool canvas[data-drawn]")).to_have_count(1)
        said = server.seen(0)[-1]["content"]
        assert [part["type"] for part in said] == ["image_url", "text"]
        assert "notes.txt" in said[1]["text"]
        await one.check("pictures")
        assert one.errors == []


async def test_output_is_shown_while_a_command_runs_and_a_failure_in_words(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        waits = "echo first; until [ -e go ]; do sleep 0.1; done; echo second"
        server.fake.calls(call("exec", id="a", command=waits))
        server.fake.calls(call("read_file", id="b", path="nothing.md"))
        server.fake.reply("It is **done**.")
        await one.say("go")
        card = one.log.locator(".tool").first
        await expect(card.locator(".output")).to_contain_text("first")
        await expect(card.locator(".status")).to_contain_text("running")
        (server.owners.config.workspace / "go").touch()
        await expect(card.locator(".status")).to_contain_text("done")
        failed = one.log.locator(".tool").nth(1)
        await expect(failed.locator(".failure pre")).to_have_text(re.compile("^nothing.md does not exist"))
        await expect(failed).not_to_contain_text('"status"')
        await one.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await one.page.get_by_role("button", name="Copy the answer").click()
        assert await one.page.evaluate("navigator.clipboard.readText()") == "It is **done**."
        await one.check("failed")
        assert one.errors == []


async def test_a_new_chat_offers_ways_to_begin(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await one.page.get_by_role("button", name="Remind me every Monday").click()
        message = one.page.get_by_label("Message", exact=True)
        await expect(message).to_have_value("Every Monday at 9, remind me to ")
        await expect(message).to_be_focused()
        assert server.fake.requests == []
        server.fake.reply("I will.")
        await message.press_sequentially("water the beans\n")
        await expect(one.log.get_by_text("remind me to water the beans")).to_be_visible()
        await expect(one.page.get_by_role("list", name="Ideas")).to_be_hidden()


async def test_a_message_is_shown_once_even_if_its_answer_arrives_before_its_acknowledgement(
    browser: Browser, tmp_path: Path
):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await one.page.clock.set_system_time(time.time() + 3600)  # a clock that is wrong

        async def late(route: Route) -> None:
            response = await route.fetch()
            await expect(one.log.get_by_text("Hello yourself.")).to_be_visible()
            await route.fulfill(response=response)

        await one.page.route("**/messages", late)
        server.fake.reply("Hello yourself.")
        async with one.page.expect_response("**/messages"):
            await one.say("Hello")
        await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()
        await expect(one.log.locator(".bubble")).to_have_count(1)
        await one.page.wait_for_timeout(300)
        assert await one.log.locator(".bubble").count() == 1


async def test_text_is_written_in_its_own_direction_and_nothing_moves_if_motion_is_reduced(
    browser: Browser, tmp_path: Path
):
    options = {"reduced_motion": "reduce"}
    async with serving(tmp_path) as server, tab(browser, await link(server), **options) as one:
        server.fake.reply("الحديقة **جميلة**", token_delay=0.4)
        await one.say("كيف حال الحديقة؟")
        dots = one.page.locator(".dots i").first
        assert await dots.evaluate("dot => getComputedStyle(dot).animationName") == "none"
        await expect(one.log.locator("strong")).to_be_visible()
        for text in (".bubble", ".from-agent .markdown > *"):
            direction = "node => getComputedStyle(node).direction"
            assert await one.log.locator(text).first.evaluate(direction) == "rtl"
        await one.page.evaluate("document.documentElement.dir = 'rtl'")
        sidebar, main = [await one.page.locator(name).bounding_box() for name in (".sidebar", "#main")]
        assert sidebar
        assert main
        assert sidebar["x"] >= main["x"] + main["width"]
        await one.check("right-to-left")


async def test_code_is_coloured_as_text_and_the_session_is_exported(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.reply(CODE)
        await one.say("Write it")
        code = one.log.locator("pre code")
        await expect(code.locator(".code-keyword")).to_have_text(["for", "in"])
        await expect(code.locator(".code-comment")).to_have_text("# water <b>them</b>")
        await expect(code.locator(".code-text")).to_have_text('"dry"')
        assert await code.inner_text() == CODE.split("```")[1].removeprefix("python\n").rstrip("\n")
        await one.check("code")
        await one.page.get_by_role("button", name="Session…").click()
        menu = one.page.get_by_role("dialog", name="This session")
        await expect(menu).to_be_visible()
        await one.check("session")
        async with one.page.expect_download() as started:
            await menu.get_by_role("button", name="Markdown").click()
        assert "bed.water(litres=3" in (await (await started.value).path()).read_text()
        await menu.get_by_label("Title").fill("The garden")
        await menu.get_by_role("button", name="Rename").click()
        await expect(one.page.get_by_role("heading", name="The garden")).to_be_visible()
        await one.page.get_by_role("button", name="Session…").click()
        one.page.once("dialog", lambda dialog: dialog.accept())
        await menu.get_by_role("button", name="Delete").click()
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        await expect(one.page.get_by_role("link", name=re.compile("garden"))).to_be_hidden()
        assert one.errors == []


async def test_files_and_commands_are_completed_and_a_named_picture_is_shown_to_the_model(
    browser: Browser, tmp_path: Path
):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        workspace = server.owners.config.workspace
        (workspace / "beds" / "old herbs").mkdir(parents=True)
        (workspace / "beds" / "roses.png").write_bytes(PIXEL)
        (workspace / "beds" / "old herbs" / "sage.md").write_text("dry")
        field = one.page.get_by_label("Message", exact=True)
        offers = one.page.get_by_role("listbox", name="Completions").get_by_role("option")
        await field.press_sequentially("Look at @brpng")
        await expect(offers).to_have_text([re.compile("beds/roses.png")])
        await one.check("completion")
        await field.press("Tab")
        await expect(field).to_have_value("Look at @beds/roses.png ")
        await expect(offers).to_have_count(0)
        await field.press_sequentially("and @")
        await expect(offers).not_to_have_count(0)
        await field.press("Escape")
        await expect(offers).to_have_count(0)
        await field.press_sequentially("sage")
        await expect(offers).to_have_count(1)
        await field.press("Enter")  # takes the completion, and sends nothing
        await expect(field).to_have_value('Look at @beds/roses.png and @"beds/old herbs/sage.md" ')
        server.fake.reply("A rose.")
        await field.press("Enter")
        await expect(one.log.get_by_text("A rose.")).to_be_visible()
        assert "data:image/png;base64," in str(server.seen()[-1]["content"])
        await field.press_sequentially("/st")
        await expect(offers).to_have_text([re.compile("/status"), re.compile("/stop")])
        await field.press("ArrowDown")
        await field.press("ArrowUp")
        await field.press("Enter")
        await expect(field).to_have_value("/status")
        await field.press("Enter")
        await expect(one.log.get_by_text("scripted", exact=False).last).to_be_visible()
        assert one.errors == []


async def test_an_archived_session_leaves_the_list_is_found_and_comes_back_with_a_message(
    browser: Browser, tmp_path: Path
):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await talked(server, one, "Name a rose", "Peace, of course.")
        listed = one.page.get_by_label("Sessions", exact=True).get_by_role("link", name=re.compile("Name a rose"))
        await expect(listed).to_be_visible()
        await one.page.get_by_role("button", name="Session…").click()
        await one.page.get_by_role("button", name="Archive", exact=True).click()
        await expect(listed).to_be_hidden()
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        search = one.page.get_by_label("Search all conversations")
        await search.fill("Peace")
        await one.page.get_by_role("link", name=re.compile("Peace, of")).click()
        await expect(one.log.get_by_text("Peace, of course.")).to_be_visible()
        await search.fill("")
        await expect(one.page.get_by_label("Sessions", exact=True).get_by_text("No sessions yet.")).to_be_visible()
        await expect(listed).to_be_hidden()
        await one.page.get_by_role("button", name="Session…").click()
        await expect(one.page.get_by_role("button", name="Remove from the archive")).to_be_visible()
        await expect(one.page.get_by_label("Title")).to_have_value("Name a rose")
        await one.check("archived")
        await one.page.get_by_role("button", name="Close").click()
        await talked(server, one, "And another", "Iceberg.")
        await expect(listed).to_be_visible()
        assert one.errors == []
